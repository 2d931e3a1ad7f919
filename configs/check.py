"""Checks rules that span several options. Each is a row, `name: (predicate of a violation, message
with the remedy)`.

Rules are evaluated independently, so one run of the check reports every violation. They depend on
the configuration, the model's table of flavors and the number of processes (and on whether
data.source is a prepared folder, which all hosts share): every rank finds the same problems and no
rank is left waiting for one that gave up. Bounds of a single option are in
`configs/schema.py`.

Like all of `configs/` this imports no torch, unless model.flavor is a folder. The constraints that
a family of models puts on its sizes are in models/flavors/, those of a mesh are here: a family says
which number is which (`models/options.py::Numbers`).
"""

import glob
import hashlib
import json
import math
import os
from collections.abc import Callable
from types import SimpleNamespace

from configs import hints, published
from configs.ranks import OF_RANKS, default
from configs.schema import (
    CACHE,
    INSTALLED,
    MUONS,
    OF_MATRICES,
    PROFILE_FROM,
    SCHEDULES,
    Config,
    Data,
    Derived,
    InputError,
    MixtureRow,
    Model,
    Parallelism,
    TrainingStage,
    is_prepared,
)
from models import NUMBERS
from models.options import Numbers

TRANSFER = ("width_base", "depth_base")  # options of [model] that are no numbers of the network


def architecture(model: Model) -> dict:
    """Resolve the sizes of the model, the family's Args: its flavor's row, with the overrides of
    [model] applied on top, and the values that follow from these (the family's `follows`). Raises
    InputError for an unknown flavor and for an option that the family does not have."""
    given = {key: value for key, value in vars(model).items() if value is not None}
    family = given.pop("family")
    flavor = given.pop("flavor")
    for key in TRANSFER:
        given.pop(key, None)
    of_family = NUMBERS[family]
    flavors = of_family.flavors
    if flavor not in flavors and published.is_folder(flavor):
        flavors = {flavor: published.numbers(family, flavor)}
    if flavor not in flavors:
        near = hints.flavor(flavor, flavors)
        meant = f'; did you mean "{near}"?' if near else ""
        allowed = ", ".join(flavors)
        raise InputError(
            f"model.flavor = {json.dumps(flavor)}: models/{family}.py has {allowed}{meant}; "
            "a folder of Hugging Face's may be named too, and this is none (no config.json in it)"
        )
    if foreign := [key for key in given if key not in of_family.options]:
        allowed = ", ".join(of_family.options)
        raise InputError(
            f"model.{foreign[0]}: the family {family} has no such number; remove it (there are "
            f"{allowed})"
        )
    numbers = flavors[flavor] | given
    for key, (sources, follow) in of_family.follows.items():
        if key not in given and any(source in given for source in sources):
            numbers[key] = follow(numbers)
    return numbers


def tokens_ahead(model: Model) -> int:
    """Return how many tokens after the next one training predicts (models/mtp.py)."""
    return architecture(model).get("mtp_depth", 0)


def query_width(model: Model) -> int:
    """Return the head dimension of queries. Raises InputError where `architecture` does."""
    numbers = architecture(model)
    return sum(numbers[name] for name in NUMBERS[model.family].query_width)


def rules(family: str) -> dict:
    """Return all rules for a run of this family: name -> (what breaks it, the sentence)."""
    return RULES | NUMBERS[family].rules


def data_parallel_shard(cfg: Config, world_size: int | None) -> int:
    """Resolve `parallelism.data_parallel_shard` where it is -1. Raises InputError when no whole
    number of ranks is left."""
    p = cfg.parallelism
    if p.data_parallel_shard != -1:
        return p.data_parallel_shard
    others = _besides_shard(p)
    if world_size is None or world_size % others:
        raise InputError(
            f"parallelism.data_parallel_shard = -1: {others} does not divide {world_size} processes"
        )
    return world_size // others


def _besides_shard(p: Parallelism) -> int:
    """Return the size of the mesh without data_parallel_shard."""
    return p.data_parallel_replicate * p.context_parallel * p.tensor_parallel * p.pipeline_parallel


def derive(cfg: Config, world_size: int | None) -> Config:
    """Fill in every option that was not set and follows from others, as a `Derived` number.

    Without a world size it is that of the smallest mesh with these replicas, and this context,
    tensor and pipeline parallelism.
    """
    p, training, schedule = cfg.parallelism, cfg.training, cfg.lr_schedule
    if training.local_batch_size is None:
        shard = data_parallel_shard(cfg, world_size or _besides_shard(p))
        # the rule batch_ranks: nothing is left
        rows = training.global_batch_size // (p.data_parallel_replicate * shard)
        if p.pipeline_parallel > 1:  # the bubble is smallest with as many microbatches as possible
            rows = 1
        training = training.model_copy(update={"local_batch_size": Derived(max(1, rows))})
    if schedule.warmup_steps is None:
        schedule = schedule.model_copy(update={"warmup_steps": Derived(_warmup_steps(cfg))})
    derived = cfg.model_copy(update={"training": training, "lr_schedule": schedule})
    return in_store(derived) if "://" in cfg.run.folder else derived


def in_store(cfg: Config) -> Config:
    """Return the configuration of a run whose folder is a URL: a folder on this machine, which is
    mirrored there, and checkpoints in the store alone. Every machine and start finds the same
    folder."""
    url = cfg.run.folder
    name = f"{url.rpartition('/')[2]}-{hashlib.sha256(url.encode()).hexdigest()[:8]}"
    folder = os.path.join(os.path.expanduser(cfg.data.cache or CACHE), "runs", name)
    run = cfg.run.model_copy(update={"folder": folder, "mirror": cfg.run.mirror or url})
    store = cfg.checkpoint.store or f"{url}/checkpoints"
    checkpoint = cfg.checkpoint.model_copy(update={"store": store})
    return cfg.model_copy(update={"run": run, "checkpoint": checkpoint})


def _warmup_steps(cfg: Config) -> int:
    given = cfg.lr_schedule.warmup_steps
    return round(cfg.lr_schedule.warmup_fraction * cfg.training.steps) if given is None else given


def _batch_repair(global_batch: int, ranks: int, local: int | None) -> str:
    """Return the values next to the given ones that make whole microbatches:
    "training.global_batch_size to 6 or 9"."""
    unit = ranks * (local or 1)
    below = global_batch // unit * unit
    choices = f"{below} or {below + unit}" if below else f"{unit}"
    batches = f"training.global_batch_size to {choices}"
    rows, rest = divmod(global_batch, ranks)
    if local is None or rest:
        return batches
    divisors = [number for number in range(1, rows + 1) if rows % number == 0]
    smaller = [divisor for divisor in divisors if divisor < local]
    larger = [divisor for divisor in divisors if divisor > local]
    near = smaller[-1:] + larger[:1]
    return f"training.local_batch_size to {' or '.join(map(str, near))}, or {batches}"


def trains_bpe(data: Data) -> bool:
    """Return whether a tokenizer of data.bpe_vocab_size will be trained for a source of the run.

    A prepared folder has its own tokenizer. A path that does not exist may be such a folder on the
    machines of the run, so it counts as one; they check again.
    """
    sources = [row.source for row in data.mixture] or [data.source]
    return data.tokenizer == "bpe" and not all(
        is_prepared(source) or _is_elsewhere(source) for source in sources
    )


