"""Models from elsewhere into a checkpoint, and checkpoints into files for elsewhere; one tensor in
memory at a time.

    python -m tools.convert from-hf      HF_FOLDER  OUT        Hugging Face: config.json and safetensors
    python -m tools.convert from-meta    META_FOLDER OUT       Meta's params.json and consolidated.*.pth (Llama 2 and 3)
    python -m tools.convert to-hf        CHECKPOINT OUT        a folder for transformers' from_pretrained
    python -m tools.convert to-torch     CHECKPOINT OUT.pt     one file for torch.load
    python -m tools.convert to-dcp       CHECKPOINT OUT        a folder for torch.distributed.checkpoint, or TorchTitan
    python -m tools.convert from-dcp     DCP_FOLDER OUT        such a folder, of ours or TorchTitan's
    python -m tools.convert average      CHECKPOINT OUT        a checkpoint of the averages of the weights
    python -m tools.convert lora-to-peft RUN OUT               a folder for peft's PeftModel.from_pretrained
    python -m tools.convert lora-merge   RUN OUT               base and adapters in one, for from_pretrained
    python -m tools.convert config       HF_FOLDER OUT.toml    a configuration that fine-tunes such a model

The first two make `OUT/checkpoints/step-00000000`, which `checkpoint.load_path` starts a run from
and `tools.generate` reads, and `OUT/tokenizer.json` if the tokenizer is of Llama 3's kind.
CHECKPOINT is a run's folder (its newest checkpoint) or one checkpoint, of any mesh, or the URL of
either in an object store (places.py); RUN is one that holds adapters. OUT may be a URL, too. Exit codes: 0 done; 2 what
cannot be converted, in a sentence, and nothing is written.
"""

import argparse
import re
import sys
from functools import partial
from pathlib import Path

from checkpoint import others, verify
from configs import program
from configs.schema import InputError
from reliability.objects import location
from tools import outbound, places

RETIRED = {  # a checkpoint of ours is no folder of DCP's
    "hf-to-dcp": "from-hf",
    "meta-to-dcp": "from-meta",
    "dcp-to-hf": "to-hf",
    "dcp-to-torch": "to-torch",
}


