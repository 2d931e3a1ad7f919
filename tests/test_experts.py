"""Models with MoE layers: every mesh computes what one plain process computes.

`tests/parity.py` says what is compared. As in tests/test_context.py, the runs of a mesh are few
combinations of settings.
"""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import train
from configs.load import load_config
from models import moe
from models.kernels import grouped_product as grouped
from parallelisms.mesh import world
from tests.parity import (
    BATCH,
    BETWEEN_OTHERS,
    CONTEXT,
    EXECUTION,
    EXPERTS,
    NUMBERS,
    ONE_EXPERT,
    OPTIONS,
    SEQ,
    SGD,
    VOCAB,
    check,
    pairwise,
    plain,
    seed_of,
    trajectory,
)
from tests.ranks import run_ranks
from tests.runs import EP2
from training.loss_passes import plain_cross_entropy

FACTORS = (
    {"experts": EXPERTS | {"deepseek_v3": [*EXPERTS["deepseek_v3"], "--model.mtp_depth=1"]}}
    | {factor: NUMBERS[factor] for factor in ("optimizer", "clipping", "dtype")}
    | {
        factor: {
            setting: options for setting, options in table.items() if setting not in BETWEEN_OTHERS
        }
        for factor, table in EXECUTION.items()
    }
)
# ep4: tests/test_ep_hosts.py
MESHES = ["ep2", "ep2xhsdp2", "ep2xpp2", "ep2xcp2"]
PAIRWISE = pairwise(FACTORS, MESHES[:1], MESHES[1:], ("experts", "dtype"))


def settings(**chosen: str) -> dict[str, str]:
    """Return a combination: the first setting of every factor, except for these."""
    return {factor: next(iter(table)) for factor, table in (FACTORS | CONTEXT).items()} | chosen


@pytest.mark.slow
@pytest.mark.cap(300)
@pytest.mark.parametrize("mesh", MESHES)
def test_mesh_equals_the_plain_model(mesh):
    check(
        mesh,
        [combination for combination in PAIRWISE if combination["mesh"] == mesh],
        factors=FACTORS,
    )


DEEPSEEK = settings(experts="deepseek_v3")
QWEN3 = settings(experts="qwen3 experts")
FURTHER = {  # name: (mesh, combinations, further options)
    # The balance loss is of whole sequences, which the ranks of a cp group share, independent of
    # their labels. These ranks have other experts, too.
    "documents and uneven labels": (
        "ep2 of cp2",
        [
            DEEPSEEK | {"documents": "masked", "labels": "at the beginning"},
            QWEN3
            | {"method": "ulysses", "documents": "masked", "accumulation": "reduced each time"},
        ],
        [],
    ),
    # with a further token, and blocks that are recomputed
    "a split backward": (
        "ep2xpp2",
        [
            DEEPSEEK
            | {
                "optimizer": "sgd",
                "accumulation": "reduced each time",
                "checkpointing": "full",
            }
        ],
        ["--parallelism.pipeline_schedule=zbv", "--model.n_layers=4"],
    ),
    # the other rank's experts have nothing to multiply, and all of them have a gradient of 0
    "one expert gets every token": (
        "ep2",
        [DEEPSEEK | {"checkpointing": "full"}],
        [ONE_EXPERT, "--model.experts_per_token=1", "--training.expert_bias_speed=0"],
    ),
    # Two ranks have the same expert. They share its matrices by rows, but w1 and w3 with 11 of them,
    # which one of the two has.
    "fewer experts than ranks": (
        "ep2xfsdp2",
        [QWEN3],
        ["--model.n_experts=2", "--model.experts_per_token=1"],
    ),
    # Without a balance loss the ranks of a cp group sum no counts for it: they used to, without a
    # reader, and each sum kept memory for good.
    "offloaded": (
        "ep2 of cp2",
        [DEEPSEEK],
        ["--parallelism.cpu_offload=true", "--model.balance_loss=0"],
    ),
}


@pytest.mark.slow
@pytest.mark.cap(300)
@pytest.mark.parametrize("name", FURTHER)
def test_further_runs_equal_the_plain_model(name):
    mesh, combinations, more = FURTHER[name]
    check(mesh, combinations, more, factors=FACTORS | CONTEXT)


class CountProducts(TorchDispatchMode):
    """Counts the grouped GEMMs of experts, those of backward aside."""

    seen = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen += func is torch.ops.plumbline.grouped_product.default
        return func(*args, **(kwargs or {}))


