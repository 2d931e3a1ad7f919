"""Choose what computes gated delta nets (`training.delta_rule`): plain PyTorch, or the kernels of
flash-linear-attention on a GPU.

Where ranks share a sequence (parallelisms/cp_state.py) the map of a rank's tokens and what they read
come from one pass of the reference, so the kernels are not used there.
"""

import torch
from torch import Tensor, nn

from configs.schema import Config, InputError
from models.delta_net import GatedDeltaCore
from parallelisms import flash_delta_rule
from parallelisms.cores import places, put
from parallelisms.mesh import Mesh


class FlashDeltaCore(GatedDeltaCore):
    """The core whose `run` is flash-linear-attention's, in the types that it has."""

    def run(
        self, *inputs: Tensor, first: Tensor | None = None, state: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        if not flash_delta_rule.fits(*inputs[1:3]):
            return super().run(*inputs, first=first, state=state)
        return flash_delta_rule.chunked(*inputs, first=first, state=state)


def is_flash(chosen: str, device: torch.device) -> bool:
    """Return whether the kernels are used. Raises InputError where they are asked for and cannot be:
    no GPU, or no package."""
    is_there = device.type == "cuda" and flash_delta_rule.is_installed()
    if chosen == "flash" and not is_there:
        what = "the package fla" if device.type == "cuda" else f"a GPU, this is a {device.type}"
        raise InputError(
            f'training.delta_rule = "flash" needs {what}: pip install flash-linear-attention on a '
            'machine with a GPU, or set it to "auto"'
        )
    return is_there and chosen != "reference"


def chosen(name: str, device: torch.device) -> GatedDeltaCore:
    """Return the core that `training.delta_rule` names. Raises InputError as `is_flash`."""
    return FlashDeltaCore() if is_flash(name, device) else GatedDeltaCore()


def apply(model: nn.Module, mesh: Mesh, cfg: Config) -> nn.Module:
    """Replace the cores of gated delta nets, in place, where the kernels are chosen."""
    if not is_flash(cfg.training.delta_rule, mesh.device):
        return model
    cores = [core for core in model.cores() if type(core) is GatedDeltaCore]
    put(places(model, cores), [FlashDeltaCore() for _ in cores])
    return model
