"""Attention by a spec (models/kernels/ruled_attention.py): windows, scales, soft caps and sinks,
against a softmax that is written out."""

import dataclasses
from collections.abc import Sequence
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import Tensor

import train
from configs.load import load_config
from configs.schema import Config, InputError
from lab.simulate import build
from lab.simulate.ranks import Simulator
from models import arithmetic, layers, llama, olmo2
from models.kernels import ruled_attention
from models.kernels.document_attention import VarlenMetadata
from models.kernels.ruled_attention import AttentionSpec
from models.layers import AttentionCore, Documents
from parallelisms import cores, cp
from tests import parity, simulated
from tests.parity import DOCUMENTS
from tests.ranks import run_ranks
from tests.runs import ADAMW, CONTEXT_MESHES, CP2, SMALL_MODEL, ULYSSES
from tools.plan import report, trace
from training import sample
from training.sample import KeyValueCache

B, T, H, K, E = 2, 300, 4, 2, 8

SPECS = {
    "window": AttentionSpec(window=5),
    "window of several blocks": AttentionSpec(window=150),
    "window as long as the sequence": AttentionSpec(window=T),
    "window of one": AttentionSpec(window=1),
    "scale": AttentionSpec(scale=0.7),
    "soft cap": AttentionSpec(soft_cap=1.5),
    "sinks": AttentionSpec(sinks=True),
    "all": AttentionSpec(window=7, scale=0.9, soft_cap=2.0, sinks=True),
}


SPECS_OF_LAYERS = {
    True: AttentionSpec(window=5, scale=0.6, sinks=True),
    False: AttentionSpec(soft_cap=3.0, sinks=True),
}


class Alternating(llama.Llama):
    """A small Llama, every other layer of which has a window; all have sinks."""

    def block(self, args, number):
        attention = layers.Attention(args, SPECS_OF_LAYERS[number % 2 == 0])
        return layers.Block(args, attention, layers.FeedForward(args.dim, args.hidden_dim))


def alternating_flops(args, seq_len):
    specs = [SPECS_OF_LAYERS[number % 2 == 0] for number in range(args.n_layers)]
    return arithmetic.flops_per_token(args, seq_len, specs=specs)


def use_alternating() -> None:
    """Make the family Llama that model, in this process."""
    llama.FAMILY = dataclasses.replace(
        llama.FAMILY,
        build=Alternating,
        flops_per_token=alternating_flops,
        initial_values=lambda args: [("*.sinks", "normal", 1.0), *layers.initial_values(args)],
    )


def naive(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, within: Tensor, sinks: Tensor | None
) -> Tensor:
    """Return the whole matrix of scores. within: int64 [B, T], each token's position in its
    document."""
    groups = q.shape[2] // k.shape[2]
    k = k.repeat_interleave(groups, 2)
    v = v.repeat_interleave(groups, 2)
    scores = torch.einsum("bthe,bshe->bhts", q, k)
    scores = scores * (q.shape[-1] ** -0.5 if spec.scale is None else spec.scale)
    if spec.soft_cap is not None:
        scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
    at = torch.arange(q.shape[1])
    behind = at[:, None] - at  # [T, T]: how far a key is behind a query
    seen = (behind >= 0) & (behind <= within[:, :, None])  # [B, T, T]
    if spec.window is not None:
        seen &= behind < spec.window
    scores = scores.masked_fill(~seen[:, None], -torch.inf)
    if spec.sinks:
        column = sinks[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, column), -1)
    weights = scores.softmax(-1)[..., : q.shape[1]]
    return torch.einsum("bhts,bshe->bthe", weights, v)


