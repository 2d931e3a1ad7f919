"""Properties of what a family declares: numbers that others compute with are those of the model that is
built. Each function gets the tiny copy, and returns a failure in words, or None."""

import math
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from checkpoint import hf
from configs.schema import InputError, Lora
from models import FORMATS, MODELS
from models.cores import CONVOLUTION, STATE, attention_in, cores_in, kind_of, of_kind
from parallelisms import cores, tp_check
from tools.parity.forwards import NotAsked
from tools.parity.gradients import ROWS, batch, head_of, loss_head, new_terms
from tools.parity.tiny import LENGTH, Tiny, built
from training import init
from training.optim import first_match

CLOSE = 0.01  # FLOPs counted against derived
LOSS = (-0.2, 1.0)  # nats that the first loss may be below and above ln(vocabulary)


def declarations(tiny: Tiny) -> str | None:
    """FLOPs, first loss, TP plan, decay and initial values are those of the model."""
    for check in (covers_all, counts_flops, first_loss):
        failure = check(tiny)
        if failure is not None:
            return failure
    return None


def covers_all(tiny: Tiny) -> str | None:
    """Look for weights that no row of a table matches, for rows that come too late, and for rows of the
    plan that match none. Those of initial values were read when the copy was made."""
    model = built(tiny.family, tiny.args, tiny.lora)
    for table in ("initial_values", "decay", "matrices"):
        rows = getattr(tiny.family, table)
        patterns = [row[0] for row in (rows(tiny.args) if callable(rows) else rows)]
        if "*" in patterns[:-1]:
            unused = patterns[patterns.index("*") + 1]
            return f'Family.{table}: the row "*" matches every parameter before "{unused}" can'
    for name, _ in model.named_parameters():
        try:
            first_match(tiny.family.decay, name)
        except ValueError:
            return f"{name}: no row of Family.decay matches this parameter"
    bare = built(MODELS[tiny.family.name], tiny.args, Lora())
    plan = tiny.family.tp_plan(tiny.args)
    try:
        tp_check.check_names(plan, bare)
        tp_check.check_kinds(tp_check.styles_of(plan, bare), bare)
    except InputError as error:
        return str(error)
    return None


def first_loss(tiny: Tiny) -> str | None:
    """Compare the loss at the start of a run with that of a model that knows nothing."""
    tokens, labels = batch(tiny)
    with torch.no_grad():
        summed = tiny.initial()(tokens, torch.arange(LENGTH), partial(loss_head, labels))
    loss = float(summed) / (ROWS * LENGTH)
    expected = math.log(tiny.args.vocab_size)
    if LOSS[0] <= loss - expected <= LOSS[1]:
        return None
    return (
        f"the model: its first loss is {loss:.2f} nats, and {tiny.args.vocab_size} tokens of one "
        f"probability have {expected:.2f}: look at Family.initial_values"
    )


# FLOPs --------------------------------------------------------------------------------------------


