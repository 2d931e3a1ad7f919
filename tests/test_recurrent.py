"""States and convolutions (models/recurrent.py): equal to one process on every mesh, kept apart at a
document, and kept while sampling. Each mistake that would train in silence is put in once."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import train
from configs.load import load_config
from configs.schema import InputError, Lora
from models import layers, llama
from models.recurrent import ConvolutionCore, StateCore
from parallelisms import cores, cp_state
from parallelisms.mesh import world
from tests import hybrid, parity
from tests.ranks import run_ranks
from tests.runs import CONTEXT_MESHES, CP2, ULYSSES
from tools.parity import properties, trajectory
from tools.parity.tiny import Tiny, copy_of
from tools.plan import report
from training.sample import KeyValueCache, Sampling, sample_stream

HYBRID = [parity.FLOAT64, *parity.ADAMW, "--training.max_norm=0.1"]
# sequences of two tokens for each part, with four parts: less than the convolution sees
SHORT = "--training.seq_len=8"


def hybrid_runs(runs: Sequence[list[str]], dp_size: int = 1, bug: Callable | None = None) -> list:
    """Train the hybrid by each of these options, in these processes; bug: changes them first."""
    with hybrid.instead_of_llama(), pytest.MonkeyPatch.context() as patch:
        if bug is not None:
            bug(patch)
        return [parity.trajectory([*HYBRID, *more], dp_size) for more in runs]


@pytest.fixture(scope="module")
def oracles() -> dict[tuple[str, ...], dict]:
    """Return one process's run for each kind of numbers."""
    kinds = [(), (parity.DOCUMENTS,), (SHORT,), (SHORT, parity.DOCUMENTS)]
    [seen] = run_ranks(1, hybrid_runs, [list(kind) for kind in kinds])
    return dict(zip(kinds, seen, strict=True))


def kind_of(more: Sequence[str]) -> tuple[str, ...]:
    return tuple(one for one in more if one in (SHORT, parity.DOCUMENTS))


RUNS = {
    "cp2": [
        [parity.DOCUMENTS, "--activation_checkpoint.mode=selective"],
        [SHORT, parity.DOCUMENTS],
        [ULYSSES, SHORT, "--activation_checkpoint.mode=full"],
        [ULYSSES, parity.DOCUMENTS, parity.TWO_MICROBATCHES],
    ],
    "cp2xtp2": [[], [ULYSSES, parity.DOCUMENTS]],
}


@pytest.mark.parametrize(
    "mesh", [mesh if "x" in mesh else pytest.param(mesh, marks=pytest.mark.slow) for mesh in RUNS]
)
def test_a_mesh_computes_what_one_process_does(mesh, oracles):
    ranks, options, dp_size = CONTEXT_MESHES[mesh]
    runs = [[*options, *more] for more in RUNS[mesh]]
    results = run_ranks(ranks, hybrid_runs, runs, dp_size)
    for number, more in enumerate(RUNS[mesh]):
        whole = parity.whole_model([of_rank[number] for of_rank in results])
        assert not parity.compare(f"{mesh} {more}", whole, oracles[kind_of(more)], parity.EXACT)


# The museum: each of these trains, and no other test of this file would see it ------------------------


def state_that_no_document_resets(patch: pytest.MonkeyPatch) -> None:
    real = hybrid.DecayedSum.run
    patch.setattr(
        hybrid.DecayedSum,
        "run",
        lambda self, *x, first=None, state=None: real(self, *x, state=state),
    )


