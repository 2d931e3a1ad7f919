"""Float8 GEMMs in the blocks' linear layers (Micikevicius et al., arXiv:2209.05433), by torchao,
which only this file needs.

Each parameter keeps its name, type and shape, so masters, FSDP and checkpoints do not notice. A
layer rounds its input, its weight and the gradient to 8 bits on the way into each of its three
GEMMs. These then run at twice the rate of bfloat16, on GPUs that have the units. Embedding,
norms, attention and the output projection stay as they are. The scaling is element-wise work, so
float8 only pays if `compile.enabled` fuses it.
"""

import dataclasses

import torch
from torch import nn

from configs.schema import InputError
from parallelisms.mesh import Mesh

# the first GPUs whose torch._scaled_mm supports it: Ada, Hopper
CAPABILITY = {"tensorwise": (8, 9), "rowwise": (9, 0)}
MULTIPLE = 16  # torch._scaled_mm only takes matrices whose sides are multiples of this


def check(recipe: str, device: torch.device, emulate: bool) -> None:
    """Raises InputError if torchao is missing, or if `device` cannot multiply so and the GEMMs
    are not emulated. recipe: a key of CAPABILITY."""
    try:
        import torchao.float8  # noqa: F401
    except ImportError as error:
        raise InputError(
            f'training.float8 = "{recipe}" needs torchao (pip install torchao), or set it to '
            f'"none": {error}'
        ) from None
    if emulate:
        return
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    if capability < CAPABILITY[recipe]:
        raise InputError(
            f'training.float8 = "{recipe}" needs a GPU of compute capability '
            f"{'{}.{}'.format(*CAPABILITY[recipe])}, this is "
            f'{"{}.{}".format(*capability) if any(capability) else "a CPU"}: set it to "none", or '
            "debug.emulate_float8 = true to see its rounding"
        )


def apply(model: nn.Module, mesh: Mesh, recipe: str, emulate: bool) -> nn.Module:
    """Replace the linear layers of `model.layers`, in place; recipe: a key of CAPABILITY, or
    "none".

    tensorwise has one scale for a whole matrix, rowwise one per row, which is slower and closer to
    bfloat16. emulate: round to 8 bits but multiply in the wider type, to see on any device what the
    rounding does. Raises InputError if float8 cannot run.
    """
    if recipe == "none":
        return model
    check(recipe, mesh.device, emulate)
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    odd = [
        name
        for name, layer in model.layers.named_modules()
        if isinstance(layer, nn.Linear)
        and (layer.in_features % MULTIPLE or layer.out_features % MULTIPLE)
    ]
    if odd:
        raise InputError(
            f'training.float8 = "{recipe}" needs layers whose sides are multiples of {MULTIPLE}; '
            f"layers.{odd[0]} is not ({len(odd)} in all): change the model's sizes"
        )
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), emulate=emulate)
    convert_to_float8_training(model.layers, config=config)
    return model
