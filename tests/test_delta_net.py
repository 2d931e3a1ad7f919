"""The gated delta rule (models/kernels/delta_rule.py) against its definition, and the layer that has it
(models/delta_net.py) against transformers'."""

import warnings
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from configs.schema import InputError
from models import delta_net
from models.cores import cores_in
from models.delta_net import GatedDeltaNet
from models.kernels import delta_rule
from parallelisms import blocks, cp, cp_state, delta_kernel, flash_delta_rule, tp
from tests import flash_double
from tests.ranks import run_ranks
from training import init

B, K, H, E, V = 2, 2, 4, 5, 7


def inputs(T: int, by_channel: bool = False, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Return q, k, v, g and beta. Among the decays are 1, and some that are 0 in any type; among the
    betas 0 and 1."""
    generator = torch.Generator().manual_seed(T)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    q = F.normalize(normal(B, T, K, E), dim=-1)
    k = F.normalize(normal(B, T, K, E), dim=-1)
    v = normal(B, T, H, V)
    g = -F.softplus(normal(B, T, H, E) if by_channel else normal(B, T, H))
    for value, share in ((0.0, 0.1), (-300.0, 0.05), (-1e4, 0.05)):
        g = torch.where(torch.rand(g.shape, generator=generator) < share, value, g)
    beta = normal(B, T, H).sigmoid()
    for value in (0.0, 1.0):
        beta = torch.where(torch.rand(beta.shape, generator=generator) < 0.1, value, beta)
    return [x.to(dtype).requires_grad_() for x in (q, k, v, g, beta)]


def first_tokens(T: int) -> Tensor:
    """Return documents that begin anywhere, some of one token, and at the borders of chunks."""
    generator = torch.Generator().manual_seed(T)
    first = torch.rand(B, T, generator=generator) < 0.1
    first[0, ::8] = True
    first[1, -2:] = True
    return first


def state_before(dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    state = torch.randn(B, H, E, V, generator=generator, dtype=torch.float64)
    return state.to(dtype).requires_grad_()


def results(rule, given: list[Tensor], first: Tensor | None, state: Tensor, **more) -> list[Tensor]:
    """Return out, the state after it, and the gradients of all inputs and of the state."""
    out, after = rule(*given, first, state, **more)
    generator = torch.Generator().manual_seed(1)
    of_out = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    of_after = torch.randn(after.shape, generator=generator, dtype=torch.float64)
    loss = (out * of_out).sum() + (after * of_after).sum()
    return [out, after, *torch.autograd.grad(loss, [*given, state])]


def error(found: list[Tensor], wanted: list[Tensor]) -> float:
    """Return the largest relative difference of a tensor."""
    errors = []
    for x, y in zip(found, wanted, strict=True):
        assert x.isfinite().all()
        errors.append(((x.double() - y.double()).norm() / y.double().norm()).item())
    return max(errors)


SHAPES = {  # tokens and chunk
    "one token": (1, 64),
    "less than a chunk": (5, 64),
    "chunks of one": (7, 1),
    "one chunk": (64, 64),
    "a piece of a chunk is left": (37, 8),
    "several spans": (8 * delta_rule.SPAN * 2 + 3, 8),
    "several blocks": (2 * delta_rule.BLOCK + 3, 64),
}


@pytest.mark.parametrize("by_channel", [False, True], ids=["a decay a head", "a decay a channel"])
@pytest.mark.parametrize("has_documents", [False, True], ids=["sequences", "documents"])
@pytest.mark.parametrize("shape", SHAPES)
def test_chunks_compute_the_recurrence(shape, has_documents, by_channel):
    T, chunk = SHAPES[shape]
    given = inputs(T, by_channel)
    first = first_tokens(T) if has_documents else None
    state = state_before()
    wanted = results(delta_rule.recurrent, given, first, state)
    found = results(delta_rule.chunked, given, first, state, chunk=chunk)
    assert error(found, wanted) < 2e-15
    assert error(results(in_two_steps, given, first, state, chunk=chunk), wanted) < 5e-15


def in_two_steps(*given: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    """Compute the rule as ranks that share a sequence do, to whom the state comes last."""
    *tokens, state = given
    A, b, reads, out = delta_rule.from_any_state(*tokens, chunk)
    return torch.einsum("bthe,bhev->bthv", reads, state) + out, A @ state + b


def test_two_parts_are_one_sequence():
    """As with a cache, or on ranks that share the sequence: the second begins with the state after the
    first."""
    given = inputs(50)
    first = first_tokens(50)
    whole = delta_rule.chunked(*given, first, chunk=8)
    state = None
    parts = []
    for part in (slice(0, 19), slice(19, 20), slice(20, 50)):
        tokens = [x[:, part] for x in given]
        out, state = delta_rule.chunked(*tokens, first[:, part], state, chunk=8)
        parts.append(out)
    assert error([torch.cat(parts, 1), state], list(whole)) < 2e-15


def test_a_state_that_is_not_reset_is_seen():
    given = inputs(37)
    state = state_before()
    wanted = results(delta_rule.recurrent, given, first_tokens(37), state)
    assert error(results(delta_rule.chunked, given, None, state), wanted) > 0.1


@pytest.mark.parametrize("dtype, limit", [(torch.float32, 2e-6), (torch.bfloat16, 0.02)])
def test_narrow_types_are_computed_in_float32(dtype, limit):
    given = inputs(200, dtype=dtype)
    first = first_tokens(200)
    state = state_before(torch.float32)
    out, after = delta_rule.chunked(*given, first, state)
    assert (out.dtype, after.dtype) == (dtype, torch.float32)
    wide = [x.detach().double().requires_grad_() for x in given]
    wanted = results(delta_rule.recurrent, wide, first, state.detach().double().requires_grad_())
    found = results(delta_rule.chunked, given, first, state)
    assert [x.dtype for x in found[2:]] == [dtype] * 5 + [torch.float32]
    assert error(found, wanted) < limit


def test_the_memory_is_linear_and_has_no_state_of_a_token():
    """What autograd keeps: the inputs, and one state for each span."""
    kept = []
    for T in (256, 512):
        saved: list[Tensor] = []

        def keep(x: Tensor, saved: list[Tensor] = saved) -> Tensor:
            saved.append(x)
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, keep):
            delta_rule.chunked(*inputs(T), chunk=8)
        sizes = {x.untyped_storage().data_ptr(): x.numel() for x in saved}
        kept.append(sum(sizes.values()))
    of_inputs = B * (2 * K * E + H * V + 2 * H)  # of a token
    of_states = B * H * E * V / (8 * delta_rule.SPAN)
    assert kept == [256 * (of_inputs + of_states), 512 * (of_inputs + of_states)]


def test_mistakes_are_sentences():
    q, k, v, g, beta = inputs(5)
    with pytest.raises(ValueError, match="3 value heads cannot share 2 key heads"):
        delta_rule.chunked(q, k, v[:, :, :3], g[:, :, :3], beta[:, :, :3])
    with pytest.raises(ValueError, match="a chunk of 0 tokens"):
        delta_rule.chunked(q, k, v, g, beta, chunk=0)
    with pytest.raises(ValueError, match="decays .* do not fit values"):
        delta_rule.chunked(q, k, v, g[:, 1:], beta)


@pytest.mark.slow
@pytest.mark.parametrize("more", [0, E], ids=["rule", "any state"])
def test_the_operator_is_a_good_one(more):
    """PyTorch's own checks: shapes and gradients under autograd, fake tensors and torch.compile."""
    state = F.pad(state_before(), (more, 0)).detach().requires_grad_()
    arguments = (*inputs(37), first_tokens(37), state, 8)
    torch.library.opcheck(delta_rule.forward_operator, arguments)


def test_selective_checkpointing_keeps_it():
    for name in ("plumbline.delta_rule.default", "plumbline.flash_delta_rule.default"):
        assert name in blocks.KEEP
    assert torch.ops.plumbline.delta_rule.default and torch.ops.plumbline.flash_delta_rule.default


# The package for GPUs -----------------------------------------------------------------------------


@pytest.mark.parametrize("by_channel", [False, True], ids=["a decay a head", "a decay a channel"])
@pytest.mark.parametrize("has_documents", [False, True], ids=["sequences", "documents"])
def test_the_package_is_called_as_the_reference(has_documents, by_channel):
    """Grouped heads, states of rows, documents as pieces of one row. In 16 bits each of the two rounds its
    results once."""
    given = [x.detach() for x in inputs(23, by_channel)]
    first = first_tokens(23) if has_documents else None
    narrow = [x.bfloat16().requires_grad_() for x in given[:3]]
    narrow += [x.float().requires_grad_() for x in given[3:]]
    state = state_before(torch.float32)
    with flash_double.instead_of_fla():
        found = results(flash_delta_rule.chunked, narrow, first, state)
    wanted = results(delta_rule.chunked, narrow, first, state)
    assert error(found, wanted) < 1e-2
    if has_documents:  # the negative control
        with flash_double.instead_of_fla():
            unreset = results(flash_delta_rule.chunked, narrow, None, state)
        assert error(unreset, wanted) > 0.1


@pytest.mark.parametrize(
    "chosen, device, is_installed, wanted",
    [
        ("auto", "cuda", True, True),
        ("auto", "cuda", False, False),
        ("auto", "cpu", True, False),
        ("reference", "cuda", True, False),
        ("flash", "cuda", True, True),
        ("flash", "cuda", False, "needs the package fla: pip install flash-linear-attention"),
        ("flash", "cpu", True, "needs a GPU, this is a cpu"),
    ],
)
def test_what_computes_it_is_chosen(chosen, device, is_installed, wanted, monkeypatch):
    monkeypatch.setattr(flash_delta_rule, "is_installed", lambda: is_installed)
    mesh = SimpleNamespace(cp=1, device=torch.device(device))
    cfg = SimpleNamespace(training=SimpleNamespace(delta_rule=chosen))
    mixer = layer(torch.float32)
    mixer.cores = lambda: cores_in(mixer)
    if isinstance(wanted, str):
        with pytest.raises(InputError, match=wanted):
            cp.apply(mixer, mesh, cfg)
        return
    cp.apply(mixer, mesh, cfg)
    assert (type(mixer.core) is delta_kernel.FlashDeltaCore) == wanted


# The layer ----------------------------------------------------------------------------------------

ARGS = SimpleNamespace(
    dim=24,
    norm_eps=1e-6,
    delta_key_heads=K,
    delta_value_heads=H,
    delta_key_dim=E,
    delta_value_dim=V,
    conv_width=4,
)


def layer(dtype: torch.dtype) -> GatedDeltaNet:
    torch.manual_seed(0)
    made = GatedDeltaNet(ARGS).to(dtype)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(std=0.3)
    return made


def published(ours: GatedDeltaNet) -> nn.Module:
    """Return transformers' layer with these weights: they stand key head by key head in one matrix."""
    from transformers.models.qwen3_next import configuration_qwen3_next, modeling_qwen3_next

    config = configuration_qwen3_next.Qwen3NextConfig(
        hidden_size=ARGS.dim,
        linear_num_key_heads=K,
        linear_num_value_heads=H,
        linear_key_head_dim=E,
        linear_value_head_dim=V,
        linear_conv_kernel_dim=ARGS.conv_width,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
        rms_norm_eps=ARGS.norm_eps,
    )
    theirs = modeling_qwen3_next.Qwen3NextGatedDeltaNet(config, 0)

    def by_key_head(*parts: nn.Linear) -> Tensor:
        rows = [part.weight.unflatten(0, (K, -1)) for part in parts]
        return torch.cat(rows, 1).flatten(0, 1)

    weights = {
        "in_proj_qkvz.weight": by_key_head(ours.wq, ours.wk, ours.wv, ours.wz),
        "in_proj_ba.weight": by_key_head(ours.wb, ours.wa),
        "conv1d.weight": torch.cat((ours.conv_q, ours.conv_k, ours.conv_v))[:, None],
        "A_log": ours.A_log,
        "dt_bias": ours.dt_bias,
        "norm.weight": ours.norm.weight,
        "out_proj.weight": ours.wo.weight,
    }
    theirs.load_state_dict(weights)
    return theirs


def test_the_layer_is_that_of_transformers():
    ours = layer(torch.float32)
    theirs = published(ours)
    x = torch.randn(2, 70, ARGS.dim)
    found = ours(x, None, None)
    wanted = theirs(x)
    grad = torch.randn_like(wanted)
    of_theirs = torch.autograd.grad(wanted, list(theirs.parameters()), grad)
    theirs_by_name = dict(zip(dict(theirs.named_parameters()), of_theirs))
    names = ["A_log", "dt_bias", "norm.weight", "conv_q", "wo.weight"]
    parameters = dict(ours.named_parameters())
    of_ours = torch.autograd.grad(found, [parameters[name] for name in names], grad)
    expected = [
        theirs_by_name["A_log"],
        theirs_by_name["dt_bias"],
        theirs_by_name["norm.weight"],
        theirs_by_name["conv1d.weight"][: K * E, 0],
        theirs_by_name["out_proj.weight"],
    ]
    assert error([found, *of_ours], [wanted, *expected]) < 1e-5
    ours.norm.weight.data += 1  # as if it were zero-centred
    assert error([ours(x, None, None)], [wanted]) > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("by_package", [False, True])
def test_the_layer_compiles_whole(by_package):
    ours = layer(torch.bfloat16 if by_package else torch.float32)
    if by_package:
        ours.core = delta_kernel.FlashDeltaCore()
    x = torch.randn(1, 20, ARGS.dim, dtype=ours.wq.weight.dtype)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    with flash_double.instead_of_fla():
        assert torch.equal(compiled(x, None, None), ours(x, None, None))
        compiled(x, None, None).sum().backward()
    assert all(p.grad is not None for p in ours.parameters())


def wrapped(mixer: nn.Module) -> nn.Module:
    """Return a model with the names that a plan knows."""
    model = nn.Module()
    model.layers = nn.ModuleDict({"0": nn.ModuleDict({"attention": mixer})})
    return model


def gradients(tp_size: int, broken: str | None = None) -> dict[str, Tensor]:
    """Return the output and all gradients, whole. broken: a parameter whose gradient a rank keeps for
    itself."""
    mixer = layer(torch.float64)
    x = torch.randn(2, 20, ARGS.dim, dtype=torch.float64, requires_grad=True)
    grad = torch.randn_like(x)
    here = slice(None)
    if tp_size > 1:
        mesh = init_device_mesh("cpu", (tp_size,))
        tp.apply(wrapped(mixer), mesh, delta_net.tp_plan())
        here = slice(10 * mesh.get_rank(), 10 * (mesh.get_rank() + 1))
    out = mixer(x[:, here], None, None)
    out.backward(grad[:, here])
    found = {"out": out.detach().clone(), "x": x.grad[:, here].clone()}
    for name, parameter in mixer.named_parameters():
        of_it = parameter.grad
        if isinstance(of_it, DTensor):
            of_it = of_it.to_local() if name == broken else of_it.full_tensor()
        found[name] = of_it
    return found


def test_tensor_parallelism_splits_heads():
    """In float64; where the ranks' parts of the gradient of what gates the output are not summed, it is
    seen (docs/museum.md)."""
    plain = gradients(1)
    for rank, found in enumerate(run_ranks(2, gradients, 2)):
        assert found.keys() == plain.keys()
        here = slice(10 * rank, 10 * (rank + 1))
        wanted = plain | {name: plain[name][:, here] for name in ("out", "x")}
        assert error(list(found.values()), list(wanted.values())) < 1e-12
    alone = run_ranks(2, gradients, 2, "norm.weight")[0]
    assert error([alone["norm.weight"]], [plain["norm.weight"]]) > 0.1


def shared(zigzag: bool, ranks: int) -> list[Tensor]:
    """Return output and gradients of the tokens of this rank of so many, in the order of the sequence;
    zigzag: a rank has two parts, as in `parallelisms/mesh.py::Mesh.token_ranges`."""
    warnings.simplefilter("error", FutureWarning)  # a user would see it in every run
    T = 24
    given = inputs(T)
    within = first_tokens(T).logical_not().long()
    within[:, 0] = 0
    documents = SimpleNamespace(within=within)
    generator = torch.Generator().manual_seed(1)
    grad = torch.randn(B, T, H, V, generator=generator, dtype=torch.float64)
    core = delta_net.GatedDeltaCore()
    here = torch.arange(T)
    if ranks > 1:
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("cp",))
        rank = mesh.get_rank()
        numbers = [rank, 2 * ranks - 1 - rank] if zigzag else [rank]
        of_rank = SimpleNamespace(device_mesh=mesh, parts=numbers)
        core = cp_state.SharedState(core, of_rank)
        parts = here.chunk(2 * ranks if zigzag else ranks)
        here = torch.cat((parts[rank], parts[-1 - rank])) if zigzag else parts[rank]
    out = core(*(x[:, here] for x in given), documents=documents)
    grads = torch.autograd.grad(out, given, grad[:, here])
    return [x.detach()[:, here] if x.shape[1] == T else x.detach() for x in (out, *grads)]


