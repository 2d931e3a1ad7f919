"""Checkpoints: what is saved is what comes back, on any mesh; what is damaged, foreign, hostile or
half written does not.

Each test is the short form of a row of the torture suite (`test_torture_checkpoint.py`, which has
the numbers to pass). A state is filled with the number of its step, so that a mixture of two saves
is seen in one `unique`. Ranks are real.
"""

import itertools
import json
import math
import os
import pickle
import random
import re
import shutil
import stat
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import safetensors
import torch
import torch._dynamo
import torch._refs

from checkpoint import layout, lease, manager, state, storage, verify
from checkpoint.manager import CheckpointManager
from checkpoint.retention import Retention, expired
from checkpoint.verify import Damaged
from configs.boxes import Box
from configs.schema import Checkpoint, InputError, Parallelism, Run
from parallelisms import mesh as meshes
from tests.checkpoints import (
    Attack,
    build,
    compare_no_hashes,
    copy_of,
    fill,
    flip,
    full_disk,
    heard,
    load_pattern,
    mesh_options,
    open_manager,
    opened,
    resume,
    rewrite,
    rewrite_header,
    save_all,
    save_filled,
    save_pattern,
    saved,  # noqa: F401  a fixture
    set_hash,
    tensors,
    values_on_disk,
)
from tests.programs import PYTHON, finished
from tests.ranks import run_ranks

# What is saved comes back


def test_state_is_bitwise_the_same_on_another_mesh(tmp_path):
    """A tied weight, and sizes that no mesh divides. tests/test_any_mesh.py has twelve meshes, and -m
    exhaustive all pairs of them."""
    tied = "--model.tied_embeddings=true"
    ranks, options = mesh_options("1x1", tied)
    run_ranks(ranks, save_pattern, tmp_path / "c", options)
    ranks, options = mesh_options("2x2", tied)
    assert run_ranks(ranks, load_pattern, [tmp_path / "c"], options) == [[[]]] * ranks


def saved_and_loaded(staged: Path, one: Path, options: list[str]) -> list[list[str]]:
    """On two stages: save, and load what one process has saved."""
    options = [*options, "--parallelism.pipeline_parallel=2"]
    save_pattern(staged, options)
    return load_pattern([one], [*options, "--parallelism.pipeline_schedule=zbv"])


@pytest.mark.slow
def test_state_is_bitwise_the_same_on_another_number_of_stages(tmp_path):
    """Weights, moments and the tied weight, of which the stages of a pipeline hold one each."""
    staged, one = tmp_path / "staged", tmp_path / "one"
    options = ["--model.n_layers=4", "--model.tied_embeddings=true"]
    run_ranks(1, save_pattern, one, options)
    assert run_ranks(2, saved_and_loaded, staged, one, options) == [[[]]] * 2
    assert run_ranks(1, load_pattern, [staged], options) == [[[]]]
    of_both = [verify.read_manifest(at / "step-00000007")["tensors"] for at in (staged, one)]
    # each rank has a generator
    names = [{name for name in tensors if not name.startswith("rng.")} for tensors in of_both]
    assert names[0] == names[1]


def _save_and_share(folder: Path) -> None:
    storage.SMALL = 0  # the parts of a test's model are all small
    save_pattern(folder, ["--parallelism.data_parallel_replicate=2"])


@pytest.mark.slow
def test_hybrid_sharding_writes_every_part_once(tmp_path):
    run_ranks(4, _save_and_share, tmp_path / "c")
    sizes = [size for size, _ in verify.verify(tmp_path / "c" / "step-00000007")["files"]]
    assert len(sizes) == 4 and max(sizes) < 1.3 * min(sizes)  # replicas share the work
    assert run_ranks(2, load_pattern, [tmp_path / "c"], []) == [[[]]] * 2


def test_the_rule_of_parts_cuts_every_tensor_into_boxes_that_fill_it():
    """1,000 random rows: what `box_of_rank` gives to the ranks, and what `parts_in` finds, against
    counting."""
    for seed in range(1000):
        rng = random.Random(seed)
        shape, split, stride = [rng.randrange(12) for _ in range(rng.randrange(4))], [], 1
        for _ in range(rng.randrange(4) if shape else 0):
            stride *= rng.choice([1, 2])
            split.append([rng.randrange(len(shape)), rng.randrange(1, 5), stride])
            stride *= split[-1][1]
        rng.shuffle(split)
        row = {"shape": shape, "split": split, "first": rng.randrange(3)}
        world = row["first"] + stride
        layout.check("t", row, world)
        boxes = {rank: box for rank in range(world) if (box := layout.box_of_rank(row, rank))}
        places = [place for box in boxes.values() for place in _places(box)]
        assert len(places) == len(set(places)) == math.prod(shape), row
        offset = [rng.randrange(max(1, n)) for n in shape]
        room = [n - o for n, o in zip(shape, offset, strict=True)]
        wanted = (offset, [rng.randrange(left + 1) for left in room])
        expected = {}
        if all(wanted[1]):
            asked = set(_places(wanted))
            expected = {r: box for r, box in boxes.items() if not asked.isdisjoint(_places(box))}
        assert dict(layout.parts_in(row, wanted)) == expected, (row, wanted)


def _places(box: Box) -> list[tuple[int, ...]]:
    return list(
        itertools.product(*(range(start, start + n) for start, n in zip(*box, strict=True)))
    )


def _hyperparameters(folder: Path) -> dict:
    job = build("--optimizer.weight_decay=0.7", "--optimizer.lr=0.5")
    checkpoints = open_manager(job, folder)
    checkpoints.load(job.model, job.optimizer)
    checkpoints.close()
    return {k: job.optimizer.param_groups[0][k] for k in ("lr", "weight_decay")}


