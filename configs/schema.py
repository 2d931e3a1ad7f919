"""Every option of a run: one frozen model per TOML table, every field typed, bounded and explained in one line.

This file is the only list of options. `--help`, the strict parser, the JSON schema for editors and the tests are all
derived from it, so an option that is not here does not exist; only the numbers of a model come from its family's table
OPTIONS. It imports nothing of ours but the registry of families and never imports torch: a wrong config is reported in well
under a second. Rules that span tables are rows in `configs/check.py`.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, create_model, field_validator

from models import FAMILIES, tables

DType = Literal["auto", "float32", "bfloat16"]


class InputError(Exception):
    """A configuration, corpus or checkpoint that cannot be used. The message is a sentence for a person (what, where,
    what to do); `train.py` and the tools print it without a traceback and exit with 2."""


# What must not be written down anywhere: the password or token of a URL, in front of its host or among its parameters,
# and tokens that have a known shape (Hugging Face, GitHub, OpenAI, AWS).
URL_USER = re.compile(r"(\w://)[^/\s@'\"]+@")
SECRETS = (
    (URL_USER, r"\1***@"),
    (re.compile(r"([?&][\w-]*(?:token|key|secret|passw|signature|credential)[\w-]*=)[^&\s'\"#]+", re.I), r"\1***"),
    (re.compile(r"\b(?:hf_\w{20,}|gh[a-z]_\w{30,}|sk-[\w-]{20,}|AKIA[0-9A-Z]{16})"), "***"),
)


def redact(text: str) -> str:
    """The text without secrets; for everything that goes to a file or a console and is not ours word for word."""
    for pattern, instead in SECRETS:
        text = pattern.sub(instead, text)
    return text


def _as_tuple(value: object) -> object:
    """TOML has lists only; strict validation wants the tuple."""
    return tuple(value) if isinstance(value, list) else value


def _path(value: str) -> str:
    if any(ord(c) < 32 or ord(c) == 127 for c in value):
        raise ValueError("must not contain control characters such as a newline")
    if re.search(r"\$[A-Za-z_{]", value):
        raise ValueError("must be written out: environment variables are not expanded")
    return value


def _folder(value: str) -> str:
    """What a shell would have expanded would become a folder of that name (data/ does expand ~ in its own options)."""
    if value.startswith("~"):
        raise ValueError("must be written out: ~ is not expanded")
    return value


PathText = Annotated[str, AfterValidator(_path)]
Decay = Annotated[float, Field(ge=0, lt=1)]


class Table(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    @field_validator("*", mode="before")
    @classmethod
    def _fits_64_bits(cls, value: object) -> object:
        """TOML promises 64-bit integers, and so does every tensor and file that such a number ends in."""
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise ValueError("must fit into 64 bits")
        return value

    @field_validator("*", mode="before")
    @classmethod
    def _has_no_password(cls, value: object) -> object:
        """Every option is written to the run's folder and into checkpoints."""
        if isinstance(value, str) and URL_USER.search(value):
            raise ValueError("must not contain a user or password: options are written to files (~/.netrc can hold it)")
        return value


class Run(Table):
    folder: Annotated[PathText, AfterValidator(_folder)] = Field("runs/debug", min_length=1, max_length=240)
    """Folder of this run: config, metrics, logs, TensorBoard, checkpoints. Run again with the same to resume."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Seed of the initial weights and of the order of the data. Same seed, same run, whatever the mesh."""
    deterministic: bool = False
    """Use deterministic kernels only (slower on CUDA; on CPU the same mesh already repeats bitwise)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train; auto: CUDA when a GPU is visible, otherwise CPU."""
    init_timeout_seconds: int = Field(600, ge=1, le=86400)
    """How long a collective may take before the first step ends (start-up, compilation, loading a checkpoint)."""
    step_timeout_seconds: int = Field(300, ge=1, le=86400)
    """How long a collective may take afterwards, and a step: a hung or dead rank is noticed within this time."""
    max_minutes: float = Field(0.0, ge=0)
    """Stop with a checkpoint, as a signal does, so many minutes after the processes were born; 0: no limit."""
    max_failures_at_step: int = Field(3, ge=0)
    """Do not start again (exit code 76) after so many starts in a row failed at the same step; 0: always start."""
    gc_interval: int = Field(50, ge=1)
    """Collect Python garbage every this many steps, on all ranks at once, instead of at random moments."""


