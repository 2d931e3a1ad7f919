"""Declare what a core supports, and put a core of another class in its place.

A core is a module in which tokens see each other. It has no parameters. Another module replaces it
where ranks share a sequence (parallelisms/cp.py, cp_state.py) and where earlier tokens are kept
(training/sample.py); that is built from the core that it replaces, which is its `core`. There are
three kinds (models/cores.py):

    attention     computes its `spec`; ranks exchange and a cache keeps keys and values
    state         `run`; ranks exchange what their tokens do to the state, a cache keeps the state
    convolution   ranks exchange and a cache keeps its last inputs

A core whose `forward` computes something else than its kind also sets
`supports_spec = True` or `supports_spec = False`. A core without support may compute anything, so
context parallelism and the cache of sampling, which replace cores, refuse it by name; everything
else leaves it alone. A core that sets neither is refused by all.

A layer without a core may let tokens see each other in any way, so all who would have to know how
refuse it by name: context parallelism, the cache, and document masks. The class of its mixer says

    mixes_tokens = False         it works on single tokens: nothing is shared, kept or masked
    separates_documents = True   its forward honours `documents`
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from configs.schema import Config, InputError
from models.cores import ATTENTION, CONVOLUTION, STATE, cores_in, documents_of, kind_of, of_kind
from models.kernels.ruled_attention import PLAIN, why_slow
from models.recurrent import StateCore
from parallelisms.mesh import Mesh

logger = logging.getLogger("plumbline")

# kind of core -> where it is said what it computes
WHAT_IS_COMPUTED = {
    ATTENTION: "self.spec",
    STATE: "models/recurrent.py::StateCore.forward",
    CONVOLUTION: "models/recurrent.py::ConvolutionCore.forward",
}


def check(model: nn.Module, mesh: Mesh, cfg: Config) -> None:
    """Raise InputError for a core that does not set `supports_spec`, for one that context
    parallelism or `data.mask_documents` cannot do with, and for a spec that the kernel
    `training.attention` does not compute; log a warning where a kernel is slow. model: the whole
    one, or a stage of a pipeline, before `parallelisms/cp.py` has replaced anything."""
    hidden = hidden_core(model)
    if hidden is not None:
        raise InputError(
            f"{hidden}, so neither context parallelism nor the cache of sampling would know of it: "
            "remove the method, since that of models/layers.py::Decoder finds all of them"
        )
    if cfg.data.mask_documents:
        check_documents(model)
    for core in model.cores():
        is_replaced = "forward" in vars(core)  # the family replaced it on the instance
        if is_replaced or supports_spec(core) is None:
            name = type(core).__qualname__
            raise InputError(
                f"the {kind_of(core)} core {name} overrides forward and does not say whether "
                f"that follows its spec: write supports_spec = True in {name} if it computes what "
                f"{WHAT_IS_COMPUTED[kind_of(core)]} says, or False if it does not"
            )
    if mesh.cp > 1:
        own = unsupported_core(model)
        if own is not None:
            raise InputError(
                f"parallelism.context_parallel = {mesh.cp} replaces attention, and {own}: set it "
                "to 1"
            )
    specs = specs_of(model)
    special = specs - {PLAIN}
    if cfg.training.attention == "cudnn" and special:
        described = sorted(spec.describe() for spec in special)
        raise InputError(
            f'training.attention = "cudnn" computes plain causal attention, and this model has '
            f'layers with {" and with ".join(described)}: set it to "auto" or "flash"'
        )
    slow = {why_slow(mesh.device, spec) for spec in specs} - {None}
    if slow and mesh.rank == 0:
        logger.warning(slow.pop())


class CoreOfRanks(nn.Module):
    """A core that ranks share; it replaces one that computes whole sequences alone."""

    supports_spec = True

    def __init__(self, core: Any):
        super().__init__()
        self.core = core
        if kind_of(core) == ATTENTION:
            self.spec = core.spec
        else:
            self.kind = core.kind


class ModulePlace(NamedTuple):
    """An attribute that holds a module: `setattr(owner, name, other)` replaces it."""

    owner: nn.Module
    name: str


def places(model: nn.Module, modules: Sequence[nn.Module]) -> list[ModulePlace]:
    """Return the attribute of the model that holds each of these modules."""
    found = {}
    for owner in model.modules():
        for name, child in owner.named_children():
            found[child] = ModulePlace(owner, name)
    return [found[module] for module in modules]


def put(into: Sequence[ModulePlace], modules: Sequence[nn.Module]) -> None:
    """Assign these modules to these attributes."""
    for place, module in zip(into, modules, strict=True):
        setattr(place.owner, place.name, module)


@contextmanager
def instead(model: nn.Module, old: Sequence[nn.Module], new: Sequence[nn.Module]) -> Iterator[None]:
    """Replace the old modules by the new ones, inside of the context."""
    into = places(model, old)
    put(into, new)
    try:
        yield
    finally:
        put(into, old)


def specs_of(model: nn.Module) -> set[Any]:
    """Return the specs of the model's attention, of the cores that compute theirs."""
    return {core.spec for core in of_kind(model.cores(), ATTENTION) if supports_spec(core)}


