"""The row of a style of tensor parallelism (parallelisms/tp.py::STYLES), and its words.

A row says what the style does to a module, the kind of module it fits, and what a rank has of a
hidden state before and after that module. parallelisms/tp_check.py compares every plan with the rows
before a run begins.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch.distributed.tensor.parallel import ParallelStyle

# Kinds of module. A container has parameters in its submodules alone; `other` also has direct ones.
LINEAR = "linear"
NORM = "norm"
EMBEDDING = "embedding"
ROUTER = "router"
CONTAINER = "container"
OTHER = "other"
# Kinds of tensor.
PLAIN = "plain"
DTENSOR = "DTensor"
EITHER = "any"
WORDS = {  # in a sentence
    "whole": "the whole sequence",
    "slice": "a slice of the sequence",
    "own columns": "this rank's columns",
    "own heads": "this rank's heads",
    PLAIN: "as a plain tensor",
    DTENSOR: "as a DTensor",
    EITHER: "plain or as a DTensor",
    LINEAR: "a linear layer",
    NORM: "a norm",
    EMBEDDING: "an embedding",
    ROUTER: "a router",
    CONTAINER: "a module without direct parameters",
    OTHER: "a module with direct parameters",
}


@dataclass(frozen=True)
class Form:
    """The part of a hidden state that a rank has."""

    tokens: str
    features: str
    tensor: str = EITHER

    def words(self) -> str:
        features = WORDS.get(self.features, self.features)
        return f"{WORDS.get(self.tokens, self.tokens)} with {features} {WORDS[self.tensor]}"


WHOLE = Form("whole", "all features")
WHOLE_PLAIN = Form("whole", "all features", PLAIN)
WHOLE_DTENSOR = Form("whole", "all features", DTENSOR)
SLICE = Form("slice", "all features")
SLICE_PLAIN = Form("slice", "all features", PLAIN)
SLICE_DTENSOR = Form("slice", "all features", DTENSOR)
HEADS = Form("whole", "own heads")
HEADS_PLAIN = Form("whole", "own heads", PLAIN)
COLUMNS = Form("whole", "own columns")
COLUMNS_PLAIN = Form("whole", "own columns", PLAIN)


@dataclass(frozen=True)
class Style:
    """A style: the PyTorch style that changes the module, the kind of module it fits, what that
    takes, and what it gives. A container, and `other`, gives this to the modules inside it. None: no
    hidden state comes out."""

    build: Callable[[], ParallelStyle]
    kind: str
    takes: Form
    gives: Form | None
