"""Parts that only Qwen3-Next has: every mesh with its states, and slices of tensors that join
several of ours.

tests/test_hf_parity.py compares the whole model with transformers', tests/test_convert.py its files,
tests/test_hf_configs.py has what its format refuses.
"""

import json
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoint import hf
from configs.schema import InputError
from models import FORMATS, qwen3_5, qwen3_next
from models.formats.layouts import Grouped
from models.formats.qwen3_next import FORMATS as OURS
from tests import parity
from tests.parity import DOCUMENTS, LORA_NEXT, QWEN3_NEXT
from tests.runs import ULYSSES
from tests.shapes import QWEN3_5, exported
from tests.shapes import QWEN3_NEXT as ARGS
from training import init
from training.optim import first_match

# --------------------------------------------------------------------------------------------------
# meshes

STATES = [option for option in QWEN3_NEXT if "delta" in option or "interval" in option]
STATES.append("--model.rope_dim=4")
MORE = ["--model.expert_dim=12", "--model.mtp_depth=1"]
# and further options; the other way of sharing a sequence is tests/test_kimi_linear.py's
MESHES = {"experts on ep2 of tp2": [], "ep2 of cp2": [ULYSSES], "pp2": []}


@pytest.mark.slow
@pytest.mark.cap(300)
def test_meshes_equal_the_plain_model() -> None:
    """In float64, with documents of which some are shorter than the convolution. A pipeline's stages
    are uneven: a gated delta net and attention, and a gated delta net; the layer that predicts a
    further token stands in the second."""
    exactly = parity.combination_of(dtype="float64")
    for mesh, more in MESHES.items():
        parity.check(mesh, [exactly], [*QWEN3_NEXT, *MORE, DOCUMENTS, *more])


@pytest.mark.slow
@pytest.mark.cap(300)
def test_qwen3_5_on_a_mesh_equals_the_plain_model() -> None:
    """The same mixers with dense layers."""
    exactly = parity.combination_of(dtype="float64")
    for mesh in "tp2", "cp2", "pp2":
        parity.check(mesh, [exactly], ["--model.family=qwen3_5", *STATES, DOCUMENTS])


@pytest.mark.slow
@pytest.mark.cap(300)
def test_adapters_on_a_mesh_equal_the_plain_model() -> None:
    parity.check("tp2", [parity.combination_of(dtype="float64")], [*LORA_NEXT, *MORE])


# --------------------------------------------------------------------------------------------------
# files


@pytest.mark.parametrize("groups, has_middle", [(1, True), (4, False)])
def test_slices_of_a_joined_tensor_are_those_of_the_parameter(groups, has_middle):
    rows = 3, 1, 2
    columns = 5
    parts = [torch.randn(groups * n, columns) for n in rows]
    layouts = [Grouped("x", groups, rows, turn, has_middle) for turn in range(3)]
    theirs = layouts[0].join(parts)
    assert theirs.shape == torch.Size(layouts[0].files(parts[0].shape)["x"])
    in_groups = theirs.reshape(groups, sum(rows), columns)
    for turn, (layout, ours) in enumerate(zip(layouts, parts, strict=True)):
        before = sum(rows[:turn])
        mine = in_groups[:, before : before + rows[turn]].reshape(-1, columns)
        assert torch.equal(mine, ours)
        for start, stop in combinations(range(len(ours) + 1), 2):
            box = (slice(start, stop), slice(1, 4))
            got = layout.read(box, lambda name, part: theirs[part])
            assert torch.equal(got, ours[box]) and got.is_contiguous()


def test_the_parameters_are_those_that_the_hub_counts():
    """Of Qwen3-Coder-Next, whose files have no MTP, and of Qwen3-Next-80B-A3B-Instruct."""
    args = qwen3_next.Args(**qwen3_next.NUMBERS.flavors["80B-A3B"])
    assert qwen3_next.FAMILY.parameters(args) == 79_674_391_296
    assert qwen3_next.FAMILY.parameters(replace(args, mtp_depth=1)) == 81_324_862_720


def test_gains_decay_to_1_and_vectors_of_heads_do_not_decay():
    model = qwen3_next.FAMILY.build(replace(ARGS, mtp_depth=1))
    names = dict(model.named_parameters())
    kept = {name for name in names if not first_match(qwen3_next.DECAY, name)}
    words = {name.split(".attention.")[-1] for name in kept}
    assert {f"layers.5.{norm}.weight" for norm in ("token_norm", "hidden_norm", "norm")} <= set(
        names
    )
    assert words == {"A_log", "dt_bias", "norm.weight"}
    init.initialise(model, qwen3_next.initial_values(ARGS), 0)
    for name, weight in names.items():
        if name.endswith("norm.weight"):
            assert (weight == (1 if name in kept else 0)).all(), name


def test_without_a_depth_mtp_is_ignored_and_anything_else_is_not(tmp_path: Path):
    ours = exported(tmp_path, qwen3_next.FAMILY, ARGS)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    shapes = {name: list(p.shape) for name, p in ours.named_parameters()}
    mtp = {"mtp.fc.weight": torch.zeros(2, 4), "mtp.layers.0.mlp.gate.weight": torch.zeros(3)}
    save_file(tensors | mtp, path)
    assert hf.weights(tmp_path, OURS, ARGS, shapes).keys() == shapes.keys()
    save_file(tensors | {"model.layers.0.linear_attn.bias": torch.zeros(2)}, path)
    with pytest.raises(InputError, match="linear_attn.bias is not a tensor of such a model"):
        hf.weights(tmp_path, OURS, ARGS, shapes)


def test_the_text_model_of_a_qwen3_5_that_sees_images_is_read(tmp_path: Path):
    """Its tensors have other names there; what sees images, and MTP, are left out."""
    family = qwen3_5.FAMILY
    ours = dict(exported(tmp_path, family, QWEN3_5).named_parameters())
    path = tmp_path / "model.safetensors"
    renamed = {n.replace("model.", "model.language_model."): x for n, x in load_file(path).items()}
    others = {name: torch.zeros(2) for name in ("model.visual.pos_embed.weight", "mtp.fc.weight")}
    save_file(renamed | others, path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "qwen3_5", "text_config": config})
    )
    assert hf.read_model(tmp_path, FORMATS) == ("qwen3_5", QWEN3_5)
    shapes = {name: list(weight.shape) for name, weight in ours.items()}
    stored = hf.weights(tmp_path, FORMATS["qwen3_5"], QWEN3_5, shapes)
    for name, weight in ours.items():
        assert torch.equal(stored[name].read(), weight), name


def test_the_order_of_layers_may_be_a_list_or_an_interval():
    config = OURS.hf_config(ARGS)
    assert OURS.args_from_hf(config) == ARGS
    for key in "layer_types", "full_attention_interval":
        assert OURS.args_from_hf({k: v for k, v in config.items() if k != key}) == ARGS
    alone = OURS.args_from_hf(config | {"layer_types": ["linear_attention"] * 5})
    assert qwen3_next.attention_layers(alone) == 0