def state_that_stays_on_its_rank(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(cp_state, "states_before", lambda a, b: 0 * b)


def states_in_the_order_of_ranks(patch: pytest.MonkeyPatch) -> None:
    """A rank's second part is taken for the next one, though it is near the end of the sequence."""

    def gather(self, own):
        return cp_state.GatherParts.apply(torch.stack(own), self.group).flatten(0, 1)

    patch.setattr(cp_state.PartsOfRanks, "gather", gather)


def convolution_over_the_border_of_parts(patch: pytest.MonkeyPatch) -> None:
    """What a rank has is convolved as if it were one piece."""

    def forward(self, x, weight, documents=None):
        return self.core.run(x, weight)

    patch.setattr(cp_state.SharedConvolution, "forward", forward)


def gradient_of_the_rank_alone(patch: pytest.MonkeyPatch) -> None:
    """The gradient of what others have gathered is not summed."""

    def backward(ctx, grad):
        return grad[ctx.group.rank()], None

    patch.setattr(cp_state.GatherParts, "backward", staticmethod(backward))


MUSEUM = {
    state_that_no_document_resets: (parity.DOCUMENTS,),
    state_that_stays_on_its_rank: (),
    states_in_the_order_of_ranks: (),
    convolution_over_the_border_of_parts: (),
    gradient_of_the_rank_alone: (),
}


def museum_runs() -> list[dict]:
    seen = []
    for bug, more in MUSEUM.items():
        [of_bug] = hybrid_runs([[CP2, "--training.steps=2", *more]], bug=bug)
        seen.append(of_bug)
    return seen


@pytest.mark.slow
def test_mistakes_are_seen(oracles):
    results = run_ranks(2, museum_runs)
    for number, (bug, more) in enumerate(MUSEUM.items()):
        whole = parity.whole_model([of_rank[number] for of_rank in results])
        oracle = oracles[more] | {
            "loss": oracles[more]["loss"][:2],
            "norm": oracles[more]["norm"][:2],
        }
        oracle["counts"] = oracle["counts"][:2]
        problems = parity.compare(bug.__name__, whole, oracle)
        assert any(": grad " in one for one in problems), bug.__name__


# Sampling --------------------------------------------------------------------------------------------

PROMPTS = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 5, 8, 9, 7, 9, 3]]


def sampled(options: list[str], caches: Sequence[bool]) -> list[list[list[int | None]]]:
    """Continue prompts of several lengths, past the context too, on this rank."""
    with hybrid.instead_of_llama():
        base = [*parity.OPTIONS, parity.FLOAT64, "--training.local_batch_size=1"]
        job = train.build(load_config([*base, *options], world().size, world().local_size))
    found = []
    for keeps in caches:
        how = Sampling(
            8,
            context=16,
            temperature=0.0,
            multiple=job.cfg.parallelism.tensor_parallel,
            cache=keeps,
        )
        found.append(list(sample_stream(job.model, PROMPTS, job.mesh.device, how)))
    return found


@pytest.mark.slow
def test_a_cache_keeps_states_on_a_mesh():
    [[without, with_cache]] = run_ranks(1, sampled, [], [False, True])
    assert with_cache == without
    for [on_mesh] in run_ranks(2, sampled, [CP2], [True]):
        assert on_mesh == without


# Properties, and what is refused -----------------------------------------------------------------------

ARGS = llama.Args(**llama.NUMBERS.flavors["debug"])


def copy_with(core: type[StateCore] = hybrid.DecayedSum) -> Tiny:
    model = type("Fork", (hybrid.Hybrid,), {"core": core})
    return copy_of(replace(hybrid.FAMILY, build=model), ARGS, Lora())


def failures(tiny: Tiny, names: Sequence[str]) -> dict[str, str]:
    table = [one for one in properties.TABLE if one.name in names]
    with hybrid.instead_of_llama(tiny.family):
        verdicts = list(properties.tried(tiny, table))
    assert not any(verdict.left_out for verdict in verdicts)
    return {verdict.of.name: verdict.failure for verdict in verdicts if verdict.failure}


@pytest.mark.slow
def test_the_properties_of_a_hybrid_hold():
    """All but `files`: its weights are published nowhere."""
    names = {one.name for one in properties.TABLE} - {"files"}
    assert failures(copy_with(), names) == {}


class BeginsAnew(hybrid.DecayedSum):
    def run(self, *inputs, first=None, state=None):
        return super().run(*inputs, first=first)