class Architecture(Table):
    family: Literal[FAMILIES] = "llama"
    """Which file of models/ defines the model."""
    flavor: str = "debug"
    """A row of FLAVORS in that file (debug, 8B, ...); a name that it does not have is answered with the list."""


def _overrides() -> dict:
    """A field for every number that some family lets the user override; None is the flavor's number. Two families that have
    an option of the same name mean the same by it. Raises ValueError where their types or bounds differ."""
    fields: dict = {}
    for family in FAMILIES:
        for name, (kind, bounds, explanation) in tables(family).OPTIONS.items():
            field = (kind | None, Field(None, description=explanation, **bounds))
            if repr(fields.setdefault(name, field)) != repr(field):
                raise ValueError(f"models/{family}.py: OPTIONS has another {name} than another family")
    return fields


Model = create_model("Model", __base__=Architecture, **_overrides())


def _ascending(steps: tuple[tuple[int, float], ...]) -> tuple[tuple[int, float], ...]:
    if [step for step, _ in steps] != sorted({step for step, _ in steps}):
        raise ValueError("must name steps in ascending order, each once")
    return steps


def _named_once(rows: tuple) -> tuple:
    names = [row.name for row in rows]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"must give each row another name; there are several called {', '.join(twice)}")
    return rows


def _short_name(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_.-]{1,60}", value):
        raise ValueError("must be 1 to 60 letters, digits, dots, dashes or underscores")
    return value


Name = Annotated[str, AfterValidator(_short_name)]
Step = Annotated[int, Field(ge=1)]
Weight = Annotated[float, Field(ge=0)]


class MixtureRow(Table):
    name: Name
    """What metrics, messages and the audit call this source."""
    source: PathText = Field(min_length=1)
    """What it is, as data.source."""
    weight: Weight
    """Its tokens in proportion to the sum of all weights."""
    schedule: Annotated[
        tuple[Annotated[tuple[Step, Weight], BeforeValidator(_as_tuple)], ...],
        BeforeValidator(_as_tuple), AfterValidator(_ascending),
    ] = ()  # fmt: skip
    """Other weights later on: [[step, weight], ...], each from after that many steps of the run."""
    max_epochs: float = Field(0.0, ge=0)
    """How often the source may be read in the whole run; 0: any number of times."""


class ValidationSet(Table):
    name: Name
    """What metrics call this set."""
    source: PathText = Field(min_length=1)
    """What it is, as data.source: all of it is used; of a prepared folder with held-out documents those."""


