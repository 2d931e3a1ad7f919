"""Declare to `spmd_types` what each operator of this code, and of FSDP2 and DTensor, does to types.

A fork's `torch.autograd.Function` needs a row of FUNCTIONS; plain PyTorch needs none. Types: R, I, V
and P as in tools/prove/types.py.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import spmd_types as spmd
from spmd_types import I, P, R, SpmdTypeError, V, _dtensor_checker
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_param_group import (
    FSDPParamGroup,
    RegisterPostBackwardFunction,
)
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.tensor import _api

from models.kernels import float8_product, grouped_product
from models.kernels.cpu import causal_attention
from models.local import ScaledGradient
from models.terms import InjectGradient
from parallelisms import cp
from parallelisms.cp_state import GatherParts
from parallelisms.ep_dispatch import StartAllToAll, WaitAllToAll
from parallelisms.mesh import Mesh
from parallelisms.tp_plain import SumOverRanks
from training.loss import _LinearCrossEntropy

# Every result is computed from this rank's arguments alone.
LOCAL: tuple[type, ...] = (
    RegisterPostBackwardFunction,
    ScaledGradient,
    causal_attention._Attention,
    float8_product._Float8Linear,
    grouped_product._AddBias,
    grouped_product._Joined,
    grouped_product._OfWeight,
)
# FSDP gathers and frees weights here. `Types.of_weight` says what they are afterwards.
UNTYPED = (
    FSDPParamGroup.lazy_init,
    FSDPParamGroup.unshard,
    FSDPParamGroup.wait_for_unshard,
    FSDPParamGroup.reshard,
    FSDPState._register_pre_backward_hook,
)


class Types:
    """Types of what a rank's forward pass begins with, on the dimensions of a mesh that have more
    than one rank: name of a dimension -> type."""

    def __init__(self, mesh: Mesh):
        whole = mesh.device_mesh
        self.groups = {}
        for name in whole.mesh_dim_names or ():
            if name != "pp" and whole[name].size() > 1:
                self.groups[name] = whole.get_group(name)

    def of(self, tp: Any, cp: Any, data: Any) -> dict:
        """Return the type of a tensor, given its kind on each dimension of the mesh."""
        chosen = {"tp": tp, "cp": cp}
        return {group: chosen.get(name, data) for name, group in self.groups.items()}

    @property
    def of_tokens(self) -> dict:
        return self.of(R, V, V)

    @property
    def of_positions(self) -> dict:
        """Those of a rank's own tokens in their sequences."""
        return self.of(R, V, R)

    @property
    def of_loss(self) -> dict:
        """Whole on each rank of tensor parallelism, a term of the sum over all others."""
        return self.of(I, P, P)

    @property
    def of_number(self) -> dict:
        """A number or a table that is the same on every rank."""
        return self.of(R, R, R)

    def of_weight(self, own: dict, is_expert: bool) -> dict:
        """Return the type of a weight that FSDP has gathered. own: of its DTensor's dimensions. Every
        rank of data parallelism has it whole, and FSDP sums its gradients over them. Experts are
        another part on each rank of their group, which spans other dimensions."""
        if is_expert:
            return self.of(V, V, V)
        return self.of(R, R, R) | own


def sum_over_ranks(*, x: Tensor, group: Any) -> Any:
    return spmd.rules.all_reduce(x, group, src=V, dst=R)


def gather_parts(*, x: Tensor, group: Any) -> Any:
    return spmd.rules.all_gather(x, group, src=V, dst=R)


def inject_gradient(*, h: Tensor, value: Tensor, scale: Tensor) -> Any:
    for axis, kind in spmd.get_local_type(value).items():
        if kind is R:
            raise SpmdTypeError(
                f"a term of the loss is the same on all ranks of {axis}, and its gradient is summed over "
                "them: it counts as often as there are ranks"
            )
    spmd.rules.ignore(value, scale)
    return h


def start_all_to_all(outputs: tuple, *, rows: Tensor) -> None:
    spmd.rules.ignore(rows)
    for output in outputs:
        spmd.assert_type_like(output, rows)


