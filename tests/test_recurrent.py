"""States and convolutions (models/recurrent.py): equal to one process on every mesh, kept apart at a
document, and kept while sampling. Each mistake that would train in silence is put in once."""

from collections.abc import Callable, Sequence

import pytest
import torch

import train
from configs.load import load_config
from configs.schema import Lora
from models import llama
from parallelisms import cp_state
from parallelisms.mesh import world
from tests import hybrid, parity
from tests.ranks import run_ranks
from tests.runs import CONTEXT_MESHES, CP2, MESHES, ULYSSES
from tools.parity import properties
from tools.parity.tiny import copy_of
from training.sample import Sampling, sample_stream

HYBRID = [parity.FLOAT64, *parity.ADAMW, "--training.max_norm=0.1"]
# sequences of two tokens for each part, with four parts: less than the convolution sees
SHORT = "--training.seq_len=8"
ONE_TOKEN = "one token"  # every other document has one token


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
        [],
        [parity.DOCUMENTS, "--activation_checkpoint.mode=selective"],
        [SHORT, parity.DOCUMENTS],
        [ULYSSES, SHORT, "--activation_checkpoint.mode=full"],
        [ULYSSES, parity.DOCUMENTS, parity.TWO_MICROBATCHES],
    ],
    "cp2xtp2": [[parity.DOCUMENTS], [ULYSSES]],
    "pp2xcp2": [[parity.DOCUMENTS, parity.TWO_MICROBATCHES], [ULYSSES]],
    "fsdp2": [[parity.DOCUMENTS]],
}


@pytest.mark.parametrize("mesh", RUNS)
def test_a_mesh_computes_what_one_process_does(mesh, oracles):
    ranks, options, dp_size = (MESHES | CONTEXT_MESHES)[mesh]
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


def test_a_cache_keeps_states_on_a_mesh():
    [[without, with_cache]] = run_ranks(1, sampled, [], [False, True])
    assert with_cache == without
    ranks, options, _ = CONTEXT_MESHES["cp2xtp2"]
    for [on_mesh] in run_ranks(ranks, sampled, options, [True]):
        assert on_mesh == without


# Properties, and what is refused -----------------------------------------------------------------------

ARGS = llama.Args(**llama.NUMBERS.flavors["debug"])


def failures() -> dict[str, str]:
    with hybrid.instead_of_llama():
        tiny = copy_of(hybrid.FAMILY, ARGS, Lora())
        verdicts = list(properties.tried(tiny))
    assert [verdict.of.name for verdict in verdicts if verdict.left_out] in ([], ["files"])
    return {verdict.of.name: verdict.failure for verdict in verdicts if verdict.failure}


def test_the_properties_of_a_hybrid_hold():
    """All but `files`: its weights are published nowhere."""
    assert failures().keys() == {"files"}