def test_hyperparameters_are_the_configs(saved, tmp_path):
    """tests/test_branches.py has the line that names the options that have changed."""
    found = run_ranks(1, _hyperparameters, copy_of(saved, tmp_path))
    assert found == [{"lr": 0.5, "weight_decay": 0.7}]


def _save_and_change(folder: Path, bug: str | None) -> None:
    stage = state.stage

    def stage_slowly(*args: object) -> object:
        time.sleep(0.02)  # training is back before the copy has begun
        return stage(*args)

    def spans_late(staged: storage.Staged, plan: object) -> object:
        time.sleep(0.1)  # training has taken its step before anything is written
        return storage.OneByOne(staged.tensors).spans(plan)

    state.stage = stage_slowly
    if bug == "aliased":  # what is written is the live tensors themselves
        state.stage = lambda live, into, computed: into.update(
            {name: state.local(live[name]) for name in into}
        )
        storage.Staged.spans = spans_late
    job, checkpoints = opened(folder, keep_last=0)
    for step in range(1, 21):
        save_filled(job, checkpoints, step)
        for param in job.model.parameters():
            param.grad = torch.ones_like(param)
        job.optimizer.step()  # changes weights, moments and AdamW's step
        checkpoints.poll()
        checkpoints.wait(10)
    checkpoints.close()


@pytest.mark.slow
@pytest.mark.parametrize("bug", [None, "aliased"])
def test_a_save_holds_the_state_of_its_call(bug, tmp_path):
    """With a control that shows that the test sees a torn save."""
    run_ranks(2, _save_and_change, tmp_path, bug)
    torn = [s for s in range(1, 21) if values_on_disk(tmp_path / verify.step_name(s, 0)) != [s]]
    assert len(torn) > 10 if bug else not torn


def _calls_of_a_save(folder: Path, tensors: int, one_by_one: bool) -> int:
    """Count the Python functions that the thread calls for the second save, once the state is
    copied."""
    calls, checkpoints = [], None

    def count(frame: object, event: str, arg: object) -> None:
        named = threading.current_thread().name.startswith("checkpoint_")
        if (
            event == "call"
            and named
            and checkpoints.saves == 2
            and (one_by_one or checkpoints.copied.is_set())
        ):
            calls.append(frame)

    threading.setprofile(count)
    mesh = meshes.open_mesh(Run(device="cpu"), Parallelism(), 1)
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(3)) for _ in range(tensors)])
    optimizer = torch.optim.SGD(model.parameters())
    checkpoints = CheckpointManager(
        Checkpoint(keep_last=0, async_save=not one_by_one), folder, mesh, {"must_match": {}}
    )
    checkpoints.load(model, optimizer)
    for step in 1, 2:
        checkpoints.save(step, model, optimizer, {})
        checkpoints.close() if step == 2 else checkpoints.wait(10)
    return len(calls)


@pytest.mark.parametrize("one_by_one", [False, True], ids=["", "control"])
def test_python_runs_for_no_single_tensor_while_a_copy_is_written(one_by_one, tmp_path):
    """Each Python call would make training wait for the GIL (lab/bench/results/save_overhead.txt).
    The control writes tensor by tensor."""
    few, many = (
        run_ranks(1, _calls_of_a_save, tmp_path / f"{n}", n, one_by_one)[0] for n in (10, 210)
    )
    assert few > 20
    assert many > few + 200 if one_by_one else many < few + 20, (few, many)


def test_a_shard_is_a_safetensors_file_and_verify_needs_no_torch(saved, tmp_path, capsys):
    with safetensors.safe_open(saved / "step-00000030" / "rank-00001.safetensors", "pt") as file:
        part = file.get_tensor("model.tok_embeddings.weight[132:263,0:50]")
    assert part.shape == (131, 50) and (part == 30).all()
    code = (
        "import sys, checkpoint.verify as v; r = v.main(sys.argv[1:]); sys.exit(9 if 'torch' "
        "in sys.modules else r)"
    )
    done = finished(PYTHON, "-c", code, saved, "--all")
    assert done.returncode == 0 and done.stdout.count(" ok") == 3
    assert done.stderr == "", "a bar is for a terminal"
    run = copy_of(saved, tmp_path).parent
    flip(run / "checkpoints" / "step-00000020" / "rank-00000.safetensors", 30000)
    assert verify.main([str(run)]) == 0  # the newest, which is whole
    assert verify.main([str(run), "--all"]) == 1
    said = capsys.readouterr().out
    size = sum(path.stat().st_size for path in (saved / "step-00000030").iterdir()) / 2**20
    assert said.count(f" {size:.1f} MiB ") == 1 + 3, "of damaged ones too"
    assert "DAMAGED rank-00000.safetensors" in said and "expected" in said
    assert verify.main([str(run / "nothing")]) == 2
    assert "no checkpoint" in capsys.readouterr().err


def test_the_manifest_knows_how_many_bytes_a_number_has():
    """checkpoint/verify.py cannot ask PyTorch, which it does not import."""
    assert {code: dtype.itemsize for dtype, code in state.CODES.items()} == verify.SIZES


def _tool(folder: Path, *options: str) -> tuple[int, list[float]]:
    """Read as a tool does: one process, with a process group or without."""
    model = build(*options).model
    torch.distributed.destroy_process_group()
    manifest = state.load_model(folder, model)
    return manifest["step"], sorted({v for p in model.parameters() for v in p.unique().tolist()})


