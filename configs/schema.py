"""Defines every option of a run: one frozen pydantic model per TOML table. Every field has a type,
bounds and one line of explanation.

This file is the only list of options. `--help`, the strict parser, the JSON schema for editors and
the tests are all derived from it, so an option that is not in this file does not exist. Only the
sizes of a model come from its family's table OPTIONS. It imports no other file of this repository
but the registry of families, and no torch, so a wrong configuration is reported in well under a
second. Rules that span tables are rows in `configs/check.py`.
"""

from __future__ import annotations

import os
import re
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    create_model,
    field_validator,
)

from models import FAMILIES, NUMBERS

DType = Literal["auto", "float32", "bfloat16", "float64"]


class InputError(Exception):
    """A configuration, corpus or checkpoint that cannot be used. The message is a sentence for the
    user (what, where, what to do); `train.py` and the tools print it without a traceback and exit
    with 2."""


# What must never be written to a file or a console: the password or token of a URL, in front of its
# host or among its parameters, and tokens that have a known shape (Hugging Face, GitHub, OpenAI,
# AWS).
URL_USER = re.compile(r"(\w://)[^/\s@'\"]+@")
SECRETS = (
    (URL_USER, r"\1***@"),
    (
        re.compile(
            r"([?&][\w-]*(?:token|key|secret|passw|signature|credential)[\w-]*=)[^&\s'\"#]+", re.I
        ),
        r"\1***",
    ),
    (re.compile(r"\b(?:hf_\w{20,}|gh[a-z]_\w{30,}|sk-[\w-]{20,}|AKIA[0-9A-Z]{16})"), "***"),
)


def redact(text: str) -> str:
    """Remove secrets from a text, before anything that is not our own text goes to a file or a
    console."""
    for pattern, instead in SECRETS:
        text = pattern.sub(instead, text)
    return text


def _with_tuples(value: object) -> object:
    """Turn lists into tuples: TOML has only lists, but strict validation requires tuples."""
    return tuple(map(_with_tuples, value)) if isinstance(value, list) else value


def _path(value: str) -> str:
    if any(ord(c) < 32 or ord(c) == 127 for c in value):
        raise ValueError("must not contain control characters such as a newline")
    if re.search(r"\$[A-Za-z_{]", value):
        raise ValueError("must be written out: environment variables are not expanded")
    return value


def _folder(value: str) -> str:
    """Refuse a ~ that no shell has expanded, which would become a folder of that name. (data/
    expands ~ in its own options.)"""
    if value.startswith("~"):
        raise ValueError("must be written out: ~ is not expanded")
    if value.startswith("file:///"):
        return value.removeprefix("file://")
    if re.match(r"(s3|gs|az|https?|file):/?[^/]", value):
        raise ValueError("must have two slashes after the colon, as in s3://bucket/prefix")
    return _mirror(value) if "://" in value else value


def dots_in(url: str) -> str:
    """Return the problem with a URL of a store whose path has . or .. between slashes; "" with
    others."""
    scheme, _, rest = url.partition("://")
    if scheme in ("s3", "gs", "az") and {".", ".."} & {*rest.split("/")}:
        return "has . or .. between slashes, and a store knows none: write the prefix that is meant"
    return ""


def _mirror(value: str) -> str:
    _no_dots(value)
    found = STORE_URL.fullmatch(value)
    if value and not (found and found["scheme"]):
        raise ValueError(
            "must be a URL such as s3://bucket/prefix, gs://bucket/prefix or az://container/prefix"
        )
    return value.rstrip("/")


CACHE = "~/.cache/plumbline"  # of data.cache, where it is empty
# A place in an object store, or a folder; no user, password, query or empty part.
STORE_URL = re.compile(
    r"(?P<scheme>s3|gs|az)://(?P<rest>[\w.-]+(/[\w.=+-]+)*)/?|(?P<file>file)://(?P<folder>/[^?#]*)"
)


def _no_dots(value: str) -> None:
    if problem := dots_in(value):
        raise ValueError(problem)


def _store(value: str) -> str:
    _no_dots(value)
    if value and not STORE_URL.fullmatch(value):
        raise ValueError(
            "must be a URL such as s3://bucket/prefix, gs://bucket/prefix, az://container/prefix "
            "or file:///folder"
        )
    return value


# Text in a store: an object, what is below a prefix, or a glob; no user, password or query.
SOURCE_URL = re.compile(r"(?:s3|gs|az)://[\w.-]+(?:/[^/?#@\s]+)*/?")


