"""Table of optimizers, and Muon: torch.optim.Muon's arithmetic on whole matrices, on every mesh."""

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import train
from checkpoint import state
from configs.load import load_config
from configs.schema import Optimizer
from models import MODELS
from parallelisms import gather_matrices
from parallelisms.gather_matrices import Layout, deal, rounds_of
from tests import parity
from tests.parity import EXPERTS, MUON
from tests.ranks import run_ranks
from tests.runs import EXPERT_MESHES, MESHES
from tests.steps import apart
from tools.plan.repeat import traced
from training import optimizers
from training.muon import newton_schulz_flops, orthogonalised
from training.optim import build_optimizer, set_learning_rate, step_if
from training.optimizer_check import wrong_rows
from training.optimizers import OPTIMIZERS

# ---------------------------------------------------------------------------- torch.optim.Muon

SHAPES = [(6, 10), (10, 6), (8, 8), (3, 33)]
ALL = [("*", True)]


class Matrices(nn.Module):
    def __init__(self, shapes: list[tuple[int, ...]]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(shape)) for shape in shapes])

    def new_gradients(self) -> None:
        for weight in self.weights:
            weight.grad = torch.randn(weight.shape)


def options(**more: object) -> Optimizer:
    return Optimizer(kind="muon", lr=0.03, weight_decay=0.2, **more)


@pytest.mark.parametrize("adjust_lr_fn", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("momentum", [None, 0.8])
def test_one_process_updates_as_torch_does(adjust_lr_fn, momentum):
    """Bit by bit, and so through `found_inf` as a training step calls it. torch iterates in
    bfloat16."""
    ours, theirs = Matrices(SHAPES), Matrices(SHAPES)
    how = {"lr": 0.03, "weight_decay": 0.2, "adjust_lr_fn": adjust_lr_fn}
    options = Optimizer(kind="muon", momentum=momentum, ns_dtype="bfloat16", **how)
    optimizer = build_optimizer(ours, ALL, options, ALL)
    expected = torch.optim.Muon(theirs.parameters(), momentum=momentum or 0.95, **how)
    for _ in range(4):
        ours.new_gradients()
        for mine, other in zip(ours.weights, theirs.weights, strict=True):
            other.grad = mine.grad.clone()
        step_if(torch.tensor(True), optimizer)
        expected.step()
    for mine, other in zip(ours.weights, theirs.weights, strict=True):
        assert torch.equal(mine, other)
        kept = optimizer.state[mine]["momentum_buffer"]
        assert torch.equal(kept, expected.state[other]["momentum_buffer"])


def test_experts_are_orthogonalised_one_by_one():
    stack = torch.randn(5, 6, 9)
    together = orthogonalised(stack)
    for matrix, result in zip(stack, together, strict=True):
        torch.testing.assert_close(orthogonalised(matrix[None])[0], result)
        values = torch.linalg.svdvals(result)
        assert 0.6 < values.min() and values.max() < 1.3


def test_a_step_that_does_not_count_changes_nothing():
    model = Matrices(SHAPES)
    optimizer = build_optimizer(model, ALL, options(), [("weights.0", False), *ALL])
    model.new_gradients()
    step_if(torch.tensor(True), optimizer)
    before = [t.clone() for t in everything(model, optimizer)]
    model.new_gradients()
    for weight in model.weights:
        weight.grad[0, 0] = math.nan
    step_if(torch.tensor(False), optimizer)
    after = everything(model, optimizer)
    assert len(before) == 4 + 3 + 3
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def everything(model: Matrices, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    kept = [t for weight in model.weights for t in optimizer.state[weight].values()]
    return [weight.data for weight in model.weights] + kept


@pytest.mark.parametrize(
    "name, flavor", [("llama", "debug"), ("qwen3", "debug_moe"), ("deepseek_v3", "debug")]
)
def test_muon_gets_the_hidden_matrices(name, flavor):
    """AdamW gets the rest: embedding, output projection, norms, routers."""
    family = MODELS[name]
    sizes = {"n_layers": 2, "vocab_size": 11} | ({"q_rank": 8} if name == "deepseek_v3" else {})
    with torch.device("meta"):
        model = family.build(family.Args(**family.numbers.flavors[flavor] | sizes))
    optimizer = build_optimizer(model, family.decay, options(), family.matrices)
    names = {p: n for n, p in model.named_parameters()}
    by_rule = {"Muon": set(), "AdamW": set()}
    for group in optimizer.param_groups:
        by_rule[group["rule"]] |= {names[p] for p in group["params"]}
    others = ("norm.weight", "tok_embeddings.weight", "output.weight", "router.weight")
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    assert by_rule["AdamW"] == {n for n in trained if n.endswith(others)}
    assert by_rule["Muon"] == trained - by_rule["AdamW"]


# ------------------------------------------------------------------------------------ any mesh

# One on each rank of two, and their rows divide evenly: FSDP shards each by row.
FEW_EXPERTS = [
    *EXPERTS["qwen3 experts"],
    "--model.n_experts=2",
    "--model.experts_per_token=1",
    "--model.expert_dim=12",
]
RUNS = {  # name: (mesh, further options)
    "ep2": ("ep2", EXPERTS["qwen3 experts"]),
    "rows of experts": ("ep2xfsdp2", FEW_EXPERTS),
}
FAST = "ep2"


@pytest.mark.cap(300)
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n == FAST else pytest.mark.slow) for n in RUNS]
)
def test_a_mesh_updates_as_one_process(name):
    """In addition to the runs with Muon of every mesh of tests/test_parallel.py and
    tests/test_experts.py."""
    mesh, more = RUNS[name]
    assert not problems_on(mesh, more, parity.trajectory)


