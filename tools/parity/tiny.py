"""Build a tiny copy of a model: few layers of each kind, small widths, float64, one CPU. What a family
computes can be tried on it in milliseconds (tools/parity/properties.py).

Shapes:  B rows   T tokens of a row
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from configs.schema import InputError, Lora
from models import lora
from models.cores import attention_in
from models.family import Family
from parallelisms.lora import freeze
from tools.parity.narrow import narrow_module
from training import init

WIDTH = 32  # of the residual stream
VOCAB = 61
HEADS = 4
EXPERTS = 8
EXPERT_DIM = 24
GROUPS = 4  # of experts, at most
WINDOW = 5  # tokens that a layer with a window sees
LENGTH = 19  # tokens of a row, more than any other size here but the widths
NOISE = 0.1  # deviation of what is added to vectors, which may begin as 0 or 1


@dataclass(frozen=True)
class Tiny:
    """A tiny copy. model: float64, with values of usual size in every parameter."""

    family: Family  # that of the run, with adapters if it trains any
    args: Any  # Args of the copy
    lora: Lora
    model: Any  # a models/layers.py::Decoder
    narrow: str | None  # the first module that computes in float32 all the same

    @property
    def limit(self) -> float:
        """Return how far two computations of a number may be apart, relative to the largest one.
        float64 rounds at 1e-16, float32 at 1e-7, and a mistake moves by 1e-4 and more."""
        return 1e-9 if self.narrow is None else 1e-5

    @property
    def step(self) -> float:
        """Return by how much a weight is moved for the slope of the loss. float32 rounds the
        difference of two losses by 1e-6 or so."""
        return 1e-5 if self.narrow is None else 1e-2

    @property
    def slope_limit(self) -> float:
        """Return how far a gradient and a slope may be apart, relative to both."""
        return 1e-4 if self.narrow is None else 1e-3

    def initial(self) -> Any:
        """Return another copy, float32, with the initial values of seed 0."""
        model = built(self.family, self.args, self.lora)
        model.to_empty(device="cpu")
        init.initialise(model, self.family.initial_values(self.args), 0)
        return model

    def tokens(self, rows: int, seed: int = 0, length: int = LENGTH) -> Tensor:
        """Return random tokens, int64 [rows, length]."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(self.args.vocab_size, (rows, length), generator=generator)


def copy_of(family: Family, configured: Any, of_lora: Lora) -> Tiny:
    """Return the tiny copy of a model. family: `models/lora.py::adapted`, if there are adapters.
    Raises InputError where the family's own toy cannot be built."""
    try:
        with torch.device("meta"):
            args = shrunk(family, configured)
        model = built(family, args, of_lora).to(torch.float64)
    except InputError:
        raise
    except Exception as error:
        raise InputError(
            f"no small copy of the family {family.name} can be built, since its Numbers.toy "
            f"(models/flavors/{family.name}.py) or a layer does not take such sizes: "
            f"{type(error).__name__}: {error}"
        ) from error
    model.to_empty(device="cpu")
    init.initialise(model, family.initial_values(args), 0)
    spread(model)
    freeze(model, of_lora)
    tokens = torch.arange(2 * LENGTH).view(2, LENGTH) % args.vocab_size
    return Tiny(family, args, of_lora, model, narrow_in(model, tokens))


def narrow_in(model: nn.Module, tokens: Tensor) -> str | None:
    """Return `narrow_module(model, tokens)`; None where the model raises, which a property reports."""
    try:
        return narrow_module(model, tokens)
    except Exception:
        return None


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread, inside of the context: on a busy machine the threads of a product of a
    few numbers wait for each other much longer than it takes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def built(family: Family, args: Any, of_lora: Lora) -> Any:
    """Return the model on `meta`, with the adapters of the run."""
    with torch.device("meta"):
        model = family.build(args)
        if of_lora.rank:
            lora.add(model, of_lora)
    return model


@torch.no_grad()
def spread(model: nn.Module) -> None:
    """Give every parameter values of usual size, in place. At the start of a run some are 0, and
    others so small that a mistake would move an output by rounding alone."""
    generator = torch.Generator().manual_seed(1)
    for weight in model.parameters():
        noise = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
        if weight.ndim > 1:
            weight.copy_(noise / weight.shape[-1] ** 0.5)
        else:
            weight.add_(NOISE * noise)


# Sizes --------------------------------------------------------------------------------------------


def shrunk(family: Family, configured: Any) -> Any:
    """Return the Args of the tiny copy: the family's toy, with grouped heads, windows and experts
    where the model has them, and as few layers as have each kind."""
    given = vars(configured)
    numbers = dict(family.numbers.toy(given, WIDTH)) | {"vocab_size": VOCAB}
    whole = family.build(configured)
    numbers |= of_heads(family, given)
    numbers |= of_windows({n: v for n, v in given.items() if numbers.get(n) == v}, whole)
    if given.get("n_experts"):
        numbers |= of_experts(given)
    numbers = {name: value for name, value in numbers.items() if name in given}
    wanted = kinds(whole)
    for layers in range(min(2, configured.n_layers), configured.n_layers + 1):
        for other_counts in ({}, counts_of_layers(given, layers)):
            args = family.Args(**numbers | other_counts | {"n_layers": layers})
            if kinds(family.build(args)) == wanted:
                return args
    return family.Args(**numbers | {"n_layers": configured.n_layers})


def counts_of_layers(given: dict[str, Any], layers: int) -> dict[str, int]:
    """Return how many layers of one kind there are, as the model has them, of so many in all."""
    names = [name for name in given if name.endswith("_layers") and name != "n_layers"]
    return {name: min(given[name], layers) for name in names}


def of_heads(family: Family, given: dict[str, Any]) -> dict[str, int]:
    """Return the heads of the copy: several query heads for each of keys, where the model has."""
    names = family.numbers
    if not names.kv_heads:
        return {names.heads: HEADS}
    is_grouped = given[names.kv_heads] < given[names.heads]
    return {names.heads: HEADS, names.kv_heads: HEADS // 2 if is_grouped else HEADS}


def of_windows(left: dict[str, Any], whole: Any) -> dict[str, int]:
    """Return the numbers that are the window of a layer, and are shorter in the copy. left: those that
    the toy has as the model does, so no width that is as large by chance."""
    windows = {core.spec.window for core in attention_in(whole)} - {None}
    found = {}
    for name, value in left.items():
        if type(value) is int and value in windows and name != "max_seq_len":
            found[name] = min(value, WINDOW)
    return found


def of_experts(given: dict[str, Any]) -> dict[str, int]:
    """Return the numbers of small mixtures: as many experts of a token as there may be."""
    groups = min(given.get("expert_groups", 1), GROUPS)
    chosen = given.get("groups_per_token", 1) * groups / given.get("expert_groups", 1)
    chosen_groups = max(1, round(chosen))
    reachable = EXPERTS // groups * chosen_groups
    return {
        "n_experts": EXPERTS,
        "expert_groups": groups,
        "groups_per_token": chosen_groups,
        "experts_per_token": max(1, min(given["experts_per_token"], 3, reachable - 1)),
        "expert_dim": EXPERT_DIM,
    }


def kinds(model: Any) -> set[tuple]:
    """Return the kinds of layers: two are of one kind if their modules have the same names and
    classes, and their attention has a window or not."""
    found = set()
    for layer in model.layers.values():
        modules = []
        for name, module in layer.named_modules():
            spec = getattr(module, "spec", None)
            of_window = spec is not None and getattr(spec, "window", None) is not None
            modules.append((name, type(module), of_window))
        found.add(tuple(modules))
    return found
