"""Multi-token prediction: the tokens and labels further on, the loss that is trained on, and drafts.

Meshes of models with it are compared with the plain model by tests/test_experts.py (`deepseek_v3`) and
tests/test_qwen3_next.py; tests/test_museum.py has its mistakes."""

import functools
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

import train
from checkpoint import changes, hf
from configs.load import load_config
from data import further
from models import FORMATS, MODELS, mtp
from models.deepseek_v3 import DeepSeekV3
from models.terms import AuxiliaryTerms
from tests.ranks import run_ranks
from tests.shapes import DEEPSEEK, QWEN3_NEXT, exported
from tools import generate, sampling
from tools.parity import in_memory
from training.recurrent_cache import CachedState
from training.speculative import Speculation

IGNORE = -100
T = 12
FAMILIES = {  # and layers that predict further tokens
    "deepseek_v3": ["--model.mtp_depth=2", "--model.hidden_dim=48"],
    "qwen3_next": ["--model.mtp_depth=1", "--model.attention_interval=2"],
}
TINY = [
    "--model.dim=32",
    "--model.n_layers=2",
    "--model.expert_dim=16",
    "--model.vocab_size=300",
    "--data.tokenizer=bytes",
    f"--training.seq_len={T}",
    "--training.local_batch_size=2",
    "--training.global_batch_size=4",
    "--training.param_dtype=float64",
    "--training.mtp_weight=0.3",
    "--training.max_norm=0",
    "--run.device=cpu",
    "--model.balance_loss=0",
]


ARGS = {
    "deepseek_v3": replace(DEEPSEEK, mtp_depth=2),
    # transformers takes the kind of norm from the last layer, which has attention
    "qwen3_next": replace(QWEN3_NEXT, n_layers=4, mtp_depth=1),
}


# Tokens and labels --------------------------------------------------------------------------------


def cut(begins: np.ndarray | None, ranges: list[range], depth: int) -> tuple[np.ndarray, Any]:
    tokens = np.arange(2 * (T + 1)).reshape(2, T + 1) + 1
    batch = {"labels": torch.zeros(1, 2, sum(map(len, ranges)), dtype=torch.int64)}
    further.add(batch, tokens, begins, ranges, depth, IGNORE)
    return tokens, batch


def by_hand(tokens: np.ndarray, begins: np.ndarray, row: int, i: int, k: int) -> tuple[int, int]:
    """The token k places after i, and the label that it is trained to predict."""
    token = tokens[row, i + k] if i + k <= T else 0
    on_the_way = range(i + 1, i + k + 2)
    if on_the_way[-1] > T or any(begins[row, place] for place in on_the_way):
        return token, IGNORE
    return token, tokens[row, i + k + 1]


@pytest.mark.parametrize("has_documents", [False, True])
@pytest.mark.parametrize(
    "ranges", [[range(T)], [range(3), range(9, 12)], [range(3, 6), range(6, 9)], [range(6, 12)]]
)
def test_every_rank_gets_the_tokens_and_labels_further_on_of_the_whole_window(
    ranges, has_documents
):
    begins = np.zeros((2, T + 1), bool)
    if has_documents:
        begins[0, [0, 1, 5, 9, 10]] = True
        begins[1, [2, 12]] = True
    tokens, batch = cut(begins if has_documents else None, ranges, depth=3)
    places = [place for part in ranges for place in part]
    assert batch["tokens_ahead"].shape == batch["labels_ahead"].shape == (1, 2, 3, len(places))
    for row in range(2):
        for k in (1, 2, 3):
            for column, i in enumerate(places):
                found = tuple(
                    int(batch[name][0, row, k - 1, column])
                    for name in ("tokens_ahead", "labels_ahead")
                )
                assert found == by_hand(tokens, begins, row, i, k), (row, k, i)


# The loss -----------------------------------------------------------------------------------------


def gradients_of_a_step(family: str) -> dict:
    options = [*TINY, f"--model.family={family}", *FAMILIES[family]]
    job = train.build(load_config(options, 1, 1))
    ids = np.random.default_rng(0).integers(0, 300, 500).astype(np.uint16)
    batch = in_memory.batches(job.cfg, job.mesh, ids)[0]
    batch["labels"][..., 3] = IGNORE
    step = train.gradients(job, batch)
    got = {name: p.grad.clone() for name, p in job.model.named_parameters() if p.requires_grad}
    job.model.zero_grad(set_to_none=True)
    names = [name for name in step.terms.sums if name.startswith("mtp_loss_")]
    reported = {name: float(step.terms.sums[name][None]) for name in sorted(names)}
    expected = plainly(job.model, batch)
    expected["loss"].backward()
    want = {name: p.grad for name, p in job.model.named_parameters() if p.requires_grad}
    return {
        "off": max(float((got[name] - want[name]).abs().max()) for name in want),
        "size": max(float(grad.abs().max()) for grad in want.values()),
        "loss": (float(step.loss), float(expected["first"])),
        "further": (list(reported.values()), expected["further"]),
        "names": sorted(want),
    }