def inputs(dtype: torch.dtype, spec: AttentionSpec) -> list[Tensor]:
    """q, k, v, and the sinks if there are any."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(B, T, H, E), (B, T, K, E), (B, T, K, E), (H,)]
    made = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    return made if spec.sinks else made[:3]


def positions(with_documents: bool) -> Tensor:
    """Return documents of 1, 4, 140 and more tokens."""
    at = torch.arange(T)
    if not with_documents:
        return at.expand(B, -1)
    rows = []
    for starts in ([0, 1, 5, 145], [0, 131, 132, 290]):
        first = torch.zeros(T, dtype=torch.int64)
        first[starts] = torch.tensor(starts)
        rows.append(at - first.cummax(0).values)
    return torch.stack(rows)


def compare(spec: AttentionSpec, with_documents: bool, dtype: torch.dtype, core=None) -> float:
    """Return the largest difference of output and gradients from the naive ones in float64,
    relative to the largest number, or 1."""
    within = positions(with_documents)
    given = inputs(dtype, spec)
    generator = torch.Generator().manual_seed(1)
    grad = torch.randn(B, T, H, E, generator=generator).to(dtype)
    documents = Documents.of(within, torch.device("cpu")) if with_documents else None
    ours = [x.clone().requires_grad_() for x in given]
    q, k, v, *sinks = ours
    out = (core or AttentionCore(spec))(q, k, v, documents, *sinks)
    theirs = [x.double().requires_grad_() for x in given]
    expected = naive(*theirs[:3], spec, within, theirs[3] if spec.sinks else None)
    found = [out, *torch.autograd.grad(out, ours, grad)]
    wanted = [expected, *torch.autograd.grad(expected, theirs, grad.double())]
    errors = []
    for x, y in zip(found, wanted, strict=True):
        assert x.dtype == dtype
        # a query that sees one key alone has no gradient
        errors.append(((x.double() - y).abs().max() / y.abs().max().clamp_min(1)).item())
    return max(errors)


@pytest.mark.parametrize("with_documents", [False, True], ids=["windows", "documents"])
@pytest.mark.parametrize("name", SPECS)
def test_a_rule_is_what_the_softmax_says(name, with_documents):
    assert compare(SPECS[name], with_documents, torch.float64) < 1e-12
    assert compare(SPECS[name], with_documents, torch.float32) < 1e-5


def test_in_bfloat16():
    assert compare(SPECS["all"], True, torch.bfloat16) < 0.02


@pytest.mark.parametrize("dropped", ["window", "scale", "soft_cap", "sinks"])
def test_the_comparison_sees_what_is_dropped(dropped):
    spec = SPECS["all"]
    if dropped != "sinks":
        spec = dataclasses.replace(spec, **{dropped: None})

    def without(q, k, v, documents, sinks):
        sinks = sinks * 0 - 1e9 if dropped == "sinks" else sinks
        return AttentionCore(spec)(q, k, v, documents, sinks)

    assert compare(SPECS["all"], True, torch.float32, without) > 0.01


@pytest.mark.slow
@pytest.mark.parametrize("with_documents", [False, True], ids=["windows", "documents"])
def test_the_operator_is_a_good_one(with_documents):
    """PyTorch's own checks: shapes and gradients under autograd, fake tensors and torch.compile."""
    spec = SPECS["all"]
    q, k, v, sinks = (x.requires_grad_() for x in inputs(torch.float32, spec))
    table = Documents.of(positions(with_documents), torch.device("cpu"))
    starts = table.starts if with_documents else None
    longest = table.longest if with_documents else T
    tokens = [x.flatten(0, 1) for x in (q, k, v)]
    arguments = (*tokens, sinks, starts, starts, longest, longest, *spec.numbers(E))
    torch.library.opcheck(ruled_attention.forward_operator, arguments)


def test_queries_and_keys_of_other_numbers_of_pieces_are_an_error():
    """Without the check the queries of the last pieces would have no output."""
    q, k, v, sinks = inputs(torch.float32, SPECS["all"])
    tokens = [x.flatten(0, 1) for x in (q, k, v)]
    two, one = torch.tensor([0, T, 2 * T]), torch.tensor([0, T])
    assert B == 2
    ruled_attention.attend(*tokens, sinks, VarlenMetadata(two, two, T, T), SPECS["all"])
    with pytest.raises(ValueError, match="shorter"):
        ruled_attention.attend(*tokens, sinks, VarlenMetadata(two, one, T, T), SPECS["all"])


# On a mesh ----------------------------------------------------------------------------------------


def of_first_layer(cores, mesh, shape):
    """Apply the first layer's spec to all layers, for a negative control."""
    for core in cores:
        core.spec = SPECS_OF_LAYERS[True]
    return gathering(cores, mesh, shape)


def without_window(cores, mesh, shape):
    for core in cores:
        core.spec = dataclasses.replace(core.spec, window=None)
    return gathering(cores, mesh, shape)


def without_sinks(cores, mesh, shape):
    def drop(_, inputs):
        *others, sinks = inputs
        return *others, sinks * 0 - 1e9

    modules = gathering(cores, mesh, shape)
    for module in modules:
        module.register_forward_pre_hook(drop)
    return modules


