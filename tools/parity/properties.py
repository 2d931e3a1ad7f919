"""Prove properties of a model on a tiny copy of it, in seconds: what it computes for a token does not
depend on what it must not see, and what the family declares is what it computes.

A mesh that computes what one process does (tools/parity/meshes.py) proves nothing of that process.
The table below is the list. A property that others rest on comes first: where it fails, they are
not tried, since they would fail of the same cause.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from configs.schema import Lora
from models.family import Family
from tools.parity import cached, coordinates, declared, forwards, gradients
from tools.parity.failures import raised
from tools.parity.tiny import Tiny, copy_of, one_thread


@dataclass(frozen=True)
class Property:
    """says: what holds; check: gets the tiny copy, and returns a failure, with the module where it is
    first seen, or None; after: the properties that it rests on."""

    name: str
    says: str
    check: Callable[[Tiny], str | None]
    after: tuple[str, ...] = ()


TABLE = (
    Property("repeats", "the same input gives the same numbers", forwards.repeats),
    Property("causality", "a token moves nothing before it", forwards.causality, ("repeats",)),
    Property(
        "isolation",
        "a document moves nothing in the next one",
        forwards.isolation,
        ("repeats", "causality"),
    ),
    Property(
        "rows",
        "a row depends on no neighbour and no padding",
        forwards.rows,
        ("repeats", "causality"),
    ),
    Property(
        "attention", "each core computes its spec", forwards.attention, ("repeats", "causality")
    ),
    Property(
        "cache",
        "sampling with a cache is sampling without",
        cached.cache,
        ("repeats", "causality", "rows", "attention"),
    ),
    Property(
        "gradients",
        "every trained weight has the slope of the loss",
        gradients.gradients,
        ("repeats", "attention"),
    ),
    Property(
        "recomputed",
        "recomputing blocks changes no gradient",
        gradients.recomputed,
        ("repeats", "gradients"),
    ),
    Property(
        "compiled",
        "compiling blocks changes no gradient",
        gradients.compiled,
        ("repeats", "gradients"),
    ),
    Property(
        "terms",
        "microbatches change no term and no gradient",
        gradients.terms,
        ("repeats", "rows", "gradients"),
    ),
    Property(
        "declarations",
        "parameters, FLOPs, first loss, TP plan, decay and initial values fit",
        declared.declarations,
        ("repeats",),
    ),
    Property("files", "an export is read back bit by bit", declared.files, ("declarations",)),
)
# of a run that transfers its learning rate over width
COORDINATES = Property(
    "coordinates",
    f"in the first steps, outputs move as far at {coordinates.GROWTHS[-1]} times the width",
    coordinates.coordinates,
    ("gradients", "declarations"),
)

# Those that no right model breaks and that cost a second together (tools/parity/proved.py).
AT_START = (
    *TABLE[:5],  # of a forward
    Property("gradients", "every trained weight gets a gradient", gradients.reaches_all),
)


@dataclass(frozen=True)
class PropertyResult:
    """of: the property; failure: where it fails first, in words; left_out: why it was not tried;
    raised: whether the failure is an exception."""

    of: Property
    failure: str = ""
    left_out: str = ""
    raised: bool = False

    def __str__(self) -> str:
        if self.failure:
            return f"{self.of.name:14}FAILS     {self.failure}"
        if self.left_out:
            return f"{self.of.name:14}not tried {self.left_out}"
        return f"{self.of.name:14}holds     {self.of.says}"


def tried(tiny: Tiny, table: Sequence[Property] = TABLE) -> Iterator[PropertyResult]:
    """Yield the verdict on each property."""
    failed: set[str] = set()
    for one in table:
        reasons = [name for name in one.after if name in failed]
        if reasons:
            verdict = PropertyResult(one, left_out=f"it rests on {reasons[0]}")
        else:
            verdict = verdict_on(one, tiny)
        if reasons or verdict.failure:
            failed.add(one.name)
        yield verdict


def verdict_on(one: Property, tiny: Tiny) -> PropertyResult:
    """Try one property."""
    try:
        with one_thread():
            failure = one.check(tiny)
    except forwards.NotAsked as reason:
        return PropertyResult(one, left_out=str(reason))
    except Exception as error:
        return PropertyResult(one, failure=raised(error), raised=True)
    return PropertyResult(one, failure=failure or "")


def report(
    family: Family, args: Any, lora: Lora, table: Sequence[Property] = TABLE
) -> list[PropertyResult]:
    """Print one line for each property, and return the verdicts."""
    tiny = copy_of(family, args, lora)
    small = tiny.args
    print(
        f"properties of {family.name}, on a copy of {small.n_layers} layers of width {small.dim} in "
        "float64:"
    )
    if tiny.narrow is not None:
        print(
            f"{tiny.narrow or 'the model'} computes in float32 (.float()?), so numbers are compared to "
            f"{tiny.limit:g} alone; models/kernels/precision.py::wide would keep float64"
        )
    verdicts = []
    for verdict in tried(tiny, table):
        print(verdict, flush=True)
        verdicts.append(verdict)
    return verdicts
