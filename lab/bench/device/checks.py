"""Check that a run works on this device and computes what a plain model computes:

    python -m lab.bench device.checks [NAME ...] [--json out.json]          # all of CHECKS by default

The judge of all numbers is a plain model in float64 on the CPU: a loop of a few lines with
PyTorch's own cross-entropy, clipping and AdamW. It stays on the CPU for every device, so the
comparison is meaningful on a CPU too: training in float32, by `train.build` and `train.train_step`,
must agree with it to float32's rounding.

Each check takes the device and an empty folder, and returns an error for each thing that it looked
at; none may exceed the check's limit. tests/test_device.py runs them on the CPU, tests/test_gpu.py
on a GPU.
"""

import json
import math
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

import train
from checkpoint import state
from checkpoint.manager import CheckpointManager
from configs.load import load_config
from configs.schema import Checkpoint, Config
from lab.bench import harness
from lab.bench.device.shared import shared_gpu
from models.delta_net import GatedDeltaCore
from models.kernels import document_attention as masked
from models.kernels.delta_rule import recurrent
from models.kernels.float8_product import RECIPES, float8_linear
from models.kernels.soft_cap import soft_cap
from parallelisms import contract, delta_kernel, dp, tp
from parallelisms import mesh as meshes
from parallelisms.mesh import Mesh, close_mesh
from training import init
from training.loss import IGNORE
from training.optim import build_optimizer
from training.optimizers import materialise
from training.sample import sample

ROOT = Path(__file__).resolve().parent.parent.parent.parent
STEPS = 3
ROWS = 4
TOKENS = 48
VOCABULARY = 263
# Sides are multiples of 16, as GPU kernels want them, and all different. With an eps of 1e-8 Adam
# would amplify rounding where a gradient is near 0.
MODEL = (
    "--model.dim=96 --model.n_layers=3 --model.n_heads=6 --model.n_kv_heads=2 --model.head_dim=16 "
    f"--model.hidden_dim=208 --model.vocab_size={VOCABULARY} --data.tokenizer=bytes "
    f"--training.seq_len={TOKENS} "
    f"--training.loss_chunk_tokens=40 --training.global_batch_size={ROWS} "
    f"--training.local_batch_size={ROWS} "
    "--training.max_norm=0.5 --optimizer.lr=0.01 --optimizer.eps=1e-4"
).split()
ROUNDING = 1e-5  # of float32, relative, for a whole tensor: the limit of tests/parity.py too
DOCUMENTS = (1, 255, 45, 7, 64, 128, 1, 11)  # tokens of each, in two windows of 256
PATIENCE = 150  # seconds that the ranks of a check may take
AT_ONCE = 7
SHARED = ", which share one GPU, by gloo and host memory"
PROMPT, CONTEXT = (1, 5, 9, 2, 7), 12  # the sampled text becomes longer than the context


def config_words(device: torch.device) -> list[str]:
    return [*MODEL, "--training.param_dtype=float32", f"--run.device={device.type}"]


def config(device: torch.device, *options: str) -> Config:
    return load_config([*config_words(device), *options])