class Data(Table):
    source: PathText = Field("stdlib", min_length=1)
    """What to train on: stdlib (Python's own library), a file, folder or glob, hf:NAME, or a prepared folder."""
    mixture: Annotated[tuple[MixtureRow, ...], BeforeValidator(_as_tuple), AfterValidator(_named_once)] = ()
    """Several sources instead of one: tables [[data.mixture]] with name, source, weight, schedule, max_epochs."""
    allow_splice: bool = False
    """On resume, go on where data, weights, seed, seq_len or global_batch_size have changed; the change is recorded."""
    skip: Annotated[
        tuple[Annotated[tuple[Step, Step], BeforeValidator(_as_tuple)], ...],
        BeforeValidator(_as_tuple), AfterValidator(_ascending),
    ] = ()  # fmt: skip
    """Batches never to train on: [[step, count], ...], after that step jump over the batches of so many steps."""
    mask_documents: bool = False
    """Restart attention and positions at each document's first token, and count no loss from one into the next."""
    tokenizer: PathText = Field("bpe", min_length=1)
    """bpe (trained on the source at first use), bytes, or the path of tiktoken ranks or of a tokenizer.json."""
    bpe_vocab_size: int = Field(4096, ge=257, le=1_000_000)
    """Vocabulary of the trained BPE, special tokens included; used by tokenizer = "bpe" only."""
    cache: PathText = Field("", max_length=240)
    """Folder of tokenised corpora; empty: ~/.cache/plumbline."""
    text_field: str = Field("text", min_length=1, max_length=200)
    """Where JSON lines, Parquet and Hugging Face datasets have the text: a key, a column."""
    add_bos: bool = False
    """Begin each document with the tokenizer's begin-of-text token."""
    add_eos: bool = True
    """End each document with the tokenizer's end-of-text token."""
    max_document_bytes: int = Field(0, ge=0)
    """Leave out documents of more bytes of UTF-8, and count them; 0: none."""
    skip_failed: int = Field(0, ge=0)
    """Documents that may be unreadable (not UTF-8, not JSON, ...) before preparation (or with stream one stream) stops."""
    validation_fraction: float = Field(0.01, ge=0, lt=0.5)
    """Share of the documents, chosen by hash, that is held out of training for validation."""
    verify: bool = False
    """Before the first step read the tokenised corpus whole, once per host, and compare its hashes (seconds per GB)."""
    stream: bool = False
    """Tokenise data.source while training, without preparation; docs/data.md says what that cannot do."""
    streams: int = Field(64, ge=1, le=65536)
    """With stream: logical streams, part of the order as the seed is; the data-parallel ranks must divide them."""
    stream_epochs: int = Field(0, ge=0)
    """With stream: how often to read the source; the run ends when a stream has read its share; 0: without end."""
    retries: int = Field(5, ge=0)
    """With stream: how often to open again what cannot be read, before the run saves a checkpoint and fails."""
    retry_seconds: float = Field(1.0, ge=0, le=600)
    """With stream: pause before the first of them, doubled before each next, up to 30."""
    workers: int = Field(0, ge=0, le=64)
    """Loader processes per rank; 0: read in the training process (a batch costs well under a millisecond per rank)."""
    prefetch: int = Field(2, ge=1, le=64)
    """Batches that each worker keeps ready."""
    timeout_seconds: int = Field(120, ge=1)
    """How long to wait for a loader worker, or for a stream, before the run fails."""


class Training(Table):
    steps: int = Field(100, ge=1)
    """Optimizer steps of the whole run."""
    seq_len: int = Field(256, ge=1)
    """Tokens per sequence."""
    global_batch_size: int = Field(8, ge=1)
    """Sequences per optimizer step, over all ranks and micro-batches."""
    local_batch_size: int = Field(8, ge=1)
    """Sequences per data-parallel rank and micro-batch; gradient accumulation follows from the two."""
    param_dtype: DType = "auto"
    """Type of the weights in forward and backward (float32 in the optimizer); auto: bfloat16 where hardware has it."""
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type in which gradients are summed over data-parallel ranks."""
    float8: Literal["none", "tensorwise", "rowwise"] = "none"
    """Scales for multiplying the blocks' linear layers in float8 (needs torchao, and a GPU since Ada or Hopper)."""
    attention: Literal["auto", "flash", "flash3", "cudnn"] = "auto"
    """GPU kernel of causal attention; auto: PyTorch's choice. `python -m tools.bench.attention` measures them."""
    max_norm: float = Field(1.0, ge=0)
    """Clip the global gradient norm to this; 0: no clipping."""
    loss_chunk_tokens: int = Field(1024, ge=1)
    """Tokens whose float32 logits exist at a time in the loss."""
    max_skipped_steps: int = Field(3, ge=0)
    """Steps in a row that are skipped (a non-finite loss or gradient, a spike) before the run stops."""
    spike_threshold: float = Field(0.0, ge=0)
    """Warn of a loss or gradient norm so many deviations above the median of the last 128 steps (6, say); 0: off."""
    skip_spikes: bool = False
    """Change no weight in a step whose gradient norm is such a spike."""


