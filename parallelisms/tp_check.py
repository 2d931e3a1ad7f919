"""Check before a run begins that a plan of tensor parallelism fits the model, so that a mistake is
a sentence that names a module and its style, and not an exception from inside DTensor.

First the kinds of module that styles fit (parallelisms/tp.py::STYLES) are compared with the modules.
Then one layer of each kind computes once on `meta`: shapes without memory, values or messages. What
every module gets there is compared with its style's row.
"""

import difflib
import fnmatch
import re
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from configs.schema import InputError
from models.moe import Router
from parallelisms import tp
from parallelisms.boxes import shard_of
from parallelisms.tp_style import (
    COLUMNS,
    CONTAINER,
    DTENSOR,
    EITHER,
    EMBEDDING,
    HEADS,
    LINEAR,
    NORM,
    OTHER,
    PLAIN,
    ROUTER,
    SLICE,
    SLICE_PLAIN,
    WHOLE,
    WORDS,
    Form,
)


def check(plan: dict[str, str], whole_model: nn.Module, tp_mesh: DeviceMesh) -> None:
    """Raise InputError for a plan that does not fit. whole_model: on `meta`, and not a stage of a
    pipeline, which has some of the modules; it is used up. All ranks find the same."""
    check_names(plan, whole_model)
    styles = styles_of(plan, whole_model)
    check_kinds(styles, whole_model)
    keep_one_layer_of_each_kind(styles, whole_model)
    check_forms(plan, styles, whole_model, tp_mesh)


def wrong(sentence: str) -> InputError:
    return InputError(f"the plan of tensor parallelism {sentence}")


def check_names(plan: dict[str, str], whole_model: nn.Module) -> None:
    """Check that every row matches a module: a misspelt row would leave a module whole on every
    rank. Only `output` may be missing, as in a tied model."""
    names = [name for name, _ in whole_model.named_modules()]
    for pattern, style in plan.items():
        if style not in tp.STYLES:
            nearest = near(style, list(tp.STYLES))
            raise wrong(f"gives {pattern} the style {style}, which does not exist{nearest}")
        if pattern != "output" and not fnmatch.filter(names, pattern):
            patterns = {re.sub(r"\b\d+\b", "*", name) for name in names}
            nearest = near(pattern, sorted(patterns))
            raise wrong(f"has a row for {pattern}, and the model has no such module{nearest}")


def near(word: str, words: list[str]) -> str:
    found = difflib.get_close_matches(word, words, 1)
    return f" (is it {found[0]}?)" if found else ""


def styles_of(plan: dict[str, str], whole_model: nn.Module) -> dict[str, str]:
    """Return name of a module -> its style. The first row that matches counts."""
    names = [name for name, _ in whole_model.named_modules()]
    styles: dict[str, str] = {}
    for pattern, style in plan.items():
        for name in fnmatch.filter(names, pattern):
            styles.setdefault(name, style)
    return styles


def check_kinds(styles: dict[str, str], whole_model: nn.Module) -> None:
    """Check that each module's style fits its kind, and that each module with trained parameters
    has a style. The experts are left to expert parallelism."""
    for mixture in whole_model.mixtures().values():
        mixture.experts.requires_grad_(False)
    for name, module in whole_model.named_modules():
        kind = kind_of(module)
        style = styles.get(name)
        if style is None:
            own = [p for p in module.parameters(recurse=False) if p.requires_grad]
            if own:
                raise wrong(f"has no row for {name}, {WORDS[kind]}: {fitting(kind)}")
        elif tp.STYLES[style].kind != kind:
            raise wrong(
                f"gives {name} the style {style}, which is for {WORDS[tp.STYLES[style].kind]}, and it "
                f"is {WORDS[kind]}: {fitting(kind)}"
            )
        else:
            check_replaced(name, module, style)


