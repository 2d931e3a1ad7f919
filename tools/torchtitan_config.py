"""A configuration of TorchTitan as one of ours, `python -m tools.convert config`: a TOML file (up to
0.2.2), or the JSON that 0.3 writes (tools/torchtitan_json.py).

An option that the file leaves out has TorchTitan's default there, which is written down where it is
another than ours. What has no counterpart is listed, in the new file and by the command. Names,
defaults and meanings are those of torchtitan/config/job_config.py at v0.2.2.
"""

import json
from pathlib import Path
from typing import Any

from configs.load import load_config, read_toml
from configs.schema import InputError
from models import NUMBERS
from tools import torchtitan_json
from tools.torchtitan_json import Theirs, flat

# TorchTitan's defaults of the options that are translated.
DEFAULTS: dict[str, Any] = {
    "job.dump_folder": "./outputs",
    "model.name": "llama3",
    "model.flavor": "debugmodel",
    "model.hf_assets_path": "./tests/assets/tokenizer",
    "model.converters": [],
    "optimizer.name": "AdamW",
    "optimizer.lr": 8e-4,
    "optimizer.beta1": 0.9,
    "optimizer.beta2": 0.95,
    "optimizer.eps": 1e-8,
    "optimizer.weight_decay": 0.1,
    "lr_scheduler.warmup_steps": 200,
    "lr_scheduler.decay_ratio": None,
    "lr_scheduler.decay_type": "linear",
    "lr_scheduler.min_lr_factor": 0.0,
    "training.dataset": "c4_test",
    "training.dataset_path": None,
    "training.local_batch_size": 8,
    "training.global_batch_size": -1,
    "training.seq_len": 2048,
    "training.max_norm": 1.0,
    "training.steps": 10000,
    "training.enable_cpu_offload": False,
    "training.mixed_precision_param": "bfloat16",
    "training.mixed_precision_reduce": "float32",
    "parallelism.data_parallel_replicate_degree": 1,
    "parallelism.data_parallel_shard_degree": -1,
    "parallelism.fsdp_reshard_after_forward": "default",
    "parallelism.tensor_parallel_degree": 1,
    "parallelism.enable_async_tensor_parallel": False,
    "parallelism.pipeline_parallel_degree": 1,
    "parallelism.pipeline_parallel_schedule": "1F1B",
    "parallelism.pipeline_parallel_microbatch_size": 1,
    "parallelism.context_parallel_degree": 1,
    "parallelism.expert_parallel_degree": 1,
    "checkpoint.enable": False,
    "checkpoint.interval": 500,
    "checkpoint.initial_load_path": None,
    "checkpoint.initial_load_in_hf": False,
    "checkpoint.last_save_in_hf": False,
    "checkpoint.export_dtype": "float32",
    "checkpoint.async_mode": "disabled",
    "checkpoint.keep_latest_k": 10,
    "checkpoint.load_step": -1,
    "activation_checkpoint.mode": "selective",
    "activation_checkpoint.selective_ac_option": "2",
    "compile.enable": False,
    "compile.components": ["model", "loss"],
    "compile.backend": "inductor",
    "quantize.linear.float8.recipe_name": None,
    "metrics.log_freq": 10,
    "metrics.enable_tensorboard": False,
    "profiling.enable_profiling": False,
    "profiling.enable_memory_snapshot": False,
    "comm.init_timeout_seconds": 300,
    "comm.train_timeout_seconds": 100,
    "validation.enable": False,
    "validation.freq": 10,
    "validation.steps": -1,
    "debug.seed": None,
    "debug.deterministic": False,
}
# Options of ours in each of our presets, which TorchTitan has not.
OURS = ("model.family", "run.folder", "data.source", "data.tokenizer")
# Further defaults: options that have no counterpart, and do nothing as long as they have these.
WITHOUT_EFFECT: dict[str, Any] = {
    "training.dtype": "float32",
    "training.gc_freq": 50,
    "parallelism.disable_loss_parallel": False,
    "parallelism.pipeline_parallel_first_stage_less_layers": 1,
    "parallelism.pipeline_parallel_last_stage_less_layers": 1,
    "parallelism.context_parallel_load_balancer": "headtail",
    "parallelism.context_parallel_rotate_method": "allgather",
    "parallelism.expert_tensor_parallel_degree": 1,
    "parallelism.expert_parallel_comm_backend": "standard",
    "lr_scheduler.total_steps": None,
    "checkpoint.create_seed_checkpoint": False,
    "checkpoint.load_only": False,
    "checkpoint.exclude_from_loading": [],
    "debug.moe_force_load_balance": False,
    "metrics.enable_wandb": False,
    "memory_estimation.enable": False,
    "fault_tolerance.enable": False,
}
# What a run computes does not depend on these: texts, folders inside the run's, ways to print, and
# how the same work is done (an implementation of AdamW with other averages is translated).
OF_NO_CONSEQUENCE = (
    "job.description",
    "job.print_config",
    "job.save_config_file",
    "metrics.disable_color_printing",
    "metrics.save_tb_folder",
    "metrics.save_for_all_ranks",
    "model.print_after_conversion",
    "optimizer.implementation",
    "profiling.save_traces_folder",
    "profiling.save_memory_snapshot_folder",
    "checkpoint.folder",
    "checkpoint.last_save_model_only",
    "quantize.linear.float8.enable_fsdp_float8_all_gather",
    "quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp",
)
# The same meaning under another name, or the same one.
RENAMED = {
    "job.dump_folder": "run.folder",
    "training.seq_len": "training.seq_len",
    "training.steps": "training.steps",
    "training.max_norm": "training.max_norm",
    "training.mixed_precision_param": "training.param_dtype",
    "training.mixed_precision_reduce": "training.reduce_dtype",
    "training.enable_cpu_offload": "parallelism.cpu_offload",
    "optimizer.lr": "optimizer.lr",
    "optimizer.eps": "optimizer.eps",
    "optimizer.weight_decay": "optimizer.weight_decay",
    "lr_scheduler.warmup_steps": "lr_schedule.warmup_steps",
    "lr_scheduler.min_lr_factor": "lr_schedule.min_ratio",
    "parallelism.data_parallel_replicate_degree": "parallelism.data_parallel_replicate",
    "parallelism.data_parallel_shard_degree": "parallelism.data_parallel_shard",
    "parallelism.tensor_parallel_degree": "parallelism.tensor_parallel",
    "parallelism.enable_async_tensor_parallel": "parallelism.async_tensor_parallel",
    "parallelism.pipeline_parallel_degree": "parallelism.pipeline_parallel",
    "parallelism.context_parallel_degree": "parallelism.context_parallel",
    "parallelism.expert_parallel_degree": "parallelism.expert_parallel",
    "checkpoint.keep_latest_k": "checkpoint.keep_last",
    "checkpoint.load_step": "checkpoint.load_step",
    "metrics.log_freq": "metrics.interval",
    "metrics.enable_tensorboard": "metrics.tensorboard",
    "profiling.enable_profiling": "profiler.enabled",
    "profiling.enable_memory_snapshot": "profiler.memory_snapshot",
    "comm.init_timeout_seconds": "run.init_timeout_seconds",
    "comm.train_timeout_seconds": "run.step_timeout_seconds",
    "debug.deterministic": "run.deterministic",
}
FAMILIES = {"llama3": "llama", "qwen3": "qwen3", "deepseek_v3": "deepseek_v3", "gpt_oss": "gpt_oss"}
FLAVORS = {"20b": "20B", "120b": "120B"}
# Where the file has the model's numbers: the flavor that they are compared with.
NEAREST = {"16B": "16B-A3B", "debugmodel_moe": "debug_moe"}
DATASETS = {"c4": "hf:allenai/c4/en"}
RESHARD = {"default": "default", "always": True, "never": False}
STEP_TIMEOUT = "comm.train_timeout_seconds"
SCHEDULES = {
    "1f1b": "1f1b",
    "interleaved1f1b": "interleaved_1f1b",
    "interleavedzerobubble": "zero_bubble",
    "zbvzerobubble": "zbv",
    "dualpipev": "dualpipe_v",
}
FLOAT8 = {None: "tensorwise", "tensorwise": "tensorwise", "rowwise": "rowwise"}


