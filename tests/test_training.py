"""The pieces of training on their own: initial values, loss, schedules, clipping."""

import hashlib
import math
import re
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from configs.schema import Config, InputError, LRSchedule, Optimizer, Training
from models import MODELS
from models.kernels.soft_cap import soft_cap
from models.terms import AuxiliaryTerms
from tests.ranks import run_ranks
from training import init
from training import loss_passes as passes_of_loss
from training.loss import linear_cross_entropy
from training.loss_passes import EAGER, plain_cross_entropy
from training.microbatches import Microbatches
from training.optim import build_optimizer, clip_grad_norm, learning_rate
from training.z_loss import ZLoss


class Copies(TorchFunctionMode):
    """The tensors that go to another device, and whether the host may wait for the copy."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.to:
            self.seen.append((args[0], bool((kwargs or {}).get("non_blocking"))))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("cp, is_masked", [(1, False), (1, True), (2, True)])
def test_a_step_copies_its_batch_once_as_the_loader_has_pinned_it(cp, is_masked):
    """A tensor that is made on the host is in pageable memory, and a copy from there waits for
    the GPU. `meta` is another device that every machine has."""
    tokens = torch.zeros(3, 2, 16 // cp, dtype=torch.int64)
    batch = {"tokens": tokens, "labels": tokens.clone()}
    if is_masked:
        batch["positions"] = torch.arange(16).expand(3, 2, 16).contiguous()
        batch["length"] = torch.full((6,), 11)
    device = torch.device("meta")
    places = [range(4), range(12, 16)] if cp == 2 else [range(16)]
    mesh = SimpleNamespace(device=device, cp=cp, tp=1, token_ranges=lambda length: places)
    model = SimpleNamespace(documents=lambda within, device: None)
    with Copies() as copies:
        microbatches = Microbatches(model, batch, mesh, linear_cross_entropy, 8)
        positions = [microbatches(a)[1] for a in range(len(microbatches))]
    pinned = {x.data_ptr(): name for name, x in batch.items()}
    copied = [pinned.get(x.data_ptr(), "made on the host") for x, _ in copies.seen]
    assert sorted(copied) == sorted(batch), "each tensor of the batch once, and nothing else"
    assert all(goes_on for _, goes_on in copies.seen)
    shape = (2, 16 // cp) if is_masked else (16,)
    assert [p.shape for p in positions] == [shape] * 3


# --------------------------------------------------------------------------------------------------
# initial values


def filled(shape: tuple[int, ...], name: str = "w", seed: int = 0) -> torch.Tensor:
    param = torch.full(shape, math.nan)
    init.fill(param, name, "normal", 1.0, seed)
    return param


def test_initial_values_are_a_truncated_normal():
    x = filled((2000, 1000)).double().flatten()
    error = 1 / math.sqrt(x.numel())
    assert abs(x.mean()) < 4 * error
    assert abs(x.std() - 1) < 4 * error
    # cut at 3 deviations of the normal before truncation, which is 3.04 of the result's
    assert x.abs().max() < 3.05
    # kurtosis of a normal cut at 3 (3 without the cut, 1.8 if uniform)
    assert abs((x**4).mean() - 2.83) < 0.02
    for lag in 1, 2, 999, 1000, 1001:
        assert abs((x[lag:] * x[:-lag]).mean()) < 5 * error, f"values {lag} apart are correlated"
    assert x.unique().numel() > 0.9 * x.numel()


def test_initial_values_differ_by_name_and_seed():
    a, b, c = filled((300, 100)), filled((300, 100), name="v"), filled((300, 100), seed=1)
    for other in b, c:
        assert abs((a * other).mean()) < 0.03


def test_initial_values_never_change():
    """Golden: the same bits on every machine, device and torch version, or old seeds mean something
    else."""
    digest = hashlib.sha256(
        filled((64, 33), name="layers.0.attention.wq.weight", seed=7).numpy().tobytes()
    ).hexdigest()
    assert digest[:16] == GOLDEN


GOLDEN = "287190426af3c8be"


def shards_equal_slices() -> None:
    """Uneven shards of one and two mesh dimensions, both dimensions of a tensor, and FSDP over TP."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for shape in (7, 5), (3, 4), (101, 50), (1, 9), (6,):
        want = filled(shape)
        for a in [Replicate(), *(Shard(d) for d in range(len(shape)))]:
            for b in [Replicate(), *(Shard(d) for d in range(len(shape)))]:
                if a == b and a.is_shard():
                    continue  # cut twice along one dimension: what FSDP over TP does, below
                got = distribute_tensor(torch.full(shape, math.nan), mesh, [a, b])
                init.fill(got, "w", "normal", 1.0, 0)
                assert torch.equal(got.full_tensor(), want), (shape, a, b)
    for rows in 7, 4, 101, 3:
        for cut in Shard(0), Shard(1), Replicate():
            layer = nn.Linear(5, rows, bias=False, device="meta")
            sharded = distribute_tensor(layer.weight, mesh["tp"], [cut], src_data_rank=None)
            layer.register_parameter("weight", nn.Parameter(sharded))
            fully_shard(layer, mesh=mesh["dp"])
            layer.to_empty(device="cpu")
            init.fill(layer.weight, "w", "normal", 1.0, 0)
            assert isinstance(layer.weight, DTensor) and layer.weight.device_mesh.ndim == 2
            assert torch.equal(layer.weight.full_tensor(), filled((rows, 5))), (rows, cut)


