"""What a model family is: everything that the rest of the code asks of an architecture.

A family is one module of this folder that has the members of `Family`, a module of the same name in
`models/formats/` that has those of `Formats`, and a name in `models/__init__.py::FAMILIES`. Nothing
outside this folder knows the names of a family's layers or numbers. Dense decoders find most
answers in models/dense.py, models/options.py and models/formats/dense.py.

To read the code you need none of this: it is for those who add a family.
"""

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor, nn


class Family(Protocol):
    """The members of a family's module. `args` is always an instance of its `Args`."""

    # Numbers and rules. The first five tables are evaluated without torch
    # (`models/__init__.py::tables`).

    FLAVORS: dict[str, dict[str, Any]]
    """Flavor -> the numbers of `Args`. Each row names its source."""
    OPTIONS: dict[str, tuple[type, dict[str, Any], str]]
    """Number that the [model] table may override -> its type, its bounds in pydantic's words, one
    line that explains it."""
    FOLLOWS: dict[str, tuple[tuple[str, ...], Callable[[dict], Any]]]
    """Number -> the numbers that it follows from, and how: it is computed where one of those is
    overridden and it is not."""
    QUERY_WIDTH: tuple[str, ...]
    """The numbers whose sum is the width of a query's head, which decides what kernels of attention
    there are."""
    RULES: dict[str, tuple[Callable[[Any], bool], str]]
    """Rules between these numbers and the options of a run, in the form of
    `configs/check.py::RULES`."""
    Args: type
    """A frozen dataclass of numbers that JSON can hold: checkpoints record them. All families have
    dim, n_layers, vocab_size, max_seq_len and tied_embeddings."""

    # The network.

    def build(self, args: Any, layers: range | None = None) -> nn.Module:
        """The model on the default device (`meta` in train.py), or with `layers`, numbers of
        blocks, one stage of a pipeline.

        Its forward is that of `models/layers.py::Decoder`. Blocks stand in `model.layers`, a
        ModuleDict by number in the whole model; an output projection that is not tied in
        `model.output`. It has no buffers and draws no random numbers.
        """

    def initial_values(self, args: Any) -> list[tuple[str, str, float]]:
        """Rows (pattern of the parameter's name, kind, standard deviation), of which the first that
        matches counts."""

    DECAY: list[tuple[str, bool]]
    """Rows (pattern of the parameter's name, whether weight decay applies), of which the first that
    matches counts."""

    def tp_plan(self, args: Any) -> dict[str, str]:
        """Pattern of a module's name -> its style under tensor parallelism, a key of
        `parallelisms/tp.py::STYLES`. The first row that matches counts."""

    # Arithmetic.

    def parameters(self, args: Any) -> int:
        """How many numbers are trained; a tied weight counts once."""

    def flops_per_token(self, args: Any, seq_len: int) -> float:
        """Floating-point operations that training needs per token, forward and backward, of
        sequences of this length."""

    def describe(self, args: Any) -> str:
        """The sizes of the model, for the line of the log that also says how many parameters it
        has."""

    def largest_weight(self, args: Any) -> tuple[int, int]:
        """Sides [in, out] of the largest weight of a block; tensor parallelism splits the second."""

    def small(self, dim: int) -> Any:
        """`Args` of a toy of this width, which measures what an operator costs beside its work."""


class Formats(Protocol):
    """The members of a family's module in `models/formats/`: how its weights and numbers are
    published. `args` is always an instance of `Args`, that of the family."""

    Args: type

    # Hugging Face.

    HF_TYPES: tuple[str, ...]
    """The values of config.json's model_type that this family reads; the first is that of a file
    that names none."""
    HF_FIXED: dict[str, Any]
    """Key of config.json -> its only value that this family can express."""

    def hf_config(self, args: Any) -> dict[str, Any]:
        """The fields of transformers' configuration. Raises ValueError for numbers that
        transformers refuses."""

    def args_from_hf(self, config: dict[str, Any]) -> Any:
        """`Args` from the fields of a config.json, which may say anything. Raises KeyError,
        TypeError, ValueError or ZeroDivisionError."""

    def hf_names(self, args: Any) -> dict[str, str]:
        """Name of every parameter -> its name in Hugging Face's files. Shapes and layouts are the
        same, but for a name of theirs with a `#`: there, the parameter is one tensor for each
        expert, and `#` is the expert's number."""

    def hf_ignored(self, args: Any) -> str:
        """A regular expression for the whole names of further tensors that such files may have and
        nobody reads."""


class MetaFormats(Formats, Protocol):
    """Those of a family whose weights Meta published in a format of its own, which `tools.convert
    meta-to-dcp` reads."""

    def args_from_meta(self, params: dict[str, Any], weights: dict[str, Tensor], files: int) -> Any:
        """`Args` from params.json and the tensors of the first of so many files. Raises what
        `args_from_hf` raises."""

    def meta_ignored(self, args: Any) -> set[str]:
        """Names of further tensors that such files may have and nobody reads."""

    def from_meta(self, name: str, weight: Tensor, args: Any) -> Tensor:
        """A whole weight in our layout."""
