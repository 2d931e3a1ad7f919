"""Adapters leave the house: as a PEFT folder, which `peft` computes the same with, down to each
gradient; merged with their base; and in `tools.generate`."""

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from configs.schema import InputError, Lora
from models import lora
from tests.ranks import run_ranks
from tests.runs import run, tiny_run
from tests.shapes import SHAPES, formats, random_pair
from tools import adapters, convert, lora_to_peft, sampling
from tools.adapters import Adapter
from training.loss import linear_cross_entropy
from training.loss_passes import plain_cross_entropy

RANK, ALPHA = 3, 7.5
LIMIT = 1e-5
# large adapters before a norm of small states (tests/test_hf_parity.py)
ROUNDED = {"qwen3_next": 3e-4}
ALL = tuple("wq wk wv wo wg wz wa wb wq_a wq_b wkv_a wkv_b wf_a wf_b wg_a wg_b w1 w2 w3".split())
FAMILIES = ("llama3", "qwen3 experts", "deepseek_v3", "olmo2")
FAMILIES += ("gpt_oss", "qwen3_next", "gemma3 untied", "kimi_linear")


def adapt(model: nn.Module, targets: tuple[str, ...] = ALL) -> dict[str, Tensor]:
    """Gives a model adapters with random values, B too, and returns them."""
    lora.add(model, Lora(rank=RANK, alpha=ALPHA, targets=targets))
    generator = torch.Generator().manual_seed(5)
    found = {}
    for name, param in model.named_parameters():
        param.requires_grad_(lora.is_adapter(name))
        if param.requires_grad:
            param.data.normal_(0, 0.3, generator=generator)
            found[name] = param.data
    return found


def write(folder: Path, tensors: dict[str, Tensor], family: Any, args: Any) -> Path:
    lora_to_peft.write(folder, tensors, formats(family), args, RANK, ALPHA, None)
    return folder


def compare(shape: str, folder: Path, targets: tuple[str, ...] = ALL) -> dict[str, float]:
    """Return the distance of `peft` from ours on the same model, adapters and batch."""
    peft = pytest.importorskip("peft")
    family, args = SHAPES[shape]
    theirs, ours, _ = random_pair(family, args)
    found = adapt(ours, targets)
    write(folder, found, family, args)
    theirs = peft.PeftModel.from_pretrained(theirs, folder, is_trainable=True)

    tokens, labels = torch.randint(0, args.vocab_size, (2, 2, 13))
    labels[1, 3:7] = -100
    positions = torch.arange(13)
    got = ours(tokens, positions)
    loss_head = partial(linear_cross_entropy, labels=labels, chunk_tokens=8)
    got_loss = ours(tokens, positions, loss_head)
    got_loss.backward()
    gradients = {}
    for name, param in ours.named_parameters():
        assert (param.grad is not None) == (name in found), name
        if param.grad is not None:
            gradients[name] = param.grad

    want = theirs(tokens).logits
    want_loss = plain_cross_entropy(want, labels)
    want_loss.backward()
    of_model = {"family": formats(family), "args": args, "rank": RANK, "alpha": ALPHA}
    translate = partial(lora_to_peft.translate, **of_model)
    wanted = {}
    for name, param in theirs.named_parameters():
        if param.requires_grad:
            wanted[name.replace(".default", "")] = param.grad
    translated, _ = translate(gradients)
    # In B of gate and up there are zeros around the blocks, which `peft` trains and we do not have.
    ours_too, _ = translate({name: torch.ones_like(grad) for name, grad in gradients.items()})
    assert translated.keys() == wanted.keys()
    worst = 0.0
    for name, grad in translated.items():
        want_grad = wanted[name] * ours_too[name]
        worst = max(worst, ((grad - want_grad).norm() / want_grad.norm()).item())
    return {
        "logits": (got - want).abs().max().item(),
        "loss": abs(got_loss.item() / want_loss.item() - 1),
        "gradients": worst,
    }


@pytest.mark.parametrize("shape", FAMILIES)
def test_peft_computes_the_same(shape, tmp_path):
    seen = compare(shape, tmp_path / "peft")
    assert max(seen.values()) <= ROUNDED.get(shape, LIMIT), seen


def test_adapters_of_some_of_the_experts_weights(tmp_path):
    """w3 without w1, whose place in transformers' one parameter stays 0; and w2 alone with it."""
    seen = compare("gpt_oss", tmp_path / "peft", ("w3", "w2"))
    assert max(seen.values()) <= LIMIT, seen


def test_adapters_of_a_layer_for_further_tokens_are_refused(tmp_path):
    family, args = SHAPES["qwen3_next"]
    args = replace(args, mtp_depth=1)
    adapters_of_all = adapt(family.build(args), ("wq",))
    with pytest.raises(InputError, match="layers.5.attention.wq.*model.mtp_depth"):
        write(tmp_path / "peft", adapters_of_all, family, args)
    assert not (tmp_path / "peft").exists()


def keep_the_scale_of_one_part(monkeypatch):
    """The rank of gate and up is twice that of either, and alpha is not."""
    write = lora_to_peft.write

    def wrong(out, *arguments):
        write(out, *arguments)
        config = json.loads((out / lora_to_peft.CONFIG).read_text())
        del config["alpha_pattern"]
        (out / lora_to_peft.CONFIG).write_text(json.dumps(config))

    monkeypatch.setattr(lora_to_peft, "write", wrong)


def forget_that_experts_take_turns(monkeypatch):
    """B expert by expert, as A is."""

    def flatten(adapter):
        return Adapter(adapter.a.flatten(0, 1), adapter.b.transpose(0, 1).flatten(1, 2))

    monkeypatch.setattr(lora_to_peft, "flatten", flatten)