def _source(value: str) -> str:
    if value.startswith("file:///"):
        return value.removeprefix("file://")
    _no_dots(value)
    if "://" in value and not SOURCE_URL.fullmatch(value):
        raise ValueError(
            "must be a path or a URL such as s3://bucket/prefix, gs://bucket/prefix, "
            "az://container/prefix or file:///folder, without ? and spaces"
        )
    return value


def _here(value: str) -> str:
    if "://" in value:
        raise ValueError("must be a path on this machine: no URL is read there; copy it first")
    return value


def _file(value: str) -> str:
    return _store(value).removeprefix("file://") if "://" in value else value


# A tokenizer of the Hugging Face Hub.
HUB_NAME = re.compile(
    r"hf:(?P<repo>[\w.-]+/[\w.-]+)(?:/(?P<file>[\w./+-]+))?(?:@(?P<revision>[\w./+-]+))?"
)


def _tokenizer(value: str) -> str:
    if value.startswith("hf:") and not HUB_NAME.fullmatch(value):
        raise ValueError(
            "must name a model of the Hugging Face Hub as hf:OWNER/NAME or hf:OWNER/NAME@REVISION"
        )
    return value


PathText = Annotated[str, AfterValidator(_path)]
SourceText = Annotated[PathText, AfterValidator(_source)]
LocalPath = Annotated[PathText, AfterValidator(_here)]
FileText = Annotated[PathText, AfterValidator(_file)]  # of a file that may be in a store
TokenizerText = Annotated[FileText, AfterValidator(_tokenizer)]
Decay = Annotated[float, Field(ge=0, lt=1)]


