"""`python -m tools.parity`: it finds mistakes in a family that this repository has never seen, and
finds none where there are none."""

import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from configs.load import load_config
from models.layers import apply_rope
from tests.examples import fork
from tests.programs import PYTHON, ROOT, finished
from tools.parity import __main__ as tool
from tools.parity import meshes
from tools.parity.compare import compare
from tools.parity.ranks import Failed, on_ranks
from tools.parity.trajectory import Notes, note_outputs
from training.init import fill

SMALL = (
    "--model.family=parallel --model.n_layers=2 --model.dim=32 --model.n_heads=4 "
    "--model.n_kv_heads=2 --model.head_dim=8 --model.hidden_dim=48 --model.vocab_size=263 "
    "--training.seq_len=16 --training.global_batch_size=8 --steps=2"
).split()
LAST_LINE = "return x + self.attention(normed, cos, sin, documents) + self.feed_forward(normed)"
# Mistake -> (replacement of LAST_LINE, verdict on cp2).
MISTAKES = {
    # a mesh on which a rank has fewer tokens is off by 2e-8: float32 does not see it
    "forward": (
        LAST_LINE + " * (1 + 2e-9 * x.shape[1])",
        "cp2: step 1: forward, output of layers.0, ",
    ),
    "backward": (
        "x = x + self.attention(normed, cos, sin, documents) + self.feed_forward(normed)\n"
        "        x.register_hook(lambda grad: grad * (1 + 1e-9 * grad.shape[1]))\n"
        "        return x",
        "cp2: step 1: backward, gradient of layers.1.feed_forward.w2.weight, ",
    ),
}


def ask(tree: Path, *arguments: str) -> tuple[int, str]:
    words = "-m", "tools.parity", "configs/llama_debug.toml", *arguments
    done = finished(PYTHON, *words, cwd=tree)
    return done.returncode, done.stderr + done.stdout


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fork(tmp_path_factory.mktemp("fork"), "family")


@pytest.mark.slow
@pytest.mark.cap(240)
def test_a_family_that_is_right_is_equal_on_every_mesh(tree: Path) -> None:
    code, said = ask(tree, *SMALL, "--meshes", "cp2", "fsdp2xtp2", "pp2")
    assert code == 0 and said.endswith("all are equal\n"), said


@pytest.mark.slow
@pytest.mark.cap(240)
@pytest.mark.parametrize("where", MISTAKES)
def test_a_planted_mistake_is_found(where: str, tree: Path) -> None:
    wrong, expected = MISTAKES[where]
    path = tree / "models" / "parallel.py"
    right = path.read_text()
    assert right.count(LAST_LINE) == 1
    path.write_text(right.replace(LAST_LINE, wrong))
    try:
        code, said = ask(tree, *SMALL, "--meshes", "cp2", "fsdp2")
        assert code == 1 and expected in said and "fsdp2: " not in said, said
    finally:
        path.write_text(right)


def raises_in_a_model() -> None:
    apply_rope(torch.zeros(1, 1, 1, 2), torch.zeros(1, 3), torch.zeros(1, 3))


def raises_outside_of_models() -> None:
    fill(torch.empty(2, 2), "w", "normal", "no number", 0)


@pytest.mark.parametrize(
    "work, place",
    [(raises_in_a_model, "models/layers.py:"), (raises_outside_of_models, "training/init.py:")],
)
def test_a_rank_that_raises_is_reported_with_the_place(work: Callable, place: str) -> None:
    with pytest.raises(
        Failed, match=rf"rank 0: {re.escape(place)}\d+ raised (Runtime|Type)Error: "
    ):
        on_ranks(1, 60, work)


def test_a_mesh_that_is_refused_is_left_out() -> None:
    argv = [str(ROOT / "configs/llama_debug.toml")]
    given = load_config(argv, None, None)
    fitting, refused = meshes.those_that_fit(argv, given, ["ep2", "fsdp2", "tp3"], 4)
    assert [mesh.name for mesh in fitting] == ["fsdp2"]
    assert "no effect on a model without experts" in refused["ep2"] and "tp3" in refused


def notes(scale: float) -> Notes:
    """Return the ones of a step whose clipped gradient is by this factor too large."""
    weight = np.ones((2, 3))
    return Notes(
        samples=np.zeros((1, 1), np.int64),
        positions=np.arange(2),
        tp_rank=0,
        outputs={},
        token_losses=np.ones((1, 1, 2), np.float32),
        gradients={"w": weight},
        clipped={"w": weight * scale},
        loss=[1.0],
        norm=[1.0],
        counts=[{}],
        weights=[{"w": weight}, {"w": weight}],
    )


@pytest.mark.parametrize("wrong", [0, 1])
def test_a_clip_that_differs_on_one_rank_is_seen(wrong: int) -> None:
    """On replicas, too, which each have the whole tensor."""
    right = [notes(1.0), notes(1.0)]
    assert compare(right, notes(1.0), 1e-12, 1e-11).first is None
    right[wrong] = notes(1 + 1e-9)
    first = compare(right, notes(1.0), 1e-12, 1e-11).first
    assert first is not None and first.where == "clipping, gradient of w"


@pytest.mark.parametrize("parts, seen", [((0.5, 1.5), False), ((2.0, 2.0), True)])
def test_a_term_that_each_rank_reports_whole_is_seen(parts: tuple, seen: bool) -> None:
    ranks = [replace(notes(1.0), terms={"penalty/layer-0": part}) for part in parts]
    plain = replace(notes(1.0), terms={"penalty/layer-0": 2.0})
    first = compare(ranks, plain, 1e-12, 1e-11).first
    assert (first is not None and first.where == "terms, penalty/layer-0") == seen


class Twice(nn.Module):
    """A model that calls a module twice in a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.inner(x))


def test_each_call_of_a_module_in_a_forward_is_noted_by_itself() -> None:
    model = Twice()
    seen = notes(1.0)
    seen.outputs = defaultdict(list)
    note_outputs(model, seen)
    microbatches = [torch.randn(1, 2, 3) for _ in range(2)]
    for x in microbatches:
        model(x)
    assert {name: len(calls) for name, calls in seen.outputs.items()} == {"inner": 2, "inner#2": 2}
    for a, x in enumerate(microbatches):
        once = F.linear(x, model.inner.weight, model.inner.bias).detach().numpy()
        np.testing.assert_array_equal(seen.outputs["inner"][a], once)


def test_meshes_are_named_as_in_the_matrix() -> None:
    mesh = meshes.parse("pp2xhsdp2x4xtp2")
    assert mesh.sizes == {"pp": 2, "ddp": 2, "fsdp": 4, "tp": 2}
    assert (mesh.ranks, mesh.data_parallel) == (32, 8)
    mesh = meshes.parse("ep2xfsdp4")
    assert (mesh.ranks, mesh.data_parallel) == (4, 4)


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["configs/llama_debug.toml", "--meshes", "ep2"], "fits this configuration:\n  ep2: "),
        (["configs/llama_8b.toml"], "the model has 8,030,261,248 parameters"),
        (["configs/nothing.toml"], "configs/nothing.toml"),
        (["configs/llama_debug.toml", "--steps=0"], "--steps must be at least 1"),
        (["configs/llama_debug.toml", "--properties", "--meshes", "tp2"], "tries no mesh"),
        (["configs/llama_debug.toml", "--json=none/x.json"], "there is no folder"),
    ],
)
def test_a_mistake_in_the_call(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert tool.main(arguments) == 2
    assert said in capsys.readouterr().err
