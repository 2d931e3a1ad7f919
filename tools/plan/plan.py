"""A plan: one configuration on GPUs that need not exist, with its memory, its FLOPs, its time and
its cost."""

import fnmatch
from dataclasses import dataclass
from functools import cached_property

import torch

import train
from configs import check, stages
from configs.schema import Config
from parallelisms.dp import DTYPES
from parallelisms.fsdp_details import gathers_once
from tools.goodput import best_interval, expected
from tools.plan.arguments import MARGIN, MTBF_GPU_HOURS
from tools.plan.device import Device
from tools.plan.estimate import Estimate, Machine, estimate
from tools.plan.pipeline import Pipeline, Rank, Stages, make_pipeline
from tools.plan.routing import BALANCED, Chosen, Routing
from tools.plan.stack import OURS, Software
from tools.plan.step import GIB, Step, Where, fsdp_dimension

# CUDA context, cuBLAS workspaces and NCCL's buffers, which the allocator does not see: assumed
CONTEXT_GIB = 1.5


@dataclass(frozen=True)
class PlanInputs:
    """Inputs of a plan besides the configuration."""

    gpus: int
    per_host: int
    device: Device
    on_gpu: bool = True
    margin: float = MARGIN
    tokens: float = 0.0  # to train on; 0: as many as training.steps makes
    usd_per_gpu_hour: float = 0.0
    mtbf_gpu_hours: float = MTBF_GPU_HOURS
    restart_seconds: float = 600.0  # from an interruption to the next step
    storage_gb_per_s: float = 10.0  # of the checkpoint folder, all ranks together
    routing: Routing = BALANCED
    stack: Software = OURS


