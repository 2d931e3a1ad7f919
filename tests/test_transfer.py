"""Transfer of the learning rate over width and depth: at its base a run is as without it, it computes
what the published form computes, with factors in forward, and outputs move as far at any width."""

from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatchcase
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

import train
from configs import check
from configs.load import load_config
from configs.schema import InputError, Lora, Model, Optimizer
from models import MODELS, NUMBERS, transfer
from parallelisms import family_check
from tools.parity import __main__ as tool
from tools.parity import coordinates
from tools.parity.tiny import Tiny, copy_of
from training import init
from training.muon import LR_FACTORS
from training.optim import build_optimizer, set_learning_rate

TINY = SimpleNamespace(dim=32, n_layers=4, n_heads=4, n_kv_heads=2, hidden_dim=48, vocab_size=61)
CONFIG = [
    "configs/llama_debug.toml",
    "--data.tokenizer=bytes",
    "--model.vocab_size=512",
    *(f"--model.{name}={value}" for name, value in vars(TINY).items() if name != "vocab_size"),
]
BASED = ["--model.width_base=16", "--model.depth_base=1"]
UNTIED = "--model.tied_embeddings=false"


def tiny(preset: str) -> Tiny:
    cfg = load_config([f"configs/{preset}.toml"], None, None)
    family = MODELS[cfg.model.family]
    return copy_of(family, family.Args(**check.architecture(cfg.model)), cfg.lora)


def architecture(*options: str):
    return train.architecture(load_config([*CONFIG, *options], 1, 1))


@pytest.mark.parametrize("name", MODELS)
def test_at_its_base_a_model_is_that_of_a_run_without(name):
    family = MODELS[name]
    args = replace(family.Args(**NUMBERS[name].flavors["debug"]), tied_embeddings=False)
    base = Model(family=name, width_base=args.dim, depth_base=args.n_layers)
    found = transfer.adapted(family, args, base)
    assert {*found.scales.values()} == {transfer.Scale(1, 1, 1, 1, 1)}
    for parameter, *row in found.initial_values(args):
        rows = family.initial_values(args)
        assert row == next(row for pattern, *row in rows if fnmatchcase(parameter, pattern))


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, head: Callable) -> list[float]:
    """Return the losses of four steps on random tokens."""
    tokens = torch.randint(TINY.vocab_size, (4, 9), generator=torch.Generator().manual_seed(0))
    losses = []
    for step in range(4):
        set_learning_rate(optimizer, 1e-2 * (4 - step))
        loss = model(tokens[:, :-1], torch.arange(8), head)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def head_of(labels: Tensor, factor: float) -> Callable[[Tensor, Tensor], Tensor]:
    def head(h: Tensor, weight: Tensor) -> Tensor:
        logits = factor * (h @ weight.t())
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    return head


def test_weights_with_factors_compute_the_published_form():
    """CompleteP, table 1: branches times 1 / depth and logits times 1 / width in forward; here, both
    are in the weights. Weight decay and epsilon count."""
    family = MODELS["llama"]
    numbers = NUMBERS["llama"].flavors["debug"] | vars(TINY) | {"head_dim": 8}
    args = family.Args(**numbers)
    width, depth = 2.0, 4.0
    found = transfer.adapted(family, args, Model(width_base=16, depth_base=1))
    cfg = Optimizer(eps=1e-3, weight_decay=0.3)
    labels = torch.randint(TINY.vocab_size, (4, 8), generator=torch.Generator().manual_seed(1))

    ours = family.build(args).double()
    init.initialise(ours, found.initial_values(args), 0)
    optimizer = build_optimizer(ours, family.decay, cfg, scales=found.scales)
    losses = trained(ours, optimizer, head_of(labels, 1.0))

    theirs = family.build(args).double()
    theirs.load_state_dict(ours_at_start(family, args, found))
    groups = []
    for name, param in theirs.named_parameters():
        in_block = name.startswith("layers.")
        is_hidden = in_block and param.ndim == 2
        is_branch_end = name.endswith(("wo.weight", "w2.weight"))
        with torch.no_grad():
            param.mul_(depth if is_branch_end else width if name == "output.weight" else 1)
        lr_scale = 1 / width if is_hidden else 1.0
        groups.append(
            {
                "params": [param],
                "lr_scale": lr_scale,
                "weight_decay": 0.3 / lr_scale if param.ndim == 2 else 0.0,
                "eps": 1e-3 / width / (depth if in_block else 1),
            }
        )
    for layer in theirs.layers.values():
        for branch in (layer.attention, layer.feed_forward):
            branch.register_forward_hook(lambda module, inputs, output: output / depth)
    adamw = torch.optim.AdamW(groups, betas=cfg.betas)
    assert trained(theirs, adamw, head_of(labels, 1 / width)) == pytest.approx(losses, rel=1e-12)
    for name, param in theirs.named_parameters():
        factor = found.scales[name].factor
        torch.testing.assert_close(ours.get_parameter(name), factor * param, rtol=1e-10, atol=1e-14)