@pytest.mark.slow
@pytest.mark.parametrize("bug", [keep_the_scale_of_one_part, forget_that_experts_take_turns])
def test_negative_control_what_peft_is_told_wrongly_is_noticed(bug, tmp_path, monkeypatch):
    bug(monkeypatch)
    assert compare("qwen3 experts", tmp_path / "peft")["logits"] > 1e-3


# A run, from its base to what leaves the house ------------------------------------------------------

NUMBERS = {"dim": 42, "n_layers": 2, "n_heads": 6, "n_kv_heads": 2, "head_dim": 10}
NUMBERS |= {"n_experts": 7, "experts_per_token": 3, "expert_dim": 11, "vocab_size": 263}
NUMBERS |= {"hidden_dim": 53, "rope_theta": 1e6, "balance_loss": 0.0}


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> dict[str, Path]:
    """Write a mixture of experts in bfloat16 as transformers does, "base", and run adapters on it,
    "run"."""
    pytest.importorskip("transformers")
    place = tmp_path_factory.mktemp("adapters")
    family, args = SHAPES["qwen3 experts"]
    theirs, _, _ = random_pair(family, replace(args, **NUMBERS))
    theirs.to(torch.bfloat16).save_pretrained(place / "base")
    options = [
        *tiny_run(place),
        "--model.family=qwen3",
        *(f"--model.{name}={value}" for name, value in NUMBERS.items()),
        f"--checkpoint.load_hf={place / 'base'}",
        f"--lora.rank={RANK}",
        f"--lora.alpha={ALPHA}",
        '--lora.targets=["wq", "wo", "w1", "w2", "w3"]',
        "--optimizer.lr=0.02",
        "--lr_schedule.warmup_steps=0",
        "--training.steps=3",
        "--training.param_dtype=float32",
    ]
    (place / "run").mkdir()
    assert run_ranks(1, run, options, place / "run") == [(0, "")]
    return {"base": place / "base", "run": place / "run"}


def test_a_run_is_the_same_in_peft_and_merged(trained, tmp_path):
    transformers = pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")
    assert convert.main(["lora-to-peft", str(trained["run"]), str(tmp_path / "peft")]) == 0
    assert convert.main(["lora-merge", str(trained["run"]), str(tmp_path / "merged")]) == 0
    tokens = torch.randint(0, 263, (2, 13))
    positions = torch.arange(13)

    config = json.loads((tmp_path / "peft" / lora_to_peft.CONFIG).read_text())
    assert config["base_model_name_or_path"] == str(trained["base"])
    base = transformers.AutoModelForCausalLM.from_pretrained(
        trained["base"], dtype=torch.float32, experts_implementation="eager"
    )
    of_base = base(tokens).logits
    unmerged = peft.PeftModel.from_pretrained(base, tmp_path / "peft")(tokens).logits
    merged = sampling.load(trained["run"]).model(tokens, positions)
    assert (unmerged - merged).abs().max() <= LIMIT
    assert (unmerged - of_base).abs().max() > 1e-3

    # what is written: in the type of the base, rounded once
    written = sampling.load(tmp_path / "merged", str(trained["run"] / "tokenizer.json")).model
    source = adapters.open_run(trained["run"])
    adapted = adapters.by_parameter(source.tensors)
    assert len(adapted) == 2 * 5
    before = sampling.load(trained["base"], str(trained["run"] / "tokenizer.json")).model
    for name, weight in written.named_parameters():
        expected = before.get_parameter(name)
        if name in adapted:
            a, b = adapted[name]
            expected = expected + ALPHA / RANK * (b @ a)
        # where float32 rounds the sum otherwise, bfloat16 may do so too
        assert (weight - expected).abs().max() <= 2**-8 * expected.abs().max(), name
        assert torch.equal(weight, weight.bfloat16().float()), name
        assert name in adapted or torch.equal(weight, expected), name
    before, after = (
        json.loads((folder / "config.json").read_text())
        for folder in (trained["base"], tmp_path / "merged")
    )
    assert after == before | {"torch_dtype": "bfloat16"}


def test_a_base_that_was_moved_is_found_and_another_one_is_refused(trained, tmp_path, capsys):
    moved = tmp_path / "moved"
    shutil.copytree(trained["base"], moved)
    merge = ["lora-merge", str(trained["run"])]
    assert convert.main([*merge, str(tmp_path / "merged"), "--base", str(moved)]) == 0
    [file] = moved.glob("*.safetensors")
    weights = load_file(file)
    weights["model.norm.weight"][3] += 0.5
    save_file(weights, file, metadata={"format": "pt"})
    capsys.readouterr()
    assert convert.main([*merge, str(tmp_path / "again"), "--base", str(moved)]) == 2
    said = capsys.readouterr().err
    assert f"were trained on the weights of {trained['base']} (hash " in said, said
    assert f"and those of {moved} are others (hash " in said, said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["merged", "moved"]


def test_what_holds_adapters_is_no_model_and_the_other_way_round(trained, tmp_path, capsys):
    assert convert.main(["to-hf", str(trained["run"]), str(tmp_path / "hf")]) == 2
    assert "lora-merge" in capsys.readouterr().err
    assert convert.main(["from-hf", str(trained["base"]), str(tmp_path / "whole")]) == 0
    assert convert.main(["lora-to-peft", str(tmp_path / "whole"), str(tmp_path / "peft")]) == 2
    assert "holds no adapters" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["whole"]