@dataclass(frozen=True)
class Plan:
    cfg: Config
    inputs: PlanInputs
    step: Step | Rank  # of rank 0; in a pipeline of the rank that needs the most memory
    time: Estimate  # of rank 0; in a pipeline as the slowest rank sees it
    pipeline: Pipeline | None = None

    @property
    def ranks(self) -> list[Step] | list[Rank]:
        """Return the ranks of one pipeline, or the only one. One rank represents each
        tensor-parallel group."""
        if self.pipeline:
            return self.pipeline.ranks
        return [self.step]

    @cached_property
    def parameters(self) -> int:
        """Return the number of trained parameters."""
        return sum(p.elements for rank in self.ranks for p in rank.parameters.values())

    @cached_property
    def frozen(self) -> int:
        """Return the number of frozen weights under adapters."""
        return sum(p.frozen for rank in self.ranks for p in rank.parameters.values())

    @cached_property
    def peak(self) -> tuple[int, Where, dict[str, int]]:
        """`Step.peak` of the step, computed once."""
        return self.step.peak()

    @property
    def live(self) -> int:
        """Return the most bytes that live at one time."""
        return self.peak[0]

    @property
    def needed(self) -> float:
        """Return the bytes of the device that the run takes, including the allocator's and the
        context's."""
        return with_margin(self.live, self.inputs)

    @property
    def usable(self) -> float:
        """Return the bytes of the device that may be live; the allocator and the context take the
        rest."""
        capacity = self.inputs.device.memory_gib * GIB
        if not self.inputs.on_gpu:
            return capacity
        return (capacity - CONTEXT_GIB * GIB) / (1 + self.inputs.margin)

    @property
    def fits(self) -> bool:
        return self.needed <= self.inputs.device.memory_gib * GIB

    @property
    def room_for_gathered(self) -> int:
        """Return for how many blocks memory has room to keep the weights unsharded from forward to
        backward (parallelism.keep_gathered)."""
        p = self.cfg.parallelism
        if not self.fits or self.pipeline or p.reshard_after_forward is False:
            return 0
        groups = self.step.groups
        if len(groups[fsdp_dimension(groups)]) == 1:
            return 0
        layers = self.step.layers
        block = self.step.parameters[layers - 1].gathered * self.bytes_per_weight
        return min(layers, p.keep_gathered + int((self.usable - self.live) // block))

    @property
    def has_room_for_all(self) -> bool:
        """Return True if all gathered weights fit through the whole step, with more than one
        microbatch to use them (parallelism.reshard_after_backward)."""
        if self.microbatches == 1 or not self.room_for_gathered:
            return False
        gathered = sum(part.gathered for part in self.step.parameters.values())
        return self.live + gathered * self.bytes_per_weight <= self.usable

    @property
    def bytes_per_weight(self) -> int:
        return DTYPES.get(self.cfg.training.param_dtype, torch.bfloat16).itemsize

    @property
    def tokens_per_step(self) -> int:
        return self.cfg.training.global_batch_size * self.cfg.training.seq_len

    @property
    def tokens_per_second(self) -> float:
        return self.tokens_per_step / self.time.seconds

    @property
    def microbatches(self) -> int:
        return self.cfg.training.microbatches(self.data_parallel)

    @property
    def data_parallel(self) -> int:
        """Return the number of ranks that share the sequences of a batch."""
        p = self.cfg.parallelism
        return self.inputs.gpus // (p.context_parallel * p.tensor_parallel * p.pipeline_parallel)

    def flops(self) -> tuple[float, float, float]:
        """Return three FLOPs per token: derived from the model's sizes; counted in the traced step; and
        those that are recomputed or repeated on several ranks, which `counted` leaves out."""
        counted = recomputed = 0
        for rank in self.ranks:
            of_rank = rank.flops()
            counted += of_rank[0]
            recomputed += of_rank[1]
        pipelines = self.inputs.gpus // self.cfg.parallelism.pipeline_parallel
        per_token = pipelines / self.tokens_per_step
        family, args = train.architecture(self.cfg)
        derived = family.flops_per_token(args, self.cfg.training.seq_len)
        again = self.repeated
        return derived, counted * per_token - again, recomputed * per_token + again

    @cached_property
    def repeated(self) -> float:
        """Return the FLOPs per token that further ranks of tensor parallelism repeat: those of the
        weights that none of them splits, `whole_linear`."""
        tp = self.cfg.parallelism.tensor_parallel
        family, args = train.architecture(self.cfg)
        whole = [row for row, style in family.tp_plan(args).items() if style == "whole_linear"]
        if tp == 1 or not whole or self.cfg.lora.rank:
            return 0.0
        with torch.device("meta"):
            modules = dict(family.build(args).named_modules())
        names = {name for row in whole for name in fnmatch.filter(modules, row)}
        return 6.0 * (tp - 1) * sum(modules[name].weight.numel() for name in names)

    @property
    def mfu(self) -> float:
        """Model FLOPs per second over the peak of all devices, as training/metrics.py computes it
        for a run."""
        return self.flops()[0] * self.tokens_per_second / self.inputs.gpus / self.inputs.device.peak

    @property
    def steps(self) -> float:
        if self.inputs.tokens:
            return self.inputs.tokens / self.tokens_per_step
        if self.cfg.training.stages:
            return len(stages.own_steps(self.cfg))
        return self.cfg.training.steps

    @property
    def checkpoint_bytes(self) -> int:
        """Return the bytes of the whole model's trained parameters and their optimizer state,
        float32. Each traced rank has its shard of the state."""
        return round(self.parameters * 4 * (1 + self.moments))

    @property
    def moments(self) -> float:
        """Return the bytes of optimizer state for each byte of a trained weight."""
        weights = sum(p.local_bytes for rank in self.ranks for p in rank.parameters.values())
        return sum(rank.before().get("optimizer state", 0) for rank in self.ranks) / weights

    @property
    def saved_by_freezing(self) -> float:
        """Return the bytes that training the frozen weights would take beyond what they take now,
        on each rank on average: their float32 masters, gradients and optimizer state."""
        as_masters = 4 * (2 + self.moments)
        now = DTYPES.get(self.cfg.training.param_dtype, torch.bfloat16).itemsize
        copies = self.cfg.parallelism.data_parallel_replicate
        return self.frozen * (as_masters - now) * copies / self.inputs.gpus

    @property
    def saved_by_rank(self) -> int:
        """Return the bytes of the rank's shards of weights and optimizer state."""
        sizes = self.step.before()
        return sizes.get("parameters", 0) + sizes.get("optimizer state", 0)

    @property
    def written_by_rank(self) -> int:
        """Return the bytes of a checkpoint that one rank writes. Ranks that hold the same shard
        share the work."""
        return self.saved_by_rank // self.cfg.parallelism.data_parallel_replicate

    @property
    def staging(self) -> int:
        """Return the bytes of host memory for the copies that one rank writes while training goes
        on; 0 without async_save."""
        return self.written_by_rank if self.cfg.checkpoint.async_save else 0

    def saving(self) -> tuple[float, float, float]:
        """Return the seconds of a save: to copy one rank's share to host memory, to write
        everything, and for which training stalls."""
        copy = self.saved_by_rank / self.inputs.device.host_gb_per_s / 1e9
        write = self.checkpoint_bytes / self.inputs.storage_gb_per_s / 1e9
        stall = copy + write
        if self.cfg.checkpoint.async_save:
            stall = max(0.0, copy - self.time.seconds)
        return copy, write, stall

    @property
    def mtbf(self) -> float:
        """Return the mean seconds between interruptions of the whole job."""
        return self.inputs.mtbf_gpu_hours * 3600 / self.inputs.gpus

    def goodput(self, interval: float) -> float:
        """Share of the time that trains, with a save after every `interval` seconds of work."""
        _, write, stall = self.saving()
        return expected(self.mtbf, stall, self.inputs.restart_seconds, interval, write)

    def gpu_hours(self) -> float:
        """Return the hours of all GPUs until the run ends, with what interruptions cost."""
        seconds = self.steps * self.time.seconds
        goodput = self.configured_goodput
        return self.inputs.gpus * seconds / goodput / 3600 if goodput else float("inf")

    @property
    def configured_interval(self) -> float:
        """Return the seconds of work between saves that checkpoint.interval asks for; the whole run
        without one."""
        step = self.time.seconds
        return self.cfg.checkpoint.interval * step or self.steps * step

    @property
    def configured_goodput(self) -> float:
        """Return the share of the time that trains with these saves, each written before the next."""
        _, write, _ = self.saving()
        return self.goodput(max(self.configured_interval, write))

    @property
    def best_interval(self) -> float:
        """Return the seconds of work between saves that lose least. A save is written before the
        next begins."""
        _, write, stall = self.saving()
        return max(best_interval(self.mtbf, stall), write)


def with_kernel(device: Device, cfg: Config, stack: Software = OURS) -> Device:
    """Return the device with the efficiencies of the kernels that training.attention chooses.
    "auto" means cuDNN where the device has a fast kernel, because PyTorch prefers cuDNN there.
    Documents, windows and gathered keys always run FlashAttention: 3 with "flash3", otherwise 2.
    With "auto", a stack other than ours keeps the efficiency that `Software.on` gave the device."""
    fast = device.fast_attention_efficiency
    chosen = cfg.training.attention
    if not fast or chosen == "flash" or (chosen == "auto" and stack != OURS):
        return device
    if cfg.data.mask_documents and chosen != "flash3":  # traced as if whole
        return device
    packed = fast if chosen == "flash3" else device.attention_efficiency
    rates = {"attention_efficiency": fast, "packed_attention_efficiency": packed}
    return device.model_copy(update=rates)


def with_margin(live: float, inputs: PlanInputs) -> float:
    """Return the bytes of the device that so many live bytes take."""
    if not inputs.on_gpu:
        return live
    return live * (1 + inputs.margin) + CONTEXT_GIB * GIB


def machine(cfg: Config, inputs: PlanInputs) -> Machine:
    """Return what the time of this configuration's step depends on."""
    return Machine(
        with_kernel(inputs.device, cfg, inputs.stack),
        inputs.per_host,
        cfg.compile.enabled and inputs.on_gpu,
        cfg.activation_checkpoint.mode == "selective",
        inputs.stack.of_run(cfg),
        Chosen.by(check.architecture(cfg.model)),
        gathers_once(cfg.parallelism) and not inputs.stack.early_gathers,
    )


def make_plan(cfg: Config, inputs: PlanInputs, stages: Stages | None = None) -> Plan:
    """Trace one step of this configuration and estimate its time. `cfg` has been checked for
    `inputs.gpus` processes. stages: those of earlier plans; equal ones are not traced again."""
    m = machine(cfg, inputs)
    stages = stages or Stages()
    if cfg.parallelism.pipeline_parallel > 1:
        pipeline = make_pipeline(cfg, inputs.gpus, inputs.on_gpu, m, stages, inputs.routing)
        return Plan(cfg, inputs, pipeline.worst, pipeline.time(pipeline.slowest), pipeline)
    step = stages.whole(cfg, inputs.gpus, inputs.per_host, inputs.on_gpu, inputs.routing)
    return Plan(cfg, inputs, step, estimate(step, m))