class Table(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    @classmethod
    def __pydantic_init_subclass__(cls, **_: object) -> None:
        """Join the lines of each option's docstring, which may be wrapped here but is one line in
        `--help` and in the JSON schema."""
        for field in cls.model_fields.values():
            field.description = field.description and " ".join(field.description.split())
        cls.model_rebuild(force=True)

    @field_validator("*", mode="before")
    @classmethod
    def _has_tuples(cls, value: object) -> object:
        return _with_tuples(value)

    @field_validator("*", mode="before")
    @classmethod
    def _fits_64_bits(cls, value: object) -> object:
        """Refuse integers beyond 64 bits: TOML guarantees no more, and every tensor and file that
        receives such a number can hold no more."""
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise ValueError("must fit into 64 bits")
        return value

    @field_validator("*", mode="before")
    @classmethod
    def _has_no_password(cls, value: object) -> object:
        """Refuse a URL with a user or password, since every option is written to the run's folder
        and into checkpoints."""
        if isinstance(value, str) and URL_USER.search(value):
            raise ValueError(
                "must not contain a user or password: options are written to files (~/.netrc can "
                "hold it)"
            )
        return value


class Derived(int):
    """A number that was not set and follows from other options (`configs/check.py::derive`). It
    counts like any integer, but `configs/load.py::dump` does not write it as a setting, so that it
    is derived again wherever the file is read: on a different mesh, for example."""


class Run(Table):
    folder: Annotated[PathText, AfterValidator(_folder)] = Field(
        "runs/debug", min_length=1, max_length=240
    )
    """Folder of this run, or a URL (s3://...): config, metrics, logs, TensorBoard, checkpoints. The
    same resumes."""
    mirror: Annotated[PathText, AfterValidator(_mirror)] = Field(
        "", max_length=240, examples=["s3://bucket/prefix"]
    )
    """Copy run.folder, but no checkpoints, below this URL every minute; empty: the URL of
    run.folder."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Seed of the initial weights and of the order of the data. The same seed gives the same run on
    any mesh."""
    deterministic: bool = False
    """Use only deterministic kernels (slower on CUDA; on CPU runs on the same mesh repeat bitwise
    in any case)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train; auto: CUDA when a GPU is visible, otherwise CPU."""
    init_timeout_seconds: int = Field(600, ge=1, le=86400)
    """Longest time for a collective until the first step has ended (start-up, compilation, loading
    a checkpoint)."""
    step_timeout_seconds: int = Field(300, ge=1, le=86400)
    """Longest time for a collective or a step afterwards; a hung or dead rank is noticed within
    this time."""
    fault_tolerant: bool = False
    """Go on without the replicas whose ranks are lost, and with them again when they come back;
    false: all start again."""
    max_minutes: float = Field(0.0, ge=0)
    """Save a checkpoint and stop this many minutes after the processes started, as after a signal;
    0: no limit."""


class Architecture(Table):
    family: Literal[FAMILIES] = "llama"
    """Which file of models/ defines the model."""
    flavor: str = "debug"
    """A row of FLAVORS in that file (debug, 8B, ...), or a folder of Hugging Face's, whose numbers
    count."""
    width_base: int = Field(0, ge=0)
    """Width for which the learning rate was found: muP transfers it to this model's; 0: it is used as
    it is."""
    depth_base: int = Field(0, ge=0)
    """Number of blocks for which it was found: CompleteP transfers it to this model's; 0: it is used
    as it is."""


def _overrides() -> dict:
    """Build a field for every number that some family lets the user override; None is the flavor's
    number. Two families that have an option of the same name mean the same by it. Raises ValueError
    where their types or bounds differ."""
    fields: dict = {}
    for family in FAMILIES:
        for name, (kind, bounds, explanation) in NUMBERS[family].options.items():
            field = (kind | None, Field(None, description=explanation, **bounds))
            if repr(fields.setdefault(name, field)) != repr(field):
                raise ValueError(
                    f"models/{family}.py: OPTIONS has another {name} than another family"
                )
    return fields


Model: Any = create_model("Model", __base__=Architecture, **_overrides())


def _ascending(steps: tuple[tuple[int, float], ...]) -> tuple[tuple[int, float], ...]:
    if [step for step, _ in steps] != sorted({step for step, _ in steps}):
        raise ValueError("must name steps in ascending order, each once")
    return steps


def _named_once(rows: tuple) -> tuple:
    names = [row.name for row in rows]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(
            f"must give each row a different name; there are several called {', '.join(twice)}"
        )
    return rows


def _short_name(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_.-]{1,60}", value):
        raise ValueError("must be 1 to 60 letters, digits, dots, dashes or underscores")
    return value


Name = Annotated[str, AfterValidator(_short_name)]
Factor = Annotated[float, Field(gt=0)]
Step = Annotated[int, Field(ge=1)]
Weight = Annotated[float, Field(ge=0)]


def _none_or_three(names: tuple[str, ...]) -> tuple[str, ...]:
    if names and (len(names) != 3 or len(set(names)) != 3):
        raise ValueError("must name three different tokens: those before prefix, suffix and middle")
    return names


class MixtureRow(Table):
    name: Name
    """Name of this source in metrics, messages and the audit."""
    source: SourceText = Field(min_length=1)
    """What to read; the same values as for data.source."""
    weight: Weight
    """This source's share of the tokens, relative to the sum of all weights."""
    schedule: Annotated[tuple[tuple[Step, Weight], ...], AfterValidator(_ascending)] = ()
    """Weights that change later: [[step, weight], ...]; each applies after that many steps of the
    run."""
    loss_weight: float = Field(1.0, ge=0)
    """How much a token of this source counts in the training loss, relative to the others."""
    max_epochs: float = Field(0.0, ge=0)
    """Largest number of epochs of this source in the whole run; 0: no limit."""


class TrainingStage(Table):
    begin: Step
    """Steps after which this stage begins; what a stage does not set stays as before."""
    seq_len: int | None = Field(None, ge=1)
    """Tokens per sequence from here on."""
    global_batch_size: int | None = Field(None, ge=1)
    """Sequences per optimizer step from here on."""
    local_batch_size: int | None = Field(None, ge=1)
    """Sequences per data-parallel rank and microbatch from here on."""
    weights: tuple[tuple[str, Weight], ...] = ()
    """Weights of sources of data.mixture from here on: [[name, weight], ...]."""
    lr: float | None = Field(None, gt=0)
    """Peak learning rate from here on."""
    lr_schedule: Literal["cosine", "linear", "wsd", "constant"] | None = None
    """Begin this schedule here, over the steps to the next stage that begins one, or to the end."""
    lr_warmup_steps: int = Field(0, ge=0)
    """Steps of linear warmup of that schedule."""
    lr_min_ratio: float | None = Field(None, ge=0, le=1)
    """Learning rate at the end of that schedule, as a share of the peak."""


def _begin_in_order(rows: tuple[TrainingStage, ...]) -> tuple[TrainingStage, ...]:
    begins = [row.begin for row in rows]
    if begins != sorted(set(begins)):
        raise ValueError("must give rows in ascending order of begin, each step once")
    return rows


class ValidationSet(Table):
    name: Name
    """Name of this set in metrics."""
    source: SourceText = Field(min_length=1)
    """What to read, as for data.source; of a prepared folder with held-out documents, only those
    are used."""


class EvaluationTask(Table):
    name: Name
    """Name of this task in metrics: evaluation/NAME/acc."""
    file: FileText = Field(min_length=1)
    """JSON lines: context, choices and answer; with perplexity text (docs/evaluation.md)."""
    kind: Literal["multiple_choice", "perplexity"] = "multiple_choice"
    """The likeliest choice is the model's answer, or: perplexity of whole texts."""
    delimiter: str = Field(" ", max_length=20)
    """Stands between the context and each choice; it does not count to a choice's length."""


INSTALLED = ("stdlib", "packages")  # what every machine has; a folder of that name is ./NAME


def is_prepared(source: str) -> bool:
    """Return whether a source is a folder that `python -m data.prepare` made. One of these files
    may be missing: the code that opens the folder says so."""
    path = os.path.expanduser(source)
    return (
        sum(
            os.path.isfile(os.path.join(path, name))
            for name in ("manifest.json", "tokenizer.json", "names.starts")
        )
        > 1
    )


class Data(Table):
    source: SourceText = Field("stdlib", min_length=1)
    """What to train on: stdlib, packages, a file, folder, glob or s3:// URL, hf:NAME, or a prepared
    folder."""
    format: Literal["text", "chat", "completion"] = "text"
    """What documents are: text, chat (messages) or completion (prompt and completion)."""
    chat_template: FileText = ""
    """With chat: plain, chatml or the path of a Jinja template; empty: the tokenizer's own."""
    chat_may_drop: tuple[str, ...] = ()
    """With chat: what a template may leave out: a key (name, reasoning_content), a role (system), or
    think."""
    mixture: Annotated[tuple[MixtureRow, ...], AfterValidator(_named_once)] = ()
    """Several sources instead of one: [[data.mixture]] with name, source, weight, schedule,
    loss_weight, max_epochs."""
    allow_splice: bool = False
    """Allow a resume with changed data, weights, seed, seq_len or global_batch_size; the change is
    recorded."""
    skip: Annotated[tuple[tuple[Step, Step], ...], AfterValidator(_ascending)] = ()
    """Batches to skip: [[step, count], ...]; after that step, jump over the batches of `count`
    steps."""
    mask_documents: bool = False
    """Restart attention and positions at each document's first token; no loss from one document to
    the next."""
    tokenizer: TokenizerText = Field("bpe", min_length=1)
    """bpe (trained on the source), bytes, hf:OWNER/NAME, or a folder, tokenizer.json, tekken.json or
    rank file."""
    tokenizer_pattern: str = Field("", max_length=10_000)
    """Of an unknown rank file: llama3, llama4, qwen2, gpt2, cl100k, o200k or a regular expression."""
    end_token: str = Field("", max_length=200)
    """Name of the special token that ends a text; empty: as the tokenizer's files say
    (docs/data.md)."""
    bpe_vocab_size: int = Field(4096, ge=257, le=1_000_000)
    """Vocabulary size of the trained BPE, special tokens included; only used by tokenizer = "bpe"."""
    cache: LocalPath = Field("", max_length=240)
    """Folder of tokenised corpora, and of runs with a URL; empty: ~/.cache/plumbline."""
    cache_gb: float = Field(20.0, gt=0)
    """Of a prepared corpus in an object store, the most that a host keeps in data.cache, for each
    source, in GB."""
    text_field: str = Field("text", min_length=1, max_length=200)
    """Key or column that holds the text in JSON lines, Parquet and Hugging Face datasets."""
    json_files: Literal["records", "text"] = "records"
    """What a .json file holds: records with text_field (an array, objects or lines), or one text."""
    add_bos: bool = False
    """Begin each document with the tokenizer's begin-of-text token."""
    add_eos: bool = True
    """End each document with the tokenizer's end-of-text token."""
    fim_rate: float = Field(0.0, ge=0, le=1)
    """Share of the training documents that are rearranged to fill in the middle (arXiv:2207.14255)."""
    fim_tokens: Annotated[tuple[str, ...], AfterValidator(_none_or_three)] = Field(
        (), examples=[("<PRE>", "<SUF>", "<MID>")]
    )
    """Names of the special tokens before prefix, suffix and middle; empty: the tokenizer's own."""
    max_document_bytes: int = Field(0, ge=0)
    """Leave out (and count) documents with more bytes of UTF-8 than this; 0: no limit."""
    skip_failed: int = Field(0, ge=0)
    """Unreadable documents (not UTF-8, not JSON, ...) that preparation tolerates, or with stream
    each stream."""
    validation_fraction: float = Field(0.01, ge=0, lt=0.5)
    """Share of the documents that is held out of training for validation; a hash of the text
    chooses them."""
    stream: bool = False
    """Tokenise data.source during training, without preparation; docs/data.md says what is not
    possible then."""
    streams: int = Field(64, ge=1, le=65536)
    """With stream: number of logical streams; part of the order like the seed; data-parallel ranks
    must divide it."""
    workers: int = Field(0, ge=0, le=64)
    """Loader processes per rank; 0: read in the training process (a batch costs well under a
    millisecond per rank)."""
    timeout_seconds: int = Field(120, ge=1)
    """How long to wait for a loader worker, or for a stream, before the run fails."""


class Training(Table):
    steps: int = Field(100, ge=1)
    """Optimizer steps of the whole run."""
    stop_after: int = Field(0, ge=0)
    """End the run after this step, on the schedule of training.steps; 0: after the last."""
    seq_len: int = Field(256, ge=1)
    """Tokens per sequence."""
    global_batch_size: int = Field(8, ge=1)
    """Sequences per optimizer step, over all ranks and microbatches."""
    local_batch_size: int | None = Field(None, ge=1)
    """Sequences per data-parallel rank and microbatch; the rest accumulates. Not set: all of them;
    1 in a pipeline."""
    stages: Annotated[tuple[TrainingStage, ...], AfterValidator(_begin_in_order)] = ()
    """Changes in mid-run: tables [[training.stages]] with begin, seq_len, batch sizes, weights, lr
    and its schedule."""
    param_dtype: DType = "auto"
    """Dtype of weights in forward and backward; auto: bfloat16 if the hardware has it; float64: for
    checks on a CPU."""
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype in which gradients are summed over data-parallel ranks."""
    float8: Literal["none", "tensorwise", "rowwise"] = "none"
    """Compute the blocks' linear layers in float8 with these scales (on GPUs since Ada or
    Hopper)."""
    attention: Literal["auto", "flash", "flash3", "cudnn"] = "auto"
    """GPU kernel of causal attention; auto: PyTorch's choice. `python -m lab.bench attention`
    measures them."""
    delta_rule: Literal["auto", "reference", "flash"] = "auto"
    """Kernel of gated delta nets: plain PyTorch, or flash-linear-attention's on a GPU; auto: that
    where it is installed."""
    freeze: tuple[str, ...] = ()
    """Parameters that are not trained, as patterns of names such as "tok_embeddings.*"."""
    max_norm: float = Field(1.0, ge=0)
    """Clip the global gradient norm to this value; 0: no clipping."""
    loss_chunk_tokens: int = Field(1024, ge=1)
    """Tokens for which the loss holds float32 logits at the same time."""
    z_loss: float = Field(0.0, ge=0)
    """Factor of the z-loss, log^2 of the softmax's denominator (PaLM: 1e-4); logged in addition to
    the loss."""
    mtp_weight: float = Field(0.3, ge=0)
    """Weight in the loss of layers that predict further tokens (model.mtp_depth), of their mean."""
    max_skipped_steps: int = Field(3, ge=0)
    """Steps in a row that may be skipped (a non-finite loss or gradient, a spike) before the run
    fails."""
    spike_threshold: float = Field(0.0, ge=0)
    """Warn if loss or gradient norm is this many deviations above the median of the last 128 steps
    (try 6); 0: off."""
    skip_spikes: bool = False
    """Change no weight in a step whose gradient norm exceeds spike_threshold."""
    expert_bias_speed: float = Field(0.001, ge=0)
    """How far an expert's balancing bias moves after each step, in a model that has such biases; 0:
    they stay."""

    @property
    def last_step(self) -> int:
        """The step after which the run is done."""
        return self.stop_after or self.steps

    def microbatches(self, dp_size: int) -> int:
        """Microbatches of a step, on each of `dp_size` data-parallel ranks, of which the last may have
        padding (data/uneven.py)."""
        return -(-self.global_batch_size // (dp_size * self.local_batch_size))


MUONS = ("muon", "normuon")  # kinds that orthogonalise the hidden matrices
OF_MATRICES = (*MUONS, "soap")  # kinds with a rule for hidden matrices, and AdamW for the rest


class Optimizer(Table):
    kind: Literal["adamw", "sgd", "muon", "normuon", "soap"] = "adamw"
    """The update rule; muon, normuon, soap: of hidden matrices, with AdamW for all other parameters."""
    lr: float = Field(3e-4, gt=0)
    """Peak learning rate."""
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """Decay rates of AdamW's averages of the gradient and of its square."""
    eps: float = Field(1e-8, gt=0)
    """Added to AdamW's denominator."""
    weight_decay: float = Field(0.1, ge=0)
    """Decoupled weight decay of matrices; norms are never decayed."""
    momentum: float | None = Field(None, ge=0, lt=1)
    """Momentum of SGD (not set: 0) and of Muon (not set: 0.95)."""
    ns_dtype: Literal["auto", "bfloat16", "float32", "float64"] = "auto"
    """Of Muon: type of Newton-Schulz; float32: equal on every mesh, to rounding; auto: bfloat16
    where it is fast."""
    adjust_lr_fn: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """Of Muon: how a matrix's shape scales lr; match_rms_adamw: to AdamW's size of updates."""
    qk_clip: float = Field(0.0, ge=0)
    """Of Muon, NorMuon: the largest logit, to which heads are scaled after a step (Kimi K2: 100); 0: off."""
    average_decay: float = Field(0.0, ge=0, lt=1)
    """Keep an exponential moving average of the weights with this decay, which is validated too; 0:
    none."""
    lr_multipliers: tuple[tuple[str, Factor], ...] = ()
    """Learning rates as multiples of lr: [[pattern of a parameter, factor], ...]; the first match
    counts."""


