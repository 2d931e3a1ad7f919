"""`tools.plan` predicts what real runs do: memory, every collective, FLOPs; and says what is wrong
in a sentence."""

import importlib
import io
import json
import re
import sys
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

import train
from configs.load import load_config
from configs.schema import InputError
from models import layers
from parallelisms import mesh as meshes
from tests import hybrid
from tests.ranks import run_ranks
from tests.steps import (
    apart,
    assert_same_step,
    composed_and_layers,
    real_step,
    shown_in,
)
from tools.plan import estimate as estimates
from tools.plan import report, trace
from tools.plan.__main__ import main
from tools.plan.arguments import arguments
from tools.plan.choices import bases
from tools.plan.command import read_inputs
from tools.plan.device import load_device
from tools.plan.estimate import Machine, Ring, estimate
from tools.plan.plan import Plan, PlanInputs, make_plan
from tools.plan.repeat import traced, with_layers
from tools.plan.step import Op, Step, Stretch, Where
from tools.plan.trace import changed

ROOT = Path(__file__).resolve().parent.parent

# Sizes that no mesh divides, and large enough that activations, not constants, are what is
# measured.
MODEL = (
    "--model.dim=120 --model.n_layers=3 --model.n_heads=8 --model.n_kv_heads=4 "
    "--model.head_dim=14 --model.hidden_dim=308 "
    "--model.vocab_size=1031 --data.tokenizer=bytes --training.seq_len=64 "
    "--training.global_batch_size=8 "
    "--training.local_batch_size=2 --training.loss_chunk_tokens=50 --lr_schedule.warmup_steps=0 "
    "--training.param_dtype=bfloat16"
).split()
NONE, FULL, SELECTIVE = (
    f"--activation_checkpoint.mode={mode}" for mode in ("none", "full", "selective")
)
TP2, SHARDED = "--parallelism.tensor_parallel=2", "--parallelism.accumulate_gradients=sharded"
TWO_MICROBATCHES = "--training.local_batch_size=4"  # of a rank that shares them with no other
FSDP2 = [NONE, TWO_MICROBATCHES]
HSDP = "--parallelism.data_parallel_replicate=2"
CP2, ULYSSES = "--parallelism.context_parallel=2", "--parallelism.context_parallel_method=ulysses"
DOCUMENTS = "--data.mask_documents=true"  # the plan has none
LORA = [
    "--lora.rank=8",
    '--lora.targets=["wq", "wv", "w1", "w2", "w3"]',
    "--checkpoint.load_hf=anywhere",
]
CASES = {  # name: (ranks, the options of each case)
    "single": (1, [[SELECTIVE]]),
    "fsdp2": (
        2,
        [
            [*FSDP2, "--training.param_dtype=float32"],
            [FULL, SHARDED, "--training.local_batch_size=2"],
            [SELECTIVE, "--parallelism.keep_gathered=2"],
        ],
    ),
    # apart: PyTorch keeps the groups of a first mesh of two dimensions for a second
    "tp2-gather-again": (
        2,
        [[SELECTIVE, TP2, "--activation_checkpoint.gather_again=true", TWO_MICROBATCHES]],
    ),
    "tp2-lora": (2, [[NONE, TP2, *LORA, "--training.local_batch_size=8"]]),
    "fsdp2xtp2-full": (4, [[FULL, TP2, "--training.local_batch_size=4"]]),
    "replicas": (2, [[SELECTIVE, SHARDED, HSDP]]),
    "cp2": (
        2,
        [
            [FULL, CP2, TWO_MICROBATCHES, ULYSSES, DOCUMENTS],
            [NONE, CP2, TWO_MICROBATCHES, DOCUMENTS],
        ],
    ),
}


def in_ci(table: dict, quick: str) -> list:
    """Return the rows as pytest's parameters: one of the default suite, and slow ones."""
    others = [pytest.param(name, marks=pytest.mark.slow) for name in table if name != quick]
    return [quick, *others]


def config(options: list[str], ranks: int):
    return load_config([*MODEL, *options], ranks, ranks)


