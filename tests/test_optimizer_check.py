"""The optimizer of a fork may keep tensors of any shape that follows from a parameter's
(training/kept.py::Kept). A row of the table that is wrong is a sentence before step 1
(training/optimizer_check.py), and not a checkpoint that no run can load."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import train
from configs.load import load_config
from configs.schema import InputError
from parallelisms import contract
from parallelisms.boxes import shard_of, whole, write
from tests import checkpoints
from tests.ranks import run_ranks
from tests.runs import whole as gathered
from training.kept import LIKE, SCALAR, Kept, Shape
from training.optimizers import OPTIMIZERS, Kind, Rule

SHIPPED = tuple(OPTIMIZERS)
TP2 = "--parallelism.tensor_parallel=2"


def of_matrix(axis: int) -> Callable[[Shape], Shape | None]:
    def shape(of_parameter: Shape) -> Shape | None:
        return (of_parameter[axis],) if len(of_parameter) == 2 else None

    return shape


def of_vector(shape: Shape) -> Shape | None:
    return shape if len(shape) == 1 else None


def factor(shape: Shape) -> Shape | None:
    return (shape[0], shape[0]) if len(shape) == 2 else None


KEPT = {
    "rows": Kept(of_matrix(0), axes=(0,)),
    "columns": Kept(of_matrix(1), axes=(1,)),
    "squares": Kept(of_vector, axes=(0,)),
    "left": Kept(factor, torch.float64, axes=(0, None)),
    "right": Kept(of_matrix(1)),
    "step": SCALAR,
}


class Factored(torch.optim.Optimizer):
    """Adafactor's averages of rows and columns (Shazeer and Stern, arXiv:1804.04235), and one of
    Shampoo's factors (Gupta et al., arXiv:1802.09568)."""

    def __init__(self, groups, looks_at_shards=False, begins_with=0.0, adds_parts=False):
        super().__init__(groups, {})
        self.adds_parts = adds_parts
        self.looks_at_shards = looks_at_shards
        self.begins_with = begins_with

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self.update(weight, group["lr"])

    def update(self, weight, lr):
        state = self.state[weight]
        for key, kept in KEPT.items():
            zeros = kept.zeros(weight, torch.device("cpu"))
            if key not in state and zeros is not None:
                state[key] = zeros + self.begins_with
        state["step"] += 1
        gradient = whole(weight.grad)
        squares = gradient.square()
        if weight.ndim == 1:
            write(state["squares"], squares)
            average = squares
        else:
            write(state["rows"], squares.mean(1).lerp(whole(state["rows"]), 0.9))
            write(state["columns"], squares.mean(0).lerp(whole(state["columns"]), 0.9))
            write(state["left"], (gradient @ gradient.T).double() + whole(state["left"]))
            state["right"].add_(self.sums(weight, squares))
            columns = whole(state["columns"])
            average = whole(state["rows"])[:, None] * columns / columns.mean()
        update = torch.empty_like(weight)
        write(update, gradient / (average.sqrt() + 1e-8))
        weight.sub_(update, alpha=lr)

    def sums(self, weight, squares):
        if self.adds_parts:
            return weight.grad.square().sum(0)
        if self.looks_at_shards:
            shard = shard_of(weight.grad).square().sum(0)
            return shard.mean().expand(squares.shape[1])
        return squares.sum(0)


def job(changes: dict[str, Kept | None], more: list[str], **how: object) -> train.Job:
    """Build a job with this optimizer, whose row has these changes (None: left out)."""
    kept = {key: form for key, form in {**KEPT, **changes}.items() if form is not None}
    rule = Rule("Factored", lambda group: kept)
    OPTIMIZERS["factored"] = Kind(lambda groups, cfg, mesh: Factored(groups, **how), rule, rule)
    size = dist.get_world_size()
    cfg = load_config([*checkpoints.MODEL, "--optimizer.lr=0.01", *more], size, size)
    optimizer = cfg.optimizer.model_copy(update={"kind": "factored"})
    return train.build(cfg.model_copy(update={"optimizer": optimizer}))


def refusal(changes: dict[str, Kept | None], more: list[str], **how: object) -> str:
    built = job(changes, more, **how)
    try:
        contract.verify(built.model, built.optimizer, built.mesh, {})
    except InputError as error:
        return str(error)
    return ""


WRONG = {
    "axes swapped": (
        {"rows": KEPT["columns"]},
        {},
        "keeps columns ([3]), left ([2, 2], float64), right ([3]), rows ([2]), step (a scalar, "
        "float32) of a weight [2, 3], and its row in training/optimizers.py has columns ([3]), "
        "left ([2, 2], float64), right ([3]), rows ([3]), step",
    ),
    "right for a matrix alone": (
        {"squares": None},
        {},
        "keeps squares (like the parameter), step (a scalar, float32) of a weight [5], and its row "
        "in training/optimizers.py has step (a scalar, float32)",
    ),
    "as the parameter": ({"left": LIKE}, {}, "left (like the parameter)"),
    "another type": ({"left": replace(KEPT["left"], dtype=None)}, {}, "left ([2, 2]), "),
    "no zeros": ({}, {"begins_with": 1.0}, "does not begin with a state of zeros"),
    "parts added to a whole": ({}, {"adds_parts": True}, "cannot step on a weight"),
    "sums of shards": ({}, {"looks_at_shards": True}, "keeps another right on each rank of"),
}


