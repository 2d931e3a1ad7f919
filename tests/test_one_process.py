"""Tools compute every configuration again in one process: options that only several ranks need are
dropped."""

from pathlib import Path

import pytest

from configs import ranks
from configs.check import RULES
from configs.load import ConfigError, load_config
from lab.simulate import __main__ as simulate
from tools.overrides import with_options
from tools.parity import __main__ as parity
from tools.parity import meshes
from tools.replay import command as replay

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
PRESETS = sorted(path.name for path in CONFIGS.glob("*.toml"))
# All that one process has no use for, in one configuration
EVERYTHING = [
    str(CONFIGS / "qwen3_moe_debug.toml"),
    "--parallelism.expert_parallel=2",
    "--parallelism.expert_exchange=hierarchical",
    "--parallelism.expert_chunks=2",
    "--parallelism.tensor_parallel=2",
    "--parallelism.context_parallel=2",
    "--parallelism.context_parallel_method=ulysses",
    "--activation_checkpoint.mode=selective",
    "--activation_checkpoint.gather_again=true",
    "--debug.replica_check_interval=10",
    "--parallelism.data_parallel_replicate=2",
    "--debug.leave_out_odd_replica=true",
    "--run.fault_tolerant=true",
    "--parallelism.keep_gathered=1",
]


OF_EXPERTS = """
[model]
family = "qwen3"
flavor = "debug_moe"
[data]
tokenizer = "bytes"
[parallelism]
expert_parallel = 4
expert_exchange = "hierarchical"
expert_chunks = 2
"""


def in_parity(argv: list[str]) -> None:
    """The configuration step of tools.parity: one process, and the meshes that fit."""
    rest = with_options(argv, parity.QUIET | {"training.param_dtype": "float64"})
    given = load_config(rest, None, None)
    fitting, _ = meshes.those_that_fit(rest, given, [], 4)
    assert fitting
    load_config(with_options(rest, meshes.PLAIN | meshes.small(rest, fitting, 64)), 1, 1)


def in_replay(argv: list[str]) -> None:
    """The configuration step of tools.replay in one process."""
    more = with_options(argv, replay.QUIET | {"training.param_dtype": "float32"})
    replay.on_mesh(more, replay.ONE, load_config(more, None, None))


def in_simulate(argv: list[str]) -> None:
    """The configuration step of lab.simulate's one process on the CPU."""
    more = with_options(argv, simulate.SHORT | simulate.ON_THE_CPU | {"compile.enabled": "false"})
    load_config(more, 1, 1)


TOOLS = {"parity": in_parity, "replay": in_replay, "simulate": in_simulate}


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_is_one_process(preset: str, tool: str) -> None:
    TOOLS[tool]([str(CONFIGS / preset)])


@pytest.mark.parametrize("tool", TOOLS)
def test_everything_of_ranks_is_dropped(tool: str) -> None:
    TOOLS[tool](EVERYTHING)


@pytest.mark.parametrize(
    "option", [name for name in ranks.OF_RANKS if ranks.OF_RANKS[name].refused]
)
def test_the_table_is_what_the_rules_refuse(option: str) -> None:
    """Negative control: with a row missing, one process is refused."""
    assert f"{option.partition('.')[2]}_unused" in RULES
    kept = {name: value for name, value in ranks.one_process().items() if name != option}
    if option in ("parallelism.pipeline_schedule", "parallelism.pipeline_layers"):
        value = {"parallelism.pipeline_schedule": "zbv", "parallelism.pipeline_layers": "[3, 3]"}
        kept[option] = value[option]
    elif option == "parallelism.pipeline_stages_per_rank":
        kept[option] = "2"
    with pytest.raises(ConfigError, match=f"{option} = .* has no effect"):
        load_config(with_options(EVERYTHING, kept), 1, 1)


def test_a_mesh_keeps_what_it_has_a_use_for() -> None:
    given = load_config(EVERYTHING, None, None)
    options = meshes.parse("ep2xtp2").options(given)
    assert options["parallelism.expert_chunks"] == "2"
    assert options["activation_checkpoint.gather_again"] == "true"
    assert options["parallelism.context_parallel_method"] == "gather"
    assert options["parallelism.keep_gathered"] == "0"
    [line] = meshes.dropped(given)
    assert line == "parallelism.expert_exchange = hierarchical is left out: taken as flat"


def test_a_simulation_says_what_it_takes_otherwise(tmp_path: Path, capsys) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(OF_EXPERTS)
    argv, plain = simulate.command_lines([str(path)], 4, tmp_path)
    said = capsys.readouterr().out
    assert "parallelism.expert_exchange is taken as flat: the simulated GPUs are those of" in said
    assert load_config(argv, 4, 4).parallelism.expert_chunks == 2
    assert load_config(plain, 1, 1).parallelism.expert_chunks == 1


def test_without_a_loss_of_the_cpu_there_is_no_difference() -> None:
    lines, wrong = simulate.losses({1: 2.5, 2: 2.0}, {}, 1e-5)
    assert not wrong and "nan" not in "".join(lines)
    lines, wrong = simulate.losses({1: 2.5}, {1: 2.0}, 1e-5)
    assert "the first loss differs" in wrong[0]


@pytest.mark.parametrize("kept", [True, False])
def test_a_mesh_of_parity_keeps_what_the_configuration_says_of_its_ranks(kept, monkeypatch):
    argv = [str(CONFIGS / "llama_debug.toml"), "--parallelism.accumulate_gradients=sharded"]
    given = load_config(argv, None, None)
    if not kept:  # the negative control
        monkeypatch.setattr(meshes, "NOT_KEPT", {"parallelism.accumulate_gradients"})
    options = meshes.parse("fsdp2").options(given)
    assert options["parallelism.accumulate_gradients"] == ("sharded" if kept else "whole")
