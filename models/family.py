"""Define a model family: the interface between an architecture and the rest of the code.

A family is a word in `models/__init__.py::FAMILIES` and up to three files:

- `models/<name>.py`, its network, which ends with `FAMILY = Family(...)`;
- `models/flavors/<name>.py`, its numbers without torch: `NUMBERS = Numbers(...)`
  (`models/options.py::Numbers`);
- `models/formats/<name>.py`, for one whose weights are published: `FORMATS = Formats(...)`.

Nothing outside this folder knows the names of a family's layers or numbers. To read the code you
need none of this: it is for those who add a family.
"""

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from models import arithmetic, layers
from models.options import Numbers

# (build, Args as text) -> `models/arithmetic.py::parameters`, counted once: a search asks thousands
# of times
COUNTED: dict[tuple[Callable, str], tuple[int, int]] = {}


@dataclass(frozen=True)
class Family:
    """`args` is always an instance of the family's `Args`."""

    name: str
    """Its word in FAMILIES."""
    numbers: Numbers
    """Sizes, options and rules."""
    Args: type
    """A frozen dataclass of numbers that JSON can hold: checkpoints record them. All families have
    dim, n_layers, vocab_size, max_seq_len and tied_embeddings."""

    # The network.

    build: Callable[..., nn.Module]
    """(args, layers=None) -> the model on the default device (`meta` in train.py), or with `layers`,
    a range of numbers of blocks, one stage of a pipeline.

    Its forward is that of `models/layers.py::Decoder`. Blocks stand in `model.layers`, a ModuleDict
    by number in the whole model; an output projection that is not tied in `model.output`. It has no
    buffers and draws no random numbers."""
    initial_values: Callable[[Any], list[tuple[str, str, float]]]
    """(args) -> rows (pattern of the parameter's name, kind, standard deviation), of which the first
    that matches counts."""
    decay: list[tuple[str, bool]]
    """Rows (pattern of the parameter's name, whether weight decay applies), of which the first that
    matches counts."""
    tp_plan: Callable[[Any], dict[str, str]]
    """(args) -> pattern of a module's name -> its style under tensor parallelism, a key of
    `parallelisms/tp.py::STYLES`. The first row that matches counts."""

    # Arithmetic.

    flops_per_token: Callable[[Any, int], float]
    """(args, seq_len) -> floating-point operations that training needs per token, forward and
    backward, of sequences of this length."""
    describe: Callable[[Any], str] = arithmetic.describe
    """(args) -> the sizes of the model, for the line of the log that also says how many parameters
    it has."""
    largest_weight: Callable[[Any], tuple[int, int]] = arithmetic.largest_weight
    """(args) -> sides [in, out] of the largest weight of a block; tensor parallelism splits the
    second."""
    matrices: Sequence[tuple[str, bool]] = layers.MATRICES
    """Rows (pattern of the parameter's name, whether it is a hidden matrix, or a stack of them
    [experts, out, in]), of which the first that matches counts. Muon updates these."""
    scales: Mapping[str, Any] = field(default_factory=dict)
    """Parameter's name -> its models/transfer.py::Scale, of a run that transfers its learning
    rate."""
    trained_parameters: Callable[[Any], int] | None = None
    """(args) -> how many parameters adapters have, which `build` does not make, where they alone are
    trained (models/lora.py). None: all parameters are trained."""

    def parameters(self, args: Any) -> int:
        """Count all parameters, those of adapters too; a tied weight counts once."""
        of_adapters = self.trained_parameters(args) if self.trained_parameters else 0
        return self.counted(args)[0] + of_adapters

    def active_parameters(self, args: Any) -> int:
        """Count the parameters that work on a token, without those of adapters."""
        return self.counted(args)[1]

    def counted(self, args: Any) -> tuple[int, int]:
        """Return `models/arithmetic.py::parameters` of the model that `build` makes."""
        key = self.build, repr(args)
        if key not in COUNTED:
            with torch.device("meta"):
                COUNTED[key] = arithmetic.parameters(self.build(args))
        return COUNTED[key]

    def small(self, dim: int) -> Any:
        """Return `Args` of a toy model of this width, to measure the fixed overhead of an
        operator."""
        return self.Args(**self.numbers.toy(self.numbers.flavors["debug"], dim))


