"""Promises of every family's model: the published numbers, the rotary positions of transformers,
and, for placing it on machines, stages of a pipeline and a core that can be replaced."""

import importlib
import math
from dataclasses import FrozenInstanceError, replace
from itertools import product

import pytest
import torch
from torch import Tensor

from models import FORMATS, MODELS, NUMBERS, layers, llama
from training import init

SIZES = {
    "dim": 24,
    "n_layers": 3,
    "n_heads": 4,
    "n_kv_heads": 2,
    "head_dim": 6,
    "hidden_dim": 20,
    "vocab_size": 31,
}
# of hybrids: the layer in the middle has attention
HYBRID_SIZES = SIZES | {"attention_interval": 2, "rope_dim": 4}
TOKENS, POSITIONS = torch.arange(22).view(2, 11), torch.arange(11)


def numbers(name: str, **changes: object):
    """`Args` of the family's debug flavor at these sizes, as far as it has them."""
    flavor = MODELS[name].numbers.flavors["debug"]
    sizes = HYBRID_SIZES if "attention_interval" in flavor else SIZES
    return MODELS[name].Args(
        **flavor | {key: size for key, size in sizes.items() if key in flavor} | changes
    )


def built(name: str, layers: range | None = None, **changes: object) -> torch.nn.Module:
    """Return a model, or a stage of it, with the initial values of seed 0."""
    args = numbers(name, **changes)
    model = MODELS[name].build(args, layers)
    init.initialise(model, MODELS[name].initial_values(args), 0)
    return model


WITHOUT_POSITIONS = ("kimi_linear",)
every_family = pytest.mark.parametrize("name", FORMATS)


@every_family
def test_a_family_has_the_name_and_the_numbers_of_its_files(name):
    family = MODELS[name]
    assert family.name == name and family.numbers is NUMBERS[name]
    assert FORMATS[name].Args is family.Args
    with pytest.raises(FrozenInstanceError):
        family.name = "another"


@pytest.mark.parametrize(
    "wrong", [{"heads": "n_head"}, {"kv_heads": "kv"}, {"hidden_units": "w"}, {"query_width": "e"}]
)
def test_a_number_that_a_family_does_not_have_is_refused(wrong):
    """Without the check the rules about such a number would be skipped in silence."""
    [name] = wrong.values()
    with pytest.raises(ValueError, match=f"name '{name}', which is none of its dim, n_layers"):
        replace(NUMBERS["llama"], **wrong)


@every_family
def test_a_toy_has_the_width_that_is_asked_for(name):
    args = MODELS[name].small(32)
    assert (args.dim, args.n_layers, MODELS[name].largest_weight(args)) == (32, 4, (32, 32))
    # kernels of GPUs take multiples of 8
    widths = {key: size for key, size in vars(args).items() if key.endswith(("dim", "rank"))}
    assert not [key for key, size in widths.items() if size % 8], widths
    assert MODELS[name].build(args)(
        torch.zeros(1, 3, dtype=torch.int64), torch.arange(3)
    ).shape == (1, 3, args.vocab_size)


@pytest.mark.parametrize(
    "params, tied, context, factor",
    [
        ({}, False, 4096, None),  # Llama 2
        ({"vocab_size": -1, "rope_theta": 10000.0}, False, 4096, None),
        ({"vocab_size": 97, "rope_theta": 500000.0}, False, 8192, None),  # Llama 3
        # 3.1 and 3.3
        ({"vocab_size": 97, "rope_theta": 500000.0, "use_scaled_rope": True}, False, 131072, 8.0),
        # 3.2
        ({"vocab_size": 97, "rope_theta": 500000.0, "use_scaled_rope": True}, True, 131072, 32.0),
    ],
)
def test_what_metas_files_leave_out_is_that_of_the_published_models(params, tied, context, factor):
    embedding = torch.arange(97.0 * 8).view(97, 8)
    weights = {
        "tok_embeddings.weight": embedding,
        "output.weight": embedding if tied else embedding + 1,
        "layers.0.feed_forward.w1.weight": torch.zeros(10, 8),
    }
    args = FORMATS["llama"].meta.args_from_meta(
        {"dim": 8, "n_layers": 1, "n_heads": 2, "norm_eps": 1e-5} | params, weights, files=2
    )
    scaling = (
        {
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_seq_len": 8192,
        }
        if factor
        else None
    )
    assert args == llama.Args(
        dim=8,
        n_layers=1,
        n_heads=2,
        n_kv_heads=2,
        head_dim=4,
        hidden_dim=20,
        vocab_size=97,
        norm_eps=1e-5,
        max_seq_len=context,
        rope_theta=params.get("rope_theta", 10000.0),
        tied_embeddings=tied,
        rope_scaling=scaling,
    )


