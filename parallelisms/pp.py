"""Pipeline parallelism: the model is cut by depth into stages, and ranks work on different
microbatches at the same time.

A schedule (`parallelisms/schedules.py`) is a table of actions for each rank; this file runs it.
The microbatches are those of gradient accumulation. Every rank reads the batch itself, so only hidden
states and their gradients are sent, and their shape is known: [b, T / tp, D] in the type of the
weights. The loss of a microbatch is divided by the tokens of the global batch before its
backward, as without a pipeline.

PyTorch's own runtime (torch.distributed.pipelining) is not used: it loses gradients in silence
where a schedule splits the backward and FSDP reshards, ignores `accumulate_gradients =
"sharded"`, needs as many microbatches as stages, runs additional forwards to learn shapes, and
cannot be traced by the planner. Only its split of one backward into two halves is.

A tied weight is a parameter of the first stage alone. The last stage works on a copy: it receives
the values before each step, and its gradient is added to that of the first stage afterwards. So the
weight counts once in the norm, the optimizer and a checkpoint."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.profiler import record_function

from configs.schema import Config, Parallelism
from models import mtp
from models.cores import documents_of
from parallelisms import dp, fsdp_details, schedules
from parallelisms.boxes import shard_of
from parallelisms.mesh import Mesh
from parallelisms.schedules import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    Action,
    Result,
    Table,
    Transfer,
    result,
)

HIDDEN, GRADIENT = schedules.RESULTS[FORWARD], schedules.RESULTS[BACKWARD]
ENDS_BACKWARD = (BACKWARD, BACKWARD_WEIGHT)
# microbatch -> what the model takes, as of training/microbatches.py
Inputs = Callable[[int], tuple[Tensor, Tensor, Callable, Any]]


def layers_of_stages(cfg: Config, family: Any, args: Any) -> list[range]:
    """Return the layers of every stage, by `parallelism.pipeline_layers` or else balanced by cost.
    Without a pipeline there is one stage."""
    p = cfg.parallelism
    if p.pipeline_layers:
        return schedules.consecutive(p.pipeline_layers)
    stages = len(
        schedules.placement(p.pipeline_schedule, p.pipeline_parallel, p.pipeline_stages_per_rank)
    )

    def flops(args: Any) -> float:
        return family.flops_per_token(args, cfg.training.seq_len)

    more = replace(args, n_layers=args.n_layers + 1)
    embedding, head = schedules.end_weights(args, more, family.parameters, flops)
    head += mtp.layers_worth(args, flops)
    return schedules.stage_layers(args.n_layers, stages, embedding, head)


def own_stages(p: Parallelism, rank: int) -> list[int]:
    """Return the numbers of the stages that this rank of a pipeline has."""
    placement = schedules.placement(
        p.pipeline_schedule, p.pipeline_parallel, p.pipeline_stages_per_rank
    )
    return [stage for stage, its_rank in enumerate(placement) if its_rank == rank]


def stages_of(model: nn.Module) -> list[nn.Module]:
    """Return the parts of a model that this rank runs one by one: the stages of a pipeline, or the
    model itself."""
    return list(model.stages.values()) if isinstance(model, PipelineStages) else [model]


class PipelineStages(nn.Module):
    """This rank's stages as one model, whose parameters have their names in the whole model.

    The stages themselves are not submodules, their children are. Layers are named by their numbers
    in the whole model, and no two stages have anything else in common but a tied weight, of which
    only the first stage's is a parameter here.
    """

    def __init__(
        self, stages: dict[int, nn.Module], layers_of_stages: list[range], mesh: Mesh, cfg: Config
    ) -> None:
        """stages: this rank's by number, sharded and allocated; layers_of_stages: of all stages,
        by number."""
        super().__init__()
        self.stages = stages
        self.mesh = mesh
        self.cfg = cfg.parallelism
        self.placement = schedules.placement(self.cfg.pipeline_schedule, mesh.pp, len(stages))
        self.dtype = dp.param_dtype(cfg.training, mesh.device)  # of hidden states
        self.link: Any = Link(mesh)  # or reliability/collectives.py::CheckedLink, which checks it
        self.layers_of_stages = layers_of_stages
        # (microbatches, whether there are forwards alone) -> table
        self.rank_tables: dict[tuple[int, bool], RankTable] = {}
        # the seconds that this rank computed in the newest step, by half of it; of the host on a
        # GPU
        self.seconds: dict[str, float] = {}
        self.layers = nn.ModuleDict()
        for stage in stages.values():
            self.layers.update(stage.layers)
            for name, child in stage.named_children():
                if name != "layers" and not (name == "tok_embeddings" and not stage.first):
                    self.add_module(name, child)
        any_stage = next(iter(stages.values()))
        self.args = any_stage.args
        # the tied weight and its copy, if they are here
        self.tied: tuple[Tensor | None, Tensor | None] = (None, None)
        if any_stage.copies_embedding():
            first = stages.get(0)
            last = stages.get(len(self.placement) - 1)
            self.tied = (
                first and first.tok_embeddings.weight,
                last and last.tok_embeddings.weight,
            )

    def table(self, microbatches: int, forward_only: bool = False) -> "RankTable":
        """Return the table of a step with so many microbatches, as this rank sees it. It is made
        once."""
        key = microbatches, forward_only
        if key not in self.rank_tables:
            ranks = self.mesh.pp
            schedule = self.cfg.pipeline_schedule
            if forward_only:
                table = forward_table(self.placement, ranks, microbatches)
            else:
                table = schedules.table(schedule, ranks, len(self.stages), microbatches)
            self.rank_tables[key] = RankTable(table, self.placement, self.mesh.pp_rank)
        return self.rank_tables[key]

    def describe(self, microbatches: int) -> str:
        """Describe the layers of every stage, and the bubble if all stages take the same time, and
        so do the two halves of a backward (`tools.plan` computes it for the real times)."""
        seconds = {FORWARD: 1.0, BACKWARD: 2.0, BACKWARD_INPUT: 1.0, BACKWARD_WEIGHT: 1.0}
        timeline = schedules.timeline(
            self.table(microbatches).of_all_ranks, self.placement, lambda a: seconds[a.kind]
        )
        layers = zip(self.layers_of_stages, self.placement, strict=True)
        parts = ", ".join(
            f"{schedules.layers_text(numbers)} on rank {rank}" for numbers, rank in layers
        )
        return (
            f"pipeline: {self.cfg.pipeline_schedule} with {microbatches} microbatches, ranks wait for "
            f"{schedules.bubble(timeline):.0%} of the time if stages are equal; layers {parts}"
        )

    def cores(self) -> list[nn.Module]:
        return [core for stage in self.stages.values() for core in stage.cores()]

    def documents(self, positions: Tensor, device: torch.device) -> Any:
        """Return `models/layers.py::Decoder.documents` for the cores of all these stages."""
        return documents_of(self.cores(), positions, device)

    def latents(self) -> list[nn.Module]:
        return [module for stage in self.stages.values() for module in stage.latents()]

    def mixtures(self) -> dict[int, nn.Module]:
        return {
            number: mixture
            for stage in self.stages.values()
            for number, mixture in stage.mixtures().items()
        }

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        loss_head: Callable,
        documents: Any = None,
        terms: None = None,
    ) -> Tensor:
        """Run `models/layers.py::Decoder.forward` without a backward. Every rank of the pipeline
        calls it and returns what the loss head returned in the last stage. One stage works at a
        time: this is for sampling."""

        def inputs(_: int) -> tuple:
            return x, positions, loss_head, documents

        with torch.no_grad():
            outputs = self._play(1, True, inputs, x.shape).outputs
        answer = [outputs[0].cpu() if outputs else None]
        group = self.mesh.device_mesh.get_group("pp")
        dist.broadcast_object_list(
            answer, group=group, group_src=self.placement[-1], device=torch.device("cpu")
        )
        return answer[0].to(self.mesh.device)

    def losses(self, microbatches: Any) -> Tensor:
        """Return the summed loss of all microbatches, a float64 scalar: 0 on the ranks without the
        last stage. No backward: for validation."""
        with torch.no_grad():
            shape = microbatches.tokens.shape[1:]
            return self._total(self._play(len(microbatches), True, microbatches, shape))

    def gradients(self, microbatches: Any, scale: Tensor) -> Tensor:
        """Compute the gradient of `scale` times the summed loss of all microbatches. Returns that
        sum, a float64 scalar: 0 on the ranks without the last stage. microbatches: a
        training/microbatches.py::Microbatches."""
        shape = microbatches.tokens.shape[1:]
        step = self._play(len(microbatches), False, microbatches, shape, scale)
        self._add_tied_gradient()
        missing = [
            name for name, p in self.named_parameters() if p.requires_grad and p.grad is None
        ]
        if missing:
            raise RuntimeError(
                f"the schedule {self.cfg.pipeline_schedule} left {len(missing)} parameters "
                f"without a gradient: {', '.join(missing[:3])} ..."
            )
        if not step.outputs:
            microbatches.losses.zero_()
        return self._total(step)

    def _total(self, step: "PipelineStep") -> Tensor:
        if step.outputs:
            return torch.stack(step.outputs).double().sum()
        return torch.zeros((), dtype=torch.float64, device=self.mesh.device)

    def _play(
        self,
        microbatches: int,
        forward_only: bool,
        inputs: Inputs,
        shape: torch.Size,
        scale: Tensor | None = None,
    ) -> "PipelineStep":
        """Run the actions of one step. shape: [b, T] of a microbatch."""
        self._copy_tied()
        table = self.table(microbatches, forward_only)
        hidden = (shape[0], shape[1] // self.mesh.tp, self.args.dim)
        messages = Messages(self.link, self.mesh, table, hidden, self.dtype)
        step = PipelineStep(self, table, messages, inputs, scale)
        step.play()
        self.seconds = {
            "forward": step.seconds[FORWARD],
            "backward": sum(step.seconds.values()) - step.seconds[FORWARD],
        }
        return step

    # The tied weight. Its two places have the same shards, since the ranks of a pipeline differ in
    # nothing else.

    @torch.no_grad()
    def _copy_tied(self) -> None:
        """Send the values of the first stage's weight to the copy of the last stage."""
        original, copy = self.tied
        if original is not None and copy is not None:
            shard_of(copy).copy_(shard_of(original))
        elif original is not None:
            self._send("the tied weight", shard_of(original), self.placement[-1])
        elif copy is not None:
            self._receive("the tied weight", shard_of(copy), self.placement[0])

    @torch.no_grad()
    def _add_tied_gradient(self) -> None:
        """Add the gradient of the last stage's copy to that of the first stage's weight."""
        original, copy = self.tied
        weights = [weight for weight in self.tied if weight is not None]
        if not any(weight.requires_grad for weight in weights):
            return  # it is not here, or frozen
        if original is not None:
            gradient = shard_of(original.grad)
            other = shard_of(copy.grad) if copy is not None else torch.empty_like(gradient)
            if copy is None:
                self._receive("the gradient of the tied weight", other, self.placement[-1])
            gradient.add_(other)
        elif copy is not None:
            self._send("the gradient of the tied weight", shard_of(copy.grad), self.placement[0])
        if copy is not None:
            copy.grad = None

    def _send(self, name: str, tensor: Tensor, rank: int) -> None:
        if tensor.numel():
            wait(self.link.send(name, tensor.contiguous(), rank), self.mesh)

    def _receive(self, name: str, tensor: Tensor, rank: int) -> None:
        if tensor.numel():
            wait(self.link.receive(name, tensor, rank), self.mesh)


