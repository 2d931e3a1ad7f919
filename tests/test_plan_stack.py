"""Assumptions of a plan about stacks and devices: each formula, each option of the command line,
and the table of published runs."""

import contextlib
import io
import re
from dataclasses import replace

import pytest

from configs.load import load_config
from configs.schema import Config, InputError
from lab.bench import published
from tests.steps import apart
from tools.plan import unmodelled
from tools.plan.__main__ import main
from tools.plan.arguments import arguments
from tools.plan.cluster import Cluster, answer
from tools.plan.command import read_inputs
from tools.plan.device import load_device
from tools.plan.estimate import Machine, Ring, attention_seconds, op_seconds
from tools.plan.pipeline import Stages
from tools.plan.plan import PlanInputs, make_plan, with_kernel
from tools.plan.report import hosts, report
from tools.plan.routing import Chosen
from tools.plan.stack import HIDDEN_TENSOR, OURS, Software, load_stack
from tools.plan.step import Op, Where
from tools.plan.trace import changed, tracing

H100 = load_device("h100")
IN_BLOCK = Where(0, "forward", 0)
SMALL = [
    "--model.dim=128",
    "--model.n_layers=2",
    "--model.hidden_dim=256",
    "--training.param_dtype=bfloat16",
    "--training.seq_len=64",
    "--training.global_batch_size=16",
]


def seconds(op: Op, stack: Software, where: Where = IN_BLOCK, in_block: bool = True) -> float:
    return sum(op_seconds(op, where, Machine(H100, 8, stack=stack), in_block))


def product(m: int, k: int, n: int) -> Op:
    """Return a matmul in bfloat16."""
    return Op("mm", matmul_flops=2 * m * k * n, operands=2 * (m * k + k * n + m * n))


def test_a_narrow_matmul_is_less_efficient():
    """Its operands are moved in addition to its FLOPs, once."""
    stack = Software(gemm_traffic=1)
    narrow = product(8192, 512, 512)
    wide = product(8192, 8192, 8192)
    rate = H100.peak * H100.matmul_efficiency
    moved = narrow.operands / (H100.memory_gb_per_s * 1e9)
    assert seconds(narrow, stack) == pytest.approx(narrow.matmul_flops / rate + moved)
    slower = [seconds(op, stack) / seconds(op, OURS) for op in (narrow, wide)]
    assert slower[0] > 1.3 > 1.1 > slower[1] > 1


@pytest.mark.parametrize(
    ("op", "phase", "field"),
    [
        (Op("aten.add_.Tensor", traffic=1000, fused=1000), "backward", "fused_accumulation"),
        (Op("aten.cat.default", traffic=1000, fused=1000), "forward", "fused_kernels"),
    ],
)
def test_what_a_stack_has_no_kernel_for_costs_nothing(op, phase, field):
    where = Where(0, phase, 0)
    assert seconds(op, Software(**{field: True}), where) == 0 < seconds(op, OURS, where)
    outside = Where(0, "optimizer", -1)
    adding = Software(fused_accumulation=True)
    assert seconds(op, adding, outside) == seconds(op, OURS, outside) > 0


def test_a_token_is_sent_once_to_a_host():
    """8 experts of a token over 4 hosts reach 3.6 hosts on average. Where the router chooses them
    in 2 of 4 groups, each on a host, it is at most 2."""
    chosen = Chosen(256, 8)
    assert chosen.places(4) * 8 == pytest.approx(4 * (1 - 0.75**8))
    assert chosen.places(1) * 8 == 1
    assert OURS.sent(32, 4, chosen) == (1, 1)
    once = Software(once_per_host=True)
    inside, outside = once.sent(32, 4, chosen)
    _, in_groups = once.sent(32, 4, Chosen(256, 8, 4, 2))
    assert in_groups * 8 == pytest.approx(2 * (1 - 0.5**8)) and in_groups < outside
    numbers = {"experts_per_token": 8, "expert_groups": 4, "groups_per_token": 2, "dim": 5}
    assert Chosen.by(numbers) == Chosen(0, 8, 4, 2) and Chosen.by({}) == Chosen()
    adjacent = Software(once_per_host=True, neighbouring_experts=True)
    # 4 experts on each of 64 ranks: those of a token are on 2 ranks of one host
    assert adjacent.sent(64, 8, chosen) == (2 / 8, 1 / 8)
    ring = Ring(32, 4)
    every = ring.seconds("all-to-all", 1 << 30, H100)
    fewer = ring.seconds("all-to-all", 1 << 30, H100, (inside, outside))
    # over the fabric, which is the slower part
    assert fewer / every == pytest.approx(outside, rel=0.01)