def real_steps(cases: list[list[str]]) -> list[tuple]:
    return [real_step(config(options, meshes.world().size)) for options in cases]


@pytest.mark.cap(240)
@pytest.mark.parametrize("name", in_ci(CASES, "single"))
def test_memory_and_collectives_are_those_of_a_real_step(name):
    ranks, cases = CASES[name]
    of_ranks = run_ranks(ranks, real_steps, cases, timeout=200)
    for options, *outcomes in zip(cases, *of_ranks):
        assert_same_step(apart(traced, config(options, ranks), ranks, ranks, False), outcomes)


def peaks_with_and_without_what_fsdp_frees() -> tuple[int, int]:
    few = [*FSDP2, "--model.n_layers=2"]
    ((seen, *_),) = real_steps([few])
    with mock.patch.object(trace.Trace, "resized", lambda *_: None):
        return seen, real_steps([few])[0][0]


@pytest.mark.slow
def test_the_accountant_must_see_what_fsdp_frees():
    """Negative control: FSDP frees gathered weights by resizing their storage, which no operator
    tells."""
    seen, unseen = run_ranks(2, peaks_with_and_without_what_fsdp_frees)[0]
    assert seen != unseen


# the same step with all layers traced, and put together from a few: ranks, options, and how many
ONE = "--training.local_batch_size=1"
WHOLE = {
    "hsdp-sharded-accumulate": (
        8,
        [FULL, SHARDED, TP2, HSDP, ONE, "--training.global_batch_size=20", "--model.n_layers=7"],
        4,
    ),
    "kept-for-the-step": (
        4,
        [
            *(NONE, ONE, "--model.n_layers=9"),
            "--parallelism.reshard_after_forward=false",
            "--parallelism.reshard_after_backward=false",
        ],
        4,
    ),
    "keep-gathered": (4, [NONE, "--parallelism.keep_gathered=2", "--model.n_layers=11"], 8),
    "cp": (8, [SELECTIVE, CP2, ULYSSES, ONE, "--model.n_layers=6"], 4),
}


@pytest.mark.slow
@pytest.mark.cap(120)
@pytest.mark.parametrize("name", WHOLE)
def test_a_step_put_together_from_few_layers_is_the_whole_step(name):
    ranks, options, layers = WHOLE[name]
    few, whole, traces = apart(composed_and_layers, config(options, ranks), ranks)
    assert few == whole
    assert traces == [layers]


@pytest.mark.slow
def test_blocks_that_differ_are_all_traced():
    """A stretch that repeats with another period than assumed is not put together from one block."""
    cfg = config(["--activation_checkpoint.mode=every_n", ONE, "--model.n_layers=6"], 4)
    step = apart(trace.trace_step, cfg, 4, 4, True)
    assert with_layers(step, 9, edge=2, period=1) is None
    assert with_layers(step, 10, edge=1, period=2) is not None


@pytest.mark.parametrize(
    "op", [Op("aten.mm.default", matmul_flops=8), Op("c10d.allreduce_", kind="all-reduce")]
)
def test_an_optimizer_that_does_more_than_elements_is_traced_with_all_layers(op):
    """Its operators need not grow linearly with the layers: Muon's matmuls, for example."""
    step = Step([], {}, 4, 1, {}, {})
    step.stretches.append(Stretch(Where(0, "optimizer", -1), [Op("aten._fused_adamw_", traffic=8)]))
    with mock.patch("tools.plan.repeat.Repetition") as repetition:
        assert with_layers(step, 9, edge=1, period=1) is repetition.return_value.step.return_value
        step.stretches[0].rows.append(op)
        assert with_layers(step, 9, edge=1, period=1) is None
        # sums of squares are reduced over the ranks
        step.stretches[0] = Stretch(Where(0, "clip", -1), step.stretches[0].rows)
        assert with_layers(step, 9, edge=1, period=1) is not None


def plan_of_other_moments() -> Plan:
    """With an optimizer that keeps one moment, where the configuration says AdamW."""

    def one_moment(model, *_):
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    with mock.patch.object(train, "build_optimizer", one_moment):
        return make_plan(config(["--model.n_layers=2"], 2), PlanInputs(2, 2, H100))


