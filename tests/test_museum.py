"""The bug museum: silent mistakes that others shipped, put into our code one by one. The parity
check must see each of them.

None of these raises an error. The run trains, worse or differently, and mostly the loss curve does
not show it. A row of ROWS puts one of them in, trains on two ranks, and compares with the plain
model as tests/test_parallel.py does (`tests/parity.py`). The same numbers are then compared with
the tolerances that other projects use (LOOSE), to count what those let through.

Mistakes in layers with a state are in the tests of these layers: tests/test_recurrent.py and test_delta_net.py.
`docs/museum.md` lists them, and has the counts; `lab/bench/results/museum.txt` has the table.
`python -m tests.test_museum` prints it.
"""

import re
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard import _fsdp_collectives
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import ParallelStyle

import train
from checkpoint import state
from data import further, loader
from models import latent_attention, local, moe
from models.kernels.cpu import document_attention as kernels
from models.llama import Llama
from models.terms import AuxiliaryTerms, Term
from parallelisms import cp, dp, ep, pp, tp
from parallelisms.mesh import Mesh
from tests.checkpoints import open_manager
from tests.parity import (
    DEEPSEEK,
    DOCUMENTS,
    EQUAL,
    EXACT,
    EXPERTS,
    FACTORS,
    FEW_LABELS,
    ONE_EXPERT,
    clear_trajectories,
    combination_of,
    compare,
    numbers_of,
    options_of,
    seed_of,
    trajectory,
    whole_model,
)
from tests.programs import ROOT
from tests.ranks import run_ranks
from tests.runs import EXPERT_MESHES, ULYSSES
from tests.runs import MESHES as DENSE_MESHES
from training import init, loss, microbatches, optim
from training.optimizers import materialise

Patch = pytest.MonkeyPatch
# the first test waits for all runs
pytestmark = [pytest.mark.slow, pytest.mark.cap(240)]

MESHES = DENSE_MESHES | EXPERT_MESHES

# The mistakes. The docstring of each is its line in lab/bench/results/museum.txt.


def own_token_counts(patch: Patch) -> None:
    """each rank divides its loss by its own number of tokens, and the unequal means are averaged"""
    patch.setattr(Mesh, "sum_over_tokens", lambda mesh, count: count * mesh.fsdp_mesh.size())


def scale_times(patch: Patch, factor: Callable) -> None:
    """The loss of every microbatch times factor(job, microbatches) in backward, and not in the log."""
    real = train.accumulate_gradients
    patch.setattr(
        train,
        "accumulate_gradients",
        lambda job, microbatches, scale: real(job, microbatches, scale * factor(job, microbatches)),
    )


def averaged_twice(patch: Patch) -> None:
    """the gradient is averaged over the ranks twice, by the loss and by data parallelism"""
    scale_times(patch, lambda job, microbatches: 1 / job.mesh.dp_size)


def accumulation_summed(patch: Patch) -> None:
    """the means of the microbatches are summed instead of averaged"""
    scale_times(patch, lambda job, microbatches: len(microbatches))


def mean_of_means(patch: Patch) -> None:
    """every microbatch counts the same, however many of its tokens count"""
    real = microbatches.Microbatches.__init__

    def with_means(
        self,
        model: nn.Module,
        batch: dict[str, Tensor],
        device: torch.device,
        loss: Callable,
        chunk_tokens: int,
    ):
        counts = (batch["labels"] != -100).sum((1, 2))
        mean = counts.float().mean()

        def mean_of_one(
            h: Tensor, weight: Tensor, labels: Tensor, *rest: int, **each: Tensor
        ) -> Tensor:
            return loss(h, weight, labels, *rest, **each) * (mean / (labels != -100).sum())

        real(self, model, batch, device, mean_of_one, chunk_tokens)

    patch.setattr(microbatches.Microbatches, "__init__", with_means)


def buffer_added_to_itself(patch: Patch) -> None:
    """the gradient buffer of a group of one rank is added to itself at every microbatch"""
    real = dp.synchronise_gradients

    def doubled(model: nn.Module, last: bool, accumulate: str) -> None:
        for p in model.parameters():
            if p.grad is not None:
                p.grad.mul_(2)
        real(model, last, accumulate)

    patch.setattr(dp, "synchronise_gradients", doubled)


def never_reduced(patch: Patch) -> None:
    """no microbatch counts as the last one, so gradients are never reduced over the ranks"""
    real = dp.synchronise_gradients
    patch.setattr(
        dp, "synchronise_gradients", lambda model, last, accumulate: real(model, False, accumulate)
    )


def replicas_not_reduced(patch: Patch) -> None:
    """with replicas, gradients are summed inside a shard group and never between replicas"""
    patch.setattr(
        _fsdp_collectives,
        "dist",
        SimpleNamespace(**vars(dist) | {"all_reduce": lambda *_, **__: None}),
    )


def local_norm(patch: Patch) -> None:
    """every rank clips by the norm of its own shards"""
    patch.setattr(optim, "split_over", lambda gradient: ())


