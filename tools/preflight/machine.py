"""The checks that a rank can do alone: who is there, configuration, devices, software, speed, the
shared folder."""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import re
import shutil
import statistics
import subprocess
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

import train
from checkpoint import state
from checkpoint.lease import Lease
from configs import stages
from configs.load import dump, load_config
from configs.schema import Config, InputError
from configs.words import number_of
from models import MODELS, lora
from parallelisms import dp
from parallelisms import mesh as meshes
from parallelisms.lora import freeze
from tools.plan.device import MEMORY_EFFICIENCY
from tools.preflight import bucket
from tools.preflight.arguments import SLOW
from tools.preflight.probe import (
    Probe,
    ProbeRow,
    differences,
    failed,
    fine,
    judge_writing,
    least,
)
from training.metrics import in_bytes, peak_flops
from training.optim import build_optimizer
from training.optimizers import materialise

ROOT = Path(__file__).resolve().parent.parent.parent
# that may be taken of a GPU before we start: contexts of the driver, not someone's process
OTHERS_BYTES = 2 << 30
# of a matmul whose rate may be compared with a table: it takes 0.1 ms on an H100, far above a launch
LEAST_FLOPS = 1e11

# The environment that changes what the libraries do; compared over ranks. Never the whole: it may
# hold secrets.
SETTINGS = re.compile(
    r"(NCCL|TORCH|PYTORCH|GLOO|OMP|MKL|KMP|UCX|FI|CUBLAS|CUDNN|CUDA|HSA|RCCL)_\w+"
)
NOT_SETTINGS = re.compile(
    r"CUDA_VISIBLE_DEVICES|TORCH_ELASTIC_\w+|\w*(TOKEN|SECRET|PASSWORD|KEY)\w*"
)


# ranks: all are there -----------------------------------------------------------------------------


def measure_ranks(probe: Probe) -> dict:
    who = {"host": probe.host, "node": probe.node, "pid": os.getpid()}
    return who | asdict(probe.world)


def host_names(answers: dict[int, dict]) -> dict[int, str]:
    """Return host names by rank; of hosts with one name (containers) with their numbers."""
    nodes: dict[str, set] = defaultdict(set)
    for a in answers.values():
        nodes[a["host"]].add(a["node"])
    names = {}
    for r, a in answers.items():
        names[r] = f"{a['host']}/{a['node']}" if len(nodes[a["host"]]) > 1 else a["host"]
    return names


def judge_ranks(probe: Probe, answers: list[dict]) -> list[ProbeRow]:
    nodes: dict[str, list[int]] = defaultdict(list)
    for r, a in enumerate(answers):
        nodes[a["node"]].append(r)
    probe.leaders = [ranks[0] for ranks in nodes.values()]
    wrong = []
    if text := differences(probe, [a["size"] for a in answers]):
        wrong.append(f"WORLD_SIZE is {text}: start all hosts with the same NNODES and NGPU")
    if text := differences(probe, [len(nodes[a["node"]]) for a in answers]):
        wrong.append(f"the number of ranks on a host is {text}: start as many on each (NGPU)")
    elif text := differences(probe, [a["local_size"] for a in answers]):
        wrong.append(f"LOCAL_WORLD_SIZE is {text}: start as many ranks on each host (NGPU)")
    for ranks in nodes.values():
        for number, count in Counter(answers[r]["local_rank"] for r in ranks).items():
            if count > 1:
                same = [r for r in ranks if answers[r]["local_rank"] == number]
                wrong.append(
                    f"LOCAL_RANK {number} was given to {probe.named(same)}: each rank of a host "
                    "needs its own"
                )
    if wrong:
        return [failed(text) for text in wrong]
    each = len(answers) // len(nodes)
    return [fine(f"{len(answers)}, {each} on each of {number_of(len(nodes), 'host')}")]


# config: equal on all ranks -----------------------------------------------------------------------


def measure_config(probe: Probe) -> dict:
    """Check the configuration. Raises InputError for one that the run would refuse."""
    probe.cfg = load_config(probe.argv, probe.world.size, probe.world.local_size)
    _, probe.args = train.architecture(probe.cfg)
    values = {}
    for table, options in probe.cfg.model_dump(mode="json").items():
        for key, value in options.items():
            values[f"{table}.{key}"] = value
    digest = hashlib.sha256(dump(probe.cfg).encode()).hexdigest()
    return {"hash": digest[:12], "options": values}


