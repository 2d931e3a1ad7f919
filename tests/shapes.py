"""Shapes of models with distinct odd sizes, so that no transposed or swapped dimension can hide;
and pairs of our model and transformers' own with the same weights."""

import re
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from checkpoint import hf
from models import (
    FORMATS,
    deepseek_v3,
    gemma2,
    gemma3,
    gpt_oss,
    kimi_linear,
    llama,
    olmo2,
    qwen3,
    qwen3_5,
    qwen3_next,
)
from models.family import Family, Formats, TensorLayout

# Of the seven wavelengths at a head of 14 and a base of 500,000, two are short for 512 tokens, one
# is between, four are long.
ROPE_31 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_seq_len": 512,
}
YARN = {
    "factor": 4.0,
    "original_max_seq_len": 16.0,
    "beta_fast": 3.0,
    "beta_slow": 0.5,
    "attention_factor": 1.25,
}
YARN_256 = {"factor": 4.0, "original_max_seq_len": 256.0, "beta_fast": 32.0, "beta_slow": 1.0}
SIZES = {  # where a family has no others
    "dim": 42,
    "n_layers": 5,
    "n_heads": 6,
    "n_kv_heads": 2,
    "head_dim": 10,
    "hidden_dim": 53,
    "vocab_size": 97,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "norm_eps": 1e-5,
    "max_seq_len": 64,
    "tied_embeddings": False,
    "window": 7,
    "query_scalar": 17,
    "n_experts": 7,
    "experts_per_token": 3,
    "expert_dim": 11,
    "routed_scale": 1.7,
    "balance_loss": 0.0,
    "kv_rank": 18,
    "nope_dim": 10,
    "rope_dim": 6,
    "value_dim": 14,
    "attention_interval": 2,
    "conv_width": 4,
}


def sized(args: Any, **others: object) -> Any:
    """Return numbers of a family: those of SIZES that its Args require, but for `others`."""
    required = {field.name for field in fields(args) if field.default is MISSING}
    return args(**{name: size for name, size in SIZES.items() if name in required} | others)


LLAMA = sized(llama.Args, n_layers=3, n_kv_heads=6, head_dim=14)
LLAMA3 = replace(LLAMA, n_kv_heads=2, rope_theta=500000.0)
QWEN3 = sized(qwen3.Args, n_layers=3, rope_theta=1e6, norm_eps=1e-6)
DEEPSEEK = sized(
    deepseek_v3.Args,
    n_layers=3,
    n_dense_layers=1,
    n_heads=3,
    q_rank=22,
    n_experts=8,
    n_shared_experts=1,
    expert_groups=4,
    groups_per_token=2,
    rope_scaling=YARN_256 | {"mscale": 1.0, "mscale_all_dim": 0.8},
    max_seq_len=1024,
)
OLMO2 = sized(olmo2.Args, rope_theta=20000.0, window=0)  # of OLMO 3 four layers have a window
GPT_OSS = sized(
    gpt_oss.Args,
    n_layers=3,
    n_experts=5,
    rope_scaling=YARN_256 | {"truncate": False},
    max_seq_len=1024,
)
DELTA = {  # three layers have a gated delta net, two have attention
    "rope_dim": 4,
    "delta_key_heads": 3,
    "delta_value_heads": 6,
    "delta_key_dim": 9,
    "delta_value_dim": 14,
    "norm_eps": 1e-2,
}
QWEN3_NEXT = sized(qwen3_next.Args, shared_dim=13, **DELTA)
QWEN3_5 = sized(qwen3_5.Args, **DELTA)
# The third layer attends to all tokens.
GEMMA3 = sized(
    gemma3.Args,
    rope_theta=20000.0,
    tied_embeddings=True,
    window_pattern=3,
    local_rope_theta=100.0,
    rope_factor=4.0,
)
# Layers 1, 3 and 5 have a window; the caps bend scores and logits of random weights.
GEMMA2 = sized(
    gemma2.Args, rope_theta=20000.0, tied_embeddings=True, attention_cap=5.0, logit_cap=10.0
)
# KDA, attention, KDA, attention, and attention in the last layer too; two layers are dense.
KIMI_LINEAR = sized(
    kimi_linear.Args,
    n_dense_layers=2,
    n_heads=3,
    delta_heads=6,
    delta_dim=9,
    n_shared_experts=2,
    norm_eps=1e-2,
)
SHAPES = {  # name -> the family and its numbers
    "llama2": (llama.FAMILY, LLAMA),
    "llama3": (llama.FAMILY, LLAMA3),
    "llama3.1": (
        llama.FAMILY,
        replace(LLAMA3, n_kv_heads=3, max_seq_len=1024, rope_scaling=ROPE_31),
    ),
    "llama3.2": (
        llama.FAMILY,
        replace(
            LLAMA3, max_seq_len=1024, rope_scaling=ROPE_31 | {"factor": 32.0}, tied_embeddings=True
        ),
    ),
    "qwen3": (qwen3.FAMILY, QWEN3),
    "qwen3 tied": (qwen3.FAMILY, replace(QWEN3, tied_embeddings=True)),
    "qwen3 experts": (
        qwen3.FAMILY,
        replace(QWEN3, n_experts=7, experts_per_token=3, expert_dim=11),
    ),
    "deepseek_v3": (deepseek_v3.FAMILY, DEEPSEEK),
    "deepseek_v3 lite": (
        deepseek_v3.FAMILY,
        replace(DEEPSEEK, q_rank=0, expert_groups=1, groups_per_token=1, rope_scaling=None),
    ),
    "olmo2": (olmo2.FAMILY, OLMO2),
    "olmo2 tied": (
        olmo2.FAMILY,
        replace(OLMO2, n_layers=2, tied_embeddings=True, rope_scaling=YARN),
    ),
    "olmo3": (olmo2.FAMILY, replace(OLMO2, window=7)),
    "olmo3 long": (olmo2.FAMILY, replace(OLMO2, window=7, rope_scaling=YARN)),
    "gpt_oss": (gpt_oss.FAMILY, GPT_OSS),
    "gpt_oss tied": (
        gpt_oss.FAMILY,
        replace(GPT_OSS, rope_scaling=None, tied_embeddings=True),
    ),
    "qwen3_next": (qwen3_next.FAMILY, QWEN3_NEXT),
    "qwen3_next tied": (
        qwen3_next.FAMILY,
        replace(QWEN3_NEXT, n_layers=4, attention_interval=3, tied_embeddings=True),
    ),
    "qwen3_5": (qwen3_5.FAMILY, QWEN3_5),
    "gemma2": (gemma2.FAMILY, GEMMA2),
    "gemma3": (gemma3.FAMILY, GEMMA3),
    "gemma3 untied": (
        gemma3.FAMILY,
        replace(GEMMA3, rope_factor=1.0, query_scalar=10, tied_embeddings=False),
    ),
    "kimi_linear": (kimi_linear.FAMILY, KIMI_LINEAR),
}


