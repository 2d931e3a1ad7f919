"""AdamW in one pass (training/one_pass.py): what fused AdamW computes after clipping, on a CPU."""

import math

import pytest
import torch
from torch import nn

from checkpoint import state
from configs.schema import Compile, InputError
from training import one_pass
from training.one_pass import OnePassAdamW, check, scaling
from training.optim import clip_grad_norm, step_if

OPTIONS = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8}


def a_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(33, 65), nn.Linear(65, 1))


def optimizers(
    model: nn.Module, other: nn.Module, backend: str
) -> tuple[torch.optim.Optimizer, OnePassAdamW]:
    """Fused AdamW of the first, and one pass of the second, with the same groups."""
    both = []
    for one in model, other:
        weights = [(name, p) for name, p in one.named_parameters() if p.ndim == 2]
        biases = [(name, p) for name, p in one.named_parameters() if p.ndim == 1]
        groups = [{"params": weights, "weight_decay": 0.1}]
        both.append([*groups, {"params": biases, "weight_decay": 0.0}])
    fused = torch.optim.AdamW(both[0], **OPTIONS, fused=True)
    return fused, OnePassAdamW(both[1], **OPTIONS, backend=backend)


def steps(optimizer: torch.optim.Optimizer, model: nn.Module, count: int, fine: bool = True):
    """With gradients that the clip shrinks, but in the second step, and rates that change."""
    norms = []
    for number in range(count):
        torch.manual_seed(number)
        for group in optimizer.param_groups:
            group["lr"] = 0.01 / (1 + number)
        for param in model.parameters():
            param.grad = torch.randn(param.shape) * (1e-4 if number == 1 else 1.0)
        norm = clip_grad_norm(model.parameters(), 1.0, lambda x: x, scaling(optimizer))
        norms.append(norm.item())
        step_if(torch.tensor(fine), optimizer)
    return norms


def far(model: nn.Module, other: nn.Module, fused, one) -> float:
    """Return the largest difference of weights and averages, relative to the largest of a
    tensor."""
    largest = 0.0
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        pairs = [(a, b), *((fused.state[a][key], one.state[b][key]) for key in fused.state[a])]
        for x, y in pairs:
            largest = max(largest, ((x - y).abs().max() / x.abs().max()).item())
    return largest


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_one_pass_is_fused_adamw_after_clipping(backend, monkeypatch):
    model, other = a_model(), a_model()
    fused, one = optimizers(model, other, backend)
    assert steps(fused, model, 4) == steps(one, other, 4)
    assert far(model, other, fused, one) < 1e-6
    assert state.tensors(model, fused).keys() == state.tensors(other, one).keys()
    # the control: a pass without the factor
    real = one_pass.update_weight

    def unscaled(numbers, *rows):
        real(numbers | {"factor": torch.ones(())}, *rows)

    monkeypatch.setattr(one_pass, "update_weight", unscaled)
    model, other = a_model(), a_model()
    fused, one = optimizers(model, other, "eager")
    steps(fused, model, 4)
    steps(one, other, 4)
    assert far(model, other, fused, one) > 1e-3


@pytest.mark.slow
def test_a_step_that_does_not_count_changes_nothing():
    model, other = a_model(), a_model()
    _, one = optimizers(model, other, "eager")
    steps(one, other, 2)

    def everything() -> list[torch.Tensor]:
        kept = [t for param in other.parameters() for t in one.state[param].values()]
        return [t.detach().clone() for t in (*other.parameters(), *kept)]

    before = everything()
    other[0].weight.grad[0, 0] = math.nan
    clip_grad_norm(other.parameters(), 1.0, lambda x: x, scaling(one))
    step_if(torch.tensor(False), one)
    assert all(map(torch.equal, before, everything()))


def test_it_is_refused_without_a_gpu_and_checkpoints_call_it_adamw():
    assert type(optimizers(a_model(), a_model(), "eager")[1]).__name__ == "AdamW"
    cpu = torch.device("cpu")
    assert not check(Compile(enabled=True), cpu)
    assert check(Compile(optimizer=True), torch.device("cuda", 0))
    with pytest.raises(InputError, match="compile.optimizer = true is for a GPU"):
        check(Compile(optimizer=True), cpu)
