"""Translate adapters to the format of the library `peft`: `adapter_model.safetensors` and
`adapter_config.json`, which `peft.PeftModel.from_pretrained` loads onto a model of transformers 5.

An adapter of a linear layer is the same two matrices there; layers of ours that are one there, such
as Qwen3-Next's queries and gates, have one adapter of so many times the rank. The weights of all experts are one
parameter in transformers, and w1 and w3 are one with each other. `peft` adapts such a parameter by
`target_parameters`: the adapters of w1 and w3 become one of twice the rank, whose B has the two as
blocks, and alpha is doubled with the rank. It computes the same, but if it is trained further with
`peft`, the zeros around the blocks are trained too.

Shapes:  X experts   r = rank   I inputs   O outputs   k parameters of ours in one of theirs
"""

import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from checkpoint import hf
from configs.schema import InputError
from models.formats.layouts import Grouped, Interleaved
from models.mtp import is_ahead
from reliability import disk
from tools.adapters import Adapter, by_parameter

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
LAYERS = "model.layers."


# --------------------------------------------------------------------------------------------------
# which of their parameters has which rows


@dataclass(frozen=True)
class PeftTarget:
    """Location of one of our parameters in transformers' model."""

    parameter: str  # of theirs
    turn: int = 0  # ours is this one of the n in it
    n: int = 1
    interleaved: bool = False  # the n take turns row by row; else one follows the other
    grouped: Grouped | None = None  # the layout of parameters that take turns in groups of rows

    def total(self, outputs: int) -> int:
        """Return how many rows transformers' parameter has; outputs: those of ours."""
        if self.grouped is not None:
            return self.grouped.groups * sum(self.grouped.rows)
        return self.n * outputs

    def rows(self, outputs: int) -> slice | Tensor:
        """Return the rows of this parameter among those of transformers' parameter."""
        if self.grouped is not None:
            return self.grouped.places()
        if self.interleaved:
            return slice(self.turn, None, self.n)
        return slice(self.turn * outputs, (self.turn + 1) * outputs)


# Files have a tensor of each expert; in memory transformers 5 stacks them, and gate and up in one
# (its class Qwen3MoeExperts, for one). Last word of the name in files -> the parameter, its turn,
# of how many.
STACKED = {
    "gate_proj": ("gate_up_proj", 0, 2),
    "up_proj": ("gate_up_proj", 1, 2),
    "down_proj": ("down_proj", 0, 1),
    "w1": ("gate_up_proj", 0, 2),
    "w3": ("gate_up_proj", 1, 2),
    "w2": ("down_proj", 0, 1),
}


def places(family: Any, args: Any) -> dict[str, PeftTarget]:
    """Return the location of each of our parameters, by name. family: a models/family.py::Formats."""
    layouts = family.hf_layouts(args, ())
    found = {}
    for ours, theirs in family.hf_names(args).items():
        for in_files, in_memory in family.hf_in_memory:
            theirs = re.sub(in_files, in_memory, theirs)
        layout = layouts.get(ours)
        if isinstance(layout, Interleaved):
            found[ours] = PeftTarget(theirs, layout.turn, layout.n, interleaved=True)
        elif isinstance(layout, Grouped):
            found[ours] = PeftTarget(theirs, layout.turn, len(layout.rows), grouped=layout)
        elif hf.EXPERT in theirs:
            experts, _, word = theirs.removesuffix(".weight").partition(f".{hf.EXPERT}.")
            parameter, turn, n = STACKED[word]
            found[ours] = PeftTarget(f"{experts}.{parameter}", turn, n)
        else:
            found[ours] = PeftTarget(theirs)
    return found


# --------------------------------------------------------------------------------------------------
# out


def fuse(adapters: Sequence[Adapter], its_places: Sequence[PeftTarget]) -> Adapter:
    """Return one adapter of rank k r for a parameter of theirs, from those of ours that are in it:
    A has theirs one below the other, B has theirs in blocks, and zeros."""
    outputs, rank = adapters[0].b.shape[-2:]
    leading = adapters[0].b.shape[:-2]
    a = torch.cat([adapter.a for adapter in adapters], -2)  # [..., k r, I]
    shape = (*leading, its_places[0].total(outputs), rank * len(adapters))
    b = adapters[0].b.new_zeros(shape)  # [..., rows of theirs, k r]
    for i, (adapter, place) in enumerate(zip(adapters, its_places, strict=True)):
        rows = place.rows(adapter.b.shape[-2])
        b[..., rows, i * rank : (i + 1) * rank] = adapter.b
    return Adapter(a, b)


def flatten(adapter: Adapter) -> Adapter:
    """Flatten the adapter of a stack of experts as `peft` keeps it: A [X k r, I], expert by expert;
    B [O, k r X], where the experts take turns (its class ParamWrapper, as of 0.21)."""
    return Adapter(adapter.a.flatten(0, 1), adapter.b.permute(1, 2, 0).flatten(1, 2))