def plainly(model: Any, batch: dict) -> dict:
    """Equations 21 to 25 of DeepSeek-V3's report, window by window, over the labels of the batch."""
    count = int((batch["labels"] != IGNORE).sum())
    depth = model.args.mtp_depth
    first = 0.0
    sums = [0.0] * depth
    for window, labels, ahead, labels_ahead in zip(
        *(
            batch[name].flatten(0, 1)
            for name in ("tokens", "labels", "tokens_ahead", "labels_ahead")
        ),
        strict=True,
    ):
        positions = torch.arange(T)
        rope = model.rope(positions)
        h = model.embed(window[None])
        for number in ("0", "1"):
            h = model.layers[number](h, *rope)
            h = h[0] if isinstance(h, tuple) else h
        h = model.norm(h)
        first = first + nats(model, h, labels)
        for k in range(depth):
            layer = model.layers[str(2 + k)]
            pair = torch.cat(
                (layer.token_norm(model.embed(ahead[None, k])), layer.hidden_norm(h)), -1
            )
            x = layer.w_pair(pair)
            x = x + layer.attention(layer.attention_norm(x), *rope)
            h = layer.norm(x + layer.feed_forward(layer.ffn_norm(x))[0])
            sums[k] = sums[k] + nats(model, h, labels_ahead[k])
    loss = (first + 0.3 / depth * sum(sums)) / count
    return {"loss": loss, "first": first / count, "further": [float(one) for one in sums]}