def test_async_tensor_parallel_and_float8_change_the_stack_of_a_run():
    cfg = load_config(SMALL)
    assert OURS.of_run(cfg) == OURS
    parallelism = {"async_tensor_parallel": True}
    asked = changed(cfg, training={"float8": "tensorwise"}, parallelism=parallelism)
    stack = OURS.of_run(asked)
    assert stack.hidden_tensor == HIDDEN_TENSOR and stack.float8 > 1


@pytest.mark.parametrize(
    "kernel, whole, of_documents",
    [
        ("auto", "fast", "attention"),
        ("cudnn", "fast", "attention"),
        ("flash3", "fast", "fast"),
        ("flash", "attention", "attention"),
    ],
)
def test_the_kernel_of_attention_follows_the_option(kernel, whole, of_documents):
    """On an H200 "auto" took as long as "cudnn", and "flash" 1.7 times as long. The trace has whole
    windows, so its operators do not tell that documents are masked."""
    rates = {"fast": H100.fast_attention_efficiency, "attention": H100.attention_efficiency}
    assert rates["fast"] > rates["attention"]
    cfg = changed(load_config(SMALL), training={"attention": kernel})
    device = with_kernel(H100, cfg)
    assert device.attention_efficiency == rates[whole]
    if whole == "fast":
        assert device.packed_attention_efficiency == rates[of_documents]
    masked = with_kernel(H100, changed(cfg, data={"mask_documents": True}))
    assert masked.attention_efficiency == rates[of_documents]
    a100 = load_device("a100")  # which has no fast kernel
    assert with_kernel(a100, cfg) == a100
    if kernel == "auto":
        assert with_kernel(H100, cfg, load_stack("torchtitan")) == H100


def reported(cfg: Config, inputs: PlanInputs) -> str:
    return report(make_plan(cfg, inputs))


def test_the_report_names_the_rate_that_attention_reaches():
    """The debug model's heads have 32 numbers."""
    device = H100.model_copy(update={"narrow_attention": 0.65})
    text = apart(reported, load_config(SMALL), PlanInputs(1, 1, device))
    assert re.search(r"attention \S+ \S+ at 36% ", text)


@pytest.mark.parametrize(
    "operator, rate",
    [
        ("aten._scaled_dot_product_flash_attention_for_cpu.default", 0.5),
        ("aten._flash_attention_forward.default", 0.25),
        ("plumbline.ruled_attention_backward.default", 0.25),
    ],
)
def test_documents_and_windows_have_a_kernel_of_their_own(operator, rate):
    rates = {"attention_efficiency": 0.5, "packed_attention_efficiency": 0.25}
    device = H100.model_copy(update=rates | {"narrow_attention": 0.6})
    flops = 2 * device.peak  # of which a causal mask leaves half
    wide = Op(operator, attention_flops=flops, head_width=128)
    assert attention_seconds(wide, device) == pytest.approx(1 / rate)
    narrow = Op(operator, attention_flops=flops, head_width=64)
    assert attention_seconds(narrow, device) == pytest.approx(1 / rate / 0.6)


def inputs_of(*argv: str) -> PlanInputs:
    return read_inputs(*arguments([*SMALL, *argv]))[1]


def test_overrides_replace_the_numbers_of_the_device():
    inputs = inputs_of("--gemm-efficiency=0.5", "--attention-efficiency=0.2")
    assert inputs.device.matmul_efficiency == 0.5
    assert inputs.device.attention_efficiency == 0.2
    assert inputs.device.fast_attention_efficiency == 0.2
    assert inputs_of().device == H100


@pytest.mark.slow
def test_a_plan_for_several_hosts_says_which_network_it_assumes(capsys):
    main([*SMALL, "--gpus=16", "--network-gb-per-s=12.5", "--training.global_batch_size=16"])
    assert "Between hosts    12.5 GB/s of each GPU" in capsys.readouterr().out
    main([*SMALL, "--gpus=8", "--training.global_batch_size=16"])
    assert "Between hosts" not in capsys.readouterr().out


def plan_of_twelve() -> str:
    cfg = load_config([*SMALL, "--training.global_batch_size=24"], 12, 8)
    return report(make_plan(cfg, PlanInputs(12, 8, H100)))


def test_hosts_need_not_be_full():
    inputs = inputs_of("--gpus=12", "--training.global_batch_size=24")
    assert hosts(inputs) == "1 host of 8 and one of 4"
    assert hosts(inputs_of("--gpus=16")) == "2 hosts of 8"
    assert "1 host of 8 and one of 4" in apart(plan_of_twelve)


# options that tracing turns off, and that the time of a plan has all the same
MODELLED = {"run.device", "compile.enabled", "parallelism.async_tensor_parallel"}


