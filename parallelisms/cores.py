"""What a model's attention cores say of themselves, asked before anybody computes in their place.

A core follows its rule (`models/layers.py::AttentionCore`), or is its own: a class that overrides
`forward` says `follows_rule = True` or `follows_rule = False` beside it. A core of its own computes
what it likes. So context parallelism, which replaces `forward`, and the cache of sampling refuse it
by name; everything else leaves it alone. A core that says nothing is refused by all.
"""

import logging
from collections.abc import Callable
from typing import Any

from torch import nn

from configs.schema import InputError
from models.kernels.ruled_attention import PLAIN, why_slow
from parallelisms.mesh import Mesh

say = logging.getLogger("plumbline")


def check(model: nn.Module, mesh: Mesh, kernel: str) -> None:
    """Raises InputError for a core that says nothing, for one that context parallelism cannot
    replace, and for a rule that `kernel` (`training.attention`) does not compute. model: the whole
    one, or a stage of a pipeline, before `parallelisms/cp.py` has replaced anything. Says what is
    slow."""
    for core in model.cores():
        is_replaced = "forward" in vars(core)  # on this one, by the family
        if is_replaced or follows_rule(core) is None:
            name = type(core).__qualname__
            raise InputError(
                f"the attention core {name} has a forward of its own and does not say whether that "
                f"follows its rule: write follows_rule = True in {name} if it computes what "
                "self.rule says, or False if it does not"
            )
    if mesh.cp > 1:
        own = stranger(model)
        if own is not None:
            raise InputError(
                f"parallelism.context_parallel = {mesh.cp} replaces attention, and {own}: set it "
                "to 1"
            )
    rules = {core.rule for core in model.cores() if follows_rule(core)}
    special = rules - {PLAIN}
    if kernel == "cudnn" and special:
        described = sorted(rule.describe() for rule in special)
        raise InputError(
            f'training.attention = "cudnn" computes plain causal attention, and this model has '
            f'layers with {" and with ".join(described)}: set it to "auto" or "flash"'
        )
    slow = {why_slow(mesh.device, rule) for rule in rules} - {None}
    if slow and mesh.rank == 0:
        say.warning(slow.pop())


def follows_rule(core: Any) -> bool | None:
    """Whether a core computes what its rule says; None: it does not say."""
    for owner in type(core).__mro__:
        if "follows_rule" in vars(owner):
            return core.follows_rule
        if "forward" in vars(owner):
            return None
    return None


def stranger(model: nn.Module) -> str | None:
    """What keeps others from computing the model's attention, as a clause; None if nothing does."""
    cores = model.cores()
    if len(cores) != len(model.layers):
        return (
            f"{type(model).__qualname__}.cores() names {len(cores)} attention cores for "
            f"{len(model.layers)} layers"
        )
    for core in cores:
        if not follows_rule(core):
            return f"the attention core {type(core).__qualname__} follows no rule"
    return None


def check_flops(model: nn.Module, count: Callable[[Any, int], float], T: int) -> None:
    """Raises InputError if layers have windows and the family's count of FLOPs (args, sequence
    length) does not know it: without windows, every further token makes attention cost as much as
    the one before it."""
    rules = {core.rule for core in model.cores() if follows_rule(core)}
    windows = [rule.window for rule in rules if rule.keys(T) < T]
    if not windows:
        return
    without_attention = count(model.args, 0)
    of_one_key = count(model.args, 1) - without_attention
    if count(model.args, T) - without_attention >= T * of_one_key * (1 - 1e-9):
        raise InputError(
            f"layers of this model.family have attention that sees a window of {min(windows)} "
            f"tokens, and its flops_per_token counts {T} keys for every query: count "
            "rule.keys(seq_len) of each layer"
        )
