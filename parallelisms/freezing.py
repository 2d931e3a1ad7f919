"""Freeze weights on a mesh: those that a family's constructor freezes, and those that
`training.freeze` names.

Parallelisms shard what is trained: tensor parallelism makes new parameters, and FSDP leaves out
those without gradients, such as a router's bias. So a weight counts as trained while it is sharded,
and is frozen at the end. It is sharded, computed with, saved and loaded as all others are; it has
no gradient and no optimizer state.
"""

from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase

from torch import nn

from configs.schema import InputError
from models.moe import Router


def frozen_by_constructor(model: nn.Module) -> list[str]:
    """Return the names of the weights that the constructor freezes. A router's bias is none: the
    trainer moves it (training/balance.py), and every rank has all of it."""
    names = []
    for owner, module in model.named_modules():
        for name, param in module.named_parameters(prefix=owner, recurse=False):
            if not param.requires_grad and not isinstance(module, Router):
                names.append(name)
    return names


def frozen(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Return the names of all frozen weights of a model as its constructor leaves it."""
    names = set(frozen_by_constructor(model))
    for name, _ in model.named_parameters():
        if any(fnmatchcase(name, pattern) for pattern in patterns):
            names.add(name)
    return sorted(names)


def count(model: nn.Module, patterns: Sequence[str]) -> int:
    """Count the numbers in frozen weights of a whole model."""
    params = dict(model.named_parameters())
    return sum(params[name].numel() for name in frozen(model, patterns))


def thaw(model: nn.Module) -> list[str]:
    """Count what the constructor freezes as trained, in place, and return its names for `freeze`."""
    names = frozen_by_constructor(model)
    for name in names:
        model.get_parameter(name).requires_grad_(True)
    return names


def freeze(model: nn.Module, names: Sequence[str], patterns: Sequence[str]) -> None:
    """Freeze these weights, and those whose names match a pattern, in place."""
    for name, param in model.named_parameters():
        if name in names or any(fnmatchcase(name, pattern) for pattern in patterns):
            param.requires_grad_(False)


def check(model: nn.Module, patterns: Sequence[str], stages: Sequence[range]) -> None:
    """Raise InputError for a pattern that matches no weight of the whole model, and for a stage of
    the pipeline (a range of layers) that has nothing left to train."""
    check_patterns(model, "training.freeze", patterns)
    names = [name for name, _ in model.named_parameters()]
    left = set(names).difference(frozen(model, patterns))
    for stage, layers in enumerate(stages):
        if not any(_is_in(name, layers, model.args.n_layers) for name in left):
            where = f"stage {stage} of the pipeline" if len(stages) > 1 else "the model"
            raise InputError(
                f"training.freeze leaves {where} nothing to train: freeze less, or use fewer stages"
            )


def check_patterns(model: nn.Module, option: str, patterns: Sequence[str]) -> None:
    """Raise InputError for a pattern of this option that matches no parameter of the whole model."""
    names = [name for name, _ in model.named_parameters()]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise InputError(
                f"{option}: {pattern!r} matches no parameter of the model, which has "
                f"{', '.join(names[:3])} ... {names[-1]}: correct or remove it"
            )


def check_multipliers(
    model: nn.Module, option: str, patterns: Sequence[str], untrained: Collection[str]
) -> None:
    """Raise InputError for a pattern of this option, of which the first match counts, that changes
    nothing. untrained: names of the parameters that no optimizer updates."""
    check_patterns(model, option, patterns)
    left = {name for name, _ in model.named_parameters()}
    for pattern in patterns:
        own = {name for name in left if fnmatchcase(name, pattern)}
        if not own:
            raise InputError(
                f"{option}: {pattern!r} has no effect, since patterns before it match all of its "
                "parameters and the first match counts: put it before them, or remove it"
            )
        if own.issubset(untrained):
            raise InputError(
                f"{option}: {pattern!r} has no effect, since its parameters are frozen: remove it"
            )
        left -= own


def _is_in(name: str, layers: range, n_layers: int) -> bool:
    """Return whether a parameter of the whole model is in a stage."""
    part, _, rest = name.partition(".")
    if part == "layers":
        number = int(rest.partition(".")[0])
        return min(number, n_layers - 1) in layers  # those behind the last one are with it
    if part == "tok_embeddings":
        return layers.start == 0
    return layers.stop == n_layers
