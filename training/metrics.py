"""Report a run's metrics: a line on the console, `metrics.jsonl`, TensorBoard, Weights & Biases.

`metrics.jsonl` holds one JSON object per logged step. It stays one consistent series after a
restart: what a killed run wrote after the checkpoint it resumes from is dropped. Python writes
floats so that they read back bitwise equal.
"""

import contextlib
import logging
import math
import re
import resource
import statistics
import sys
import textwrap
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import tomli
import torch
from torch import nn
from tqdm import tqdm

from configs import schema
from configs.schema import InputError, redact
from configs.words import number_of, plural
from parallelisms import freezing
from parallelisms.boxes import shard_of
from parallelisms.mesh import Mesh
from training import digests, experts
from training.lines import GROUPS, Lines, json_number
from training.optimizers import sizes_kept

FILE = "metrics.jsonl"
# Rows: a regular expression, dense bfloat16 TFLOP/s of one device, source. The expression must
# match the whole of torch.cuda.get_device_name(), so that a slice of a GPU (MIG) or a laptop's
# variant is unknown rather than wrong.
PEAK_TFLOPS = (
    (
        r"NVIDIA A100[- ](SXM4|SXM|PCIE)-(40|80)GB|NVIDIA A100 80GB PCIe",
        312,
        "NVIDIA A100 data sheet",
    ),
    (r"NVIDIA H100 80GB HBM3", 989, "NVIDIA H100 data sheet, SXM: half of 1979 with sparsity"),
    (r"NVIDIA H100 PCIe", 756, "NVIDIA H100 data sheet (2022), PCIe: half of 1513 with sparsity"),
    (r"NVIDIA H100 NVL", 835, "NVIDIA H100 data sheet, NVL: half of 1671 with sparsity"),
    (r"NVIDIA H200", 989, "NVIDIA H200 data sheet, SXM: half of 1979 with sparsity"),
    (r"NVIDIA H200 NVL", 835, "NVIDIA H200 data sheet, NVL: half of 1671 with sparsity"),
    (
        r"NVIDIA GH200 (480GB|96GB HBM3|144G HBM3e)",
        989,
        "NVIDIA GH200 data sheet: half of 1979 with sparsity",
    ),
    (r"NVIDIA B200", 2250, "NVIDIA HGX B200 data sheet: half of 4500 with sparsity"),
    (r"NVIDIA H800", 989, "NVIDIA H800 data sheet: half of 1979 with sparsity"),
    (r"NVIDIA GB300", 2500, "NVIDIA GB300 NVL72 data sheet: half of 5000 with sparsity"),
    (r"NVIDIA B300.*", 2250, "NVIDIA HGX B300 data sheet: half of 4500 with sparsity"),
    (r"AMD Instinct MI355X", 2517, "AMD Instinct MI355X data sheet"),
    (r"NVIDIA GB200", 2500, "NVIDIA GB200 NVL72 data sheet: half of 5000 with sparsity"),
    (r"AMD Instinct MI300X( VF)?", 1307, "AMD Instinct MI300X data sheet"),
    (r"AMD Instinct MI325X( VF)?", 1307, "AMD Instinct MI325X data sheet"),
    (r"NVIDIA L40S", 362, "NVIDIA L40S data sheet"),
    (r"NVIDIA L4", 121, "NVIDIA L4 data sheet: half of 242 with sparsity"),
    (r"NVIDIA RTX 6000 Ada Generation", 364, "NVIDIA Ada Lovelace professional white paper"),
    (r"NVIDIA GeForce RTX 4090", 165, "NVIDIA Ada Lovelace white paper, accumulating in float32"),
    (r"NVIDIA GeForce RTX 3090", 71, "NVIDIA GA102 white paper, accumulating in float32"),
)

# Rows of the console line: a key of the logged values, and its format.
LINE = (
    ("loss", "loss {:.4f}"),
    ("validation_loss", "validation loss {:.4f}"),
    ("validation_bits_per_byte", "{:.4f} bits per byte"),
    ("grad_norm", "grad norm {:.3f}"),
    ("expert_load", "expert load {:.2f}"),
    ("lr", "lr {:.2e}"),
    ("tokens_per_second", "{:,.0f} tokens/s"),
    ("mfu", "MFU {:.1%}"),
    ("tflops_per_device", "{:.3g} TFLOP/s"),
    ("memory_gib", "{:.2f} GiB"),
    ("data_wait", "data wait {:.1%}"),
)

