"""Find where a model that is given float64 computes in a narrower type, as `x.float()` makes it. Its
numbers are rounded there, so they can be compared less closely."""

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

WIDE = torch.float64
NEW = ("new_", "_like")  # in the names of operators that make a tensor in the shape of another


class Narrowing(TorchDispatchMode):
    """Notes the modules in which an operator returns a narrower type than it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.inside: list[str] = []  # the modules that have begun and not ended
        self.found: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        is_wide = any(isinstance(x, Tensor) and x.dtype == WIDE for x in args)
        if is_wide and isinstance(result, Tensor) and narrows(func, result):
            self.found.append(self.inside[-1] if self.inside else "")
        return result

    def begin(self, name: str) -> Any:
        return lambda module, inputs: self.inside.append(name)

    def end(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self.inside.pop()


def narrows(func: Any, result: Tensor) -> bool:
    """Return whether an operator on wide numbers has given others of a narrower type."""
    is_new = any(part in str(func) for part in NEW)
    return result.is_floating_point() and result.dtype != WIDE and not is_new


def narrow_module(model: nn.Module, tokens: Tensor) -> str | None:
    """Return the first module of a float64 model that computes in a narrower type; None if none does.
    tokens: int64 [B, T]."""
    mode = Narrowing()
    with ExitStack() as hooks, torch.no_grad(), mode:
        for name, module in model.named_modules():
            hooks.enter_context(module.register_forward_pre_hook(mode.begin(name)))
            hooks.enter_context(module.register_forward_hook(mode.end))
        model(tokens, torch.arange(tokens.shape[1]))
    return mode.found[0] if mode.found else None