def test_the_moments_of_an_optimizer_are_those_that_it_has():
    plan = apart(plan_of_other_moments)
    assert plan.checkpoint_bytes == plan.parameters * 4 * 2
    said = report.report(replace(plan, cfg=changed(plan.cfg, training={"float8": "rowwise"})))
    assert "Not modelled\n" in said and "training.float8: its time is assumed" in said


def plan_of_fork(edits: dict[str, str], folder: str, labelled_loss: bool) -> tuple:
    """Plan a fork whose train.py is ours with these texts replaced."""
    text = (ROOT / "train.py").read_text(encoding="utf-8")
    for old, new in edits.items():
        assert old in text, old
        text = text.replace(old, new)
    Path(folder, "fork_of_train.py").write_text(text, encoding="utf-8")
    sys.path.insert(0, folder)
    unlabelled = nullcontext()
    if not labelled_loss:
        unlabelled = mock.patch("training.microbatches.record_function", lambda _: nullcontext())
    fork = importlib.import_module("fork_of_train")
    with unlabelled, mock.patch.object(trace, "train", fork):
        step = trace.trace_step(config([SELECTIVE, "--model.n_layers=2"], 2), 2, 2, True)
    return step.peak()


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["loss", "clip"])
def test_a_fork_without_a_label_is_told_so(phase, tmp_path):
    """Negative control of the labels: without one of them the plan would be wrong in silence."""
    with pytest.raises(InputError, match=f"no record_function..{phase}"):
        # the loss's is in training/microbatches.py
        edits = {}
        if phase != "loss":
            edits[f'record_function("{phase}")'] = "nullcontext()"
            edits["import gc\n"] = "import gc\nfrom contextlib import nullcontext\n"
        apart(plan_of_fork, edits, str(tmp_path), phase != "loss")


def counted(options: list[str], ranks: int) -> tuple[float, float, float]:
    cfg = config([*options, "--model.vocab_size=1032"], ranks)  # even: rank 0 represents all
    return make_plan(cfg, PlanInputs(ranks, ranks, load_device("h100"))).flops()