@pytest.mark.parametrize("zigzag", [True, False], ids=["gather", "ulysses"])
def test_ranks_that_share_a_sequence_compute_it(zigzag):
    whole = shared(zigzag, 1)
    for rank, found in enumerate(run_ranks(3, shared, zigzag, 3)):
        parts = torch.arange(24).chunk(6 if zigzag else 3)
        here = torch.cat((parts[rank], parts[-1 - rank])) if zigzag else parts[rank]
        assert error(found, [x[:, here] for x in whole]) < 1e-13


def test_a_decay_in_bfloat16_is_seen():
    """Sums of decays over a chunk need more digits than it has."""
    ours = layer(torch.float32)
    x = torch.randn(2, 70, ARGS.dim)
    right = ours(x, None, None)
    decay = ours.decay

    def rounded(x: Tensor) -> Tensor:
        return decay(x).bfloat16().float()

    with mock.patch.object(GatedDeltaNet, "decay", staticmethod(rounded)):
        assert error([ours(x, None, None)], [right]) > 1e-4


def test_initial_decays_span_tokens_to_thousands():
    rows = delta_net.initial_values(ARGS)
    big = SimpleNamespace(**vars(ARGS) | {"delta_value_heads": 256})
    mixer = GatedDeltaNet(big)
    init.initialise(wrapped(mixer), [*rows, ("*", "normal", 0.02)], seed=1)
    steps = F.softplus(mixer.dt_bias)
    assert 0.0009 < steps.min() < 0.002 and 0.05 < steps.max() < 0.11
    rates = mixer.A_log.exp()
    assert 0.009 < rates.min() < 1 and 15 < rates.max() < 16.01
