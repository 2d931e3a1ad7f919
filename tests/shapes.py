"""Shapes of models with distinct odd sizes, so that no transposed or swapped dimension can hide; and a model beside
transformers' own, with the same weights."""

import torch
from torch import nn

from checkpoint.hf import config_json, name_pairs
from models import llama

ROPE_31 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_seq_len": 16}
BASE = {"dim": 42, "n_layers": 3, "n_heads": 6, "n_kv_heads": 6, "head_dim": 14, "hidden_dim": 53, "vocab_size": 97,
        "rope_theta": 10000.0, "rope_scaling": None, "norm_eps": 1e-5, "max_seq_len": 64, "tied_embeddings": False}  # fmt: skip
SHAPES = {
    "llama2": BASE,
    "llama3": BASE | {"n_kv_heads": 2, "rope_theta": 500000.0},
    "llama3.1": BASE | {"n_kv_heads": 3, "rope_theta": 500000.0, "rope_scaling": ROPE_31},
    "llama3.2": BASE | {"n_kv_heads": 2, "rope_theta": 500000.0, "rope_scaling": ROPE_31 | {"factor": 32.0}, "tied_embeddings": True},
}


def random_pair(args: dict) -> tuple[nn.Module, nn.Module, list[tuple[str, str]]]:
    """LlamaForCausalLM and our model with the same random weights, and their names in ours and in theirs."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    theirs, ours = LlamaForCausalLM(LlamaConfig(**config_json(args))), llama.build(args)
    with torch.no_grad():
        for p in theirs.parameters():
            p.normal_(0, 0.2)
    pairs = name_pairs(args, llama.HF_NAMES)
    ours.load_state_dict({mine: theirs.state_dict()[hf] for mine, hf in pairs})
    return theirs, ours, pairs