@pytest.mark.parametrize(
    "ranks, options, recomputed",
    [
        (1, [NONE, "--training.local_batch_size=4"], (0.0, 0.1)),
        pytest.param(4, [CP2, SELECTIVE], (0.0, 0.1), marks=pytest.mark.slow),
        pytest.param(
            4,
            [FULL, CP2, TP2, ULYSSES, "--model.tied_embeddings=true", TWO_MICROBATCHES],
            (0.1, 0.34),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_counted_flops_are_the_derived_ones(ranks, options, recomputed):
    """PaLM's convention: attention whole, without recomputation (or flash attention's own, of the
    scores). Under causal attention every rank of a cp group has the same share."""
    derived, in_step, repeated = apart(counted, options, ranks)
    assert in_step == pytest.approx(derived, rel=1e-9)
    assert recomputed[0] <= repeated / derived <= recomputed[1]


def report_of(change: str) -> str:
    """Return the plan's text of a model in which a mistake is put."""
    cfg = config([NONE, "--training.local_batch_size=4", "--model.vocab_size=1032"], 1)
    family, args = train.architecture(cfg)
    forward = layers.FeedForward.forward

    def twice(module: layers.FeedForward, x: torch.Tensor) -> torch.Tensor:
        return forward(module, forward(module, x))

    if change == "formula":
        real = family.flops_per_token
        family = replace(family, flops_per_token=lambda *sizes: 1.02 * real(*sizes))
        train.architecture = lambda _: (family, args)
    if change == "block":
        layers.FeedForward.forward = twice
    if change == "state":
        train.architecture = lambda _: (hybrid.FAMILY, args)
    return report.report(make_plan(cfg, PlanInputs(1, 1, load_device("h100"))))


@pytest.mark.parametrize(
    "change, words",
    [
        ("formula", "-2.0% against what flops_per_token of models/llama.py derives"),
        ("block", "the matmuls of layers.0, layers.1"),
    ],
)
def test_flops_that_the_formula_does_not_derive_are_said(change, words):
    """test_the_report_and_the_trace_show_the_context has none."""
    text = apart(report_of, change)
    assert "Warning  " in text and words in text, text
    assert ("as their weights say" in text) == (change == "formula")


def test_a_state_of_ones_own_is_no_mistake_in_the_formula():
    """It counts the products of a recurrence, of which the plan sees matmuls alone."""
    text = apart(report_of, "state")
    assert "of a state of your own the plan counts matmuls alone" in text, text
    assert "MFU is wrong" not in text


@pytest.mark.slow
def test_counted_flops_of_adapters_have_no_gradients_of_weights():
    """Nothing is trained in front of the first block, so its first layers and their adapters need no
    gradient of their input. The formula does not leave that out."""
    derived, in_step, _ = apart(counted, [NONE, *LORA, "--training.local_batch_size=4"], 2)
    first = 120 * (8 + 2 * 4) * 14 + 2 * 8 * 120  # wq, wk, wv; A of wq and wv
    assert in_step == pytest.approx(derived - 2 * first, rel=1e-9)


H100 = load_device("h100")


HOST, EIGHT_HOSTS, ONE_OF_EACH = range(8), range(64), range(0, 64, 8)


@pytest.mark.parametrize(
    "kind, ranks, sent, gb_per_s",
    [
        ("all-gather", HOST, 7 / 8, 450),  # the links
        ("all-gather", EIGHT_HOSTS, 63 / 64, 400),  # eight cards each, less than the links
        ("all-gather", ONE_OF_EACH, 7 / 8, 50),  # one card
        ("all-reduce", HOST, 2 * 7 / 8, 450),
        # every rank sends straight to every other
        ("all-to-all", HOST, 7 / 8, 450),
        ("all-to-all", ONE_OF_EACH, 7 / 8, 50),
        ("all-to-all", range(16), 8 / 16, 50),  # two hosts: half of it through its own card
    ],
)
def test_a_ring_is_as_fast_as_its_slowest_link(kind, ranks, sent, gb_per_s):
    seconds = Ring.of(list(ranks), 8).seconds(kind, 10**10, H100)
    assert seconds == pytest.approx(10 * sent / (gb_per_s * 0.8), rel=0.01)


@pytest.mark.parametrize(
    "ranks, hosts, hops_us",
    [
        (8, 1, 7 * 2.0),  # around the ring of a host
        (16, 2, 13 * 2.0 + 2 * 30.0),  # and two of the hops between hosts
    ],
)
def test_the_latency_of_an_all_reduce_is_that_of_two_rounds(ranks, hosts, hops_us):
    """A reduce-scatter, then an all-gather; the start of the kernel counts once. NCCL's model of a
    ring."""
    device = H100.model_copy(update={"link_latency_us": 2.0, "fabric_latency_us": 30.0})
    for kind, rounds in ("all-gather", 1), ("reduce-scatter", 1), ("all-reduce", 2):
        expected = (rounds * hops_us + estimates.NCCL_BASE_US) * 1e-6
        assert Ring(ranks, hosts).seconds(kind, 0, device) == pytest.approx(expected)


def with_numbers(**numbers: float) -> Machine:
    """Return hosts of four H100s of which some numbers are others."""
    return Machine(H100.model_copy(update=numbers), 4)


def test_slow_links_are_exposed_and_fast_ones_hide(monkeypatch):
    step = apart(traced, config([NONE, "--training.local_batch_size=2"], 4), 4, 4, True)
    monkeypatch.setattr(estimates, "NCCL_BASE_US", 0)
    fast, slow = (
        estimate(step, with_numbers(link_gb_per_s=speed, link_latency_us=0))
        for speed in (1e6, 0.01)
    )
    assert fast.computing == slow.computing and fast.exposed < 0.05 * fast.seconds
    assert slow.exposed > 0.9 * slow.seconds
    for time in fast, slow:
        assert time.seconds == pytest.approx(time.computing + time.exposed)


def test_a_cpus_overhead_is_counted():
    step = apart(
        traced,
        config(["--activation_checkpoint.mode=selective", "--training.local_batch_size=8"], 1),
        1,
        1,
        False,
    )
    assert step.repeats == 1
    ops = [(where, op) for where, _, op in step.ops() if not op.kind]
    forward = sum(where.phase == "forward" and 0 <= where.block < step.layers for where, _ in ops)
    flat = {"overhead_us": 1.0, "policy_us": 1e3, "narrow_attention": 1.0}
    plain = estimate(step, with_numbers(**flat))
    selective = estimate(step, replace(with_numbers(**flat), selective=True))
    assert forward > 0 and selective.seconds - plain.seconds == pytest.approx(forward * 1e-3)
    slow = estimate(step, with_numbers(**flat | {"overhead_us": 3.0}))
    assert slow.seconds - plain.seconds == pytest.approx(len(ops) * 2e-6, rel=1e-3)
    flops = sum(op.attention_flops for _, op in ops if "backward" in op.name)
    backward = flops / 2 / H100.peak / H100.attention_efficiency
    twice = estimate(step, with_numbers(**flat, attention_backward=2.0))
    assert plain.attention - twice.attention == pytest.approx(backward / 2, rel=1e-6)


def planned_goodput() -> tuple[Plan, Plan]:
    """Plans of a run that is seldom interrupted, and of one that always is."""
    cfg = config([NONE, "--training.local_batch_size=2", "--checkpoint.async_save=false"], 4)
    inputs = PlanInputs(4, 4, H100, mtbf_gpu_hours=50_000, storage_gb_per_s=1e-5)
    plan = make_plan(cfg, inputs)
    return plan, replace(plan, inputs=replace(inputs, mtbf_gpu_hours=1e-3))


@pytest.mark.slow
def test_the_best_interval_between_checkpoints():
    seldom, always = apart(planned_goodput)
    _, _, stall = seldom.saving()
    best = seldom.best_interval
    # Young's, where saves are short against failures
    assert best == pytest.approx((2 * stall * seldom.mtbf) ** 0.5, rel=0.01)
    around = [seldom.goodput(best * factor) for factor in (0.5, 1, 2)]
    assert around[1] == max(around) > 0.9
    # interrupted more often than a restart takes: no progress, and no overflow
    assert max(always.goodput(always.best_interval * factor) for factor in (0.5, 1, 2)) < 1e-6
    copying = replace(seldom, cfg=changed(seldom.cfg, checkpoint={"async_save": True}))
    assert copying.staging == pytest.approx(copying.checkpoint_bytes / 4, rel=0.02)
    assert seldom.staging == 0
    pinned = "pinned 4.00 MiB (CUDA rounds up to a power of two): 16.00 MiB on each host"
    assert report.host_memory(copying).endswith(pinned)


DEBUG = ["--training.seq_len=64", "--model.n_layers=2"]


@pytest.mark.parametrize(
    "argv, words",
    [
        ("--device h10", ["unknown", 'did you mean "h100"', "b200"]),
        ("--device nowhere.toml", ["cannot be read"]),
        ("--gpus 0", ["at least 1"]),
        (
            "--gpus 8 --parallelism.tensor_parallel=3",
            ["mistakes", "does not divide the 8 processes of a host", "query heads"],
        ),
        (
            "--gpus 4 --training.param_dtype=float32 --training.local_batch_size=2",
            ["float32", "bfloat16"],
        ),
        ("--gpus 512 --search", ["no mesh of 512 GPUs is legal", "global_batch_size = 8"]),
        ("--gemm-efficiency=0", ["--gemm-efficiency=0 must be more than 0 and at most 1"]),
        ("--attention-efficiency=1.5", ["--attention-efficiency"]),
        ("--network-gb-per-s=-1", ["--network-gb-per-s"]),
        ("--storage-gb-per-s=0", ["--storage-gb-per-s=0 must be more than 0"]),
        # how many GPUs
        ("--days=3", ["need --tokens"]),
        ("--days=3 --tokens=1e9 --gpus=8", ["leave --gpus"]),
        ("--days=3 --tokens=1e9 --search", ["leave --search"]),
        ("--days=3 --tokens=1e9 --write=x.toml", ["leave --write"]),
        ("--usd=100 --tokens=1e9", ["--usd-per-gpu-hour"]),
        ("--days=-1", ["--days", "at least 0"]),
    ],
)
def test_a_mistake_is_a_sentence(argv, words, capsys):
    assert main(argv.split()) == 2
    said = capsys.readouterr().err
    assert all(word in said for word in words) and "Traceback" not in said


OWN = {"memory_gib": 0.01, "memory_gb_per_s": 100, "link_gb_per_s": 10, "fabric_gb_per_s": 1}


def own_device(folder: Path, **rows) -> str:
    path = folder / "mine.toml"
    path.write_text(
        "[mine]\n"
        + "".join(f"{key} = {json.dumps(value)}\n" for key, value in (OWN | rows).items())
    )
    return str(path)


def test_a_file_that_cannot_be_written_is_a_sentence_before_anything_is_planned(tmp_path, capsys):
    for option, path in (("--trace", tmp_path), ("--write", tmp_path / "nowhere" / "best.toml")):
        assert main([*DEBUG, "--gpus", "1", option, str(path)]) == 2
        said = capsys.readouterr()
        assert f"{option} {path}: " in said.err and not said.out


def test_a_device_of_ones_own(tmp_path, capsys):
    assert main([*DEBUG, "--gpus", "1", "--device", own_device(tmp_path)]) == 2
    assert "give peak_tflops" in capsys.readouterr().err
    wrong = own_device(tmp_path, peak_tflops=10, memory="a lot")
    assert main([*DEBUG, "--gpus", "1", "--device", wrong]) == 2
    assert "memory: Extra inputs" in capsys.readouterr().err
    # a CPU that lab.bench has measured has no CUDA context and no pinned memory
    for kind in ("cpu", "gpu"):
        flags = arguments(
            [*DEBUG, "--gpus", "1", "--device", own_device(tmp_path, peak_tflops=10, kind=kind)]
        )
        assert read_inputs(*flags)[1].on_gpu == (kind == "gpu")
    with pytest.raises(InputError, match="found 2"):
        two = tmp_path / "two.toml"
        two.write_text("[a]\nmemory_gib = 1\n[b]\nmemory_gib = 2\n")
        load_device(str(two))


@pytest.mark.parametrize("preset", sorted(path.name for path in (ROOT / "configs").glob("*.toml")))
def test_every_preset_can_be_searched(preset):
    """The mesh that it names is taken away, and what has a meaning with that mesh only must not be
    refused."""
    flags, rest = arguments([str(ROOT / "configs" / preset), "--gpus=512", "--search"])
    cfg, _ = read_inputs(flags, rest)
    assert cfg.parallelism.tensor_parallel == cfg.parallelism.pipeline_parallel == 1


PRESETS = sorted(
    path.stem for path in (ROOT / "configs").glob("*.toml") if "debug" not in path.stem
)
SHOWN = "llama_405b"  # the one that CI plans; the others by hand


def planned(argv: list[str]) -> tuple[int, str, float]:
    """Plan in a forked process: exit code, what is said, and the peak of its memory in GiB."""
    said = io.StringIO()
    with redirect_stdout(said), redirect_stderr(said):
        code = main(argv)
    # not ru_maxrss, which survives exec
    peak = re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text(encoding="utf-8"))
    return code, said.getvalue(), int(peak[1]) / 2**20


@pytest.mark.cap(400)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name == SHOWN else pytest.mark.exhaustive)
        for name in PRESETS
    ],
)
def test_a_preset_fits_where_it_says(name):
    """On the GPUs that its file states a preset fits; the plan takes seconds and little memory (60
    s and 4 GB are promised)."""
    text = (ROOT / "configs" / f"{name}.toml").read_text(encoding="utf-8")
    world, hosts = map(int, re.search(r"^# world size: (\d+) \((\d+) ", text, re.M).groups())
    argv = [f"configs/{name}.toml", f"--gpus={world}", f"--gpus-per-node={world // hosts}"]
    code, said, gib = apart(planned, [*argv, "--device=h100"])
    assert code == 0 and ": fits" in said, said
    assert gib < 4 / 1.074