def test_shards_equal_slices_of_the_whole():
    run_ranks(4, shards_equal_slices)


def test_a_parameter_that_no_row_matches_is_an_error():
    with pytest.raises(InputError, match="matches the parameter bias"):
        init.initialise(nn.Linear(2, 2), [("weight", "normal", 1.0)], 0)


def test_a_buffer_is_refused_as_nothing_gives_it_a_value():
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].register_buffer("ramp", torch.arange(2), persistent=False)
    with pytest.raises(InputError, match="buffer 0.ramp has no value"):
        init.initialise(model, [("*", "normal", 1.0)], 0)


@pytest.mark.parametrize(
    "name, flavor",
    [
        ("llama", "debug"),
        ("qwen3", "debug"),
        ("qwen3", "debug_moe"),
        ("deepseek_v3", "debug"),
    ],
)
def test_what_returns_to_the_residual_stream_begins_smaller_by_its_depth(name, flavor):
    """By 1 / sqrt(2 n_layers), the same for attention, feed-forward layers, shared experts and
    experts."""
    family = MODELS[name]
    args = family.Args(**family.numbers.flavors[flavor] | {"n_layers": 8, "vocab_size": 64})
    model = family.build(args)
    init.initialise(model, family.initial_values(args), 0)
    matrices = {n: p for n, p in model.named_parameters() if p.ndim > 1}
    back = {n for n in matrices if re.search(r"\.(wo|w2)(\.weight)?$", n)}
    mixtures = flavor == "debug_moe" or name == "deepseek_v3"
    assert any(n.endswith("experts.w2") for n in back) == mixtures
    for n, p in matrices.items():
        want = 0.02 / 4 if n in back else 0.02
        assert p.std().item() == pytest.approx(want, rel=0.05), n


# --------------------------------------------------------------------------------------------------
# loss