@every_family
@pytest.mark.parametrize("tied", [False, True])
def test_the_parameters_that_a_family_counts_are_those_of_the_model(name, tied):
    args = numbers(name, tied_embeddings=tied)
    model = MODELS[name].build(args)
    assert MODELS[name].parameters(args) == sum(
        p.numel() for p in model.parameters() if p.requires_grad
    )
    assert FORMATS[name].hf_names(args).keys() == dict(model.named_parameters()).keys()
    assert "3 layers" in MODELS[name].describe(args)


# The config.json of each repository on the Hugging Face hub, except for what the classes and the
# sizes below have in common. The 405B is that of the later revision, whose key/value heads are not
# duplicated (8, not 16).
FIELDS = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "head_dim",
    "tie_word_embeddings",
)
PUBLISHED = {
    "llama": {
        "meta-llama/Llama-3.2-1B": (2048, 16, 32, 8192, 64, True),
        "meta-llama/Llama-3.2-3B": (3072, 28, 24, 8192, 128, True),
        "meta-llama/Llama-3.1-8B": (4096, 32, 32, 14336, None, False),
        "meta-llama/Llama-3.1-70B": (8192, 80, 64, 28672, None, False),
        "meta-llama/Llama-3.1-405B": (16384, 126, 128, 53248, None, False),
    },
    "qwen3": {
        "Qwen/Qwen3-0.6B": (1024, 28, 16, 3072, 128, True),
        "Qwen/Qwen3-1.7B": (2048, 28, 16, 6144, 128, True),
        "Qwen/Qwen3-4B": (2560, 36, 32, 9728, 128, True),
        "Qwen/Qwen3-8B": (4096, 36, 32, 12288, 128, False),
        "Qwen/Qwen3-14B": (5120, 40, 40, 17408, 128, False),
        "Qwen/Qwen3-32B": (5120, 64, 64, 25600, 128, False),
    },
    # as litgpt and fairseq2 repeat these files, and OLMo-core makes them
    "olmo2": {
        "allenai/OLMo-2-0425-1B": (2048, 16, 16, 8192, None, False),
        "allenai/OLMo-2-1124-7B": (4096, 32, 32, 11008, None, False),
        "allenai/OLMo-2-1124-13B": (5120, 40, 40, 13824, None, False),
        "allenai/OLMo-2-0325-32B": (5120, 64, 40, 27648, None, False),
        "allenai/Olmo-3-1025-7B": (4096, 32, 32, 11008, None, False),
        "allenai/Olmo-3-1125-32B": (5120, 64, 40, 27648, None, False),
    },
}
OLMO3 = {
    "model_type": "olmo3",
    "vocab_size": 100278,
    "max_position_embeddings": 65536,
    "sliding_window": 4096,
    "rope_scaling": {
        "attention_factor": 1.2079441541679836,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 8.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "yarn",
    },
}
BEFORE_EXTENSION = {"rope_scaling": None, "max_position_embeddings": 8192}
ATTENTION = [4, 8, 12, 16, 20, 24, 27]
KIMI_LAYERS = {
    "full_attn_layers": ATTENTION,
    "kda_layers": [number for number in range(1, 28) if number not in ATTENTION],
    "head_dim": 128,
    "num_heads": 32,
    "short_conv_kernel_size": 4,
}
WITH_EXPERTS = {  # repository -> family and flavor, and what config.json says
    "Qwen/Qwen3-30B-A3B": (
        "qwen3",
        "30B-A3B",
        {
            "hidden_size": 2048,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
        },
    ),
    "Qwen/Qwen3-235B-A22B": (
        "qwen3",
        "235B-A22B",
        {
            "hidden_size": 4096,
            "num_hidden_layers": 94,
            "num_attention_heads": 64,
            "num_key_value_heads": 4,
            "intermediate_size": 12288,
            "moe_intermediate_size": 1536,
        },
    ),
    "moonshotai/Moonlight-16B-A3B": (
        "deepseek_v3",
        "16B-A3B",
        {
            "hidden_size": 2048,
            "num_hidden_layers": 27,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "intermediate_size": 11264,
            "moe_intermediate_size": 1408,
            "first_k_dense_replace": 1,
            "q_lora_rank": None,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "n_routed_experts": 64,
            "num_experts_per_tok": 6,
            "n_shared_experts": 2,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 2.446,
            "vocab_size": 163840,
            "rope_theta": 50000.0,
            "rms_norm_eps": 1e-05,
            "max_position_embeddings": 8192,
            "tie_word_embeddings": False,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "norm_topk_prob": True,
            "aux_loss_alpha": 0.001,
        },
    ),
    "deepseek-ai/DeepSeek-V3": (
        "deepseek_v3",
        "671B",
        {
            "hidden_size": 7168,
            "num_hidden_layers": 61,
            "num_attention_heads": 128,
            "num_key_value_heads": 128,
            "intermediate_size": 18432,
            "moe_intermediate_size": 2048,
            "first_k_dense_replace": 3,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "n_routed_experts": 256,
            "num_experts_per_tok": 8,
            "n_shared_experts": 1,
            "n_group": 8,
            "topk_group": 4,
            "routed_scaling_factor": 2.5,
            "vocab_size": 129280,
            "rope_theta": 10000,
            "rms_norm_eps": 1e-06,
            "max_position_embeddings": 163840,
            "rope_scaling": {
                "type": "yarn",
                "factor": 40,
                "original_max_position_embeddings": 4096,
                "beta_fast": 32,
                "beta_slow": 1,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
            "tie_word_embeddings": False,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "norm_topk_prob": True,
            "aux_loss_alpha": 0.0001,
        },
    ),  # the report's, section 4.2; config.json has 0.001
    "Qwen/Qwen3-Next-80B-A3B-Instruct": (
        "qwen3_next",
        "80B-A3B",
        {
            "model_type": "qwen3_next",
            "hidden_act": "silu",
            "hidden_size": 2048,
            "num_hidden_layers": 48,
            "full_attention_interval": 4,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "partial_rotary_factor": 0.25,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4,
            "intermediate_size": 5120,
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "output_router_logits": False,
            "router_aux_loss_coef": 0.001,
            "vocab_size": 151936,
            "rope_theta": 10000000,
            "rope_scaling": None,
            "rms_norm_eps": 1e-06,
            "max_position_embeddings": 262144,
            "use_sliding_window": False,
            "tie_word_embeddings": False,
        },
    ),
    "moonshotai/Kimi-Linear-48B-A3B-Base": (
        "kimi_linear",
        "48B-A3B",
        {
            "model_type": "kimi_linear",
            "first_k_dense_replace": 1,
            "head_dim": 72,
            "hidden_act": "silu",
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "kv_lora_rank": 512,
            "linear_attn_config": KIMI_LAYERS,
            "mla_use_nope": True,
            "model_max_length": 1048576,
            "moe_intermediate_size": 1024,
            "moe_layer_freq": 1,
            "moe_renormalize": True,
            "moe_router_activation_func": "sigmoid",
            "num_attention_heads": 32,
            "num_expert_group": 1,
            "num_experts": 256,
            "num_experts_per_token": 8,
            "num_hidden_layers": 27,
            "num_key_value_heads": 32,
            "num_nextn_predict_layers": 0,
            "num_shared_experts": 1,
            "q_lora_rank": None,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "rms_norm_eps": 1e-05,
            "rope_scaling": None,
            "rope_theta": 10000.0,
            "routed_scaling_factor": 2.446,
            "tie_word_embeddings": False,
            "topk_group": 1,
            "use_grouped_topk": True,
            "v_head_dim": 128,
            "vocab_size": 163840,
            "aux_loss_alpha": 0.0001,  # our choice; the file has none
        },
    ),
    **{
        f"openai/gpt-oss-{flavor.lower()}": (
            "gpt_oss",
            flavor,
            {
                "model_type": "gpt_oss",
                "hidden_act": "silu",
                "hidden_size": 2880,
                "num_hidden_layers": layers_,
                "num_attention_heads": 64,
                "num_key_value_heads": 8,
                "head_dim": 64,
                "intermediate_size": 2880,
                "num_local_experts": experts,
                "num_experts_per_tok": 4,
                "layer_types": ["sliding_attention", "full_attention"] * (layers_ // 2),
                "sliding_window": 128,
                "swiglu_limit": 7.0,
                "attention_bias": True,
                "output_router_logits": False,
                "router_aux_loss_coef": 0.9,
                "vocab_size": 201088,
                "rope_theta": 150000,
                "rope_scaling": {
                    "rope_type": "yarn",
                    "factor": 32.0,
                    "beta_fast": 32.0,
                    "beta_slow": 1.0,
                    "truncate": False,
                    "original_max_position_embeddings": 4096,
                },
                "rms_norm_eps": 1e-05,
                "max_position_embeddings": 131072,
                "tie_word_embeddings": False,
                "quantization_config": {"quant_method": "mxfp4"},
            },
        )
        for flavor, layers_, experts in (("20B", 24, 32), ("120B", 36, 128))
    },
}
QWEN3_5 = {  # the text_config of Qwen/Qwen3.5-27B
    "model_type": "qwen3_5_text",
    "attention_bias": False,
    "attn_output_gate": True,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "mlp_only_layers": [],
    "mtp_num_hidden_layers": 1,
    "num_attention_heads": 24,
    "num_hidden_layers": 64,
    "num_key_value_heads": 4,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000,
        "rope_type": "default",
    },
    "tie_word_embeddings": False,
    "vocab_size": 248320,
}
GEMMA2 = {  # flavor -> the config.json of google/gemma-2-...
    "2B": {
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_attention_heads": 8,
        "num_hidden_layers": 26,
        "num_key_value_heads": 4,
    },
    "9B": {
        "hidden_size": 3584,
        "intermediate_size": 14336,
        "num_attention_heads": 16,
        "num_hidden_layers": 42,
        "num_key_value_heads": 8,
    },
    "27B": {
        "head_dim": 128,
        "hidden_size": 4608,
        "intermediate_size": 36864,
        "num_attention_heads": 32,
        "num_hidden_layers": 46,
        "num_key_value_heads": 16,
        "query_pre_attn_scalar": 144,
    },
}
GEMMA2_OF_ALL = {
    "model_type": "gemma2",
    "attn_logit_softcapping": 50.0,
    "cache_implementation": "hybrid",
    "final_logit_softcapping": 30.0,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "vocab_size": 256000,
}
GEMMA3 = {  # flavor -> the config.json of google/gemma-3-...; of 4B and more, its text_config
    "270M": {
        "hidden_size": 640,
        "intermediate_size": 2048,
        "num_hidden_layers": 18,
    },
    "1B": {
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "num_hidden_layers": 26,
    },
    "4B": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
    },
    "12B": {
        "hidden_size": 3840,
        "intermediate_size": 15360,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "num_hidden_layers": 48,
    },
    "27B": {
        "head_dim": 128,
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "num_attention_heads": 32,
        "num_hidden_layers": 62,
        "num_key_value_heads": 16,
        "query_pre_attn_scalar": 168,
    },
}
GEMMA3_OF_TEXT = {
    "model_type": "gemma3_text",
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 32768,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "vocab_size": 262144,
}
GEMMA3_OF_IMAGES = {
    "model_type": "gemma3_text",
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    "sliding_window": 1024,
}
COMMON = {
    "llama": {
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "rope_theta": 500000.0,
        "rms_norm_eps": 1e-05,
        "max_position_embeddings": 131072,
    },
    "qwen3": {
        "num_key_value_heads": 8,
        "vocab_size": 151936,
        "rope_theta": 1000000,
        "rms_norm_eps": 1e-06,
        "max_position_embeddings": 40960,
        "rope_scaling": None,
    },
    "olmo2": {
        "model_type": "olmo2",
        "vocab_size": 100352,
        "rope_theta": 500000,
        "rms_norm_eps": 1e-06,
        "max_position_embeddings": 4096,
        "rope_scaling": None,
    },
}
STRETCHED = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def olmo(repository: str, config: dict) -> list:
    """Return the rows of `published` for an OLMo. config: what all of them have in common, and its
    sizes. The extension of OLMo 3's context makes two flavors of a repository."""
    size = repository.split("-")[-1]
    if size == "32B":
        config["num_key_value_heads"] = 8
    if "OLMo-2" in repository:
        return [pytest.param("olmo2", size, config, id=repository)]
    config |= OLMO3
    config["layer_types"] = [
        "full_attention" if number % 4 == 3 else "sliding_attention"
        for number in range(config["num_hidden_layers"])
    ]
    short = config | BEFORE_EXTENSION
    return [
        pytest.param("olmo2", f"3-{size}", config, id=repository),
        pytest.param("olmo2", f"3-{size}-8k", short, id=f"{repository} before its extension"),
    ]


