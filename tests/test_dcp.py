"""Checkpoints go to folders of torch.distributed.checkpoint and come back bitwise, under our names and
TorchTitan's; PyTorch alone reads what we write, and we run nothing of what we read.

TorchTitan's Llama is written down here once more, small, with complex rotations and its names.
"""

from contextlib import redirect_stderr
from dataclasses import asdict
from io import StringIO
from pathlib import Path

import pytest
import torch
from torch import Tensor

from checkpoint import storage, verify
from configs.check import architecture
from configs.load import dump, load_config
from models import MODELS
from tools import convert, new_checkpoint

ROOT = Path(__file__).resolve().parent.parent
SMALL = (
    "--model.dim=42 --model.n_layers=3 --model.n_heads=6 --model.n_kv_heads=2 --model.head_dim=14 "
    "--model.hidden_dim=54 --model.vocab_size=263 --data.tokenizer=bytes --training.seq_len=16 "
    "--training.param_dtype=float32 --training.local_batch_size=1 --training.global_batch_size=4 "
    "--optimizer.eps=1e-4"
).split()
EXPERTS = "--model.n_experts=8 --model.experts_per_token=2 --model.expert_dim=10".split()
LATENT = [option for option in SMALL if "kv_heads" not in option and "head_dim" not in option]
LATENT += ["--model.family=deepseek_v3", "--model.flavor=debug", "--model.max_seq_len=64"]
MODELS_HERE = {  # name -> options
    "llama": SMALL,
    "llama tied": [*SMALL, "--model.flavor=1B"],
    "qwen3": [*SMALL, "--model.family=qwen3"],
    "qwen3 tied": [*SMALL, "--model.family=qwen3", "--model.tied_embeddings=true"],
    "qwen3 experts": [*SMALL, *EXPERTS, "--model.family=qwen3", "--model.flavor=debug_moe"],
    "deepseek_v3": [*LATENT, *EXPERTS],
    "deepseek_v3 q_rank": [*LATENT, *EXPERTS, "--model.q_rank=22"],
}


def converted(*argv: object) -> tuple[int, str]:
    """The exit code of `tools.convert`, and what it printed as an error."""
    said = StringIO()
    with redirect_stderr(said):
        code = convert.main([str(word) for word in argv])
    return code, said.getvalue()


def write_checkpoint(options: list[str], out: Path, step: int = 7) -> dict[str, Tensor]:
    """A checkpoint of AdamW with random numbers in every tensor, which are returned."""
    cfg = load_config(options)
    family = MODELS[cfg.model.family]
    args = family.Args(**architecture(cfg.model))
    generator = torch.Generator().manual_seed(3)
    tensors = {}
    for name, shape in new_checkpoint.shapes(family.name, args).items():
        tensors[f"model.{name}"] = torch.randn(shape, generator=generator)
    for name in new_checkpoint.trained(family.name, args):
        for key in ("exp_avg", "exp_avg_sq"):
            shape = tensors[f"model.{name}"].shape
            tensors[f"optimizer.{name}.{key}"] = torch.rand(shape, generator=generator)
        tensors[f"optimizer.{name}.step"] = torch.tensor(float(step))
    facts = {
        "family": family.name,
        "config": dump(cfg),
        "seq_len": cfg.training.seq_len,
        "must_match": {"model": asdict(args)},
    }
    new_checkpoint.write(
        out,
        out,
        {name: tensor.to("meta") for name, tensor in tensors.items()},
        tensors.__getitem__,
        facts,
        step=step,
        progress={"step": step, "samples": 4 * step, "data": {"anything": 1}},
        optimizer="AdamW",
        hyperparameters={"group 0": {"eps": 1e-4}},
    )
    return tensors


def contents(run_folder: Path) -> tuple[dict, dict[str, Tensor]]:
    """Manifest and tensors of the newest checkpoint."""
    path = verify.newest(run_folder)
    manifest = verify.verify(path)
    tensors = {}
    boxes = {}
    for name, row in manifest["tensors"].items():
        tensors[name] = torch.empty(row["shape"], dtype=storage.DTYPES[row["dtype"]])
        boxes[name] = ([0] * len(row["shape"]), row["shape"])
    storage.read(path, manifest, boxes, tensors)
    return manifest, tensors


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(
        a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]) for name in a
    )


def toml_of(options: list[str], place: Path) -> Path:
    path = place / "config.toml"
    path.write_text(dump(load_config(options)))
    return path


# --------------------------------------------------------------------------------------------------
# there and back


@pytest.mark.parametrize("names", ["plumbline", "torchtitan", "torchtitan-unfused"])
@pytest.mark.parametrize("model", MODELS_HERE)
def test_there_and_back(model, names, tmp_path):
    """Every tensor bitwise, and the step; of our own folders the whole record."""
    tensors = write_checkpoint(MODELS_HERE[model], tmp_path / "run")
    folder, back = tmp_path / "dcp", tmp_path / "back"
    assert converted("to-dcp", tmp_path / "run", folder, "--names", names) == (0, "")
    assert sorted(path.name for path in folder.iterdir()) == [".metadata", "__0_0.distcp"]
    config = []
    if names != "plumbline":
        config = ["--config", toml_of(MODELS_HERE[model], tmp_path)]
    assert converted("from-dcp", folder, back, *config) == (0, "")
    before, _ = contents(tmp_path / "run")
    after, found = contents(back)
    assert same(tensors, found)
    recorded = ["step", "optimizer"]
    if names == "plumbline":
        recorded += ["progress", "facts", "hyperparameters"]
    assert [after[key] for key in recorded] == [before[key] for key in recorded]
    assert after["facts"]["must_match"]["model"] == before["facts"]["must_match"]["model"]