class Lora(Table):
    rank: int = Field(0, ge=0)
    """Train adapters of this rank and freeze all weights (LoRA, arXiv:2106.09685); 0: train the
    whole model."""
    alpha: float = Field(16.0, gt=0)
    """An adapter's output is multiplied by alpha / rank."""
    targets: tuple[str, ...] = ()
    """Layers that get an adapter, by the last word of their name (wq, w1, ...); w1, w2 and w3 of
    experts too."""


class LRSchedule(Table):
    kind: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """Shape after the warmup; wsd: constant, then linear decay over the last decay_fraction."""
    warmup_steps: int | None = Field(None, ge=0)
    """Steps of linear warmup from 0. Not set: warmup_fraction says how many."""
    warmup_fraction: float = Field(0.0, ge=0, lt=1)
    """Share of training.steps that is warmup; used where warmup_steps is not set."""
    min_ratio: float = Field(0.1, ge=0, le=1)
    """Learning rate at the last step, as a share of the peak."""
    decay_fraction: float = Field(0.2, gt=0, le=1)
    """Share of the run over which wsd decays."""


class Schedule(NamedTuple):
    """Properties of a pipeline schedule. `parallelisms/schedules.py` makes its table of actions."""

    shape: Literal["loop", "v"]
    """How stages go to three ranks, for example: 0 1 2, 0 1 2, or 0 1 2, 2 1 0."""
    stages_per_rank: tuple[int, int]
    """The least and the most."""
    default_stages: int
    """Stages per rank where parallelism.pipeline_stages_per_rank is 0."""
    splits_backward: bool
    """Whether the gradients of inputs and those of weights are computed apart."""
    microbatches_per_rank: int
    """This times the ranks of a pipeline is the least number of microbatches; 0: any number will
    do."""


