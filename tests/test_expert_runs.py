"""Whole runs of models with experts: what they report of the load, and that checkpoints hold on
other meshes.

The runs of MESHES_OF_RUNS are one run on several meshes, so everything that a line says about
experts must be the same.
"""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import train
from checkpoint import hf, state, verify
from configs import schema
from configs.load import load_config
from configs.schema import InputError
from models import FORMATS
from models.terms import AuxiliaryTerms
from parallelisms.mesh import world
from reliability.health import mismatching_replicas
from tests import checkpoints
from tests.checkpoints import load_pattern, save_pattern
from tests.ranks import run_ranks
from tests.runs import run, run_that_reports, said, tiny_run
from training import experts
from training.experts import ExpertLoad
from training.metrics import MetricsWriter

TINY_EXPERTS = (
    "--model.family=deepseek_v3 --model.dim=32 --model.n_layers=3 --model.n_dense_layers=1 "
    "--model.n_heads=2 "
    "--model.hidden_dim=36 --model.n_experts=8 --model.experts_per_token=2 --model.expert_dim=12 "
    "--model.balance_loss=0.01 "
    "--model.vocab_size=263 "
    "--training.expert_bias_speed=0.01 --lr_schedule.warmup_steps=0 --lr_schedule.kind=constant "
    "--training.steps=6"
).split()
# of a step: 8 sequences of 16 tokens, each sent to 2 experts
STEPS, LAYERS, X, CHOICES = 6, (1, 2), 8, 8 * 16 * 2
# what must count nothing: recomputation, a gradient computed twice, validation, sampling
EVERYTHING = (
    "--activation_checkpoint.mode=full --debug.replay_interval=2 --run.device=cpu "
    "--validation.interval=2 --debug.sample_tokens=4"
).split()
MESHES_OF_RUNS = {  # name -> ranks, options
    "one": (1, EVERYTHING),
    "ep2xpp2": (4, ["--parallelism.expert_parallel=2", "--parallelism.pipeline_parallel=2"]),
}


def tiny_experts(place: Path) -> list[str]:
    return [
        *(option for option in tiny_run(place) if not option.startswith("--model.")),
        *TINY_EXPERTS,
    ]


# What is reported ---------------------------------------------------------------------------------


def load_of(
    counts: dict[int, list[int]], monkeypatch, **numbers: float
) -> tuple[dict[str, float], dict, list[str]]:
    """Return the report of two steps of one process in which each layer's experts got `counts` in
    sum, and what was warned of."""
    args = SimpleNamespace(
        n_layers=3,
        n_experts=4,
        experts_per_token=2,
        balance_loss=0.5,
        balancing_bias=True,
        **numbers,
    )
    mesh = SimpleNamespace(
        device=torch.device("cpu"),
        sum_over_tokens=lambda x: x,
        sum_over_tp=lambda x: x,
        sum_over_pp=lambda x: x,
    )
    bias = torch.tensor([0.25, -0.5, 0.0, 0.0])
    model = SimpleNamespace(
        mixtures=lambda: {
            layer: SimpleNamespace(router=SimpleNamespace(bias=bias)) for layer in counts
        }
    )
    load = ExpertLoad(mesh, args)
    for part in 1, 0:
        terms = AuxiliaryTerms(torch.ones(()), torch.ones(()))
        for layer, row in counts.items():
            terms.report(
                "expert_counts", torch.tensor(row) // 2 + torch.tensor(row) % 2 * part, layer
            )
            terms.report("balance_loss", torch.tensor(3.0), layer)
            terms.report("router_entropy", torch.tensor(7.0), layer)
        load.add(terms)
    warnings: list[str] = []
    monkeypatch.setattr(experts, "logger", SimpleNamespace(warning=warnings.append))
    values, line = load.report(50, model)
    assert load.steps == 0 and not any(load.sums.values()), "the next report starts from zero"
    return values, line, warnings


def test_a_report_says_how_tokens_are_spread(monkeypatch):
    values, line, warnings = load_of({1: [10, 10, 11, 9], 2: [30, 9, 1, 0]}, monkeypatch)
    assert line == {"step": 50, "steps": 2, "counts": {1: [10, 10, 11, 9], 2: [30, 9, 1, 0]}}
    of_layers = {
        "expert_load/layer-1": 1.1,
        "idle_experts/layer-1": 0,
        "expert_load/layer-2": 3.0,
        "idle_experts/layer-2": 1,
    }
    for layer in 1, 2:
        of_layers |= {
            f"router_entropy/layer-{layer}": 14 / 20,
            f"balance_loss/layer-{layer}": 6 / 20,
            f"expert_bias_range/layer-{layer}": 0.75,
        }
    assert values == pytest.approx({"expert_load": 3.0} | of_layers)
    assert not warnings, "one idle expert of four is no collapse"