def batches() -> list[dict[str, Tensor]]:
    """Return one batch for each step, int64 [1, ROWS, TOKENS]; some labels do not count."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for _ in range(STEPS):
        window = torch.randint(0, VOCABULARY, (1, ROWS, TOKENS + 1), generator=generator)
        labels = window[..., 1:].clone()
        labels[..., 1, 5:20] = IGNORE
        made.append({"tokens": window[..., :-1].contiguous(), "labels": labels})
    return made


def whole(x: Tensor) -> Tensor:
    """Return a detached copy on the CPU; of a DTensor with the parts of all ranks."""
    x = x.detach()
    return (x.full_tensor() if isinstance(x, DTensor) else x).to("cpu", copy=True)


# What is compared: kind of number -> name -> tensor
Seen = dict[str, dict[str, Tensor]]
# (device, an empty folder) -> the error of each thing that was looked at
Run = Callable[[torch.device, Path], dict[str, float]]


def judge(cfg: Config) -> Seen:
    """Compute the numbers of a run of `cfg` with a plain float64 model on the CPU."""
    family, args = train.architecture(cfg)
    model = family.build(args)
    init.initialise(model, family.initial_values(args), cfg.run.seed)
    seen = {"initial weights": {n: whole(p) for n, p in model.named_parameters()}}
    model.double()
    optimizer = build_optimizer(model, family.decay, cfg.optimizer, family.matrices)
    seen["loss and norm"] = {}
    for step, batch in enumerate(batches()):
        logits = model(batch["tokens"][0], torch.arange(TOKENS))  # [ROWS, TOKENS, VOCABULARY]
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORE)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.training.max_norm)
        if step == 0:
            seen["logits"] = {"": whole(logits)}
            seen["gradients"] = {
                n: whole(p.grad) for n, p in model.named_parameters() if p.requires_grad
            }
        seen["loss and norm"] |= {f"loss {step}": whole(loss), f"norm {step}": whole(norm)}
        optimizer.step()
        optimizer.zero_grad()
    return seen | {"weights": {n: whole(p) for n, p in model.named_parameters()}}


def trained(cfg: Config, has_logits: bool = True) -> Seen:
    """Return the same numbers from `train.build` and `train.train_step` on the device. has_logits:
    false on a mesh whose ranks share sequences or layers, where no rank has them."""
    job = train.build(cfg)
    model = job.model
    device = job.mesh.device
    contract.verify(model, job.optimizer, job.mesh, {})
    seen = {
        "initial weights": {n: whole(p) for n, p in model.named_parameters()},
        "loss and norm": {},
    }
    if has_logits:
        tokens = batches()[0]["tokens"][0].to(device)
        positions = torch.arange(TOKENS, device=device)
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            seen["logits"] = {"": whole(model(tokens, positions, logits))}
        dp.reshard(model)

    def keep_gradients(*_: object) -> None:
        seen.setdefault(
            "gradients", {n: whole(p.grad) for n, p in model.named_parameters() if p.requires_grad}
        )

    job.optimizer.register_step_pre_hook(keep_gradients)
    for step, batch in enumerate(batches()):
        result = train.train_step(job, share_of(batch, job))
        numbers = {f"loss {step}": result.loss, f"norm {step}": result.grad_norm}
        seen["loss and norm"] |= {name: torch.tensor(number) for name, number in numbers.items()}
    return seen | {"weights": {n: whole(p) for n, p in model.named_parameters()}}


def share_of(batch: dict[str, Tensor], job: train.Job) -> dict[str, Tensor]:
    """Return this rank's part of a batch: its rows, in microbatches, and of every row its part of
    the sequence."""
    rows = ROWS // job.mesh.dp_size
    first = job.mesh.dp_rank * rows
    places = torch.cat(
        [torch.arange(place.start, place.stop) for place in job.mesh.token_ranges(TOKENS)]
    )
    size = job.cfg.training.local_batch_size
    return {
        name: x[0, first : first + rows][:, places].unflatten(0, (-1, size))
        for name, x in batch.items()
    }


def logits(h: Tensor, weight: Tensor, cap: float = 0.0) -> Tensor:
    """Return the logits of the head, on whole tensors; cap: their soft cap."""
    h, weight = (x.full_tensor() if isinstance(x, DTensor) else x for x in (h, weight))
    return soft_cap(h @ weight.t(), cap)


def differences(seen: Seen, wanted: Seen) -> dict[str, float]:
    """Return the largest relative error of each kind; infinite for initial weights that are not
    equal bit by bit."""
    errors = {}
    for kind, tensors in wanted.items():
        assert tensors.keys() == seen[kind].keys(), f"{kind}: {tensors.keys() ^ seen[kind].keys()}"
        pairs = [(seen[kind][name], tensor) for name, tensor in tensors.items()]
        if kind == "initial weights":
            equal = all(torch.equal(x, y) for x, y in pairs)
            errors[kind] = 0.0 if equal else math.inf
        else:
            errors[kind] = max(relative_error(x, y) for x, y in pairs)
    return errors


def relative_error(x: Tensor, wanted: Tensor) -> float:
    wanted = wanted.double()
    return ((x.double() - wanted).norm() / wanted.norm()).item()


# --------------------------------------------------------------------------------------------------
# the checks


ALL = ("logits", "loss and norm", "gradients", "weights", "initial weights")
LOSS = ("loss and norm",)  # in bfloat16, in which single gradients are some per cent off


def trains(*options: str, kinds: Collection[str] = ALL) -> Run:
    """Return a check of a run with these options on one rank. kinds: of numbers that count."""

    def check(device: torch.device, folder: Path) -> dict[str, float]:
        cfg = config(device, *options)
        return those(kinds, differences(trained(cfg), judge(cfg)))

    return check


def those(kinds: Collection[str], errors: dict[str, float]) -> dict[str, float]:
    return {kind: error for kind, error in errors.items() if kind in kinds}


def in_groups_of_one(*options: str, tensor_parallel: bool = False) -> Run:
    """Return a check of FSDP2, or FSDP2 and tensor parallelism, over groups of one rank. A run leaves
    them out there (`parallelisms.dp.apply`, `parallelisms.tp.apply`); here the collectives run, over
    NCCL on a GPU."""

    def parallelize(model: nn.Module, mesh: Mesh, cfg: Config, plan: dict[str, str]) -> nn.Module:
        for pattern, style in plan.items() if tensor_parallel else ():
            for name in [name for name, _ in model.named_modules() if fnmatchcase(name, pattern)]:
                row = tp.STYLES[style]
                parallelize_module(model.get_submodule(name), mesh.tp_mesh, row.build())
        # it checks whether the group has other ranks
        with mock.patch.object(Mesh, "size", 2):
            return dp.apply(model, mesh, cfg.training, cfg.parallelism)

    def check(device: torch.device, folder: Path) -> dict[str, float]:
        with mock.patch.object(train, "parallelize", parallelize):
            return trains(*options)(device, folder)

    return check


def control(device: torch.device, folder: Path) -> dict[str, float]:
    """Check that the comparison detects a coarser dtype: TF32 on a GPU that has it, bfloat16
    elsewhere."""
    has_tf32 = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
    options = [] if has_tf32 else ["--training.param_dtype=bfloat16"]
    with tf32(has_tf32):
        errors = trains(*options)(device, folder)
    return {"TF32 or bfloat16 goes unnoticed": float(not failures(errors, ROUNDING))}


@contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """Allow TF32 inside float32 matmuls on a GPU, or forbid it, as a run does."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if allowed else before)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def float8(device: torch.device, folder: Path) -> dict[str, float]:
    """Check GEMMs of 8 bits against the same rounded numbers multiplied in float32. A forward pass
    takes any number of tokens: sampling has one."""
    errors = {}
    for name, recipe in RECIPES.items():
        torch.manual_seed(0)
        how = {"device": device, "dtype": torch.bfloat16, "requires_grad": True}
        x = torch.randn(2, 96, 64, **how)
        weight = torch.randn(208, 64, **how)
        grad = torch.randn(2, 96, 208, device=device, dtype=torch.bfloat16)
        seen = []
        for emulate in (False, True):
            how_rounded = recipe._replace(emulate=emulate)
            out = float8_linear(x, weight, None, how_rounded)
            of_one = float8_linear(x[:, :1], weight, None, how_rounded)
            seen.append([out, of_one, *torch.autograd.grad(out, (x, weight), grad)])
        for what, got, want in zip(("output", "one token", "grad of x", "grad of weight"), *seen):
            errors[f"{name}: {what}"] = relative_error(got, want)
    return errors