def products_of_experts(modes: list[str]) -> list[int]:
    """In a forward and backward of two MoE layers, in one process."""
    sizes = [
        "--model.family=deepseek_v3",
        "--model.n_layers=3",
        "--run.device=cpu",
        "--training.param_dtype=float32",
    ]
    tokens, seen = torch.zeros(1, 8, dtype=torch.int64), []
    for mode in modes:
        job = train.build(load_config([*sizes, f"--activation_checkpoint.mode={mode}"], 1, 1))
        with CountProducts() as count:
            job.model(tokens, torch.arange(8)).sum().backward()
        seen.append(count.seen)
    return seen


def test_selective_checkpointing_keeps_the_products_of_experts():
    """There are three products for each of two MoE layers, like those of every other layer; `full`
    computes them once more."""
    assert run_ranks(1, products_of_experts, ["none", "selective", "full"])[0] == [6, 6, 12]


def homes_of_parameters() -> dict[str, set[tuple[str, str]]]:
    """With and without offload, the last word of every parameter's name and where it lives, if the
    mesh computes on a device that is not the CPU. `meta` is such a device everywhere."""
    real = train.meshes.open_mesh
    train.meshes.open_mesh = lambda *args: replace(real(*args), device=torch.device("meta"))
    homes = {}
    sizes = ["--model.family=deepseek_v3", "--model.flavor=debug", "--run.device=cpu"]
    for offload in "true", "false":
        cfg = load_config([*sizes, f"--parallelism.cpu_offload={offload}"], 1, 1)
        parameters = train.build(cfg).model.named_parameters()
        homes[offload] = {(name.rpartition(".")[2], p.device.type) for name, p in parameters}
    return homes


def test_offload_leaves_what_fsdp_does_not_move_where_it_is_read():
    """A router's bias is no parameter of FSDP's. It stayed on the CPU, and the first forward of a
    GPU failed."""
    homes = run_ranks(1, homes_of_parameters)[0]
    assert homes["true"] == {
        ("weight", "cpu"),
        ("bias", "meta"),
        ("w1", "cpu"),
        ("w2", "cpu"),
        ("w3", "cpu"),
    }
    assert {device for _, device in homes["false"]} == {"meta"}


@pytest.mark.slow
def test_bfloat16_is_near_float32():
    """Compare as tests/test_parallel.py::test_bfloat16_is_near_float32_and_keeps_float32_masters
    does. Some tokens choose other experts, so the bound for gradients is wider. A gradient that is
    twice as large would still be seen."""
    oracle = plain(*EXPERTS["deepseek_v3"], optimizer="sgd")
    options = [*EXPERTS["deepseek_v3"], *SGD, seed_of(oracle)]
    seen = run_ranks(2, trajectory, [*options, EP2, "--training.param_dtype=bfloat16"], 2)[0]
    assert np.max(np.abs(np.array(seen["loss"]) / np.array(oracle["loss"]) - 1)) < 2**-8
    for n, want in oracle["grad"].items():
        assert np.linalg.norm(seen["grad"][n] - want) / np.linalg.norm(want) < 0.25, n


# The plain model against the equations of DeepSeek-V3: a mesh is compared with the plain model only

OF_ONE = [*OPTIONS, "--training.local_batch_size=24"]
SPEED = 0.01


def job_and_batch(experts: str, *more: str) -> tuple[train.Job, dict[str, torch.Tensor]]:
    """Return a model with these experts on this rank, and a batch of one microbatch."""
    own = EXPERTS[experts]
    base = [o for o in OF_ONE if not o.startswith(MISSING.get(experts, ()))]
    job = train.build(load_config([*base, *own, *more], world().size, world().local_size))
    tokens = torch.randint(
        0, VOCAB, (1, BATCH, SEQ + 1), generator=torch.Generator().manual_seed(0)
    )
    return job, {"tokens": tokens[..., :-1].contiguous(), "labels": tokens[..., 1:].contiguous()}


# options of the small model that a family does not have
MISSING = {
    "deepseek_v3": ("--model.n_kv_heads", "--model.head_dim"),
    "gpt_oss": ("--model.hidden_dim",),
}