gathering = cp.gathering
MISTAKES = {f.__name__: f for f in (of_first_layer, without_window, without_sinks)}


def on_ranks(runs: list[list[str]], dp_size: int, mistakes: Sequence[str] = ()) -> list[dict]:
    """Return trajectories on this rank: of each run, and with each of the mistakes of the first
    run."""
    use_alternating()
    seen = [parity.trajectory(run, dp_size) for run in runs]
    for mistake in mistakes:
        with mock.patch.object(cp, "gathering", MISTAKES[mistake]):
            seen.append(parity.trajectory(runs[0], dp_size))
    return seen


@pytest.fixture(scope="module")
def oracles() -> dict[bool, dict]:
    """One process, without and with documents."""
    whole, in_documents = run_ranks(1, on_ranks, [ADAMW, [*ADAMW, DOCUMENTS]], 1)[0]
    return {False: whole, True: in_documents}


GATHER = ["--parallelism.context_parallel_method=gather"]
SELECTIVE = ["--activation_checkpoint.mode=selective"]
RUNS = [  # options, whether there are documents
    (GATHER, False),
    ([ULYSSES], True),
    ([*GATHER, *SELECTIVE], True),
]


@pytest.mark.slow
def test_a_mesh_equals_one_process(oracles):
    """And each mistake is seen. On meshes of more dimensions: the families with windows and sinks, in
    tests/test_olmo2.py, test_gemma3.py and test_experts_tp.py."""
    ranks, options, dp_size = CONTEXT_MESHES["cp2"]
    given = [[*ADAMW, *options, *more, *[DOCUMENTS] * masked] for more, masked in RUNS]
    seen = run_ranks(ranks, on_ranks, given, dp_size, list(MISTAKES))
    for number, (more, masked) in enumerate(RUNS):
        whole = parity.whole_model([of_rank[number] for of_rank in seen])
        assert not parity.compare(f"{more} {masked}", whole, oracles[masked])
    for number, mistake in enumerate(MISTAKES, len(RUNS)):
        assert parity.compare(mistake, seen[0][number], oracles[False], 1e-3), (
            f"{mistake} would go unnoticed"
        )


def keys_of_whole_windows(options: list[str]) -> list[tuple[int, int, int]]:
    """Return for each layer its window, the keys that this rank's two pieces of a sequence gather,
    and the most keys of one of them."""
    job = train.build(load_config(options, 2, 2))
    tables = [(core.window, core.whole_windows) for core in job.model.cores()]
    return [(window, len(table.keys), table.pieces.longest_keys) for window, table in tables]


def test_a_piece_gathers_the_keys_of_its_window_alone():
    """A rank of two has the first and the last quarter of 256 tokens, or the two in the middle. A
    query's window of 64 ends with its own key."""
    options = [
        *SMALL_MODEL,
        "--model.family=olmo2",
        "--model.n_layers=4",
        "--training.seq_len=256",
        "--training.local_batch_size=1",
        CP2,
        *GATHER,
    ]
    windowed = [(64, 64 + (63 + 64), 127)] * 3, [(64, 2 * (63 + 64), 127)] * 3
    whole = (0, 64 + 256, 256), (0, 128 + 192, 192)
    want = [[*windowed[rank], whole[rank]] for rank in range(2)]
    assert run_ranks(2, keys_of_whole_windows, options) == want


@pytest.mark.slow
@pytest.mark.simulated
@pytest.mark.skipif(build.missing() is not None, reason=build.missing() or "")
def test_on_a_simulated_gpu(tmp_path):
    """By FlashAttention's operators."""
    with Simulator() as simulator:
        how = {"environment": {"PLUMBLINE_SIMULATED_NCCL_SECONDS": "60"}}
        of = (simulated.ruled_attention, torch.bfloat16)
        outcome = simulator.run(1, *of, folder=tmp_path / "run", **how)
        assert outcome.whole, outcome.explain()
        assert not outcome.findings
        assert max(outcome.results[0].values()) < 0.02
        assert "aten::_flash_attention_backward" in outcome.records[0]["operators"]


# Sampling -----------------------------------------------------------------------------------------


def restless() -> Alternating:
    sizes = {"dim": 48, "n_heads": 8, "n_kv_heads": 2, "head_dim": 6, "vocab_size": 263}
    torch.manual_seed(5)
    model = Alternating(llama.Args(**llama.NUMBERS.flavors["debug"] | sizes | {"n_layers": 3}))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return model