def documents(compiled: bool) -> Run:
    """Return a check of attention inside documents by one operator, compared with one call per
    document: on a GPU `varlen_attn`."""
    return lambda device, folder: attention_errors(device, DOCUMENTS, compiled)


def attention_errors(
    device: torch.device, lengths: tuple[int, ...], compiled: bool
) -> dict[str, float]:
    """Relative errors in bfloat16 of output and gradients, with grouped heads, of two windows that
    hold documents of these numbers of tokens; compared with `one_by_one` in float32."""
    positions = torch.cat([torch.arange(n) for n in lengths]).view(2, -1)
    table = masked.Documents.of(positions, device)
    torch.manual_seed(0)
    how = {"device": device, "dtype": torch.bfloat16, "requires_grad": True}
    q = torch.randn(*positions.shape, 8, 64, **how)
    k = torch.randn(*positions.shape, 2, 64, **how)
    v = torch.randn(*positions.shape, 2, 64, **how)
    assert masked.fits_varlen(q) == (device.type == "cuda")
    attend = (
        torch.compile(masked.document_attention, fullgraph=True)
        if compiled
        else masked.document_attention
    )
    grad = torch.randn_like(q)
    got = attend(q, k, v, table)
    flat = [x.flatten(0, 1).float() for x in (q, k, v)]
    want = masked.one_by_one(*flat, table.starts).view_as(q)
    got_grads = torch.autograd.grad(got, (q, k, v), grad.to(got.dtype))
    want_grads = torch.autograd.grad(want, (q, k, v), grad.to(want.dtype))
    errors = {"output": relative_error(got, want)}
    for name, a, b in zip("qkv", got_grads, want_grads):
        errors[f"grad of {name}"] = relative_error(a, b)
    return errors