# The bar below the lines; with them it fits a terminal of 80 columns.
BAR = "{percentage:3.0f}% |{bar:30}| {n_fmt}/{total_fmt}  {elapsed}<{remaining}"


def tag(key: str) -> str:
    """Return the name of a key's curve in TensorBoard: its group, "/", the key."""
    for group, beginnings in GROUPS.items():
        if key.startswith(beginnings):
            return f"{group}/{key.removeprefix('evaluation/')}"
    return f"train/{key}"


def peak_flops(device_name: str, dtype: torch.dtype = torch.bfloat16) -> float | None:
    """Return the peak FLOP/s of one device for MFU, by the table, which is for bfloat16 only.

    None for any other dtype and for a device that is not in the table: no MFU is better than a
    wrong one.
    """
    if dtype == torch.bfloat16:
        for pattern, tflops, _ in PEAK_TFLOPS:
            if re.fullmatch(pattern, device_name):
                return tflops * 1e12
    return None


def memory_gib(device: torch.device) -> float:
    """Return the peak memory in GiB: on CUDA what the allocator held since the last call, on CPU
    what this process ever held."""
    if device.type == "cuda":
        peak = torch.cuda.max_memory_reserved(device)
        torch.cuda.reset_peak_memory_stats(device)
        return peak / 2**30
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage(2)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def frozen_weights(model: nn.Module) -> int:
    """Count the bytes of this rank's shards of frozen weights."""
    frozen = [param for param in model.parameters() if not param.requires_grad]
    return sum(shard_of(param).nbytes for param in frozen)


def state_of_training(optimizer: torch.optim.Optimizer) -> tuple[str, int, float]:
    """Return the size of this rank's training state: how many tensors the optimizer has for each
    weight ("2", or "1 to 2"); bytes of the shards of weights, gradients and these; and bytes of all
    of this per parameter, on average."""
    kept: dict[nn.Parameter, list[tuple[int, int]]] = {}
    for group in optimizer.param_groups:
        for param in group["params"]:
            kept[param] = sizes_kept(optimizer, group, param)
    share = 0
    whole = 0
    elements = 0
    for param, sizes in kept.items():
        # the gradient has the type of the weight
        size = 2 * param.element_size()
        share += size * shard_of(param).numel() + sum(here for here, _ in sizes)
        whole += size * param.numel() + sum(all_of_it for _, all_of_it in sizes)
        elements += param.numel()
    numbers = sorted({len(sizes) for sizes in kept.values()})
    shown = str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"
    return shown, share, whole / elements


def model_summary(
    family: Any,
    args: Any,
    model: nn.Module,
    mesh: Mesh,
    dtype: torch.dtype,
    training: schema.Training,
    optimizer: torch.optim.Optimizer,
) -> str:
    """Summarise the run in four lines: sizes of the model, of the mesh, of the training state, of a
    step.

    family: a `models/family.py::Family`; args: the model's numbers,
    its `Args`."""
    kept, share, mean = state_of_training(optimizer)
    # In a pipeline `model` is a part of the whole.
    trained = family.parameters(args)
    frozen = ""
    if family.trained_parameters:
        trained = family.trained_parameters(args)
    with torch.device("meta"):
        trained -= freezing.count(family.build(args), training.freeze)
    if trained < family.parameters(args):
        frozen = f", frozen weights {in_bytes(frozen_weights(model), 1024)}"
    whole = round(mean * trained)
    shown = {
        name: size
        for name, size in mesh.sizes.items()
        if name not in ("pp", "cp", "ep") or size > 1
    }
    ep = f"experts shared by groups of {shown.pop('ep')} ranks, " if "ep" in shown else ""
    dimensions = " x ".join(f"{name} {size}" for name, size in shown.items())
    return (
        f"model: {family.parameters(args):,} parameters; {family.describe(args)}\n"
        f"mesh: {dimensions} = {mesh.size} {plural(mesh.size, 'process', 'processes')} on "
        f"{mesh.device.type}, "
        f"{ep}computing in {str(dtype).removeprefix('torch.')}\n"
        f"state: weights, gradients and {kept} optimizer moments take {in_bytes(whole, 1024)} in "
        "all, "
        f"{in_bytes(share, 1024)} on this rank{frozen}\n"
        f"{_step_summary(training, mesh.dp_size)}"
    )