def _is_elsewhere(source: str) -> bool:
    named = source in INSTALLED or source.startswith("hf:") or glob.has_magic(source)
    return not named and not os.path.exists(os.path.expanduser(source))


def _is_number(value: object) -> bool:
    """Return whether reshard_after_forward is a number of ranks: neither true, false nor
    "default"."""
    return isinstance(value, int) and not isinstance(value, bool)


def no_flash(param_dtype: str, width: int) -> bool:
    """Return whether FlashAttention and cuDNN lack a kernel for this dtype, or for a head dimension
    of `width` (models/kernels/document_attention.py::kernel_exists)."""
    return param_dtype in ("float32", "float64") or width % 8 != 0 or width > 256


def _splits_heads(c: SimpleNamespace, heads: int) -> bool:
    """Return whether Ulysses would have to split a head over ranks."""
    p = c.parallelism
    is_swapped = p.context_parallel > 1 and p.context_parallel_method == "ulysses"
    return is_swapped and heads % (p.context_parallel * p.tensor_parallel) != 0


WHOLE_HEADS = (
    "{{parallelism.context_parallel}} times {{parallelism.tensor_parallel}} does not divide "
    "{{split.{number}}}: with {{parallelism.context_parallel_method}} each rank computes whole "
    "{heads}. Use fewer ranks, or "
    'context_parallel_method = "gather", which any number of heads suits'
)


def _sequence_unit(p: Parallelism) -> int:
    """Return the number of which a sequence must be a multiple: each of its parts is as long as the
    others, and so are those into which tensor parallelism splits a part. With "gather" every rank
    has two parts."""
    parts = p.context_parallel
    if p.context_parallel > 1 and p.context_parallel_method == "gather":
        parts *= 2
    return math.lcm(parts, p.context_parallel * p.tensor_parallel)


def _is_set(c: SimpleNamespace, option: str) -> bool:
    table, _, key = option.partition(".")
    return getattr(getattr(c, table), key) != default(option)


def _unused(option: str) -> tuple:
    """Return the rule of an option that is set where no rank needs it (configs/ranks.py)."""
    degrees = OF_RANKS[option].degrees

    def broken(c: SimpleNamespace) -> bool:
        return _is_set(c, option) and all(getattr(c.parallelism, degree) == 1 for degree in degrees)

    have = " and ".join(f"{{parallelism.{degree}}}" for degree in degrees)
    raised = " or ".join(degrees)
    sentence = f"{{{option}}} has no effect with {have}: remove it, or set {raised} above 1"
    return broken, sentence


def _not_both(one: str, other: str) -> tuple:
    """Return the rule of two options that do not work together, or are untested together."""

    def broken(c: SimpleNamespace) -> bool:
        return _is_set(c, one) and _is_set(c, other)

    return broken, f"{{{one}}} together with {{{other}}} is not supported: use one of the two"


def _needs(needed: str, *options: str) -> tuple:
    """Return the rule of options that have no effect where another one is not set."""

    def broken(c: SimpleNamespace) -> bool:
        return not _is_set(c, needed) and any(_is_set(c, option) for option in options)

    shown = " and ".join(f"{{{option}}}" for option in options)
    verb, them = ("has", "it") if len(options) == 1 else ("have", "them")
    return broken, f"{shown} {verb} no effect with {{{needed}}}: set that, or remove {them}"


def _unread(option: str) -> tuple:
    """Return the rule of an option of [optimizer] that Muon and NorMuon alone read."""

    def broken(c: SimpleNamespace) -> bool:
        return _is_set(c, f"optimizer.{option}") and c.optimizer.kind not in MUONS

    sentence = f"{{optimizer.kind}} does not read {{optimizer.{option}}}: remove that, or use "
    return broken, f'{sentence}kind = "muon"'


QK_CLIP = ("llama", "deepseek_v3")  # families whose attention parallelisms/qk_clip.py knows


def _shown_stages(rows: tuple[TrainingStage, ...]) -> str:
    return json.dumps([row.model_dump(exclude_defaults=True) for row in rows])


def _wrong_weights(stages: tuple[TrainingStage, ...], mixture: tuple[MixtureRow, ...]) -> str:
    """List the names to which stages give weights and must not: a source that does not exist, one
    that is named twice, or that its own schedule changes at that step."""
    schedules = {row.name: dict(row.schedule) for row in mixture}
    wrong = []
    for stage in stages:
        names = [name for name, _ in stage.weights]
        for name in dict.fromkeys(names):
            if stage.begin in schedules.get(name, [stage.begin]) or names.count(name) > 1:
                wrong.append(f"{name} at step {stage.begin}")
    return ", ".join(wrong)


def _without_loss(stages: tuple[TrainingStage, ...], mixture: tuple[MixtureRow, ...]) -> int | None:
    """Return the first step from which on only sources of loss_weight 0 are read; None: never."""
    begins = {stage.begin for stage in stages}
    begins |= {step for row in mixture for step, _ in row.schedule}
    for begin in sorted({0, *begins}):
        read = []
        for row in mixture:
            changes = [(0, row.weight), *row.schedule]
            for stage in stages:
                changes += [(stage.begin, of) for name, of in stage.weights if name == row.name]
            _, weight = max(change for change in changes if change[0] <= begin)
            read += [row.loss_weight] if weight else []
        if read and not any(read):
            return begin
    return None


# Numbers that rules share. One whose inputs are unknown is unknown too, and the rules that need it
# are left out.
DERIVED = {
    "shard": lambda c: data_parallel_shard(c, getattr(c, "world", None)),
    "dp": lambda c: c.parallelism.data_parallel_replicate * c.shard,
    "query_width": lambda c: sum(getattr(c.model, name) for name in c.family.query_width),
    "no_flash": lambda c: no_flash(c.training.param_dtype, c.query_width),
    "besides_shard": lambda c: _besides_shard(c.parallelism),
    "product": lambda c: c.shard * c.besides_shard,
    "sequence_unit": lambda c: _sequence_unit(c.parallelism),
    "micro": lambda c: c.dp * (c.training.local_batch_size or 1),
    "tokens_of_matmul": lambda c: (
        (c.training.local_batch_size or 1) * c.training.seq_len // c.parallelism.context_parallel
    ),
    "schedule": lambda c: SCHEDULES[c.parallelism.pipeline_schedule],
    "splits_backward": lambda c: c.parallelism.pipeline_parallel > 1 and c.schedule.splits_backward,
    "stages": lambda c: (
        c.parallelism.pipeline_parallel
        * (c.parallelism.pipeline_stages_per_rank or c.schedule.default_stages)
    ),
    "least_microbatches": lambda c: (
        c.schedule.microbatches_per_rank * c.parallelism.pipeline_parallel
    ),
    "least_batch": lambda c: c.least_microbatches * c.micro,
    "batch_repair": lambda c: _batch_repair(
        c.training.global_batch_size, c.dp, c.training.local_batch_size
    ),
    "warmup": lambda c: _warmup_steps(c),
    "stages_shown": lambda c: f"training.stages = {_shown_stages(c.training.stages)}",
    "without_loss": lambda c: _without_loss(c.training.stages, c.data.mixture),
    "loss_weights": lambda c: json.dumps(
        [row.model_dump(include={"name", "loss_weight"}) for row in c.data.mixture]
    ),
    "stage_weights": lambda c: _wrong_weights(c.training.stages, c.data.mixture),
    "layers": lambda c: ", ".join(c.family.layers),
    "unknown_layers": lambda c: ", ".join(
        name for name in c.lora.targets if name not in c.family.layers
    ),
    "decay": lambda c: int(c.lr_schedule.decay_fraction * c.training.steps),
}