class Optimizer(Table):
    kind: Literal["adamw", "sgd"] = "adamw"
    """The update rule."""
    lr: float = Field(3e-4, gt=0)
    """Peak learning rate."""
    betas: Annotated[tuple[Decay, Decay], BeforeValidator(_as_tuple)] = (0.9, 0.95)
    """Decay rates of AdamW's two moments."""
    eps: float = Field(1e-8, gt=0)
    """Added to AdamW's denominator."""
    weight_decay: float = Field(0.1, ge=0)
    """Decoupled decay of matrices; norms are never decayed."""
    momentum: float = Field(0.0, ge=0, lt=1)
    """Momentum of SGD."""


class LRSchedule(Table):
    kind: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """Shape after the warm-up; wsd: constant, then linear decay over the last decay_fraction."""
    warmup_steps: int = Field(0, ge=0)
    """Steps of linear warm-up from 0."""
    min_ratio: float = Field(0.1, ge=0, le=1)
    """Learning rate at the last step, as a share of the peak."""
    decay_fraction: float = Field(0.2, gt=0, le=1)
    """Share of the run over which wsd decays."""


class Parallelism(Table):
    data_parallel_replicate: int = Field(1, ge=1)
    """Replicas of the (sharded) model: with data_parallel_shard = 1 plain data parallel, otherwise HSDP."""
    data_parallel_shard: Literal[-1] | Annotated[int, Field(ge=1)] = -1
    """Ranks over which FSDP2 shards weights, gradients and optimizer; -1: what is left of the world."""
    tensor_parallel: int = Field(1, ge=1)
    """Ranks of one host that split every matrix (with sequence parallel norms and a vocabulary-parallel loss)."""
    tensor_parallel_across_hosts: bool = False
    """Allow tensor parallelism to cross hosts, where the network makes it slow."""
    async_tensor_parallel: bool = False
    """Send pieces of tensor parallelism's gathers and scatters behind its products (compiled blocks, GPUs with NVLink)."""
    reshard_after_forward: bool | Literal["default"] | Annotated[int, Field(ge=2)] = "default"
    """Free gathered weights after forward; default: all but the last; N: keep them sharded over N ranks (a host's)."""
    keep_gathered: int = Field(0, ge=0)
    """Last blocks whose weights stay gathered from forward to backward; `tools.plan` says for how many there is room."""
    cpu_offload: bool = False
    """Keep weights, gradients and optimizer state in CPU memory and stream them to the GPU."""
    accumulate_gradients: Literal["whole", "sharded"] = "whole"
    """Over micro-batches; whole: reduce once a step; sharded: after each, which keeps one shard and communicates more."""
    prefetch: int = Field(0, ge=0, le=8)
    """Blocks whose weights FSDP2 gathers ahead explicitly; 0: its implicit prefetch of the next one."""


class ActivationCheckpoint(Table):
    mode: Literal["none", "full", "every_n", "selective"] = "none"
    """What backward recomputes; selective: all but the results of matmuls, attention and collectives."""
    every_n: int = Field(2, ge=2)
    """With mode every_n: checkpoint each n-th block."""


class Compile(Table):
    enabled: bool = False
    """torch.compile each transformer block."""
    backend: Literal["inductor", "aot_eager", "eager"] = "inductor"
    """Backend of torch.compile."""