@pytest.mark.slow
@pytest.mark.cap(240)
def test_blocks_that_are_said_to_have_room_have_it():
    """The plan's advice on parallelism.keep_gathered: followed, the run still fits, and has so many
    all-gathers less."""
    argv = ["configs/llama_8b.toml", "--gpus=64", "--device=h100"]
    _, before, _ = apart(planned, argv)
    blocks = int(re.search(r"parallelism.keep_gathered = (\d+) would save", before)[1])
    argv = [*argv, f"--parallelism.keep_gathered={blocks}"]
    code, after, _ = apart(planned, argv)
    assert code == 0 and ": fits" in after, after
    gathers = [
        int(re.search(r"dp_shard all-gather +([\d,]+)", said)[1].replace(",", ""))
        for said in (before, after)
    ]
    microbatches = int(re.search(r"= (\d+) microbatch", before)[1])
    assert 0 < blocks <= 32 and gathers[0] - gathers[1] == blocks * microbatches


# Context parallelism ------------------------------------------------------------------------------


def flops_without_masks() -> tuple[float, float, float]:
    def of_queries(q: torch.Tensor, *_) -> tuple[int, int]:
        return trace.whole_flops(q[None], q[None])

    with mock.patch.object(trace, "ruled_flops", of_queries):
        return counted([CP2, "--training.local_batch_size=1"], 4)


