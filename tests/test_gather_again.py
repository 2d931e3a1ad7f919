"""activation_checkpoint.gather_again: the numbers of the plain model, less kept from forward to
backward for two more all-gathers in a block, and a plan that says so."""

import shutil
from unittest import mock

import pytest
from torch._dynamo.backends import debugging

import train
from configs.load import load_config
from reliability.collectives import Watch
from tests.fused import AGAIN, ASYNC, FUSED, SELECTIVE, overlapped
from tests.parity import MESHES, STEPS, check, combination_of, compare, plain
from tests.ranks import run_ranks
from tests.runs import COMPILED
from tests.steps import apart
from tools.plan import trace
from tools.plan.device import load_device
from tools.plan.estimate import Machine, estimate
from tools.plan.stack import OURS
from tools.plan.trace import trace_step

TP2 = "--parallelism.tensor_parallel=2"
# one sequence: where a sequence is split, gathered ones of several are copied into order
MODEL = (
    "--model.dim=96 --model.n_layers=3 --model.n_heads=8 --model.n_kv_heads=4 --model.head_dim=12 "
    "--model.hidden_dim=308 --model.vocab_size=261 --data.tokenizer=bytes --training.seq_len=64 "
    "--training.global_batch_size=1 --training.param_dtype=float32 --lr_schedule.warmup_steps=0"
).split()
SEQUENCE = 64 * 96 * 4  # bytes


@pytest.mark.slow
@pytest.mark.cap(300)
def test_a_mesh_equals_the_plain_model():
    chosen = {"checkpointing": "selective", "accumulation": "reduced once", "clipping": "in force"}
    check("tp2", [combination_of(dtype="float64", **chosen)], [AGAIN[1]])


class Gathers(Watch):
    """Counts the all-gathers of tensor parallelism in blocks and at the head: FSDP's are others."""

    count = 0

    def see(self, name, func, args):
        self.count += func.namespace == "_c10d_functional" and name == "all_gather_into_tensor"


def gathers(runs: list[list[str]]) -> list[int]:
    return [gathers_of_a_step(options) for options in runs]


def gathers_of_a_step(options: list[str]) -> int:
    job = train.build(load_config([*MODEL, TP2, *options], 2, 2))
    with Gathers() as seen:
        train.train_step(job, trace.batch_of(job, 1))
    return seen.count


@pytest.mark.slow
def test_a_block_gathers_twice_more():
    for kept, again in run_ranks(2, gathers, [[SELECTIVE], AGAIN]):
        assert again == kept + 2 * 3


@pytest.mark.exhaustive
@pytest.mark.cap(300)
@pytest.mark.skipif(
    shutil.which("c++") is None, reason="inductor compiles with a C++ compiler, and there is none"
)
def test_asynchronous_tensor_parallelism_fuses_as_without_and_hides_what_is_gathered_again():
    """Weights that are gathered again are for gradients of weights, and no part of a fused
    operator. They travel while the gradient of another weight is computed. By hand, after a change of
    parallelisms/async_tp.py or of PyTorch: the graph that it rewrites is in tests/test_parallelisms.py."""
    ranks, options, dp_size = MESHES["tp2"]
    results = run_ranks(ranks, overlapped, [*ASYNC, *AGAIN, *options], dp_size, timeout=270)
    assert not [p for seen in results for p in compare("tp2", seen.trajectory, plain())]
    of_blocks = 3 * STEPS
    for seen in results:
        assert seen.calls == dict.fromkeys(FUSED, 4 * of_blocks)
        assert seen.behind.count(1) == 2 * of_blocks


def scattered(options: list[str]) -> list[int]:
    """Return, for the reduce-scatters of a block's backward, the bytes of the weights of the GEMMs
    that are summed there."""
    cfg = load_config([*MODEL, TP2, *COMPILED, *options], 2, 2)
    step = trace_step(cfg, 2, 2, True)
    return [
        op.summed_weights
        for where, _, op in step.ops()
        if op.kind == "reduce-scatter" and where.phase == "backward" and where.block == 1
    ]


def test_a_plan_copies_the_weights_of_gemms_that_become_one():
    """First the MLP's, then attention's: inductor fuses a reduce-scatter with one GEMM."""
    mlp = 2 * 308 // 2 * 96 * 4
    attention = (8 + 4 + 4) * 12 // 2 * 96 * 4
    assert apart(scattered, AGAIN) == [mlp, attention]


def exposed(of_float8: list[float]) -> list[float]:
    """Return the seconds for which a planned step waits for reduce-scatters, if all that can be is
    hidden."""
    step = trace_step(load_config([*MODEL, TP2, *COMPILED], 2, 2), 2, 2, True)
    seconds = []
    for float8 in of_float8:
        stack = OURS.model_copy(update={"hidden_tensor": 1.0, "float8": float8})
        time = estimate(step, Machine(load_device("h100"), 2, True, stack=stack))
        seconds.append(time.lines["tp", "reduce-scatter"].exposed)
    return seconds


def test_a_plan_waits_for_sums_of_float8_gemms():
    """parallelisms/async_tp.py does not make one GEMM of a sum of float8 GEMMs."""
    in_bfloat16, in_float8 = apart(exposed, [1.0, 1.6])
    assert in_bfloat16 == 0 < in_float8


def kept_by_a_compiled_block(options: list[str]) -> int:
    """Return the bytes that the partitioner of a compiled block saves for backward, without
    parameters and the tables of rotary positions."""
    partition = debugging.min_cut_rematerialization_partition
    saved = []

    def watched(graph, inputs, *how, num_fwd_outputs, **more):
        forward, backward = partition(graph, inputs, *how, num_fwd_outputs=num_fwd_outputs, **more)
        (output,) = (node for node in forward.graph.nodes if node.op == "output")
        values = [node.meta.get("val") for node in output.args[0][num_fwd_outputs:]]
        made = [node.op != "placeholder" for node in output.args[0][num_fwd_outputs:]]
        saved.append(
            sum(v.numel() * v.element_size() for v, own in zip(values, made, strict=True) if own)
        )
        return forward, backward

    job = train.build(load_config([*MODEL, TP2, *COMPILED, *options], 2, 2))
    with mock.patch.object(debugging, "min_cut_rematerialization_partition", watched):
        train.train_step(job, trace.batch_of(job, 1))
    (bytes_saved,) = saved
    return bytes_saved


def planned(options: list[str]) -> int:
    """Return the same of the second block by the planner."""
    step = trace_step(load_config([*MODEL, TP2, *COMPILED, *options], 2, 2), 2, 2, False)
    kept = [
        memory.size
        for memory in step.memory.values()
        if memory.kind == "activations" and memory.born.block == 1
    ]
    return sum(kept) - SEQUENCE // 2  # its output, which the third block keeps


@pytest.mark.slow
@pytest.mark.cap(120)
def test_a_compiled_block_keeps_what_is_planned():
    """Two gathered sequences less. Kept without a compiler are also the sums of two matmuls, before
    and after they are scattered."""
    kept = run_ranks(2, kept_by_a_compiled_block, [SELECTIVE])[0]
    again = run_ranks(2, kept_by_a_compiled_block, AGAIN)[0]
    assert kept - again == 2 * SEQUENCE
    assert apart(planned, [SELECTIVE]) == kept
    assert apart(planned, AGAIN) == again
