"""Lists the options that only several ranks need: those of a mesh, and those that have a meaning on
some meshes alone.

`configs/check.py` refuses such an option where no rank needs it, and a tool that reruns a
configuration in one process (tools.parity, tools.replay, lab.simulate) drops it. Both read the
table below. It imports no torch.
"""

import json
from dataclasses import dataclass

from configs.schema import Config


@dataclass(frozen=True)
class OfRanks:
    """An option that has its default value in one process."""

    degrees: tuple[str, ...]  # of [parallelism]: it has an effect where one of them is above 1
    refused: bool = False  # where it has none


DEGREES = (
    "data_parallel_shard",
    "data_parallel_replicate",
    "context_parallel",
    "tensor_parallel",
    "expert_parallel",
    "pipeline_parallel",
)
SHARD = ("data_parallel_shard",)
OF_RANKS = {
    "parallelism.context_parallel_method": OfRanks(("context_parallel",), refused=True),
    "parallelism.pipeline_schedule": OfRanks(("pipeline_parallel",), refused=True),
    "parallelism.pipeline_stages_per_rank": OfRanks(("pipeline_parallel",), refused=True),
    "parallelism.pipeline_layers": OfRanks(("pipeline_parallel",), refused=True),
    "parallelism.expert_exchange": OfRanks(("expert_parallel",), refused=True),
    "parallelism.expert_chunks": OfRanks(("expert_parallel",), refused=True),
    "activation_checkpoint.gather_again": OfRanks(("tensor_parallel",), refused=True),
    "debug.replica_check_interval": OfRanks(
        ("data_parallel_replicate", "tensor_parallel"), refused=True
    ),
    "debug.leave_out_odd_replica": OfRanks(("data_parallel_replicate",), refused=True),
    "parallelism.async_tensor_parallel": OfRanks(("tensor_parallel",)),
    "parallelism.tensor_parallel_across_hosts": OfRanks(("tensor_parallel",)),
    "parallelism.reshard_after_forward": OfRanks(SHARD),
    "parallelism.reshard_after_backward": OfRanks(SHARD),
    "parallelism.keep_gathered": OfRanks(SHARD),
    "parallelism.accumulate_gradients": OfRanks(SHARD),
    "parallelism.cpu_offload": OfRanks(SHARD),
}


def default(option: str) -> object:
    """Return the value of "table.key" in a configuration that does not set it."""
    table, _, key = option.partition(".")
    return Config.model_fields[table].annotation.model_fields[key].default


def written(value: object) -> str:
    """Format an option's value for a command line."""
    return value if isinstance(value, str) else json.dumps(value)


def one_process() -> dict[str, str]:
    """Return the options, as on a command line, with which one process computes what a mesh
    computes."""
    options = [f"parallelism.{degree}" for degree in DEGREES]
    return {option: written(default(option)) for option in [*options, *OF_RANKS]}
