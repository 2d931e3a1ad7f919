"""A published trained model, SmolLM2-135M-Instruct: its texts are transformers', it is imported and
exported unchanged, it trains to equal numbers on every mesh, and README's five commands work on it."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import train
from checkpoint import hf
from data import turns
from data.hf_tokenizer import COMPANIONS
from tests.published import first_layers, published
from tests.ranks import run_ranks
from tests.runs import series
from tools import convert, sampling

LAYERS = 2  # of its 30, in what trains here
STEPS = 8
MESHES = {"tp3": (3, "tensor_parallel=3"), "pp2": (2, "pipeline_parallel=2")}
TEXT = "The sea is wide and the ships are small. "  # repeated, so that the loss falls in STEPS
QUESTION = "What is the capital of France?"


@pytest.fixture(scope="module")
def smollm2() -> Path:
    pytest.importorskip("transformers")
    return published("smollm2")


def test_its_texts_are_those_of_transformers(smollm2):
    """Greedy, a text and an answer, which ends where the model ends it."""
    import transformers

    loaded = sampling.load(smollm2)
    words = transformers.AutoTokenizer.from_pretrained(smollm2)
    model = transformers.AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    chat = turns.find(smollm2, loaded.tokenizer, "")
    conversation = [{"role": "user", "content": QUESTION}]
    rendered = words.apply_chat_template(conversation, add_generation_prompt=True, tokenize=False)
    assert loaded.context == 8192
    *_, [text] = sampling.texts_as_they_come(loaded, ["The sea is"], 12, temperature=0)
    *_, [answer] = sampling.answers_as_they_come(loaded, chat, [conversation], 40, temperature=0)
    for prompt, new, ours in (("The sea is", 12, text), (rendered, 40, rendered + answer)):
        ids = words(prompt, return_tensors="pt", add_special_tokens=False)
        made = model.generate(**ids, max_new_tokens=new, do_sample=False)[0].tolist()
        stopped = made[-1] == model.generation_config.eos_token_id
        assert words.decode(made[:-1] if stopped else made) == ours
    assert answer == "The capital of France is Paris."


@pytest.mark.slow
def test_it_goes_in_and_out_unchanged(smollm2, tmp_path):
    """Weights and everything that says how they are used."""
    import transformers

    source = first_layers(smollm2, tmp_path / "hf", LAYERS)
    for argv in (
        ("from-hf", source, tmp_path / "run"),
        ("to-hf", tmp_path / "run", tmp_path / "out"),
    ):
        assert convert.main([str(word) for word in argv]) == 0
    before = load_file(source / hf.ONE_FILE)
    after = load_file(tmp_path / "out" / hf.ONE_FILE)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert_same_usage(source, tmp_path / "out")
    load = transformers.AutoModelForCausalLM.from_pretrained
    tokens = torch.arange(40)[None]
    logits = [load(f, dtype=torch.float32)(tokens).logits for f in (source, tmp_path / "out")]
    assert torch.equal(*logits)


def assert_same_usage(source: Path, out: Path) -> None:
    import transformers

    for name in ("tokenizer.json", *COMPANIONS):
        if not (source / name).exists():
            continue
        there, here = ((folder / name).read_text(encoding="utf-8") for folder in (source, out))
        if name.endswith(".json"):
            there, here = json.loads(there), json.loads(here)
        assert there == here, name
    words = [transformers.AutoTokenizer.from_pretrained(folder) for folder in (source, out)]
    conversation = [{"role": "user", "content": QUESTION}]
    rendered = [each.apply_chat_template(conversation, tokenize=False) for each in words]
    assert rendered[0] == rendered[1] and "You are a helpful AI assistant" in rendered[0]


def train_here(options: list[str]) -> int:
    return train.main(options)


@pytest.mark.slow
@pytest.mark.cap(600)
def test_it_trains_to_equal_losses_on_every_mesh(smollm2, tmp_path):
    """Its weights, its tokenizer, STEPS steps. tp3, for 2 does not divide its 9 heads."""
    source = first_layers(smollm2, tmp_path / "hf", LAYERS)
    (tmp_path / "text.txt").write_text(TEXT * 100)
    losses = {}
    for name, (ranks, mesh) in {"one": (1, "tensor_parallel=1"), **MESHES}.items():
        options = [
            f"--model.flavor={source}",
            f"--checkpoint.load_hf={source}",
            f"--data.tokenizer={source / 'tokenizer.json'}",
            f"--data.source={tmp_path / 'text.txt'}",
            f"--data.cache={tmp_path / 'cache'}",
            f"--run.folder={tmp_path / name}",
            f"--parallelism.{mesh}",
            f"--training.steps={STEPS}",
            "--training.seq_len=24",
            "--training.global_batch_size=2",
            "--training.param_dtype=float32",
            "--optimizer.lr=1e-4",
            "--metrics.interval=1",
            "--validation.interval=0",
            "--checkpoint.interval=0",
            f"--checkpoint.export_hf={'float32' if name == 'one' else ''}",
            "--debug.sample_tokens=0",
        ]
        assert run_ranks(ranks, train_here, options, timeout=300) == [0] * ranks
        losses[name] = series(tmp_path / name)
    assert_same_usage(source, tmp_path / "one" / "hf" / f"step-{STEPS:08}")
    assert len(losses["one"]) == STEPS and losses["one"][STEPS] < losses["one"][1]
    for name in MESHES:
        for step, loss in losses["one"].items():
            assert losses[name][step] == pytest.approx(loss, rel=1e-4), (name, step)