def _step_summary(training: schema.Training, dp_size: int) -> str:
    batch, local = training.global_batch_size, training.local_batch_size
    count = training.microbatches(dp_size)
    padded = count * dp_size * local - batch
    padding = f", {padded} of all rows padding" if padded else ""
    ranks = (
        f"each of {dp_size} data-parallel ranks" if dp_size > 1 else "the one data-parallel rank"
    )
    chosen = (
        " (chosen, because training.local_batch_size is not set)"
        if isinstance(local, schema.Derived)
        else ""
    )
    return (
        f"step: {batch * training.seq_len:,} tokens in {number_of(batch, 'sequence')} of {training.seq_len}; "
        f"{ranks} has {count} "
        f"microbatch{'es' * (count > 1)} of {local}{chosen}{padding}"
    )


UNITS = {
    1000: ("B", "kB", "MB", "GB", "TB"),
    1024: ("B", "KiB", "MiB", "GiB", "TiB"),
}


def in_bytes(count: float, step: int = 1000) -> str:
    """Format a number of bytes: in the decimal units in which networks and disks are sold, or
    (step = 1024) in the binary ones of memory."""
    *units, largest = UNITS[step]
    for unit in units:
        if count < step:
            return f"{count:.{len(str(step - 1))}g} {unit}"  # all digits of a whole number
        count /= step
    return f"{count:.4g} {largest}"