def formats(family: Family) -> Formats:
    return FORMATS[family.name]


def hugging_face(family: Any, args: Any) -> nn.Module:
    """Build transformers' model of these numbers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**formats(family).hf_config(args))
    # the other one refuses odd sizes
    return AutoModelForCausalLM.from_config(config, experts_implementation="eager")


def write_hf(
    folder: Path,
    family: Any,
    args: Any,
    dtype: torch.dtype = torch.float32,
    limit: int | str = 30_000,
) -> Path:
    """Write a folder as transformers writes it, with a random model, in files of this size."""
    torch.manual_seed(7)
    model = hugging_face(family, args)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0, 0.2)
    model.to(dtype).save_pretrained(folder, max_shard_size=limit)
    return folder


class Part(NamedTuple):
    """Part of a tensor of theirs that a parameter of ours is, by its layout."""

    layout: TensorLayout
    shape: torch.Size  # of ours


def in_memory(tensors: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """Return the tensor of a name in files. transformers' Kimi Linear has other names, and its three
    convolutions are one."""
    for in_files, there in FORMATS["kimi_linear"].hf_in_memory:
        name = name if name in tensors else re.sub(in_files, there, name)
    stem, is_one_of_three, _ = name.partition("_conv1d")
    if is_one_of_three:
        return tensors[stem[:-1] + "conv1d.weight"].chunk(3)["qkv".index(stem[-1])]
    return tensors[name]


def as_ours(tensors: dict[str, torch.Tensor], hf: str | Part) -> torch.Tensor:
    """Return the tensor that a name of `hf_names` or a part means, among those of transformers'
    model: in memory it has the experts' weights of Qwen3 and DeepSeek-V3 in one tensor, w1 and w3
    one after the other."""
    if isinstance(hf, Part):
        whole = tuple(slice(0, size) for size in hf.shape)
        return hf.layout.read(whole, lambda name, box: in_memory(tensors, name)[box])
    if "#" not in hf:
        return in_memory(tensors, hf)
    stem, _, kind = hf.partition(".#.")
    if kind.startswith(("down", "w2")):
        return in_memory(tensors, stem + ".down_proj")
    return in_memory(tensors, stem + ".gate_up_proj").chunk(2, 1)[kind.startswith(("up", "w3"))]


def random_pair(
    family: Any, args: Any
) -> tuple[nn.Module, nn.Module, list[tuple[str, str | Part]]]:
    """Return transformers' model and ours with the same random weights, and for each name in ours
    what `as_ours` finds it by in theirs."""
    torch.manual_seed(1)
    theirs, ours = hugging_face(family, args), family.build(args)
    with torch.no_grad():
        for p in theirs.parameters():
            p.normal_(0, 0.2)
        for name, buffer in theirs.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0, 0.1)
    found: dict[str, str | Part] = dict(formats(family).hf_names(args))
    for name, layout in formats(family).hf_layouts(args, ()).items():
        found[name] = Part(layout, ours.get_parameter(name).shape)
    pairs = list(found.items())
    ours.load_state_dict({mine: as_ours(theirs.state_dict(), hf) for mine, hf in pairs})
    return theirs, ours, pairs


def exported(folder: Path, family: Any, args: Any) -> Any:
    """Return a model of random weights, after writing its files."""
    torch.manual_seed(0)
    ours = family.build(args)
    for name, weight in ours.named_parameters():
        torch.nn.init.normal_(weight, 1.0 if name.endswith("norm.weight") else 0.0, 0.1)
    weights = dict(ours.named_parameters())
    shapes = {name: list(weight.shape) for name, weight in weights.items()}
    source = hf.TensorSource(
        shapes,
        dict.fromkeys(shapes, torch.float32),
        lambda names: (weights[name].detach() for name in names),
    )
    formats = FORMATS[family.name]
    hf.write_model(
        folder, folder, hf.Export(source, formats, args, hf.config_of(formats, args), {})
    )
    return ours