def test_a_collapse_is_warned_of_by_layer(monkeypatch):
    _, _, warnings = load_of(
        {0: [40, 39, 1, 0], 1: [20, 20, 20, 20], 2: [40, 0, 40, 0]}, monkeypatch
    )
    assert len(warnings) == 1
    assert warnings[0].startswith(
        "step 50: routing collapses: in layers 0, 2 at least half of the 4 experts"
    )
    assert "last 2 steps. Raise training.expert_bias_speed" in warnings[0]


def test_a_record_is_read_back(tmp_path):
    (tmp_path / experts.FILE).write_text('{"step": 3, "steps": 3, "counts": {"1": [1, 2]}}\n')
    assert experts.recorded(tmp_path) == [{"step": 3, "steps": 3, "counts": {1: [1, 2]}}]
    with pytest.raises(InputError, match="a run with experts"):
        experts.recorded(tmp_path / "nothing")
    (tmp_path / experts.FILE).write_text('{"step": 3, "counts": [1]}\n')
    with pytest.raises(InputError, match="not a record of experts"):
        experts.recorded(tmp_path)


def test_a_restart_forgets_the_counts_of_steps_that_it_trains_again(tmp_path):
    for start, step in (0, 3), (3, 6), (3, 5):
        with MetricsWriter(
            schema.Metrics(tensorboard=False), tmp_path, True, start=start, steps=9
        ) as metrics:
            metrics.record_experts({"step": step, "steps": 3, "counts": {1: [1, 2]}})
    assert [line["step"] for line in experts.recorded(tmp_path)] == [3, 5]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("runs")
    options, folders = tiny_experts(place), {}
    for name, (ranks, more) in MESHES_OF_RUNS.items():
        folders[name] = place / name
        folders[name].mkdir()
        assert (
            run_ranks(ranks, run_that_reports, [*options, *more], folders[name])
            == [(0, "")] * ranks
        )
    return folders


@pytest.mark.slow
def test_recomputation_validation_and_sampling_count_nothing_and_every_stage_is_in_the_record(runs):
    records = {name: experts.recorded(folder) for name, folder in runs.items()}
    for line, step in zip(records["one"], (3, 6), strict=True):
        assert (line["step"], line["steps"], set(line["counts"])) == (step, 3, set(LAYERS))
        assert [sum(counts) for counts in line["counts"].values()] == [3 * CHOICES] * 2
    assert records["ep2xpp2"] == records["one"]


@pytest.mark.slow
def test_the_metrics_of_experts_are_the_same_on_every_mesh(runs):
    def lines(folder: Path) -> dict[int, dict[str, float]]:
        rows = [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]
        return {
            row["step"]: {
                k: v for k, v in row.items() if "expert" in k or "router" in k or "balance" in k
            }
            for row in rows
            if "loss" in row
        }

    one, other = lines(runs["one"]), lines(runs["ep2xpp2"])
    assert [step for step, values in one.items() if values] == [3, 6]
    names = {
        f"{name}/layer-{layer}"
        for layer in LAYERS
        for name in (
            "expert_load",
            "idle_experts",
            "router_entropy",
            "balance_loss",
            "expert_bias_range",
        )
    }
    assert one[6].keys() == names | {"expert_load"}
    for step in 3, 6:
        assert other[step] == pytest.approx(one[step], rel=1e-5)
    assert "expert load" in said(runs["ep2xpp2"])


@pytest.mark.slow
def test_no_run_with_experts_prints_a_warning(runs):
    for folder in runs.values():
        noise = [
            line
            for line in said(folder).splitlines()
            if "Warning" in line or "redistributing" in line.lower()
        ]
        assert not noise, noise


# What is saved comes back -------------------------------------------------------------------------

EP2 = "--parallelism.expert_parallel=2"
HYBRID = "--parallelism.data_parallel_replicate=2"
# Of six experts two ranks have three each, and FSDP gives two of them to one rank and one to the
# other. Of two experts a rank has one. FSDP shards its w2 [1, 32, 11] along the next dimension, but
# gives w1 and w3 [1, 11, 32] whole to one rank.
SIX = [option for option in TINY_EXPERTS if option.startswith("--model.")] + [
    "--model.n_experts=6",
    "--model.expert_dim=11",
]
SIX += ["--model.expert_groups=1", "--model.groups_per_token=1"]
TWO = [*SIX, "--model.n_experts=2", "--model.experts_per_token=1"]


def with_experts(fn, *args: object) -> object:
    """fn(*args) of tests/checkpoints.py, with models of this file."""
    checkpoints.MODEL = [
        "--data.tokenizer=bytes",
        "--training.param_dtype=float32",
        "--training.seq_len=16",
        "--training.global_batch_size=8",
        "--training.local_batch_size=1",
    ]
    return fn(*args)