class Checkpoint(Table):
    interval: int = Field(100, ge=0)
    """Save every this many steps (and at the end); 0: only at the end."""
    async_save: bool = True
    """Write checkpoints in the background; training waits only for the copy to host memory (which keeps the copy)."""
    keep_last: int = Field(3, ge=0)
    """Whole checkpoints to keep; older ones are removed after a newer one is published; 0: keep all."""
    keep_every: int = Field(0, ge=0)
    """Also keep every checkpoint whose step this divides; 0: none."""
    load_step: int = Field(-1, ge=-1)
    """Resume from this step of the run's own checkpoints; -1: the newest whole one, or afresh when there is none."""
    load_path: PathText = Field("", max_length=1000)
    """Where the run has no checkpoint yet, start at step 0 from the weights of this one (or of this run's folder)."""
    load_path_content: Literal["model", "model+optimizer"] = "model"
    """What to take from load_path."""
    exclude_from_loading: Annotated[tuple[str, ...], BeforeValidator(_as_tuple)] = ()
    """Tensors not to take from load_path, by patterns such as "model.output.*"; they keep their initial values."""
    load_hf: PathText = Field("", max_length=1000)
    """Where the run has no checkpoint yet, start at step 0 from the weights of this Hugging Face folder."""
    export_hf: Literal["", "float32", "bfloat16"] = ""
    """At the end of the run also write the model in this type for Hugging Face, to <run.folder>/hf; empty: no."""
    verify_on_load: bool = True
    """Compare the hash of every block that is read, before the model changes."""
    max_failures: int = Field(3, ge=0)
    """Stop after so many failed saves in a row (disk full, say; each is tried again at its interval); 0: only warn."""


class Metrics(Table):
    interval: int = Field(10, ge=1)
    """Log every this many steps."""
    tensorboard: bool = True
    """Write TensorBoard scalars to <run.folder>/tensorboard."""
    wandb_project: str = ""
    """Also log to this Weights & Biases project (needs `pip install wandb`); empty: off."""
    straggler_interval: int = Field(50, ge=0)
    """Name ranks that the others wait for, every this many steps; 0: never."""
    progress: Literal["auto", "on", "off"] = "auto"
    """Progress bar; auto: on a terminal."""
    peak_tflops: float = Field(0.0, ge=0)
    """Peak TFLOP/s of one device for MFU; 0: from the table of known devices, and no MFU for an unknown one."""


class Profiler(Table):
    enabled: bool = False
    """Write a Chrome trace to <run.folder>/profile."""
    start_step: int = Field(5, ge=1)
    """First step of the trace."""
    steps: int = Field(3, ge=1)
    """Steps in the trace."""
    memory_snapshot: bool = False
    """Also dump CUDA's allocator history (open at pytorch.org/memory_viz)."""


class Validation(Table):
    interval: int = Field(0, ge=0)
    """Compute the validation loss every this many steps and at the end; 0: never."""
    steps: int = Field(4, ge=1)
    """Batches of global_batch_size sequences per validation, of each set."""
    sets: Annotated[tuple[ValidationSet, ...], BeforeValidator(_as_tuple), AfterValidator(_named_once)] = ()
    """Sets beside the held-out documents: tables [[validation.sets]] with name and source."""


class Debug(Table):
    self_check: bool = True
    """At step 0 verify: blocks are sharded, the optimizer has the model's parameters, ranks have the same config."""
    replica_check_interval: int = Field(0, ge=0)
    """Compare state that several ranks hold alike every this many steps (silent corruption); 0: never."""
    replay_interval: int = Field(0, ge=0)
    """Compute the gradient twice every this many steps, compare, and name the rank that differs from itself; 0: never."""
    emulate_float8: bool = False
    """Round to float8, but multiply in the wider type, on any device: what training.float8 does to the numbers; slow."""
    check_collectives: bool = False
    """Compare every collective across its ranks before it runs (operation, types, shapes, calling line); slow."""
    sample_tokens: int = Field(0, ge=0)
    """Generate this many tokens from the final weights at the end of the run; 0: none."""
    sample_prompt: str = "def "
    """Prompt of that sample."""


class Config(Table):
    """A whole run. Same TOML and seed, same run: on any mesh, after any restart."""

    run: Run = Run()
    model: Model = Model()
    data: Data = Data()
    training: Training = Training()
    optimizer: Optimizer = Optimizer()
    lr_schedule: LRSchedule = LRSchedule()
    parallelism: Parallelism = Parallelism()
    activation_checkpoint: ActivationCheckpoint = ActivationCheckpoint()
    compile: Compile = Compile()
    checkpoint: Checkpoint = Checkpoint()
    metrics: Metrics = Metrics()
    profiler: Profiler = Profiler()
    validation: Validation = Validation()
    debug: Debug = Debug()