def published() -> list:
    """(family, flavor, the fields of its config.json)"""
    rows = []
    for name in PUBLISHED:
        for repository, values in PUBLISHED[name].items():
            config = COMMON[name] | {
                key: value for key, value in zip(FIELDS, values, strict=True) if value is not None
            }
            if name == "llama":
                config["rope_scaling"] = STRETCHED | {
                    "factor": 32.0 if "3.2" in repository else 8.0
                }
            if name == "olmo2":
                rows += olmo(repository, config)
                continue
            rows.append(pytest.param(name, repository.split("-")[-1], config, id=repository))
    for repository, (name, flavor, config) in WITH_EXPERTS.items():
        if name == "qwen3":
            config = (
                COMMON[name]
                | config
                | {
                    "model_type": "qwen3_moe",
                    "head_dim": 128,
                    "tie_word_embeddings": False,
                    "num_experts": 128,
                    "num_experts_per_tok": 8,
                    "norm_topk_prob": True,
                    "decoder_sparse_step": 1,
                    "mlp_only_layers": [],
                    "router_aux_loss_coef": 0.001,
                }
            )
        rows.append(pytest.param(name, flavor, config, id=repository))
    rows.append(pytest.param("qwen3_5", "27B", QWEN3_5, id="Qwen/Qwen3.5-27B"))
    for flavor, config in GEMMA2.items():
        numbers = GEMMA2_OF_ALL | config
        rows.append(pytest.param("gemma2", flavor, numbers, id=f"google/gemma-2-{flavor}"))
    for flavor, config in GEMMA3.items():
        common = GEMMA3_OF_TEXT if flavor in ("270M", "1B") else GEMMA3_OF_IMAGES
        rows.append(pytest.param("gemma3", flavor, common | config, id=f"google/gemma-3-{flavor}"))
    return rows