def nats(model: Any, h: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits = h[0] @ model.output.weight.t()
    return F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_has_the_gradient_of_the_published_equations(family):
    seen = run_ranks(1, gradients_of_a_step, family)[0]
    assert seen["off"] <= 1e-13 * seen["size"], seen
    assert seen["loss"][0] == pytest.approx(seen["loss"][1], rel=1e-14)
    assert seen["further"][0] == pytest.approx(seen["further"][1], rel=1e-13)
    assert {"layers.2.w_pair.weight", "layers.2.norm.weight"} <= set(seen["names"])


# Drafts -------------------------------------------------------------------------------------------


@functools.cache
def counting_model() -> DeepSeekV3:
    """A model that has learnt to count: after n comes n + 1."""
    torch.manual_seed(0)
    numbers = vars(DEEPSEEK) | {"mtp_depth": 2, "vocab_size": 16, "n_layers": 2}
    model = DeepSeekV3(type(DEEPSEEK)(**numbers))
    for name, weight in model.named_parameters():
        if name.endswith("norm.weight"):
            torch.nn.init.ones_(weight)
        else:
            torch.nn.init.normal_(weight, std=0.1)
    with torch.no_grad():
        for block in model.layers.values():
            block.attention.wo.weight.zero_()
    optimizer = torch.optim.Adam((p for p in model.parameters() if p.requires_grad), lr=0.01)
    window = (torch.arange(18) % 16)[None]
    tokens, positions = window[:, :14], torch.arange(14)

    def loss_of(shift: int) -> Any:
        return lambda h, weight: F.cross_entropy(
            (h @ weight.t()).flatten(0, 1), window[:, shift : shift + 14].flatten()
        )

    for _ in range(60):
        one = torch.ones(())
        terms = AuxiliaryTerms(one, one)
        ahead = torch.stack([window[:, k : k + 14] for k in (1, 2)], 1)
        head = mtp.LossAhead(loss_of(1), [loss_of(2), loss_of(3)], ahead, weight=2.0)
        optimizer.zero_grad()
        model(tokens, positions, head, terms=terms).backward()
        optimizer.step()
    return model


def greedy(model: Any, text: list[int], count: int, context: int) -> list[int]:
    text = list(text)
    with torch.no_grad():
        for _ in range(count):
            window = torch.tensor([text[-context:]])
            text.append(int(model(window, torch.arange(window.shape[1]))[0, -1].argmax()))
    return text


@pytest.mark.slow
def test_drafts_give_the_text_of_plain_sampling_in_fewer_forwards():
    model = counting_model()
    one = Speculation(model, [3, 4, 5], 40, torch.device("cpu"))
    new = [token for some in one.tokens(8) for token in some]
    assert one.text[:11] == greedy(model, [3, 4, 5], 8, 40) == [3, 4, 5, *new]
    assert new == list(range(6, 14))
    assert one.right == one.offered > 0 and one.forwards <= 4


@torch.no_grad()
def whole_drafts(model: Any, text: list[int]) -> list[int]:
    """What the layers draft after a text, from the whole of it."""
    weight = model.output.weight
    h = model(torch.tensor([text]), torch.arange(len(text)), lambda h, weight: h)[:, :-1]
    inputs = (*model.rope(torch.arange(len(text) - 1)), None, None)
    known = list(text)
    for k in range(1, 1 + model.args.mtp_depth):
        h, _ = model.ahead(k, h, torch.tensor([known[k : k + len(text) - 1]]), inputs)
        known.append(int((h[0, -1] @ weight.t()).argmax()))
    return known[len(text) :]


def speculated(name: str, context: int, monkeypatch: Any) -> tuple[list[int], bool, Speculation]:
    """Return the text of plain sampling, whether all drafts were those of whole texts, and what a model
    of random weights makes of drafts that are right up to a place that moves; in float64."""
    torch.manual_seed(1)
    model = MODELS[name].build(replace(ARGS[name], vocab_size=40)).double()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    text = greedy(model, [1, 2, 3], 20, context)
    real = Speculation.draft
    drafts = []

    def draft(self: Speculation, *hidden: Any) -> list[int]:
        found = real(self, *hidden)
        drafts.append((list(self.text), found))
        right = text[len(self.text) :][: len(found)]
        wrong = len(self.text) % 3
        return [*right[:wrong], *((token + 1) % 40 for token in right[wrong:])]

    monkeypatch.setattr(Speculation, "draft", draft)
    one = Speculation(model, [1, 2, 3], context, torch.device("cpu"))
    list(one.tokens(20))
    same = [found == whole_drafts(model, before)[: len(found)] for before, found in drafts]
    return text, all(same), one


@pytest.mark.slow
@pytest.mark.parametrize("context", [9, 40])
@pytest.mark.parametrize("name", ARGS)
def test_wrong_drafts_and_the_end_of_the_context_change_no_token(name, context, monkeypatch):
    """What they left in caches and states is taken back; behind the context nothing is drafted."""
    text, drafts_are_right, one = speculated(name, context, monkeypatch)
    assert one.text == text and len(set(text)) > 5 and drafts_are_right
    assert 0 < one.right < one.offered <= context


def test_control_a_state_that_has_seen_a_wrong_draft_gives_another_text(monkeypatch):
    monkeypatch.setattr(CachedState, "keep_first", lambda self, lengths: None)
    text, _, one = speculated("qwen3_next", 40, monkeypatch)
    assert one.text != text


def test_a_forward_is_of_the_new_tokens_alone():
    """With two drafts, three in the model; the layers run again where they saw drafts."""
    lengths = []
    model = DeepSeekV3(ARGS["deepseek_v3"])
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.1)
    for name in ("0", "3"):
        model.layers[name].register_forward_pre_hook(
            lambda _, inputs: lengths.append(inputs[0].shape[1])
        )
    list(Speculation(model, [1, 2, 3, 4], 40, torch.device("cpu")).tokens(5))
    assert lengths[:4] == [4, 4, 3, 2], lengths


@pytest.mark.slow
def test_a_text_ends_before_a_stop():
    one = Speculation(counting_model(), [3], 40, torch.device("cpu"), stops=(9,))
    assert [token for some in one.tokens(30) for token in some] == [4, 5, 6, 7, 8]


