"""A checkpoint from another author may contain anything: its numbers are bounded before memory is
taken or anything is built, and its names do not command a terminal."""

import json
import pickle
import time
from pathlib import Path

import pytest

from checkpoint import layout, state, verify
from checkpoint.verify import Damaged
from configs.schema import InputError
from tools import dcp

ROW = {"dtype": "F32", "shape": [4], "first": 0, "split": []}
HEAD = {
    "format": 2,
    "step": 1,
    "progress": {},
    "mesh": {},
    "facts": {},
    "optimizer": "AdamW",
    "hyperparameters": {},
    "parent": "",
    "ancestors": [],
    "torch": "2.11",
    "saved": "",
    "files": [[100, "0" * 16]],
    "tensors": {"model.w": ROW},
}


def written(folder: Path, **changed: object) -> Path:
    """Write a checkpoint whose manifest has a right hash and any content."""
    manifest = HEAD | changed
    outer = {"hash": verify.manifest_hash(manifest), "manifest": manifest}
    folder.mkdir()
    (folder / verify.MANIFEST).write_text(json.dumps(outer))
    return folder


@pytest.mark.slow
def test_control_what_is_in_range_is_read(tmp_path):
    tensors = {"model.\u00e9": ROW | {"split": [[0, 1, 1]] * 5}}
    found = verify.read_manifest(written(tmp_path / "a", tensors=tensors, ancestors=["step-1"]))
    assert found["step"] == 1 and found["tensors"] == tensors


@pytest.mark.parametrize(
    "changed",
    [
        {"format": 0},
        {"format": -(10**9)},
        {"step": -1},
        {"step": 10**18},
        {"optimizer": "Adam\x1b[2J"},
        {"ancestors": ["step-00000001", "\u202egpj"]},
        {"ancestors": [3]},
        {"tensors": {"model.\x1b]0;title\x07": ROW}},
        {"tensors": {"m" * 5000: ROW}},
        {"tensors": {"w": ROW | {"split": [[0, 1, 1]] * 2000}}},
        {"tensors": {"w": ROW | {"shape": [1] * 1000}}},
        {"tensors": {"w": ROW | {"shape": [1 << 60]}}},
        {"tensors": {"w": ROW | {"split": [[0, 10**30, 1]]}}},
    ],
    ids=str,
)
def test_what_no_checkpoint_says_is_damage(changed, tmp_path):
    began = time.monotonic()
    with pytest.raises(Damaged) as refusal:
        verify.read_manifest(written(tmp_path / "a", **changed))
    assert time.monotonic() - began < 5
    assert not verify.UNSHOWN.search(str(refusal.value)) and len(str(refusal.value)) < 1000


def test_a_manifest_and_names_of_any_length_are_not_read_into_memory(tmp_path):
    """A file with a hole of 1 TB, and numbers of any length."""
    folder = written(tmp_path / "a")
    with open(folder / verify.MANIFEST, "r+b") as file:
        file.truncate(1 << 40)
    with pytest.raises(Damaged, match="are no manifest"):
        verify.read_manifest(folder)
    assert verify.parse_name("step-" + "9" * 200) is None
    assert verify.parse_name("step-00000200.1") == (1, 200)
    assert not layout.is_counts([1 << 50]) and layout.is_counts([1 << 40])


@pytest.mark.parametrize(
    "number", [{"n_layers": 10**9}, {"dim": 10**12}, {"vocab_size": 10**40}, {"dim": -7}]
)
def test_a_model_that_no_machine_could_build_is_refused_before(number):
    class Family:
        Args = dict

    def holds(numbers: dict) -> dict:
        return {"facts": {"family": "x", "must_match": {"model": numbers}}, "tensors": {}}

    right = {"n_layers": 126, "dim": 16384, "rope_theta": 10**8, "norm_eps": 1e-5}
    assert state.model_of(Path("a"), holds(right), {"x": Family})[1] == right
    (name,) = number
    with pytest.raises(InputError, match=f"model.{name} = .* is no model's"):
        state.model_of(Path("a"), holds(right | number), {"x": Family})
    with pytest.raises(InputError, match="does not say"):
        state.model_of(Path("a"), holds([1]), {"x": Family})


BOMBS = {
    "a slot of a memo": b"\x80\x04Nr\xff\xff\xff\x7f.",
    "a slot in digits": b"Np2147483647\n.",
    "text of 8 EiB": b"\x80\x04\x8d" + (1 << 62).to_bytes(8, "little") + b"x.",
    "bytes of 1 TiB": b"\x80\x05\x96" + (1 << 40).to_bytes(8, "little") + b"x.",
    "a frame of 1 TiB": b"\x80\x04\x95" + (1 << 40).to_bytes(8, "little") + b"N.",
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_pickle_takes_no_more_than_its_bytes(bomb, tmp_path):
    path = tmp_path / ".metadata"
    path.write_bytes(BOMBS[bomb])
    with pytest.raises(InputError, match="is not (read|DCP's)"):
        dcp.unpickled(path)
    dcp.check_sizes(pickle.dumps({"a": [1] * 1000, "b": ("x" * 70_000,) * 300}))  # control