def wait_all_to_all(*, link: Tensor, arriving: Tensor) -> Any:
    spmd.rules.ignore(link)
    return arriving


def linear_cross_entropy(types: Types) -> Callable:
    """Return the rule of the loss, which sums over the vocabulary by itself."""

    def rule(
        outputs: Tensor, *, h: Tensor, weight: Tensor, labels: Tensor, each: Tensor | None
    ) -> None:
        spmd.assert_type(h, types.of(R, V, V))
        spmd.assert_type(weight, types.of(V, R, R))
        spmd.assert_type(labels, types.of_tokens)
        if each is not None:
            spmd.rules.ignore(each)
        spmd.assert_type(outputs, types.of_loss)

    return rule


FUNCTIONS: dict[type, Callable] = {
    SumOverRanks: sum_over_ranks,
    GatherParts: gather_parts,
    InjectGradient: inject_gradient,
    StartAllToAll: start_all_to_all,
    WaitAllToAll: wait_all_to_all,
}


def to_local(types: Types) -> Callable:
    """Return the rule of `DTensor.to_local`: a DTensor says what it is on its own mesh alone."""

    def rule(tensor: Any, gradients: Any = None) -> Tensor:
        result = _api._ToTorchTensor.apply(tensor, gradients)
        mesh = tensor.device_mesh
        if gradients is None:
            gradients = _dtensor_checker._normalize_placements_for_grad(tensor.placements)
        is_expert = "ep" in (mesh.mesh_dim_names or ())
        own = {}
        if not is_expert:
            own = _dtensor_checker._placements_to_local_type(mesh, tensor.placements, gradients)
        if isinstance(tensor, nn.Parameter):
            whole = types.of_weight(own, is_expert)
        else:
            whole = types.of_tokens | own
        spmd.assert_type(result, by_group(whole))
        return result

    return rule


def from_local(tensor: Tensor, mesh: Any, placements: Any, *rest: Any) -> Any:
    """Compare a DTensor's placements with its tensor's type. A part may become a term of a sum."""
    gradients = rest[3] if len(rest) > 3 else None
    if gradients is None:
        gradients = _dtensor_checker._normalize_placements_for_grad(placements)
    declared = _dtensor_checker._placements_to_local_type(mesh, placements, gradients)
    known = spmd.get_local_type(tensor)
    for axis, kind in declared.items():
        if not (kind is P and known.get(axis) is V):
            spmd.assert_type(tensor, {axis: kind})
    return _api._FromTorchTensor.apply(tensor, mesh, placements, *rest)


def by_group(types: dict) -> dict:
    """Return types with one key for each dimension, given as a group or by spmd_types' name."""
    return {spmd.normalize_axis(group): kind for group, kind in types.items()}


@contextmanager
def declared(types: Types) -> Iterator[None]:
    """Let `spmd_types` know the operators."""
    for cls in LOCAL:
        spmd.register_local_autograd_function(cls)
    for function in UNTYPED:
        spmd.register_no_typecheck(function)
    functions = FUNCTIONS | {_LinearCrossEntropy: linear_cross_entropy(types)}
    gathered = cp.gathered_attention

    def gathered_attention(*arguments: Any) -> Any:
        for table in arguments[3:]:  # of this rank's own pieces
            if isinstance(table, Tensor) and not spmd.has_local_type(table):
                spmd.assert_type(table, types.of_tokens)
        return gathered(*arguments)

    boundaries: dict[type, Callable] = {
        _api._ToTorchTensor: to_local(types),
        _api._FromTorchTensor: from_local,
    }
    with ExitStack() as stack:
        for cls, rule in functions.items():
            method = staticmethod(rule)
            stack.enter_context(mock.patch.object(cls, "spmd_typecheck", method, create=True))
        for cls, rule in boundaries.items():
            stack.enter_context(mock.patch.object(cls, "typecheck_forward", staticmethod(rule)))
        stack.enter_context(mock.patch.object(cp, "gathered_attention", gathered_attention))
        yield