@pytest.mark.parametrize("name, flavor, config", published())
def test_every_number_of_a_flavor_is_the_published_one(name, flavor, config):
    family = MODELS[name]
    stored = FORMATS[name].args_from_hf(config)
    if "mtp_depth" in vars(stored):  # an option asks for layers that predict further tokens
        stored = replace(stored, mtp_depth=0)
    assert family.Args(**family.numbers.flavors[flavor]) == stored


REQUIRED = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "intermediate_size": 96,
    "vocab_size": 50,
}
# Model type -> family, and the least that a config.json must say
SHORTEST = {
    "llama": ("llama", REQUIRED),
    "qwen3": ("qwen3", REQUIRED),
    "qwen3_moe": ("qwen3", REQUIRED | {"norm_topk_prob": True}),
    "olmo2": ("olmo2", REQUIRED),
    "olmo3": ("olmo2", REQUIRED),
    "deepseek_v3": ("deepseek_v3", {}),
    "gpt_oss": ("gpt_oss", {}),
    "qwen3_next": ("qwen3_next", {}),
    "qwen3_5_text": ("qwen3_5", {}),
    "kimi_linear": ("kimi_linear", {"linear_attn_config": KIMI_LAYERS}),
    "gemma2": ("gemma2", {}),
    "gemma3_text": ("gemma3", {}),
}