def wait(work: dist.Work, mesh: Mesh) -> None:
    """Wait for a send or a receive. On a GPU this enqueues a wait, and NCCL knows its timeout.
    gloo's sends and receives do not obey the timeout of their group unless it is given to
    `wait`."""
    if mesh.device.type == "cpu":
        work.wait(mesh.timeout())
    else:
        work.wait()


def forward_table(placement: list[int], ranks: int, microbatches: int) -> Table:
    """Return a table of forwards alone: as many microbatches as there are ranks go through all
    stages, then the next ones."""
    return [
        [
            Action(FORWARD, stage, m)
            for first in range(0, microbatches, ranks)
            for stage in range(len(placement))
            if placement[stage] == rank
            for m in range(first, min(first + ranks, microbatches))
        ]
        for rank in range(ranks)
    ]


class RankTable:
    """A table as one rank sees it: the rank's actions, and its sends and receives."""

    def __init__(self, table: Table, placement: list[int], rank: int) -> None:
        transfers = schedules.transfers(table, placement)
        self.of_all_ranks = table
        self.actions = table[rank]
        # in the order of its rank
        self.place = {action: i for actions in table for i, action in enumerate(actions)}
        self.leaving = {result(t.made_by): t for t in transfers if t.sender == rank}
        self.coming = {result(t.made_by): t for t in transfers if t.receiver == rank}
        ends = [action.stage for action in self.actions if action.kind in ENDS_BACKWARD]
        self.backwards = {
            stage: ends.count(stage) for stage in range(len(placement)) if placement[stage] == rank
        }