def replicated_counted_per_rank(patch: Patch) -> None:
    """weights that all tensor-parallel ranks hold count once per rank in the norm"""
    patch.setattr(
        optim,
        "split_over",
        lambda gradient: tuple(d for d, n in enumerate(gradient.device_mesh.shape) if n > 1),
    )


def norm_of_one_dimension(patch: Patch) -> None:
    """the norm is not summed over one dimension of the mesh, which no test shows that does not clip"""
    real = optim.split_over

    def without_tp(gradient: DTensor) -> tuple[int, ...]:
        return tuple(d for d in real(gradient) if gradient.device_mesh.mesh_dim_names[d] != "tp")

    patch.setattr(optim, "split_over", without_tp)


def all_zeros(patch: Patch) -> None:
    """the weights are never initialised: they are zeros, and stay zeros"""
    patch.setattr(
        init, "initialise", lambda model, *_: [p.detach().zero_() for p in model.parameters()]
    )


def seed_of_the_rank(patch: Patch) -> None:
    """initial values depend on the rank that computes them"""
    real = init.initialise
    patch.setattr(
        init, "initialise", lambda model, rows, seed: real(model, rows, seed + dist.get_rank())
    )


def numbered_from_the_stage(name: str, model: nn.Module) -> str:
    first = min(map(int, model.layers))
    return re.sub(r"layers\.(\d+)", lambda match: f"layers.{int(match[1]) - first}", name)


def stages_alike(patch: Patch) -> None:
    """all stages of a pipeline get the same initial values"""
    real = init.initialise

    def initialise(model: nn.Module, rows: list, seed: int) -> None:
        names = [(numbered_from_the_stage(name, model), p) for name, p in model.named_parameters()]
        real(SimpleNamespace(named_parameters=lambda: names, named_buffers=list), rows, seed)

    patch.setattr(init, "initialise", initialise)


class LocalNorm(ParallelStyle):
    """A norm on a split input, each rank of which keeps the gradient of its gain from its own part."""

    def __init__(self, output_is_split: bool):
        super().__init__()
        self.output_is_split = output_is_split

    def _apply(self, module: nn.Module, device_mesh: object) -> nn.Module:
        distribute_module(module, device_mesh)

        def forward(x: Tensor) -> Tensor:
            x = x.to_local() if isinstance(x, DTensor) else x
            y = F.rms_norm(x, module.normalized_shape, module.weight.to_local(), module.eps)
            return (
                DTensor.from_local(y, device_mesh, [Shard(1)], run_check=False)
                if self.output_is_split
                else y
            )

        module.forward = forward
        return module


def put_style(patch: Patch, name: str, build: Callable) -> None:
    patch.setitem(tp.STYLES, name, replace(tp.STYLES[name], build=build))


def norms_not_summed(patch: Patch) -> None:
    """with sequence parallelism, the gradients of norms stay one rank's share"""
    put_style(patch, "sequence", partial(LocalNorm, output_is_split=True))


def gain_of_own_heads(patch: Patch) -> None:
    """QK-norm: the gain is the same on all ranks, and each keeps the gradient from its own heads"""
    put_style(patch, "heads", partial(LocalNorm, output_is_split=False))


def partial_called_whole(patch: Patch) -> None:
    """the loss over a split vocabulary returns a partial sum of its input's gradient that is
    labelled as whole"""
    patch.setattr(loss, "Partial", Replicate)