# In a rule `c` is the configuration, but c.model has the numbers of the architecture; c.world and
# c.local_world are the processes of the run and of each host, and the numbers above are there too.
# In a sentence {table.key} becomes "table.key = value", {numbers.key} is a number of the
# architecture alone, and {query_numbers} those of the family's query_width. c.family_name is
# model.family, and c.family its `models/options.py::Numbers`; c.split and {split} have what a mesh
# splits of the model, under the same names. A family's rules have the same form.
RULES = {
    # The mesh.
    "mesh_product": (
        lambda c: c.parallelism.data_parallel_shard != -1 and c.product != c.world,
        "{parallelism.data_parallel_replicate}, {parallelism.data_parallel_shard}, "
        "{parallelism.context_parallel}, {parallelism.tensor_parallel} and "
        "{parallelism.pipeline_parallel} multiply to {product}, but the run has {world} processes "
        "(NGPU on each node): make the two equal, or set data_parallel_shard = -1 to take what is "
        "left",
    ),
    "mesh_rest": (
        lambda c: c.parallelism.data_parallel_shard == -1 and c.world % c.besides_shard != 0,
        "{parallelism.data_parallel_shard} leaves no whole number of ranks: "
        "{parallelism.data_parallel_replicate} times {parallelism.context_parallel} times "
        "{parallelism.tensor_parallel} times {parallelism.pipeline_parallel} must divide the "
        "{world} processes of the run (NGPU on each node)",
    ),
    "tp_host": (
        lambda c: (
            not c.parallelism.tensor_parallel_across_hosts
            and c.local_world % c.parallelism.tensor_parallel != 0
        ),
        "{parallelism.tensor_parallel} does not divide the {local_world} processes of a host, so "
        "every layer would wait for the network: use a divisor, or set "
        "parallelism.tensor_parallel_across_hosts = true",
    ),
    "tp_sequence": (
        lambda c: (
            c.parallelism.context_parallel == 1
            and c.training.seq_len % c.parallelism.tensor_parallel != 0
        ),
        "{parallelism.tensor_parallel} does not divide {training.seq_len}: each rank keeps an "
        "equal part of the sequence",
    ),
    # rows are split as by torch.chunk: ceil(vocab / tp) to each rank until none are left
    "tp_vocabulary": (
        lambda c: (
            (c.parallelism.tensor_parallel - 1)
            * -(-c.model.vocab_size // c.parallelism.tensor_parallel)
            >= c.model.vocab_size
        ),
        "{parallelism.tensor_parallel} leaves a rank without a row of the vocabulary, "
        "{model.vocab_size}: use a smaller tensor_parallel or a larger vocabulary (it need not be "
        "a multiple)",
    ),
    "tp_offload": _not_both("parallelism.cpu_offload", "parallelism.tensor_parallel"),
    "tp_async": (
        lambda c: (
            c.parallelism.async_tensor_parallel
            and (
                c.parallelism.tensor_parallel == 1
                or not c.compile.enabled
                or c.compile.backend != "inductor"
                or c.parallelism.tensor_parallel_across_hosts
            )
        ),
        "{parallelism.async_tensor_parallel} is a rewriting of compiled blocks for GPUs of one "
        "host: it needs tensor_parallel "
        'above 1, compile.enabled = true, compile.backend = "inductor", and '
        "tensor_parallel_across_hosts = false",
    ),
    # FSDP2 makes the groups of N from each rank's slice of the mesh; the slices wait for each other
    "tp_reshard": (
        lambda c: (
            _is_number(c.parallelism.reshard_after_forward)
            and c.parallelism.tensor_parallel
            * c.parallelism.context_parallel
            * c.parallelism.pipeline_parallel
            > 1
        ),
        "{parallelism.reshard_after_forward}, a number of ranks, together with "
        "{parallelism.tensor_parallel}, "
        "{parallelism.context_parallel} and {parallelism.pipeline_parallel} is not supported, and "
        "would hang with some of "
        'them: use true, false or "default", or set these to 1',
    ),
    "ep_experts": (
        lambda c: c.parallelism.expert_parallel > 1 and not getattr(c.model, "n_experts", 0),
        "{parallelism.expert_parallel} has no effect on a model without experts: set it to 1, or "
        "choose a model that has some",
    ),
    "ep_ranks": (
        lambda c: (
            c.shard
            * c.parallelism.context_parallel
            * c.parallelism.tensor_parallel
            % c.parallelism.expert_parallel
            != 0
        ),
        "{parallelism.expert_parallel} does not divide {shard} times "
        "{parallelism.context_parallel} times {parallelism.tensor_parallel}, the ranks of "
        "data_parallel_shard, context_parallel and tensor_parallel, from which its groups are "
        "taken: set it to a divisor, or give the run more processes than {world} (NGPU on each node)",
    ),
    "ep_hosts": (
        lambda c: (
            c.parallelism.expert_exchange == "hierarchical"
            and c.parallelism.expert_parallel > 1
            and (
                c.parallelism.expert_parallel <= c.local_world
                or c.parallelism.expert_parallel % c.local_world != 0
            )
        ),
        "{parallelism.expert_exchange} is for experts that are shared by all ranks of several "
        "hosts, and {parallelism.expert_parallel} is no such multiple of the {local_world} "
        'processes of a host: use "flat", or change expert_parallel',
    ),
    "ep_reshard": (  # as in tp_reshard: experts are sharded over a slice of the ranks
        lambda c: (
            _is_number(c.parallelism.reshard_after_forward) and c.parallelism.expert_parallel > 1
        ),
        "{parallelism.reshard_after_forward}, a number of ranks, together with "
        "{parallelism.expert_parallel} is not supported, because experts are sharded over fewer "
        'ranks than other weights: use true, false or "default", or set expert_parallel to 1',
    ),
    "cp_sequence": (
        lambda c: c.parallelism.context_parallel > 1 and c.training.seq_len % c.sequence_unit != 0,
        "{training.seq_len} is not a multiple of {sequence_unit}, so "
        "{parallelism.context_parallel} by {parallelism.context_parallel_method} with "
        "{parallelism.tensor_parallel} cannot split it into equal parts: change one of them",
    ),
    "cp_attention": (
        lambda c: (
            c.parallelism.context_parallel > 1
            and c.parallelism.context_parallel_method == "gather"
            and c.training.attention == "cudnn"
        ),
        "{training.attention} has no kernel for {parallelism.context_parallel_method}, where a "
        "rank has fewer queries than "
        'keys: use "auto" or "flash", or context_parallel_method = "ulysses"',
    ),
    "cp_kernel": (  # with run.device = "auto" tools/check.py asks, on the machine
        lambda c: (
            c.parallelism.context_parallel > 1
            and c.parallelism.context_parallel_method == "gather"
            and c.run.device == "cuda"
            and c.no_flash
        ),
        "{parallelism.context_parallel_method} with {parallelism.context_parallel} needs on a GPU "
        "a 16-bit type and heads of 8, "
        "16, ... 256 numbers, but {training.param_dtype} and {query_numbers}: use "
        'context_parallel_method = "ulysses", or change '
        "these",
    ),
    "reshard_ranks": (
        lambda c: (
            _is_number(c.parallelism.reshard_after_forward)
            and (
                c.parallelism.reshard_after_forward >= c.shard
                or c.shard % c.parallelism.reshard_after_forward != 0
            )
        ),
        "{parallelism.reshard_after_forward} must be less than the {shard} ranks over which FSDP "
        "shards, and divide them (true means all of them)",
    ),
    "keep_gathered": (
        lambda c: (
            c.parallelism.keep_gathered
            > (0 if c.parallelism.reshard_after_forward is False else c.model.n_layers)
        ),
        "{parallelism.keep_gathered} is for blocks whose weights would be freed after forward, and "
        "there are {model.n_layers} blocks and {parallelism.reshard_after_forward}: lower it",
    ),
    "reshard_after_backward": (
        lambda c: (
            not c.parallelism.reshard_after_backward
            and c.parallelism.reshard_after_forward is not False
        ),
        "{parallelism.reshard_after_backward} keeps for the next microbatch what "
        "{parallelism.reshard_after_forward} frees after forward: set reshard_after_forward = false too",
    ),
    **{
        f"{option.partition('.')[2]}_unused": _unused(option)
        for option in OF_RANKS
        if OF_RANKS[option].refused
    },
    # The pipeline. Several rules ask for pipeline_parallel > 1, because its other options have no
    # effect without it.
    "pipeline_stages_per_rank": (
        lambda c: (
            c.parallelism.pipeline_parallel > 1
            and c.parallelism.pipeline_stages_per_rank != 0
            and not c.schedule.stages_per_rank[0]
            <= c.parallelism.pipeline_stages_per_rank
            <= c.schedule.stages_per_rank[1]
        ),
        "{parallelism.pipeline_stages_per_rank}, but {parallelism.pipeline_schedule} has "
        "{schedule.stages_per_rank[0]} to {schedule.stages_per_rank[1]} stages on each rank: "
        "remove it (then there are {schedule.default_stages}), or choose another schedule",
    ),
    "pipeline_stages": (
        lambda c: c.parallelism.pipeline_parallel > 1 and c.stages > c.model.n_layers,
        "{parallelism.pipeline_parallel} and {parallelism.pipeline_schedule} make {stages} stages, "
        "but there are only {model.n_layers} and every stage needs a layer: lower "
        "pipeline_parallel or pipeline_stages_per_rank",
    ),
    "pipeline_layers": (
        lambda c: (
            c.parallelism.pipeline_parallel > 1
            and c.parallelism.pipeline_layers
            and (
                len(c.parallelism.pipeline_layers) != c.stages
                or sum(c.parallelism.pipeline_layers) != c.model.n_layers
            )
        ),
        "{parallelism.pipeline_layers} must have one number for each of the {stages} stages, and "
        "together they must be {model.n_layers}: change it, or remove it to divide the layers by "
        "their cost",
    ),
    "pipeline_microbatches": (
        lambda c: (
            c.parallelism.pipeline_parallel > 1 and c.training.global_batch_size < c.least_batch
        ),
        "{parallelism.pipeline_schedule} on {parallelism.pipeline_parallel} ranks needs at least "
        "{least_microbatches} microbatches, and one has {micro} sequences over all data-parallel "
        "ranks, but {training.global_batch_size}: set it to {least_batch} or more, lower "
        "training.local_batch_size, or choose a different schedule",
    ),
    "pipeline_offload": _not_both("parallelism.cpu_offload", "parallelism.pipeline_parallel"),
    # the second half of a backward needs the weights that the first one would free
    "pipeline_reshard": (
        lambda c: c.splits_backward and c.parallelism.reshard_after_forward is True,
        "{parallelism.pipeline_schedule} splits the backward pass and needs the weights between "
        "its halves, so they cannot be "
        'freed with {parallelism.reshard_after_forward}: set it to "default", or use the schedule '
        '"1f1b" or "interleaved_1f1b"',
    ),
    # then parallelisms/dp.py frees none of a stage's weights before its last backward
    "pipeline_keep_gathered": (
        lambda c: (
            c.parallelism.pipeline_parallel > 1
            and c.parallelism.keep_gathered > 0
            and c.parallelism.reshard_after_forward == "default"
        ),
        "{parallelism.keep_gathered} has no effect with {parallelism.pipeline_parallel} and "
        "{parallelism.reshard_after_forward}, with which a stage keeps all its weights gathered "
        "for the next microbatch: remove it, or set reshard_after_forward = true to free those of "
        "all other blocks",
    ),
    "gather_again": (
        lambda c: (
            c.activation_checkpoint.gather_again and c.activation_checkpoint.mode != "selective"
        ),
        "{activation_checkpoint.gather_again} is about what selective checkpointing would keep, with "
        "{activation_checkpoint.mode}: remove it",
    ),
    # the second half of a backward pass would recompute what the first one has recomputed
    "pipeline_selective": (
        lambda c: c.splits_backward and c.activation_checkpoint.mode == "selective",
        "{parallelism.pipeline_schedule} splits the backward pass, which PyTorch cannot do with "
        "{activation_checkpoint.mode}: "
        'use the mode "none", "full" or "every_n", or the schedule "1f1b" or "interleaved_1f1b"',
    ),
    # AOTAutograd makes one node of a compiled block, whose backward gives all gradients at once
    "pipeline_compile": (
        lambda c: c.splits_backward and c.compile.enabled,
        "{parallelism.pipeline_schedule} splits the backward pass, which PyTorch cannot do with "
        "{compile.enabled}: set that "
        'to false, or use the schedule "1f1b" or "interleaved_1f1b"',
    ),
    "pipeline_float8": (  # one autograd node of a matmul: each half would compute both gradients
        lambda c: c.splits_backward and c.training.float8 != "none",
        "{parallelism.pipeline_schedule} splits the backward pass, and with {training.float8} each "
        'half would do the work of both: set that to "none", or use the schedule "1f1b" or '
        '"interleaved_1f1b"',
    ),
    # GPU kernels of attention.
    "mask_compile": (  # what does not fit is a loop over documents, and never one graph
        lambda c: (
            c.data.mask_documents and c.compile.enabled and c.run.device != "cpu" and c.no_flash
        ),
        "{data.mask_documents} with {compile.enabled} needs on a GPU a 16-bit type and heads of "
        "8, 16, ... 256 numbers, "
        "but {training.param_dtype} and {query_numbers}: change these, do without one of the two, "
        'or set run.device = "cpu" for a run without a GPU',
    ),
    "attention": (
        lambda c: c.training.attention != "auto" and (c.run.device == "cpu" or c.no_flash),
        "{training.attention} is a kernel for GPUs, 16-bit types and heads of 8, 16, ... 256 "
        "numbers, but {run.device}, "
        '{training.param_dtype} and {query_numbers}: set it to "auto", or change these',
    ),
    "delta_rule": (
        lambda c: (
            c.training.delta_rule == "flash"
            and (c.run.device == "cpu" or c.training.param_dtype in ("float32", "float64"))
        ),
        "{training.delta_rule} is a kernel for GPUs and 16-bit types, but {run.device} and "
        '{training.param_dtype}: set it to "auto", or change these',
    ),
    "cp_delta_rule": (
        lambda c: c.training.delta_rule == "flash" and c.parallelism.context_parallel > 1,
        "{training.delta_rule} computes whole sequences, but with {parallelism.context_parallel} "
        'ranks exchange what their tokens do to a state: set it to "auto"',
    ),
    "delta_rule_of": (
        lambda c: (
            c.training.delta_rule != "auto"
            and not any(name.startswith("delta_") for name in vars(c.model))
        ),
        "{training.delta_rule} has no effect: this model.family has no gated delta net; set it to "
        '"auto"',
    ),
    # The batch and the model.
    "batch": (
        lambda c: (
            c.training.local_batch_size is not None
            and c.training.global_batch_size % c.micro != 0
            # of which some then have rows of padding (data/uneven.py)
            and not (c.run.fault_tolerant and c.training.global_batch_size >= c.dp)
        ),
        "{training.global_batch_size} is not a multiple of {micro}, which is "
        "{training.local_batch_size} on {dp} data-parallel ranks, so no whole number of "
        "microbatches: set {batch_repair}",
    ),
    "batch_ranks": (
        lambda c: c.training.local_batch_size is None and c.training.global_batch_size % c.dp != 0,
        "{training.global_batch_size} is not a multiple of the {dp} data-parallel ranks, which "
        "share it equally: set {batch_repair}",
    ),
    "seq_len": (
        lambda c: c.training.seq_len > c.model.max_seq_len,
        "{training.seq_len} is more than {model.max_seq_len}, the positions that the model is made "
        "for: use a smaller one, or set model.max_seq_len (and a larger base of the rotary "
        "positions) to train the model for longer sequences",
    ),
    # The vocabulary.
    "bpe_vocabulary": (
        lambda c: trains_bpe(c.data) and c.data.bpe_vocab_size > c.model.vocab_size,
        "{data.bpe_vocab_size} is more than the embedding has rows, {model.vocab_size}: lower the "
        "one or raise the other",
    ),
    "bytes_vocabulary": (
        lambda c: c.data.tokenizer == "bytes" and c.model.vocab_size < 257,
        "{data.tokenizer} needs at least 257 rows of the embedding (256 bytes and the end of a "
        "text), but {model.vocab_size}",
    ),
    "tokenizer_pattern": (
        lambda c: c.data.tokenizer_pattern and c.data.tokenizer in ("bpe", "bytes"),
        "{data.tokenizer_pattern} has no effect with {data.tokenizer}: it is for a tiktoken rank "
        "file that does not say its pattern. Remove it",
    ),
    "end_token": (
        lambda c: c.data.tokenizer == "bpe" and c.data.end_token not in ("", "<|endoftext|>"),
        "{data.end_token} has no effect with {data.tokenizer}, which ends texts with "
        "<|endoftext|>: remove it",
    ),
    # The sources.
    "mixture_source": (
        lambda c: c.data.mixture and c.data.source != Data().source,
        "{data.source} has no effect with data.mixture, which names the sources: remove it, or "
        "give it a row there",
    ),
    "mixture_loss_weights": (
        lambda c: c.without_loss is not None,
        "data.mixture = {loss_weights} reads no source from step {without_loss} on that counts, so no "
        "token would be trained on: give one that is read there a loss_weight above 0",
    ),
    # Stages of the run.
    "stages_begin": (
        lambda c: any(row.begin >= c.training.steps for row in c.training.stages),
        "{stages_shown} begins after {training.steps}, where the run has ended: begin earlier, "
        "or raise steps",
    ),
    "stages_nothing": (
        lambda c: any(row == TrainingStage(begin=row.begin) for row in c.training.stages),
        "{stages_shown} has a row that changes nothing: give it "
        f"{', '.join(list(TrainingStage.model_fields)[1:])}, or remove it",
    ),
    "stages_weights": (
        lambda c: c.stage_weights != "",
        "{stages_shown} gives weights to {stage_weights}: name sources of data.mixture, each "
        "once, and no step at which their schedule has an entry",
    ),
    "stages_schedule": (
        lambda c: any(
            row.lr_schedule is None and (row.lr_warmup_steps or row.lr_min_ratio is not None)
            for row in c.training.stages
        ),
        "{stages_shown} sets lr_warmup_steps or lr_min_ratio, which have no effect without "
        "lr_schedule: add it",
    ),
    "stages_warmup": (
        lambda c: any(
            row.lr_warmup_steps > max(0, c.training.steps - row.begin) for row in c.training.stages
        ),
        "{stages_shown} sets more lr_warmup_steps than are left of {training.steps}: lower it",
    ),
    "stages_stream": (
        lambda c: (
            c.data.stream
            and any(
                row.seq_len or row.global_batch_size or row.weights for row in c.training.stages
            )
        ),
        "{stages_shown} with {data.stream} can change the learning rate alone: prepare the text "
        "(python -m data.prepare), or leave seq_len, global_batch_size and weights out",
    ),
    "validation_names": (
        lambda c: (
            {row.name for row in c.validation.sets}
            & {"held_out", *(row.name for row in c.data.mixture)}
        ),
        "{validation.sets} and the held-out documents of data.mixture (or of data.source, called "
        "held_out) share a name: give the set another",
    ),
    "evaluation_interval": (
        lambda c: c.evaluation.interval > 0 and not c.evaluation.tasks,
        "{evaluation.interval} has no effect without tasks: add a table [[evaluation.tasks]] with "
        "name and file (docs/evaluation.md), or remove it",
    ),
    # Conversations and completions.
    "answers_masked": (
        lambda c: c.data.format != "text" and not c.data.mask_documents,
        "{data.format} packs several conversations into a window, and attention must stay inside "
        "each: set data.mask_documents = true",
    ),
    "answers_tokenizer": (
        lambda c: c.data.format != "text" and trains_bpe(c.data),
        "{data.format}, but {data.tokenizer} would be trained on the lines of that file: give the "
        "path of a tokenizer, such as the tokenizer.json in the folder of the run that is "
        'continued, or "bytes"',
    ),
    "answers_stream": (
        lambda c: c.data.format != "text" and c.data.stream,
        "{data.format} with {data.stream} is not supported: windows of whole conversations are "
        "packed from a prepared corpus. Set data.stream = false",
    ),
    "answers_field": (
        lambda c: c.data.format != "text" and c.data.text_field != Data().text_field,
        "{data.text_field} has no effect with {data.format}, which reads messages, or prompt and "
        "completion: remove it",
    ),
    **{
        option: (
            lambda c, option=option: getattr(c.data, option) and c.data.format != "chat",
            f'{{data.{option}}} has no effect with {{data.format}}: set data.format = "chat", or '
            "remove it (a prepared folder keeps its own)",
        )
        for option in ("chat_template", "chat_may_drop")
    },
    # Streaming.
    "stream_tokenizer": (
        lambda c: c.data.stream and c.data.tokenizer == "bpe",
        "{data.stream}, but {data.tokenizer} is trained on a corpus first: give the path of a "
        "tokenizer "
        '(python -m data.train_tokenizer makes one), or "bytes"',
    ),
    "stream_ranks": (
        lambda c: c.data.stream and c.data.streams % c.dp != 0,
        "{data.streams} is not a multiple of the {dp} data-parallel ranks: set it to one (of every "
        "number of ranks that the run may have one day: it cannot change later)",
    ),
    "stream_mixture": (
        lambda c: c.data.stream and c.data.mixture,
        "{data.stream} reads data.source alone, but there is a data.mixture: prepare its sources, "
        "or mix them into one",
    ),
    "stream_splice": (
        lambda c: c.data.stream and c.data.allow_splice,
        "{data.allow_splice} with {data.stream} is not supported: to go on with other data, start "
        "from the weights in another run.folder, with checkpoint.load_path",
    ),
    "stream_skip": (
        lambda c: c.data.stream and c.data.skip,
        "{data.skip} with {data.stream} is not supported: prepare the source, or start from the "
        "weights in another run.folder",
    ),
    "stream_workers": (
        lambda c: c.data.stream and c.data.workers > 0,
        "{data.workers} has no effect with {data.stream}, which reads in a thread: remove it",
    ),
    "stream_timeout": (
        lambda c: c.data.stream and c.data.timeout_seconds >= c.run.step_timeout_seconds,
        "{data.timeout_seconds} is not less than {run.step_timeout_seconds}: the ranks that wait "
        "for one whose stream hangs would give up before it does, without a checkpoint; lower the "
        "first or raise the second",
    ),
    "stream_validation": (
        lambda c: c.data.stream and c.validation.interval > 0 and not c.validation.sets,
        "{validation.interval} with {data.stream} needs [[validation.sets]]: prepare a part of the "
        "source (what it holds out is held out of the stream too) and name it there, or set "
        "interval = 0",
    ),
    # The time line of the run.
    "warmup": (
        lambda c: c.warmup > c.training.steps,
        "{lr_schedule.warmup_steps} is more than {training.steps}: the peak learning rate would "
        "never be reached. Lower it, or leave it out and set lr_schedule.warmup_fraction, which "
        "fits any number of steps",
    ),
    "wsd": (
        lambda c: c.lr_schedule.kind == "wsd" and c.warmup + c.decay > c.training.steps,
        "{lr_schedule.kind}: {warmup} steps of warm-up and the {decay} steps of "
        "{lr_schedule.decay_fraction} are together more than {training.steps}: lower one of the "
        "two",
    ),
    "profiler_window": (
        lambda c: c.profiler.enabled and c.training.steps < PROFILE_FROM,
        "{profiler.enabled} traces from the fifth step on, and the run ends before it: "
        "{training.steps}; raise that",
    ),
    "stop_after": (
        lambda c: c.training.stop_after > c.training.steps,
        "{training.stop_after} is beyond the end of the run, {training.steps}: lower the first",
    ),
    "branch_from": (
        lambda c: (
            c.checkpoint.branch_from
            and (c.checkpoint.load_path or c.checkpoint.load_hf or c.lora.rank > 0)
        ),
        "{checkpoint.branch_from} goes on with all of another run's state: it excludes "
        "checkpoint.load_path, checkpoint.load_hf and lora.rank",
    ),
    "peers": (
        lambda c: c.checkpoint.peers and c.checkpoint.peers >= c.world // c.local_world,
        "{checkpoint.peers} copies would need as many hosts besides a host's own, and there are "
        "{world} processes, {local_world} on each host: lower it, or set it to 0",
    ),
    "peers_unused": _needs(
        "checkpoint.peers",
        "checkpoint.peer_interval",
        "checkpoint.peer_stride",
    ),
    "fault_tolerant": (
        lambda c: c.run.fault_tolerant and c.data.stream,
        "{run.fault_tolerant} keeps the state of a rank when others are lost, and the places of "
        "{data.stream} are known to all ranks together alone: set one to false",
    ),
    "leave_out_odd_replica": _needs("run.fault_tolerant", "debug.leave_out_odd_replica"),
    # what is saved by a run that goes on must have been compared
    "leave_out_unchecked": (
        lambda c: (
            c.debug.leave_out_odd_replica
            and (
                not c.debug.replica_check_interval
                or c.checkpoint.interval % c.debug.replica_check_interval
                or (
                    c.checkpoint.peers
                    and c.checkpoint.peer_interval % c.debug.replica_check_interval
                )
            )
        ),
        "{debug.leave_out_odd_replica} needs a comparison before each save: "
        "{debug.replica_check_interval} must divide {checkpoint.interval}, and with "
        "checkpoint.peers also {checkpoint.peer_interval}",
    ),
    "load_step": (
        lambda c: c.checkpoint.load_step > c.training.steps,
        "{checkpoint.load_step} is beyond the end of the run, {training.steps}",
    ),
    # Options that exclude or need one another.
    "skip_spikes": (
        lambda c: c.training.skip_spikes and c.training.spike_threshold == 0,
        "{training.skip_spikes} needs training.spike_threshold, which says what a spike is: set it "
        "(6, say)",
    ),
    "replay": (
        lambda c: c.debug.replay_interval > 0 and c.run.device != "cpu" and not c.run.deterministic,
        "{debug.replay_interval} compares two gradients bit by bit, which on a GPU differ anyway "
        "with {run.deterministic}: set "
        'that to true (or run.device = "cpu" for a run without a GPU)',
    ),
    # a dispatch mode sees no operator of a compiled region, or forbids its compilation
    "watch_compile": (
        lambda c: (c.debug.check_collectives or c.debug.replay_interval) and c.compile.enabled,
        "{debug.check_collectives} and {debug.replay_interval} watch operators one by one, which "
        "{compile.enabled} takes out of sight: do without the one or the other",
    ),
    # what a recording cannot hold; configs/ knows no GPU, so training/graphs.py refuses the rest
    "graphs_ranks": (
        lambda c: c.compile.cuda_graphs and c.world > 1,
        "{compile.cuda_graphs} is for one process, and the run has {world}: their collectives are "
        "not recorded; set it to false",
    ),
    "graphs_cpu": (
        lambda c: c.compile.cuda_graphs and (c.run.device == "cpu" or c.parallelism.cpu_offload),
        "{compile.cuda_graphs} needs weights and activations on a GPU, but {run.device} and "
        "{parallelism.cpu_offload}: set it to false",
    ),
    "graphs_documents": (
        lambda c: c.compile.cuda_graphs and c.data.mask_documents,
        "{compile.cuda_graphs} records shapes, and with {data.mask_documents} each batch has "
        "another number of documents: do without the one or the other",
    ),
    "graphs_watch": (
        lambda c: c.compile.cuda_graphs and c.debug.check_collectives,
        "{debug.check_collectives} watches operators one by one, which {compile.cuda_graphs} takes "
        "out of sight: do without the one or the other",
    ),
    "graphs_noise": (
        lambda c: c.compile.cuda_graphs and c.metrics.noise_scale_interval > 0,
        "{metrics.noise_scale_interval} computes a second gradient, which {compile.cuda_graphs} does "
        "not record: do without the one or the other",
    ),
    "noise_batch": (  # training/noise_scale.py::WINDOWS
        lambda c: c.metrics.noise_scale_interval > 0 and c.training.global_batch_size < 4,
        "{metrics.noise_scale_interval} compares one window of four with the whole batch, and "
        "{training.global_batch_size}: raise that, or set noise_scale_interval = 0",
    ),
    "noise_replay": (
        lambda c: (
            c.metrics.noise_scale_interval > 0
            and c.debug.replay_interval > 0
            and c.metrics.noise_scale_interval % c.debug.replay_interval == 0
        ),
        "{metrics.noise_scale_interval} measures no step that {debug.replay_interval} computes twice, "
        "and that is each of its steps: make the second no divisor of the first",
    ),
    "noise_weights": (
        lambda c: (
            c.metrics.noise_scale_interval > 0
            and any(row.loss_weight != 1 for row in c.data.mixture)
        ),
        "{metrics.noise_scale_interval} takes all tokens for equal, and data.mixture = {loss_weights} "
        "weighs them: do without the one or the other",
    ),
    "float8_tp": _not_both("training.float8", "parallelism.tensor_parallel"),
    "float8_dtype": (  # auto is bfloat16 on every GPU that has float8
        lambda c: c.training.float8 != "none" and c.training.param_dtype in ("float32", "float64"),
        "{training.float8} rounds what {training.param_dtype} would keep: set param_dtype = "
        '"bfloat16", or float8 = "none"',
    ),
    "float8_tokens": (  # parallelisms/float8.py::MULTIPLE
        lambda c: (
            c.training.float8 != "none"
            and not c.debug.emulate_float8
            and c.tokens_of_matmul % 16 != 0
        ),
        "{training.float8} multiplies matrices whose sides are multiples of 16, and a microbatch has "
        "{tokens_of_matmul} tokens on a rank: change {training.seq_len} or "
        "{training.local_batch_size}",
    ),
    "float8_emulate": _needs("training.float8", "debug.emulate_float8"),
    "momentum": (
        lambda c: c.optimizer.kind in ("adamw", "soap") and (c.optimizer.momentum or 0) > 0,
        "{optimizer.momentum} has no effect with {optimizer.kind}, which has betas: remove it, or "
        'use kind = "sgd"',
    ),
    "ns_dtype_unread": _unread("ns_dtype"),
    "adjust_lr_fn_unread": _unread("adjust_lr_fn"),
    "qk_clip_unread": _unread("qk_clip"),
    "muon_offload": (
        lambda c: c.optimizer.kind in OF_MATRICES and c.parallelism.cpu_offload,
        "{optimizer.kind} together with {parallelism.cpu_offload} is not supported, because the "
        "matrices would be multiplied on the CPU: set cpu_offload = false, or use kind = "
        '"adamw"',
    ),
    "qk_clip_family": (
        lambda c: c.optimizer.qk_clip > 0 and c.family_name not in QK_CLIP,
        "{optimizer.qk_clip} scales the weights of queries and keys, and in the family {family_name} "
        "logits do not follow from these alone, or it is untested: leave it out",
    ),
    "qk_clip_with": (
        lambda c: (
            c.optimizer.qk_clip > 0
            and (
                c.compile.enabled
                or c.compile.cuda_graphs
                or c.data.mask_documents
                or len(c.training.freeze) > 0
                or c.optimizer.average_decay > 0
            )
        ),
        "{optimizer.qk_clip} with {compile.enabled}, {compile.cuda_graphs}, {data.mask_documents}, "
        "{training.freeze} and {optimizer.average_decay} is not supported, since it is untested: "
        "leave out the one or the others",
    ),
    # Transfer over width and depth.
    "transfer_tied": (
        lambda c: c.model.width_base and c.model.tied_embeddings,
        "{model.width_base} scales the embedding and the output projection differently, and "
        "{model.tied_embeddings} makes them one: set tied_embeddings = false, or remove width_base",
    ),
    "transfer_depth": (
        lambda c: c.model.depth_base and not c.family.branch_ends,
        "{model.depth_base} scales what a block adds to the residual stream, and in the family "
        "{family_name} a norm follows there that would undo it: remove depth_base",
    ),
    "transfer_kind": (
        lambda c: (
            (c.model.width_base or c.model.depth_base) and c.optimizer.kind in ("sgd", "soap")
        ),
        "{model.width_base} and {model.depth_base} scale the learning rates of AdamW and Muon, and "
        'this is {optimizer.kind}: remove them, or set kind = "adamw"',
    ),
    "transfer_lora": (
        lambda c: (c.model.width_base or c.model.depth_base) and c.lora.rank,
        "{model.width_base} and {model.depth_base} have no effect on adapters: remove them, or "
        "{lora.rank}",
    ),
    "fim_unused": _needs("data.fim_rate", "data.fim_tokens"),
    "fim_format": (
        lambda c: c.data.fim_rate and c.data.format != "text",
        "{data.fim_rate} rearranges texts, and {data.format}: set fim_rate to 0",
    ),
    # Adapters.
    "lora_unused": _needs("lora.rank", "lora.alpha", "lora.targets"),
    "lora_targets": (
        lambda c: c.lora.rank > 0 and (c.unknown_layers or not c.lora.targets),
        "{lora.targets} must name layers that get adapters of {lora.rank}, some of those that this "
        "model.family has: {layers}",
    ),
    "lora_base": (
        lambda c: c.lora.rank > 0 and not (c.checkpoint.load_hf or c.checkpoint.load_path),
        "{lora.rank} trains adapters of a model's weights, and none is named: set "
        "checkpoint.load_hf or checkpoint.load_path",
    ),
    "lora_load": (
        lambda c: c.lora.rank > 0 and c.checkpoint.exclude_from_loading,
        "{lora.rank} trains adapters of all weights of checkpoint.load_path: remove "
        "{checkpoint.exclude_from_loading}",
    ),
    "lora_export": (
        lambda c: c.lora.rank > 0 and c.checkpoint.export_hf,
        "{checkpoint.export_hf} with {lora.rank} is not supported: remove it, and write the "
        "adapters or the merged model with `python -m tools.convert` afterwards",
    ),
    "lora_muon": (
        lambda c: c.lora.rank > 0 and c.optimizer.kind in OF_MATRICES,
        "{optimizer.kind} has a rule for the hidden matrices, which are frozen with {lora.rank}: "
        'use kind = "adamw"',
    ),
    "lora_float8": _not_both("training.float8", "lora.rank"),
    "lora_async": _not_both("parallelism.async_tensor_parallel", "lora.rank"),
    "load_path": _needs("checkpoint.load_path", "checkpoint.exclude_from_loading"),
    "load_hf": (
        lambda c: c.checkpoint.load_hf and c.checkpoint.load_path,
        "{checkpoint.load_hf} and {checkpoint.load_path} are both to start the run from: remove "
        "one of them",
    ),
    "validation_split": (
        lambda c: (
            c.validation.interval > 0 and c.data.validation_fraction == 0 and not c.validation.sets
        ),
        "{validation.interval} needs held-out documents, but {data.validation_fraction}: hold some "
        "out, name some validation.sets, or set interval = 0",
    ),
    # What a mesh splits of the model.
    "tp_heads": (
        lambda c: c.split.heads % c.parallelism.tensor_parallel != 0,
        "{parallelism.tensor_parallel} does not divide {split.heads}: each rank computes whole "
        "query heads",
    ),
    "tp_kv_heads": (
        lambda c: c.split.kv_heads % c.parallelism.tensor_parallel != 0,
        "{parallelism.tensor_parallel} does not divide {split.kv_heads}: each rank computes "
        "whole key/value heads, which are not duplicated, so tensor_parallel is at most "
        "{family.kv_heads} and divides it",
    ),
    "tp_hidden": (
        lambda c: c.split.hidden_units % c.parallelism.tensor_parallel != 0,
        "{parallelism.tensor_parallel} does not divide {split.hidden_units}: each rank computes an "
        "equal share of the hidden units",
    ),
    "tp_shared": (
        lambda c: (
            c.model.n_shared_experts * c.model.expert_dim % c.parallelism.tensor_parallel != 0
        ),
        "{parallelism.tensor_parallel} does not divide {model.n_shared_experts} times "
        "{model.expert_dim}, the hidden units of the shared experts, of which each rank computes "
        "an equal share",
    ),
    "cp_heads": (
        lambda c: _splits_heads(c, c.split.kv_heads),
        WHOLE_HEADS.format(number="kv_heads", heads="key/value heads"),
    ),
    "cp_latent_heads": (
        lambda c: not c.family.kv_heads and _splits_heads(c, c.split.heads),
        WHOLE_HEADS.format(number="heads", heads="heads"),
    ),
    "experts_ep": (
        lambda c: c.model.n_experts % c.parallelism.expert_parallel != 0,
        "{parallelism.expert_parallel} does not divide {model.n_experts}: each rank has equally "
        "many experts",
    ),
    "experts_async": (
        lambda c: c.model.n_experts and c.parallelism.async_tensor_parallel,
        "{parallelism.async_tensor_parallel} together with experts ({model.n_experts}) is not "
        "supported, since it is untested: set it to false",
    ),
}


def broken_rules(
    cfg: Config | SimpleNamespace,
    world_size: int | None = None,
    local_world_size: int | None = None,
) -> list[str]:
    """Return the sentences of all rules that the configuration breaks; empty when it is sound.

    cfg may lack options (a SimpleNamespace of SimpleNamespaces, from a file with mistakes), and the
    sizes may be unknown: rules that need what is missing are left out, the others count.
    """
    problems, applicable = [], RULES
    c = SimpleNamespace(
        **{table: options for table, options in vars(cfg).items() if table != "model"}
    )
    words = {table: _named(table, options) for table, options in vars(c).items()}
    try:
        numbers = architecture(cfg.model)
        applicable = rules(cfg.model.family)
        wrong = {key for key in Model.model_fields if not hasattr(cfg.model, key)}
        c.model = SimpleNamespace(
            **{key: value for key, value in numbers.items() if key not in wrong},
            **{key: getattr(cfg.model, key) for key in TRANSFER if key not in wrong},
        )
        words["model"], words["numbers"] = _named("model", c.model), c.model
        for key in vars(c.model):
            if getattr(cfg.model, key, None) is None:
                vars(words["model"])[key] += f" (of flavor {cfg.model.flavor})"
        c.family = words["family"] = NUMBERS[cfg.model.family]
        c.family_name = words["family_name"] = cfg.model.family
        c.split, words["split"] = _split(c.family, c.model), _split(c.family, words["model"])
        query_numbers = [vars(words["model"])[name] for name in c.family.query_width]
        words["query_numbers"] = " plus ".join(query_numbers)
    except InputError as error:
        problems.append(str(error))
    except (AttributeError, KeyError):  # no table, family or flavor to start from
        pass

    sizes = {"world": lambda c: world_size, "local_world": lambda c: local_world_size}
    for name, value in (sizes | DERIVED).items():
        try:
            words[name] = value(c)
        except (AttributeError, InputError):
            continue
        if words[name] is not None:
            setattr(c, name, words[name])
    for rule, (broken, sentence) in applicable.items():
        try:
            if broken(c):
                problems.append(sentence.format(**words))
        except AttributeError as error:
            # without a known model, most rules lack something
            if "split" in words and not _may_lack(error, c, words):
                problems.append(_wrong_rule(rule, broken, error))
    return problems


def _may_lack(error: AttributeError, c: SimpleNamespace, words: dict) -> bool:
    """Return whether a configuration may lack what a rule names: an option in doubt, a number that
    another family or flavor has, or one of which nothing is known yet."""
    place, name = error.obj, error.name
    if place is c:
        return name in DERIVED or name in ("world", "local_world")
    if place is c.split or place is words["split"]:
        return name in ("heads", "kv_heads", "hidden_units")
    if place is c.model or place is words["model"]:
        return any(name in family.options for family in NUMBERS.values())
    for table, of_table in Config.model_fields.items():
        if place is getattr(c, table, None) or place is words.get(table):
            return name in of_table.annotation.model_fields
    return False


def _wrong_rule(rule: str, broken: Callable, error: AttributeError) -> str:
    """Return the sentence about a rule that names what does not exist, with its line."""
    code = broken.__code__
    line = code.co_firstlineno
    step = error.__traceback__
    while step is not None:
        if step.tb_frame.f_code is code:
            line = step.tb_lineno
        step = step.tb_next
    file = os.path.relpath(code.co_filename, os.path.dirname(os.path.dirname(__file__)))
    return (
        f'the rule "{rule}" ({file}:{line}) names {error.name}, which no configuration has: correct '
        "its predicate or its sentence"
    )


def _split(family: Numbers, model: SimpleNamespace) -> SimpleNamespace:
    """Collect the sizes of a model that a mesh splits, as far as the family has them and they are
    known."""
    keys = {name: getattr(family, name) for name in ("heads", "kv_heads", "hidden_units")}
    known = {name: getattr(model, key) for name, key in keys.items() if key in vars(model)}
    return SimpleNamespace(**known)


def _named(table: str, options: object) -> SimpleNamespace:
    """Format each option as a sentence shows it: table.key = value, the value as TOML writes it."""
    shown = {key: json.dumps(value, default=vars) for key, value in vars(options).items()}
    return SimpleNamespace(**{key: f"{table}.{key} = {value}" for key, value in shown.items()})