def supports_spec(core: Any) -> bool | None:
    """Return whether a core computes what its spec says, or what its kind does; None if its class
    does not declare it."""
    for owner in type(core).__mro__:
        if "supports_spec" in vars(owner):
            return core.supports_spec
        if "forward" in vars(owner):
            return None
    return None


def unsupported_core(model: nn.Module) -> str | None:
    """Return why the cores of the model's mixers cannot be replaced, as a clause; None if they can."""
    for name, mixer in mixers_without_core(model).items():
        return (
            f"{name} ({mixer}) has no attention core, state or convolution (models/cores.py) that "
            f"says what its tokens see of others; write mixes_tokens = False in {mixer} if it works "
            "on single tokens"
        )
    for core in model.cores():
        name = type(core).__qualname__
        if not supports_spec(core):
            what = "AttentionSpec" if kind_of(core) == ATTENTION else "what cores of this kind do"
            return f"the {kind_of(core)} core {name} does not support {what}"
        if isinstance(core, StateCore) and type(core).run is StateCore.run:
            return f"the state core {name} has no `run`, by which a state goes from token to token"
    return None


def hidden_core(model: nn.Module) -> str | None:
    """Return which core the model's own method leaves out, as a clause; None where there is none."""
    known = set(model.cores())
    names = {module: name for name, module in model.named_modules()}
    for core in cores_in(model):
        if core not in known:
            return (
                f"{type(model).__qualname__}.cores() leaves out the {kind_of(core)} core {names[core]} "
                f"({type(core).__qualname__})"
            )
    return None


def mixers_without_core(model: nn.Module) -> dict[str, str]:
    """Return the layers that have no core and do not say that they work on single tokens:
    the name of the layer's mixer -> its class."""
    found = {}
    for number, block in model.layers.items():
        if cores_in(block) or says(block, "mixes_tokens", False):
            continue
        mixer = getattr(block, "attention", None)
        name = f"layers.{number}" if mixer is None else f"layers.{number}.attention"
        found[name] = type(block if mixer is None else mixer).__qualname__
    return found


def says(block: nn.Module, name: str, value: bool) -> bool:
    """Return whether a module of this block has an attribute with this value."""
    return any(getattr(module, name, None) is value for module in block.modules())


def check_documents(model: nn.Module) -> None:
    """Raise InputError for a layer that does not say that it keeps documents apart, and for attention
    whose documents do not tell a hybrid's other cores where they are."""
    for name, mixer in mixers_without_core(model).items():
        block = model.layers[name.split(".")[1]]
        if not says(block, "separates_documents", True):
            raise InputError(
                f"data.mask_documents = true, and {name} ({mixer}) has no attention core, state or "
                f"convolution, and does not say that it keeps documents apart: write in {mixer} "
                "mixes_tokens = False if it works on single tokens, separates_documents = True if its "
                "forward honours `documents`, or set mask_documents to false"
            )
    try:
        documents_of(model.cores(), torch.arange(2)[None], torch.device("cpu"))
    except TypeError as error:
        raise InputError(f"data.mask_documents = true, and {error}") from None


def check_flops(model: nn.Module, count: Callable[[Any, int], float], T: int) -> None:
    """Raise InputError if layers have windows and the family's count of FLOPs (args, sequence
    length) ignores them: without windows, every further token makes attention cost as much as the
    one before it."""
    specs = specs_of(model)
    windows = [spec.window for spec in specs if spec.keys(T) < T]
    if not windows:
        return
    without_attention = count(model.args, 0)
    of_one_key = count(model.args, 1) - without_attention
    if count(model.args, T) - without_attention >= T * of_one_key * (1 - 1e-9):
        raise InputError(
            f"layers of this model.family have attention that sees a window of {min(windows)} "
            f"tokens, and its flops_per_token counts {T} keys for every query: count "
            "spec.keys(seq_len) of each layer"
        )