SCHEDULES = {
    # PipeDream-Flush: Narayanan et al., arXiv:2104.04473, section 2.2.1.
    "1f1b": Schedule("loop", (1, 1), 1, False, 0),
    # The same paper, section 2.2.2. More stages per rank make the bubble smaller, and more is sent
    # between ranks.
    "interleaved_1f1b": Schedule("loop", (2, 1000), 2, False, 0),
    # ZB-H1: Qi et al., arXiv:2401.10241, section 3.1. With several stages per rank it is
    # interleaved as above.
    "zero_bubble": Schedule("loop", (1, 1000), 2, True, 0),
    # ZB-V: the same paper, section 6. The first and the last stage are on the same rank.
    "zbv": Schedule("v", (2, 2), 2, True, 0),
    # DualPipe cut in half: github.com/deepseek-ai/DualPipe, after DeepSeek-V3 (arXiv:2412.19437,
    # section 3.2.1).
    "dualpipe_v": Schedule("v", (2, 2), 2, True, 2),
}


class Parallelism(Table):
    data_parallel_replicate: int = Field(1, ge=1)
    """Replicas of the model; with data_parallel_shard = 1 this is plain data parallelism, otherwise
    HSDP."""
    data_parallel_shard: Literal[-1] | Annotated[int, Field(ge=1)] = -1
    """Ranks over which FSDP2 shards weights, gradients and optimizer state; -1: all ranks that are
    left."""
    tensor_parallel: int = Field(1, ge=1)
    """Ranks of one host that split every matrix (with sequence-parallel norms and a
    vocabulary-parallel loss)."""
    tensor_parallel_across_hosts: bool = False
    """Allow tensor parallelism to cross hosts, where the network makes it slow."""
    context_parallel: int = Field(1, ge=1)
    """Ranks that share every sequence: each holds an equal part of its tokens and of their
    activations."""
    context_parallel_method: Literal["gather", "ulysses"] = "gather"
    """How attention sees the whole sequence: all ranks gather keys and values, or an all-to-all
    trades tokens for heads."""
    expert_parallel: int = Field(1, ge=1)
    """Ranks of data_parallel_shard x context_parallel x tensor_parallel that share the experts of
    every MoE layer."""
    expert_exchange: Literal["flat", "hierarchical"] = "flat"
    """How tokens reach experts on other hosts: a row for each expert, or (hierarchical) once to each
    host."""
    expert_chunks: int = Field(1, ge=1, le=16)
    """Chunks of a rank's tokens: the exchange of one runs behind the experts of another."""
    async_tensor_parallel: bool = False
    """Hide tensor parallelism's gathers and scatters behind its matmuls (needs compiled blocks and
    NVLink)."""
    reshard_after_forward: bool | Literal["default"] | Annotated[int, Field(ge=2)] = "default"
    """Free gathered weights after forward; default: except the output projection's; N: keep sharded
    over N ranks."""
    reshard_after_backward: bool = True
    """Free gathered weights after backward; false: once a step, with reshard_after_forward =
    false."""
    keep_gathered: int = Field(0, ge=0)
    """Last blocks (of a stage) that keep gathered weights until backward; `tools.plan` says for how
    many there is room."""
    pipeline_parallel: int = Field(1, ge=1)
    """Ranks that share the layers: each has one or several stages of the model, and microbatches
    pass through them."""
    pipeline_schedule: Literal[tuple(SCHEDULES)] = "1f1b"
    """Order in which ranks work on microbatches; zero_bubble, zbv and dualpipe_v split the
    backward pass."""
    pipeline_stages_per_rank: int = Field(0, ge=0)
    """Stages of each rank; 0: the schedule's own number (1 with 1f1b, otherwise 2)."""
    pipeline_layers: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """Number of layers of each stage, as [3, 4, 4, 3]; empty: equal cost, where embedding and
    output count as well."""
    cpu_offload: bool = False
    """Keep weights, gradients and optimizer state in CPU memory and stream them to the GPU."""
    accumulate_gradients: Literal["whole", "sharded"] = "whole"
    """whole: reduce gradients once per step; sharded: after each microbatch (less memory, more
    communication)."""


