"""Overlap the collectives of tensor parallelism with GEMMs
(`parallelism.async_tensor_parallel`)."""

import operator
import warnings
from collections.abc import Callable

import torch
from torch import fx
from torch.distributed.device_mesh import DeviceMesh

from configs.schema import InputError

aten = torch.ops.aten
SYMMETRIC_MEMORY = ("cuda",)  # devices whose ranks can read each other's memory
GATHER = torch.ops._c10d_functional.all_gather_into_tensor.default
SCATTER = torch.ops._c10d_functional.reduce_scatter_tensor.default
WAIT = torch.ops._c10d_functional.wait_tensor.default
# operators between a sum and its reduce-scatter, where the split sequence is not the first
# dimension
REARRANGE = (aten.cat.default, operator.getitem, aten.split.Tensor, aten.slice.Tensor)
RESHAPE = (aten.reshape.default, aten.view.default)


def check_overlap(device_type: str) -> None:
    """Raise InputError if the ranks of a host cannot read each other's memory."""
    if device_type not in SYMMETRIC_MEMORY:
        raise InputError(
            "parallelism.async_tensor_parallel = true needs GPUs that are connected by NVLink, "
            "this is a "
            f"{device_type}: set it to false"
        )


def overlap(tp_mesh: DeviceMesh) -> None:
    """Let inductor overlap the collectives of tensor parallelism with GEMMs (Wang et al., ASPLOS
    2023, doi:10.1145/3567955.3567959). In blocks that are compiled after this call, an all-gather
    before GEMMs, and a GEMM before a reduce-scatter, become one operator each: it sends pieces over
    NVLink while it multiplies others. Raises InputError if ranks cannot read each other's
    memory."""
    check_overlap(tp_mesh.device_type)
    from torch._inductor import config  # imported here because it takes two seconds
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    class GraphPass(CustomGraphPass):
        def __init__(self, change: Callable[[fx.Graph], None]) -> None:
            self.change = change

        def __call__(self, graph: fx.Graph) -> None:
            self.change(graph)

        def uuid(self) -> bytes:
            return get_hash_for_files((__file__,))

    config._micro_pipeline_tp = True
    config.post_grad_custom_pre_pass = GraphPass(multiply_once)
    config.post_grad_custom_post_pass = GraphPass(gather_early)
    config.reorder_for_peak_memory = False  # it would move all-gathers to the end
    # torch 2.13 warns that this call is superfluous, but without it fuses nothing, in silence
    # (pytorch #193027).
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        enable_symm_mem_for_group(tp_mesh.get_group().group_name)


def multiply_once(graph: fx.Graph) -> None:
    """Rewrite a reduce-scatter of a sum of GEMMs, A1 B1 + A2 B2, to one of [A1 A2] [B1; B2].

    Such a sum is the input's gradient of linear layers that share their input. Inductor fuses a
    reduce-scatter with one GEMM alone. The copy of the weights is the price; inductor writes the
    gradients of activations directly into the concatenated matrix.
    """
    for scatter in graph.find_nodes(op="call_function", target=SCATTER):
        add_in_gemm(scatter)
    graph.eliminate_dead_code()


def add_in_gemm(scatter: fx.Node) -> None:
    total = scatter.args[0]
    while total.target in REARRANGE:
        total = total.args[0]
        total = total[0] if isinstance(total, (list, tuple)) else total
    terms = terms_of(total)
    if len(terms) < 2 or not all(terms):
        return
    graph = scatter.graph

    def insert(target, *args) -> fx.Node:
        node = graph.call_function(target, args)
        node.meta["val"] = target(*fx.map_arg(args, lambda given: given.meta["val"]))
        return node

    *leading, features = total.meta["val"].shape
    with graph.inserting_before(total):
        gradients = insert(aten.cat.default, [gradient for gradient, _ in terms], -1)
        weights = insert(aten.cat.default, [weight for _, weight in terms])
        rows = insert(aten.reshape.default, gradients, [-1, weights.meta["val"].shape[0]])
        product = insert(aten.mm.default, rows, weights)
        result = insert(aten.reshape.default, product, [*leading, features])
    total.replace_all_uses_with(result)


def terms_of(node: fx.Node) -> list[tuple[fx.Node, fx.Node] | None]:
    """Return the factors (gradient [..., O], weight [O, D]) of every GEMM in a sum; None for a term
    that is something else, or that is used elsewhere too."""
    parts = node.args if node.target is aten.add.Tensor and not node.kwargs else ()
    if parts and all(isinstance(part, fx.Node) and len(part.users) == 1 for part in parts):
        return [term for part in parts for term in terms_of(part)]
    return [factors_of(node)]


def factors_of(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Return the factors of reshape(mm(reshape(gradient), weight)), the form of a linear layer's
    backward, or None."""
    product = node.args[0] if node.target in RESHAPE else node
    if product.target is not aten.mm.default or len(product.users) > 1:
        return None
    rows, weight = product.args
    gradient = rows.args[0] if rows.target in RESHAPE else rows
    same = gradient.meta["val"].shape[:-1] == node.meta["val"].shape[:-1]
    return (gradient, weight) if same else None


def gather_early(graph: fx.Graph) -> None:
    """Start all-gathers that no GEMM is fused with right after the fused all-gather before them,
    and wait at their first use. They are for gradients of weights
    (`activation_checkpoint.gather_again`), and overlap with backward, which meanwhile computes the
    gradient of a weight, and attention."""
    fused = None
    for node in list(graph.nodes):
        if node.target is torch.ops.symm_mem.fused_all_gather_matmul.default:
            fused = node
        if node.target is GATHER and fused is not None:
            order = {each: number for number, each in enumerate(graph.nodes)}
            late = [needed for needed in inputs_of(node) if order[needed] > order[fused]]
            for needed in sorted(late, key=order.__getitem__, reverse=True):
                fused.append(needed)
            for wait in node.users:
                if wait.target is WAIT and wait.users:
                    min(wait.users, key=order.__getitem__).prepend(wait)


def inputs_of(node: fx.Node) -> set[fx.Node]:
    """Return a node and all nodes that it is computed from."""
    found, left = {node}, [node]
    while left:
        given = set(left.pop().all_input_nodes) - found
        found |= given
        left.extend(given)
    return found