def positions_of_the_slice(patch: Patch) -> None:
    """rotary positions are counted from the start of a rank's slice of the sequence"""
    real = Llama.rope
    patch.setattr(
        Llama, "rope", lambda model, positions: real(model, positions % (len(positions) // 2))
    )


def zero_labels_of_a_rank(patch: Patch) -> None:
    """a rank none of whose tokens counts divides by their number"""
    own_token_counts(patch)


def own_log_sum_exp(patch: Patch) -> None:
    """backward takes the log-sum-exp of the last keys for that of all keys, so dQ, dK and dV are
    wrong"""
    real = kernels._attend_backward

    def backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, ...]:
        last = slice(k.shape[2] - q.shape[2], None)
        return real(grad, q, k, v, out, kernels._attend(q, k[:, :, last], v[:, :, last])[1])

    patch.setattr(kernels, "_attend_backward", backward)


def joined_along_the_wrong_axis(patch: Patch) -> None:
    """what the ranks sent is joined along the sequences of the microbatch instead of along their
    tokens"""
    real = cp.funcol.all_to_all_single_autograd

    def exchange(*args: object) -> Tensor:
        received = real(*args)  # [ranks, b, ...]
        return received.reshape(
            received.shape[1], received.shape[0], *received.shape[2:]
        ).transpose(0, 1)

    patch.setattr(
        cp, "funcol", SimpleNamespace(**vars(cp.funcol) | {"all_to_all_single_autograd": exchange})
    )


def positions_in_a_row(patch: Patch) -> None:
    """each rank has a part from the front and one from the back, and takes the positions of parts
    in a row for them"""
    real = microbatches.Microbatches.__init__

    def in_a_row(
        self: microbatches.Microbatches,
        model: nn.Module,
        batch: dict[str, Tensor],
        mesh: Mesh,
        *rest: object,
    ) -> None:
        real(self, model, batch, mesh, *rest)
        self.positions = torch.arange(len(self.positions)) + mesh.cp_rank * len(self.positions)

    patch.setattr(microbatches.Microbatches, "__init__", in_a_row)


def labels_after_the_cut(patch: Patch) -> None:
    """labels are made of a rank's own part of a sequence, so the last token of every part has none"""
    real = loader.as_batch

    def as_batch(
        window: np.ndarray, begins: np.ndarray | None, more: dict, local: int, places: list[range]
    ) -> dict[str, Tensor]:
        batch = real(window, begins, more, local, places)
        batch["labels"][..., np.cumsum([len(part) for part in places]) - 1] = -100
        return batch

    patch.setattr(loader, "as_batch", as_batch)


def keys_of_the_first_sequence(patch: Patch) -> None:
    """every sequence of a microbatch gets the keys of the first one: right where there is only one"""
    real = cp._gathered_index
    patch.setattr(cp, "_gathered_index", lambda row, *rest: real(torch.zeros_like(row), *rest))


def divided_at_every_accumulation_step(patch: Patch) -> None:
    """the gradients so far are divided by the number of microbatches at every accumulation step"""
    # two accumulation steps of three microbatches
    gradients, backward, each = pp.PipelineStages.gradients, pp.PipelineStep.backward, 3
    # as the optimizer has them; in the middle of a step those of a stage are gathered ones
    weights: list[nn.Parameter] = []

    def gradients_times(
        model: pp.PipelineStages, microbatches: microbatches.Microbatches, scale: Tensor
    ) -> Tensor:
        weights[:] = model.parameters()
        return gradients(model, microbatches, scale * each)

    def backward_and_divide(step: pp.PipelineStep, action: pp.Action, stage: nn.Module) -> None:
        backward(step, action, stage)
        if action.microbatch % each == each - 1:
            for p in weights:
                p.grad.div_(each)

    patch.setattr(pp.PipelineStages, "gradients", gradients_times)
    patch.setattr(pp.PipelineStep, "backward", backward_and_divide)


def normalised_for_the_log_only(patch: Patch) -> None:
    """the loss is divided by the number of tokens after backward, for the log only"""
    real = pp.PipelineStages.gradients
    patch.setattr(
        pp.PipelineStages,
        "gradients",
        lambda model, microbatches, scale: real(model, microbatches, torch.ones_like(scale)),
    )


def documents_of_the_first_microbatch(patch: Patch) -> None:
    """every microbatch gets the documents of the first one as its mask"""
    real = microbatches.Microbatches.__call__

    def first_documents(self: microbatches.Microbatches, a: int) -> tuple:
        documents = self.model.documents(self.within_documents[0], self.device)
        return real(self, a)._replace(documents=documents)

    patch.setattr(microbatches.Microbatches, "__call__", first_documents)


def tied_gradient_lost(patch: Patch) -> None:
    """tied embeddings: the first stage never gets the last stage's part of the gradient"""

    def drop(model: pp.PipelineStages) -> None:
        if (copy := model.tied[1]) is not None:
            copy.grad = None

    patch.setattr(pp.PipelineStages, "_add_tied_gradient", drop)


def tied_copies_drift(patch: Patch) -> None:
    """tied embeddings: the last stage's copy keeps its first values"""
    real, copied = pp.PipelineStages._copy_tied, set()

    def copy_once(model: pp.PipelineStages) -> None:
        if id(model) not in copied:
            copied.add(id(model))
            real(model)

    patch.setattr(pp.PipelineStages, "_copy_tied", copy_once)


def tied_copy_not_in_the_optimizer(patch: Patch) -> None:
    """tied embeddings, both stages on one rank: names without duplicates leave the second copy out
    of the optimizer"""
    tied_copies_drift(patch)


def norm_of_one_stage(patch: Patch) -> None:
    """the norm is that of one stage's gradients, so the stages clip by different factors"""
    patch.setattr(Mesh, "sum_over_pp", lambda mesh, x: x)


def stage_0_loaded_everywhere(patch: Patch) -> None:
    """on loading a checkpoint, later stages get the layers of the first one"""
    real, without_checkpoint = state.tensors, train.build

    def build(cfg: train.Config) -> train.Job:
        """The job, through a checkpoint that is right."""
        job, path = without_checkpoint(cfg), [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
        dist.broadcast_object_list(path)
        materialise(job.optimizer)
        with Patch.context() as right:
            right.setattr(state, "tensors", real)
            with open_manager(job, Path(path[0]), async_save=False) as checkpoints:
                checkpoints.save(1, job.model, job.optimizer, {"step": 1})
        with open_manager(job, Path(path[0])) as checkpoints:
            checkpoints.load(job.model, job.optimizer)
        dist.barrier()  # all ranks have loaded it
        if dist.get_rank() == 0:
            shutil.rmtree(path[0])
        return job

    def renumbered(model: nn.Module, *rest: object) -> dict[str, Tensor]:
        return {
            numbered_from_the_stage(name, model): tensor
            for name, tensor in real(model, *rest).items()
        }

    patch.setattr(train, "build", build)
    patch.setattr(state, "tensors", renumbered)
    # it refuses: some layers are in the checkpoint and not in the run
    patch.setattr(state, "check_fits", lambda *_: None)


def last_block_without_gradient(patch: Patch) -> None:
    """a split backward whose weights FSDP frees leaves the last block without a gradient; clipping
    and the optimizer skip it"""
    real = train.gradients

    def then_dropped(job: train.Job, *rest: object) -> train.Gradients:
        # which ends the run if a gradient is missing by then (pp.PipelineStages.gradients)
        answer = real(job, *rest)
        if (last := str(job.args.n_layers - 1)) in job.model.layers:
            for p in job.model.layers[last].parameters():
                p.grad = None
        return answer

    patch.setattr(train, "gradients", then_dropped)


def expert_gradients_not_scaled(patch: Patch) -> None:
    """experts: their gradients are ep times too large"""
    patch.setattr(local, "ScaledGradient", SimpleNamespace(apply=lambda weight, factor: weight))


def experts_reduced_as_if_dense(patch: Patch) -> None:
    """experts: their gradients are averaged over all data-parallel ranks, of which some have other
    experts"""
    real = train.gradients

    def then_averaged(job: train.Job, *rest: object) -> train.Gradients:
        answer = real(job, *rest)
        for mixture in job.model.mixtures().values():
            for p in mixture.experts.parameters():
                dist.all_reduce(p.grad.to_local())
                p.grad.to_local().div_(job.mesh.dp_size)
        return answer

    patch.setattr(train, "gradients", then_averaged)


def experts_not_in_the_norm(patch: Patch) -> None:
    """experts: they are left out of the gradient norm, and clipped by that of the others"""
    real = train.clip_grad_norm

    def clip(params: object, max_norm: float, *rest: object) -> Tensor:
        trained = [p for p in params if p.grad is not None]
        norm = real(
            [p for p in trained if "ep" not in p.grad.device_mesh.mesh_dim_names], 0.0, *rest
        )
        torch._foreach_mul_(
            [p.grad.to_local() for p in trained], (max_norm / (norm + 1e-6)).clamp(max=1.0)
        )
        return norm

    patch.setattr(train, "clip_grad_norm", clip)


def counts_reduced_in_place(patch: Patch) -> None:
    """balancing: a rank's counts are summed over the ranks in place for the loss, and then summed
    again"""

    def in_place(loss: ep.BalanceLossOverRanks, affinities: Tensor, counts: Tensor) -> Tensor:
        for group in loss.groups:
            dist.all_reduce(counts, group=group)
        return loss.balance(affinities, counts)

    patch.setattr(ep.BalanceLossOverRanks, "forward", in_place)


def own_counts_balance(patch: Patch) -> None:
    """balancing: each rank moves its biases by its own counts"""
    patch.setattr(train, "sum_counts", lambda terms, mesh: None)


def counted_again_when_recomputed(patch: Patch) -> None:
    """balancing: the router counts inside of what activation checkpointing computes again"""
    real, totals = moe.Router.forward, {}

    def forward(router: nn.Module, x: Tensor) -> moe.ExpertChoice:
        choice = real(router, x)
        totals[router] = totals.get(router, 0) + choice.experts.flatten().bincount(
            minlength=router.args.n_experts
        )
        return choice

    def sum_counts(terms: AuxiliaryTerms, mesh: Mesh) -> None:
        counts = terms.sums["expert_counts"]
        for layer, total in zip(counts, totals.values(), strict=True):
            counts[layer] = mesh.sum_over_tokens(total)
        totals.clear()

    patch.setattr(moe.Router, "forward", forward)
    patch.setattr(train, "sum_counts", sum_counts)


def no_gradient_without_tokens(patch: Patch) -> None:
    """experts: a rank whose experts got no token has no gradient for them, so the optimizer skips
    them"""
    real = train.step_if

    def step_if(fine: Tensor, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                if "ep" in p.device_mesh.mesh_dim_names and not p.grad.to_local().any():
                    p.grad = None
        real(fine, optimizer)

    patch.setattr(train, "step_if", step_if)


def constant_balance_loss(patch: Patch) -> None:
    """balancing: the loss is made of affinities alone, whose sum is 1, so it is constant for every
    routing"""
    real = moe.BalanceLoss.forward
    patch.setattr(
        moe.BalanceLoss,
        "forward",
        lambda loss, p, counts: real(loss, p, torch.ones_like(counts)),
    )


def balance_loss_of_a_microbatch(patch: Patch) -> None:
    """balancing: the loss takes the counts of all sequences of a microbatch for those of each
    sequence"""
    real = moe.BalanceLoss.forward

    def forward(loss: nn.Module, affinities: Tensor, counts: Tensor) -> Tensor:
        return real(loss, affinities, counts.sum(0, keepdim=True).expand_as(counts))

    patch.setattr(moe.BalanceLoss, "forward", forward)


def balance_loss_of_earlier_stages_lost(patch: Patch) -> None:
    """balancing: only the stage that has the loss of the model adds the balance loss of its layers"""
    real = AuxiliaryTerms.add

    def add(
        own: AuxiliaryTerms, h: Tensor, terms: dict[str, Term], layer: int | None = None
    ) -> Tensor:
        if layer != 2:
            balance = terms["balance_loss"]
            terms["balance_loss"] = balance._replace(value=balance.value.detach())
        return real(own, h, terms, layer)

    patch.setattr(AuxiliaryTerms, "add", add)


def bias_weights_the_output(patch: Patch) -> None:
    """balancing: the bias of an expert is also added to the weight of its output"""
    real = moe.Router.forward

    def forward(router: nn.Module, x: Tensor) -> moe.ExpertChoice:
        choice = real(router, x)
        return choice._replace(weights=choice.weights + router.bias[choice.experts])

    patch.setattr(moe.Router, "forward", forward)


def rows_in_another_order(patch: Patch) -> None:
    """experts: the rows of an expert come back in another order than they went"""
    real = moe.Experts.forward

    def forward(experts: nn.Module, rows: Tensor, counts: Tensor) -> Tensor:
        return torch.cat(
            [part.flip(0) for part in real(experts, rows, counts).split(counts.tolist())]
        )

    patch.setattr(moe.Experts, "forward", forward)


def bias_in_16_bits(patch: Patch) -> None:
    """balancing: the biases are cast to bfloat16 with the weights of the model"""
    real = train.move_biases

    def move_biases(model: nn.Module, *rest: object) -> None:
        real(model, *rest)
        for mixture in model.mixtures().values():
            mixture.router.bias.data.copy_(mixture.router.bias.bfloat16())

    patch.setattr(train, "move_biases", move_biases)


def rotated_key_of_own_heads(patch: Patch) -> None:
    """latent attention: all heads have one rotated key, and each rank keeps its gradient from its
    own heads"""
    real = latent_attention.Latents.forward

    def keep_own(grad: Tensor, width: int) -> Tensor:
        """Return, through the sum over the ranks, each rank's own gradient, for its slice of the
        sequence."""
        length = grad.shape[1] // dist.get_world_size()
        places = torch.arange(grad.shape[1])[:, None] // length  # [T, 1]
        # [T, kv_rank + P]
        of_others = (places != dist.get_rank()) & (
            torch.arange(grad.shape[2]) >= grad.shape[2] - width
        )
        return grad.masked_fill(of_others, 0)

    def forward(latents: nn.Module, *inputs: Tensor) -> Tensor:
        out = real(latents, *inputs)  # [B, T, kv_rank + P]
        if out.requires_grad:
            out.register_hook(lambda grad: keep_own(grad, latents.widths[1]))
        return out

    patch.setattr(latent_attention.Latents, "forward", forward)


def one_in_a_million(patch: Patch) -> None:
    """one token in a million is counted twice; float32 does not show it"""
    real = Mesh.sum_over_tokens
    patch.setattr(Mesh, "sum_over_tokens", lambda mesh, count: real(mesh, count) * (1 + 1e-6))


def epsilon_twice(patch: Patch) -> None:
    """a norm across ranks adds a second epsilon of 1e-12; float32 does not show it"""
    real = torch.rsqrt
    patch.setattr(torch, "rsqrt", lambda mean_square: real(mean_square + 1e-12))


def labels_ahead_of_the_own_part(patch: Patch) -> None:
    """a rank cuts the labels two ahead out of its own part of a window, and loses the last ones"""
    real = further.add

    def add(batch: dict, tokens: np.ndarray, begins: object, ranges: list, *rest: int) -> None:
        real(batch, tokens, begins, ranges, *rest)
        batch["labels_ahead"][..., np.cumsum([len(part) for part in ranges]) - 1] = -100

    patch.setattr(further, "add", add)


def further_loss_of_every_rank(patch: Patch) -> None:
    """each tensor-parallel rank adds the whole gradient of a further token's loss to the head's"""
    real = AuxiliaryTerms.add_loss
    patch.setattr(
        AuxiliaryTerms,
        "add_loss",
        lambda self, loss, name, value, weight: real(self, loss, name, value, weight * self.tp),
    )


def copied_embedding_without_gradient(patch: Patch) -> None:
    """what embeds further tokens in the last stage is a copy, whose gradient is lost"""

    def forget(stages: pp.PipelineStages) -> None:
        if stages.tied[1] is not None:
            stages.tied[1].grad = None

    patch.setattr(pp.PipelineStages, "_add_tied_gradient", forget)


def none(patch: Patch) -> None:
    """no mistake"""


# Where the mistakes were published, with the numbers of their rows in brackets.
#
# NVIDIA/Megatron-LM: #6660 (4), #7452 (13, 14, 28, 32), #7513 (14), #1764 (15), #1464 (16),
# #5956 (29), #1628 (30), #5916 (31).
# pytorch/torchtitan: #514 (8, 8b), #3412 (10), #3206 (17), #2780 (18), #2990 and #3257 (21),
# #1733 (22), #2972 and #4194 (23), #1723 (24), #596 (26), #2061 (27), a TODO in moe.py (34),
# #3000 (37), #1237 and #1340 (39), #4167 (43).
# huggingface/transformers #34191 (1); pytorch/torchtune #2172 (2); DeepSpeed #7773 (3), #5259 (29);
# pytorch #170862 (6), #160285 (29); ROCm/TransformerEngine #715 (6b); NVIDIA-NeMo/Automodel #3701
# (7), #2995 (35); allenai/OLMo-core #679 (8, 8b); EleutherAI/gpt-neox #1257 (9);
# axolotl-ai-cloud/axolotl #3026 (15); NVIDIA-NeMo/Speech #12210 (20); mindspore-ai/hyper-parallel
# #752 (36); databricks/megablocks #85 (37); DeepSeek-V3, arXiv:2412.19437, section 2.1.2, as a
# warning (38).
# Without a thread: classic mistakes of a first implementation (5, 5b, 12, 19); the reason why some
# projects refuse tied embeddings with pipelines (25, 25b); a trainer whose router reads the counts
# of its own rank (33); prototypes of this project (46, 47, 48, 50, 51); made for this museum (52 to
# 56).
#
# The rows: what a mistake is, and a run in which it matters.

ONCE, EACH_TIME, CLIPS = (
    {"accumulation": "reduced once"},
    {"accumulation": ("reduced each time")},
    {"clipping": "in force"},
)
TIED = {"embeddings": "tied"}
EXACTLY = {"dtype": "float64"}  # judged to EXACT
# as the projects train whose tolerances are tried
FIVE_STEPS = "--training.steps=5"
SOFTMAX, SIGMOID = tuple(EXPERTS["qwen3 experts"]), tuple(DEEPSEEK)
STRONG_BIAS = (*SIGMOID, "--training.expert_bias_speed=1")
LOUD_EXPERTS = (*SIGMOID, "--training.expert_bias_speed=0.07", "--model.routed_scale=20")
LATENT = (*SIGMOID, "--model.expert_dim=12")  # tensor parallelism of 2 splits the shared experts
AHEAD = (*LATENT, "--model.mtp_depth=1")
TO_ONE = (*SIGMOID, ONE_EXPERT, "--model.experts_per_token=1", "--training.expert_bias_speed=0")


class Row(NamedTuple):
    number: str  # that of docs/museum.md
    bug: Callable[[Patch], None]
    mesh: str  # a key of MESHES
    settings: dict[str, str] = {}  # of the factors of tests/parity.py
    more: tuple[str, ...] = ()  # options

    @property
    def numbers(self) -> tuple[str, ...]:
        """The options of the plain model that this run is compared with."""
        return (*numbers_of(*self.more, **self.settings), FIVE_STEPS)

    @property
    def options(self) -> list[str]:
        return [
            *options_of(combination_of(**self.settings), FACTORS),
            *MESHES[self.mesh][1],
            *self.more,
            FIVE_STEPS,
        ]


def schedule(name: str) -> tuple[str, ...]:
    """One with two stages per rank, and as many layers as stages."""
    return (f"--parallelism.pipeline_schedule={name}", "--model.n_layers=4")


ROWS = [
    Row("1", own_token_counts, "fsdp2"),
    Row("2", averaged_twice, "fsdp2"),
    Row("3", accumulation_summed, "fsdp2", ONCE),
    Row("4", buffer_added_to_itself, "tp2", EACH_TIME),
    Row("5", replicas_not_reduced, "ddp2"),
    Row("5b", never_reduced, "fsdp2"),
    Row("6", local_norm, "fsdp2", CLIPS),
    Row("6b", replicated_counted_per_rank, "tp2", CLIPS),
    Row("7", all_zeros, "fsdp2"),
    Row("8", seed_of_the_rank, "fsdp2"),
    Row("8b", stages_alike, "pp2"),
    Row("9", norms_not_summed, "tp2"),
    Row("10", partial_called_whole, "tp2"),
    Row("12", positions_of_the_slice, "tp2"),
    Row("13", gain_of_own_heads, "tp2", {"model": "qwen3"}),
    Row("14", own_token_counts, "cp2"),
    Row("15", zero_labels_of_a_rank, "cp2", {}, (FEW_LABELS, ULYSSES)),
    Row("16", own_log_sum_exp, "cp2"),
    Row("17", joined_along_the_wrong_axis, "cp2", {}, (ULYSSES,)),
    Row("18", positions_in_a_row, "cp2"),
    Row("19", labels_after_the_cut, "cp2", {}, (ULYSSES,)),
    Row("20", keys_of_the_first_sequence, "cp2"),
    Row("22", divided_at_every_accumulation_step, "pp2", EACH_TIME),
    Row("23", normalised_for_the_log_only, "pp2", ONCE),
    Row("24", documents_of_the_first_microbatch, "pp2", ONCE, (DOCUMENTS,)),
    Row("25", tied_gradient_lost, "pp2", TIED | ONCE),
    Row("25b", tied_copies_drift, "pp2", TIED | ONCE),
    Row("26", norm_of_one_stage, "pp2", CLIPS | ONCE),
    Row("27", balance_loss_of_earlier_stages_lost, "pp2", ONCE, SOFTMAX),
    Row("28", stage_0_loaded_everywhere, "pp2"),
    Row("29", expert_gradients_not_scaled, "ep2", {"optimizer": "sgd"}, SIGMOID),
    Row("30", experts_reduced_as_if_dense, "ep2", {}, SOFTMAX),
    Row("31", experts_not_in_the_norm, "ep2", CLIPS, SIGMOID),
    Row("32", counts_reduced_in_place, "cp2", {}, SIGMOID),
    Row("33", own_counts_balance, "ep2", {}, SIGMOID),
    Row("34", counted_again_when_recomputed, "ep2", {"checkpointing": "full"}, SIGMOID),
    Row("35", no_gradient_without_tokens, "ep2", {}, TO_ONE),
    Row("36", constant_balance_loss, "ep2", {}, SOFTMAX),
    Row("37", balance_loss_of_a_microbatch, "pp2", ONCE, SOFTMAX),
    Row("38", bias_weights_the_output, "fsdp2", {}, STRONG_BIAS),
    Row("39", rows_in_another_order, "ep2", {}, SOFTMAX),
    Row("43", mean_of_means, "fsdp2", ONCE),
    Row("46", norm_of_one_dimension, "tp2", CLIPS),
    Row("47", last_block_without_gradient, "pp2", ONCE, schedule("zero_bubble")),
    Row("48", tied_copy_not_in_the_optimizer, "pp2", TIED | ONCE, schedule("zbv")),
    Row("50", bias_in_16_bits, "ep2", {}, LOUD_EXPERTS),
    Row("51", rotated_key_of_own_heads, "tp2", {}, LATENT),
    Row("52", one_in_a_million, "fsdp2", EXACTLY),
    Row("53", epsilon_twice, "tp2", EXACTLY | {"model": "olmo2"}),
    Row("54", labels_ahead_of_the_own_part, "cp2", {}, AHEAD),
    Row("55", further_loss_of_every_rank, "tp2", {}, AHEAD),
    Row("56", copied_embedding_without_gradient, "pp2", ONCE, AHEAD),
]
CONTROLS = [  # one for each kind of mesh; tests/test_parallel.py and its like have further ones
    Row("", none, "pp2", TIED | CLIPS | ONCE, (DOCUMENTS,)),
    Row("", none, "tp2"),
    Row("", none, "cp2", {}, (DOCUMENTS, FEW_LABELS)),
    Row("", none, "ep2", CLIPS | {"checkpointing": "full"}, SIGMOID),
    Row("", none, "fsdp2", EXACTLY | EACH_TIME),
]


def run(options: list[str], dp_size: int, bug: Callable[[Patch], None]) -> dict:
    """Return the trajectory of a run with this mistake in the code, which is right again
    afterwards."""
    with Patch.context() as patch:
        bug(patch)
        return trajectory(options, dp_size)


def runs(rows: list[Row], seeds: list[str]) -> list[dict]:
    """seeds: the option of each row's oracle."""
    return [
        run([*row.options, seed], MESHES[row.mesh][2], row.bug)
        for row, seed in zip(rows, seeds, strict=True)
    ]


# What others compare, with their tolerances: heading of docs/museum.md -> whether it would pass


def errors(seen: dict, oracle: dict, key: str) -> np.ndarray:
    return np.abs(np.array(seen[key]) - np.array(oracle[key]))


LOOSE: dict[str, Callable[[dict, dict], bool]] = {
    "0.05 nats, 20% of the norm": lambda seen, oracle: bool(
        np.all(errors(seen, oracle, "loss") <= 0.05)
        and np.all(errors(seen, oracle, "norm") <= 0.2 * np.array(oracle["norm"]))
    ),
    "rtol = atol = 0.1": lambda seen, oracle: all(
        np.allclose(seen[key], oracle[key], 0.1, 0.1) for key in ("loss", "norm")
    ),
    "first loss": lambda seen, oracle: bool(
        errors(seen, oracle, "loss")[0] <= 1e-5 * oracle["loss"][0]
    ),
}
# Where a mistake changes the weights, the counts follow by chance: a score that was near another
# falls behind it. They say something of their own where nothing else is seen.
COUNTS = "counts of tokens"
SEEN_IN = {
    "initial": ("initial values"),
    "loss": "loss",
    "norm": "norm",
    "experts": COUNTS,
    "grad": "gradients",
    "weights": "weights",
}


class Finding(NamedTuple):
    row: Row
    seen_in: list[str]  # values of SEEN_IN
    passes: list[bool]  # for each of LOOSE
    error: str  # the largest relative one, in words

    def __str__(self) -> str:
        """A line of the table."""
        caught = ["no" if passed else "yes" for passed in self.passes]
        cells = [
            self.row.number,
            " ".join(self.row.bug.__doc__.split()),
            self.row.mesh,
            ", ".join(self.seen_in),
            self.error,
            *caught,
        ]
        return f"| {' | '.join(cells)} |"


def measure() -> tuple[list[Finding], list[str]]:
    """Return the findings of every row, and the problems of the runs without a mistake (there must
    be none)."""
    rows = [*ROWS, *CONTROLS]
    numbers = dict.fromkeys(row.numbers for row in rows)
    # in one process: most of the time of one alone goes into its first step
    [known] = run_ranks(1, clear_trajectories, [list(one) for one in numbers], timeout=200)
    for oracle in known:
        del oracle["options"]  # so it is judged to 1e-5
    known = dict(zip(numbers, known, strict=True))
    oracles = [known[row.numbers] for row in rows]
    results = run_ranks(2, runs, rows, [seed_of(oracle) for oracle in oracles], timeout=200)
    of_rows, of_controls = [], []
    for row, oracle, *ranks in zip(rows, oracles, *results, strict=True):
        seen = whole_model(ranks)
        with np.errstate(divide="ignore", invalid="ignore"):
            limit = EXACT if "dtype" in row.settings else EQUAL
            problems = compare(row.bug.__name__, seen, oracle, limit)
        if row.bug is none:
            of_controls += problems
            continue
        seen_in = [
            name
            for key, name in SEEN_IN.items()
            if any(f": {key} " in problem for problem in problems)
        ]
        if len(seen_in) > 1 and COUNTS in seen_in:
            seen_in.remove(COUNTS)
        sizes = [
            float(x)
            for problem in problems
            for x in re.findall(
                r"off by (\S+) "
                r"relative",
                problem,
            )
        ]
        passes = [passes(seen, oracle) for passes in LOOSE.values()]
        of_rows.append(Finding(row, seen_in, passes, f"{max(sizes, default=0):.0e}"))
    return of_rows, of_controls


@pytest.fixture(scope="module")
def findings() -> tuple[list[Finding], list[str]]:
    return measure()


def test_every_mistake_is_seen(findings):
    unseen = [finding.row.bug.__name__ for finding in findings[0] if not finding.seen_in]
    assert not unseen, unseen


def test_without_a_mistake_nothing_is_seen(findings):
    """The last runs of the same processes: all that was patched is right again."""
    assert findings[1] == []


TABLE = ROOT / "lab" / "bench" / "results" / "museum.txt"
PAGE = ROOT / "docs" / "museum.md"


def cells_of(line: str) -> list[str]:
    """Return the cells of a line of a table."""
    return [cell.strip() for cell in line.strip("| ").split("|")]


def comparable(line: str) -> list[str]:
    """Return the cells of a line of the table, without the size of the error, which differs between
    machines."""
    cells = cells_of(line)
    return cells[:4] + cells[5:]


def lines_of_the_table() -> list[str]:
    """Return the lines of the committed table, one for each row."""
    columns = 5 + len(LOOSE)
    lines = []
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        if re.match(r"\| \d+b? +\|", line) and line.count("|") == columns + 1:
            lines.append(line)
    return lines


def caught(of_rows: list[Finding], index: int) -> str:
    """A sentence of docs/museum.md about the tolerance with this number."""
    return (
        f"`{list(LOOSE)[index]}`: {sum(not finding.passes[index] for finding in of_rows)} of "
        f"{len(of_rows)}"
    )


def test_the_table_of_the_docs_is_what_the_runs_show(findings):
    text = PAGE.read_text(encoding="utf-8")
    assert [comparable(line) for line in lines_of_the_table()] == [
        comparable(str(finding)) for finding in findings[0]
    ]
    missing = [
        sentence for i in range(len(LOOSE)) if (sentence := caught(findings[0], i)) not in text
    ]
    assert not missing, missing


# A line of docs/museum.md: a subject, its rows, and how many of them each tolerance sees.
GROUP = re.compile(r"^\| [^|]+ \| ([\db, ]+) \| (\d+) \| (\d+) \| (\d+) \|$", re.MULTILINE)


def test_the_counts_of_the_docs_are_those_of_the_table():
    """Every row is in one group."""
    seen = {}
    for line in lines_of_the_table():
        cells = cells_of(line)
        seen[cells[0]] = cells[5:]
    grouped = []
    for names, *counts in GROUP.findall(PAGE.read_text(encoding="utf-8")):
        rows = names.split(", ")
        grouped += rows
        for index, count in enumerate(counts):
            caught_rows = [row for row in rows if seen[row][index] == "yes"]
            assert len(caught_rows) == int(count), (names, list(LOOSE)[index])
    assert sorted(grouped) == sorted(seen)


if __name__ == "__main__":
    table, unexpected = measure()
    print(
        f"| row | mistake | mesh | seen in | largest error | {' | '.join(LOOSE)} "
        f"|\n{'| --- ' * (5 + len(LOOSE))}|"
    )
    print(*table, *unexpected, *(caught(table, i) for i in range(len(LOOSE))), sep="\n")