@pytest.mark.parametrize("other, hinted", [("optimizer.w.exp_avg", True), ("model.v", False)])
def test_an_optimizer_that_keeps_something_else_is_told_what_decides_that(other, hinted):
    weight = torch.zeros(2)
    row = {"shape": [2], "dtype": state.CODES[weight.dtype]}
    with pytest.raises(InputError) as refused:
        wanted = {"model.w": weight, other: weight}
        state.check_fits(Path("step"), {"tensors": {"model.w": row}}, wanted, "model+optimizer")
    assert f"{other} is missing" in str(refused.value)
    assert ("training.freeze" in str(refused.value)) == hinted


def test_a_tool_loads_the_weights_alone(saved):
    for place in (saved, saved.parent, saved / "step-00000030"):
        assert run_ranks(1, _tool, place)[0] == (30, [30.0])
    with pytest.raises(
        AssertionError,
        match="does not fit this model and optimizer: model.layers.0.feed_forward.w1",
    ):
        run_ranks(1, _tool, saved, "--model.hidden_dim=40")


# Which one is used


def test_the_newest_is_resumed_and_a_step_on_request(saved, tmp_path):
    folder = copy_of(saved, tmp_path)
    assert run_ranks(2, resume, folder) == [(30, [30.0], [])] * 2
    step, found, words = run_ranks(1, partial(resume, folder, load_step=20))[0]
    assert (step, found) == (20, [20.0]) and "goes back from step-00000030" in words[0]
    for step, found, words in run_ranks(2, partial(resume, folder, load_step=25)):
        assert (step, found) == (-1, [-1.0])
        assert "load_step = 25" in words[0] and "[10, 20, 30]" in words[0]


def test_a_fresh_folder_is_a_fresh_start_but_not_on_request(tmp_path):
    assert run_ranks(1, resume, tmp_path / "a")[0] == (None, [-1.0], [])
    assert "load_step = 5" in run_ranks(1, partial(resume, tmp_path / "b", load_step=5))[0][2][0]


def test_going_back_starts_an_attempt_that_is_newer_than_the_future_it_replaces(saved, tmp_path):
    folder = copy_of(saved, tmp_path)
    run_ranks(2, partial(save_all, folder, [20], load_step=10))
    old = ["step-00000030", "step-00000020", "step-00000010"]
    assert verify.published(folder) == ["step-00000020.1", *old]
    assert run_ranks(1, resume, folder)[0][:2] == (20, [20.0])
    assert verify.read_manifest(folder / "step-00000020.1")["parent"] == "step-00000010"
    # Damaged: back to its own past, not to the newer steps of the attempt that was given up.
    flip(folder / "step-00000020.1" / "rank-00000.safetensors")
    assert run_ranks(1, resume, folder)[0][0] == 10
    # it cannot say what its past was: back by steps
    (folder / "step-00000020.1" / "manifest.json").unlink()
    assert run_ranks(1, resume, folder)[0][0] == 10
    run_ranks(1, save_all, folder, [20])
    assert verify.published(folder)[0] == "step-00000020.2"


def _saves_again(folder: Path) -> None:
    job, checkpoints = opened(folder)
    checkpoints.load(job.model, job.optimizer)
    before = {path: path.stat().st_mtime_ns for path in folder.glob("step-*/*")}
    checkpoints.save(30, job.model, job.optimizer, {"step": 30})
    checkpoints.close()
    assert before == {path: path.stat().st_mtime_ns for path in folder.glob("step-*/*")}


def test_a_step_that_is_saved_is_not_written_again(saved, tmp_path):
    run_ranks(1, _saves_again, copy_of(saved, tmp_path))


REFUSED = [  # facts, options, what is said
    ({"data": "xyz"}, [], 'data is "abc" in the checkpoint and "xyz" here'),
    ({"run.seed": 3}, [], "run.seed is 0 in the checkpoint and 3 here"),
    ({"model": {"n_heads": 4, "new": 1}}, [], "model.n_heads is 8 in the checkpoint and 4 here"),
    (
        {},
        ["--model.hidden_dim=40"],
        "model.layers.0.feed_forward.w1.weight has shape [44, 50] there and [40, 50] here",
    ),
    ({}, ["--model.n_layers=1"], "layers.1.attention.wk.weight is in it and not in this run"),
    ({}, ["--model.n_layers=3"], "layers.2.attention_norm.weight is missing from it"),
    ({}, ["--optimizer.kind=sgd"], 'optimizer is "AdamW" in the checkpoint and "SGD" here'),
    ({}, ["bfloat16"], "model.tok_embeddings.weight has type F32 there and BF16 here"),
]


def _refused(folder: Path) -> list[str]:
    said = []
    for facts, options, _ in REFUSED:
        job = build(*(o for o in options if o != "bfloat16"))
        if "bfloat16" in options:
            job.model.to(torch.bfloat16)
        before = {name: t.clone() for name, t in tensors(job).items()}
        checkpoints = open_manager(job, folder, {"must_match": facts})
        with pytest.raises(InputError) as refusal:
            checkpoints.load(job.model, job.optimizer)
        checkpoints.close()
        assert all(torch.equal(t, before[name]) for name, t in tensors(job).items())
        said.append(str(refusal.value))
    return said


def test_a_checkpoint_of_another_run_is_refused_by_name(saved, tmp_path):
    said = run_ranks(2, _refused, copy_of(saved, tmp_path))
    assert said[0] == said[1]
    for sentence, (_, _, words) in zip(said[0], REFUSED, strict=True):
        assert words in sentence and "step-00000030" in sentence