def ours_at_start(family, args, found) -> dict[str, Tensor]:
    model = family.build(args).double()
    init.initialise(model, found.initial_values(args), 0)
    return model.state_dict()


@pytest.mark.parametrize(
    "preset",
    [
        "llama_debug",
        pytest.param("gpt_oss_debug", marks=pytest.mark.slow),
        pytest.param("kimi_linear_debug", marks=pytest.mark.slow),
    ],
)
def test_outputs_move_as_far_at_any_width(preset):
    assert coordinates.coordinates(tiny(preset)) is None


def without(what: str) -> Callable:
    """Return `transfer.adapted` with a mistake."""

    def adapted(family, args, cfg):
        found = transfer_adapted(family, args, cfg)
        if what == "rates":
            return replace(found, scales={})
        if what == "output":
            kept = {n: s for n, s in found.scales.items() if n != "output.weight"}
            return replace(found, scales=kept)
        return replace(found, initial_values=family.initial_values)

    return adapted


transfer_adapted = transfer.adapted


@pytest.mark.parametrize("what, seen", [("rates", "layers."), ("output", "the model")])
def test_negative_control_rates_that_are_not_transferred_are_seen(monkeypatch, what, seen):
    monkeypatch.setattr(transfer, "adapted", without(what))
    failure = coordinates.coordinates(tiny("llama_debug"))
    assert failure is not None and f"what {seen}" in failure


def test_rates_of_every_kind_of_parameter():
    """Table 3 of arXiv:2203.03466, and of Muon the growth of spectral norms."""
    family, args = architecture(*BASED, UNTIED)
    with torch.device("meta"):
        model = family.build(args)
    of_muon = (1 / 2**0.5, 1 / 2**0.5 / 4)
    for kind, expected in {"adamw": (1 / 2, 1 / 8), "muon": of_muon, "normuon": of_muon}.items():
        cfg = Optimizer(kind=kind, lr=0.1, weight_decay=0.3, ns_dtype="float32")
        found = build_optimizer(
            model, family.decay, cfg, family.matrices, scales=family.scales
        ).param_groups
        rates = {name: group["lr"] for group in found for name in group["param_names"]}
        decays = {name: group["weight_decay"] for group in found for name in group["param_names"]}
        assert rates["layers.0.attention.wq.weight"] == pytest.approx(0.1 * expected[0])
        assert rates["layers.3.feed_forward.w2.weight"] == pytest.approx(0.1 * expected[1])
        assert rates["output.weight"] == pytest.approx(0.1 / 2)
        assert rates["tok_embeddings.weight"] == rates["layers.0.ffn_norm.weight"] == 0.1
        for name, rate in rates.items():
            if decays[name]:
                assert rate * decays[name] == pytest.approx(0.1 * 0.3), name


@pytest.mark.parametrize("adjust_lr_fn", ["match_rms_adamw", "original"])
def test_muons_updates_grow_as_their_spectral_norms_should(adjust_lr_fn):
    """By the root of outputs over inputs, also where one of the two is a latent of constant rank."""
    family = MODELS["deepseek_v3"]
    args = family.Args(**NUMBERS["deepseek_v3"].flavors["debug"])
    wide = transfer.widened(family, args, 4)
    found = transfer.adapted(family, wide, Model(family=family.name, width_base=args.dim))
    cfg = Optimizer(kind="muon", lr=1.0, ns_dtype="float32", adjust_lr_fn=adjust_lr_fn)
    with torch.device("meta"):
        small, model = (family.build(numbers) for numbers in (args, wide))
    optimizer = build_optimizer(model, family.decay, cfg, family.matrices, scales=found.scales)
    growths = set()
    for group in optimizer.param_groups:
        for name in group["param_names"] if group["rule"] == "Muon" else ():
            (rows, columns), (rows_of_small, columns_of_small) = (
                of.get_parameter(name).shape[-2:] for of in (model, small)
            )
            size = group["lr"] * LR_FACTORS[adjust_lr_fn](rows, columns)
            at_base = LR_FACTORS[adjust_lr_fn](rows_of_small, columns_of_small)
            growth = (rows / rows_of_small, columns / columns_of_small)
            assert size == pytest.approx(at_base * (growth[0] / growth[1]) ** 0.5), name
            growths.add(growth)
    assert growths == {(4, 4), (1, 4), (4, 1)}