def judge_config(probe: Probe, answers: list[dict]) -> list[ProbeRow]:
    rows = []
    for name in answers[0]["options"]:
        if text := differences(probe, [json.dumps(a["options"][name]) for a in answers]):
            rows.append(failed(f"{name} is {text}: give all ranks the same file and options"))
    of_stage = [f"this tests {line}" for line in stages.title(stages.at(probe.cfg, 0))]
    same = f"the same on all ranks ({answers[0]['hash']})"
    return rows or [fine("; ".join([same, *of_stage]))]


# devices: each rank has its own -------------------------------------------------------------------


def measure_devices(probe: Probe) -> dict:
    """Report this rank's device. Raises InputError where it has none."""
    probe.device = meshes.pick_device(probe.cfg.run, probe.world.local_rank)
    probe.dtype = dp.param_dtype(probe.cfg.training, probe.device)
    return device_table(probe.device)


def device_table(device: torch.device) -> dict:
    """Return the facts of a device; sizes in bytes, "" for unknown ones."""
    if device.type == "cpu":
        memory = dict(re.findall(r"(\w+):\s+(\d+) kB", _text("/proc/meminfo")))
        total, free = (int(memory.get(key, 0)) * 1024 for key in ("MemTotal", "MemAvailable"))
        model = re.search(r"model name\s*: (.*)", _text("/proc/cpuinfo"))
        name = model[1] if model else platform.machine()
        unknown = dict.fromkeys(("uuid", "bus", "visible", "driver"), "")
        return {"name": name, **unknown, "total": total, "free": free}
    free, total = torch.cuda.mem_get_info(device)
    about = torch.cuda.get_device_properties(device)
    driver, bus = nvidia_smi(device, "driver_version", "pci.bus_id")
    return {
        "name": about.name,
        "uuid": str(about.uuid),
        "bus": bus,
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "driver": driver,
        "total": total,
        "free": free,
    }


def _text(path: str) -> str:
    with suppress(OSError):
        return Path(path).read_text(encoding="utf-8", errors="replace")
    return ""


def nvidia_smi(device: torch.device, *fields: str) -> list[str]:
    """Query fields of `nvidia-smi --help-query-gpu`; "" for all where it cannot be run."""
    uuid = torch.cuda.get_device_properties(device).uuid
    command = [
        "nvidia-smi",
        f"--id=GPU-{uuid}",
        f"--query-gpu={','.join(fields)}",
        "--format=csv,noheader,nounits",
    ]
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
        values = [value.strip() for value in done.stdout.strip().split(",")]
        if done.returncode == 0 and len(values) == len(fields):
            return values
    return [""] * len(fields)


def judge_devices(probe: Probe, answers: list[dict]) -> list[ProbeRow]:
    rows = []
    users: dict[str, list[int]] = defaultdict(list)
    nodes: dict[str, list[int]] = defaultdict(list)
    for r, a in enumerate(answers):
        users[a["uuid"]].append(r)
        nodes[probe.hosts[r]].append(r)
    users.pop("", None)
    for uuid, ranks in sorted(users.items()):
        if len(ranks) > 1:
            text = (
                f"{probe.named(ranks)} share GPU {uuid}: start one process per GPU, and give all of "
                "them the same CUDA_VISIBLE_DEVICES"
            )
            rows.append(failed(text))
    for ranks in nodes.values():
        if text := differences(probe, [answers[r]["visible"] for r in ranks]):
            text = (
                f"CUDA_VISIBLE_DEVICES differs within a host ({probe.named(ranks)}): "
                f"{text.split(' on ')[0]} and others; each rank takes the GPU of its LOCAL_RANK from "
                "the same list"
            )
            rows.append(failed(text))
        buses = [answers[r]["bus"] for r in ranks]
        if "" not in buses and buses != sorted(buses):
            text = (
                f"the GPUs of {probe.named(ranks)} are permuted (PCI {', '.join(buses)}): ranks then "
                "use the wrong network card and peer; list CUDA_VISIBLE_DEVICES in ascending order, "
                "with CUDA_DEVICE_ORDER=PCI_BUS_ID"
            )
            rows.append(failed(text, blocks=False))
    if text := differences(probe, [a["name"] for a in answers]):
        text = f"not all are of one kind: {text}; all would wait for the slowest"
        rows.append(failed(text, blocks=False))
    for r, a in enumerate(answers):
        taken = a["total"] - a["free"]
        if a["uuid"] and taken > OTHERS_BYTES:
            text = (
                f"{probe.named([r])}: {in_bytes(taken)} of {in_bytes(a['total'])} are taken before the "
                "start, by another process: see nvidia-smi there"
            )
            rows.append(failed(text, blocks=False))
    low = least(a["free"] for a in answers)
    free, total = (in_bytes(answers[low][key]) for key in ("free", "total"))
    room = f"least free memory {free} of {total} on {probe.named([low])}"
    each = "each rank its own" if probe.device.type == "cuda" else "ranks of a host share it"
    return rows or [fine(f"{answers[0]['name']}, {each}; {room}")]


