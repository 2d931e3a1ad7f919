"""Mixed precision on one rank without FSDP2: the parameters stay float32 (the masters), forward and
backward work on copies in bfloat16.

You can skip this file. The numbers are bitwise those of FSDP2's MixedPrecisionPolicy on one rank
(tests/test_speed.py). FSDP2 moves every weight through an all-gather buffer and every gradient
through a reduce-scatter buffer, which is 5% of a step on a CPU.
"""

from functools import partial

import torch
from torch import nn
from torch.utils._pytree import tree_leaves


def keep_master_weights(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Let the model compute in `dtype`, in place. `model.working_copies` maps parameters to
    copies."""
    masters = MasterWeights(dtype)
    for module in model.modules():
        for name, param in module.named_parameters(recurse=False):
            if param.requires_grad:
                masters.weights.add((module, name))
    model.working_copies = masters.copies
    model.register_forward_pre_hook(masters.before_forward)
    # always_call: also when forward fails
    model.register_forward_hook(masters.after_forward, always_call=True)
    return model


class MasterWeights:
    """Copies of a model's parameters, which its modules use during forward and backward.

    While forward runs, and while backward does (which may run parts of forward again), the copies
    are in their modules' `__dict__`, where `self.weight` finds them first. At all other times
    `layer.wq.weight` is the parameter itself, so an edit of a weight reaches what is trained. Only
    floating-point weights are copied, frozen ones too; a router's bias stays as it is.

    A copy's gradient is added to the parameter's, in float32, as soon as backward has it. To
    autograd a second copy of the same values is no change, so several forwards may come before
    their backwards. An edit between the two is an error, as in PyTorch itself.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        # names in their modules of those that are frozen only after they are sharded
        # (parallelisms/freezing.py)
        self.weights: set[tuple[nn.Module, str]] = set()
        self.copies: dict[nn.Parameter, torch.Tensor] = {}
        # version of the parameter when it was copied
        self.version_of_copy: dict[nn.Parameter, int] = {}
        # version of the parameter's gradient when the last backward left it
        self.version_of_gradient: dict[nn.Parameter, int] = {}
        # module, name of its parameter, the copy
        self.shown: list[tuple[nn.Module, str, torch.Tensor]] = []

    @torch.no_grad()
    def before_forward(self, model: nn.Module, _: tuple) -> None:
        self.shown = []
        for module in model.modules():
            for name, param in module.named_parameters(recurse=False):
                if self.needs_copy(module, name, param):
                    self.shown.append((module, name, self.copy_of(param)))
        self.show()

    def after_forward(self, _: nn.Module, __: tuple, output: object) -> None:
        self.hide()
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(self.before_backward)

    def before_backward(self, _: torch.Tensor) -> None:
        self.show()
        # at the end of this backward; FSDP2 has no other way either
        torch.autograd.Variable._execution_engine.queue_callback(self.hide)

    def show(self) -> None:
        for module, name, copy in self.shown:
            module.__dict__[name] = copy

    def hide(self) -> None:
        for module, name, _ in self.shown:
            module.__dict__.pop(name, None)

    def needs_copy(self, module: nn.Module, name: str, param: nn.Parameter) -> bool:
        if param in self.copies:
            return True
        is_weight = param.requires_grad or (module, name) in self.weights
        return param.is_floating_point() and is_weight and param.dtype != self.dtype

    def copy_of(self, master: nn.Parameter) -> torch.Tensor:
        """Return the copy, with the values that the master has now.

        Each forward copies the values again, except in the middle of a step. There the gradient is
        as the last backward left it, and the parameter has the same version. The version alone does
        not tell: fused AdamW does not count it up.
        """
        if master not in self.copies:
            self.copies[master] = self.first_copy(master)
        elif self.version_of_copy[master] != master._version:
            self.copies[master].copy_(master)
        elif self.is_new_step(master):
            # most often the same values: writing to .data does not count as a change
            self.copies[master].data.copy_(master)
        self.version_of_copy[master] = master._version
        # the master may have been frozen since
        return self.copies[master].requires_grad_(master.requires_grad)

    def first_copy(self, master: nn.Parameter) -> torch.Tensor:
        copy = master.to(self.dtype).requires_grad_()
        copy.register_post_accumulate_grad_hook(partial(self.add_gradient, master))
        return copy

    def is_new_step(self, master: nn.Parameter) -> bool:
        if master.grad is None:
            return True
        return master.grad._version != self.version_of_gradient.get(master)

    def add_gradient(self, master: nn.Parameter, copy: torch.Tensor) -> None:
        gradient = copy.grad.to(master.dtype)
        copy.grad = None
        if master.grad is None:
            master.grad = gradient
        else:
            master.grad.add_(gradient)
        self.version_of_gradient[master] = master.grad._version