def check_replaced(name: str, module: nn.Module, style: str) -> None:
    """Check that a style that puts another module in the place of this one drops no code of it."""
    of_style: Any = tp.STYLES[style].build()
    base = getattr(of_style, "replaces", None)
    if base is not None and type(module).forward is not base.forward:
        raise wrong(
            f"gives {name} the style {style}, which puts another module in its place: the forward "
            f"of {type(module).__qualname__} would be dropped; {of_style.instead}"
        )


def kind_of(module: nn.Module) -> str:
    own = list(module.parameters(recurse=False))
    if isinstance(module, nn.Embedding):
        return EMBEDDING
    if isinstance(module, nn.Linear):
        return LINEAR
    if isinstance(module, Router):
        return ROUTER
    if not own:
        return CONTAINER
    has_children = any(True for _ in module.children())
    if not has_children and all(p.dim() == 1 for p in own):
        return NORM
    return OTHER


def fitting(kind: str, form: Form | None = None) -> str:
    """List the styles that fit a module of this kind, or one that gets this."""
    found = [
        style
        for style, row in tp.STYLES.items()
        if row.kind == kind and (form is None or fits(form, row.takes))
    ]
    what = WORDS[kind] if form is None else f"{WORDS[kind]} that gets this"
    if not found:
        return f"no style fits {what}"
    return f"{' or '.join(found)} would fit {what}"


def fits(form: Form, takes: Form) -> bool:
    same_part = (form.tokens, form.features) == (takes.tokens, takes.features)
    return same_part and takes.tensor in (form.tensor, EITHER)


def keep_one_layer_of_each_kind(styles: dict[str, str], whole_model: Any) -> None:
    """Delete each layer of a kind that came before: two are of one kind if their modules have the same
    classes, shapes and styles."""
    seen = set()
    for number, layer in list(whole_model.layers.items()):
        modules = []
        for name, module in layer.named_modules():
            shapes = tuple(p.shape for p in module.parameters(recurse=False))
            style = styles.get(f"layers.{number}.{name}".rstrip("."))
            modules.append((name, type(module), shapes, style))
        kind = tuple(modules)
        if kind in seen:
            del whole_model.layers[number]
        seen.add(kind)


def check_forms(
    plan: dict[str, str], styles: dict[str, str], model: Any, tp_mesh: DeviceMesh
) -> None:
    """Run one forward pass on `meta`, and check that a module with a style gets what its style
    takes, and that each block returns a slice."""
    watch = PlanWatch(styles, model, tp_mesh.size())
    try:
        tp.apply(model, tp_mesh, plan)
    except ValueError as error:  # a style leaves a parameter whole
        raise InputError(str(error)) from None
    watch.all_modules(model)
    tokens = torch.zeros(1, watch.T, dtype=torch.int64, device="meta")
    positions = torch.arange(watch.T, device="meta")
    try:
        with torch.no_grad():
            model(tokens, positions, hidden_states)
    except InputError:
        raise
    except Exception as error:
        raise watch.cannot_compute(error) from None


def hidden_states(h: Tensor, weight: Tensor, cap: float = 0.0) -> Tensor:
    """Return the hidden states; takes the place of a loss head. cap: of logits, not used."""
    return h


