"""States and convolutions (models/recurrent.py): equal to one process on every mesh, kept apart at a
document, and kept while sampling. Each mistake that would train in silence is put in once."""

from collections.abc import Callable, Sequence

import pytest

from configs.schema import Lora
from models import llama
from tests import hybrid, parity
from tests.ranks import run_ranks
from tests.runs import CONTEXT_MESHES, MESHES, ULYSSES
from tools.parity import properties
from tools.parity.tiny import copy_of

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


# Properties and the cache ----------------------------------------------------------------------------

ARGS = llama.Args(**llama.NUMBERS.flavors["debug"])


def failures(family=hybrid.FAMILY) -> dict[str, str]:
    with hybrid.instead_of_llama(family):
        tiny = copy_of(family, ARGS, Lora())
        verdicts = list(properties.tried(tiny))
    left_out = {verdict.of.name for verdict in verdicts if verdict.left_out}
    assert left_out <= {"files"}
    return {verdict.of.name: verdict.failure for verdict in verdicts if verdict.failure}


def test_the_properties_of_a_hybrid_hold():
    assert failures().keys() <= {"files"}