def save_and_load(place: Path) -> list[list[list[str]]]:
    """Return what is not bitwise what was saved on a mesh of experts, on another one and on none."""
    found = []
    for name, model in ("six", SIX), ("two", TWO):
        save_pattern(place / name, [*model, EP2])
        found.append(load_pattern([place / name], model))
    return [*found, load_pattern([place / "six"], [*SIX, EP2, HYBRID])]


@pytest.mark.slow
def test_state_of_unevenly_shared_experts_is_bitwise_the_same_on_another_mesh(tmp_path):
    """Weights, moments and biases. Even numbers of experts: tests/test_any_mesh.py."""
    assert run_ranks(4, with_experts, save_and_load, tmp_path) == [[[[]]] * 3] * 4


def flipped_bit() -> tuple[list[str], list[str]]:
    """On four ranks: what the comparison of replicas says before and after a bit of rank 3's
    experts has changed."""
    job = checkpoints.build(*SIX, EP2, HYBRID)
    before = mismatching_replicas(job.model, job.optimizer, job.mesh, loss=0.0)
    if dist.get_rank() == 3:
        state.local(job.model.layers["1"].feed_forward.experts.w2).detach().view(torch.int32)[
            0, 0, 0
        ] ^= 1
    after = mismatching_replicas(job.model, job.optimizer, job.mesh, loss=0.0)
    return before, [mismatch.text for mismatch in after]


def test_a_flipped_bit_of_an_expert_is_seen_between_replicas():
    """Ranks 1 and 3 have the same experts, ranks 0 and 2 the other ones."""
    ranks_1_and_3 = (
        "ranks 1, 3 of dp_replicate: 1 tensor, layers.1.feed_forward.experts.w2 among them"
    )
    assert run_ranks(4, with_experts, flipped_bit) == [([], [ranks_1_and_3])] * 4


def imported(folder: Path, exported: Path) -> list[str]:
    """On this mesh: the weights that are not bitwise the same from the exported folder and from the
    checkpoint."""
    options = [option for option in TINY_EXPERTS if option.startswith("--model.")]
    models = []
    for load in (
        lambda job: hf.load(
            exported, job.model, FORMATS, "deepseek_v3", job.args, dist.group.WORLD
        ),
        lambda job: state.load_model(folder, job.model),
    ):
        job = train.build(
            load_config([*options, "--data.tokenizer=bytes", EP2], world().size, world().local_size)
        )
        load(job)
        models.append({name: state.local(t) for name, t in job.model.state_dict().items()})
    return [name for name, tensor in models[0].items() if not torch.equal(tensor, models[1][name])]


@pytest.mark.slow
def test_an_exported_model_is_read_on_a_mesh_of_experts(runs, tmp_path):
    """What continues on another mesh: tests/test_any_mesh.py; what transformers computes:
    tests/test_convert.py."""
    out = tmp_path / "hf"
    hf.export(verify.newest(runs["one"]), out, FORMATS["deepseek_v3"], torch.float32, {})
    assert run_ranks(2, imported, runs["one"], out) == [[], []]


def exchanges_of_a_run(options: list[str], folder: Path) -> int:
    """Return how many collectives this rank had begun when the last step ended."""
    counts, real = [], train.train_step

    def noting(job, *rest):
        result = real(job, *rest)
        counts.append(job.mesh.progress_counter.count)
        return result

    train.train_step = noting
    assert run(options, folder) == (0, "")
    return counts[-1]


def test_a_stage_without_mixtures_is_not_behind_one_that_has_some(tmp_path):
    """A launcher names the rank with the fewest collectives when a run hangs. The first stage has
    the dense layer alone."""
    options = [
        *tiny_experts(tmp_path),
        "--model.n_layers=2",
        "--parallelism.pipeline_parallel=2",
        "--training.steps=3",
    ]
    dense, experts = run_ranks(2, exchanges_of_a_run, options, tmp_path / "run")
    assert dense == experts > 0


def run_on_two_threads(options: list[str], folder: Path) -> tuple[int, str]:
    torch.set_num_threads(2)
    return run(options, folder)


def test_threads_repeat_a_gradient_bitwise(tmp_path):
    """By default PyTorch's threads add float32 rows of one token in any order, once there are 32,768
    numbers; debug.replay_interval would call that a device that computes wrong. (Sums of two are the
    same in both orders: a token needs three experts.)"""
    large = ["--training.seq_len=256", "--model.experts_per_token=4", "--training.steps=2"]
    twice = ["--run.device=cpu", "--training.param_dtype=float32", "--debug.replay_interval=1"]
    options = [*tiny_experts(tmp_path), *large, *twice]
    [(code, errors)] = run_ranks(1, run_on_two_threads, options, tmp_path / "run")
    assert code == 0, errors