class PlanWatch:
    """Hooks that compare what the modules of a model get with their styles. model: before any style
    is applied."""

    def __init__(self, styles: dict[str, str], model: Any, ranks: int):
        self.styles = styles
        self.ranks = ranks
        # long enough that a slice of a slice has several tokens too: one would be broadcast
        self.T = 2 * ranks * ranks
        self.dim = model.args.dim
        self.widths = {name: widths(module) for name, module in model.named_modules()}
        self.inside: list[str] = []  # the modules that have begun and not ended
        self.gave_dtensors: list[str] = []

    def all_modules(self, model: Any) -> None:
        for name, module in model.named_modules():
            module.register_forward_pre_hook(partial(self.begin, name), prepend=True)
            module.register_forward_hook(partial(self.end, name))
        for number, block in model.layers.items():
            block.register_forward_hook(partial(self.end_of_block, f"layers.{number}"))

    def begin(self, name: str, module: nn.Module, inputs: tuple) -> None:
        self.inside.append(name)
        style = self.styles.get(name)
        if style is None:
            return
        row = tp.STYLES[style]
        form = self.form_of(inputs[0], self.widths[name][0])
        if not fits(form, row.takes):
            raise wrong(
                f"gives {name} the style {style}, which takes {row.takes.words()}, and it gets "
                f"{form.words()} {shape_of(inputs[0])}: {fitting(row.kind, form)}"
                f"{self.around(name)}"
            )

    def end(self, name: str, module: nn.Module, inputs: tuple, output: Any) -> None:
        self.inside.pop()
        style = self.styles.get(name)
        if style is None:
            return
        if isinstance(output, DTensor):
            self.gave_dtensors.append(name)
        row = tp.STYLES[style]
        if row.kind in (CONTAINER, OTHER) or row.gives is None:
            return
        form = self.form_of(output, self.widths[name][1])
        if form != row.gives:
            raise wrong(
                f"gives {name} the style {style}, which is to return {row.gives.words()}, and it "
                f"returns {form.words()} {shape_of(output)}: correct the style, or its row of "
                "parallelisms/tp.py::STYLES"
            )

    def end_of_block(self, name: str, module: nn.Module, inputs: tuple, output: Any) -> None:
        h = output[0] if isinstance(output, tuple) else output
        form = self.form_of(h, self.dim)
        expected = SLICE_PLAIN
        if form != expected:
            raise wrong(
                f"makes {name} return {form.words()} {shape_of(h)}, where the next block takes "
                f"{expected.words()}: what attention and the feed-forward layer return last has the "
                "style rows"
            )

    def form_of(self, x: Tensor, width: int | None) -> Form:
        """Return what this rank has. x: [1, T], [1, T, features], [1, T, heads, E], or without the
        1; width: features in one process."""
        shape = shape_of(x)
        count = shape[1] if shape[0] == 1 else shape[0]
        of_sequence = {self.T: WHOLE.tokens, self.T // self.ranks: SLICE.tokens}
        tokens = of_sequence.get(count, f"{count} tokens")
        features = f"{shape[-1]} features"
        if width is None or (len(shape) < 4 and shape[-1] == width):
            features = WHOLE.features
        elif shape[-1] == width:
            features = HEADS.features
        elif shape[-1] == width // self.ranks:
            features = COLUMNS.features
        return Form(tokens, features, DTENSOR if isinstance(x, DTensor) else PLAIN)

    def around(self, name: str) -> str:
        """Return the module around this one, if it has no row: it could have gathered the
        sequence."""
        parent = name.rpartition(".")[0]
        is_block = parent.count(".") < 2
        return "" if is_block or parent in self.styles else f" ({parent} has no row)"

    def cannot_compute(self, error: Exception) -> InputError:
        name = self.inside[-1]
        style = self.styles.get(name)
        has = f"the style {style}" if style else "no row"
        mixed = ""
        if self.gave_dtensors and self.gave_dtensors[-1].rpartition(".")[0] == name:
            last = self.gave_dtensors[-1]
            mixed = f"; {last} with the style {self.styles[last]} gave it a DTensor"
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        return wrong(f"cannot compute {name or 'the model'}, which has {has}{mixed}: {reason}")


def widths(module: nn.Module) -> tuple[int | None, int | None]:
    """Return how many features a module takes and gives in one process; None where that is unknown:
    what a mixer or a block calls its weight says nothing of its input."""
    weight = getattr(module, "weight", None)
    if weight is None or kind_of(module) in (CONTAINER, OTHER):
        return None, None
    if isinstance(module, nn.Embedding):
        return None, weight.shape[1]
    return weight.shape[-1], weight.shape[0]


def shape_of(x: Tensor) -> list[int]:
    """Return the shape of what this rank has."""
    return list(shard_of(x).shape)