@pytest.mark.parametrize("kind", SHORTEST)
def test_what_a_config_does_not_say_has_the_default_of_transformers(kind):
    transformers = pytest.importorskip("transformers")
    name, given = SHORTEST[kind]
    theirs = transformers.AutoConfig.for_model(kind, **given).to_dict()
    read = FORMATS[name].args_from_hf
    assert read({"model_type": kind} | given) == read(theirs)


@pytest.mark.parametrize("kind", SHORTEST)
def test_more_layers_and_wider_heads_than_a_model_has_are_refused(kind):
    """A damaged file is refused before tensors of its sizes are made."""
    name, given = SHORTEST[kind]
    read, given = FORMATS[name].args_from_hf, {"model_type": kind} | given
    if name != "kimi_linear":  # whose file names each layer
        assert read(given | {"num_hidden_layers": 1000}).n_layers == 1000
    with pytest.raises(ValueError, match="num_hidden_layers is 1001"):
        read(given | {"num_hidden_layers": 1001})
    if name in ("deepseek_v3", "kimi_linear"):  # whose heads have other widths
        return
    heads = {"num_attention_heads": 2**12, "num_key_value_heads": 2**12}
    assert read(given | heads | {"head_dim": 2**12}).head_dim == 2**12
    with pytest.raises(ValueError, match="4096 heads, 4096 of keys and values, 4098 wide"):
        read(given | heads | {"head_dim": 2**12 + 2})