def test_a_model_that_drafts_nothing_is_refused(capsys):
    model = DeepSeekV3(DEEPSEEK)
    with pytest.raises(Exception, match="model.mtp_depth"):
        list(sampling.speculate(model, [[1]], 8, torch.device("cpu"), 3, ()))
    # all mistakes at once, where the checkpoint is here
    assert generate.main(["runs/none", "--speculative", "--top-k=0"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 3 and "--temperature=0" in said[1] and "runs/none" in said[2]


# Files --------------------------------------------------------------------------------------------


def of_transformers(folder: Path, name: str) -> tuple[Any, Any]:
    """Return transformers' model and its layers for further tokens."""
    from transformers import AutoModelForCausalLM

    eager = {"dtype": torch.float32, "experts_implementation": "eager"}
    main = AutoModelForCausalLM.from_pretrained(folder, **eager)
    return main, READ[name](main, folder, ARGS[name])


def layers_of_deepseek(main: Any, folder: Path, args: Any) -> Any:
    from transformers.modeling_layers import MtpModel

    # theirs are the numbers of the published model's layers
    layers = "|".join(map(str, mtp.layers_ahead(args)))
    main._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.({layers})\..*"]
    return MtpModel.from_pretrained(main)


OF_TRANSFORMERS = {  # beginnings of published names of Qwen3-Next -> those of transformers' MtpModel
    "mtp.pre_fc_norm_embedding.": "layers.0.enorm.",
    "mtp.pre_fc_norm_hidden.": "layers.0.hnorm.",
    "mtp.fc.": "layers.0.eh_proj.",
    "mtp.norm.": "layers.0.post_norm.",
    "mtp.layers.0.": "layers.0.mtp_block.",
}


def layers_of_qwen3_next(main: Any, folder: Path, args: Any) -> Any:
    """transformers itself does not read `mtp.*`."""
    from transformers.modeling_layers import MtpModel

    main.config.num_mtp_layers, main.config.mtp_layer_types = 1, ["full_attention"]
    theirs = MtpModel(main, 1)
    found = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        for published, renamed in OF_TRANSFORMERS.items():
            if name.startswith(published):
                found[renamed + name.removeprefix(published)] = weight
    experts = "layers.0.mtp_block.mlp.experts."

    def stacked(kind: str) -> torch.Tensor:
        return torch.stack(
            [found.pop(f"{experts}{i}.{kind}.weight") for i in range(args.n_experts)]
        )

    found[f"{experts}gate_up_proj"] = torch.cat((stacked("gate_proj"), stacked("up_proj")), 1)
    found[f"{experts}down_proj"] = stacked("down_proj")
    missing, unexpected = theirs.load_state_dict(found, strict=False)
    assert not unexpected and set(missing) == {"embed_tokens.weight", "shared_head.weight"}
    return theirs


READ = {"deepseek_v3": layers_of_deepseek, "qwen3_next": layers_of_qwen3_next}


def hidden_of_both(folder: Path, name: str) -> list[float]:
    """Return the greatest differences between our layers and those of transformers with the weights
    of our export, on the same tokens."""
    args = ARGS[name]
    ours = exported(folder, MODELS[name], args)
    main, theirs = of_transformers(folder, name)
    tokens = torch.randint(args.vocab_size, (2, T + 2))
    positions = torch.arange(T)
    off = []
    with torch.no_grad():
        h = main(tokens[:, :T], output_hidden_states=True).hidden_states[-1]
        mine = h
        for k in range(1, 1 + args.mtp_depth):
            ahead = tokens[:, k : k + T]
            h = theirs.forward_layer(k - 1, h, positions[None], None, input_ids=ahead)
            mine, _ = ours.ahead(k, mine, ahead, (*ours.rope(positions), None, None))
            off.append(float((mine - h).abs().max() / h.abs().max()))
    return off


def hidden_of_all(folder: Path) -> list[float]:
    """Compare the layers of each family, in one process, which imports transformers."""
    return [off for name in ARGS for off in hidden_of_both(folder / name, name)]


@pytest.mark.slow
def test_exported_layers_are_those_of_transformers(tmp_path):
    pytest.importorskip("transformers")
    assert max(run_ranks(1, hidden_of_all, tmp_path)[0]) <= 2e-6


@pytest.mark.parametrize("name", ARGS)
def test_exported_layers_come_back_bitwise_or_are_left_out(name, tmp_path):
    args = ARGS[name]
    ours = dict(exported(tmp_path / "hf", MODELS[name], args).named_parameters())
    assert hf.read_model(tmp_path / "hf", FORMATS) == (name, args)
    for depth in (args.mtp_depth, 0):
        fewer = replace(args, mtp_depth=depth)
        parameters = MODELS[name].build(fewer).named_parameters()
        shapes = {parameter: list(weight.shape) for parameter, weight in parameters}
        stored = hf.weights(tmp_path / "hf", FORMATS[name], fewer, shapes)
        assert stored.keys() == shapes.keys()
        for parameter, files in stored.items():
            assert torch.equal(files.read(), ours[parameter]), parameter


def test_a_second_layer_of_qwen3_next_is_refused():
    """Its published files have one projection and one norm for all such layers."""
    formats = FORMATS["qwen3_next"]
    config = formats.hf_config(QWEN3_NEXT)
    assert formats.args_from_hf(config).mtp_depth == 0
    del config["num_nextn_predict_layers"]  # as in the hub's file
    assert formats.args_from_hf(config).mtp_depth == 1
    with pytest.raises(ValueError, match="num_nextn_predict_layers is 2: one layer"):
        formats.args_from_hf(config | {"num_nextn_predict_layers": 2})


# Checkpoints --------------------------------------------------------------------------------------


def test_a_checkpoint_from_before_there_was_a_depth_is_of_a_model_without():
    new = {"must_match": {"model": {"dim": 4, "mtp_depth": 0}}}
    old = {"must_match": {"model": {"dim": 4}}}
    assert changes.refused(old, new) == []
    deeper = {"must_match": {"model": {"dim": 4, "mtp_depth": 1}}}
    for before, now in pairwise([old, deeper, new]):
        assert "mtp_depth" in " ".join(changes.refused(before, now))
