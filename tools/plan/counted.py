"""Compare the FLOPs that a plan counts in the step with those that the family derives from its sizes,
by which a run reports its MFU."""

from collections import defaultdict
from typing import Any

import torch

import train
from models.cores import STATE, cores_in, of_kind
from models.delta_net import GatedDeltaCore
from tools.plan.plan import Plan
from tools.plan.routing import BALANCED

LARGEST = 0.01  # relative difference without a warning


def warning(plan: Plan) -> list[str]:
    """Return a line where the two differ: the MFU of a family is wrong if it computes something else
    than its `flops_per_token` says. With adapters, or where the plan shows the fullest rank, a
    difference is right."""
    family, args = train.architecture(plan.cfg)
    derived, counted, _ = plan.flops()
    off = counted / derived - 1
    if abs(off) <= LARGEST or plan.cfg.lora.rank or plan.inputs.routing != BALANCED:
        return []
    differ = (
        f"{counted:.4g} FLOPs per token are counted, {off:+.1%} against what flops_per_token of "
        f"models/{family.name}.py derives"
    )
    if has_own_states(family, args):
        return [
            f"Note             {differ}: of a state of your own the plan counts matmuls alone; `python "
            "-m tools.parity CONFIG --properties` compares all (declarations)"
        ]
    return [f"Warning          {differ}: a run's MFU is wrong by as much{odd_blocks(plan)}"]


def has_own_states(family: Any, args: Any) -> bool:
    """Return whether a layer has a state whose products are no operator that the plan knows."""
    with torch.device("meta"):
        states = of_kind(cores_in(family.build(args)), STATE)
    return not all(isinstance(core, GatedDeltaCore) for core in states)


def odd_blocks(plan: Plan) -> str:
    """Name the blocks whose matmuls are not the 6 FLOPs of each of their weights and each token;
    where all are, attention or the output projection is left. "" for pipelines and experts."""
    if plan.pipeline or plan.step.moe_layers:
        return ""
    seen: dict[int, int] = defaultdict(int)
    for where, times, op in plan.step.ops():
        if not op.attention_flops:
            seen[where.block] += times * (op.matmul_flops - op.recomputed)
    per_token = plan.inputs.gpus / plan.tokens_per_step
    odd = []
    for block in range(plan.step.layers):
        wanted = 6 * plan.step.parameters[block].elements
        if abs(seen[block] * per_token / wanted - 1) > LARGEST:
            odd.append(f"layers.{block}")
    if not odd:
        return "; the matmuls of its blocks are as their weights say: see attention and the output"
    shown = ", ".join(odd[:4]) + ", ..." * (len(odd) > 4)
    return f"; the matmuls of {shown} are not those of their weights"