def test_every_flavor_is_compared_with_what_was_published():
    compared = {(row.values[0], row.values[1]) for row in published()}
    assert compared == {
        (name, flavor)
        for name in FORMATS
        for flavor in MODELS[name].numbers.flavors
        if "debug" not in flavor
    }


@pytest.mark.parametrize(
    "name, flavor",
    [
        (name, flavor)
        for name in FORMATS
        for flavor in MODELS[name].numbers.flavors
        if "debug" in flavor
    ],
)
def test_debug_flavors_are_small_and_otherwise_equal(name, flavor):
    """Runs of two families are compared on the same tokens. What has nothing to do with size is as
    published."""
    numbers, large = (
        MODELS[name].numbers.flavors[flavor],
        [
            MODELS[name].numbers.flavors[row.values[1]]
            for row in published()
            if row.values[0] == name
        ],
    )
    same = {
        "vocab_size": 4096,
        "rope_theta": 10000.0,
        "max_seq_len": 8192,
        "tied_embeddings": all(row["tied_embeddings"] for row in large),
    }
    if name in WITHOUT_POSITIONS:
        del same["rope_theta"]
    assert {key: numbers[key] for key in same} == same
    for key in "norm_eps", "balance_loss":
        assert key not in numbers or numbers[key] in [row.get(key) for row in large]
    # kernels of GPUs take multiples of 8, and 8 ranks can share the experts
    whole = {
        key: size for key, size in numbers.items() if key.endswith(("dim", "rank", "n_experts"))
    }
    assert not [key for key, size in whole.items() if size % 8], whole
    if scaling := numbers.get("rope_scaling"):
        assert scaling["factor"] * scaling["original_max_seq_len"] == numbers["max_seq_len"]