class ActivationCheckpoint(Table):
    mode: Literal["none", "full", "every_n", "selective"] = "none"
    """What backward recomputes; selective: everything except results of matmuls, attention and
    collectives."""
    every_n: int = Field(2, ge=2)
    """With mode every_n: recompute every n-th block."""
    gather_again: bool = False
    """With mode selective and tensor parallelism: backward gathers the sequence again."""


class Compile(Table):
    enabled: bool = False
    """torch.compile each transformer block, and the loss's passes over the logits."""
    backend: Literal["inductor", "aot_eager", "eager"] = "inductor"
    """Backend of torch.compile."""
    cuda_graphs: bool = False
    """Record a step's forward and backward once, and start them as a whole: for small models on one
    GPU."""


class Checkpoint(Table):
    interval: int = Field(100, ge=0)
    """Steps between saves; the end of the run is also saved; 0: only the end."""
    async_save: bool = True
    """Write checkpoints in the background; training only waits for a copy, which stays in host
    memory."""
    keep_last: int = Field(3, ge=0)
    """Newest checkpoints to keep; older ones are removed after a newer one is published; 0: keep
    all."""
    keep_every: int = Field(0, ge=0)
    """Also keep every checkpoint whose step this divides; 0: none."""
    peers: int = Field(0, ge=0)
    """Other hosts that each host sends a copy of its part of the state to, for their memory; 0:
    none."""
    peer_interval: int = Field(10, ge=1)
    """Steps between those copies."""
    peer_stride: int = Field(1, ge=1)
    """How many hosts further on a copy goes: the hosts of a rack, where nodes are numbered rack by
    rack."""
    store: Annotated[PathText, AfterValidator(_store)] = Field(
        "", max_length=1000, examples=["s3://bucket/prefix"]
    )
    """Keep checkpoints below this URL (s3://bucket/prefix, gs://, az://, file://); empty: in
    <run.folder>/checkpoints."""
    load_step: int = Field(-1, ge=-1)
    """Resume from this step of the run's own checkpoints; -1: the newest good one, or from scratch
    without any."""
    load_path: PathText = Field("", max_length=1000)
    """If the run has no checkpoint yet, start at step 0 with the weights of this checkpoint (or
    folder or URL of a run)."""
    exclude_from_loading: tuple[str, ...] = ()
    """Tensors not to load from load_path, as patterns such as "model.output.*"; they keep their
    initial values."""
    branch_from: PathText = Field("", max_length=1000, examples=["runs/a@1200"])
    """If the run has no checkpoint yet, go on from this step of another run; without @STEP: from its
    newest."""
    load_hf: LocalPath = Field("", max_length=1000)
    """If the run has no checkpoint yet, start at step 0 with the weights of this Hugging Face
    folder."""
    export_hf: Literal["", "float32", "bfloat16"] = ""
    """At the end of the run, write the model in this dtype for Hugging Face, to <run.folder>/hf;
    empty: do not."""