def byte_size(text: str) -> int:
    """Return the bytes of "5GB", "500MB", as save_pretrained's max_shard_size counts them."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT])B", text.upper())
    if not match or not float(match[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 5GB or 500MB")
    return int(float(match[1]) * 1000 ** (1 + "KMGT".index(match[2])))


CHECKPOINT = (
    "CHECKPOINT",
    "a run's folder, a folder of checkpoints, or one checkpoint; or the URL of one",
)
ADAPTERS = ("RUN", "the folder of a run with adapters, or one of its checkpoints; or a URL")
RUN = ("OUT", "a new folder; in it appear checkpoints/step-00000000 and tokenizer.json")

# command -> (its source and target: name and help, its description)
COMMANDS = {
    "from-hf": (
        ("HF_FOLDER", "a folder with config.json and model*.safetensors"),
        RUN,
        "A checkpoint of a Hugging Face folder.",
    ),
    "from-meta": (
        ("META_FOLDER", "a folder with params.json and consolidated.*.pth"),
        RUN,
        "A checkpoint of a model as Meta published it.",
    ),
    "to-hf": (
        CHECKPOINT,
        ("OUT", "a new folder"),
        "A folder for transformers' from_pretrained.",
    ),
    "to-torch": (CHECKPOINT, ("OUT", "a new file"), "One file for torch.load."),
    "to-dcp": (
        CHECKPOINT,
        ("OUT", "a new folder"),
        "A folder of torch.distributed.checkpoint: the model, the optimizer's state and the step.",
    ),
    "from-dcp": (
        ("DCP_FOLDER", "a folder with .metadata, of to-dcp or of TorchTitan"),
        ("OUT", "a new folder; in it appears checkpoints/step-..., from which a run goes on"),
        "A checkpoint of a folder of torch.distributed.checkpoint.",
    ),
    "average": (
        CHECKPOINT,
        RUN,
        "A checkpoint of the averages of a run's weights (optimizer.average_decay).",
    ),
    "lora-to-peft": (
        ADAPTERS,
        ("OUT", "a new folder"),
        "Adapters for peft's PeftModel.from_pretrained.",
    ),
    "lora-merge": (
        ADAPTERS,
        ("OUT", "a new folder"),
        "The base of a run with its adapters added to its weights, for transformers' from_pretrained.",
    ),
    "config": (
        ("HF_FOLDER", "a folder with config.json and model*.safetensors"),
        ("OUT", "a new TOML file"),
        "A configuration that fine-tunes the model in a folder of Hugging Face's.",
    ),
}
# command -> the file that its source must have, if that is a folder
FIRST = {
    "from-hf": "config.json",
    "from-meta": "params.json",
    "from-dcp": ".metadata",
    "config": "config.json",
}
MAX_SHARD_SIZE = {
    "type": byte_size,
    "default": "5GB",
    "help": "size of a file at most [%(default)s]",
}
OPTIONS = {  # command -> option -> its settings, argparse's
    "lora-merge": {
        "--base": {"help": "where the base is now, if it was moved: a folder or a URL"},
        "--max-shard-size": MAX_SHARD_SIZE,
    },
    "to-hf": {
        "--dtype": {
            "choices": ["float32", "bfloat16"],
            "default": "float32",
            "help": "type of the weights; float32 is what the checkpoint holds [%(default)s]",
        },
        "--max-shard-size": MAX_SHARD_SIZE,
        "--tokenizer": {"default": "", "help": places.TOKENIZER},
    },
    "to-dcp": {
        "--names": {
            "choices": ["plumbline", "torchtitan", "torchtitan-unfused"],
            "default": "plumbline",
            "help": "of the tensors; TorchTitan's are those of its version 0.3 [%(default)s]",
        },
        "--step": {"type": int, "help": "of the checkpoint; otherwise the newest"},
    },
    "from-dcp": {
        "--config": {
            "type": Path,
            "help": "a configuration of ours that describes the model of a folder of TorchTitan's",
        },
    },
    "to-torch": {
        "--content": {
            "choices": ["model", "model+optimizer"],
            "default": "model+optimizer",
            "help": "[%(default)s]",
        },
    },
}


@program.refuses
def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] in RETIRED:
        print(
            f"{argv[0]} is called {RETIRED[argv[0]]} now, with the same arguments", file=sys.stderr
        )
        return 2
    parser = argparse.ArgumentParser(
        prog="python -m tools.convert", description="Checkpoints from and for elsewhere."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (source, target, description) in COMMANDS.items():
        command = commands.add_parser(name, help=description, description=description)
        command.add_argument("source", metavar=source[0], help=source[1])
        command.add_argument("out", metavar=target[0], help=target[1])
        for option, settings in OPTIONS.get(name, {}).items():
            command.add_argument(option, **settings)
    args = vars(parser.parse_args(argv))
    command = args.pop("command")
    source = COMMANDS[command][0][0]
    given = args.pop("source")
    if source in (CHECKPOINT[0], ADAPTERS[0]):
        place = location(given)
        if isinstance(place, Path):  # a store is not asked twice
            verify.newest(place)
    else:
        place = places.folder_here(given, source)
        places.check_exists(place, source)
        check_folder(command, place)
    out = location(args.pop("out"))
    if isinstance(out, Path) and not command.startswith("from-"):
        outbound.check_new(out)
    from tools import conversions  # here, because it imports torch

    print(outbound.made(out, partial(conversions.COMMANDS[command], place, **args)))
    return 0


def check_folder(command: str, folder: Path) -> None:
    """Raise InputError for a folder without the file that says what is in it."""
    first = FIRST[command]
    if folder.is_dir() and not (folder / first).exists():
        _, about = COMMANDS[command][0]
        known = others.named(folder) if first == "config.json" else ""
        steps = sorted(folder.glob(f"step-*/{first}"))
        if steps:
            about = f"one checkpoint, such as {steps[-1].parent}"
        raise InputError(known or f"{folder} has no {first}: give {about}")


if __name__ == "__main__":
    program.run(main)