def logits_of_last(model, length: int, cached: bool) -> Tensor:
    """Return the logits of the last of so many tokens, with all others in the cache, one by one."""
    tokens = torch.arange(2 * length).view(2, length) * 7 % 263
    at = torch.arange(length)
    if not cached:
        return model(tokens, at)[:, -1]
    cache = KeyValueCache(model, length)
    cache.forward(tokens[:, :3], at[:3], torch.nn.functional.linear)
    for n in range(3, length):
        logits = cache.forward(
            tokens[:, n : n + 1], at[n : n + 1].expand(2, -1), torch.nn.functional.linear
        )
    return logits[:, -1]


@torch.no_grad()
@pytest.mark.parametrize("mistaken", [False, True])
def test_the_cache_keeps_every_rule(mistaken):
    """The mistake: every layer has the first one's spec."""
    model = restless()
    want = logits_of_last(model, 14, cached=False)
    real = sample.to_all_before

    def wrong(positions, length, spec):
        return real(positions, length, SPECS_OF_LAYERS[True] if mistaken else spec)

    with mock.patch.object(sample, "to_all_before", wrong):
        error = (logits_of_last(model, 14, cached=True) - want).norm() / want.norm()
    assert error > 1e-3 if mistaken else error < 1e-5


def test_sampling_gives_the_tokens_that_it_gives_without_the_cache():
    model = restless()
    options = {"temperature": 1.5, "top_k": 200, "multiple": 4}
    prompt = [7, 3, 1]
    cached = sample.sample(model, prompt, 15, 64, torch.device("cpu"), **options)
    whole = sample.sample(model, prompt, 15, 64, torch.device("cpu"), cache=False, **options)
    assert cached == whole


# Who says nothing, and who is alone ---------------------------------------------------------------


class Silent(AttentionCore):
    def forward(self, q, k, v, documents, sinks=None):
        return super().forward(2 * q, k, v, documents, sinks)


class Own(Silent):
    supports_spec = False

    def forward(self, q, k, v, documents, sinks=None):
        return super().forward(2 * q, k, v, documents, sinks)


class WithSilent(llama.Llama):
    core = Silent

    def block(self, args, number):
        block = super().block(args, number)
        block.attention.core = self.core()
        return block


class WithOwn(WithSilent):
    core = Own


class WithoutCores(llama.Llama):
    def cores(self):
        return []


def plain_windows(args, seq_len):
    """Return a count of FLOPs that knows of no window."""
    return arithmetic.flops_per_token(args, seq_len)


def refusal(model_class, options: list[str], count=arithmetic.flops_per_token) -> str:
    """Return the message of a run of this model before its first step; "" if it takes one."""
    family = dataclasses.replace(llama.FAMILY, build=model_class, flops_per_token=count)
    with mock.patch.object(llama, "FAMILY", family):
        try:
            parity.trajectory([*ADAMW, *options], 1)
        except InputError as error:
            return str(error)
    return ""


def refusals(cases: list[tuple]) -> str:
    return "\n".join(refusal(*case) for case in cases)


def planned(model_class) -> str:
    family = dataclasses.replace(llama.FAMILY, build=model_class)
    with mock.patch.object(llama, "FAMILY", family):
        try:
            trace.trace_step(load_config([*SMALL_MODEL, *ADAMW], 1), 1, 1, on_gpu=False)
        except InputError as error:
            return str(error)
    return ""


def test_a_core_that_says_nothing_is_refused_by_name():
    for said in planned(WithSilent), *run_ranks(2, refusals, [(WithSilent, [CP2])]):
        assert "the attention core Silent overrides forward" in said
    model = WithSilent(llama.Args(**llama.NUMBERS.flavors["debug"]))
    with pytest.raises(InputError, match="Silent"):
        KeyValueCache(model, 8)


def with_kernel(name: str) -> Config:
    return load_config([f"--training.attention={name}"])


def test_a_kernel_that_knows_no_rule_is_refused():
    mesh = SimpleNamespace(cp=1, rank=0, device=torch.device("cuda"))
    windows = olmo2.FAMILY.build(olmo2.Args(**olmo2.NUMBERS.flavors["debug"]))
    with pytest.raises(InputError, match='"cudnn" .* layers with a window of 64: set it'):
        cores.check(windows, mesh, with_kernel("cudnn"))
    cores.check(windows, mesh, with_kernel("flash"))
    plain = llama.FAMILY.build(llama.Args(**llama.NUMBERS.flavors["debug"]))
    cores.check(plain, mesh, with_kernel("cudnn"))