def problems_on(mesh: str, more: list[str], fn: Callable) -> list[str]:
    ranks, of_mesh, dp_size = (MESHES | EXPERT_MESHES)[mesh]
    run = [*more, *of_mesh]
    oracle = parity.plain(*run, optimizer="muon")
    results = run_ranks(ranks, fn, [*MUON, *run, parity.seed_of(oracle)], dp_size)
    return parity.compare(mesh, parity.whole_model(results), oracle)


def with_shards_orthogonalised(run: list[str], dp_size: int) -> dict:
    """Apply torch.optim.Muon to shards: each rank takes its own for the whole."""

    def apply(self, shards, compute):
        for shard in shards:
            if shard.numel():
                shard.copy_(compute(gather_matrices.stacked(shard)).view_as(shard))

    gather_matrices.GatheredMatrices.apply = apply
    return parity.trajectory(run, dp_size)


@pytest.mark.slow
def test_negative_control_of_the_comparison():
    problems = problems_on("fsdp2", [], with_shards_orthogonalised)
    assert any("weights of layers" in problem for problem in problems), problems


def test_every_matrix_has_one_owner_and_the_work_is_spread():
    """A model of 70B on 8 x 8 ranks: no rank has much more to do than the mean, or than its largest
    matrix."""
    ranks = range(64)
    shapes = [(8192, 8192), (1024, 8192), (1024, 8192), (8192, 8192), *[(28672, 8192)] * 3] * 80

    def layout(rows: int, columns: int) -> Layout:
        step = rows // 64
        boxes = {r: ((0, 1), (r * step, r * step + step), (0, columns)) for r in ranks}
        return Layout((1, rows, columns), boxes, {r: (r,) for r in ranks})

    layouts = [layout(*shape) for shape in shapes]
    costs = [newton_schulz_flops(*shape) for shape in shapes]
    tasks = deal(layouts, newton_schulz_flops)
    assert sorted(task.weight for task in tasks) == list(range(len(shapes)))
    load = dict.fromkeys(ranks, 0)
    for task in tasks:
        load[task.owner] += costs[task.weight]
    assert max(load.values()) < 1.1 * sum(costs) / 64
    limit = gather_matrices.ROUND_ELEMENTS
    for by_owner in rounds_of(tasks, layouts):
        for of_owner in by_owner.values():
            sizes = [math.prod(shapes[task.weight]) for task in of_owner]
            assert len(sizes) == 1 or sum(sizes) <= limit