class NoAttention(nn.Module):
    """In the place of a core: in its shapes, without a product."""

    def __init__(self, core: nn.Module):
        super().__init__()
        self.core = core

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *rest: Any, **named: Any) -> Tensor:
        """q [B, T, H, E], v [B, T, K, E or fewer] -> [B, T, H, E or fewer]."""
        return v.repeat_interleave(q.shape[2] // v.shape[2], 2)


class NoState(nn.Module):
    """In the place of a state or a convolution, in the shape of its output: chunked forms have products of
    their own."""

    def __init__(self, core: nn.Module, shape: torch.Size):
        super().__init__()
        self.core = core
        self.shape = shape

    def forward(self, *inputs: Tensor, documents: Any = None) -> Tensor:
        """Inputs [B, T, ...] -> [B, T, H, V], or [B, T, C]."""
        return inputs[0].new_zeros(self.shape)


def product_flops(rows: Any, weight: Any, counts: Any, out_shape: Any = None, **kw: Any) -> int:
    """Count a grouped product (models/kernels/grouped_product.py) from its shapes."""
    return 2 * math.prod(rows) * weight[1]


def counts_flops(tiny: Tiny) -> str | None:
    """Compare the family's formula with the products that a forward computes, times three."""
    family = MODELS[tiny.family.name]
    model = built(family, tiny.args, Lora()).to_empty(device="cpu")
    init.initialise(model, family.initial_values(tiny.args), 0)
    attention = [core for core in attention_in(model) if cores.supports_spec(core)]
    of_attention = flops_of_attention(model, tiny, attention)
    of_states, without_state = flops_of_states(model, tiny)
    mapping = {torch.ops.plumbline.grouped_product: product_flops}
    counter = FlopCounterMode(display=False, custom_mapping=mapping)
    replaced = [*attention, *without_state]
    others = [*map(NoAttention, attention), *without_state.values()]
    with torch.no_grad(), cores.instead(model, replaced, others), counter:
        in_training(model, tiny)
    counted = 3 * counter.get_total_flops() / LENGTH + of_attention + of_states
    derived = family.flops_per_token(tiny.args, LENGTH)
    if abs(counted - derived) <= CLOSE * counted:
        return None
    of_modules = {name: sum(ops.values()) for name, ops in counter.get_flop_counts().items()}
    inner = {n: f for n, f in of_modules.items() if n.count(".") >= 3 or not n.count(".")}
    inner.pop("Global", None)
    shares = sorted(inner, key=lambda name: -inner[name])[:3]
    return (
        f"Family.flops_per_token says {derived:,.0f} for a token of a row of {LENGTH}, and the model "
        f"computes {counted:,.0f} ({counted / derived - 1:+.0%}; most of it in {', '.join(shares)})"
    )


def in_training(model: Any, tiny: Tiny) -> None:
    """Run one row forward, as a step does: what only terms need is computed too."""
    tokens = tiny.tokens(1)
    head = head_of(tiny, tokens, tiny.tokens(1, seed=1))
    model(tokens, torch.arange(LENGTH), head, terms=new_terms())


def flops_of_attention(model: Any, tiny: Tiny, attention: list[Any]) -> float:
    """Return the FLOPs of these cores for a token, forward and backward, from the shapes that they
    get."""
    found = []

    def count(core: Any, inputs: Any) -> None:
        q, k, v = inputs[:3]
        widths = q.shape[-1] + v.shape[-1]
        found.append(6.0 * q.shape[2] * widths * core.spec.keys(LENGTH))

    with ExitStack() as hooks, torch.no_grad():
        for core in attention:
            hooks.enter_context(core.register_forward_pre_hook(count))
        in_training(model, tiny)
    return sum(found)


def flops_of_states(model: Any, tiny: Tiny) -> tuple[float, dict[nn.Module, NoState]]:
    """Return the FLOPs of all states and convolutions for a token, forward and backward, and what replaces
    each meanwhile."""
    states = of_kind(cores_in(model), STATE, CONVOLUTION)
    found: list[float] = []
    without = {}

    def count(core: Any, inputs: Any, output: Tensor) -> None:
        if kind_of(core) == CONVOLUTION:
            numbers = inputs[1].numel()  # the taps, [C, W]
        else:
            _, state = core.run(*inputs)  # [1, H, E, V]
            numbers = core.products * state.numel()
        found.append(6.0 * numbers)
        without[core] = NoState(core, output.shape)

    with ExitStack() as hooks, torch.no_grad():
        for core in filter(cores.supports_spec, states):
            hooks.enter_context(core.register_forward_hook(count))
        in_training(model, tiny)
    return sum(found), without


# Files --------------------------------------------------------------------------------------------


def files(tiny: Tiny) -> str | None:
    """Export for Hugging Face and import give every tensor back."""
    if tiny.family.name not in FORMATS:
        raise NotAsked("the family has no models/formats")
    formats = FORMATS[tiny.family.name]
    if tiny.lora.rank:
        raise NotAsked("adapters alone are trained, and exported as such")
    weights = {name: p.detach().float() for name, p in tiny.model.named_parameters()}
    shapes = {name: list(weight.shape) for name, weight in weights.items()}

    def read(names: Iterable[str]) -> Iterator[Tensor]:
        return (weights[name] for name in names)

    source = hf.TensorSource(shapes, dict.fromkeys(shapes, torch.float32), read)
    with tempfile.TemporaryDirectory(prefix="plumbline-parity-") as name:
        out = Path(name, "hf")
        try:
            config = hf.config_of(formats, tiny.args)
            hf.write_model(out, out, hf.Export(source, formats, tiny.args, config, {}))
            family, args = hf.read_model(out, FORMATS)
            stored = hf.weights(out, formats, tiny.args, shapes)
        except InputError as error:
            said = str(error).replace(str(out), "the export")
            return f"the model cannot be exported and read back: {said}"
        if family != tiny.family.name:
            return f"the exported config.json is read as a model of the family {family}"
        for parameter, weight in weights.items():
            if not torch.equal(stored[parameter].read(), weight):
                return f"{parameter} comes back from its export with other values"
    return None
