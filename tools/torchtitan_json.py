"""A configuration of TorchTitan 0.3, as the run itself writes it with `--debug.save_config_file`: JSON
with every option and with the numbers of the model. Here its options get the names of TorchTitan
0.2.2, which tools/torchtitan_config.py translates.

Its Python files are not read, because that would run them. Names are those of torchtitan 0.3.0:
torchtitan/config/configs.py, and the `Config` of each component.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

from configs.schema import InputError

# An option of 0.3, or a whole table -> where 0.2.2 has it.
MOVED = {
    "hf_assets_path": "model.hf_assets_path",
    "dump_folder": "job.dump_folder",
    "model_spec.name": "model.name",
    "model_spec.flavor": "model.flavor",
    "compile.enable_async_tensor_parallel": "parallelism.enable_async_tensor_parallel",
    "dataloader.dataset": "training.dataset",
    "dataloader.dataset_path": "training.dataset_path",
    "profiler.": "profiling.",
    "validator.": "validation.",
}
# Options of 0.3 alone, and the values with which they ask for nothing.
NEW: dict[str, Any] = {
    "checkpoint.initial_load_model_only": True,
    "comm.mode": "default",
    "dataloader.infinite": True,
    "override.imports": [],
    "parallelism.enable_sequence_parallel": True,
    "parallelism.pipeline_parallel_schedule_csv": "",
}
# How the same work is done, printed or stored.
OF_NO_CONSEQUENCE = (
    "comm.save_traces_",
    "comm.trace_buf_size",
    "dataloader.num_workers",
    "dataloader.persistent_workers",
    "dataloader.pin_memory",
    "dataloader.prefetch_factor",
    "debug.enable_structured_logging",
    "debug.print_config",
    "debug.save_config_file",
    "loss.global_vocab_size",
    "loss.loss_fn.global_vocab_size",
    "loss.num_chunks",
    "parallelism.context_parallel_ptrr_mask_key",
    "parallelism.spmd_backend",
    "profiler.memory_snapshot_",
    "profiler.profile",
    "training.disable_cuda_graphs",
    "validator.dataloader.",
)
ROUTING = {"deepseek_v3": "sigmoid", "qwen3": "softmax", "gpt_oss": "softmax"}
# What every linear layer's table holds. An adapter, or low precision, adds to it.
LINEAR = {"param_init", "sharding_config", "in_features", "out_features", "bias"}


class Theirs(NamedTuple):
    given: dict[str, Any]  # "table.option" of 0.2.2 -> value
    numbers: dict[str, Any]  # of the model, by our names
    lost: list[str]  # sentences about what has no counterpart


def read(source: Path) -> Theirs:
    """Read a configuration that TorchTitan 0.3 wrote. Raises InputError for any other file."""
    try:
        tables = json.loads(source.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{source} cannot be read as JSON: {error}") from None
    try:
        model = tables["model_spec"]["model"]
        given, lost = options(tables)
        lost += unlike_ours(model, tables["model_spec"]["name"])
        return Theirs(given, numbers(model), lost)
    except (AttributeError, IndexError, KeyError, TypeError):
        raise InputError(
            f"{source} is no configuration that TorchTitan 0.3 wrote (--debug.save_config_file)"
        ) from None


def flat(tables: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Tables in tables as "table.option"."""
    result = {}
    for name, value in tables.items():
        if isinstance(value, dict):
            result |= flat(value, f"{prefix}{name}.")
        else:
            result[prefix + name] = value
    return result