def test_flops_of_pieces_are_those_of_their_keys():
    """Negative control: a rank's queries see more keys than it has queries."""
    derived, in_step, _ = apart(flops_without_masks)
    assert in_step < 0.99 * derived


def test_the_report_and_the_trace_show_the_context(tmp_path, capsys):
    """The trace has every stream of the plan, and its memory is that of the report."""
    out = tmp_path / "plan.json"
    own = ["--gpus=4", "--gpus-per-node=2", "--mtbf-gpu-hours=100", "--storage-gb-per-s=3"]
    assert main([*DEBUG, CP2, ULYSSES, "--trace", str(out), *own, "--restart-minutes=1"]) == 0
    said = capsys.readouterr().out
    assert "Warning  " not in said
    assert "(100 GPU-hours each)" in said and "at 3 GB/s" in said
    assert "dp_shard 2 x cp 2 x tp 1" in said
    shared = "context parallel, ulysses: 2 ranks on one host share a sequence, 32 tokens each"
    assert shared in said
    streams = {"cp all-to-all", "dp_shard_cp all-gather"}
    assert all(re.search(rf"{stream} +\d+ ", said) for stream in streams)
    events = shown_in(out)
    rows = {event["args"]["name"] for event in events if event["ph"] == "M"}
    assert streams | {"compute", "dp_shard_cp reduce-scatter"} <= rows
    bars = [event for event in events if event["ph"] == "X"]
    computed = sum(event["dur"] for event in bars if event["tid"] == 0)
    assert {"forward 0, 0", "backward 1, 0", "optimizer"} <= {event["name"] for event in bars}
    end = max(event["ts"] + event["dur"] for event in bars)
    assert 0 < computed < end
    most = max(sum(event["args"].values()) for event in events if event["ph"] == "C")
    assert re.search(rf"live at the peak +{most / 2**20:.2f} MiB", said)


def test_a_search_shares_long_sequences_only():
    """Degrees that leave every rank 8,192 tokens, and methods that the heads allow."""
    inputs = PlanInputs(8, 8, H100)

    def shared(seq_len: int) -> set[tuple[int, int, str]]:
        sizes = [f"--training.seq_len={seq_len}", "--model.max_seq_len=65536"]
        cfg = load_config([*sizes, "--training.global_batch_size=8"])
        found = {
            (base.tensor_parallel, base.context_parallel, base.context_parallel_method)
            for base in bases(cfg, inputs)
        }
        return {choice for choice in found if choice[1] > 1}

    assert not shared(8192)
    gathered = {(tp, 2, "gather") for tp in (1, 2, 4)}
    assert shared(16384) == gathered | {(tp, 2, "ulysses") for tp in (1, 2)}
    assert {cp for _, cp, _ in shared(32768)} == {2, 4}
