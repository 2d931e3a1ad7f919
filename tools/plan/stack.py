"""Describe how well a training stack uses a device: ours, and those whose published runs
`python -m lab.bench plan` compares with our plans.

A row of `stacks.toml` has one number for each device, the share of the peak that wide matmuls
reach, and lists the stack's differences from ours. The traced step is ours for every stack.
"""

import math
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from configs.schema import Config
from tools.plan.device import Device
from tools.plan.routing import Chosen
from tools.plan.rows import stack_row
from tools.plan.step import IN_BLOCKS, Op, Where

# Time of a matmul of the blocks in bfloat16 over that in float8, casts included: by the scales.
FLOAT8 = {"none": 1.0, "tensorwise": 1.6, "rowwise": 1.3}
# Rate of other kernels of attention over that of the device's row: with a bias that grows with the
# distance (ALiBi), and matmuls with a softmax between them that is written to memory.
SLOWER = {"flash": 1.0, "alibi": 0.6, "unfused": 0.5}
COPIES = ("aten.cat", "aten._to_copy")
# Share of tensor parallelism's collectives that runs behind matmuls, inside a host, where they are
# cut into pieces for that.
HIDDEN_TENSOR = 0.85
# Share of the experts' exchange that runs behind another microbatch where a stack does that: the
# published runs of Qwen3 235B with and without, 17.6 and 19.7 s a step.
HIDDEN_EXCHANGE = 0.3

# What published runs lost with each doubling of their GPUs, the least and the most: NeMo's Llama 70B
# and LLM Foundry's MPT 1B, from 128 GPUs on (lab/bench/published.toml).
SCALING_FROM = 128
LOST_BY_DOUBLING = (0.0, 0.05)


def scaling_loss(gpus: int) -> tuple[float, float]:
    """Return the share of the speed that is lost between SCALING_FROM and `gpus` GPUs: least, most."""
    doublings = max(0.0, math.log2(gpus / SCALING_FROM))
    least, most = (1 - (1 - lost) ** doublings for lost in LOST_BY_DOUBLING)
    return least, most


class Software(BaseModel):
    """Software: a row of tools/plan/stacks.toml, which explains the fields."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    gemm: dict[str, float] = Field(default_factory=dict)
    attention: Literal["flash", "fast", "alibi", "unfused"] = "flash"
    gemm_traffic: float = Field(0.0, ge=0)
    hidden_tensor: float = Field(0.0, ge=0, le=1)
    hidden_exchange: float = Field(0.0, ge=0, le=1)
    hidden_dispatch: bool = False
    once_per_host: bool = False
    neighbouring_experts: bool = False
    fused_kernels: bool = False
    fused_accumulation: bool = False
    early_gathers: bool = False
    float8: float = Field(1.0, ge=1)
    source: str = ""

    def of_run(self, cfg: Config) -> "Software":
        """Return this stack as changed by the options of a run."""
        changes = {"float8": FLOAT8[cfg.training.float8]}
        if cfg.parallelism.async_tensor_parallel:
            changes["hidden_tensor"] = HIDDEN_TENSOR
        return self.model_copy(update=changes)

    def on(self, device: Device, name: str) -> Device:
        """Return the device with the efficiencies that this stack reaches on it. name: of its row."""
        changes = {}
        if name in self.gemm:
            changes["matmul_efficiency"] = self.gemm[name]
        rate = device.attention_efficiency * SLOWER.get(self.attention, 1.0)
        if self.attention == "fast" and device.fast_attention_efficiency:
            rate = device.fast_attention_efficiency
        changes["attention_efficiency"] = rate
        return device.model_copy(update=changes)

    def leaves_out(self, op: Op, where: Where) -> bool:
        """Return True if this stack has no such operator: it adds a weight's gradient inside of its
        matmul; and its kernels read in place what a collective or a cast would copy."""
        if self.fused_accumulation and where.phase in IN_BLOCKS and "aten.add_" in op.name:
            return True
        is_copy = op.fused == op.traffic and op.name.startswith(COPIES)
        return self.fused_kernels and is_copy

    def sent(self, ranks: int, hosts: int, chosen: Chosen) -> tuple[float, float]:
        """Return the part of an exchange's rows that is sent inside the host, and the part for
        other hosts. A token is sent once to a rank, and once to a host: its experts are on fewer of
        them than there are experts, if they are chosen at random."""
        if not self.once_per_host or chosen.experts_per_token < 2:
            return 1.0, 1.0
        places = chosen.places_of_consecutive if self.neighbouring_experts else chosen.places
        return places(ranks), places(hosts)


def load_stack(name: str) -> Software:
    """Load a row of the table. Raises InputError."""
    return Software(**stack_row(name))


OURS = load_stack("plumbline")