class Scaled(torch.optim.Optimizer):
    """SGD whose update has the norm of the weight's gradient 1, as LARS and LAMB scale theirs. Its state
    is like the parameter."""

    def __init__(self, groups, mistake=""):
        super().__init__(groups, {})
        self.mistake = mistake
        self.steps = 0

    @torch.no_grad()
    def step(self):
        if self.mistake == "attribute":
            self.steps += 1
        for group in self.param_groups:
            if self.mistake == "group":
                group["k"] = group.get("k", 0) + 1
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                if "momentum" not in self.state[weight]:
                    self.state[weight]["momentum"] = torch.zeros_like(weight)
                m = self.state[weight]["momentum"].lerp_(weight.grad, 0.1)
                seen = shard_of(m) if self.mistake == "shard" else whole(m)
                weight.sub_(m, alpha=group["lr"] / float(seen.norm() + 1e-8))


SCALED = {
    "": "",
    "shard": "the optimizer Scaled updates a weight",
    "attribute": "a step of the optimizer Scaled changes its steps, which no checkpoint has",
    "group": 'a step of the optimizer Scaled changes its group["k"], which no checkpoint has',
}


def refusal_of_scaled(mistake: str) -> str:
    rule = Rule("Scaled", lambda group: {"momentum": LIKE})
    kind = Kind(lambda groups, cfg, mesh: Scaled(groups, mistake), rule, rule)
    return refusal_of_kind("scaled", kind)


def refusal_of_kind(name: str, kind: Kind) -> str:
    OPTIMIZERS[name] = kind
    cfg = load_config([*checkpoints.MODEL, "--optimizer.lr=0.01"], 2, 2)
    optimizer = cfg.optimizer.model_copy(update={"kind": name})
    built = train.build(cfg.model_copy(update={"optimizer": optimizer}))
    try:
        contract.verify(built.model, built.optimizer, built.mesh, {})
    except InputError as error:
        return str(error)
    return ""


def all_refusals() -> dict[str, str]:
    said = {name: refusal(changes, [], **how) for name, (changes, how, _) in WRONG.items()}
    shipped = {f"shipped {name}": refusal_of_kind(name, OPTIMIZERS[name]) for name in SHIPPED}
    scaled = {f"scaled {mistake}": refusal_of_scaled(mistake) for mistake in SCALED}
    return said | shipped | scaled | {"right": refusal({}, [])}


def test_a_wrong_row_is_a_sentence_before_step_1():
    [said, _] = run_ranks(2, all_refusals)
    assert said.pop("right") == ""
    assert {said.pop(f"shipped {name}") for name in SHIPPED} == {""}
    for mistake, expected in SCALED.items():
        sentence = said[f"scaled {mistake}"]
        assert expected in sentence and bool(sentence) == bool(expected), mistake
    for name, (_, _, expected) in WRONG.items():
        assert expected in said[name], name


def save(folder: Path, more: list[str]) -> dict[str, torch.Tensor]:
    first = job({}, more)
    checkpoints.save_after_steps(first, folder, 2)
    return whole_state(first)


def load(folder: Path, more: list[str]) -> dict[str, torch.Tensor]:
    second = job({}, more)
    reader = checkpoints.open_manager(second, folder)
    reader.load(second.model, second.optimizer)
    reader.close()
    return whole_state(second)


def whole_state(built: train.Job) -> dict[str, torch.Tensor]:
    names = {param: name for name, param in built.model.named_parameters()}
    found = {}
    for param, state in built.optimizer.state.items():
        for key, value in state.items():
            found[f"{names[param]}.{key}"] = gathered(value)
    return found


@pytest.mark.slow
def test_state_of_any_shape_is_loaded_on_another_mesh(tmp_path):
    saved = run_ranks(2, save, tmp_path / "c", [TP2])[0]
    loaded = run_ranks(2, load, tmp_path / "c", [])[0]
    assert saved.keys() == loaded.keys()
    assert saved["layers.0.attention.wq.weight.rows"].ndim == 1
    for name, value in saved.items():
        assert torch.equal(value, loaded[name]), name
    trained = run_ranks(2, save, tmp_path / "d", [])[0]
    for name, value in saved.items():
        torch.testing.assert_close(value, trained[name], rtol=2e-3, atol=1e-7, msg=name)


@pytest.mark.slow
def test_state_of_any_shape_is_sharded_twice(tmp_path):
    saved = run_ranks(4, save, tmp_path / "c", [TP2])[0]
    loaded = run_ranks(1, load, tmp_path / "c", [])[0]
    for name, value in saved.items():
        assert torch.equal(value, loaded[name]), name