def _start_from(folder: Path, **options: object) -> tuple[dict | None, dict[str, float], str]:
    job = build()
    fill(job, -1)
    checkpoints = open_manager(job, folder, {"must_match": {"data": "other data"}}, **options)
    progress = checkpoints.load(job.model, job.optimizer)
    names = ("model.norm.weight", "model.output.weight", "optimizer.norm.weight.exp_avg")
    found = {name: tensors(job)[name].unique().item() for name in names}
    fill(job, 50)
    checkpoints.save(1, job.model, job.optimizer, {"step": 1})
    checkpoints.close()
    return progress, found, verify.read_manifest(folder / "step-00000001")["parent"]


def test_a_new_run_starts_from_the_weights_of_another(saved, tmp_path):
    def start(folder: str, **options: object) -> tuple:
        return run_ranks(2, partial(_start_from, tmp_path / folder, **options))[0]

    progress, found, parent = start("a", load_path=str(saved))
    assert progress is None and list(found.values()) == [30, 30, -1]
    assert parent == str(saved / "step-00000030")
    _, found, _ = start("b", load_path=str(saved / "step-00000010"))
    assert list(found.values()) == [10, 10, -1]
    _, found, _ = start("c", load_path=str(saved), exclude_from_loading=("model.output.*",))
    assert list(found.values()) == [30, -1, -1]
    # Once the run has its own checkpoint it continues from that one.
    facts = {"must_match": {"data": "other data"}}
    resumed = run_ranks(1, partial(resume, tmp_path / "a", facts, load_path=str(saved)))[0]
    assert resumed[:2] == (1, [50.0])
    for path in ("nowhere", "x" * 300):
        said = run_ranks(1, partial(resume, tmp_path / "d", load_path=path))[0][2][-1]
        assert ("cannot be read" if len(path) > 255 else "there is no checkpoint in") in said
    with pytest.raises(InputError):
        verify.find(Path("a\0b"))
    unknown = {"load_path": str(saved), "exclude_from_loading": ("outptu.*",)}
    assert "'outptu.*'" in run_ranks(1, partial(resume, tmp_path / "d", **unknown))[0][2][-1]


# Damage


DAMAGES = {  # name: (what is done to the newest checkpoint, what the message names)
    "bit of a tensor": (lambda c: flip(c / "rank-00001.safetensors"), "rank-00001.safetensors"),
    "bit of the manifest": (lambda c: flip(c / "manifest.json", 200), "manifest.json"),
    "shard cut": (
        lambda c: os.truncate(c / "rank-00000.safetensors", 20000),
        "rank-00000.safetensors: ",
    ),
    "shard missing": (
        lambda c: (c / "rank-00001.safetensors").unlink(),
        "rank-00001.safetensors: No such file",
    ),
    "manifest missing": (lambda c: (c / "manifest.json").unlink(), "manifest.json: No such file"),
    "shard of another step": (
        lambda c: _other(c, "rank-00001.safetensors"),
        "rank-00001.safetensors",
    ),
    "manifest of another step": (lambda c: _other(c, "manifest.json"), "step 20"),
    "shard is a link": (lambda c: _link(c / "rank-00001.safetensors"), "rank-00001.safetensors"),
    "shard is a pipe": (lambda c: _pipe(c / "rank-00001.safetensors"), "rank-00001.safetensors"),
    "manifest of nothing": (lambda c: (c / "manifest.json").write_text("{}"), "not a manifest"),
}


def _other(folder: Path, name: str) -> None:
    shutil.copy(folder.parent / "step-00000020" / name, folder / name)


def _link(path: Path) -> None:
    shutil.move(path, path.parent.parent / "elsewhere")
    path.symlink_to(path.parent.parent / "elsewhere")


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _resume_damaged(saved: Path, place: Path, kinds: list[str]) -> dict[str, tuple]:
    """Damage the newest in each way: return the checkpoint resumed when an older one is whole, and
    the outcome when none is."""
    results = {}
    for kind in kinds:
        folder = copy_of(saved, place / kind)
        DAMAGES[kind][0](folder / "step-00000030")
        first = resume(folder)
        for other in ("step-00000010", "step-00000020"):
            flip(folder / other / "rank-00000.safetensors")
        results[kind] = first, resume(folder)
        shutil.rmtree(place / kind)
    return results


def test_a_damaged_checkpoint_is_named_and_the_one_before_used(saved, tmp_path):
    """Load all of the older state, nothing of the damaged one; and where none is whole nothing
    changes at all."""
    (results,) = run_ranks(1, _resume_damaged, saved, tmp_path, list(DAMAGES))
    for kind, (first, second) in results.items():
        step, found, words = first
        assert (step, found) == (20, [20.0]), kind
        named = [line for line in words if "step-00000030 is damaged" in line]
        assert any(DAMAGES[kind][1] in line for line in named), (kind, words)
        step, found, words = second
        assert (step, found) == (-1, [-1.0]) and "none of the checkpoints" in words[-1], kind


def test_ranks_agree_on_a_damage_that_only_one_of_them_reads(saved, tmp_path):
    folder = copy_of(saved, tmp_path)
    flip(folder / "step-00000030" / "rank-00001.safetensors")
    for step, found, _ in run_ranks(2, resume, folder):
        assert (step, found) == (20, [20.0])
    for step, found, words in run_ranks(2, partial(resume, folder, load_step=30)):
        assert (step, found) == (-1, [-1.0])
        assert "load_step = 30, but step-00000030 is damaged" in words[-1]


def unverified(folder: Path) -> tuple:
    compare_no_hashes()
    return resume(folder)


