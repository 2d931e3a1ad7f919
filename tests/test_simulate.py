"""Training on simulated GPUs: PyTorch's own code for CUDA and NCCL above stand-ins (lab/simulate,
docs/simulate.md).

Skipped where torch is no CUDA build: CI's default suite has one.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lab.bench.device import checks, rival
from lab.simulate import build
from lab.simulate.__main__ import main
from lab.simulate.ranks import Outcome, Simulator
from tests import parity, simulated
from tests.covering import covering_array
from tests.programs import ROOT
from tests.ranks import WORKERS
from tests.runs import ADAMW, CONTEXT_MESHES, EXPERT_MESHES, MESHES, ULYSSES, series, tiny_run
from tools import hang

pytestmark = [
    pytest.mark.simulated,
    pytest.mark.skipif(build.missing() is not None, reason=build.missing() or ""),
]
PATIENT = {"PLUMBLINE_SIMULATED_NCCL_SECONDS": "60"}
HASTY = {"PLUMBLINE_SIMULATED_NCCL_SECONDS": "2"}


@pytest.fixture(scope="module")
def simulator():
    with Simulator() as made:
        yield made


@pytest.fixture
def run(simulator, tmp_path):
    """simulator.run, in a folder of the test."""

    def run(gpus, function, *arguments, environment=PATIENT, **how) -> Outcome:
        how.setdefault("folder", tmp_path / "ranks")
        return simulator.run(gpus, function, *arguments, environment=environment, **how)

    return run


def ended_well(outcome: Outcome) -> Outcome:
    assert outcome.whole, outcome.explain()
    return outcome


def waits_in_steps(outcome: Outcome) -> set[str]:
    """Return where training steps made the host wait, except for the event of the numbers that are
    read late (training/microbatches.py::to_host_async)."""
    found = set()
    for record in outcome.records:
        for inside, why, where, _ in record["waits"] + record["late"]:
            if inside and why != "an event":
                found.add(f"{where}: {why}")
    return found


# The one host-device sync of an MoE layer under expert parallelism: it has to know how many rows to
# send, in ep_dispatch.py or in ep_hosts.py.
ROWS = "parallelisms/ep"
# float32, for which no GPU has a grouped GEMM, reads the groups' sizes
GROUPED = "models/kernels/grouped_product.py"
THE_TEST = "tests/"  # it keeps the gradients
ASKED = "training/optim.py"  # SGD, and weights that are offloaded (training/optim.py::step_if)
NORM = "train.py"  # of weights that are offloaded it is computed on the CPU


def assert_no_waits(outcome: Outcome, *allowed: str) -> None:
    found = {wait for wait in waits_in_steps(outcome) if not wait.startswith(allowed)}
    assert not found, f"a training step waits for the GPU: {found}"


# -------------------------------------------------------------------------------- the same numbers

PLAIN_MODELS = {
    "llama": [],
    "deepseek_v3": parity.EXPERTS["deepseek_v3"],
}
KERNELS = 3e-5  # relative: what the rounding of other kernels makes of gradients of float32


@pytest.mark.parametrize(
    "model",
    ["llama", pytest.param("deepseek_v3", marks=pytest.mark.slow)],
)
def test_one_gpu_is_the_cpu(run, model, tmp_path):
    """The numbers of the plain model on the CPU, within the rounding of other kernels."""
    options = [*ADAMW, *PLAIN_MODELS[model]]
    on_gpu = ended_well(run(1, simulated.trajectories, [options], 1))
    on_cpu = ended_well(run(0, simulated.trajectories, [options], 1, folder=tmp_path / "cpu"))
    problems = parity.compare(model, on_gpu.results[0][0], on_cpu.results[0][0], KERNELS)
    assert not problems, "\n".join(problems)
    assert_no_waits(on_gpu, GROUPED, THE_TEST)
    assert not on_gpu.findings
    assert any("fused_adamw" in operator for operator in on_gpu.records[0]["operators"])


# mesh -> (which combinations of CI's covering array, further options). What meshes compute is for
# tests/test_parallel.py: here each dimension meets streams and NCCL.
MATRIX = {
    "fsdp2": ((0, 1), []),
    "pp2xtp2": ((1,), []),
    "cp2xtp2": ((2,), [ULYSSES]),
    "hsdp2x2": ((3,), []),
}
# mesh -> models of parity.EXPERTS
EXPERT_MATRIX = {
    "ep2": ("qwen3 experts",),
    "experts on ep2xtp2": ("deepseek_v3",),
    "ep4 by host": ("qwen3 experts",),
}
ALL_MESHES = MESHES | CONTEXT_MESHES | EXPERT_MESHES


def marked(mesh: str) -> object:
    """Return the mesh as a parameter of a test."""
    return pytest.param(mesh, marks=[] if mesh == "fsdp2" else [pytest.mark.slow])


@pytest.fixture(scope="module")
def plain_runs(simulator, tmp_path_factory):
    """The trajectories of the plain model on one simulated GPU, for these lists of options. Meshes
    have the same ones: each is run once."""
    known = {}

    def plain_runs(runs: list[list[str]]) -> list[dict]:
        new = list(dict.fromkeys(tuple(one) for one in runs if tuple(one) not in known))
        if new:
            oracle = ended_well(
                simulator.run(
                    1,
                    simulated.trajectories,
                    [list(one) for one in new],
                    1,
                    folder=tmp_path_factory.mktemp("plain"),
                    seconds=100,
                    environment=PATIENT,
                )
            )
            known.update(zip(new, oracle.results[0], strict=True))
        return [known[tuple(one)] for one in runs]

    return plain_runs


def agrees(run, plain_runs, mesh: str, runs: list[list[str]], names: list[str]) -> None:
    """Each run on this mesh of simulated GPUs equals the plain one on one simulated GPU to 1e-5."""
    ranks, options, dp_size = ALL_MESHES[mesh]
    on_mesh = ended_well(
        run(ranks, simulated.trajectories, [[*one, *options] for one in runs], dp_size, seconds=280)
    )
    of_the_model = (
        "--model.",
        "--optimizer.",
        "--training.max_norm",
        "--training.expert_",
        "--lora.",
        "--checkpoint.load_hf",
    )
    shape = [o for o in options if o.startswith("--model.")]
    plain = [[*(o for o in one if o.startswith(of_the_model)), *shape] for one in runs]
    oracles = plain_runs(plain)
    problems = []
    for i, name in enumerate(names):
        seen = parity.whole_model([of_rank[i] for of_rank in on_mesh.results])
        problems += parity.compare(f"{mesh} {name}", seen, oracles[i])
    assert not problems, "\n".join(problems)
    assert_no_waits(on_mesh, GROUPED, ASKED, ROWS, THE_TEST)
    assert not on_mesh.findings


@pytest.mark.cap(300)
@pytest.mark.parametrize("mesh", [marked(mesh) for mesh in MATRIX])
def test_a_mesh_is_one_gpu(run, plain_runs, mesh):
    numbers, more = MATRIX[mesh]
    combinations = covering_array(parity.FACTORS)
    # A GPU refuses weights in float64, which are for checks on a CPU.
    chosen = [combinations[number] | {"dtype": "float32"} for number in numbers]
    runs = [[*parity.options_of(combination), *more] for combination in chosen]
    agrees(run, plain_runs, mesh, runs, [str(combination) for combination in chosen])


@pytest.mark.cap(300)
@pytest.mark.parametrize("mesh", [marked(mesh) for mesh in EXPERT_MATRIX])
def test_a_mesh_with_experts_is_one_gpu(run, plain_runs, mesh):
    models = EXPERT_MATRIX[mesh]
    runs = [[*ADAMW, *parity.EXPERTS[model]] for model in models]
    agrees(run, plain_runs, mesh, runs, list(models))


# -------------------------------------------------------------------------------------- whole runs

DENSE = (
    "--model.dim=64 --model.n_layers=4 --model.n_heads=4 --model.n_kv_heads=2 --model.head_dim=16 "
    "--model.hidden_dim=96 "
    "--model.vocab_size=263 --data.tokenizer=bytes --training.seq_len=32 "
    "--training.global_batch_size=8 "
    "--training.local_batch_size=2 --training.steps=3 --lr_schedule.warmup_steps=1 "
    "--optimizer.eps=1e-5 "
    "--checkpoint.interval=2 --metrics.interval=1 --metrics.tensorboard=false "
    "--validation.interval=2 --validation.steps=1 "
    "--data.validation_fraction=0.2 --debug.sample_tokens=4 "
    "--training.loss_chunk_tokens=40"
).split()
PP2, EP2 = "--parallelism.pipeline_parallel=2", "--parallelism.expert_parallel=2"
CP2 = "--parallelism.context_parallel=2"
HIERARCHICAL = "--parallelism.expert_exchange=hierarchical"
QWEN3_EXPERTS = [
    "--model.family=qwen3",
    "--model.n_experts=8",
    "--model.experts_per_token=3",
    "--model.expert_dim=16",
]
OFFLOAD = "--parallelism.cpu_offload=true"


WHOLE_RUNS = {  # name -> (GPUs, options, where a step may wait)
    "default": (2, ["--checkpoint.export_hf=float32"], ()),
    "documents, gather": (2, ["--data.mask_documents=true", CP2], ()),
    "flash, workers": (1, ["--training.attention=flash", "--data.workers=1"], ()),
    "offload": (2, [OFFLOAD], (ASKED, NORM)),
    # of two hosts of one GPU
    "experts, ep by host, in chunks": (
        2,
        [*QWEN3_EXPERTS, EP2, HIERARCHICAL, "--parallelism.expert_chunks=2"],
        (ROWS,),
    ),
    "pipeline of shards": (4, [PP2], ()),
    "zbv": (2, [PP2, "--parallelism.pipeline_schedule=zbv", "--training.local_batch_size=1"], ()),
}
# PyTorch's CUDA sanitizer looks for races between the streams of these
SANITIZED = WHOLE_RUNS.keys() - {"flash, workers", "zbv"}
# options that change no number, so that the run on the CPU does without them
ALIKE_ON_THE_CPU = (
    "--parallelism.",
    "--training.attention",
    "--training.local_batch_size",
    "--checkpoint.",
    "--activation_checkpoint.",
    "--data.workers",
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> list[str]:
    """Return the options of a separate corpus."""
    return [
        o
        for o in tiny_run(tmp_path_factory.mktemp("corpus"))
        if o.startswith(("--data.source", "--data.cache"))
    ]


def a_run(corpus: list[str], folder: Path, *options: str) -> list[str]:
    given = {option.split("=")[0] for option in options}
    kept = [option for option in DENSE if option.split("=")[0] not in given]
    return [*kept, *corpus, *options, f"--run.folder={folder}"]


@pytest.fixture(scope="module")
def run_on_the_cpu(simulator, corpus, tmp_path_factory):
    """The folder of a run with these options on the CPU. Runs that differ in their mesh alone have
    the same one: each is made once."""
    known = {}

    def run_on_the_cpu(options: list[str]) -> Path:
        if tuple(options) not in known:
            folder = tmp_path_factory.mktemp("cpu")
            on_cpu = simulator.run(
                0,
                simulated.train_here,
                a_run(corpus, folder / "run", *options),
                folder=folder / "processor",
                environment=PATIENT,
            )
            assert on_cpu.whole and on_cpu.results[0]["code"] == 0, on_cpu.explain()
            known[tuple(options)] = folder / "run"
        return known[tuple(options)]

    return run_on_the_cpu


@pytest.mark.slow
@pytest.mark.parametrize("name", WHOLE_RUNS)
def test_a_run_trains_as_on_the_cpu(run, run_on_the_cpu, corpus, name, tmp_path):
    """With an asynchronous save, validation, a sample at the end: the losses of one CPU process, to
    bfloat16's rounding. Of those in SANITIZED, no race between streams."""
    gpus, options, may_wait = WHOLE_RUNS[name]
    argv = a_run(corpus, tmp_path / "run", *options)
    environment = PATIENT | ({"LOCAL_WORLD_SIZE": "1"} if HIERARCHICAL in options else {})
    sanitize = name in SANITIZED
    outcome = run(gpus, simulated.train_here, argv, sanitize=sanitize, environment=environment)
    assert outcome.whole and [seen["code"] for seen in outcome.results] == [0] * gpus, (
        outcome.explain()
    )
    assert not outcome.findings
    assert_no_waits(outcome, *may_wait)
    plain = [option for option in options if not option.startswith(ALIKE_ON_THE_CPU)]
    on_cpu = run_on_the_cpu(plain)
    losses, wanted = series(tmp_path / "run"), series(on_cpu)
    assert losses.keys() == wanted.keys()
    for step, loss in losses.items():
        assert loss == pytest.approx(wanted[step], rel=2e-3), f"step {step}"
    validated, wanted = (series(folder, "validation_loss") for folder in (tmp_path / "run", on_cpu))
    assert validated.keys() == wanted.keys() and validated
    for step, loss in validated.items():
        assert loss == pytest.approx(wanted[step], rel=2e-3), f"validation after step {step}"