class Metrics(Table):
    interval: int = Field(10, ge=1)
    """Steps between log lines."""
    tensorboard: bool = True
    """Write TensorBoard scalars to <run.folder>/tensorboard."""
    wandb_project: str = ""
    """Also log to this Weights & Biases project (pip install wandb; WANDB_RUN_GROUP, WANDB_TAGS); "":
    off."""
    gradient_interval: int = Field(0, ge=0)
    """Steps between lines of gradients.jsonl, which have two numbers of every gradient, for
    `tools.replay`; 0: none."""
    noise_scale_interval: int = Field(0, ge=0)
    """Steps between measurements of the gradient noise scale, each one more forward and backward pass;
    0: none."""


PROFILE_FROM = 5  # first step of a trace: compilation and the allocator have settled by then


class Profiler(Table):
    enabled: bool = False
    """Write a Chrome trace of the fifth to the seventh step of this process to
    <run.folder>/profile."""
    memory_snapshot: bool = False
    """Also dump CUDA's allocator history (open at pytorch.org/memory_viz)."""


class Validation(Table):
    interval: int = Field(0, ge=0)
    """Steps between validations; there is one at the end as well; 0: never."""
    steps: int = Field(4, ge=1)
    """Batches of global_batch_size sequences from each set per validation."""
    sets: Annotated[tuple[ValidationSet, ...], AfterValidator(_named_once)] = ()
    """Sets besides the held-out documents: tables [[validation.sets]] with name and source."""