class PipelineStep:
    """This rank's part of one step: its results and pending inputs, by stage and microbatch."""

    def __init__(
        self,
        model: PipelineStages,
        table: RankTable,
        messages: "Messages",
        inputs: Inputs,
        scale: Tensor | None,
    ) -> None:
        self.model = model
        self.table = table
        self.messages = messages
        self.inputs = inputs
        self.scale = scale
        # without waiting for others
        self.seconds = dict.fromkeys((FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT), 0.0)
        # what the loss head returned for every microbatch, in the last stage
        self.outputs: list[Tensor] = []
        # (stage, microbatch) -> what its backward needs
        self.in_flight: dict[tuple[int, int], tuple] = {}
        self.left = dict(table.backwards)  # backwards of each stage that have not ended
        self.gathers_once = fsdp_details.gathers_once(model.cfg)

    def play(self) -> None:
        play = {
            FORWARD: self.forward,
            BACKWARD: self.backward,
            BACKWARD_INPUT: self.backward_input,
            BACKWARD_WEIGHT: self.backward_weight,
        }
        stages = len(self.model.placement)
        if self.scale is not None and self.gathers_once:
            # while other ranks work on the first microbatch
            for number in dict.fromkeys(action.stage for action in self.table.actions):
                fsdp_details.gather_ahead(self.model.stages[number])
        for i, action in enumerate(self.table.actions):
            began = time.monotonic()
            waited = self.messages.waited
            # tools/plan reads this name.
            with record_function(
                f"{action.kind} of stage {action.stage}, microbatch {action.microbatch}"
            ):
                for soon in self.table.actions[i : i + 2]:
                    for key in schedules.needs(soon, stages):
                        self.messages.ask(key)
                play[action.kind](action, self.model.stages[action.stage])
            waited = self.messages.waited - waited
            self.seconds[action.kind] += time.monotonic() - began - waited
        self.messages.release()

    def forward(self, action: Action, stage: nn.Module) -> None:
        """Run forward without keeping a hidden state that backward does not need: the hidden state
        itself is sent, and only its edge in autograd's graph is kept."""
        x, *others = self.inputs(action.microbatch)
        trains = self.scale is not None
        if not stage.first:
            x = self.messages.take((HIDDEN, action.stage - 1, action.microbatch))
            x.requires_grad_(trains)
        with record_function("forward"):
            h = stage(x, *others)
        if stage.last:
            self.outputs.append(h.detach())
            h = h * self.scale if trains else h
        else:
            self.messages.give(result(action), h.detach())
        if trains:
            if stage.last or self.splits(action):
                # it is detached in place, which no view can be; a mixture makes one
                kept = h.clone() if h._is_view() else h
            else:
                kept = get_gradient_edge(h)
            self.in_flight[action.stage, action.microbatch] = x, kept

    def splits(self, action: Action) -> bool:
        """Return whether the backward of this microbatch is split in two halves. The half for the
        input needs the tensor itself."""
        return action._replace(kind=BACKWARD_INPUT) in self.table.place

    def gradient(self, action: Action, stage: nn.Module) -> Tensor | None:
        """Return the gradient of this stage's output; None for the last stage, whose output is the
        loss."""
        if stage.last:
            return None
        return self.messages.take((GRADIENT, action.stage + 1, action.microbatch))

    def backward(self, action: Action, stage: nn.Module) -> None:
        x, h = self.in_flight.pop((action.stage, action.microbatch))
        gradient = self.gradient(action, stage)
        self.synchronise(action.stage, stage)
        with record_function("backward"):
            torch.autograd.backward(h, gradient)
        if not stage.first:
            self.messages.give(result(action), x.grad)

    def backward_input(self, action: Action, stage: nn.Module) -> None:
        """Compute the half of a backward for which the stage before waits. The first stage has
        none: tokens have no gradient."""
        if stage.first:
            return
        x, h = self.in_flight[action.stage, action.microbatch]
        gradient = self.gradient(action, stage)
        self.hold_post_backward(stage)
        with record_function("backward"):
            [gradient], rest = stage_backward_input(
                [h], None if gradient is None else [gradient], [x], trained(stage)
            )
        self.in_flight[action.stage, action.microbatch] = rest
        self.messages.give(result(action), gradient)

    def backward_weight(self, action: Action, stage: nn.Module) -> None:
        """Compute the gradients of the weights. PyTorch does it by one backward for each group of
        weights. FSDP's post-backward would come after each of them, and reduce and reshard what
        other groups still need: a tied weight has a gradient in two groups, and full checkpointing
        recomputes forward in each. So its post-backward runs once, when all weights have their
        gradients."""
        if stage.first:
            return self.backward(action, stage)
        rest = self.in_flight.pop((action.stage, action.microbatch))
        self.hold_post_backward(stage)
        with record_function("backward"):
            stage_backward_weight(trained(stage), rest)
            self.synchronise(action.stage, stage)
            dp.end_backward(stage)

    def hold_post_backward(self, stage: nn.Module) -> None:
        """Keep FSDP from reducing gradients and resharding weights in the next backward."""
        dp.synchronise_gradients(stage, False, "whole")
        dp.keep_gathered(stage, True)

    def synchronise(self, number: int, stage: nn.Module) -> None:
        """Prepare FSDP's post-backward: the last backward of a stage reduces the gradients over the
        data-parallel ranks, and reshards, unless every forward does."""
        self.left[number] -= 1
        is_last = self.left[number] == 0
        dp.synchronise_gradients(stage, is_last, self.model.cfg.accumulate_gradients)
        dp.keep_gathered(stage, not is_last and self.gathers_once)