def test_without_hashes_a_flipped_bit_is_silent(saved, tmp_path):
    """The control: it is the comparison of hashes that finds it."""
    folder = copy_of(saved, tmp_path)
    flip(folder / "step-00000030" / "rank-00000.safetensors")
    step, found, _ = run_ranks(1, unverified, folder)[0]
    assert step == 30 and len(found) == 2


def test_what_is_not_a_checkpoint_is_ignored(saved, tmp_path):
    folder = copy_of(saved, tmp_path)
    for name in ("step-00000900.bak", "step-x", "step-900", "step-0000000900"):
        (folder / name).mkdir()
    (folder / "LATEST").symlink_to("gone")
    (folder / "step-00000910").symlink_to("step-00000910")
    (folder / "step-00000920").write_bytes(b"a file")
    (folder / ".metadata").write_bytes(b"x")
    ours = ("step-00000010", "step-00000020", "step-00000030", ".lease")
    foreign = [p.name for p in folder.iterdir() if p.name not in ours]
    step, found, words = run_ranks(1, resume, folder)[0]
    assert (step, found) == (30, [30.0])
    assert len(foreign) == len(words) == 8 and all(
        any(f"/{name} is" in line for line in words) for name in foreign
    )
    (folder / "step-00000920").unlink()
    (folder / "step-00000930").mkdir()  # our name, and nothing in it: damaged
    assert run_ranks(1, resume, folder)[0][:2] == (30, [30.0])


@pytest.mark.parametrize(
    ("number", "what_to_do"), [(99, "update it"), (1, verify.LAST_READER_OF_1)]
)
def test_another_format_is_refused_by_name(number, what_to_do, saved, tmp_path, capsys):
    folder = copy_of(saved, tmp_path)
    rewrite(folder / "step-00000030", format=number)
    step, _, words = run_ranks(1, resume, folder)[0]
    assert step == -1 and f"format {number}," in words[-1] and what_to_do in words[-1]
    assert verify.main([str(folder)]) == 1
    said = capsys.readouterr().out
    assert "NOT READ" in said and what_to_do in said, "it is not damaged"


# Hostile folders


def _hostile(saved: Path, tmp_path: Path, payload: bytes) -> list[str]:
    said = []
    for target in (".metadata", "extra.pt", "rank-00000.safetensors", "manifest.json"):
        folder = copy_of(saved, tmp_path / f"with{target}")
        (folder / "step-00000030" / target).write_bytes(payload)
        (folder / target).write_bytes(payload)
        said.append(str(resume(folder)[:2]))
    # A pickle whose hashes are right is read as what it is: numbers.
    folder = copy_of(saved, tmp_path / "signed") / "step-00000030"
    manifest = verify.read_manifest(folder)
    row = manifest["tensors"]["model.norm.weight"]
    box = layout.box_of_rank(row, 0)
    with verify.Shard(folder, manifest, 0) as shard:
        part = shard.find("model.norm.weight", box)
    data = bytearray((folder / "rank-00000.safetensors").read_bytes())
    data[part["start"] : part["start"] + 100] = payload[:100]
    (folder / "rank-00000.safetensors").write_bytes(data)
    block = data[part["start"] : part["start"] + verify.nbytes("F32", box[1])]

    def sign(header: dict) -> None:
        set_hash(header, verify.part_name("model.norm.weight", box), verify.digest(bytes(block)))

    rewrite_header(folder, sign)
    said.append(str(resume(folder.parent)[0]))
    return said


def test_no_file_of_a_checkpoint_can_run_code_or_leave_the_folder(saved, tmp_path):
    marker, payload = tmp_path / "marker", pickle.dumps(Attack(tmp_path / "marker"))
    pickle.loads(payload)  # the control: it works where something unpickles
    marker.rmdir()
    said = run_ranks(1, _hostile, saved, tmp_path, payload)[0]
    assert said == ["(30, [30.0])", "(30, [30.0])", "(20, [20.0])", "(20, [20.0])", "30"]
    assert not marker.exists()
    source = "".join(path.read_text() for path in Path(verify.__file__).parent.glob("*.py"))
    assert "import pickle" not in source and "torch.load" not in source


CHANGES = [  # of a tensor in a manifest
    {"shape": [-263, 50]},
    {"shape": "263"},
    {"dtype": "F99"},
    {"first": -1},
    {"first": 2},
    {"first": "0"},
    {"split": 3},
    {"split": [[2, 2, 1]]},
    {"split": [[0, 3, 1]]},
    {"split": [[0, 0, 1]]},
    {"split": [[0, 2, 0]]},
    {"split": [[0, 2]]},
    {"shape": [264, 50]},
    {"shape": [263]},
    {"split": [[1, 2, 1]]},
    {"split": []},
    {"first": 1, "split": []},
]


