"""Recognise files in a folder that was given as a model but is none that can be read: an adapter of
peft, a GGUF, pickles, a pointer of Git LFS. "config.json cannot be read" would not say what to
do."""

from __future__ import annotations

from pathlib import Path

from reliability.disk import LFS_POINTER

PICKLES = ("pytorch_model*.bin", "*.pt", "*.pth")


def named(folder: Path) -> str:
    """Return a sentence about the folder or file; "" if nothing tells what it is."""
    if (folder / "adapter_config.json").is_file():
        return (
            f"{folder} is an adapter of peft, not a model: merge it there (merge_and_unload, then "
            "save_pretrained), and give that folder"
        )
    if folder.suffix == ".gguf" or any(folder.glob("*.gguf")):
        return (
            f"{folder} is GGUF, which is not read: in transformers from_pretrained(..., gguf_file=...) and "
            "save_pretrained make a folder of it"
        )
    if any(any(folder.glob(pattern)) for pattern in PICKLES):
        return (
            f"{folder} has its weights in .bin or .pth files, which are pickles and are not read: "
            "save_pretrained in transformers writes safetensors"
        )
    return ""


def is_pointer(path: Path) -> bool:
    """Return whether a file is a pointer of Git LFS in place of its content."""
    with open(path, "rb") as file:
        return file.read(len(LFS_POINTER)) == LFS_POINTER