def balance_loss(args, affinities: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """Compute equations 17 to 20 of arXiv:2412.19437 for each sequence, [B], as written in the
    paper.

    affinities [B, T, X], s' of equation 19; experts [B, T, k]: which each token is sent to.
    """
    losses = []
    for s, chosen in zip(affinities, experts, strict=True):
        total = 0
        for i in range(args.n_experts):
            f = args.n_experts / (args.experts_per_token * len(s)) * (chosen == i).sum()  # (18)
            P = s[:, i].sum() / len(s)  # (20)
            total = total + f * P
        losses.append(args.balance_loss * total)  # (17)
    return torch.stack(losses)


def balanced(experts: str) -> None:
    job, batch = job_and_batch(experts)
    seen = {}
    for number, mixture in job.model.mixtures().items():
        mixture.router.register_forward_hook(
            lambda *call, number=number: seen.update({number: call[-1]})
        )
    logits = job.model(batch["tokens"][0], torch.arange(SEQ))
    losses = {}
    for number, choice in seen.items():
        of_tokens = choice.affinities.view(BATCH, SEQ, -1), choice.experts.view(BATCH, SEQ, -1)
        losses[number] = balance_loss(job.args, *of_tokens)
    loss = plain_cross_entropy(logits, batch["labels"][0]) / (BATCH * SEQ)
    total = loss + torch.stack([of_layer.mean() for of_layer in losses.values()]).sum()
    routers = {f"layers.{i}.feed_forward.router.weight" for i in losses}
    weights = {n: p for n, p in job.model.named_parameters() if n in routers}
    want = dict(zip(weights, torch.autograd.grad(total, list(weights.values())), strict=True))

    step = train.gradients(job, batch)
    for number, of_layer in losses.items():
        reported = step.terms.sums["balance_loss"][number] / (BATCH * SEQ)
        torch.testing.assert_close(reported, of_layer.mean(), rtol=1e-5, atol=0)
    for name, weight in weights.items():
        assert (weight.grad - want[name]).norm() < 1e-5 * want[name].norm(), name


def all_balanced() -> None:
    """Check that the balance loss that a step reports, and its part of the gradient, follow the
    equations."""
    for experts in EXPERTS:
        balanced(experts)


def test_the_balance_loss_is_that_of_the_equations():
    """Even affinities cost `balance_loss` however many experts a token has: k cancels."""
    run_ranks(1, all_balanced)


def biases_after_steps() -> None:
    job, batch = job_and_batch("deepseek_v3")
    biases = {i: mixture.router.bias for i, mixture in job.model.mixtures().items()}

    def step(skip_above: float) -> train.StepResult:
        return train.train_step(job, batch, skip_above)

    for _ in range(3):
        before = {i: bias.clone() for i, bias in biases.items()}
        result = step(torch.inf)
        for i, counts in result.terms.sums["expert_counts"].items():
            moved = biases[i] - before[i]
            mean = counts.double().mean()
            assert (counts > mean).any() and (counts < mean).any()
            assert (moved[counts > mean] < 0).all(), "an expert with too many tokens is wanted less"
            assert (moved[counts < mean] > 0).all(), "an expert with too few tokens is wanted more"
            torch.testing.assert_close(moved.abs(), SPEED * (counts != mean).float())
    before = {i: bias.clone() for i, bias in biases.items()}
    assert step(0.0).skipped
    assert all(torch.equal(bias, before[i]) for i, bias in biases.items())


def test_a_balancing_bias_moves_against_the_load_and_not_in_a_skipped_step():
    """The other way it would train towards collapse (arXiv:2408.15664, algorithm 1)."""
    run_ranks(1, biases_after_steps)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_a_router_multiplies_in_float32_for_weights_of_every_dtype(score):
    """In bfloat16 the scores would be off by 1e-3, which changes the experts of many tokens."""
    args = SimpleNamespace(
        n_experts=64,
        dim=512,
        experts_per_token=4,
        router_score=score,
        normalised_weights=True,
        routed_scale=1.0,
        expert_groups=1,
        balancing_bias=False,
    )
    generator = torch.Generator().manual_seed(0)
    router = moe.Router(args).bfloat16()
    router.weight.data.copy_(torch.randn(64, 512, generator=generator) / 8)
    x = torch.randn(100, 512, generator=generator).bfloat16()
    with torch.no_grad():
        choice = router(x)
    scores = x.double() @ router.weight.detach().double().t()
    scores = scores.softmax(-1) if score == "softmax" else scores.sigmoid()
    assert choice.affinities.dtype == choice.weights.dtype == torch.float32
    want = scores / scores.sum(-1, keepdim=True)
    torch.testing.assert_close(choice.affinities.double(), want, rtol=1e-4, atol=1e-7)


def product_and_gradients(rows, weight, counts) -> list[torch.Tensor]:
    rows, weight = rows.clone().requires_grad_(), weight.clone().requires_grad_()
    out = grouped.grouped_product(rows, weight, counts)
    return [
        out,
        *torch.autograd.grad(out, (rows, weight), torch.ones_like(out).cumsum(0) / len(out)),
    ]


def test_the_kernel_of_gpus_computes_what_the_loop_does(monkeypatch):
    """PyTorch has its `grouped_mm` for CPUs too. The second group has no rows."""
    torch.manual_seed(0)
    operands = (
        torch.randn(9, 16).bfloat16(),
        torch.randn(3, 24, 16).bfloat16(),
        torch.tensor([4, 0, 5]),
    )
    loop = product_and_gradients(*operands)
    real, calls = torch.nn.functional.grouped_mm, []
    monkeypatch.setattr(
        grouped.F, "grouped_mm", lambda *args, **kwargs: calls.append(1) or real(*args, **kwargs)
    )
    monkeypatch.setattr(grouped, "fits_grouped_mm", lambda rows, width: True)
    for ours, theirs in zip(product_and_gradients(*operands), loop, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2**-7, atol=2**-7)
    assert len(calls) == 3


real_grouped_mm = torch.nn.functional.grouped_mm


def careless_grouped_mm(a: torch.Tensor, b: torch.Tensor, *, offs: torch.Tensor) -> torch.Tensor:
    """PyTorch's, with two faults that it has had on GPUs: where rows are summed, a group without
    rows is left as the memory was, and no rows at all are an error."""
    assert a.numel(), "the kernel was called without rows"
    out = real_grouped_mm(a, b, offs=offs)
    if b.ndim == 2:
        out[offs.diff(prepend=offs.new_zeros(1)) == 0] = float("nan")
    return out


@pytest.mark.parametrize("counts", [[0, 4, 0, 5, 0], [9, 0, 0, 0, 0], [0, 0, 0, 0, 0]])
@pytest.mark.parametrize("uses_kernel", [True, False])
def test_an_expert_without_rows_has_a_gradient_of_zero(monkeypatch, counts, uses_kernel):
    """Kernels may leave anything there."""
    torch.manual_seed(0)
    rows, weight = torch.randn(sum(counts), 16).bfloat16(), torch.randn(5, 24, 16).bfloat16()
    monkeypatch.setattr(grouped.F, "grouped_mm", careless_grouped_mm)
    monkeypatch.setattr(grouped, "fits_grouped_mm", lambda rows, width: uses_kernel)
    out, of_rows, of_weight = product_and_gradients(rows, weight, torch.tensor(counts))
    assert out.shape == (len(rows), 24) and of_rows.shape == rows.shape
    is_idle = torch.tensor(counts) == 0
    assert of_weight[is_idle].count_nonzero() == 0
    assert of_weight[~is_idle].isfinite().all() and of_weight[~is_idle].flatten(1).any(1).all()


@pytest.mark.parametrize(
    "cuda, dtype, width, of_result, fits",
    [
        (True, torch.bfloat16, 16, 24, True),
        (False, torch.bfloat16, 16, 24, False),
        (True, torch.float32, 16, 24, False),
        (True, torch.bfloat16, 12, 24, False),
        (True, torch.bfloat16, 16, 20, False),
        (True, torch.bfloat16, 12, 20, False),
    ],
)
def test_the_kernel_of_gpus_needs_bfloat16_and_widths_of_16_bytes(
    cuda, dtype, width, of_result, fits
):
    rows = SimpleNamespace(is_cuda=cuda, dtype=dtype, shape=(5, width))
    assert grouped.fits_grouped_mm(rows, of_result) == fits


def test_counts_of_other_groups_than_the_weights_are_an_error():
    """Without the check the rows of the last group would keep what was in their memory."""
    weight, counts = torch.ones(2, 5, 5), torch.tensor([1, 2, 0])
    for product in grouped._grouped_product, grouped.grouped_product_backward_rows:
        product(torch.ones(3, 5), weight, counts[:2])
        with pytest.raises(ValueError, match="shorter"):
            product(torch.ones(3, 5), weight, counts)


FLOAT8 = [  # sides that are multiples of 16
    *EXPERTS["deepseek_v3"],
    *SGD,
    "--model.dim=48",
    "--model.hidden_dim=64",
    "--model.expert_dim=16",
    "--training.param_dtype=bfloat16",
    "--training.float8=rowwise",
    "--debug.emulate_float8=true",
]


@pytest.mark.slow
def test_float8_on_two_ranks_that_share_experts_is_near_one_rank():
    """Each rank has its own scales for its tokens, so the two agree up to rounding to 8 bits: 3
    bits of mantissa. Some tokens choose other experts."""
    alone = run_ranks(1, trajectory, FLOAT8, 1)[0]
    shared = run_ranks(2, trajectory, [*FLOAT8, EP2], 2)[0]
    assert np.max(np.abs(np.array(shared["loss"]) / np.array(alone["loss"]) - 1)) < 2**-8
    for n, want in alone["grad"].items():
        assert np.linalg.norm(shared["grad"][n] - want) < 2**-4 * np.linalg.norm(want), n
