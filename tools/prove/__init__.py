"""Prove a configuration before it gets GPUs: options, plan, types and numbers."""