def delta_rule(device: torch.device, folder: Path) -> dict[str, float]:
    """Relative errors in bfloat16 of output, state and gradients of the gated delta rule, by what
    `training.delta_rule = "auto"` chooses, compared with the recurrence in float32: decays of heads and
    of channels, grouped heads, documents of one token among others."""
    first = torch.cat([torch.arange(n) for n in DOCUMENTS]).view(2, -1).to(device) == 0
    first[:, 0] = False  # both rows go on from a state
    errors = {}
    for of in ("heads", "channels"):
        given, state = delta_inputs(*first.shape, of, device)
        pair = []
        for core in (delta_kernel.chosen("auto", device), ByToken()):
            out, after = core.run(*given, first=first, state=state)
            generator = torch.Generator(device).manual_seed(1)
            weights = [
                torch.randn(x.shape, generator=generator, device=device) for x in (out, after)
            ]
            loss = (out * weights[0]).sum() + (after * weights[1]).sum()
            pair.append((out, after, *torch.autograd.grad(loss, (*given, state))))
        names = [
            "output",
            "state",
            *(f"grad of {x}" for x in ("q", "k", "v", "g", "beta", "state")),
        ]
        for name, got, want in zip(names, *pair, strict=True):
            errors[f"{name}, decays of {of}"] = relative_error(got, want)
    return errors


