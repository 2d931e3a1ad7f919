"""Text from a checkpoint, whatever mesh it was saved on.

    python -m tools.generate runs/llama_debug --prompt "def "

The first argument is a run's folder, or one checkpoint in it; the newest checkpoint is taken. The model's numbers come from
the checkpoint, the tokenizer from `tokenizer.json` in the run's folder.
"""

import argparse
import sys
from pathlib import Path

import torch

from checkpoint import verify
from checkpoint.state import load_model
from configs.schema import InputError
from data.tokenizer import load_saved
from models import MODELS
from training.sample import sample


def generate(folder: Path, prompt: str, new_tokens: int, temperature: float, top_k: int, seed: int, tokenizer: str = "") -> str:
    """The prompt and what the model makes of it. Raises InputError for a folder without a checkpoint or tokenizer."""
    path = verify.newest(folder)
    try:
        facts = verify.read_manifest(path)["facts"]
    except verify.Damaged as error:
        raise InputError(f"{path} is damaged: {error}") from None
    family = MODELS[facts["family"]]
    args = family.Args(**facts["must_match"]["model"])
    context = facts.get("seq_len", min(args.max_seq_len, 1024))  # a converted model has none
    words = load_saved(tokenizer or str(path.resolve().parent.parent / "tokenizer.json"))
    model = family.build(args)
    load_model(path, model)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    ids = words.encode(prompt).tolist() or [words.eot_id]
    ids = sample(model.to(device), ids, new_tokens, context, device, words.eot_id, temperature, top_k, seed)
    return words.decode(ids)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.generate", description="Text from a checkpoint.")
    parser.add_argument("checkpoint", type=Path, help="a run's folder, or one of its checkpoints")
    parser.add_argument("--prompt", default="def ", help="text to continue [%(default)r]")
    parser.add_argument("--tokens", type=int, default=200, help="tokens to add at most [%(default)s]")
    parser.add_argument("--temperature", type=float, default=0.8, help="0: always the likeliest token [%(default)s]")
    parser.add_argument("--top-k", type=int, default=50, help="draw from this many likeliest tokens [%(default)s]")
    parser.add_argument("--seed", type=int, default=0, help="another seed, another text [%(default)s]")
    parser.add_argument("--tokenizer", default="", help="a saved tokenizer.json, when it is not in the run's folder")
    args = parser.parse_args(argv)
    try:
        print(generate(args.checkpoint, args.prompt, args.tokens, args.temperature, args.top_k, args.seed, args.tokenizer))
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