@pytest.mark.parametrize("name", MODELS)
def test_what_the_embedding_returns_is_as_large_at_any_width(name):
    """Gemma's forward multiplies it by the root of the width."""
    family = MODELS[name]
    small = copy_of(family, family.Args(**NUMBERS[name].flavors["debug"]), Lora())
    tokens = torch.arange(small.args.vocab_size)[None]
    sizes, moves = [], []
    for growth in (1, 4):
        wide, optimizer = coordinates.widened(small, "adamw", growth)
        sizes.append(wide.model.embed(tokens).std().item())
        rates = {
            name: group["lr"] for group in optimizer.param_groups for name in group["param_names"]
        }
        before = wide.model.embed(tokens)
        with torch.no_grad():
            wide.model.tok_embeddings.weight += rates["tok_embeddings.weight"]
        moves.append((wide.model.embed(tokens) - before).mean().item())
    assert sizes == pytest.approx([sizes[0]] * 2, rel=0.05)
    assert moves == pytest.approx([moves[0]] * 2, rel=1e-9)


ROWS = '[["layers.0.*", 0.5], ["*.wq.weight", 2], ["layers.0.attention.wq.weight", 9]]'


def test_multipliers_by_pattern():
    cfg = load_config([*CONFIG, f"--optimizer.lr_multipliers={ROWS}"], 1, 1)
    family, args = train.architecture(cfg)
    with torch.device("meta"):
        model = family.build(args)
    groups = build_optimizer(model, family.decay, cfg.optimizer).param_groups
    scales = {name: group["lr_scale"] for group in groups for name in group["param_names"]}
    assert scales["layers.0.attention.wq.weight"] == 0.5
    assert scales["layers.1.attention.wq.weight"] == 2
    assert scales["layers.1.attention.wk.weight"] == 1
    decays = {group["weight_decay"] for group in groups}
    assert decays == {0.0, cfg.optimizer.weight_decay}


@pytest.mark.parametrize(
    "rows, more, sentence",
    [
        ('[["*.wz.weight", 2]]', [], r"'\*.wz.weight' matches no parameter"),
        ('[["*", 2], ["*.wq.weight", 3]]', [], r"'\*.wq.weight' has no effect, since patterns"),
        (
            '[["layers.*", 2], ["tok*", 3]]',
            ['--training.freeze=["tok*", "*norm*"]'],
            r"'tok\*' has no effect, since its parameters are frozen",
        ),
        (
            '[["*lora_b", 16], ["*.wq.weight", 2]]',
            ["--lora.rank=2", '--lora.targets=["wq"]', "--checkpoint.load_path=x"],
            r"'\*.wq.weight' has no effect, since its parameters are frozen",
        ),
    ],
)
def test_a_pattern_that_changes_no_rate_is_refused(rows, more, sentence):
    cfg = load_config([*CONFIG, f"--optimizer.lr_multipliers={rows}", *more], 1, 1)
    with pytest.raises(InputError, match=f"lr_multipliers: {sentence}"):
        family_check.check(*train.architecture(cfg), SimpleNamespace(tp=1), cfg, [range(4)])


@pytest.mark.slow
def test_meshes_are_equal_to_one_process(capsys):
    """Scales go by a parameter's name in the whole model: shards and stages have those."""
    code = tool.main(
        [*CONFIG, *BASED, UNTIED, "--optimizer.kind=muon", "--meshes", "fsdp2xtp2", "pp2"]
    )
    assert code == 0, capsys.readouterr().out
    assert "coordinates   holds" in capsys.readouterr().out