def name_of(key: Result) -> str:
    return f"the {key[0]} of stage {key[1]}, microbatch {key[2]}"


def trained(stage: nn.Module) -> Iterator[nn.Parameter]:
    return (p for p in stage.parameters() if p.requires_grad)


class Link:
    """Starts the sends and receives between this rank of a pipeline and others. Each direction has
    its own group (parallelisms/p2p_warmup.py)."""

    def __init__(self, mesh: Mesh) -> None:
        self.rank = mesh.pp_rank
        self.to_higher = mesh.device_mesh.get_group("pp")
        self.to_lower = mesh.to_lower

    def send(self, name: str, tensor: Tensor, rank: int) -> dist.Work:
        """Start to send a tensor to that rank of the pipeline. name: for error messages; it is not
        sent."""
        group = self.to_higher if rank > self.rank else self.to_lower
        return dist.isend(tensor, group=group, group_dst=rank)

    def receive(self, name: str, tensor: Tensor, rank: int) -> dist.Work:
        """Start to receive it from that rank of the pipeline."""
        group = self.to_higher if rank < self.rank else self.to_lower
        return dist.irecv(tensor, group=group, group_src=rank)


class Messages:
    """Hidden states and gradients in flight between this rank and others, in one step.

    All ranks start their sends and receives in one common order (`schedules.transfers`), because
    NCCL matches those of two ranks by their order alone. A receive starts one action before the
    action that needs it, so that it overlaps with computation.
    """

    def __init__(
        self, link: Link, mesh: Mesh, table: RankTable, shape: tuple, dtype: torch.dtype
    ) -> None:
        self.link = link
        self.mesh = mesh
        self.table = table
        self.shape = shape
        self.dtype = dtype
        # the results that each rank sends to this one and whose receive has not started
        self.queues: dict[int, deque[Result]] = {}
        for key, t in table.coming.items():
            self.queues.setdefault(t.sender, deque()).append(key)
        self.arriving: dict[Result, tuple[Tensor, dist.Work]] = {}
        self.sent: list[tuple[Transfer, Tensor, dist.Work]] = []
        self.kept: dict[Result, Tensor] = {}  # for a stage of the same rank
        self.waited = 0.0  # seconds that this rank has waited in receives

    def ask(self, key: Result) -> None:
        """Start to receive this result, after everything that its sender sends before it."""
        if key not in self.table.coming:
            return
        sender = self.table.coming[key].sender
        queue = self.queues[sender]
        while queue and key not in self.arriving:
            tensor = torch.empty(self.shape, dtype=self.dtype, device=self.mesh.device)
            first = queue.popleft()
            self.arriving[first] = tensor, self.link.receive(name_of(first), tensor, sender)

    def take(self, key: Result) -> Tensor:
        """Return the result of another stage, and wait for it."""
        if key in self.kept:
            return self.kept.pop(key)
        self.ask(key)
        tensor, work = self.arriving.pop(key)
        transfer = self.table.coming[key]
        began = time.monotonic()
        try:
            wait(work, self.mesh)
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {self.mesh.pp_rank} of the pipeline did not receive {name_of(key)}, from "
                f"rank {transfer.sender}, which has failed or hangs: see its messages"
            ) from error
        self.waited += time.monotonic() - began
        # Every input that its sender needed for this has arrived there.
        place = self.table.place
        done = place[transfer.made_by]

        def has_arrived(sent: Transfer) -> bool:
            return sent.receiver == transfer.sender and place[sent.needed_by] <= done

        self.release(has_arrived)
        return tensor

    def give(self, key: Result, tensor: Tensor) -> None:
        """Pass a result of this rank to another rank or to this rank's next stage."""
        if key not in self.table.leaving:
            self.kept[key] = tensor
            return
        transfer = self.table.leaving[key]
        tensor = tensor.contiguous()
        work = self.link.send(name_of(key), tensor, transfer.receiver)
        self.sent.append((transfer, tensor, work))

    def release(self, arrived: Callable[[Transfer], bool] = lambda _: True) -> None:
        """Free the tensors of sends that have arrived."""
        for sent in list(self.sent):
            transfer, _, work = sent
            if arrived(transfer):
                wait(work, self.mesh)
                self.sent.remove(sent)