def test_a_matrix_is_gathered_inside_its_owner_s_replica_and_given_to_all():
    """Two replicas of two ranks, four matrices: each rank computes one."""
    ranks = range(4)
    boxes = {rank: ((0, 1), (4 * (rank % 2), 4 * (rank % 2) + 4), (0, 8)) for rank in ranks}
    places = {rank: (rank // 2, rank % 2) for rank in ranks}
    layout = Layout((1, 8, 8), boxes, places, replicated=(0,))
    tasks = deal([layout] * 4, lambda rows, columns: rows * columns)
    assert sorted(task.owner for task in tasks) == list(ranks)
    for task in tasks:
        assert {places[rank][0] for rank in task.senders} == {places[task.owner][0]}
        assert sum(gather_matrices.size_of(box) for box in task.senders.values()) == 8 * 8
        assert task.receivers == boxes


def several_rounds(run: list[str], dp_size: int) -> tuple[dict, int]:
    gather_matrices.ROUND_ELEMENTS = 2500
    rounds = []
    real = gather_matrices.GatheredMatrices.apply

    def apply(self, *args):
        rounds.append(len(self.rounds))
        return real(self, *args)

    gather_matrices.GatheredMatrices.apply = apply
    return parity.trajectory(run, dp_size), rounds[0]


def test_rounds_do_not_change_the_update():
    oracle = parity.plain(optimizer="muon")
    seen = run_ranks(2, several_rounds, [*MUON, parity.seed_of(oracle)], 2)
    assert not parity.compare("rounds", seen[0][0], oracle)
    assert seen[0][1] == seen[1][1] >= 4


# ----------------------------------------------------------------------------------- the table


def test_every_kind_that_an_option_names_has_a_row():
    assert Optimizer.model_fields["kind"].annotation.__args__ == tuple(OPTIMIZERS)


@pytest.mark.parametrize("momentum", [None, 0.9])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_table_says_what_each_optimizer_keeps(kind, momentum):
    if kind == "adamw" and momentum:
        pytest.skip("it has none")
    cfg = Optimizer(kind=kind, momentum=momentum)
    model = Matrices([(2, 3), (4,)])
    optimizer = build_optimizer(model, ALL, cfg, [("weights.0", True), ("*", False)])
    assert wrong_rows(optimizer) == []


def test_lr_scale_multiplies_the_learning_rate_of_a_group():
    model = Matrices(SHAPES)
    cfg = options(lr_multipliers=(("weights.0", 0.25),))
    optimizer = build_optimizer(model, ALL, cfg, [("weights.0", False), *ALL])
    assert rates(optimizer) == {"Muon": 0.03, "AdamW": 0.03 * 0.25}
    set_learning_rate(optimizer, 0.5)
    assert rates(optimizer) == {"Muon": 0.5, "AdamW": 0.125}


def rates(optimizer: torch.optim.Optimizer) -> dict[str, float]:
    return {group["rule"]: group["lr"] for group in optimizer.param_groups}


# ---------------------------------------------------------------------------------------- plan


def planned(layers: int, ranks: int, more: tuple[str, ...] = ()) -> tuple[int, int, dict]:
    """FLOPs of the optimizer on rank 0, bytes of its all-to-alls, bytes before the step."""
    run = [*parity.OPTIONS, "--optimizer.kind=muon", f"--model.n_layers={layers}", *more]
    run.append(f"--training.local_batch_size={parity.BATCH // ranks}")
    step = traced(load_config(run, ranks, ranks), ranks, ranks, on_gpu=True)
    flops = exchanged = 0
    for where, times, op in step.ops():
        if where.phase == "optimizer":
            flops += times * op.matmul_flops
            exchanged += times * op.message
    return flops, exchanged, step.before()


def counted(layers: int) -> tuple[int, int]:
    """Return the FLOPs that a rank of two multiplies in the optimizer's step, and its bytes of
    state."""
    from torch.utils.flop_counter import FlopCounterMode

    run = [*parity.OPTIONS, "--optimizer.kind=muon", f"--model.n_layers={layers}"]
    run.append(f"--training.local_batch_size={parity.BATCH // 2}")
    job = train.build(load_config(run, 2, 2))
    optimizers.materialise(job.optimizer)
    for param in job.model.parameters():
        param.grad = torch.ones_like(param)
    with FlopCounterMode(display=False) as counter:
        step_if(torch.tensor(True), job.optimizer)
    tensors = itertools.chain(*(kept.values() for kept in job.optimizer.state.values()))
    size = sum(state.local(t).numel() * t.element_size() for t in tensors)
    return counter.get_total_flops(), size


@pytest.mark.slow
@pytest.mark.cap(200)
def test_the_plan_counts_what_a_rank_orthogonalises():
    """By the shapes of the matrices that rank 0 gets, of more layers than are traced with AdamW: they
    do not follow from a shallow model's."""
    layers = 7
    flops, exchanged, before = apart(planned, layers, 2)
    real, size = run_ranks(2, counted, layers)[0]
    assert flops == real > 0 and exchanged > 0
    assert before["optimizer state"] == size