@pytest.mark.parametrize(
    "name, flavor",
    [
        (name, flavor)
        for name in FORMATS
        if name not in WITHOUT_POSITIONS
        for flavor in MODELS[name].numbers.flavors
    ],
)
def test_rotary_positions_are_those_of_transformers(name, flavor):
    """At position 1 the sines are nearly the frequencies themselves, so each frequency is compared
    to 1e-5 of its size."""
    compare_rotary_positions(name, MODELS[name].Args(**MODELS[name].numbers.flavors[flavor]))


@pytest.mark.parametrize("name, flavor", [("deepseek_v3", "671B"), ("gpt_oss", "20B")])
def test_the_line_of_yarn_ends_with_the_head(name, flavor):
    """At this base the pair that turns beta_slow times would be the 66th of 32, and the line ends
    at 63. It begins at the 30th, so that a pair lies on it."""
    numbers = MODELS[name].numbers.flavors[flavor] | {"rope_theta": 24.0}
    compare_rotary_positions(name, MODELS[name].Args(**numbers))


def compare_rotary_positions(name: str, args: object) -> None:
    transformers = pytest.importorskip("transformers")
    family = MODELS[name]
    config = transformers.AutoConfig.for_model(**FORMATS[name].hf_config(args))
    kind = config.model_type.removesuffix("_text")
    module = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    found = {key: one for key, one in vars(module).items() if key.endswith("RotaryEmbedding")}
    (rotary,) = (found[key] for key in found if "Vision" not in key)
    with torch.device("meta"):
        model = family.build(args)
    positions = torch.tensor([0, 1, 2, 77, 1000])
    # OLMo 3 has two tables, if its positions are scaled, and Gemma 3 always
    has_kinds = kind in ("olmo3", "gemma3")
    kinds = ["sliding_attention", "full_attention"] if has_kinds else [None]
    for number, kind in enumerate(kinds):
        theirs = rotary(config)(torch.zeros(1), positions[None], *([kind] if kind else []))
        for ours, want in zip(model.rope(positions), theirs, strict=True):
            ours = ours[number] if ours.ndim == 3 else ours
            if name == "gpt_oss":  # whose code has each frequency once
                want = torch.cat((want, want), -1)
            torch.testing.assert_close(ours, want[0], rtol=1e-5, atol=1e-4)
            torch.testing.assert_close(ours[:2], want[0, :2], rtol=1e-5, atol=0)


@pytest.mark.parametrize("low, high, factor", list(product([1.0, 2.0], [4.0, 8.0], [8.0, 32.0])))
def test_long_wavelengths_are_stretched_and_short_ones_are_not(low, high, factor):
    """Written out for each frequency, independent of the vectorised code. The original context is
    8,192 tokens, so all three kinds of wavelength occur among the 64 frequencies of a head."""
    frequencies = layers.rope_frequencies(128, 500000.0, torch.device("cpu"))
    scaling = {
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_seq_len": 8192,
    }
    got, kinds = llama.scaled_frequencies(frequencies, scaling).tolist(), set()
    for frequency, stretched in zip(frequencies.tolist(), got, strict=True):
        turns = 8192 * frequency / (2 * math.pi)  # in the original context
        # the share of the frequency that is not stretched
        kept = min(1.0, max(0.0, (turns - low) / (high - low)))
        assert stretched == pytest.approx(frequency * (kept + (1 - kept) / factor), rel=1e-5)
        kinds.add("all" if kept == 1 else "nothing" if kept == 0 else "a part")
    assert len(kinds) == 3


@pytest.mark.parametrize(
    "name, flavor, billions",
    [
        # the model cards on the hub
        ("qwen3", "30B-A3B", 3.3),
        ("qwen3", "235B-A22B", 22),
        ("deepseek_v3", "671B", 37),
        ("gpt_oss", "20B", 3.61),
        ("gpt_oss", "120B", 5.13),
    ],
)
def test_published_totals_of_active_parameters(name, flavor, billions):
    """The cards of DeepSeek-V3 and gpt-oss leave out the embedding, 0.9 and 0.6 billion."""
    family = MODELS[name]
    args = family.Args(**family.numbers.flavors[flavor])
    embedding = 0 if name == "qwen3" else args.dim * args.vocab_size
    assert family.active_parameters(args) - embedding == pytest.approx(billions * 1e9, rel=0.02)