# same: software and settings ----------------------------------------------------------------------


# ranks that differ in these may hang or abort together
BLOCKING = ("torch", "nccl", "files", "param_dtype")


def measure_same(probe: Probe) -> dict:
    return {"versions": versions(probe), "settings": settings()}


def versions(probe: Probe) -> dict[str, str]:
    cuda = probe.device.type == "cuda"
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cuda": torch.version.cuda or "none",
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else "none",
        "driver": nvidia_smi(probe.device, "driver_version")[0] if cuda else "none",
        "param_dtype": str(probe.dtype).removeprefix("torch."),
        "commit": commit(),
        "files": files(),
    }


def commit() -> str:
    """Return the commit of the checkout; "none" where git is missing or this is no repository."""
    with suppress(OSError, subprocess.SubprocessError):
        command = ["git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
        return done.stdout.strip() or "none"
    return "none"


def files() -> str:
    """Return a hash of the code that runs: changed and new files count, as they do for Python."""
    digest = hashlib.sha256()
    packages = [path.parent for path in ROOT.glob("*/__init__.py") if path.parent.name != "tests"]
    paths = [ROOT / "train.py"]
    for package in packages:
        paths += package.rglob("*.py")
    for path in sorted(paths):
        digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def settings() -> dict[str, str]:
    return {
        k: v
        for k, v in os.environ.items()
        if SETTINGS.fullmatch(k) and not NOT_SETTINGS.fullmatch(k)
    }


def judge_same(probe: Probe, answers: list[dict]) -> list[ProbeRow]:
    rows = []
    for what, remedy in (
        ("versions", "install the same everywhere"),
        ("settings", "set it to one value on all ranks"),
    ):
        for name in sorted({name for a in answers for name in a[what]}):
            if text := differences(probe, [a[what].get(name) for a in answers]):
                rows.append(failed(f"{name} is {text}: {remedy}", blocks=name in BLOCKING))
    versions = ", ".join(
        f"{name} {value}" for name, value in answers[0]["versions"].items() if value != "none"
    )
    equal = len(answers[0]["settings"])
    return rows or [fine(f"{versions}; {equal} settings of the environment equal")]


# compute: arithmetic and memory of each device ----------------------------------------------------


def measure_compute(probe: Probe) -> dict:
    """Time the model's largest matmul, and a large copy in memory, on all ranks at once."""
    cuda = probe.device.type == "cuda"
    cfg = probe.cfg
    most_tokens = 8192 if cuda else 512
    tokens = min(cfg.training.local_batch_size * cfg.training.seq_len, most_tokens)
    k, n = MODELS[cfg.model.family].largest_weight(probe.args)
    n = max(1, n // cfg.parallelism.tensor_parallel)
    # not of ones: fewer bits change, which takes less power, so a GPU multiplies them faster
    a = torch.randn((tokens, k), dtype=probe.dtype, device=probe.device)
    b = torch.randn((k, n), dtype=probe.dtype, device=probe.device)
    seconds = best(partial(multiply, a, b), probe.device)
    copied_elements = 1 << 28 if cuda else 1 << 24  # 1 GB, 64 MB
    block = torch.ones(copied_elements, dtype=torch.float32, device=probe.device)
    other = torch.empty_like(block)
    copied = best(partial(other.copy_, block), probe.device)
    hint = ""
    if cuda:
        degrees, reasons = nvidia_smi(
            probe.device, "temperature.gpu", "clocks_throttle_reasons.active"
        )
        hint = f"{degrees} °C" if degrees else ""
        # bits: 8 hardware, 20 and 40 heat, 80 power brake (NVML, nvmlClocksEventReasons)
        with suppress(ValueError):
            hint += ", slowed down by heat or power" if int(reasons, 16) & 0xE8 else ""
    name = torch.cuda.get_device_name(probe.device) if cuda else "cpu"
    return {
        "shape": [tokens, k, n],
        "flops": 2 * tokens * k * n / seconds,
        "bytes": 2 * block.nbytes / copied,
        "hint": hint,
        "peak": peak_flops(name, dtype=probe.dtype),
    }


def multiply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a @ b


def best(fn: Callable[[], object], device: torch.device, rounds: int = 8) -> float:
    """Return the least seconds of a call: disturbances do not count. 20 calls warm a GPU up."""
    for _ in range(20 if device.type == "cuda" else 1):
        fn()
    seconds = []
    for _ in range(rounds):
        synchronise(device)
        began = time.perf_counter()
        fn()
        synchronise(device)
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def judge_compute(probe: Probe, answers: list[dict]) -> list[ProbeRow]:
    rows = []
    shape = " x ".join(map(str, answers[0]["shape"]))
    what = f"{str(probe.dtype).removeprefix('torch.')} matmul [{shape}]"
    for kind, key, unit, scale in (
        ("matmul", "flops", "TFLOP/s", 1e12),
        ("memory", "bytes", "GB/s copied", 1e9),
    ):
        rates = [a[key] / scale for a in answers]
        middle = statistics.median(rates)
        low = least(rates)
        slow = [r for r, rate in enumerate(rates) if rate < SLOW[kind] * middle]
        for r in slow[:8]:
            hint = f", {answers[r]['hint']}" if answers[r]["hint"] else ""
            text = (
                f"{kind}: {probe.named([r])}: {rates[r]:.3g} {unit}, {rates[r] / middle:.2f} of the "
                f"median {middle:.3g}{hint}; take that device out, or see what else runs on it"
            )
            rows.append(ProbeRow(probe.slow, text, blocks=False))
        wanted = _wanted(probe, kind) / scale
        if kind == "matmul" and 2 * math.prod(answers[0]["shape"]) < LEAST_FLOPS:
            wanted = 0.0
        if middle < SLOW[kind] * wanted:
            text = (
                f"{kind}: median {middle:.3g} {unit}, but {wanted:.3g} are expected of "
                f"{probe.table.name or 'the device'}: see clocks, power limit and MIG with nvidia-smi -q"
            )
            rows.append(failed(text, blocks=False))
        if not slow:
            peak = answers[0]["peak"] if kind == "matmul" else None
            share_of_peak = f", {middle * scale / peak:.0%} of its peak" if peak else ""
            text = (
                f"{what if kind == 'matmul' else kind}: median {middle:.3g} {unit}{share_of_peak}"
            )
            rows.append(fine(f"{text}, least {rates[low]:.3g} on {probe.named([low])}"))
    return rows


def _wanted(probe: Probe, kind: str) -> float:
    """Return the FLOP/s or bytes/s that --device promises; 0: nothing for this type."""
    if not probe.table or probe.dtype != torch.bfloat16:
        return 0.0
    if kind == "matmul":
        return probe.table.peak * probe.table.matmul_efficiency
    return probe.table.memory_gb_per_s * 1e9 * MEMORY_EFFICIENCY


# folder: where checkpoints go ---------------------------------------------------------------------


def measure_folder(probe: Probe) -> dict:
    """Write into a temporary folder next to the run's, all ranks at once, as a save does, and check
    that the others' files are visible."""
    probe.place = temporary_place(Path(probe.cfg.run.folder), probe.id)
    try:
        probe.place.mkdir(exist_ok=True)
    except OSError as error:
        why = f"{probe.place.parent} cannot be written ({error.strerror})"
        raise InputError(f"run.folder = {probe.cfg.run.folder!r}: {why}: choose another") from None
    share = checkpoint_bytes(probe.cfg, probe.args) / probe.world.size
    in_store = bucket.prefix(probe.cfg, probe.id)
    if in_store:
        return bucket.measure(probe, in_store, share)
    free = shutil.disk_usage(probe.place).free
    if probe.world.rank == 0:
        # before its token: who sees that one must be refused the lease
        probe.lease = Lease(probe.place / ".lease")
    room = free / 20 / probe.world.size
    size = int(max(1 << 22, min(share, 1 << 28, room)))
    data = os.urandom(1 << 20) * -(-size // (1 << 20))
    began = time.perf_counter()
    write(probe.place / f"data-{probe.world.rank}", data)
    seconds = time.perf_counter() - began
    (probe.place / f"token-{probe.world.rank}").touch()
    (probe.place / f"data-{probe.world.rank}").unlink()
    unseen = set(range(probe.world.size))
    deadline = time.monotonic() + probe.limit("folder") / 2
    while unseen and time.monotonic() < deadline:
        names = os.listdir(probe.place)
        unseen -= {int(name.removeprefix("token-")) for name in names if name.startswith("token-")}
        time.sleep(0.02 if unseen else 0)
    return {
        "place": str(probe.place),
        "free": free,
        "rate": len(data) / seconds,
        "unseen": sorted(unseen),
        "lock": _lock(probe) if not unseen else "",
    }


def temporary_place(run_folder: Path, name: str) -> Path:
    """Return a folder next to the run's, or in it if that is a mount point."""
    checkpoints = (run_folder / "checkpoints").resolve()
    there = [p for p in (checkpoints, *checkpoints.parents) if p.exists()]
    outside = [p for p in there if p not in (checkpoints, checkpoints.parent)]
    same = [p for p in outside if p.stat().st_dev == there[0].stat().st_dev]
    return (same or there)[0] / f".preflight-{name}"


def write(path: Path, data: bytes) -> None:
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _lock(probe: Probe) -> str:
    """Try to take rank 0's lease, on the last rank, which is on another host if there is one."""
    if probe.world.rank == 0 or probe.world.rank < probe.world.size - 1:
        return ""
    try:
        Lease(probe.place / ".lease").release()
    except InputError:
        return "refused"
    return "given twice"


def checkpoint_bytes(cfg: Config, args: Any) -> int:
    """Return the bytes of one checkpoint: weights (of a run with adapters theirs alone) and optimizer
    state, from the model and optimizer as the run builds them, on meta."""
    family, _ = train.architecture(cfg)
    with torch.device("meta"):
        model = family.build(args)
        if cfg.lora.rank:
            lora.add(model, cfg.lora)
        freeze(model, cfg.lora)
        optimizer = build_optimizer(model, family.decay, cfg.optimizer, family.matrices)
        materialise(optimizer)
    tensors = state.tensors(model, optimizer).values()
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def part_of_a_rank(probe: Probe) -> int:
    """Return the bytes of a checkpoint that a rank writes."""
    return checkpoint_bytes(probe.cfg, probe.args) // probe.world.size


def checkpoints_kept(cfg: Config) -> int:
    """Return the number of checkpoints that exist at most, including the one being written."""
    c = cfg.checkpoint
    steps = cfg.training.steps
    saves = -(-steps // c.interval) if c.interval else 1
    if not c.keep_last:
        return saves + 1
    kept_for_good = steps // c.keep_every if c.keep_every else 0
    return min(saves, c.keep_last + kept_for_good) + 1


def judge_folder(probe: Probe, answers: list[dict]) -> list[ProbeRow]:
    if "store" in answers[0]:
        return bucket.judge(probe, answers, checkpoint_bytes(probe.cfg, probe.args))
    apart = {r: a["unseen"] for r, a in enumerate(answers) if a["unseen"]}
    if apart:
        (r, unseen), *_ = apart.items()
        where = differences(probe, [a["place"] for a in answers])
        text = (
            f"{probe.named([r])} does not see in {answers[r]['place']} what {probe.named(unseen)} "
            f"wrote{f' (the folder is {where})' if where else ''}: run.folder must be one folder on a "
            f"file system that all hosts share; {len(apart)} ranks miss files of others"
        )
        return [failed(text)]
    size = checkpoint_bytes(probe.cfg, probe.args)
    kept = checkpoints_kept(probe.cfg)
    needed = kept * size
    free = min(a["free"] for a in answers)
    folder = Path(answers[0]["place"]).parent
    need = (
        f"{kept} checkpoints of {in_bytes(size)} (checkpoint.keep_last + 1) need {in_bytes(needed)}"
    )
    rows = [fine(f"{folder} is shared by all ranks, with {in_bytes(free)} free: {need}")]
    if few := [r for r, a in enumerate(answers) if a["free"] < needed]:
        text = f"{folder} has {in_bytes(free)} free ({probe.named(few)}), but {need}: make room or "
        rows = [failed(f"{text}keep fewer", blocks=free < 2 * size)]
    if answers[-1]["lock"] == "given twice":
        text = (
            f"{probe.named([len(answers) - 1])} was given the lease that rank 0 holds: file locks do "
            f"not work in {folder}, so two runs could write into one folder"
        )
        rows.append(failed(text, blocks=False))
    rates = [a["rate"] for a in answers]
    detail, slow = judge_writing(probe, rates, size, "writes and syncs")
    if slow:
        detail += f": see how that host reaches {folder}"
    rows.append(ProbeRow(probe.slow if slow else "ok", detail, blocks=False))
    return rows