class Translation:
    """Options of one file. `theirs` has TorchTitan's names, with defaults; `ours` and `lost`,
    sentences about options without a counterpart, are filled step by step."""

    def __init__(self, source: Path, theirs: Theirs, gpus: int) -> None:
        self.source = source
        self.given = theirs.given
        self.theirs = DEFAULTS | theirs.given
        self.numbers = theirs.numbers
        self.gpus = gpus
        self.ours: dict[str, Any] = {}
        self.lost = list(theirs.lost)
        for theirs, ours in RENAMED.items():
            self.ours[ours] = self.theirs[theirs]
        self.model()
        self.data()
        self.batch()
        self.schedule()
        self.mesh()
        self.memory()
        self.checkpoints()
        self.rest()

    def lose(self, option: str, instead: str = "") -> None:
        """Record an option without a counterpart. instead: what happens here, or should be done."""
        given = f"{option} = {json.dumps(self.theirs.get(option))}"
        self.lost.append(f"{given}: {instead}" if instead else given)

    def choose(self, option: str, table: dict, instead: str) -> Any:
        """Look up the option's value in the table; if it is missing there, record a sentence and
        return None."""
        value = self.theirs[option]
        if value not in table:
            self.lose(option, instead)
        return table.get(value)

    def model(self) -> None:
        name = self.theirs["model.name"]
        if name not in FAMILIES:
            raise InputError(
                f'{self.source}: model.name = "{name}" is none of the families here: '
                f"{', '.join(FAMILIES)}"
            )
        family = FAMILIES[name]
        flavor = self.theirs["model.flavor"]
        # what follows is an attention kernel of theirs
        flavor = flavor.removesuffix("_flex").removesuffix("_varlen")
        flavor = FLAVORS.get(flavor, flavor)
        if self.numbers and flavor not in NUMBERS[family].flavors:
            flavor = NEAREST.get(flavor, "debug")
        if flavor not in NUMBERS[family].flavors:
            raise InputError(
                f'{self.source}: model.flavor = "{self.theirs["model.flavor"]}" of {name} is none '
                f"of the sizes here: {', '.join(NUMBERS[family].flavors)}"
            )
        self.ours["model.family"] = family
        self.ours["model.flavor"] = flavor
        self.model_numbers(NUMBERS[family].flavors[flavor], NUMBERS[family].options)
        if "expert_bias_speed" in self.numbers and family == "deepseek_v3":
            self.ours["training.expert_bias_speed"] = self.numbers["expert_bias_speed"]

    def model_numbers(self, flavor: dict[str, Any], options: dict[str, Any]) -> None:
        """Set the numbers that differ from the flavor's where [model] has them."""
        ours = {**flavor, "rope_factor": (flavor.get("rope_scaling") or {}).get("factor")}
        for name, value in self.numbers.items():
            if name not in ours or value == ours[name]:
                continue
            if name in options:
                self.ours[f"model.{name}"] = value
            else:
                self.lost.append(f"the model's {name} is {value}, and {ours[name]} here")

    def data(self) -> None:
        source = self.theirs["training.dataset_path"]
        if source is None:
            source = self.choose("training.dataset", DATASETS, "name a corpus as data.source")
        if source is not None:
            self.ours["data.source"] = source
            self.ours["data.stream"] = True  # as theirs: tokenised during training
            # the ranks that wait for one whose stream hangs must not give up before it does
            self.ours["data.timeout_seconds"] = min(120, self.theirs[STEP_TIMEOUT] // 2)
        self.ours["data.tokenizer"] = f"{self.theirs['model.hf_assets_path']}/tokenizer.json"
        self.ours["data.add_bos"] = True  # their dataset adds both
        self.ours["data.add_eos"] = True
        if self.theirs["validation.enable"]:
            self.ours["validation.interval"] = self.theirs["validation.freq"]
            if self.theirs["validation.steps"] > 0:
                self.ours["validation.steps"] = self.theirs["validation.steps"]
            self.lose("validation.enable", "name held-out data as [[validation.sets]]")

    def batch(self) -> None:
        """Translate the batch. Their local batch is that of a rank in a forward; in a pipeline it
        is split once more."""
        local = self.theirs["training.local_batch_size"]
        total = self.theirs["training.global_batch_size"]
        if total < 0:
            total = local * self.data_parallel()
        if self.theirs["parallelism.pipeline_parallel_degree"] > 1:
            local = self.theirs["parallelism.pipeline_parallel_microbatch_size"]
        self.ours["training.global_batch_size"] = total
        if "data.stream" in self.ours and (self.gpus or self.has_fixed_ranks()):
            ranks = self.data_parallel()
            self.ours["data.streams"] = ranks * max(1, 64 // ranks)  # ranks must divide them
        self.ours["training.local_batch_size"] = local
        # they reduce-scatter with every microbatch
        self.ours["parallelism.accumulate_gradients"] = "sharded"

    def data_parallel(self) -> int:
        """Translate data parallelism: the ranks with different rows. Raises InputError if their
        number depends on the number of GPUs and --gpus is not given."""
        replicas = self.theirs["parallelism.data_parallel_replicate_degree"]
        if self.has_fixed_ranks():
            return replicas * self.theirs["parallelism.data_parallel_shard_degree"]
        if not self.gpus:
            raise InputError(
                f"{self.source}: without training.global_batch_size the batch depends on the number "
                "of GPUs: give --gpus"
            )
        others = 1
        for name in ("tensor", "pipeline", "context"):
            others *= self.theirs[f"parallelism.{name}_parallel_degree"]
        return max(1, self.gpus // others)

    def has_fixed_ranks(self) -> bool:
        return self.theirs["parallelism.data_parallel_shard_degree"] > 0

    def schedule(self) -> None:
        """Warmup and decay. Their decay begins at once, or with its last `decay_ratio` of the run."""
        steps = self.theirs["training.steps"]
        warmup = self.theirs["lr_scheduler.warmup_steps"]
        shape = self.theirs["lr_scheduler.decay_type"]
        ratio = self.theirs["lr_scheduler.decay_ratio"]
        if self.theirs["optimizer.name"] != "AdamW":
            self.lose("optimizer.name", "AdamW is used")
        if self.theirs["optimizer.weight_decay"]:
            self.lose("optimizer.weight_decay", "norms do not decay here")
        if self.theirs.get("optimizer.implementation") == "fused_opt_states_bf16":
            self.ours["optimizer.moment_dtype"] = "bfloat16"
        self.ours["optimizer.betas"] = [self.theirs[f"optimizer.beta{i}"] for i in (1, 2)]
        decays_at_once = ratio is None or warmup + round(steps * ratio) >= steps
        if shape not in ("linear", "cosine"):
            self.lose("lr_scheduler.decay_type", "the decay is linear here")
            shape = "linear"
        if not decays_at_once and shape == "cosine":
            self.lose("lr_scheduler.decay_ratio", "the cosine begins after the warmup here")
            decays_at_once = True
        self.ours["lr_schedule.warmup_steps"] = min(warmup, steps)
        self.ours["lr_schedule.kind"] = shape if decays_at_once else "wsd"
        if not decays_at_once:
            self.ours["lr_schedule.decay_fraction"] = ratio

    def mesh(self) -> None:
        reshard = self.choose(
            "parallelism.fsdp_reshard_after_forward", RESHARD, "the default holds"
        )
        if reshard is not None:
            self.ours["parallelism.reshard_after_forward"] = reshard
        if self.theirs["parallelism.pipeline_parallel_degree"] > 1:
            name = self.theirs["parallelism.pipeline_parallel_schedule"]
            schedule = SCHEDULES.get(name.lower())
            if schedule is None:
                self.lose("parallelism.pipeline_parallel_schedule", "1f1b is used")
                schedule = "1f1b"
            self.ours["parallelism.pipeline_schedule"] = schedule

    def memory(self) -> None:
        mode = self.theirs["activation_checkpoint.mode"]
        option = str(self.theirs["activation_checkpoint.selective_ac_option"])
        if mode == "selective" and option.isdecimal():
            mode = "every_n"
            self.ours["activation_checkpoint.every_n"] = max(2, int(option))
            if int(option) < 2:
                mode = "full"
                del self.ours["activation_checkpoint.every_n"]
        elif mode == "memory_budget":
            self.lose("activation_checkpoint.mode", "the mode is selective here")
            mode = "selective"
        self.ours["activation_checkpoint.mode"] = mode
        self.ours["compile.enabled"] = (
            self.theirs["compile.enable"] and "model" in self.theirs["compile.components"]
        )
        self.ours["compile.backend"] = self.theirs["compile.backend"]
        for converter in self.theirs["model.converters"]:
            if converter in ("float8", "quantize.linear.float8"):
                recipe = self.choose(
                    "quantize.linear.float8.recipe_name", FLOAT8, "tensorwise is used"
                )
                self.ours["training.float8"] = recipe or "tensorwise"
            else:
                self.lost.append(f'model.converters has "{converter}", which is left out')

    def checkpoints(self) -> None:
        is_on = self.theirs["checkpoint.enable"]
        self.ours["checkpoint.interval"] = self.theirs["checkpoint.interval"] if is_on else 0
        self.ours["checkpoint.async_save"] = self.theirs["checkpoint.async_mode"] != "disabled"
        if not is_on:
            del self.ours["checkpoint.keep_last"]
            del self.ours["checkpoint.load_step"]
            return
        path = self.theirs["checkpoint.initial_load_path"]
        if path and self.theirs["checkpoint.initial_load_in_hf"]:
            self.ours["checkpoint.load_hf"] = path
        elif path:
            self.lose(
                "checkpoint.initial_load_path", "from-dcp converts it; name the result as load_path"
            )
        if self.theirs["checkpoint.last_save_in_hf"]:
            dtype = self.theirs["checkpoint.export_dtype"]
            if dtype == "float16":
                self.lose("checkpoint.export_dtype", "the export is in bfloat16 here")
                dtype = "bfloat16"
            self.ours["checkpoint.export_hf"] = dtype

    def rest(self) -> None:
        """Translate the seed, and list every option of the file that no step above has read."""
        self.ours["run.seed"] = self.theirs["debug.seed"] or 0
        without_effect = WITHOUT_EFFECT | torchtitan_json.NEW
        for option, value in self.given.items():
            known = option in DEFAULTS or option in OF_NO_CONSEQUENCE
            if not known and without_effect.get(option, value is None) != value:
                self.lose(option)


def translate(source: Path, out: Path, gpus: int) -> str:
    """Write the configuration of ours, and return what was done, in sentences.

    Raises InputError if the source is no file of TorchTitan, if its model is none of ours, if
    the new file exists, and for a configuration that is refused here: nothing is written then.
    """
    if out.exists():
        raise InputError(f"{out} exists already: give the name of a new file")
    theirs = (
        torchtitan_json.read(source)
        if source.suffix == ".json"
        else Theirs(flat(read_toml(source)), numbers={}, lost=[])
    )
    given = theirs.given
    if any(option in given for option in OURS):
        raise InputError(f"{source} is a configuration of Plumbline already")
    if not any(option in DEFAULTS for option in given):
        raise InputError(f"{source} has no option of TorchTitan's: is it one of its TOML files?")
    for option, value in given.items():
        expected = DEFAULTS.get(option)
        if expected is not None and not isinstance(value, kinds_of(expected)):
            raise InputError(
                f"{source}: {option} = {json.dumps(value)} is no {type(expected).__name__}"
            )
    translation = Translation(source, theirs, gpus)
    text = as_toml(source, translation)
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f".{out.name}.partial")
    partial.write_text(text, encoding="utf-8")
    try:
        load_config([str(partial)], gpus or None, min(gpus, 8) or None)
        partial.rename(out)
    except InputError as error:
        said = str(error).replace(str(partial), str(out))
        raise InputError(f"{source} was translated, and nothing written:\n{said}") from None
    finally:
        partial.unlink(missing_ok=True)
    said = [f"{source} -> {out}"]
    said += [f"no counterpart: {lost}" for lost in translation.lost]
    return "\n".join(said)


def kinds_of(value: Any) -> type | tuple[type, ...]:
    return (int, float) if isinstance(value, float) else type(value)


def as_toml(source: Path, translation: Translation) -> str:
    lines = [f"# Translated from {source.name} of TorchTitan by `python -m tools.convert config`."]
    lines += [f"# No counterpart: {lost}" for lost in translation.lost]
    tables: dict[str, list[str]] = {}
    for option, value in translation.ours.items():
        table, _, name = option.partition(".")
        tables.setdefault(table, []).append(f"{name} = {json.dumps(value)}")
    for table, options in tables.items():
        lines += ["", f"[{table}]", *options]
    return "\n".join(lines) + "\n"