@pytest.mark.slow
def test_kernels_of_a_step_and_of_a_sample(run):
    """cuDNN's attention plans every new shape, and a sample has one for each token. A loss in
    pieces sums the gradient of its weight inside the GEMM."""
    trains = ended_well(run(1, simulated.one_step))
    used = trains.records[0]["operators"]
    assert "aten::_scaled_dot_product_cudnn_attention" in used
    rows = checks.ROWS * checks.TOKENS
    assert used["aten::addmm.dtype_out"] == -(-rows // 40)  # training.loss_chunk_tokens
    samples = ended_well(run(1, simulated.sampled))
    used = samples.records[0]["operators"]
    assert not [name for name in used if "cudnn" in name]
    assert [name for name in used if "flash_attention" in name]


@pytest.mark.slow
@pytest.mark.cap(200)
def test_a_resumed_run_is_bitwise_the_whole_one(run, corpus, tmp_path):
    """Resume also after SIGTERM, with the state of the GPU's generator; and a model that was
    exported is loaded again."""
    options = ["--training.steps=6", "--checkpoint.export_hf=float32"]
    whole = ended_well(
        run(2, simulated.runs, [a_run(corpus, tmp_path / "whole", *options)], folder=tmp_path / "a")
    )
    stopped = run(
        2, simulated.stopped, a_run(corpus, tmp_path / "parts", *options), 3, folder=tmp_path / "b"
    )
    assert stopped.whole and {seen["code"] for seen in stopped.results} == {75}, stopped.explain()
    resumed = run(
        2, simulated.runs, [a_run(corpus, tmp_path / "parts", *options)], folder=tmp_path / "c"
    )
    assert resumed.whole and resumed.results[0][0]["code"] == 0, resumed.explain()
    assert series(tmp_path / "parts") == series(tmp_path / "whole")
    assert series(tmp_path / "parts", "grad_norm") == series(tmp_path / "whole", "grad_norm")
    exported = tmp_path / "whole" / "hf" / "step-00000006"
    argv = a_run(
        corpus,
        tmp_path / "loaded",
        "--training.steps=1",
        f"--checkpoint.load_hf={exported}",
        "--optimizer.lr=1e-9",
    )
    loaded = run(2, simulated.runs, [argv], folder=tmp_path / "d")
    assert loaded.whole and loaded.results[0][0]["code"] == 0, loaded.explain()
    assert series(tmp_path / "loaded")[1] < series(tmp_path / "whole")[1]
    assert not (whole.findings + stopped.findings + resumed.findings + loaded.findings)


@pytest.mark.slow
def test_a_rank_that_raises_ends_with_its_error(run, corpus, tmp_path):
    """The rank prints its error and exits; it does not wait for ranks that wait for it, as NCCL's
    end of a group would."""
    argv = a_run(corpus, tmp_path / "run")
    environment = {"PLUMBLINE_SIMULATED_NCCL_SECONDS": "20"}
    outcome = run(2, simulated.raising, argv, seconds=60, environment=environment)
    assert outcome.codes[1] == 1, outcome.explain()
    log = outcome.logs[1].read_text()
    assert "a mistake of this rank alone" in log + outcome.errors[1]


# train.py on a simulated GPU. Rank 1 is killed in its 12th step; the other does its 20th when a new
# rank has come to join it.
KILLED = """
import os, signal, sys, time
from lab.simulate import kernels
kernels.install()
import train
from checkpoint.rounds import Door
real_step, calls = train.train_step, []
is_new = os.environ["PLUMBLINE_ROUNDS"] == "newcomer"
def train_step(*arguments):
    calls.append(1)
    if not is_new and os.environ["RANK"] == "1" and len(calls) == 12:
        os.kill(os.getpid(), signal.SIGKILL)
    deadline = time.monotonic() + 120
    while not is_new and len(calls) == 20 and time.monotonic() < deadline:
        if Door.here.run.stop.called:
            break
        time.sleep(0.05)
    return real_step(*arguments)
train.train_step = train_step
sys.exit(train.main())
"""


@pytest.mark.slow
def test_a_run_goes_on_without_a_rank_by_aborting_nccl(run, run_on_the_cpu, corpus, tmp_path):
    """And a new rank gets the state of its GPU from the other. Rounding of float32 grows to 2e-4, as
    in a run that loses no rank."""
    options = ["--training.steps=30"]
    whole = run_on_the_cpu(options)
    argv = a_run(
        corpus, tmp_path / "run", *options, "--run.fault_tolerant=true", "--run.device=cuda"
    )
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    environment = os.environ | {
        "LD_PRELOAD": str(build.library()),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "PLUMBLINE_SIMULATED_GPUS": "2",
        "PLUMBLINE_SIMULATED_SHARED": str(tmp_path),
    }
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    launcher = [sys.executable, "-m", "tools.launch", "--nproc-per-node=2", "--max-restarts=1"]
    done = subprocess.run(
        [*launcher, script, *argv, "--parallelism.data_parallel_replicate=2"],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "1 of 2 replicas go on after step 11" in said, said
    assert "2 of 2 replicas go on" in said, said
    assert "NCCL communicator was aborted" in said, said
    assert series(tmp_path / "run") == pytest.approx(series(whole), rel=1e-3)


# ------------------------------------------------------------- what only a GPU would show is named


@pytest.mark.parametrize(
    "mistake, said",
    [
        ("item", ["tests/simulated.py", "item"]),
        pytest.param("pageable", ["a copy from pageable memory"], marks=pytest.mark.slow),
        pytest.param(
            "host tensor",
            ["Expected all tensors to be on the same device", "simulated.py"],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_negative_control_a_mistake_in_a_step(run, corpus, tmp_path, mistake, said):
    outcome = run(1, simulated.with_mistake, a_run(corpus, tmp_path / "run"), mistake)
    found = f"{waits_in_steps(outcome)} {outcome.errors[0]}"
    assert all(words in found for words in said), found
    assert outcome.whole == (mistake != "host tensor")


@pytest.mark.slow
def test_negative_control_a_read_on_another_stream(run, tmp_path):
    raced = run(1, simulated.reads_on_another_stream, sanitize=True)
    assert not raced.whole and "CUDASanitizerErrors" in raced.explain()
    log = raced.logs[0].read_text()
    assert log.count("in reads_on_another_stream\n") > 2, "the stacks of both, and of the exception"
    ended_well(run(1, simulated.waits_for_the_stream, sanitize=True, folder=tmp_path / "ordered"))


@pytest.mark.slow
def test_negative_control_pinned_memory_written_too_early(run, tmp_path):
    early = run(1, simulated.writes_pinned_memory, False)
    assert any(
        "pinned memory was written before its copy" in finding and "simulated.py" in finding
        for finding in early.findings
    )
    assert not run(1, simulated.writes_pinned_memory, True, folder=tmp_path / "late").findings


@pytest.mark.slow
def test_negative_control_host_memory_read_too_early(run, tmp_path):
    assert run(1, simulated.reads_before_it_arrives, True).results == [50.0]
    early = run(1, simulated.reads_before_it_arrives, False, folder=tmp_path / "early").results[0]
    assert early != early, "it has arrived before anybody waited"


@pytest.mark.slow
def test_negative_control_a_result_used_before_its_collective(run, tmp_path):
    slow = PATIENT | {"PLUMBLINE_SIMULATED_NCCL_DELAY": "100000"}
    assert run(2, simulated.uses_a_result_too_early, True, environment=slow).results == [8.0, 8.0]
    early = run(
        2, simulated.uses_a_result_too_early, False, environment=slow, folder=tmp_path / "early"
    ).results
    assert all(total != total for total in early)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mistake, sentence",
    [
        (
            simulated.leaves_one_out,
            r"rank 1 (has left and )?never joined all-reduce of 4 float32 \(sum\), collective 2 of the "
            "group of ranks 0 1",
        ),
        (
            simulated.other_order,
            r"differs: rank 0 calls all-reduce of 4 float32 \(sum\), rank 1 all-reduce of 8 float32 "
            r"\(sum\)",
        ),
        (simulated.sends_at_the_same_time, "never joined a communicator of 2 ranks"),
        (simulated.closes_alone, "rank 1 (has left and )?never closed the group of ranks 0 1"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_negative_control_ranks_that_do_not_agree(run, mistake, sentence):
    outcome = run(2, mistake, environment=HASTY, seconds=60)
    assert not outcome.whole
    assert re.search(sentence, "\n".join(outcome.findings)), outcome.explain()


@pytest.mark.slow
def test_negative_control_nccl_takes_no_memory_of_the_host(run):
    outcome = run(2, simulated.host_memory, environment=HASTY)
    assert (
        not outcome.whole and "No backend type associated with device type cpu" in outcome.explain()
    )


# -------------------------------------------------------------- what a GPU session would run first

# inductor's code for CUDA is what a simulation does not have
NOT_HERE = {"compiled", "documents_compiled"}
NOT_HERE |= {"control"}  # TF32 is a property of a GPU's matmuls
NOT_HERE |= {"recorded"}  # there are no CUDA graphs
NOT_HERE |= {"error"}  # starts its own processes; test_a_rank_that_raises_ends_with_its_error


@pytest.mark.slow
@pytest.mark.cap(200)
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_checks_of_a_device_pass(run, tmp_path, ranks):
    names = [name for name, check in checks.CHECKS.items() if check.ranks == ranks]
    names = [name for name in names if name not in NOT_HERE]
    assert len(names) > 4
    outcome = ended_well(
        run(ranks, simulated.check_errors, names, tmp_path / "checks", seconds=180)
    )
    for seen in outcome.results:
        wrong = {
            name: checks.failures(errors, checks.CHECKS[name].limit)
            for name, errors in seen.items()
        }
        assert not any(wrong.values()), wrong


@pytest.mark.slow
def test_pytorchs_attention_takes_the_place_of_autoresearchs(run):
    """Not in `device.checks`, since no CPU has it."""
    outcome = ended_well(run(1, simulated.rivals_attention))
    assert outcome.results[0] < rival.ROUNDING


# ------------------------------------------------------------------------------------- the command


@pytest.mark.slow
def test_the_command_reports_a_run(tmp_path):
    command = [sys.executable, "-m", "lab.simulate", "--gpus=2", "configs/llama_debug.toml"]
    command += [*DENSE, "--data.workers=0"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110 * WORKERS)
    assert done.returncode == 0, done.stdout + done.stderr
    for sentence in (
        "host-device syncs in a training step: 0",
        "dp_shard (ranks 0 1) reduce-scatter",
        "most memory that a GPU held",
        "Not shown by a simulation: speed",
        "nothing was found",
    ):
        assert sentence in done.stdout, done.stdout


@pytest.mark.parametrize(
    "options, sentence",
    [
        (["--gpus=0"], "between 1 and 16"),
        (["configs/llama_8b.toml", "--data.source=stdlib", "--data.tokenizer=bytes"], "has 8,"),
        (["--training.float8=rowwise"], "no float8"),
        (["--compile.enabled=true"], "inductor"),
        (["--parallelism.tensor_parallel=3", "--gpus=2"], "tensor_parallel"),
        (["--training.stepz=3"], "training.steps"),
    ],
)
def test_the_command_refuses_what_it_cannot_do(options, sentence, capsys):
    assert main(options) == 2
    assert sentence in capsys.readouterr().err


# -------------------------------------------------------------------------- who hangs (tools/hang.py)


@pytest.mark.slow
def test_a_rank_that_sleeps_in_backward_is_named(run, tmp_path):
    """The other one's host has gone ahead of its GPU, which waits in NCCL."""
    folder = tmp_path / "run"
    options = [*tiny_run(tmp_path), "--run.device=cuda", f"--run.folder={folder}"]
    run(2, simulated.hangs_in_backward, options, seconds=25)
    verdict = hang.judge(hang.read(folder))
    assert verdict.culprits == [1], verdict
    said = (
        "rank 1 .*: backward of layers.0, microbatch 1 of step 2, at tests/simulated.py:.*, waits "
        "for no rank .*; 1 waits in its "
    )
    assert re.match(said, verdict.lines[0]), verdict.lines


@pytest.mark.slow
def test_a_rank_that_leaves_out_a_collective_of_nccl_is_named(run, tmp_path):
    run(2, simulated.hangs_without_one, tmp_path, seconds=12)
    verdict = hang.judge(hang.read(tmp_path))
    assert verdict.culprits == [1], verdict
    assert "1 waits in its all_reduce #2 of group" in verdict.lines[0], verdict.lines
    dumped = hang.read_dump(tmp_path / "logs" / "nccl-0")
    assert [(flight.name, flight.number, flight.ended) for flight in dumped] == [
        ("all_reduce", 1, True),
        ("all_reduce", 2, False),
    ]
