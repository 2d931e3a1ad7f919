"""Published sizes of DeepSeek-V3 and Moonlight, and a small one of ours. No torch: `configs/`
imports this file."""

from typing import Any

from models import options
from models.options import (
    OPTIONS_OF_EXPERTS,
    OPTIONS_OF_MTP,
    RULES_OF_EXPERTS,
    RULES_OF_MTP,
    Numbers,
)

# Sources: arXiv:2412.19437, section 4.2, and the config.json of deepseek-ai/DeepSeek-V3 on the
# Hugging Face hub. The balance loss's factor is that of section 4.2. 16B-A3B is Moonlight
# (arXiv:2502.16982; the config.json of moonshotai/Moonlight-16B-A3B), with its aux_loss_alpha as
# the balance loss's factor.
FLAVORS: dict[str, dict] = {
    "debug": {
        "dim": 192,
        "n_layers": 5,
        "n_dense_layers": 1,
        "n_heads": 4,
        "q_rank": 0,
        "kv_rank": 64,
        "nope_dim": 32,
        "rope_dim": 16,
        "value_dim": 32,
        "hidden_dim": 512,
        "n_experts": 16,
        "experts_per_token": 4,
        "expert_dim": 96,
        "n_shared_experts": 1,
        "expert_groups": 4,
        "groups_per_token": 2,
        "routed_scale": 1.0,
        "balance_loss": 0.0001,
        "vocab_size": 4096,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "norm_eps": 1e-6,
        "max_seq_len": 8192,
        "tied_embeddings": False,
        "mtp_depth": 0,
    },
    "16B-A3B": {
        "dim": 2048,
        "n_layers": 27,
        "n_dense_layers": 1,
        "n_heads": 16,
        "q_rank": 0,
        "kv_rank": 512,
        "nope_dim": 128,
        "rope_dim": 64,
        "value_dim": 128,
        "hidden_dim": 11264,
        "n_experts": 64,
        "experts_per_token": 6,
        "expert_dim": 1408,
        "n_shared_experts": 2,
        "expert_groups": 1,
        "groups_per_token": 1,
        "routed_scale": 2.446,
        "balance_loss": 0.001,
        "vocab_size": 163840,
        "rope_theta": 50000.0,
        "rope_scaling": None,
        "norm_eps": 1e-5,
        "max_seq_len": 8192,
        "tied_embeddings": False,
        "mtp_depth": 0,
    },
    "671B": {
        "dim": 7168,
        "n_layers": 61,
        "n_dense_layers": 3,
        "n_heads": 128,
        "q_rank": 1536,
        "kv_rank": 512,
        "nope_dim": 128,
        "rope_dim": 64,
        "value_dim": 128,
        "hidden_dim": 18432,
        "n_experts": 256,
        "experts_per_token": 8,
        "expert_dim": 2048,
        "n_shared_experts": 1,
        "expert_groups": 8,
        "groups_per_token": 4,
        "routed_scale": 2.5,
        "balance_loss": 0.0001,
        "vocab_size": 129280,
        "rope_theta": 10000.0,
        "rope_scaling": {
            "factor": 40.0,
            "original_max_seq_len": 4096.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        "norm_eps": 1e-6,
        "max_seq_len": 163840,
        "tied_embeddings": False,
        "mtp_depth": 0,
    },
}

OPTIONS = (
    {key: row for key, row in options.OPTIONS.items() if key not in ("n_kv_heads", "head_dim")}
    | OPTIONS_OF_EXPERTS
    | OPTIONS_OF_MTP
    | {
        "n_dense_layers": (
            int,
            {"ge": 0},
            "Number of first layers that have no mixture of experts.",
        ),
        "q_rank": (
            int,
            {"ge": 0},
            "Width of the vector that a token's queries are computed from; 0: directly.",
        ),
        "kv_rank": (
            int,
            {"ge": 1},
            "Width of the vector that a token's keys and values are computed from.",
        ),
        "nope_dim": (
            int,
            {"ge": 1},
            "Width of the part of a head of queries and keys that is not rotated.",
        ),
        "rope_dim": (
            int,
            {"ge": 2},
            "Width of the part that is rotated (in Kimi Linear no part is: shared by all heads).",
        ),
        "value_dim": (int, {"ge": 1}, "Width of a head of values."),
        "n_shared_experts": (
            int,
            {"ge": 0},
            "Number of experts of each mixture that work on every token.",
        ),
        "expert_groups": (
            int,
            {"ge": 1},
            "Number of equal groups that the experts of a mixture form; 1: no groups.",
        ),
        "groups_per_token": (
            int,
            {"ge": 1},
            "Number of groups among whose experts a token's are chosen.",
        ),
        "routed_scale": (
            float,
            {"gt": 0},
            "Factor of the output of the experts that are not shared.",
        ),
    }
)
RULES = (
    RULES_OF_EXPERTS
    | RULES_OF_MTP
    | {
        "dense_layers": (
            lambda c: c.model.n_dense_layers > c.model.n_layers,
            "{model.n_dense_layers} is above {model.n_layers}: lower the one or raise the other",
        ),
        "no_experts": (
            lambda c: c.model.n_experts == 0 and c.model.n_dense_layers < c.model.n_layers,
            "{model.n_experts}, but all of {model.n_layers} but the first ones, "
            "{model.n_dense_layers}, are mixtures of experts: set "
            "n_experts to 1 or more, or n_dense_layers to n_layers",
        ),
        "lora_queries": (
            lambda c: c.lora.rank and "wq_a" in c.lora.targets and not c.model.q_rank,
            "{lora.targets} names wq_a, which a model with {model.q_rank} does not have: remove it",
        ),
        "rope_dim": (
            lambda c: c.model.rope_dim % 2 != 0,
            "{model.rope_dim} must be even, since rotary positions turn pairs",
        ),
        "value_dim": (
            lambda c: c.model.value_dim > c.model.nope_dim + c.model.rope_dim,
            "{model.value_dim} is above {model.nope_dim} plus {model.rope_dim}: values are padded "
            "to the width of a query, and cannot "
            "be wider",
        ),
        "expert_groups": (  # a group is as good as the sum of its two best experts
            lambda c: (
                c.model.n_experts
                and c.model.expert_groups > 1
                and (
                    c.model.n_experts % c.model.expert_groups != 0
                    or c.model.n_experts < 2 * c.model.expert_groups
                )
            ),
            "{model.expert_groups} must divide {model.n_experts} into groups of two experts or more",
        ),
        "groups_per_token": (
            lambda c: (
                c.model.groups_per_token > c.model.expert_groups
                or 0
                < c.model.n_experts // c.model.expert_groups * c.model.groups_per_token
                < c.model.experts_per_token
            ),
            "{model.experts_per_token} cannot be chosen within {model.groups_per_token} of "
            "{model.expert_groups} with {model.n_experts} "
            "in all: raise groups_per_token (up to expert_groups), or lower experts_per_token",
        ),
    }
)


def toy(flavor: dict[str, Any], dim: int) -> dict[str, Any]:
    return flavor | {
        "dim": dim,
        "n_layers": 4,
        "n_dense_layers": 1,
        "n_heads": 2,
        "kv_rank": dim // 2,
        "nope_dim": dim // 4,
        "rope_dim": dim // 4,
        "value_dim": dim // 2,
        "hidden_dim": dim,
        "expert_dim": dim // 2,
        "vocab_size": 16,
    }


NUMBERS = Numbers(
    flavors=FLAVORS,
    options=OPTIONS,
    rules=RULES,
    query_width=("nope_dim", "rope_dim"),
    kv_heads="",
    layers=("wq_a", "wq_b", "wkv_a", "wkv_b", "wo", "w1", "w2", "w3"),
    toy=toy,
)