def options(tables: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return every option that is set, under the name of 0.2.2, and a list of those without a
    counterpart."""
    given, lost = adamw(tables["optimizer"]["param_groups"])
    given["optimizer.implementation"] = tables["optimizer"].get("implementation", "fused")
    given |= recomputation(tables["activation_checkpoint"])
    spec = {name: tables["model_spec"][name] for name in ("name", "flavor")}
    rest = {**tables, "model_spec": spec, "optimizer": {}, "activation_checkpoint": {}}
    for option, value in flat(rest).items():
        if value is not None and not option.startswith(OF_NO_CONSEQUENCE):
            given[moved(option)] = value
    return given, lost


def moved(option: str) -> str:
    if option in MOVED:
        return MOVED[option]
    table = option.partition(".")[0] + "."
    return MOVED.get(table, table) + option.removeprefix(table)


def adamw(groups: list[dict[str, Any]]) -> tuple[dict[str, Any], list[str]]:
    """Translate the options of the group of all other parameters. Groups with a pattern of their
    own are listed as lost."""
    lost = [
        f"optimizer.param_groups: {group['optimizer_name']} for {group['pattern']}"
        for group in groups[:-1]
    ]
    last = groups[-1]
    settings = dict(last["optimizer_kwargs"])
    given = {"optimizer.name": last["optimizer_name"]}
    betas = settings.pop("betas", None)
    if betas:
        given["optimizer.beta1"] = betas[0]
        given["optimizer.beta2"] = betas[1]
    return given | {f"optimizer.{name}": value for name, value in settings.items()}, lost


def recomputation(table: dict[str, Any] | None) -> dict[str, Any]:
    """Translate recomputation. The file has the options of a class of theirs, but not its name."""
    if table is None:
        return {"activation_checkpoint.mode": "none"}
    if "memory_budget" in table:
        return {"activation_checkpoint.mode": "memory_budget"}
    if "force_recompute_mm_shapes_by_fqns" in table:
        return {
            "activation_checkpoint.mode": "selective",
            "activation_checkpoint.selective_ac_option": "op",
        }
    return {"activation_checkpoint.mode": "full"}


def numbers(model: dict[str, Any]) -> dict[str, Any]:
    """Return the numbers of the model by our names, as far as [model] or a flavor has them."""
    layers = model["layers"]
    attention = layers[0]["attention"]
    result = {
        "dim": model["dim"],
        "n_layers": len(layers),
        "n_heads": attention["n_heads"],
        "vocab_size": model["vocab_size"],
        "tied_embeddings": model["enable_weight_tying"],
        "norm_eps": layers[0]["attention_norm"]["eps"],
        "rope_theta": attention["rope"]["theta"],
        "rope_factor": rope_factor(attention["rope"]),
    }
    if "kv_lora_rank" in attention:
        result["q_rank"] = attention["q_lora_rank"]
        result["kv_rank"] = attention["kv_lora_rank"]
        result["nope_dim"] = attention["qk_nope_head_dim"]
        result["rope_dim"] = attention["qk_rope_head_dim"]
        result["value_dim"] = attention["v_head_dim"]
    else:
        result["n_kv_heads"] = attention["qkv_linear"]["n_kv_heads"]
        result["head_dim"] = attention["qkv_linear"]["head_dim"]
    dense = [layer["feed_forward"] for layer in layers if layer["feed_forward"]]
    if dense:
        result["hidden_dim"] = dense[0]["w2"]["in_features"]
    experts = layers[-1]["moe"]
    if experts:
        result |= numbers_of_experts(experts)
        result["n_dense_layers"] = len(dense)
    return result


def numbers_of_experts(experts: dict[str, Any]) -> dict[str, Any]:
    router = experts["router"]
    width = experts["routed_experts"]["inner_experts"]["hidden_dim"]
    shared = experts["shared_experts"]
    return {
        "n_experts": experts["num_experts"],
        "experts_per_token": router["top_k"],
        "expert_dim": width,
        "expert_groups": router["num_expert_groups"] or 1,
        "groups_per_token": router["num_limited_groups"] or 1,
        "routed_scale": router["route_scale"],
        "n_shared_experts": shared["w2"]["in_features"] // width if shared else 0,
        "expert_bias_speed": experts["load_balance_coeff"] or 0.0,
    }


def rope_factor(rope: dict[str, Any]) -> float | None:
    """Return the factor by which rotary positions are stretched, or None."""
    names = {"none": None, "llama": "scaling_factor", "yarn": "rope_factor"}
    name = names[rope["scaling"]]
    return name and float(rope[name])


def unlike_ours(model: dict[str, Any], family: str) -> list[str]:
    """List the parts of the model that our options cannot express."""
    lost = []
    if model.get("mtp_layers"):
        lost.append("the model's mtp_layers: left out here")
    experts = model["layers"][-1]["moe"]
    if experts:
        router = experts["router"]
        if router["score_func"] != ROUTING.get(family):
            lost.append(f"the router's scores are a {router['score_func']}: here another function")
        if not router["route_norm"]:
            lost.append("the router's weights are not normalised there, and are here")
        if experts["load_balance_coeff"] and family != "deepseek_v3":
            lost.append("experts are balanced by a bias there, and here by model.balance_loss")
    added = {name for layer in linear_layers(model) for name in layer.keys() - LINEAR}
    if added:
        lost.append(f"linear layers with {', '.join(sorted(added))}: plain ones here, see [lora]")
    return [*lost, "float8 does not show in that file: see training.float8"]


def linear_layers(table: Any) -> list[dict[str, Any]]:
    if isinstance(table, list):
        return [layer for entry in table for layer in linear_layers(entry)]
    if not isinstance(table, dict):
        return []
    if "in_features" in table:
        return [table]
    return [layer for entry in table.values() for layer in linear_layers(entry)]