def translate(
    adapters: dict[str, Tensor], family: Any, args: Any, rank: int, alpha: float
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors of `adapter_model.safetensors`, and the fields of `adapter_config.json`
    that depend on them. adapters: by our names, as `by_parameter` gets them.

    Raises InputError for an adapter that `peft` cannot express.
    """
    place_of = places(family, args)
    of_theirs: dict[str, list[tuple[Adapter, PeftTarget]]] = defaultdict(list)
    for ours, adapter in by_parameter(adapters).items():
        if is_ahead(args, ours):
            raise InputError(
                f"{ours} has an adapter: the models that peft adapts have no layers for further tokens "
                "(model.mtp_depth), so merge it (lora-merge)"
            )
        place = place_of[ours]
        if "embed_tokens" in place.parameter:
            raise InputError(
                f"{ours} has an adapter: an embedding's cannot be written for peft, so merge it "
                "(lora-merge)"
            )
        of_theirs[place.parameter].append((adapter, place))

    tensors = {}
    modules = set()  # that peft replaces, by the last word of their name
    parameters = set()  # that it adapts where they are, by their name without the layer
    ranks = {}  # of parameters that are k of ours, by a pattern
    alphas = {}
    has_experts = bool(getattr(args, "n_experts", 0))
    for theirs, of_ours in of_theirs.items():
        of_ours.sort(key=lambda pair: pair[1].turn)
        adapter = fuse(*zip(*of_ours, strict=True))
        module, _, word = theirs.rpartition(".")
        key = module
        if word != "weight":
            adapter = flatten(adapter)
            if word == "gate_up_proj" and f"{module}.down_proj" in of_theirs:
                # peft wraps down_proj around gate_up_proj
                key = f"{module}.base_layer"
        tensors[f"base_model.model.{key}.lora_A.weight"] = adapter.a.contiguous()
        tensors[f"base_model.model.{key}.lora_B.weight"] = adapter.b.contiguous()
        # With experts, peft takes the words gate_proj, up_proj and down_proj of modules for those
        # of experts in the files of transformers 4. So other layers of that name are adapted as
        # parameters.
        if word == "weight" and not (has_experts and ".mlp." in theirs):
            target = without_layer(module)
            modules.add(module.rpartition(".")[2])
        else:
            target = without_layer(theirs)
            parameters.add(target)
        if len(of_ours) > 1:
            ranks[pattern(target)] = rank * len(of_ours)
            alphas[pattern(target)] = whole(alpha * len(of_ours))
    fields = {
        "r": rank,
        "lora_alpha": whole(alpha),
        "target_modules": sorted(modules),
        "target_parameters": sorted(parameters) or None,
        "rank_pattern": ranks,
        "alpha_pattern": alphas,
    }
    return tensors, fields


def without_layer(name: str) -> str:
    """`mlp.experts.down_proj` of `model.layers.3.mlp.experts.down_proj`."""
    return name.removeprefix(LAYERS).partition(".")[2] if name.startswith(LAYERS) else name


def pattern(target: str) -> str:
    """`peft` looks for it at the end of a parameter's name."""
    return r".*\." + target.replace(".", r"\.")


def whole(number: float) -> float:
    """Return an int where the value is whole: `peft` writes alpha so."""
    return int(number) if float(number).is_integer() else number


# what is the same in every folder; keys of peft's LoraConfig
FIXED = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "auto_mapping": None,
    "bias": "none",
    "fan_in_fan_out": False,
    "inference_mode": True,
    "init_lora_weights": True,
    "lora_dropout": 0.0,
    "modules_to_save": None,
    "use_dora": False,
    "use_rslora": False,
}


def write(
    out: Path,
    adapters: dict[str, Tensor],
    family: Any,
    args: Any,
    rank: int,
    alpha: float,
    base: str | None,
    files: Mapping[str, dict] | None = None,
) -> None:
    """Write the folder. It appears when it is whole. base: the folder of the base that
    `adapter_config.json` names; files: of the tokenizer, by name. Raises InputError, with nothing
    left behind."""
    hf.check_is_new(out)
    tensors, fields = translate(adapters, family, args, rank, alpha)
    config = FIXED | fields | {"base_model_name_or_path": base}
    try:
        with disk.new_folder(out) as folder:
            save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
            for name, content in {CONFIG: config, **(files or {})}.items():
                with open(folder / name, "x", encoding="utf-8") as file:
                    json.dump(content, file, indent=2, sort_keys=True)
    except OSError as error:
        raise InputError(
            f"{out} cannot be written: {error.filename or ''} {error.strerror}"
        ) from None