class Unreset(hybrid.DecayedSum):
    def run(self, *inputs, first=None, state=None):
        return super().run(*inputs, state=state)


class WrongSummary(hybrid.DecayedSum):
    def summary(self, q, k, v, decay, first=None):
        a, b = super().summary(q, k, v, decay, first=first)
        return 1.1 * a, b


class WrongRead(hybrid.DecayedSum):
    def begin(self, *inputs, first=None):
        a, b, read = super().begin(*inputs, first=first)
        return a, b, lambda state: read(0 * state)


class Overwrites(hybrid.DecayedSum):
    """Its map is not affine."""

    def run(self, *inputs, first=None, state=None):
        out, after = super().run(*inputs, first=first, state=state)
        return out, after.tanh()


@pytest.mark.parametrize(
    "core, said",
    [
        (BeginsAnew, "two parts, joined by the state, are not the whole"),
        (Unreset, "a document does not begin with a state of 0"),
        (WrongSummary, "does not change a state by the map that `summary` says"),
        (WrongRead, "`begin` reads something else than `run`"),
        (Overwrites, "two parts, joined by the state, are not the whole"),
    ],
)
def test_a_state_that_cannot_be_cut_is_seen_by_its_property(core, said):
    found = failures(copy_with(core), ["attention"])["attention"]
    assert found.startswith("layers.0.attention.core (by ") and said in found


def test_a_convolution_that_forgets_is_seen_by_its_property(monkeypatch):
    real = ConvolutionCore.run
    monkeypatch.setattr(
        ConvolutionCore, "run", lambda self, x, weight, *_, **__: real(self, x, weight)
    )
    found = failures(copy_with(), ["attention"])["attention"]
    assert found.startswith("layers.0.attention.convolution (by ")


def test_a_state_at_a_document_is_seen_without_a_mesh():
    assert failures(copy_with(Unreset), ["isolation"])["isolation"].startswith("layers.0.attention")


class Silent(hybrid.DecayedSum):
    def forward(self, *inputs, documents=None):
        return super().forward(*inputs, documents=documents) / 2


class Own(Silent):
    supports_spec = False

    def forward(self, *inputs, documents=None):
        return super().forward(*inputs, documents=documents)


class WithoutRun(StateCore):
    supports_spec = True

    def forward(self, *inputs, documents=None):
        return inputs[2].cumsum(1)


def refusal(core: type[StateCore], cp: int) -> str:
    mesh = SimpleNamespace(cp=cp, tp=1, rank=0, device=torch.device("cpu"))
    model = type("Fork", (hybrid.Hybrid,), {"core": core})
    with torch.device("meta"):
        built = model(ARGS)
    try:
        cores.check(built, mesh, load_config(["--data.mask_documents=true"]))
        KeyValueCache(built, 8)
    except InputError as error:
        return str(error)
    return ""


def test_what_a_state_lacks_is_refused_by_name():
    assert refusal(hybrid.DecayedSum, 2) == ""
    assert "the state core Silent overrides forward and does not say" in refusal(Silent, 1)
    own = "the state core Own does not support what cores of this kind do"
    assert (
        refusal(Own, 2)
        == f"parallelism.context_parallel = 2 replaces attention, and {own}: set it to 1"
    )
    assert refusal(Own, 1) == f"keys and values cannot be kept while sampling, since {own}"
    assert "the state core WithoutRun has no `run`" in refusal(WithoutRun, 2)


@dataclass(frozen=True)
class Table:
    """What a fork's attention may want to know of documents."""

    mask: torch.Tensor


@dataclass(frozen=True)
class TableWithPositions(Table):
    within: torch.Tensor | None = None


@pytest.mark.parametrize("made", [Table, TableWithPositions, list])
def test_documents_of_a_forks_own_class_tell_states_where_they_are(made, monkeypatch):
    def documents(cores, positions, device):
        return made(positions == 0)

    monkeypatch.setattr(layers.AttentionCore, "documents", staticmethod(documents))
    found = refusal(hybrid.DecayedSum, 1)
    if made is TableWithPositions:
        assert found == ""
        return
    assert found.startswith(
        f"data.mask_documents = true, and AttentionCore.documents returns {made.__name__}"
    )
    assert found.endswith("make it a dataclass with a field `within: Tensor | None = None`")