def test_a_core_of_its_own_runs_alone():
    assert run_ranks(1, refusals, [(WithOwn, [])]) == [""]
    cases = [(WithOwn, [CP2, *GATHER]), (WithOwn, [CP2, ULYSSES]), (WithoutCores, [CP2])]
    for said in run_ranks(2, refusals, cases):
        *of_own, of_none = said.splitlines()
        assert of_own == [
            "parallelism.context_parallel = 2 replaces attention, and the attention core Own "
            "does not support AttentionSpec: set it to 1"
        ] * len(of_own)
        assert len(of_own) == 2
        assert "WithoutCores.cores() leaves out the attention core layers.0.attention.core" in (
            of_none
        )


def test_sampling_from_a_core_of_its_own_keeps_nothing():
    model = WithOwn(
        llama.Args(**llama.NUMBERS.flavors["debug"] | {"n_layers": 2, "vocab_size": 263})
    )
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    with pytest.raises(InputError, match="the attention core Own does not support AttentionSpec"):
        KeyValueCache(model, 8)
    assert len(sample.sample(model, [1, 2], 3, 64, torch.device("cpu"))) == 5


def test_flops_count_the_keys_of_each_window():
    args = llama.Args(**llama.NUMBERS.flavors["debug"])
    per_key = 12.0 * args.n_heads * args.head_dim
    specs = [AttentionSpec(window=5), AttentionSpec()] + [AttentionSpec(window=99)] * (
        args.n_layers - 2
    )
    counted = arithmetic.flops_per_token(args, 16, specs=specs)
    missing = arithmetic.flops_per_token(args, 16) - counted
    assert missing == per_key * (16 - 5)


def test_a_count_that_knows_no_window_is_refused():
    [said] = run_ranks(1, refusals, [(Alternating, [], plain_windows)])
    assert "sees a window of 5 tokens, and its flops_per_token counts 16 keys" in said


# The plan -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "mesh",
    [
        [],
        pytest.param([CP2, *GATHER], marks=pytest.mark.slow),
    ],
    ids=["one", "gather"],
)
def test_the_plan_counts_the_keys_of_each_window(mesh):
    """All ranks together do what the family derives from the sizes, and the time is that of what
    kernels do: half of the scores of a plain layer, nearly all of a window's."""
    ranks = 2 if mesh else 1
    specs = [AttentionSpec(window=5, sinks=True), AttentionSpec(sinks=True)]

    class Two(llama.Llama):
        def block(self, args, number):
            block = super().block(args, number)
            block.attention = layers.Attention(args, specs[number % 2])
            return block

    def count(args, seq_len):
        return arithmetic.flops_per_token(args, seq_len, specs=[specs[0], specs[1], specs[0]])

    build = mock.Mock(side_effect=Two)
    family = dataclasses.replace(llama.FAMILY, build=build, flops_per_token=count)
    with mock.patch.object(llama, "FAMILY", family):
        cfg = load_config([*SMALL_MODEL, *mesh, "--training.global_batch_size=2"], ranks)
        counted = unmasked = 0
        for rank in range(ranks):
            step = trace.trace_step(cfg, ranks, 2, on_gpu=True, rank=rank)
            for _, times, op in step.ops():
                counted += times * (op.matmul_flops + op.attention_flops - op.recomputed)
                unmasked += times * op.attention_unmasked
        family, args = train.architecture(cfg)
        text = report.attention(SimpleNamespace(cfg=cfg, inputs=SimpleNamespace(on_gpu=True)))
    assert counted == count(args, 16) * 2 * 16
    # of T = 16 queries, all but those of the first window's triangle
    of_one = 2 * 2 * args.n_heads * args.head_dim  # FLOPs of a key in both sequences
    done = 16 * 5 - 5 * 4 // 2
    assert unmasked == 2 * 7 * of_one * (done - 16 * 5 // 2)
    assert text == ["attention: 2 layers with a window of 5, sinks; 1 layer with all keys, sinks"]


def test_sinks_that_would_be_dropped_are_an_error():
    q, k, v = inputs(torch.float32, AttentionSpec())
    with pytest.raises(ValueError, match="was given no sinks"):
        AttentionCore(AttentionSpec(sinks=True))(q, k, v, None)
    with pytest.raises(ValueError, match="was given sinks"):
        AttentionCore()(q, k, v, None, torch.zeros(H))
