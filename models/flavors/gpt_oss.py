"""Published sizes of gpt-oss, and a small one of ours. No torch: `configs/` imports this
file."""

from typing import Any

from models.options import (
    BRANCH_ENDS,
    MIXTURE_DEBUG,
    OPTIONS_OF_EXPERTS,
    OPTIONS_OF_WINDOWS,
    RULES_OF_EXPERTS,
    Numbers,
    dense_toy,
)
from models.options import OPTIONS as DENSE_OPTIONS
from models.options import RULES as DENSE_RULES

# Sources: arXiv:2508.10925, section 2 (layers, experts, window, YaRN), and the config.json of
# openai/gpt-oss-20b and openai/gpt-oss-120b on the Hugging Face hub. Nothing is published on how
# their experts were balanced. transformers adds its balance loss only where config.json says
# output_router_logits; both files say false, so the factor is 0 here. The window of `debug` is
# shorter than the sequences of its preset.
YARN = {
    "factor": 32.0,
    "original_max_seq_len": 4096.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
}
_PUBLISHED = {
    "dim": 2880,
    "n_heads": 64,
    "n_kv_heads": 8,
    "head_dim": 64,
    "window": 128,
    "experts_per_token": 4,
    "expert_dim": 2880,
    "balance_loss": 0.0,
    "vocab_size": 201088,
    "rope_theta": 150000.0,
    "rope_scaling": YARN,
    "norm_eps": 1e-5,
    "max_seq_len": 131072,
    "tied_embeddings": False,
}
FLAVORS: dict[str, dict] = {
    "debug": MIXTURE_DEBUG
    | {
        "n_layers": 6,
        "window": 64,
        "balance_loss": 0.0,
        "rope_scaling": YARN | {"factor": 8.0, "original_max_seq_len": 1024.0},
        "norm_eps": 1e-5,
    },
    "20B": _PUBLISHED | {"n_layers": 24, "n_experts": 32},
    "120B": _PUBLISHED | {"n_layers": 36, "n_experts": 128},
}

OPTIONS = (
    {key: row for key, row in DENSE_OPTIONS.items() if key != "hidden_dim"}
    | OPTIONS_OF_EXPERTS
    | OPTIONS_OF_WINDOWS
)
RULES = (
    DENSE_RULES
    | RULES_OF_EXPERTS
    | {
        "gpt_oss_experts": (
            lambda c: c.model.n_experts == 0,
            "{model.n_experts}, but every layer is a mixture of experts: set n_experts to 1 or more",
        )
    }
)


def toy(flavor: dict[str, Any], dim: int) -> dict[str, Any]:
    numbers = dense_toy(flavor, dim)
    del numbers["hidden_dim"]
    return numbers


NUMBERS = Numbers(
    flavors=FLAVORS,
    options=OPTIONS,
    rules=RULES,
    hidden_units="",
    branch_ends=(*BRANCH_ENDS, "*.wo.bias", "*.experts.b2"),
    toy=toy,
)