@pytest.mark.slow
def test_its_types_fit():
    types = pytest.importorskip("tools.prove.types", reason="spmd_types is not installed")
    options = ["configs/llama_debug.toml", CP2, "--parallelism.tensor_parallel=2"]
    with hybrid.instead_of_llama():
        cfg = load_config([*options, "--training.seq_len=32"], 8, 8)
        assert types.first_mistake(cfg, 8, 8) == ""


def test_a_convolution_that_the_family_does_not_count_is_seen(monkeypatch):
    """FLOPs are compared with the shapes of all cores."""
    monkeypatch.setattr(hybrid, "TAPS", 60)
    counted = hybrid.flops_per_token

    def without(args, seq_len):
        width = args.n_heads * args.head_dim
        layers_with = sum(map(hybrid.is_recurrent, range(args.n_layers)))
        return counted(args, seq_len) - 6 * 60 * width * layers_with

    family = replace(hybrid.FAMILY, flops_per_token=without)
    tiny = copy_of(family, ARGS, Lora())
    assert failures(tiny, ["declarations"])["declarations"].startswith(
        "Family.flops_per_token says"
    )


def test_channels_of_a_convolution_are_in_another_order_on_a_rank():
    """Those of several projections, joined: `tools.parity` compares what is computed of them."""
    with torch.device("meta"):
        model = hybrid.Hybrid(ARGS)
    trajectory.note_outputs(model, None)
    noted = {name for name, module in model.named_modules() if module._forward_hooks}
    assert "layers.0.attention.core" in noted and "layers.0.attention.convolution" not in noted


def test_a_plan_counts_its_cores():
    with hybrid.instead_of_llama():
        said = report.mixers(SimpleNamespace(cfg=load_config(["configs/llama_debug.toml"])))
    assert said == ["mixers: cores 4 of convolution, 4 of state, 2 of attention"]
    assert report.mixers(SimpleNamespace(cfg=load_config(["configs/llama_debug.toml"]))) == []


# The functions themselves --------------------------------------------------------------------------------


def test_a_map_is_that_of_the_tokens_for_any_shape_of_a_state():
    generator = torch.Generator().manual_seed(0)

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    core = hybrid.DecayedSum()
    first = torch.zeros(2, 7, dtype=torch.bool)
    first[0, 4] = True
    for E, V in (5, 2), (2, 5), (3, 3), (1, 4):
        tokens = [some(2, 7, 3, E), some(2, 7, 3, E), some(2, 7, 3, V), -some(2, 7, 3, E).abs()]
        state = some(2, 3, E, V)
        for starts in None, first:
            a, b = core.summary(*tokens, first=starts)
            _, after = core.run(*tokens, first=starts, state=state)
            torch.testing.assert_close(a @ state + b, after, rtol=1e-13, atol=1e-13)
            diagonal = a.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
            [_, whole] = cp_state.states_before(torch.stack([a, a]), torch.stack([b, b]))
            [_, short] = cp_state.states_before(torch.stack([diagonal] * 2), torch.stack([b, b]))
            torch.testing.assert_close(whole, short, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("width", [1, 2, 4])
def test_a_convolution_is_pytorchs_and_any_cut_gives_the_same_bits(width):
    x, weight = torch.randn(2, 9, 5), torch.randn(5, width)
    padded = F.pad(x.transpose(1, 2), (width - 1, 0))
    expected = F.conv1d(padded, weight[:, None], groups=5).transpose(1, 2)
    core = ConvolutionCore()
    whole = core(x, weight)
    torch.testing.assert_close(whole, expected)
    before = x[:, 4 - (width - 1) : 4]
    assert torch.equal(whole[:, 4:], core.run(x[:, 4:], weight, before=before))
