"""CUDA graphs (`compile.cuda_graphs`): the forward and backward passes of a step are recorded once,
and from then on the host starts them with one call.

A small model's kernels take less time than the host needs to launch them one by one, so its GPU
waits. A recording is a list of kernels with fixed addresses: it reads the batch at the recorded
one's addresses, and writes loss and gradients to theirs. So nothing in it may depend on numbers
that only the GPU knows, and no shape may change: `check.py` and `open_recorder` refuse what does.

Clipping and the optimizer stay outside. Their launches are few, and the learning rate is a number
of the host: in a recording it would be one of the GPU, in float32, and the weights others. So the
numbers are bitwise those of a run without graphs.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from configs.schema import Config, InputError
from parallelisms import dp
from training.further import AHEAD
from training.microbatches import raise_flags
from training.noise_scale import NoiseScale

# what a step reads of a batch (training/microbatches.py)
READ = ("tokens", "labels", "length", "loss_weights", *AHEAD)
Compute = Callable[[Callable, Any, dict[str, Tensor], Callable], Any]


def directly(gradients: Callable, job: Any, batch: dict[str, Tensor], flags: Callable) -> Any:
    """Compute gradients(job, batch, flags), kernel by kernel."""
    return gradients(job, batch, flags)


def open_recorder(cfg: Config, device: torch.device, args: Any) -> Compute:
    """Return the function that computes gradients: a `GraphRecorder` with compile.cuda_graphs, else
    `directly`, or a `NoiseScale` that calls it. Raises InputError as `check`."""
    check(cfg, device, args)
    if cfg.metrics.noise_scale_interval:
        return NoiseScale(directly, cfg.metrics.noise_scale_interval)
    return GraphRecorder(device) if cfg.compile.cuda_graphs else directly


def check(cfg: Config, device: torch.device, args: Any) -> None:
    """Raise InputError for a run that no recording on this device can hold. args: the model's
    numbers."""
    if not cfg.compile.cuda_graphs:
        return
    if device.type != "cuda":
        raise InputError(
            f"compile.cuda_graphs = true is for a GPU, and this run is on a {device.type}: set it "
            "to false"
        )
    is_narrow = dp.param_dtype(cfg.training, device) == torch.bfloat16
    widths = (args.dim, args.expert_dim) if getattr(args, "n_experts", 0) else ()
    if widths and not (is_narrow and all(width % 8 == 0 for width in widths)):
        raise InputError(
            "compile.cuda_graphs = true with experts needs their grouped GEMM, which works on "
            'training.param_dtype = "bfloat16" and widths that are multiples of 8: set '
            "compile.cuda_graphs = false"
        )


class GraphRecorder:
    """Runs the first step kernel by kernel, so that everything is compiled and allocated. The
    second is recorded, and it and all later ones are started as a whole. A batch of another shape
    runs kernel by kernel."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # recorded on a separate stream, on which the first step also runs
        self.stream = torch.cuda.Stream(device)
        self.batch: dict[str, Tensor] = {}  # on the GPU, which the recording reads
        self.graph: torch.cuda.CUDAGraph | None = None
        self.gradients: list[tuple[Tensor, Tensor]] = []  # parameter, what the recording leaves
        self.result: Any = None

    def __call__(
        self, gradients: Callable, job: Any, batch: dict[str, Tensor], flags: Callable
    ) -> Any:
        given = {name: batch[name] for name in READ if name in batch}
        if not self.batch:
            return self.first(gradients, job, given, flags)
        if shapes(given) != shapes(self.batch):
            return gradients(job, batch, flags)
        for name, tensor in given.items():
            self.batch[name].copy_(tensor, non_blocking=True)
        if self.graph is None:
            self.record(gradients, job)
        self.graph.replay()
        for parameter, gradient in self.gradients:
            parameter.grad = gradient
        return self.copied(flags())

    def first(
        self, gradients: Callable, job: Any, given: dict[str, Tensor], flags: Callable
    ) -> Any:
        self.batch = {name: tensor.to(self.device, copy=True) for name, tensor in given.items()}
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            result = gradients(job, self.batch, flags)
        torch.cuda.current_stream().wait_stream(self.stream)
        return result

    def record(self, gradients: Callable, job: Any) -> None:
        """Record one step; nothing is computed. Threads that pin memory meanwhile may go on, which
        is what thread_local is for."""
        self.graph = torch.cuda.CUDAGraph()
        mode = {"stream": self.stream, "capture_error_mode": "thread_local"}
        with torch.cuda.graph(self.graph, **mode):
            self.result = gradients(job, self.batch)
        self.gradients = [(p, p.grad) for p in job.model.parameters() if p.grad is not None]

    def copied(self, flags: Iterable[bool]) -> Any:
        """Copy the result of this step, apart from the next one's. Flags are raised in the copy."""
        result = self.result
        terms = result.terms.copied()
        raised = result.raised.clone()
        raise_flags(raised, flags)
        return result._replace(
            loss=result.loss.clone(), raised=raised, losses=result.losses.clone(), terms=terms
        )


def shapes(batch: dict[str, Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in batch.items()}