@dataclass(frozen=True)
class MetaFormats:
    """Names and layout of the weights that Meta published, which `tools.convert from-meta`
    reads."""

    args_from_meta: Callable[[dict[str, Any], dict[str, Tensor], int], Any]
    """(params, weights, files) -> `Args` from params.json and the tensors of the first of so many
    files. Raises what `args_from_hf` raises."""
    ignored: Callable[[Any], set[str]]
    """(args) -> names of further tensors that such files may have and no reader needs."""
    from_meta: Callable[[str, Tensor, Any], Tensor]
    """(name, weight, args) -> a whole weight in our layout."""


class TensorLayout(Protocol):
    """Map a parameter of ours to published tensors of another shape
    (implementations: models/formats/layouts.py)."""

    types: tuple[str, ...]
    """The types that these tensors may have, in the words of safetensors."""

    def files(self, shape: Sequence[int]) -> dict[str, list[int]]:
        """Their tensors by name, and the shapes of these; shape: that of our parameter."""

    def read(
        self, box: tuple[slice, ...], read_slice: Callable[[str, tuple[slice, ...]], Tensor]
    ) -> Tensor:
        """Read this box of our parameter, contiguous. read_slice: returns a box of a tensor of
        theirs."""

    def join(self, parameters: list[Tensor]) -> Tensor:
        """Their tensor, from all whole parameters of ours that are in it, in the order of
        `hf_names`. Only a layout that is written has it."""


def _as_they_are(args: Any, there: Container[str]) -> dict[str, TensorLayout]:
    return {}


@dataclass(frozen=True)
class Formats:
    """The published formats of a family's weights and configuration. `args` is an instance of the
    family's `Args`."""

    Args: type

    # Hugging Face.

    hf_types: tuple[str, ...]
    """The values of config.json's model_type that this family reads; the first is that of a file
    that names none."""
    hf_fixed: dict[str, Any]
    """Key of config.json -> its only value that this family can express."""
    hf_config: Callable[[Any], dict[str, Any]]
    """(args) -> the fields of transformers' configuration. Raises ValueError for numbers that
    transformers refuses."""
    args_from_hf: Callable[[dict[str, Any]], Any]
    """(config) -> `Args` from the fields of a config.json, which may say anything. Raises KeyError,
    TypeError, ValueError or ZeroDivisionError."""
    hf_names: Callable[[Any], dict[str, str]]
    """(args) -> name of every parameter -> its name in Hugging Face's files. Shapes and layouts are
    the same, but for a name of theirs with a `#`: there, the parameter is one tensor for each
    expert, and `#` is the expert's number."""
    hf_ignored: Callable[[Any], str]
    """(args) -> a regular expression for the whole names of further tensors in these files, which
    are ignored."""

    hf_nested: tuple[str, ...] = ()
    """The values of model_type whose config.json has the fields of the text model in text_config:
    models that see more than text, of which the text model is read."""
    hf_stems: tuple[tuple[str, str], ...] = ()
    """Rows (beginning of a tensor's name in such files, what stands for it in `hf_names`)."""
    hf_in_memory: tuple[tuple[str, str], ...] = ()
    """Rows (regular expression of a part of a parameter's name in files, what transformers' model has in
    its place), where the two differ: adapters for peft have the names of the model."""
    hf_tied: tuple[str, str] = ("model.embed_tokens.weight", "lm_head.weight")
    """The tensors that are one in a model with tied embeddings: the embedding and the output
    projection."""
    hf_layouts: Callable[[Any, Container[str]], dict[str, TensorLayout]] = _as_they_are
    """(args, there) -> name of a parameter that has another shape in their files -> its layout. Then
    several parameters may have one name in `hf_names`. there: the names of the tensors that are
    read; of none, the layouts that are written."""
    meta: MetaFormats | None = None