@pytest.mark.parametrize(
    "name, flavor",
    [
        ("qwen3", "debug_moe"),
        ("deepseek_v3", "debug"),
        ("deepseek_v3", "16B-A3B"),
        ("gpt_oss", "20B"),
        ("qwen3_next", "80B-A3B"),
        ("kimi_linear", "48B-A3B"),
    ],
)
def test_active_parameters_are_all_but_those_of_experts_that_a_token_is_not_sent_to(name, flavor):
    family = MODELS[name]
    args = family.Args(**family.numbers.flavors[flavor])
    with torch.device("meta"):
        model = family.build(args)
    every = sum(p.numel() for p in model.parameters() if p.requires_grad)
    experts = sum(
        p.numel() for mixture in model.mixtures().values() for p in mixture.experts.parameters()
    )
    assert family.parameters(args) == every
    assert family.active_parameters(args) == every - experts // args.n_experts * (
        args.n_experts - args.experts_per_token
    )


def test_experts_whose_weights_do_not_add_up_to_1_are_refused():
    """transformers leaves them so where config.json does not say otherwise."""
    family, formats = MODELS["qwen3"], FORMATS["qwen3"]
    config = formats.hf_config(family.Args(**family.numbers.flavors["debug_moe"]))
    formats.args_from_hf(config)
    del config["norm_topk_prob"]
    with pytest.raises(ValueError, match="norm_topk_prob is false"):
        formats.args_from_hf(config)


@every_family
@pytest.mark.parametrize("tied", [False, True])
def test_stages_of_a_pipeline_are_the_whole_model(name, tied):
    """Each stage is built alone; parameters have the names and the initial values that they have in
    the whole model."""
    whole = built(name, tied_embeddings=tied)
    stages = [
        built(name, layers, tied_embeddings=tied) for layers in (range(1), range(1, 2), range(2, 3))
    ]
    values = dict(whole.named_parameters())
    names = [
        name
        for stage in stages
        for name, value in stage.named_parameters()
        if torch.equal(value, values[name])
    ]
    assert sorted(names) == sorted([*values, *(["tok_embeddings.weight"] if tied else [])])
    h = TOKENS
    for stage in stages:
        h = stage(h, POSITIONS)
    assert torch.equal(h, whole(TOKENS, POSITIONS))


@every_family
def test_positions_are_the_callers(name):
    """A slice of a sequence at its own positions. RoPE is relative, so a shift of all positions
    changes rounding alone, and other distances between the tokens change the result, unless the order
    of tokens is in states alone."""
    model = built(name)
    here, shifted, stretched = (
        model(TOKENS, positions) for positions in (POSITIONS, POSITIONS + 5, POSITIONS * 2)
    )
    if name in WITHOUT_POSITIONS:
        assert torch.equal(shifted, here) and torch.equal(stretched, here)
    else:
        assert (shifted - here).abs().max() < 1e-6 < 1e-5 < (stretched - here).abs().max()


@every_family
def test_the_core_of_attention_can_be_replaced_from_outside(name):
    """Replaces `forward` of the module on one instance, as a fork may."""
    model, plain = built(name), built(name)
    core, seen = model.layers["1"].attention.core, []
    assert not list(core.parameters())

    def forward(q: Tensor, k: Tensor, v: Tensor, documents: object, sinks: object = None) -> Tensor:
        seen.append((q.shape, k.shape, v.shape))
        return 2 * type(core).forward(core, q, k, v, documents, sinks)

    core.forward = forward
    with torch.no_grad():
        plain.layers["1"].attention.wo.weight.mul_(2)
    assert torch.equal(model(TOKENS, POSITIONS), plain(TOKENS, POSITIONS))
    # its values are padded inside
    heads = {
        "deepseek_v3": [(4, 48), (4, 48), (4, 32)],
        "kimi_linear": [(4, 36), (4, 36), (4, 32)],
    }.get(name, [(4, 6), (2, 6), (2, 6)])
    assert seen == [tuple((2, 11, *shape) for shape in heads)]