def test_a_manifest_that_contradicts_itself_or_its_files_is_damaged(saved, tmp_path):
    new = Path(shutil.copytree(saved / "step-00000030", tmp_path / "new"))
    contents = {path: path.read_bytes() for path in new.iterdir()}
    cases = [{"files": change} for change in ([], 3, [[-1, "0" * 16]])]
    for change in CHANGES:
        tables = json.loads(contents[new / "manifest.json"])["manifest"]["tensors"]
        tables["model.tok_embeddings.weight"].update(change)
        cases.append({"tensors": tables})
    for change in cases:
        rewrite(new, **change)
        with pytest.raises(Damaged):
            verify.verify(new)
        (new / "manifest.json").write_bytes(contents[new / "manifest.json"])
    for file in [1, "x"], ["1", "0" * 16]:
        rewrite(new, files=[file])
        with pytest.raises(Damaged, match=re.escape(f"file 0: {file}")):
            verify.read_manifest(new)
        (new / "manifest.json").write_bytes(contents[new / "manifest.json"])
    for change in (
        lambda header: header.popitem(),
        lambda header: header["__metadata__"].update(hashes=""),
        lambda header: header.update(
            {"model.more[0:1]": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}
        ),
        lambda header: header.update(
            {next(reversed(header)): {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}
        ),
    ):
        rewrite_header(new, change)
        with pytest.raises(Damaged, match="rank-00000"):
            verify.verify(new)
        for path in new.iterdir():
            path.write_bytes(contents[path])
    assert verify.verify(new)  # nothing but the changes was wrong


def test_removal_follows_no_link_and_a_linked_run_folder_works(tmp_path):
    real, other = tmp_path / "real", tmp_path / "other"
    real.mkdir()
    run_ranks(1, save_all, other, [1])
    (tmp_path / "run").symlink_to(real)
    folder = tmp_path / "run" / "checkpoints"
    folder.mkdir()
    (folder / "step-00000001").symlink_to(other / "step-00000001")
    (folder / ".tmp-01234567-1-step-00000001").symlink_to(other)
    run_ranks(1, partial(save_all, folder, [2, 3, 4], keep_last=1))
    assert verify.published(folder) == ["step-00000004"]
    assert verify.verify(other / "step-00000001")["step"] == 1
    modes = [path.stat().st_mode for path in real.rglob("*") if not path.is_symlink()]
    assert not any(mode & (stat.S_IWOTH | stat.S_IWGRP) for mode in modes)


# Failing disks


def _gives_up(folder: Path, failures: int) -> tuple[int, str]:
    manager.MOST_FAILURES = failures
    job, checkpoints = opened(folder)
    step = 0
    with full_disk("shard", 1), pytest.raises(InputError) as refusal:
        while step < 60:
            step += 1
            if step % 5 == 0:
                checkpoints.save(step, job.model, job.optimizer, {"step": step})
            checkpoints.poll()
            time.sleep(0.001 * job.mesh.rank)  # the ranks' threads end at different steps
        checkpoints.close()
    return step, str(refusal.value)


def test_the_run_stops_after_failures_in_a_row_on_all_ranks_at_the_same_step(tmp_path):
    (step, words), other = run_ranks(2, _gives_up, tmp_path / "a", 3)
    assert (step, words) == other and 15 <= step <= 20
    assert "3 in a row" in words and "No space left" in words
    # never while training, but it is reported at the end
    (step, words), other = run_ranks(2, _gives_up, tmp_path / "b", 99)
    assert (step, words) == other and step == 60 and "the run has ended" in words


def _one_copy_fails(folder: Path) -> tuple[list[int], list[str]]:
    job = build()
    checkpoints, stage, failures = open_manager(job, folder), state.stage, []

    def fail(*args: object) -> None:
        raise RuntimeError("no copy on this rank")

    with heard() as words:
        for step in (1, 2):
            state.stage = fail if (step, job.mesh.rank) == (1, 1) else stage
            checkpoints.save(step, job.model, job.optimizer, {"step": step})
            job.optimizer.step()  # does not wait for a copy that will not come
            checkpoints.wait(10)
            checkpoints.poll()
            failures.append(checkpoints.failures)
    checkpoints.close()
    return failures, words


@pytest.mark.cap(60)
def test_a_copy_that_fails_on_one_rank_fails_that_save_on_all(tmp_path):
    (failures, words), other = run_ranks(2, _one_copy_fails, tmp_path)
    assert failures == other[0] == [1, 0]
    assert "rank 1: RuntimeError: no copy on this rank" in words[0]
    assert [path.name for path in tmp_path.glob("*step*")] == ["step-00000002"]


def test_buffers_are_of_the_kind_that_fits_into_host_memory():
    gib = 1 << 30
    assert state.pinned_size(0) == 0 and state.pinned_size(5) == 8 and state.pinned_size(gib) == gib
    assert state.staging(13 * gib, 8 * 20 * gib, 8, pin=True) == "pinned"  # 16 GiB each, of 160
    assert state.staging(13 * gib, 8 * 20 * gib - 1, 8, pin=True) == "pageable"
    assert state.staging(13 * gib, 8 * 16 * gib, 8, pin=True) == "none"
    assert state.staging(13 * gib, None, 8, pin=False) == "pageable"
    assert 0 < state.free_host_memory() < 1 << 50


def _without_memory(folder: Path, rank_without: int) -> tuple[bool, list[str]]:
    state.free_host_memory = lambda: 0 if torch.distributed.get_rank() == rank_without else 1 << 40
    job, checkpoints = opened(folder)
    with heard() as words:
        checkpoints.load(job.model, job.optimizer)
    save_filled(job, checkpoints, 4)
    waited = checkpoints.in_flight is None
    fill(job, 5)
    checkpoints.close()
    return waited, words


def test_where_host_memory_is_short_every_rank_waits_for_the_save(tmp_path):
    (waited, words), other = run_ranks(2, _without_memory, tmp_path, 1)
    assert waited and other[0] and "host memory is short: training waits" in words[0]
    assert values_on_disk(tmp_path / "step-00000004") == [4]


def _leaves_in_a_hurry(folder: Path, patient: bool) -> None:
    job, checkpoints = opened(folder)
    # before the save that is now in flight gets anywhere
    checkpoints.thread.submit(time.sleep, 0.3)
    save_filled(job, checkpoints, 1)
    if patient:
        checkpoints.wait(20)
    meshes.close_mesh()
    checkpoints.thread.shutdown()


def test_a_save_that_lost_its_process_group_publishes_nothing(tmp_path):
    """A rank must not take itself for the only one, and publish its part as the whole."""
    run_ranks(2, _leaves_in_a_hurry, tmp_path / "a", False)
    # a temporary folder may stay, for the next start to remove
    assert verify.published(tmp_path / "a") == []
    run_ranks(2, _leaves_in_a_hurry, tmp_path / "b", True)
    assert values_on_disk(tmp_path / "b" / "step-00000001") == [1]


def _refused_at_start(folder: Path, free: int | None = None) -> tuple[float, str]:
    if free is not None:
        usage = shutil.disk_usage("/")
        shutil.disk_usage = lambda path: usage._replace(free=free)
    job = build()
    began = time.monotonic()
    with pytest.raises(InputError) as refusal:
        open_manager(job, folder).load(job.model, job.optimizer)
    return time.monotonic() - began, str(refusal.value)


@pytest.mark.alone
def test_a_folder_that_cannot_hold_checkpoints_is_refused_before_the_first_step(tmp_path):
    (tmp_path / "file").write_text("")
    for (seconds, words), other in [
        run_ranks(2, _refused_at_start, tmp_path / "file" / "checkpoints"),
        run_ranks(2, _refused_at_start, tmp_path / "c", 100_000),
    ]:
        assert seconds < 2 and words == other[1]
        assert (
            "cannot be kept in" in words
            or "has 0.1 MB free, one checkpoint of this run takes 0.7 MB" in words
        )


# Retention


def test_retention_of_random_histories(n: int = 1000):
    """Run saves, crashes, going back, damage, changed options, against a model of what may
    disappear."""
    for seed in range(n):
        rng = random.Random(seed)
        folder, damaged, line, attempt, step = ["step-x", "notes"], set(), [], 0, 0
        keep_last, keep_every = rng.randrange(4), rng.choice([0, 0, 20, 30])
        for _ in range(rng.randrange(1, 30)):
            event = rng.random()
            ours = [name for name in folder if verify.parse_name(name)]
            if event < 0.1 and ours:  # go back, by request or over a damaged one
                name = rng.choice(ours)
                if name in damaged:
                    continue
                newest = max(ours, key=verify.parse_name)
                attempt = verify.parse_name(newest)[0] + (name != newest)
                line, step = ancestors[name] + [name], verify.parse_name(name)[1]
            elif event < 0.2 and ours:
                damaged.add(rng.choice(ours))
            elif event < 0.25:
                keep_last, keep_every = rng.randrange(4), rng.choice([0, 0, 20, 30])
            else:
                step += 10
                name = verify.step_name(step, attempt)
                assert name not in folder, "a published name is written again"
                ancestors = {} if not ours and not line else ancestors
                ancestors[name] = list(line)
                folder.append(name)
                line = [n for n in line if n in folder] + [name]
                whole = [n for n in line if n not in damaged]
                gone = expired(line, whole, keep_last, keep_every)
                kept = whole[-keep_last:] if keep_last else []
                assert gone == expired(line, kept, keep_last, keep_every)
                left = [n for n in whole if n not in gone]
                assert set(gone) <= set(line), (seed, "removed what is not of the current line")
                assert name not in gone and left[-1] == name, (seed, "removed the last whole one")
                if keep_last:
                    assert len(left) >= min(keep_last, len(whole)), (seed, "too few are left")
                if keep_every:
                    assert all(verify.parse_name(n)[1] % keep_every for n in gone), seed
                if keep_last and not keep_every and not damaged:
                    assert len(left) <= keep_last, (seed, "too many are left")
                folder = [n for n in folder if n not in gone]
                line = [n for n in line if n not in gone]
        assert {"step-x", "notes"} <= set(folder)


def test_retention_on_disk_and_leftovers(tmp_path):
    folder = tmp_path / "c"
    run_ranks(2, partial(save_all, folder, [1, 2, 3, 4, 5, 6, 7], keep_last=2, keep_every=3))
    assert verify.published(folder) == [verify.step_name(s, 0) for s in (7, 6, 3)]
    for left in (".tmp-0123abcd-4-step-00000008", ".del-0123abcd-4-step-00000001.2"):
        (folder / left).mkdir()
        (folder / left / "rank-00000.safetensors").write_bytes(b"half")
    run_ranks(1, partial(save_all, folder, [8], keep_last=2, keep_every=3))
    left = [".lease", *(verify.step_name(s, 0) for s in (3, 6, 7, 8))]
    assert sorted(p.name for p in folder.iterdir()) == left


@pytest.fixture(scope="module")
def five(tmp_path_factory) -> Path:
    """Return the folder of a run with checkpoints of steps 1 to 5. Copy it."""
    folder = tmp_path_factory.mktemp("five") / "checkpoints"
    run_ranks(1, partial(save_all, folder, [1, 2, 3, 4, 5], keep_last=0))
    return folder


FIVE = [verify.step_name(step, 0) for step in range(1, 6)]


@pytest.mark.parametrize(
    "damaged, gone",
    [
        ({}, [1, 2, 3]),
        ({4: "missing", 5: "short"}, [1]),
        ({2: "torn"}, [1, 2, 3]),
        ({2: "short", 3: "torn", 4: "missing", 5: "short"}, []),
    ],
)
def test_a_damaged_checkpoint_does_not_count_as_kept(damaged, gone, five, tmp_path):
    """keep_last = 2 of five: the two newest that have all their bytes stay, and no newer one is
    removed for being damaged. Of fewer than two, none is."""
    folder = copy_of(five, tmp_path)
    for step, how in damaged.items():
        place = folder / FIVE[step - 1]
        file = place / ("manifest.json" if how == "torn" else "rank-00000.safetensors")
        if how == "missing":
            file.unlink()
        else:
            os.truncate(file, file.stat().st_size - 1)
    held = SimpleNamespace(id="0123abcd", check=lambda: None)
    retention = Retention(folder, held, Checkpoint(keep_last=2))
    retention.remove_expired(FIVE, 7)
    retention.close()
    assert sorted(retention.gone) == [FIVE[step - 1] for step in gone]
    left = [name for name in FIVE if name not in retention.gone]
    assert sorted(path.name for path in folder.glob("[!.]*")) == left


def test_nothing_is_removed_after_the_lease_is_lost(five, tmp_path):
    """Another run may continue from what this one would remove."""
    folder = copy_of(five, tmp_path)

    def check() -> None:
        raise lease.Lost("taken over")

    held = SimpleNamespace(id="0123abcd", check=check)
    retention = Retention(folder, held, Checkpoint(keep_last=1))
    retention.remove_expired(FIVE, 7)
    retention.close()
    assert sorted(path.name for path in folder.glob("[!.]*")) == FIVE and not retention.gone


# One run per folder


def test_the_lease_of_another_host_holds_while_it_counts_on(tmp_path, monkeypatch):
    monkeypatch.setattr(lease, "PATIENCE", 1.2)
    path = tmp_path / ".lease"
    other = {"host": "elsewhere", "pid": 1, "id": "x", "count": 1}
    path.write_text(json.dumps(other))
    counting = threading.Timer(0.3, lambda: path.write_text(json.dumps({**other, "count": 2})))
    counting.start()
    with pytest.raises(InputError, match="process 1 on elsewhere"):
        lease.Lease(path)
    counting.join()
    mine = lease.Lease(path)  # now it stands still
    assert mine.held()
    # it was only frozen, and believes the folder is still its own
    path.write_text(json.dumps({**other, "count": 3}))
    with pytest.raises(lease.Lost, match="taken over"):
        mine.check()
    mine.release()
    assert "elsewhere" in path.read_text()


@pytest.mark.parametrize("locked", [True, False], ids=["free", "a server keeps the lock"])
def test_a_round_takes_the_lease_of_another_rank_at_once(locked, tmp_path, monkeypatch):
    """Rank 0 is lost with its host, and the run goes on without it."""
    monkeypatch.setattr(lease, "_lock", lambda fd: locked)
    monkeypatch.setattr(lease, "_counts_on", lambda path: pytest.fail("it waits"))
    path = tmp_path / ".lease"
    other = {"host": "elsewhere", "pid": 1, "id": "x", "start": "s", "count": 1}
    path.write_text(json.dumps(other))
    mine = lease.Lease(path, of_start="s")
    assert mine.held()
    mine.release()


def _publishes_after_losing(folder: Path) -> str:
    job, checkpoints = opened(folder)
    if job.mesh.rank == 0:
        other = {"host": "elsewhere", "pid": 1, "id": "x"}
        (folder / ".lease").write_text(json.dumps(other).ljust(200))
    checkpoints.save(1, job.model, job.optimizer, {"step": 1})
    with pytest.raises(InputError) as refusal:
        checkpoints.close()
    return str(refusal.value)


def test_a_run_that_lost_its_lease_publishes_nothing(tmp_path):
    for words in run_ranks(2, _publishes_after_losing, tmp_path):
        assert "taken over by another run" in words
    assert verify.published(tmp_path) == []


# Reading in blocks


def test_a_rank_reads_and_verifies_only_the_blocks_it_needs(tmp_path, monkeypatch):
    monkeypatch.setattr(verify, "BLOCK", 64)
    whole = torch.arange(23 * 7, dtype=torch.float32).view(23, 7)
    live = {
        "t": whole,
        "s": torch.tensor(3.0),
        "e": torch.empty(0, 5),
        "h": torch.arange(9, dtype=torch.int8) > 3,
    }
    plan = storage.SavePlan.make(live, storage.describe(live, 1, range(1)), 0)
    manifest = {
        "format": 2,
        "files": [storage.write(tmp_path, plan, storage.OneByOne(live))],
        "tensors": plan.rows,
    }
    path = tmp_path / "rank-00000.safetensors"

    def read(name: str, offset: list[int], shape: list[int]) -> torch.Tensor:
        into = {name: torch.zeros(shape, dtype=live[name].dtype)}
        storage.read(tmp_path, manifest, {name: (offset, shape)}, into)
        return into[name]

    for a in range(23):
        for b in range(a + 1, 24):
            assert torch.equal(read("t", [a, 2], [b - a, 3]), whole[a:b, 2:5])
    assert all(torch.equal(read(name, [0] * t.ndim, list(t.shape)), t) for name, t in live.items())
    counted = []
    buffer = memoryview(bytearray(64))
    with verify.Shard(tmp_path, manifest, 0) as shard:
        start = shard.find("t", ([0, 0], [23, 7]))["start"]
        verify._verify_shard(shard, buffer, counted.append)
        assert sorted(counted) == [4, 4, 9, *[64] * 10], "t has 644 bytes, h 9 and s 4"
        flip(path, start + 300)
        with pytest.raises(Damaged, match=f"at byte {start + 256}:"):
            verify._verify_shard(shard, buffer, counted.append)
    # 28 bytes each; the flipped byte lies in block 4, bytes 256 to 320: rows 9 to 11
    for row in range(23):
        if row not in (9, 10, 11):
            assert torch.equal(read("t", [row, 0], [1, 7]), whole[row : row + 1])
            continue
        with pytest.raises(Damaged, match=f"at byte {start + 256}:"):
            read("t", [row, 0], [1, 7])
