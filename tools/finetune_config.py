"""A configuration that fine-tunes a model by adapters on conversations, of a folder of Hugging Face's.

It names the folder three times: its numbers (model.flavor), its weights and its tokenizer. The rest
is a start: a run prints what it does with the data, and options change it.
"""

import json
from pathlib import Path
from typing import Any

from checkpoint import hf
from configs.load import load_config
from configs.schema import InputError
from configs.words import number_of
from data import chat, hf_tokenizer, inputs
from models import FORMATS, NUMBERS

LONGEST = 512  # tokens of a sequence, which two CPU cores still have time for


def write(folder: Path, out: Path) -> str:
    """Write the configuration for a folder, and return what to do with it.

    Raises InputError for a folder that no run could start from, and where the new file exists:
    nothing is written then.
    """
    if not folder.is_dir():
        raise InputError(
            f"{folder} is no folder of Hugging Face's. Other trainers' configurations are not "
            "translated: `python -m configs.load` answers each of their names with the one here"
        )
    if out.exists():
        raise InputError(f"{out} exists already: give the name of a new file")
    family, args = hf.read_model(folder, FORMATS)
    hf.inventory(folder)
    tokenizer = hf_tokenizer.read(folder)
    tables = options(folder, out, family, args)
    has_template = chat.has_template(folder / "tokenizer.json")
    if not has_template:
        tables["data"]["chat_template"] = "chatml"
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f".{out.name}.partial")
    try:
        partial.write_text(as_toml(folder, tables), encoding="utf-8")
        cfg = load_config([str(partial)])
        if problem := inputs.tokens_without_row(tokenizer, cfg.data, args.vocab_size):
            raise InputError(f"{folder}: {problem}: it is the tokenizer of another model")
        partial.rename(out)
    finally:
        partial.unlink(missing_ok=True)
    template = "its own chat template" if has_template else "no chat template: chatml"
    return (
        f"{out}: adapters for {folder} ({family}, {number_of(args.n_layers, 'layer')} of width {args.dim}; "
        f"{template}). Start: ./run_train.sh {out} --data.source=YOUR.jsonl"
    )


def options(folder: Path, out: Path, family: str, args: Any) -> dict[str, dict[str, Any]]:
    targets = [layer for layer in NUMBERS[family].layers if layer.startswith("w")]
    model = {"family": family, "flavor": str(folder)}
    _, said = hf.described(hf.read_json(folder / "config.json"), FORMATS)
    if said.tied_embeddings and not args.tied_embeddings:
        model["tied_embeddings"] = False
    return {
        "run": {"folder": f"runs/{out.stem}"},
        "model": model,
        "data": {
            "source": "data/examples/chat.jsonl",
            "format": "chat",
            "tokenizer": str(folder / "tokenizer.json"),
            "mask_documents": True,
        },
        "training": {
            "steps": 40,
            "seq_len": min(LONGEST, args.max_seq_len),
            "global_batch_size": 2,
        },
        "lora": {"rank": 16, "alpha": 32.0, "targets": targets},
        "optimizer": {"lr": 5e-4, "weight_decay": 0.0},
        "lr_schedule": {"kind": "linear", "warmup_fraction": 0.1},
        "checkpoint": {"load_hf": str(folder)},
        "metrics": {"interval": 5},
        "validation": {"interval": 0},
        "debug": {"sample_tokens": 0},
    }


def as_toml(folder: Path, tables: dict[str, dict[str, Any]]) -> str:
    lines = [
        f"# Adapters (LoRA) for the model in {folder}, written by `python -m tools.convert config`.",
        "# docs/finetuning.md says what they are, docs/data.md what a file of conversations is.",
    ]
    for table, row in tables.items():
        lines += ["", f"[{table}]"]
        lines += [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in row.items()]
    return "\n".join(lines) + "\n"
