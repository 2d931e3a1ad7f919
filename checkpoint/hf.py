"""The model in Hugging Face's terms: its numbers as a `config.json`, its parameters' names as the HF_NAMES table gives them."""


def config_json(arch: dict) -> dict:
    """The fields of a `LlamaConfig` (transformers 5) for these numbers; what Hugging Face writes as config.json."""
    rope = {"rope_type": "default", "rope_theta": arch["rope_theta"]}
    if arch["rope_scaling"]:
        scaling = dict(arch["rope_scaling"])
        original = scaling.pop("original_max_seq_len")
        rope |= {"rope_type": "llama3", "original_max_position_embeddings": original, **scaling}
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
        "hidden_size": arch["dim"], "num_hidden_layers": arch["n_layers"], "intermediate_size": arch["hidden_dim"],
        "num_attention_heads": arch["n_heads"], "num_key_value_heads": arch["n_kv_heads"], "head_dim": arch["head_dim"],
        "vocab_size": arch["vocab_size"], "rms_norm_eps": arch["norm_eps"], "max_position_embeddings": arch["max_seq_len"],
        "rope_parameters": rope, "tie_word_embeddings": arch["tied_embeddings"],
        "attention_bias": False, "mlp_bias": False, "attention_dropout": 0.0,
    }  # fmt: skip


def name_pairs(arch: dict, hf_names: dict[str, str]) -> list[tuple[str, str]]:
    """(our name, Hugging Face's) of every parameter; hf_names is the model's HF_NAMES table, `*` a layer's number."""
    pairs = []
    for ours, theirs in hf_names.items():
        if ours == "output.weight" and arch["tied_embeddings"]:
            continue  # a tied model has one matrix for both, here as in Hugging Face's files
        numbers = range(arch["n_layers"]) if "*" in ours else [0]
        pairs += [(ours.replace("*", str(i)), theirs.replace("*", str(i))) for i in numbers]
    return pairs
