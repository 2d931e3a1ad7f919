"""Context parallelism: ranks that share a sequence compute what one process computes.

`tests/parity.py` says what is compared. As in tests/test_parallel.py, the runs of a mesh are few combinations of settings, such
that every two settings of the factors meet in the runs of all meshes.
"""

import pytest

from tests.covering import covering_array
from tests.parity import CONTEXT, EXECUTION, NUMBERS, check, combination_of
from tests.runs import CONTEXT_MESHES

FACTORS = CONTEXT | NUMBERS | {factor: EXECUTION[factor] for factor in ("checkpointing", "accumulation")}
PAIRWISE = covering_array({"mesh": list(CONTEXT_MESHES)} | {factor: list(settings) for factor, settings in FACTORS.items()})


@pytest.mark.cap(300)
@pytest.mark.parametrize("mesh", [
    pytest.param(mesh, marks=pytest.mark.slow if ranks > 4 else ()) for mesh, (ranks, _, _) in CONTEXT_MESHES.items()
])  # fmt: skip
def test_mesh_equals_the_plain_model(mesh):
    check(mesh, [combination for combination in PAIRWISE if combination["mesh"] == mesh], factors=FACTORS)
