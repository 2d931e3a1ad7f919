"""Checkpoints that earlier versions wrote in this format stay readable. They are in `tests/golden/`,
80 kB each.

A new one, of a new format or torch, is made by

    python -m tests.test_golden tests/golden/format-2-torch-2.13

and no file there is ever changed: a version that cannot read one has broken its promise
(docs/checkpoint.md). Next to the checkpoint, `expected.json` has the expected values: a hash of
every whole tensor, what each rank's generator draws next, and the losses of the steps after it.
"""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor

import train
from checkpoint import state, verify
from checkpoint.manager import CheckpointManager
from configs.load import load_config
from configs.schema import Checkpoint
from parallelisms.mesh import world
from tests.ranks import run_ranks

GOLDEN = Path(__file__).parent / "golden"
# made by 4 ranks, 2 x 2, after step 3; the losses of steps 4 to 6 are expected
RANKS, SAVED, STEPS = 4, 3, 6
MODEL = (
    "--model.dim=10 --model.n_layers=1 --model.n_heads=4 --model.n_kv_heads=2 --model.head_dim=4 "
    "--model.hidden_dim=6 "
    "--model.vocab_size=37 --data.tokenizer=unused --training.param_dtype=float32 "
    "--training.seq_len=16 "
    "--training.global_batch_size=4 --training.local_batch_size=1 --optimizer.lr=0.01 "
    "--optimizer.eps=1e-5 "
    "--run.device=cpu"
).split()
FACTS = {"must_match": {"run.seed": 0}}


def build(mesh: list[str]) -> train.Job:
    return train.build(load_config([*MODEL, *mesh], world().size, world().local_size))


def train_on(job: train.Job, first: int, last: int) -> list[float]:
    """Return the losses of these steps, on tokens that are a function of the step."""
    mesh, losses = job.mesh, []
    for step in range(first, last + 1):
        row = torch.arange(4)[:, None] * 17 + torch.arange(17) * 5 + step  # [4, T + 1]
        row = (row % 37).view(-1, 1, 17)[mesh.dp_rank :: mesh.dp_size]  # [A, 1, T + 1]
        result = train.train_step(
            job, {"tokens": row[..., :-1].contiguous(), "labels": row[..., 1:].contiguous()}
        )
        losses.append(result.loss)
    return losses


def digests(job: train.Job) -> dict[str, str]:
    """Return a hash of every whole tensor, independent of its mesh."""
    found = {}
    for name, tensor in state.tensors(job.model, job.optimizer).items():
        if not name.startswith("rng."):
            tensor = tensor.detach()
            tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            found[name] = verify.digest(tensor.contiguous().view(-1).view(torch.uint8).numpy())
    return found


def make(folder: Path) -> None:
    job = build(["--parallelism.tensor_parallel=2"])
    checkpoints = CheckpointManager(Checkpoint(), folder, job.mesh, FACTS)
    checkpoints.load(job.model, job.optimizer)
    train_on(job, 1, SAVED)
    torch.manual_seed(100 + job.mesh.rank)
    torch.rand(5)
    progress = {"step": SAVED, "samples": SAVED * 4}
    checkpoints.save(SAVED, job.model, job.optimizer, progress)
    checkpoints.close()
    draws = [None] * RANKS
    torch.distributed.all_gather_object(draws, torch.rand(3).tolist())
    expected = {"progress": progress, "tensors": digests(job), "draws": draws}
    expected["losses"] = train_on(job, SAVED + 1, STEPS)
    if job.mesh.rank == 0:
        (folder / ".lease").unlink()
        (folder / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


def load(folder: Path, mesh: list[str]) -> tuple[dict, dict, list, list]:
    job = build(mesh)
    checkpoints = CheckpointManager(Checkpoint(), folder, job.mesh, FACTS)
    progress = checkpoints.load(job.model, job.optimizer)
    checkpoints.close()
    draws = torch.rand(3).tolist()
    return progress, digests(job), draws, train_on(job, SAVED + 1, STEPS)


@pytest.mark.parametrize(
    ("ranks", "mesh"),
    [(1, []), pytest.param(RANKS, ["--parallelism.tensor_parallel=2"], marks=pytest.mark.torture)],
)
@pytest.mark.parametrize("golden", sorted(path.name for path in GOLDEN.glob("*")))
def test_a_checkpoint_of_an_earlier_version_loads(golden, ranks, mesh, tmp_path):
    # a run would put its lease there
    folder = Path(shutil.copytree(GOLDEN / golden, tmp_path / "checkpoints"))
    expected = json.loads((folder / "expected.json").read_text())
    verify.verify(folder / verify.step_name(SAVED, 0))
    for rank, (progress, tensors, draws, losses) in enumerate(run_ranks(ranks, load, folder, mesh)):
        assert progress == expected["progress"] and tensors == expected["tensors"]
        assert ranks != RANKS or draws == expected["draws"][rank]
        assert len(losses) == 3 and all(
            abs(a - b) <= 1e-5 for a, b in zip(losses, expected["losses"], strict=True)
        )


def test_the_golden_checkpoints_are_small_and_of_this_format():
    formats = {verify.read_manifest(path)["format"] for path in GOLDEN.glob("*/step-*")}
    assert formats == {verify.FORMAT}
    assert sum(path.stat().st_size for path in GOLDEN.rglob("*") if path.is_file()) < 300_000


if __name__ == "__main__":
    run_ranks(RANKS, make, Path(sys.argv[1]))
