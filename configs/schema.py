"""Every option of a run: one frozen model per TOML table, every field typed, bounded and explained in one line.

This file is the only list of options. `--help`, the strict parser, the JSON schema for editors and the tests are all
derived from it, so an option that is not here does not exist. It imports nothing of ours and never imports torch:
a wrong config is reported in well under a second. Rules that span tables are rows in `configs/check.py`.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, field_validator

DType = Literal["auto", "float32", "bfloat16"]


class InputError(Exception):
    """A configuration, corpus or checkpoint that cannot be used. The message is a sentence for a person (what, where,
    what to do); `train.py` and the tools print it without a traceback and exit with 2."""


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
    """How long a collective may take afterwards: a hung or dead rank is noticed within this time."""
    gc_interval: int = Field(50, ge=1)
    """Collect Python garbage every this many steps, on all ranks at once, instead of at random moments."""


class Model(Table):
    family: Literal["llama"] = "llama"
    """Which file of models/ defines the model."""
    flavor: str = "debug"
    """A row of FLAVORS at the end of that file (debug, 1B, 3B, 8B, 70B, 405B)."""
    dim: int | None = Field(None, ge=2)
    """Width of the residual stream; replaces the flavor's number, as does every option below."""
    n_layers: int | None = Field(None, ge=1)
    """Number of transformer blocks."""
    n_heads: int | None = Field(None, ge=1)
    """Number of query heads."""
    n_kv_heads: int | None = Field(None, ge=1)
    """Number of key and value heads (grouped-query attention)."""
    head_dim: int | None = Field(None, ge=2)
    """Width of one head (published Llamas: dim / n_heads)."""
    hidden_dim: int | None = Field(None, ge=1)
    """Width of the SwiGLU feed-forward layer."""
    vocab_size: int | None = Field(None, ge=2)
    """Rows of the embedding; at least the tokenizer's vocabulary."""
    rope_theta: float | None = Field(None, gt=0)
    """Base of the rotary position frequencies."""
    tied_embeddings: bool | None = None
    """Use the embedding matrix as the output projection too (Llama 3.2)."""


class Data(Table):
    source: PathText = Field("stdlib", min_length=1)
    """What to train on: stdlib (the source of Python's standard library), or a text or .jsonl file, folder or glob."""
    tokenizer: PathText = Field("bpe", min_length=1)
    """bpe (trained on the source at first use), bytes, or the path of tiktoken ranks (Llama 3's tokenizer.model)."""
    bpe_vocab_size: int = Field(4096, ge=257, le=1_000_000)
    """Vocabulary of the trained BPE, special tokens included; used by tokenizer = "bpe" only."""
    cache: PathText = Field("", max_length=240)
    """Folder of tokenised corpora; empty: ~/.cache/plumbline."""
    validation_fraction: float = Field(0.01, ge=0, lt=0.5)
    """Share of the documents, chosen by hash, that is held out of training for validation."""
    workers: int = Field(0, ge=0, le=64)
    """Loader processes per rank; 0: read in the training process (a batch costs well under a millisecond per rank)."""
    prefetch: int = Field(2, ge=1, le=64)
    """Batches that each worker keeps ready."""
    timeout_seconds: int = Field(120, ge=1)
    """How long to wait for a loader worker before the run fails."""


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
    max_norm: float = Field(1.0, ge=0)
    """Clip the global gradient norm to this; 0: no clipping."""
    loss_chunk_tokens: int = Field(1024, ge=1)
    """Tokens whose float32 logits exist at a time in the loss."""
    max_skipped_steps: int = Field(3, ge=0)
    """Steps in a row with a non-finite gradient that are skipped before the run stops."""


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
    reshard_after_forward: bool | Literal["default"] | Annotated[int, Field(ge=2)] = "default"
    """Free gathered weights after forward; default: all but the last; N: keep them sharded over N ranks (a host's)."""
    cpu_offload: bool = False
    """Keep weights, gradients and optimizer state in CPU memory and stream them to the GPU."""
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
    """Saves in a row that may fail (disk full, say) before the run stops; 0: never stop."""


class Metrics(Table):
    interval: int = Field(10, ge=1)
    """Log every this many steps."""
    tensorboard: bool = True
    """Write TensorBoard scalars to <run.folder>/tensorboard."""
    wandb_project: str = ""
    """Also log to this Weights & Biases project (needs `pip install wandb`); empty: off."""
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
    """Batches of global_batch_size sequences per validation."""


class Debug(Table):
    self_check: bool = True
    """At step 0 verify: blocks are sharded, the optimizer has the model's parameters, ranks have the same config."""
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