class LargestTensor(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(t, torch.Tensor):
                self.largest = max(self.largest, t.numel())
        return out


@pytest.mark.parametrize("chunk, cap", [(7, 0.0), (40, 0.0), (10_000, 0.0), (40, 3.0)])
def test_loss_equals_the_plain_one_and_never_holds_all_logits(chunk, cap):
    torch.manual_seed(0)
    B, T, D, V = 3, 37, 24, 1009
    h, w = torch.randn(B, T, D, requires_grad=True), torch.randn(V, D, requires_grad=True)
    labels = torch.randint(0, V, (B, T))
    labels[0, 5:19] = -100
    with LargestTensor() as seen:
        loss = linear_cross_entropy(h, w, labels, chunk, cap=cap)
        grads = torch.autograd.grad(loss / 10, (h, w))
    want = plain_cross_entropy(soft_cap(h @ w.t(), cap), labels)
    want_grads = torch.autograd.grad(want / 10, (h, w))
    torch.testing.assert_close(loss, want, rtol=1e-6, atol=0)
    for got, expected in zip(grads, want_grads):
        assert (got - expected).norm() / expected.norm() < 1e-6
    assert seen.largest <= max(V * D, min(chunk, B * T) * V)


@pytest.mark.parametrize("of_h, of_weight", [(True, False), (False, True), (False, False)])
@pytest.mark.parametrize("chunk", [5, 100])
def test_the_loss_has_the_gradients_that_are_asked_for(of_h, of_weight, chunk):
    """Gradients of the hidden states alone where the output projection is frozen, of the weight
    alone, or none, as in validation."""
    torch.manual_seed(0)
    h, w = torch.randn(2, 7, 5, requires_grad=of_h), torch.randn(11, 5, requires_grad=of_weight)
    labels = torch.randint(0, 11, (2, 7))
    loss, want = linear_cross_entropy(h, w, labels, chunk), plain_cross_entropy(h @ w.t(), labels)
    torch.testing.assert_close(loss, want)
    asked = [t for t in (h, w) if t.requires_grad]
    assert loss.requires_grad == bool(asked)
    for got, expected in (
        zip(torch.autograd.grad(loss, asked), torch.autograd.grad(want, asked)) if asked else ()
    ):
        torch.testing.assert_close(got, expected)


def test_the_loss_of_many_pieces_is_exact():
    """1,024 pieces. Each token's loss is log(V), so a total that rounds at every piece is off by
    more than the limit."""
    pieces, V = 1024, 3
    h, w = torch.zeros(1, pieces, 1), torch.zeros(V, 1)
    total = linear_cross_entropy(h, w, torch.zeros(1, pieces, dtype=torch.int64), 1)
    one = torch.tensor(float(V)).log()
    in_float32 = torch.zeros(())
    for _ in range(pieces):
        in_float32 += one
    exact = pieces * math.log(V)
    assert total.dtype == torch.float32 and abs(total.item() / exact - 1) < 1e-7
    assert abs(in_float32.item() / exact - 1) > 1e-6, "the control: the same sum in float32"


def test_the_loss_of_bfloat16_rounds_the_logits_and_nothing_after_them():
    """Their exponentials, sums and logarithms are float32. In bfloat16 each loss is off by 1e-3."""
    generator = torch.Generator().manual_seed(0)
    h = torch.randn(1, 64, 32, generator=generator).bfloat16()
    w = torch.randn(1009, 32, generator=generator).bfloat16()
    labels = torch.randint(0, 1009, (1, 64), generator=generator)
    each = torch.empty(1, 64)
    total = linear_cross_entropy(h, w, labels, 16, each)
    logits = (h[0] @ w.t()).double()
    want = nn.functional.cross_entropy(logits, labels[0], reduction="none")
    assert total.dtype == torch.float32
    torch.testing.assert_close(each[0].double(), want, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(total.double(), want.sum(), rtol=1e-6, atol=0)


def test_the_heads_gradient_is_summed_over_pieces_in_float32():
    """512 equal pieces in bfloat16: a sum that rounds to 8 bits at every piece stops growing at the
    256th."""
    pieces = 512
    h = torch.ones(1, pieces, 2, dtype=torch.bfloat16)
    w = torch.zeros(4, 2, dtype=torch.bfloat16, requires_grad=True)
    linear_cross_entropy(h, w, torch.zeros(1, pieces, dtype=torch.int64), 1).backward()
    want = torch.full((4, 2), 0.25 * pieces)
    want[0] = -0.75 * pieces
    torch.testing.assert_close(w.grad.float(), want, rtol=2**-8, atol=0)


def one_at_a_time(logits: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
    """Compute a gradient that ignores which labels this rank holds."""
    everywhere = torch.ones_like(more[-1])
    return passes_of_loss.replace_by_gradient(logits, *more[:-1], everywhere)


@pytest.mark.slow
def test_compiled_passes_compute_what_pytorchs_operators_do():
    """With labels that do not count, a last piece that is shorter, and z-loss. Negative control:
    labels that do not count are taken for the first row of the vocabulary."""
    torch.manual_seed(0)
    dtype = torch.bfloat16
    h = torch.randn(2, 37, 24, dtype=dtype, requires_grad=True)
    w = torch.randn(509, 24, dtype=dtype, requires_grad=True)
    labels = torch.randint(0, 509, (2, 37))
    labels[0, 5:19] = -100
    backend = "inductor" if shutil.which("c++") else "aot_eager"
    compiled = passes_of_loss.compiled(backend)
    seen = []
    for passes in EAGER, compiled, compiled._replace(gradient=one_at_a_time):
        one = torch.ones(())
        z_loss = ZLoss(0.01, AuxiliaryTerms(one, one))
        each = torch.empty(2, 37)
        loss = linear_cross_entropy(h, w, labels, 16, each, z_loss, passes)
        seen.append((loss.detach(), each, *torch.autograd.grad(loss, (h, w))))
    wanted, got, wrong = seen
    limit = 4e-3
    for a, b in zip(got, wanted, strict=True):
        assert (a - b).norm() <= limit * b.norm()
    torch.testing.assert_close(wrong[0], wanted[0])
    assert (wrong[2] - wanted[2]).norm() > 10 * limit * wanted[2].norm()


def test_loss_of_large_logits_is_finite():
    h, w = torch.full((1, 2, 4), 100.0), torch.randn(11, 4) * 100
    loss = linear_cross_entropy(h, w, torch.tensor([[3, 5]]), 1)
    torch.testing.assert_close(loss, plain_cross_entropy(h @ w.t(), torch.tensor([[3, 5]])))


def test_loss_of_a_batch_without_labels_is_zero_with_zero_gradient():
    h, w = torch.randn(1, 5, 4, requires_grad=True), torch.randn(11, 4, requires_grad=True)
    linear_cross_entropy(h, w, torch.full((1, 5), -100), 2).backward()
    assert not h.grad.any() and not w.grad.any()


# --------------------------------------------------------------------------------------------------
# schedule and clipping


def rates(kind: str, **options) -> np.ndarray:
    cfg = Config(
        training=Training(steps=100),
        optimizer=Optimizer(lr=2.0),
        lr_schedule=LRSchedule(kind=kind, **options),
    )
    return np.array([learning_rate(step, cfg) for step in range(100)])


@pytest.mark.parametrize("kind", ["cosine", "linear", "wsd", "constant"])
def test_schedules(kind):
    got = rates(kind, warmup_steps=10, min_ratio=0.25)
    # reaches the peak with the last warm-up step
    np.testing.assert_allclose(got[:10], 2.0 * np.arange(1, 11) / 10)
    assert np.all(np.diff(got[9:]) <= 0), "rises after the warm-up"
    assert got[-1] == pytest.approx(2.0 if kind == "constant" else 0.5)
    middle = {"cosine": 2.0 - 1.5 / 2, "linear": 2.0 - 1.5 / 2, "wsd": 2.0, "constant": 2.0}[kind]
    assert got[10 + 45 - 1] == pytest.approx(middle)
    if kind == "wsd":
        assert np.allclose(got[10:80], 2.0) and got[80] < 2.0  # the last 20% of the run decay


@pytest.mark.parametrize("fraction", [0.1, 0.5, 1.0])
def test_wsd_decays_over_the_share_of_the_run_that_is_asked_for(fraction):
    decay = round(100 * fraction)
    got = rates("wsd", decay_fraction=fraction, min_ratio=0.25, warmup_steps=0)
    np.testing.assert_allclose(got[: 100 - decay], 2.0)
    np.testing.assert_allclose(got[100 - decay :], 2.0 - 1.5 * np.arange(1, decay + 1) / decay)


def test_schedule_without_warm_up_starts_below_the_peak_and_warm_up_may_fill_the_run():
    assert rates("linear", warmup_steps=0, min_ratio=0.0)[0] == pytest.approx(2.0 * 99 / 100)
    assert rates("cosine", warmup_steps=100)[-1] == 2.0


@pytest.mark.parametrize("max_norm", [0.0, 1.0, 1e6])
def test_clipping_scales_to_the_norm_and_reports_the_one_before(max_norm):
    params = [nn.Parameter(torch.zeros(3, 4)), nn.Parameter(torch.zeros(5))]
    for i, p in enumerate(params):
        p.grad = torch.full_like(p, 2.0 + i)
    before = math.sqrt(12 * 4 + 5 * 9)
    assert clip_grad_norm(params, max_norm).item() == pytest.approx(before)
    after = math.sqrt(sum((p.grad**2).sum().item() for p in params))
    assert after == pytest.approx(1.0 if max_norm == 1.0 else before, rel=1e-5)


def error_of_norm(norm: torch.Tensor, grads: list[torch.Tensor]) -> float:
    """Relative to the norm in float64."""
    exact = torch.stack([g.double().square().sum() for g in grads]).sum().sqrt()
    return abs(norm.double() / exact - 1).item()


def clip(grads: list[torch.Tensor], max_norm: float = 0.0) -> torch.Tensor:
    """Return the norm that `clip_grad_norm` reports of these gradients, which it scales in
    place."""
    params = [nn.Parameter(torch.empty_like(g)) for g in grads]
    for param, grad in zip(params, grads):
        param.grad = grad
    return clip_grad_norm(params, max_norm)


LONG = 2**24  # elements


@pytest.mark.parametrize("layout", ["transposed", "odd"])
def test_the_norm_of_a_long_gradient_is_exact(layout):
    """The control: the norm of torch.nn.utils adds 16 M squares into a few float32 numbers."""
    grad = torch.rand(LONG, generator=torch.Generator().manual_seed(0))
    grad = {
        "transposed": grad.view(4096, -1).t(),
        "odd": grad[:-4097],
    }[layout]
    norm = clip([grad])
    assert norm.dtype == torch.float32 and norm.shape == ()
    assert error_of_norm(norm, [grad]) < 2e-7
    assert error_of_norm(torch.nn.utils.get_total_norm([grad], foreach=True), [grad]) > 1e-4


def test_the_norm_of_odd_gradients():
    """Empty ones (a rank may hold no row of a tensor), a scalar, rows of every length, none at all."""
    assert clip([]).item() == 0 and clip([], max_norm=1.0).item() == 0
    assert clip([torch.empty(0, 5), torch.empty(0)], max_norm=1.0).item() == 0
    generator = torch.Generator().manual_seed(0)
    grads = [
        torch.randn(shape, generator=generator)
        for shape in [(), (1,), (3, 7), (8192,), (8193,), (2, 3, 8191)]
    ]
    before = [g.clone() for g in grads]
    norm = clip(grads, max_norm=0.5)
    assert error_of_norm(norm, before) < 2e-7
    assert error_of_norm(torch.tensor(0.5), grads) < 1e-5
    for value in math.nan, math.inf:
        assert not clip([torch.tensor([1.0, value])], max_norm=1.0).isfinite()


def norm_on_a_mesh() -> tuple[float, float, float]:
    """Relative errors of the norm of gradients on two meshes over the same ranks, of the scaled
    gradients, and of PyTorch's norm of the first of them."""
    from torch.distributed.device_mesh import init_device_mesh

    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    line = init_device_mesh("cpu", (1, 4), mesh_dim_names=("edp", "ep"))
    # sharded over both dimensions, one, the other, twice along one axis, none; and on another mesh
    rows = [
        (square, (2048, 4096), (Shard(0), Shard(1))),
        (square, (3, 5), (Shard(0), Replicate())),
        (square, (7, 2), (Replicate(), Shard(0))),
        (square, (101, 3), (Shard(0), Shard(0))),
        (square, (9,), (Replicate(), Replicate())),
        (line, (5, 1001), (Shard(0), Shard(1))),
        (line, (3,), (Replicate(), Shard(0))),
    ]
    generator = torch.Generator().manual_seed(0)
    whole = [torch.rand(shape, generator=generator) for _, shape, _ in rows]
    grads = [distribute_tensor(g.clone(), mesh, cut) for g, (mesh, _, cut) in zip(whole, rows)]
    theirs = torch.nn.utils.get_total_norm(grads[:1]).full_tensor()
    norm = clip(grads, max_norm=1.0)
    after = [g.full_tensor() for g in grads]
    return (
        error_of_norm(norm, whole),
        error_of_norm(torch.tensor(1.0), after),
        error_of_norm(theirs, whole[:1]),
    )


@pytest.mark.slow
def test_the_norm_is_exact_on_any_mesh():
    for error, scaled, theirs in run_ranks(4, norm_on_a_mesh):
        assert error < 2e-7 and scaled < 1e-5
        assert theirs > 1e-5, "the control: the norm of torch.nn.utils"


def norm_of_what_is_not_summed() -> None:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2,))
    with pytest.raises(ValueError, match="not summed over the ranks yet"):
        clip([DTensor.from_local(torch.ones(3), mesh, [Partial()])])


def test_a_gradient_that_is_still_to_be_summed_is_an_error():
    run_ranks(2, norm_of_what_is_not_summed)


@pytest.mark.parametrize(
    "name, flavor",
    [
        ("llama", "debug"),
        ("qwen3", "debug"),
        ("qwen3", "debug_moe"),
        ("deepseek_v3", "debug"),
        ("gpt_oss", "debug"),
    ],
)
def test_norms_are_not_decayed(name, flavor):
    """Norms include those of queries, keys and narrow vectors; sinks and biases are not decayed
    either; all else is."""
    family = MODELS[name]
    sizes = {"n_layers": 2, "vocab_size": 11} | ({"q_rank": 8} if name == "deepseek_v3" else {})
    model = family.build(family.Args(**family.numbers.flavors[flavor] | sizes))
    names = {p: n for n, p in model.named_parameters()}
    groups = build_optimizer(model, family.decay, Optimizer(weight_decay=0.3)).param_groups
    decay = {names[p]: group["weight_decay"] for group in groups for p in group["params"]}
    biases = {n for n, p in model.named_parameters() if re.search(r"\.experts\.b[123]$", n)}
    gains = biases | {n for n, p in model.named_parameters() if p.ndim == 1 and p.requires_grad}
    assert {n.split(".")[-2] for n in gains} >= NORMS[name]
    assert decay == {
        n: 0.0 if n in gains else 0.3 for n, p in model.named_parameters() if p.requires_grad
    }


NORMS = {
    "llama": {"attention_norm", "ffn_norm", "norm"},
    "qwen3": {"attention_norm", "ffn_norm", "norm", "q_norm", "k_norm"},
    "deepseek_v3": {"attention_norm", "ffn_norm", "norm", "q_norm", "kv_norm"},
    "gpt_oss": {"attention_norm", "ffn_norm", "norm", "attention", "router", "experts"},
}


def test_an_olmo_decays_all_but_its_embedding():
    """OLMo-core does so."""
    family = MODELS["olmo2"]
    model = family.build(
        family.Args(**family.numbers.flavors["debug"] | {"n_layers": 2, "vocab_size": 11})
    )
    names = {p: n for n, p in model.named_parameters()}
    groups = build_optimizer(model, family.decay, Optimizer(weight_decay=0.3)).param_groups
    plain = [names[p] for group in groups if not group["weight_decay"] for p in group["params"]]
    assert plain == ["tok_embeddings.weight"]


def test_an_olmo_begins_with_one_deviation_at_every_depth():
    family = MODELS["olmo2"]
    args = family.Args(**family.numbers.flavors["debug"] | {"vocab_size": 64})
    model = family.build(args)
    init.initialise(model, family.initial_values(args), 0)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            assert (parameter == 1).all(), name
        else:
            assert parameter.std().item() == pytest.approx(0.02, rel=0.05), name


def test_sgd_keeps_its_momentum():
    """The heavy ball: v <- 0.9 v + g, w <- w - lr v. With a gradient of 1 the weight moves by 1,
    1.9 and 2.71 of lr."""
    layer = nn.Linear(3, 2, bias=False)
    start = layer.weight.detach().clone()
    optimizer = build_optimizer(
        layer, [("*", True)], Optimizer(kind="sgd", lr=0.1, momentum=0.9, weight_decay=0.0)
    )
    for moved in 1.0, 2.9, 5.61:
        layer.weight.grad = torch.ones_like(layer.weight)
        optimizer.step()
        torch.testing.assert_close(start - layer.weight, torch.full_like(start, 0.1 * moved))


def test_each_option_of_the_optimizer_reaches_it():
    cfg = Optimizer(lr=0.07, betas=(0.8, 0.7), eps=1e-3, weight_decay=0.3)
    adamw = build_optimizer(nn.Linear(3, 2, bias=False), [("*", True)], cfg)
    assert isinstance(adamw, torch.optim.AdamW)
    assert {
        key: adamw.param_groups[0][key] for key in ("lr", "betas", "eps", "weight_decay", "fused")
    } == {"lr": 0.07, "betas": (0.8, 0.7), "eps": 1e-3, "weight_decay": 0.3, "fused": True}