def test_nothing_is_ignored_in_silence():
    """Every option that tracing turns off is either modelled or named."""
    cfg = load_config(SMALL)
    asked = {
        "run": {"device": "cuda", "deterministic": True},
        "compile": {"enabled": True},
        "data": {"mask_documents": True},
        "training": {"float8": "rowwise", "attention": "flash3"},
        "parallelism": {"async_tensor_parallel": True},
    }
    cfg = changed(cfg, **asked)
    before = cfg.model_dump()
    after = tracing(cfg).model_dump()
    turned_off = set()
    for name, table in before.items():
        turned_off |= {f"{name}.{key}" for key in table if table[key] != after[name][key]}
    assert len(turned_off) == sum(map(len, asked.values()))
    assert turned_off - MODELLED <= set(unmodelled.ROWS)


def test_every_published_run_is_a_configuration():
    runs = published.load_runs()
    assert len({run.id for run in runs}) == len(runs) > 72
    assert {run.kind for run in runs} == set(published.CLASSES)
    for run in runs:
        cfg = run.config()
        ranks = 1
        for name in ("tp", "cp", "pp"):
            ranks *= run.mesh.get(name, 1)
        assert cfg.training.microbatches(run.gpus // ranks) >= 1, run.id
        stack = load_stack(run.stack)
        assert run.device in stack.gemm, f"{run.id}: {run.stack} is not calibrated on it"
    held_out = sum(run.held_out for run in runs)
    assert len(runs) / 4 < held_out < len(runs) / 2


def test_a_calibration_finds_the_efficiency_that_made_the_speed():
    """Runs whose seconds are 1 / efficiency + 1, at 0.6; held-out ones would spoil it."""
    rows = []
    for run in published.load_runs():
        if run.stack == "fms" and run.device == "a100":
            truth = 1 / (1 / (0.6 if not run.held_out else 0.9) + 1)
            made = replace(run, speed=truth)
            speeds = tuple(1 / (1 / value + 1) for value in published.GRID)
            rows.append(published.Planned(made, truth, speeds))
    assert any(row.run.held_out for row in rows)
    ((stack, device, _, best, _),) = published.calibration(rows)
    assert (stack, device) == ("fms", "a100") and float(best) == pytest.approx(0.6, abs=0.006)


@pytest.mark.slow
def test_a_published_run_is_planned():
    """The smallest: within what docs/planning.md says of dense runs."""
    run = next(run for run in published.load_runs() if run.id == "mpt1b-h8")
    assert abs(published.planned(run).error) < 0.2


def cluster_of(device: str, gpus: int, days: float, hours: float) -> Cluster:
    return Cluster(device, gpus, days, hours, hours * 2, 10.0, 0.4)


FOUND = [
    cluster_of("a", 8, 40, 7000),
    cluster_of("a", 16, 20, 7600),
    cluster_of("a", 32, 9, 7100),
    cluster_of("b", 8, 99, 9000),
]


def test_the_smallest_and_the_cheapest_cluster_that_keep_the_limit():
    lines = [line.split() for line in answer(FOUND, 25, 0).splitlines()]
    assert [line[:3] for line in lines[1:3]] == [["a", "smallest", "16"], ["a", "cheapest", "32"]]
    assert lines[3][:4] == ["b", "none;", "nearest", "8"]
    # dollars: twice the hours
    lines = [line.split() for line in answer(FOUND, 0, 14_100).splitlines()]
    assert lines[1][:3] == ["a", "smallest", "8"] and lines[2][1] == "none;"
    with pytest.raises(InputError, match="fits no device"):
        answer([], 25, 0)


def question(*argv: str) -> tuple[int, str]:
    with contextlib.redirect_stdout(io.StringIO()) as said:
        code = main([*SMALL, "--validation.interval=0", "--device=h100", *argv])
    return code, said.getvalue()


@pytest.mark.slow
def test_how_many_gpus_is_answered():
    """A day is much for so few tokens; a limit of no time at all is kept by nothing."""
    code, said = apart(question, "--tokens=1e6", "--days=1")
    assert code == 0 and "h100" in said and "smallest" in said
    code, said = apart(question, "--tokens=1e15", "--days=0.001")
    assert code == 1 and "none; nearest" in said


def shared_traces() -> tuple[int, list[float], list[float]]:
    """Traces of one configuration on two devices, and their seconds with and without sharing."""
    cfg = load_config(SMALL, 2, 2)
    stages = Stages()
    inputs = [PlanInputs(2, 2, load_device(name)) for name in ("h100", "a100")]
    together = [make_plan(cfg, one, stages).time.seconds for one in inputs]
    alone = [make_plan(cfg, one).time.seconds for one in inputs]
    return len(stages.wholes), together, alone


@pytest.mark.slow
def test_plans_that_share_a_trace_are_those_that_do_not():
    traces, together, alone = apart(shared_traces)
    assert traces == 1
    assert together == alone and together[0] != together[1]