class Evaluation(Table):
    interval: int = Field(0, ge=0)
    """Steps between evaluations of all tasks; there is one at the end as well; 0: at the end alone."""
    tasks: Annotated[tuple[EvaluationTask, ...], AfterValidator(_named_once)] = ()
    """What to score the model on: tables [[evaluation.tasks]] with name, file, kind, delimiter."""


class Debug(Table):
    self_check: bool = True
    """Before step 1, check sharding, the optimizer, that all ranks agree, and a changed family
    (docs/forking.md)."""
    replica_check_interval: int = Field(0, ge=0)
    """Steps between comparisons of state that is replicated on several ranks (silent corruption);
    0: never."""
    leave_out_odd_replica: bool = False
    """With run.fault_tolerant: end only the ranks that differ from the majority, instead of all."""
    replay_interval: int = Field(0, ge=0)
    """Steps between checks that compute a gradient twice and name the rank whose two results
    differ; 0: never."""
    emulate_float8: bool = False
    """Round to float8 but multiply in the wider dtype, on any device, to see the effect of
    training.float8; slow."""
    check_collectives: bool = False
    """Compare collectives across ranks before they run, and messages of a pipeline with what is
    expected; slow."""
    sample_tokens: int = Field(0, ge=0)
    """Generate this many tokens from the final weights at the end of the run; 0: none."""
    sample_prompt: str = "def "
    """Prompt of that sample."""
    sample_temperature: float = Field(0.8, ge=0)
    """Temperature of that sample; 0: always the likeliest token."""


class Config(Table):
    """A whole run. The same TOML and seed give the same run, on any mesh and after any restart."""

    run: Run = Run()
    model: Model = Model()
    data: Data = Data()
    training: Training = Training()
    lora: Lora = Lora()
    optimizer: Optimizer = Optimizer()
    lr_schedule: LRSchedule = LRSchedule()
    parallelism: Parallelism = Parallelism()
    activation_checkpoint: ActivationCheckpoint = ActivationCheckpoint()
    compile: Compile = Compile()
    checkpoint: Checkpoint = Checkpoint()
    metrics: Metrics = Metrics()
    profiler: Profiler = Profiler()
    validation: Validation = Validation()
    evaluation: Evaluation = Evaluation()
    debug: Debug = Debug()
