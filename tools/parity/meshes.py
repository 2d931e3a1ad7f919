"""Meshes by name, as in `fsdp2xtp2`, and what a configuration becomes on each of them."""

import math
import re
from dataclasses import dataclass

from configs import ranks
from configs.load import ConfigError, as_given, load_config
from configs.schema import Config, InputError
from tools.overrides import with_options

PART = r"hsdp(\d+)x(\d+)|(fsdp|ddp|tp|pp|cp|ep)(\d+)"
# Tried unless the person names meshes; those with more than --ranks are left out, and so are those
# that the configuration's rules refuse.
USUAL = (
    "fsdp2 ddp2 tp2 pp2 cp2 ep2 fsdp3 fsdp4 hsdp2x2 tp4 cp4 fsdp2xtp2 fsdp2xcp2 pp2xfsdp2 pp2xtp2 "
    "pp2xcp2 cp2xtp2 ep2xfsdp2 ep2xpp2 hsdp2x2xtp2 pp2xfsdp2xtp2 fsdp2xcp2xtp2"
).split()
# The plain model: one process, one microbatch, nothing recomputed.
PLAIN = ranks.one_process() | {"activation_checkpoint.mode": "none"}
# Of these a mesh keeps nothing of what the configuration says. The ranks are of one host.
NOT_KEPT = {
    "parallelism.pipeline_layers",
    "parallelism.expert_exchange",
    "parallelism.async_tensor_parallel",
    "parallelism.tensor_parallel_across_hosts",
    "parallelism.cpu_offload",
}
SMALLER = " (--model.flavor=debug, or --model.n_layers=2 and a smaller --model.dim)"
DIMENSION_OF = {
    "data_parallel_shard": "fsdp",
    "data_parallel_replicate": "ddp",
    "tensor_parallel": "tp",
    "pipeline_parallel": "pp",
    "context_parallel": "cp",
    "expert_parallel": "ep",
}


@dataclass(frozen=True)
class MeshOfRanks:
    """Mesh by the size of each of its dimensions, among them "fsdp" (dp_shard) and "ddp"
    (dp_replicate)."""

    name: str
    sizes: dict[str, int]

    @property
    def ranks(self) -> int:
        """Return the number of ranks. Expert parallelism adds none: it reuses the data-parallel
        ones."""
        counted = {name: size for name, size in self.sizes.items() if name != "ep"}
        return max(math.prod(counted.values()), self.sizes.get("ep", 1))

    @property
    def data_parallel(self) -> int:
        others = [self.sizes.get(name, 1) for name in ("tp", "pp", "cp")]
        return self.ranks // math.prod(others)

    def options(self, given: Config) -> dict[str, str]:
        """Return the options of this mesh, including those kept from the configuration."""
        options = dict(PLAIN)
        options["activation_checkpoint.mode"] = given.activation_checkpoint.mode
        for option, row in ranks.OF_RANKS.items():
            dimensions = [DIMENSION_OF[degree] for degree in row.degrees]
            if option not in NOT_KEPT and any(name in self.sizes for name in dimensions):
                options[option] = ranks.written(value_of(given, option))
        for degree, dimension in DIMENSION_OF.items():
            if dimension in self.sizes and dimension != "fsdp":  # which has the ranks that are left
                options[f"parallelism.{degree}"] = str(self.sizes[dimension])
        return options


def value_of(cfg: Config, option: str) -> object:
    """Return the value of "table.key"."""
    table, _, key = option.partition(".")
    return getattr(getattr(cfg, table), key)


def refuse_larger(cfg: Config, most: int, why: str, smaller: str = SMALLER) -> None:
    """Raise InputError for a model with more parameters than this. smaller: how to get one."""
    import train  # here, because it imports torch

    family, args = train.architecture(cfg)
    size = family.parameters(args)
    if size > most:
        raise InputError(
            f"the model has {size:,} parameters, and {why}: {most:,} are the most{smaller}"
        )