class ByToken(GatedDeltaCore):
    """The definition."""

    def run(
        self, *inputs: Tensor, first: Tensor | None = None, state: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        return recurrent(*inputs, first=first, state=state)


def delta_inputs(
    B: int, T: int, decays_of: str, device: torch.device, K: int = 2, H: int = 4, E: int = 64
) -> tuple[list[Tensor], Tensor]:
    """Return q, k, v, g and beta in the types of a bfloat16 step, and a state, all with gradients."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    q, k = F.normalize(normal(B, T, K, E), dim=-1), F.normalize(normal(B, T, K, E), dim=-1)
    v = normal(B, T, H, E)
    g = -F.softplus(normal(B, T, H, E) if decays_of == "channels" else normal(B, T, H))
    narrow = [x.bfloat16() for x in (q * E**-0.5, k, v)]
    wide = [g, normal(B, T, H).sigmoid(), normal(B, H, E, E)]
    *given, state = [x.requires_grad_() for x in (*narrow, *wide)]
    return given, state


def checkpoint(device: torch.device, folder: Path) -> dict[str, float]:
    """Check that a save holds the state of its call although training continues meanwhile, and
    comes back bit by bit, with the state of the generators. On a GPU the copies go into pinned
    memory."""
    job = train.build(config(device))
    materialise(job.optimizer)

    def manager() -> CheckpointManager:
        return CheckpointManager(Checkpoint(), folder, job.mesh, {"must_match": {}})

    def numbers() -> dict[str, Tensor]:
        live = state.tensors(job.model, job.optimizer)
        return {name: whole(x) for name, x in live.items() if not name.startswith("rng.")}

    first, *others = batches()
    checkpoints = manager()
    checkpoints.load(job.model, job.optimizer)
    unpinned = device.type == "cuda" and not checkpoints.staged.block.is_pinned()
    train.train_step(job, first)
    saved = numbers()
    checkpoints.save(1, job.model, job.optimizer, {"step": 1})
    drawn = torch.rand(3, device=device)
    for batch in others:
        train.train_step(job, batch)
    later = numbers()
    checkpoints.close()
    checkpoints = manager()
    progress = checkpoints.load(job.model, job.optimizer)
    loaded = numbers()
    drawn_again = torch.rand(3, device=device)
    checkpoints.close()
    return {
        "tensors that differ": sum(not torch.equal(loaded[name], x) for name, x in saved.items()),
        "tensors that training had not changed": sum(
            torch.equal(later[name], x) for name, x in saved.items()
        ),
        "other position": progress != {"step": 1},
        "other random numbers": not torch.equal(drawn, drawn_again),
        "buffers that are not pinned": int(unpinned),
    }


def sampling(device: torch.device, folder: Path) -> dict[str, float]:
    """Compare the likeliest tokens, with keys and values kept and without, with those of the
    float64 model."""
    cfg = config(device)
    job = train.build(cfg)
    family, args = train.architecture(cfg)
    plain = family.build(args)
    init.initialise(plain, family.initial_values(args), cfg.run.seed)
    wanted = sample(
        plain.double(), PROMPT, 20, CONTEXT, torch.device("cpu"), temperature=0, cache=False
    )
    errors = {}
    for name, cache in ("with a cache", True), ("without one", False):
        ids = sample(job.model, PROMPT, 20, CONTEXT, device, temperature=0, cache=cache)
        errors[f"tokens that differ {name}"] = sum(a != b for a, b in zip(ids, wanted, strict=True))
    return errors


# Mixtures whose experts are chosen by leads that rounding does not change, in widths that grouped
# GEMMs take.
EXPERTS = (
    "--model.family=qwen3",
    "--model.n_experts=4",
    "--model.experts_per_token=2",
    "--model.expert_dim=32",
    "--model.balance_loss=0",
)


def recorded(device: torch.device, folder: Path) -> dict[str, float]:
    """Compare steps with `compile.cuda_graphs` bit by bit with the same without; on a CPU, which
    has no graphs, both without. Of two microbatches, so that gradients also add up in a graph."""
    errors = {}
    two = f"--training.local_batch_size={ROWS // 2}"
    runs = {
        "float32": (),
        "bfloat16": ("--training.param_dtype=bfloat16", "--training.z_loss=1e-4"),
        "experts": (*EXPERTS, "--training.param_dtype=bfloat16"),
    }
    for name, options in runs.items():
        graphs = f"--compile.cuda_graphs={str(device.type == 'cuda').lower()}"
        plain = repeatable_steps(config(device, two, *options))
        replayed = repeatable_steps(config(device, two, *options, graphs))
        errors[f"{name}: numbers that differ"] = sum(
            not torch.equal(plain[key], x) for key, x in replayed.items()
        )
    return errors


def repeatable_steps(cfg: Config) -> dict[str, Tensor]:
    """Loss and norm of six steps by deterministic kernels, and the weights after them."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        job = train.build(cfg)
        seen = {}
        for step, batch in enumerate(batches() * 2):
            shape = (-1, cfg.training.local_batch_size, TOKENS)
            batch = {name: x.view(shape) for name, x in batch.items()}
            flags = train.Flags(stop=step == 4)
            result = train.train_step(job, batch, flags=lambda flags=flags: flags)
            seen[f"loss and norm {step}"] = torch.tensor([result.loss, result.grad_norm])
            seen[f"losses {step}"] = whole(result.losses)
            seen[f"flags {step}"] = torch.tensor(result.flags)
    finally:
        torch.use_deterministic_algorithms(False)
    return seen | {name: whole(p) for name, p in job.model.named_parameters()}


def on_a_mesh(*options: str, kinds: Collection[str] = ALL) -> Run:
    """Return a check of a run on the mesh of these options; every rank compares the parameters that it
    has. kinds: of numbers that count."""

    def check(device: torch.device, folder: Path) -> dict[str, float]:
        here = meshes.world()
        cfg = load_config([*config_words(device), *options], here.size, here.local_size)
        seen = trained(cfg, has_logits=False)
        wanted = judge(cfg)
        wanted.pop("logits")
        for kind in "initial weights", "gradients", "weights":
            own = seen[kind]
            wanted[kind] = {name: x for name, x in wanted[kind].items() if name in own}
        return those(kinds, differences(seen, wanted))

    return check


ONE_RAISES = """
import os, sys
import train
real, steps = train.train_step, []
def step(*args, **kwargs):
    steps.append(1)
    if len(steps) == 2 and os.environ["RANK"] == os.environ["FAILS"]:
        raise ValueError("a mistake of one rank alone")
    return real(*args, **kwargs)
train.train_step = step
sys.exit(train.main(sys.argv[1:]))
"""


def launcher(ranks: int) -> list[str]:
    """Return the command that starts a program on so many ranks of this host."""
    nproc = f"--nproc-per-node={ranks}"
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", nproc]


def error(device: torch.device, folder: Path) -> dict[str, float]:
    """Check that a rank that raises reports it and ends at once, although the others wait for it in
    a collective."""
    ranks = 2 if device.type == "cpu" else min(2, torch.cuda.device_count())
    program = folder / "one_raises.py"
    program.parent.mkdir(parents=True, exist_ok=True)
    program.write_text(ONE_RAISES)
    run = [
        *config_words(device),
        f"--data.source={ROOT}/lab/*.py",
        f"--data.cache={folder / 'cache'}",
        f"--run.folder={folder / 'run'}",
        TWO_ROWS,
        "--training.steps=4",
        "--validation.interval=0",
        "--debug.sample_tokens=0",
    ]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    place = os.environ | {"PYTHONPATH": path, "FAILS": str(ranks - 1)}
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        place.pop(name, None)
    how = {"cwd": ROOT, "env": place, "capture_output": True, "text": True}
    began = time.monotonic()
    done = subprocess.run([*launcher(ranks), str(program), *run], timeout=300, **how)
    return {
        "exit code 0": float(done.returncode == 0),
        "error not told": float("a mistake of one rank alone" not in done.stdout + done.stderr),
        "seconds beyond 120": max(0.0, time.monotonic() - began - 120),
    }


class Check(NamedTuple):
    run: Run
    limit: float  # of each error
    about: str
    ranks: int = 1  # one device each


BFLOAT16 = "--training.param_dtype=bfloat16"
TWO_ROWS = "--training.local_batch_size=2"
TP2 = "--parallelism.tensor_parallel=2"
CP2 = "--parallelism.context_parallel=2"
ULYSSES = "--parallelism.context_parallel_method=ulysses"
CHECKS = {
    "float32": Check(trains(), ROUNDING, "float32 without TF32, train.build and train.train_step"),
    "fsdp": Check(in_groups_of_one(), ROUNDING, "the same under FSDP2 on one rank"),
    "fsdp_and_tp": Check(
        in_groups_of_one(tensor_parallel=True),
        ROUNDING,
        "the same under FSDP2 and tensor parallelism on one rank",
    ),
    "bfloat16": Check(trains(BFLOAT16, kinds=LOSS), 0.05, "the same in bfloat16"),
    "float8": Check(float8, 0.01, "products of 8 bits, and the same in float32"),
    "control": Check(control, 0, "the comparison sees a coarser type"),
    "sampling": Check(sampling, 0, "the likeliest tokens"),
    "compiled": Check(
        trains("--compile.enabled=true"), ROUNDING, "float32, blocks compiled by inductor"
    ),
    "documents": Check(documents(False), 0.01, "attention inside documents, bfloat16"),
    "documents_compiled": Check(documents(True), 0.01, "the same compiled"),
    "delta_rule": Check(delta_rule, 0.02, "the gated delta rule and its recurrence, bfloat16"),
    "checkpoint": Check(checkpoint, 0, "a save during training, and a load"),
    "experts": Check(trains(*EXPERTS), ROUNDING, "MoE layers in float32"),
    "experts_bfloat16": Check(  # of a GPU, whose grouped GEMM takes no float32
        trains(*EXPERTS, BFLOAT16, kinds=LOSS), 0.05, "the same in bfloat16, by a grouped GEMM"
    ),
    "recorded": Check(recorded, 0, "CUDA graphs, compared bit by bit with steps without them"),
    "offload": Check(
        in_groups_of_one("--parallelism.cpu_offload=true"),
        ROUNDING,
        "weights and optimizer on the CPU, under FSDP2 on one rank",
    ),
    "error": Check(error, 0, "a rank that raises ends the run at once"),
    "fsdp_of_two": Check(on_a_mesh(TWO_ROWS), ROUNDING, "FSDP2 on two ranks", 2),
    "tensor_parallel": Check(on_a_mesh(TP2), ROUNDING, "tensor parallelism on two ranks", 2),
    "pipeline": Check(
        on_a_mesh("--parallelism.pipeline_parallel=2", TWO_ROWS),
        ROUNDING,
        "a pipeline of two stages",
        2,
    ),
    "context": Check(on_a_mesh(CP2, ULYSSES), ROUNDING, "context parallelism on two ranks", 2),
    "context_gather": Check(  # for float32 a GPU has no kernel
        on_a_mesh(CP2, BFLOAT16, kinds=LOSS),
        0.05,
        "the same in bfloat16, keys and values gathered",
        2,
    ),
    "expert_parallel": Check(
        on_a_mesh(*EXPERTS, "--parallelism.expert_parallel=2", TWO_ROWS),
        ROUNDING,
        "expert parallelism on two ranks",
        2,
    ),
    "four": Check(
        on_a_mesh(TP2, TWO_ROWS), ROUNDING, "FSDP2 and tensor parallelism on four ranks", 4
    ),
}


def failures(errors: dict[str, float], limit: float) -> list[str]:
    """Return the errors above the limit, or not a number."""
    return [f"{name} {error:.2g}" for name, error in errors.items() if not error <= limit]


def here(name: str, device: torch.device) -> tuple[list[str], dict[str, float]]:
    """Return the errors above the limit, and all errors, of a check in this process."""
    check = CHECKS[name]
    with tempfile.TemporaryDirectory() as folder:
        errors = check.run(device, Path(folder))
    close_mesh()
    return failures(errors, check.limit), errors


def apart(name: str) -> tuple[list[str], dict[str, float]]:
    """Return the same for a check that takes several ranks, in separate processes. The largest
    error of any rank counts."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"PLUMBLINE_ERRORS": folder}
        ranks = CHECKS[name].ranks
        command = [*launcher(ranks), "-m", "lab.bench", "device.checks", name]
        how = {"cwd": ROOT, "env": environment, "capture_output": True, "text": True}
        try:
            done = subprocess.run(command, timeout=PATIENCE, **how)
        except subprocess.TimeoutExpired:
            return [f"its ranks gave no result in {PATIENCE} s"], {}
        written = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("*.json"))]
    if raised := [text for text in written if isinstance(text, str)]:
        return raised, {}
    if len(written) < ranks:
        return [f"its ranks ended with {done.returncode}: {done.stderr[-2000:]}"], {}
    errors = {}
    for what in written[0]:
        errors[what] = max(of_rank[what] for of_rank in written)
    return failures(errors, CHECKS[name].limit), errors


def share_the_gpu(check: Check) -> bool:
    """Return True if there are fewer GPUs than this check has ranks."""
    return torch.cuda.is_available() and torch.cuda.device_count() < check.ranks


def outcomes(
    names: list[str], device: torch.device
) -> Iterator[tuple[str, tuple[list[str], dict[str, float]]]]:
    """Return the errors above the limit, and all errors, of each check. On a GPU those that take
    several ranks run at the same time, since nearly all of their seconds are those of starting."""
    size = meshes.world().size
    with ThreadPoolExecutor(AT_ONCE if device.type == "cuda" else 1) as pool:
        started = {
            name: pool.submit(apart, name)
            for name in names
            if device.type == "cuda" and CHECKS[name].ranks > size
        }
        for name in names:
            if name in started:
                yield name, started[name].result()
            else:
                yield name, apart(name) if CHECKS[name].ranks > size else here(name, device)


def as_rank(name: str, place: Path) -> int:
    """Run a check on this rank, and write its errors for `apart`, or the exception that it raised:
    the launcher reports only that a rank has failed."""
    rank = meshes.world().rank
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    try:
        with shared_gpu() if share_the_gpu(CHECKS[name]) else nullcontext():
            _, seen = here(name, device)
    except Exception as error:
        seen = f"rank {rank}: {error!r}"
        traceback.print_exc()
    (place / f"{rank}.json").write_text(json.dumps(seen))
    return int(isinstance(seen, str))


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(CHECKS)}")
    args = parser.parse_args()
    if unknown := set(args.names) - CHECKS.keys():
        parser.error(f"{', '.join(sorted(unknown))}: unknown; there are {', '.join(CHECKS)}")
    if place := os.environ.get("PLUMBLINE_ERRORS"):  # a rank of `apart`
        return as_rank(args.names[0], Path(place))
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    rows = []
    wrong = []
    for name, (too_large, errors) in outcomes(args.names or list(CHECKS), device):
        check = CHECKS[name]
        wrong += [f"{name}: {what}" for what in too_large]
        measured = "; ".join(f"{what} {error:.2g}" for what, error in errors.items())
        about = f"{check.about}{SHARED if share_the_gpu(check) else ''}"
        rows.append([name, about, measured, f"{check.limit:g}", "FAILED" if too_large else "ok"])
        print(" | ".join(rows[-1]), flush=True)
    columns = ["check", "what", "largest relative errors, or counts", "limit", "result"]
    harness.report(
        "Does it run", columns, rows, "Compared with a plain float64 model on the CPU.", args.json
    )
    if wrong:
        print(f"above the limit: {'; '.join(wrong)}", file=sys.stderr)
    return 1 if wrong else 0
