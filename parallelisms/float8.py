"""Float8 GEMMs in the blocks' linear layers (models/kernels/float8_product.py).

Each parameter keeps its name, type and shape, so master weights, FSDP and checkpoints need no
change. The GEMMs run at twice the rate of bfloat16, on GPUs that have the units. Embedding, norms,
attention, routers, routed experts and the output projection stay as they are. Rounding is
element-wise work, so float8 only pays if `compile.enabled` fuses it."""

import torch
from torch import Tensor, nn

from configs.schema import InputError
from models.kernels.float8_product import RECIPES, Recipe, float8_linear
from parallelisms.mesh import Mesh

# the first GPUs whose torch._scaled_mm supports it: Ada, Hopper
CAPABILITY = {"tensorwise": (8, 9), "rowwise": (9, 0)}
MULTIPLE = 16  # torch._scaled_mm only takes matrices whose sides are multiples of this


def check(recipe: str, device: torch.device, emulate: bool) -> None:
    """Raise InputError if `device` cannot multiply in float8 and the GEMMs are not emulated.
    recipe: a key of CAPABILITY."""
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


class Float8Linear(nn.Linear):
    """A linear layer that computes another layer's product in float8, with its parameters."""

    def __init__(self, linear: nn.Linear, recipe: Recipe):
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.weight = linear.weight
        self.bias = linear.bias
        self.recipe = recipe

    def forward(self, input: Tensor) -> Tensor:
        """Multiply in float8: input [..., in_features] -> [..., out_features]."""
        return float8_linear(input, self.weight, self.bias, self.recipe)


def apply(model: nn.Module, mesh: Mesh, recipe: str, emulate: bool) -> nn.Module:
    """Replace the linear layers of `model.layers`, in place; recipe: a key of CAPABILITY, or
    "none".

    tensorwise has one scale for a whole matrix, rowwise one per row, which is slower and closer to
    bfloat16. emulate: round to 8 bits but multiply in a wider type, to see on any device what the
    rounding does. Raises InputError if float8 cannot run.
    """
    if recipe == "none":
        return model
    check(recipe, mesh.device, emulate)
    linears = {
        name: layer for name, layer in model.layers.named_modules() if isinstance(layer, nn.Linear)
    }
    for name, layer in linears.items():
        if type(layer).forward is not nn.Linear.forward:
            raise InputError(
                f'training.float8 = "{recipe}" puts another module in the place of layers.{name}, a '
                f"{type(layer).__qualname__}, whose own forward would be dropped: do what it does "
                'in the module around it, or set float8 to "none"'
            )
    odd = [
        name
        for name, layer in linears.items()
        if layer.in_features % MULTIPLE or layer.out_features % MULTIPLE
    ]
    if odd:
        raise InputError(
            f'training.float8 = "{recipe}" needs layers whose sides are multiples of {MULTIPLE}; '
            f"layers.{odd[0]} is not ({len(odd)} in all): change the model's sizes"
        )
    how = RECIPES[recipe]._replace(emulate=emulate)
    for name, layer in linears.items():
        model.layers.set_submodule(name, Float8Linear(layer, how))
    return model