def dropped(given: Config) -> list[str]:
    """List the options of a configuration that no mesh of one host computes with, one line each."""
    lines = []
    for option in sorted(NOT_KEPT):
        value = value_of(given, option)
        if value != ranks.default(option):
            taken = ranks.written(ranks.default(option))
            lines.append(f"{option} = {ranks.written(value)} is left out: taken as {taken}")
    return lines


def parse(name: str, option: str = "--meshes") -> MeshOfRanks:
    """Parse the name of a mesh. Raises InputError for an unknown one. option: its source, for the
    message."""
    if not re.fullmatch(f"({PART})(x({PART}))*", name):
        raise InputError(
            f"{option} {name}: not a mesh; a mesh is one or several of fsdp2, ddp2, hsdp2x2, "
            "tp2, pp2, cp2 and ep2, joined by x, as in fsdp2xtp2"
        )
    sizes: dict[str, int] = {}
    for replicate, shard, dimension, size in re.findall(PART, name):
        found = {dimension: size} if dimension else {"ddp": replicate, "fsdp": shard}
        for key, number in found.items():
            if key in sizes or int(number) < 2:
                raise InputError(f"{option} {name}: {key}{number} is 1 rank, or is given twice")
            sizes[key] = int(number)
    return MeshOfRanks(name, sizes)


def small(argv: list[str], meshes: list[MeshOfRanks], seq_len: int) -> dict[str, str]:
    """Return a batch and sequence length that all of these meshes can split, unless argv sets them."""
    copies = math.lcm(*(mesh.data_parallel for mesh in meshes))
    unit = math.lcm(*(2 * mesh.sizes.get("cp", 1) * mesh.sizes.get("tp", 1) for mesh in meshes))
    stages = max((mesh.sizes.get("pp", 1) for mesh in meshes), default=1)
    _, given = as_given(argv)
    chosen = {
        "training.seq_len": str(-(-seq_len // unit) * unit),
        "training.global_batch_size": str(4 * stages * copies),
    }
    if "training.global_batch_size" not in given:
        chosen["training.local_batch_size"] = "1"  # a preset's may be larger; `on_mesh` sets it
    return {option: value for option, value in chosen.items() if option not in given}


def on_mesh(argv: list[str], mesh: MeshOfRanks, given: Config) -> list[str]:
    """Return the command line of this configuration on a mesh, with several microbatches. Raises
    ConfigError for one that the rules refuse."""
    argv = with_options(argv, mesh.options(given))
    whole = load_config(argv, mesh.ranks, mesh.ranks)
    local = whole.training.global_batch_size // mesh.data_parallel
    several = local if "pp" in mesh.sizes else 2
    if local % several == 0:
        argv = with_options(argv, {"training.local_batch_size": str(local // several)})
    load_config(argv, mesh.ranks, mesh.ranks)
    return argv


def those_that_fit(
    argv: list[str], given: Config, names: list[str], most_ranks: int
) -> tuple[list[MeshOfRanks], dict[str, str]]:
    """Return the meshes to try, and the reasons against the others. Raises InputError for an
    unknown name, and if no mesh is left."""
    tried = [parse(name) for name in names or USUAL]
    refused: dict[str, str] = {}
    fitting = []
    for mesh in tried:
        if not names and mesh.ranks > most_ranks:
            continue
        try:
            options = with_options(argv, small(argv, [mesh], 16))
            on_mesh(options, mesh, given)
        except ConfigError as error:
            refused[mesh.name] = str(error).splitlines()[-1].removeprefix("  - ")
            continue
        fitting.append(mesh)
    if not fitting:
        reasons = "".join(f"\n  {name}: {reason}" for name, reason in refused.items())
        tried_ones = "none of --meshes" if names else f"no mesh of at most {most_ranks} ranks"
        raise InputError(f"{tried_ones} fits this configuration:{reasons}")
    return fitting, refused