class MetricsWriter:
    """The writers of one run: a context manager that closes them. Make it when the step to resume
    from is known.

    On rank 0 `log` writes everywhere. On another rank it only writes the line, to that rank's log
    file.
    """

    def __init__(
        self,
        cfg: schema.Metrics,
        folder: Path,
        rank0: bool,
        start: int,
        steps: int,
        peak: float | None = None,
    ) -> None:
        """`start`: the step that was loaded, 0 for a fresh start. Everything logged for later steps
        is dropped.

        `peak`: FLOP/s of one device, from peak_flops. Raises InputError if wandb is configured and
        not installed.
        """
        self.cfg, self.folder, self.start, self.steps, self.peak = cfg, folder, start, steps, peak
        self.rank0 = rank0
        self.rates: list[float] = []
        self.bar = self.tensorboard = self.wandb = None
        self.draws = cfg.tensorboard
        self.records: dict[str, Lines] = {}  # by the name of the file
        if not rank0:
            return
        if cfg.wandb_project:
            self.wandb = _open_wandb(cfg.wandb_project, folder)
        for name in FILE, experts.FILE, digests.FILE:
            self.records[name] = Lines(folder / name, start)
        if sys.stderr.isatty():
            self.bar = tqdm(total=steps, initial=start, bar_format=BAR, file=sys.stderr)

    def log(self, step: int, values: dict[str, float], line: str = "") -> None:
        """Report values measured at the end of `step`: every key to the writers, and to the console
        `line`, or else the keys in LINE."""
        if self.peak and "tflops_per_device" in values:
            values = values | {"mfu": values["tflops_per_device"] * 1e12 / self.peak}
        if "tokens_per_second" in values:
            self.rates.append(values["tokens_per_second"])
        line = line or self._line(step, values)
        logging.getLogger("plumbline").info(f"step {step}/{self.steps}  {line}")
        if not self.rank0:
            return
        if self.bar is not None:
            self.bar.update(step - self.bar.n)
            self.bar.refresh()
        numbers = {key: json_number(value) for key, value in values.items()}
        self._record(FILE, {"step": step} | numbers)
        if self.draws:
            with self._curves_may_fail():
                self._draw(step, values)
        if self.wandb is not None:
            self.wandb.log(values, step=step)

    def _draw(self, step: int, values: dict[str, float]) -> None:
        curves = self.folder / "tensorboard"
        if self.tensorboard and self.folder.is_dir() and not curves.is_dir():
            logging.getLogger("plumbline").warning(
                f"{curves} was removed: the curves in it begin anew with step {step}"
            )
            with contextlib.suppress(OSError):  # of points that it could not write any more
                self.tensorboard.close()
            self.tensorboard = None
        if self.tensorboard is None:
            self.tensorboard = _open_tensorboard(curves, self.start)
        for key, value in values.items():
            self.tensorboard.add_scalar(tag(key), value, step)

    @contextlib.contextmanager
    def _curves_may_fail(self) -> Iterator[None]:
        """Keep the run alive if a full disk ends TensorBoard's curves, whose thread then raises at
        every call."""
        try:
            yield
        except OSError as error:
            self.draws = False
            self.tensorboard = None
            if not self.folder.exists():  # the run ends for that, and says it
                return
            logging.getLogger("plumbline").warning(
                f"{self.folder / 'tensorboard'} cannot be written ({error.strerror}): TensorBoard's "
                f"curves end here until the next start; {FILE} and tools.report have all steps"
            )

    def record_experts(self, counts: dict) -> None:
        """Add a line of `training/experts.py::ExpertLoad` to the run's `experts.jsonl`."""
        self._record(experts.FILE, counts)

    def record_gradients(self, step: int, of_rank: digests.Digests, mesh: Mesh) -> None:
        """Add a line to the run's `gradients.jsonl`, unless the step has computed no digests. Called
        by all ranks."""
        if not of_rank:
            return
        numbers = digests.of_all_stages(of_rank, mesh)
        pairs = {name: list(map(json_number, pair)) for name, pair in numbers.items()}
        self._record(digests.FILE, {"step": step, "gradients": pairs})

    def _record(self, name: str, line: dict) -> None:
        if not self.rank0:
            return
        for lines in self.records.values():
            lines.clean()
        self.records[name].add(line)

    def _line(self, step: int, values: dict[str, float]) -> str:
        parts = [
            form.format(values[key])
            for key, form in LINE
            if key in values and not (key == "tflops_per_device" and "mfu" in values)
        ]
        if "step_seconds" in values:
            seconds_left = (self.steps - step) * values["step_seconds"]
            parts.append(f"ETA {timedelta(seconds=math.ceil(seconds_left))}")
        return "  ".join(parts)

    def summary(self) -> str:
        """Return the run's speed: the median of the logged rates but the first (start-up,
        compilation)."""
        if not self.rates:
            return "no steps"
        return f"{statistics.median(self.rates[1:] or self.rates):,.0f} tokens/s"

    def close(self) -> None:
        for writer in (self.bar, *self.records.values()):
            if writer is not None:
                writer.close()
        if self.tensorboard is not None:
            with self._curves_may_fail():
                self.tensorboard.close()
        if self.wandb is not None:
            self.wandb.finish()

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _open_tensorboard(folder: Path, start: int):
    """Open a writer that hides the lines of an earlier process from step `start` + 1 on, and holds
    the run's configuration as text. The import takes 0.15 s."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder), purge_step=start + 1, flush_secs=20)
    if options := _options(folder.parent):
        writer.add_text("config", textwrap.indent(options, "    "), start)  # as code
    return writer


def _options(folder: Path) -> str:
    """Return the configuration of a run folder without its secrets; "" if it could not be written."""
    path = folder / "config.toml"
    return redact(path.read_text(encoding="utf-8")) if path.exists() else ""


def _open_wandb(project: str, folder: Path):
    """Open the W&B run of this run folder, which a restart continues, with all options. W&B itself
    ignores steps that it has seen before, and takes group, tags and notes from its own environment
    variables."""
    try:
        import wandb
    except ImportError:
        raise InputError(
            f'metrics.wandb_project = "{project}" needs the wandb package: pip install wandb, or '
            "leave the option empty"
        ) from None
    id_file = folder / "wandb_id.txt"
    if not id_file.exists():
        id_file.write_text(f"{time.time_ns():x}\n", encoding="utf-8")
    name = id_file.read_text(encoding="utf-8").strip()
    about = {"name": folder.name, "dir": str(folder), "config": tomli.loads(_options(folder))}
    return wandb.init(project=project, id=name, resume="allow", **about)
