"""Checkpoints go to folders of torch.distributed.checkpoint and come back bitwise, under our names and
TorchTitan's; PyTorch alone reads what we write, and we run nothing of what we read.

TorchTitan's Llama is tests/complex_llama.py, small, with its names.
"""

import importlib.util
import pickle
import shutil
from collections.abc import Callable
from contextlib import redirect_stderr
from dataclasses import asdict
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.checkpoint import metadata as of_dcp
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import train
from checkpoint import verify
from checkpoint.manager import CheckpointManager
from configs.check import architecture
from configs.load import dump, load_config
from configs.schema import Checkpoint
from models import MODELS
from models.formats import torchtitan
from parallelisms.mesh import world
from tests import complex_llama
from tests.checkpoints import Attack, rewrite, saved_state
from tests.complex_llama import QKV
from tests.programs import PYTHON, finished
from tests.ranks import run_ranks
from tests.runs import MESHES, run, series, tiny_run
from tools import convert, new_checkpoint, to_dcp
from tools import dcp as dcp_folder
from training.optim import learning_rate, set_learning_rate

SMALL = (
    "--model.dim=42 --model.n_layers=3 --model.n_heads=6 --model.n_kv_heads=2 --model.head_dim=14 "
    "--model.hidden_dim=54 --model.vocab_size=263 --data.tokenizer=bytes --training.seq_len=16 "
    "--training.param_dtype=float32 --training.local_batch_size=1 --training.global_batch_size=4 "
    "--optimizer.eps=1e-4"
).split()
EXPERTS = "--model.n_experts=8 --model.experts_per_token=2 --model.expert_dim=10".split()
LATENT = [option for option in SMALL if "kv_heads" not in option and "head_dim" not in option]
LATENT += ["--model.family=deepseek_v3", "--model.flavor=debug", "--model.max_seq_len=64"]
MODELS_HERE = {  # name -> options
    "llama": SMALL,
    "llama tied": [*SMALL, "--model.flavor=1B"],
    "qwen3": [*SMALL, "--model.family=qwen3"],
    "qwen3 tied": [*SMALL, "--model.family=qwen3", "--model.tied_embeddings=true"],
    "qwen3 experts": [*SMALL, *EXPERTS, "--model.family=qwen3", "--model.flavor=debug_moe"],
    "deepseek_v3": [*LATENT, *EXPERTS],
    "deepseek_v3 q_rank": [*LATENT, *EXPERTS, "--model.q_rank=22"],
}


def converted(*argv: object) -> tuple[int, str]:
    """Return the exit code of `tools.convert`, and what it printed as an error."""
    said = StringIO()
    with redirect_stderr(said):
        code = convert.main([str(word) for word in argv])
    return code, said.getvalue()


def write_checkpoint(options: list[str], out: Path, step: int = 7) -> dict[str, Tensor]:
    """Write a checkpoint of AdamW with random numbers in every tensor, and return these."""
    cfg = load_config(options)
    family = MODELS[cfg.model.family]
    args = family.Args(**architecture(cfg.model))
    generator = torch.Generator().manual_seed(3)
    tensors = {}
    for name, shape in new_checkpoint.shapes(family.name, args).items():
        tensors[f"model.{name}"] = torch.randn(shape, generator=generator)
    for name in new_checkpoint.trained(family.name, args):
        for key in ("exp_avg", "exp_avg_sq"):
            shape = tensors[f"model.{name}"].shape
            average = torch.rand(shape, generator=generator)
            tensors[f"optimizer.{name}.{key}"] = average
        tensors[f"optimizer.{name}.step"] = torch.tensor(float(step))
    facts = {
        "family": family.name,
        "config": dump(cfg),
        "seq_len": cfg.training.seq_len,
        "must_match": {"model": asdict(args)},
    }
    new_checkpoint.write(
        out,
        out,
        {name: tensor.to("meta") for name, tensor in tensors.items()},
        tensors.__getitem__,
        facts,
        step=step,
        progress={"step": step, "samples": 4 * step, "data": {"anything": 1}},
        optimizer="AdamW",
        hyperparameters={"group 0": {"eps": 1e-4}},
    )
    return tensors


def contents(run_folder: Path) -> tuple[dict, dict[str, Tensor]]:
    """Manifest and tensors of the newest checkpoint."""
    return verify.verify(verify.newest(run_folder)), saved_state(run_folder)


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(
        a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]) for name in a
    )


def toml_of(options: list[str], place: Path) -> Path:
    path = place / "config.toml"
    path.write_text(dump(load_config(options)))
    return path


# --------------------------------------------------------------------------------------------------
# there and back


@pytest.mark.parametrize(
    "model, names",
    [
        *((model, "torchtitan") for model in MODELS_HERE),
        ("llama tied", "plumbline"),
        ("qwen3 experts", "torchtitan-unfused"),
    ],
)
def test_there_and_back(model, names, tmp_path):
    """Every tensor bitwise, and the step; of our own folders the whole record."""
    tensors = write_checkpoint(MODELS_HERE[model], tmp_path / "run")
    folder, back = tmp_path / "dcp", tmp_path / "back"
    assert converted("to-dcp", tmp_path / "run", folder, "--names", names) == (0, "")
    assert sorted(path.name for path in folder.iterdir()) == [".metadata", "__0_0.distcp"]
    config = []
    if names != "plumbline":
        config = ["--config", toml_of(MODELS_HERE[model], tmp_path)]
    assert converted("from-dcp", folder, back, *config) == (0, "")
    before, _ = contents(tmp_path / "run")
    after, found = contents(back)
    assert same(tensors, found)
    recorded = ["step", "optimizer"]
    if names == "plumbline":
        recorded += ["progress", "facts", "hyperparameters"]
    assert [after[key] for key in recorded] == [before[key] for key in recorded]
    assert after["facts"]["must_match"]["model"] == before["facts"]["must_match"]["model"]


# What a layer with experts is called in TorchTitan's own state dict (state_dict() of its models).
OF_EXPERTS = {
    "0.3": [
        "expert_bias_E",
        "routed_experts.inner_experts.w1_EFD",
        "routed_experts.inner_experts.w2_EDF",
        "routed_experts.inner_experts.w3_EFD",
        "router.gate.weight",
    ],
    "0.2": ["expert_bias", "experts.w1", "experts.w2", "experts.w3", "router.gate.weight"],
}
ATTENTION = {
    ("qwen3 experts", "0.3"): ["qkv_linear.wq", "qkv_linear.wk", "qkv_linear.wv", "wo"],
    ("qwen3 experts", "0.2"): ["wq", "wk", "wv", "wo"],
    ("deepseek_v3", "0.3"): ["wq", "wkv_a", "kv_norm", "wkv_b", "wo"],
    ("deepseek_v3 q_rank", "0.2"): ["wq_a", "q_norm", "wq_b", "wkv_a", "kv_norm", "wkv_b", "wo"],
}


@pytest.mark.parametrize(("model", "release"), ATTENTION)
def test_names_are_those_of_their_modules(model, release):
    cfg = load_config(MODELS_HERE[model])
    family = MODELS[cfg.model.family]
    args = family.Args(**architecture(cfg.model))
    shapes = new_checkpoint.shapes(family.name, args)
    found = set(torchtitan.names(shapes, args, release).values())
    found |= set(torchtitan.biases_that_ours_lacks(shapes, args, release))
    wanted = [f"moe.{name}" for name in OF_EXPERTS[release]]
    if family.name == "deepseek_v3":
        wanted += [f"moe.shared_experts.{name}.weight" for name in ("w1", "w2", "w3")]
    attention = ATTENTION[model, release]
    if family.name == "qwen3":
        attention = [*attention, "q_norm", "k_norm"]
    wanted += [f"attention.{name}.weight" for name in attention]
    wanted += ["attention_norm.weight", "ffn_norm.weight"]
    of_layer = {name for name in found if name.startswith("layers.1.")}
    assert of_layer == {f"layers.1.{name}" for name in wanted}
    output = {"0.3": "lm_head.weight", "0.2": "output.weight"}[release]
    ends = {name for name in found if not name.startswith("layers.")}
    assert ends == {"tok_embeddings.weight", "norm.weight", output}


def test_a_tensor_in_the_wrong_order_would_be_seen(tmp_path, monkeypatch):
    """The negative control: with rotary pairs left as they are on the way back, wq is another."""
    tensors = write_checkpoint(SMALL, tmp_path / "run")
    assert converted("to-dcp", tmp_path / "run", tmp_path / "dcp", "--names", "torchtitan")[0] == 0
    monkeypatch.setattr(torchtitan, "half_rotation", lambda weight, heads: weight)
    config = toml_of(SMALL, tmp_path)
    assert converted("from-dcp", tmp_path / "dcp", tmp_path / "back", "--config", config)[0] == 0
    _, found = contents(tmp_path / "back")
    wrong = {name.split(".")[-2] for name in found if not torch.equal(found[name], tensors[name])}
    kept = ("exp_avg", "exp_avg_sq", "step")
    assert {word for word in wrong if word not in kept} <= {"wq", "wk", "weight"}
    assert not torch.equal(
        found["model.layers.0.attention.wq.weight"], tensors["model.layers.0.attention.wq.weight"]
    )


def test_a_model_without_an_optimizer(tmp_path):
    """Such a folder comes from Hugging Face weights, and from TorchTitan's last step."""
    tensors = write_checkpoint(SMALL, tmp_path / "run")
    folder = tmp_path / "dcp"
    assert converted("to-dcp", tmp_path / "run", folder, "--names", "torchtitan") == (0, "")
    whole: dict[str, Any] = {}
    for name, stored in dcp_folder.Folder(folder).tensors.items():
        if not name.startswith("optimizer."):
            whole[name] = torch.empty(stored.shape)
    dcp.load(whole, checkpoint_id=folder)
    dcp.save(whole, checkpoint_id=tmp_path / "model")
    config = toml_of(SMALL, tmp_path)
    assert converted("from-dcp", tmp_path / "model", tmp_path / "a", "--config", config) == (0, "")
    manifest, found = contents(tmp_path / "a")
    assert (manifest["step"], manifest["optimizer"]) == (0, "none")
    assert same(found, {name: tensors[name] for name in tensors if name.startswith("model.")})
    for names in "plumbline", "torchtitan":
        out = tmp_path / names
        assert converted("to-dcp", tmp_path / "a", out, "--names", names) == (0, "")
        arguments = ["--config", config] if names == "torchtitan" else []
        assert converted("from-dcp", out, tmp_path / f"b-{names}", *arguments) == (0, "")
        assert same(contents(tmp_path / f"b-{names}")[1], found)


def test_steps_of_a_run(tmp_path):
    for step in 3, 7:
        write_checkpoint(SMALL, tmp_path / f"{step}", step)
    shutil.move(tmp_path / "3/checkpoints/step-00000003", tmp_path / "7/checkpoints")
    for step, options in (7, []), (3, ["--step", "3"]):
        out = tmp_path / f"dcp-{step}"
        assert converted("to-dcp", tmp_path / "7", out, *options) == (0, "")
        assert dcp_folder.Folder(out).value("step") == step
    code, said = converted("to-dcp", tmp_path / "7", tmp_path / "out", "--step", "4")
    assert code == 2 and "has no checkpoint of step 4: step-00000007 is its newest" in said


# --------------------------------------------------------------------------------------------------
# PyTorch alone

BY_PYTORCH_ALONE = """
import sys, torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

folder, shapes, out = sys.argv[1:]
state = {"model": {name: torch.empty(shape) for name, shape in torch.load(shapes).items()}}
state |= {"step": 0, "optimizer": {"norm.weight": {"exp_avg_sq": torch.empty(42)}}}
dcp.load(state, checkpoint_id=folder)
torch.save(state, out + ".loaded")
dcp_to_torch_save(folder, out + ".whole")
ours = {"tools", "checkpoint", "models", "configs", "train"} & sys.modules.keys()
assert not ours, ours
"""


@pytest.mark.slow
def test_pytorch_alone_reads_it(tmp_path):
    """dcp.load, and format_utils, in a process that does not know us."""
    tensors = write_checkpoint(SMALL, tmp_path / "run")
    assert converted("to-dcp", tmp_path / "run", tmp_path / "dcp") == (0, "")
    model = {}
    for name, tensor in tensors.items():
        if name.startswith("model."):
            model[name.removeprefix("model.")] = tensor
    torch.save({name: list(tensor.shape) for name, tensor in model.items()}, tmp_path / "shapes")
    (tmp_path / "alone.py").write_text(BY_PYTORCH_ALONE)
    done = finished(PYTHON, "alone.py", "dcp", "shapes", "out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    loaded = torch.load(tmp_path / "out.loaded")
    assert same(loaded["model"], model) and loaded["step"] == 7
    assert torch.equal(
        loaded["optimizer"]["norm.weight"]["exp_avg_sq"],
        tensors["optimizer.norm.weight.exp_avg_sq"],
    )
    whole = torch.load(tmp_path / "out.whole")
    assert same(whole["model"], model)
    moments = {
        f"optimizer.{name}.{key}": tensor
        for name, kept in whole["optimizer"].items()
        for key, tensor in kept.items()
    }
    assert same(
        moments,
        {
            name: tensors[name]
            for name in tensors
            if name not in whole["model"] and name.startswith("optimizer.")
        },
    )


# --------------------------------------------------------------------------------------------------
# a run goes on


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple[Path, list[str]]:
    """Return the folder of an uninterrupted run, and its options."""
    place = tmp_path_factory.mktemp("whole")
    options = tiny_run(place)
    assert run_ranks(1, run, options, place / "run") == [(0, "")]
    return place / "run", options


def test_a_run_goes_on_from_its_folder_on_another_mesh(whole, tmp_path):
    """The run goes out from one rank and into two, in the middle, with the losses of the
    uninterrupted run."""
    folder, options = whole
    again = tmp_path / "again"
    assert converted("to-dcp", folder, tmp_path / "dcp", "--step", "10") == (0, "")
    assert converted("from-dcp", tmp_path / "dcp", again) == (0, "")
    ranks, more, _ = MESHES["fsdp2"]
    assert run_ranks(ranks, run, [*options, *more], again) == [(0, "")] * ranks
    wanted = series(folder)
    found = series(again)
    assert min(found) == 11 and max(found) == max(wanted) == 16
    assert all(abs(found[step] - wanted[step]) < 1e-5 for step in found)


@pytest.mark.slow
def test_a_run_goes_on_from_torchtitans_with_data_of_its_own(whole, tmp_path):
    """Nothing says which data that run has seen: refused, until it is allowed."""
    folder, options = whole
    names = ["--names", "torchtitan", "--step", "10"]
    assert converted("to-dcp", folder, tmp_path / "dcp", *names) == (0, "")
    again = tmp_path / "again"
    config = folder / "config.toml"
    assert converted("from-dcp", tmp_path / "dcp", again, "--config", config) == (0, "")
    ((code, said),) = run_ranks(1, run, options, again)
    assert code == 2 and "does not say which data it has seen" in said
    assert "data.allow_splice = true" in said
    assert run_ranks(1, run, [*options, "--data.allow_splice=true"], again) == [(0, "")]
    found = series(again)
    assert min(found) == 11 and found[11] < 0.9 * series(folder)[1]


# TorchTitan's Llama ------------------------------------------------------------------------------

HEADS, KV_HEADS, WIDTH = 6, 2, 14
LR = 0.01


def first_weights() -> dict[str, Tensor]:
    """Return a model of the sizes SMALL, under the names of 0.3."""
    generator = torch.Generator().manual_seed(5)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * 0.2

    weights = {"tok_embeddings.weight": normal(263, 42)}
    for layer in range(3):
        prefix = f"layers.{layer}."
        rows = (HEADS + 2 * KV_HEADS) * WIDTH
        weights[f"{prefix}attention.qkv_linear.wqkv.weight"] = normal(rows, 42)
        weights[f"{prefix}attention.wo.weight"] = normal(42, HEADS * WIDTH)
        for name, shape in {"w1": (54, 42), "w2": (42, 54), "w3": (54, 42)}.items():
            weights[f"{prefix}feed_forward.{name}.weight"] = normal(*shape)
        for name in "attention_norm", "ffn_norm":
            weights[f"{prefix}{name}.weight"] = 1 + normal(42)
    weights["norm.weight"] = 1 + normal(42)
    weights["lm_head.weight"] = normal(263, 42)
    return weights


def loss_of(weights: dict[str, Tensor], tokens: Tensor) -> Tensor:
    """tokens [B, T + 1]"""
    logits = complex_llama.logits(weights, tokens[:, :-1], (KV_HEADS, WIDTH))
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def batch_of(step: int) -> Tensor:
    return torch.randint(0, 263, (4, 17), generator=torch.Generator().manual_seed(step))


def save_two_steps(folder: Path, sharded: bool) -> list[float]:
    """Train five steps with AdamW, and save after the second as TorchTitan does; the losses."""
    cfg = load_config(SMALL).optimizer
    weights = {name: w.requires_grad_() for name, w in first_weights().items()}
    groups = [
        {"params": [w for n, w in weights.items() if "norm" in n], "weight_decay": 0.0},
        {"params": [w for n, w in weights.items() if "norm" not in n]},
    ]
    optimizer = torch.optim.AdamW(
        groups, lr=LR, betas=cfg.betas, eps=cfg.eps, weight_decay=cfg.weight_decay, fused=True
    )
    losses = []
    for step in range(5):
        loss = loss_of(weights, batch_of(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step == 1:
            dcp.save(as_saved(weights, optimizer, sharded), checkpoint_id=folder)
    return losses


def as_saved(weights: dict[str, Tensor], optimizer: torch.optim.Optimizer, sharded: bool) -> dict:
    """sharded: every tensor over the rows, on this rank's world."""
    flat: dict[str, Any] = {}
    for name, weight in weights.items():
        for key, value in optimizer.state[weight].items():
            flat[f"state.{name}.{key}"] = value
        flat[f"param_groups.{name}.lr"] = LR
        flat[f"param_groups.{name}.betas"] = (0.9, 0.95)
    model = {}
    for name, weight in weights.items():
        if ".wqkv." not in name:
            model[name] = weight.detach()
            continue
        parts = weight.detach().view(KV_HEADS, -1, WIDTH, 42)
        split = parts.split([HEADS // KV_HEADS, 1, 1], 1)
        for part, rows in zip(QKV, split, strict=True):
            model[name.replace("wqkv", part)] = rows.reshape(-1, 42).clone()
    if sharded:
        mesh = init_device_mesh("cpu", (world().size,))
        for table in model, flat:
            for name, value in table.items():
                if isinstance(value, Tensor) and value.ndim:
                    table[name] = distribute_tensor(value, mesh, [Shard(0)])
    return model | {
        "optimizer": flat,
        "lr_scheduler": {"last_epoch": 2},
        "train_state": {"step": 2, "ntokens_seen": 128},
        "dataloader": {"dp_rank_0": b"where it is", "world_size": 1},
    }


def losses_from(folder: Path, options: list[str], steps: range) -> list[float]:
    """Return the losses of these steps on this mesh, from the checkpoint in a run's folder; the
    step after them is saved there."""
    here = world()
    cfg = load_config([*options, "--training.max_norm=0"], here.size, here.local_size)
    job = train.build(cfg)
    must_match = {"model": asdict(job.args)}
    facts = {"family": cfg.model.family, "config": dump(cfg), "must_match": must_match}
    checkpoints = CheckpointManager(Checkpoint(), folder / "checkpoints", job.mesh, facts)
    assert checkpoints.load(job.model, job.optimizer) == {"step": steps.start}
    set_learning_rate(job.optimizer, LR)
    losses = []
    for step in steps:
        rows = batch_of(step).chunk(here.size)[here.rank][:, None]  # [A, 1, T + 1]
        batch = {"tokens": rows[..., :-1].contiguous(), "labels": rows[..., 1:].contiguous()}
        losses.append(train.train_step(job, batch).loss)
    checkpoints.save(steps.stop, job.model, job.optimizer, {"step": steps.stop})
    checkpoints.close()
    return losses


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_torchtitans_llama_goes_on_here(ranks, tmp_path):
    """Two steps of AdamW there, and the next three here on two ranks: the same losses to 1e-5."""
    folder = tmp_path / "step-2"
    if ranks == 1:
        losses = save_two_steps(folder, sharded=False)
    else:
        losses = run_ranks(ranks, save_two_steps, folder, True)[0]
        assert len(list(folder.glob("*.distcp"))) == ranks
    config = toml_of(SMALL, tmp_path)
    code, said = converted("from-dcp", folder, tmp_path / "run")
    assert code == 2 and "describe it with --config" in said
    assert converted("from-dcp", folder, tmp_path / "run", "--config", config) == (0, "")
    found = run_ranks(2, losses_from, tmp_path / "run", SMALL, range(2, 5))
    for of_rank in found:
        assert of_rank == pytest.approx(losses[2:], abs=1e-5)
    assert abs(losses[2] - losses[3]) > 1e-3, "the losses of different steps differ"


@pytest.mark.parametrize("warmup", ["warmup_fraction=0.1", "warmup_steps=10", "warmup_steps=0"])
def test_the_learning_rate_that_is_written_is_that_of_the_next_step(warmup):
    """A checkpoint holds the options as they were given: a warm-up as a fraction, too."""
    cfg = load_config(
        ["configs/llama_debug.toml", "--training.steps=100", f"--lr_schedule.{warmup}"]
    )
    family, args = train.architecture(cfg)
    trained = {"layers.0.attention.wq.weight": (256, 256)}
    for step in 0, 1, 9, 10, 99:
        manifest = {"step": step, "facts": {"config": dump(cfg)}}
        (options,) = to_dcp.param_groups(Path("x"), manifest, family, args, trained).values()
        want = learning_rate(step, cfg)
        assert options["lr"] == want, (step, options["lr"], want)


def test_rates_that_are_transferred_or_multiplied_are_written():
    cfg = load_config(
        [
            "configs/llama_debug.toml",
            "--model.width_base=128",
            '--optimizer.lr_multipliers=[["output.weight", 3]]',
        ]
    )
    family, args = train.architecture(cfg)
    trained = {"layers.0.attention.wq.weight": (256, 256), "output.weight": (4096, 256)}
    manifest = {"step": 0, "facts": {"config": dump(cfg)}}
    wq, output = to_dcp.param_groups(Path("x"), manifest, family, args, trained).values()
    assert wq["initial_lr"] == cfg.optimizer.lr / 2
    assert output["initial_lr"] == cfg.optimizer.lr / 2 * 3
    assert wq["weight_decay"] == cfg.optimizer.weight_decay * 2
    assert wq["eps"] == cfg.optimizer.eps / 2


# TorchTitan itself -------------------------------------------------------------------------------

OF_TITANS = [*SMALL[5:], "--model.dim=256", "--model.n_heads=16", "--model.vocab_size=2048"]
DEBUG_MODELS = {  # in our words
    "llama3": [
        *OF_TITANS,
        "--model.flavor=8B",
        "--model.n_layers=6",
        "--model.n_kv_heads=16",
        "--model.head_dim=16",
        "--model.hidden_dim=768",
    ],
    "qwen3": [
        *OF_TITANS,
        "--model.family=qwen3",
        "--model.n_layers=8",
        "--model.n_kv_heads=8",
        "--model.head_dim=128",
        "--model.hidden_dim=3072",
        "--model.rope_theta=1000000.0",
        "--model.tied_embeddings=true",
    ],
}


def titans_losses(name: str, folder: Path, steps: range, save: int) -> list[float]:
    """Return the losses of these steps of TorchTitan's debug model, which it begins or loads, and
    saves after step `save`: with its model, its optimizers and its CheckpointManager."""
    from torchtitan.components.checkpoint import CheckpointManager as TheirManager
    from torchtitan.components.optimizer import (
        LRSchedulersContainer,
        OptimizersContainer,
        ParamGroupConfig,
    )
    from torchtitan.models.common.attention import ScaledDotProductAttention

    family = importlib.import_module(f"torchtitan.models.{name}")
    config = getattr(family, f"{name}_configs")["debugmodel"]("flex")
    for layer in config.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    torch.manual_seed(0)
    model = config.build()
    model.init_states(buffer_device=torch.device("cpu"))
    cfg = load_config(DEBUG_MODELS[name]).optimizer
    options = {"lr": LR, "betas": cfg.betas, "eps": cfg.eps}
    groups = [
        ParamGroupConfig(
            pattern=pattern,
            optimizer_name="AdamW",
            optimizer_kwargs=options | {"weight_decay": decay},
        )
        for pattern, decay in (("norm", 0.0), (".*", cfg.weight_decay))
    ]
    optimizers = OptimizersContainer.Config(implementation="fused", param_groups=groups)
    optimizers = optimizers.build(model_parts=[model])
    schedule = LRSchedulersContainer.Config().build(optimizers=optimizers, training_steps=20)
    progress = Counted()
    manager = TheirManager.Config(enable=True, interval=1, exclude_from_loading=["dataloader"])
    manager = manager.build(
        dataloader=Counted(),
        model_parts=[model],
        optimizers=optimizers,
        lr_schedulers=schedule,
        states={"train_state": progress},
        sd_adapter=None,
        base_folder=str(folder),
    )
    if steps.start:
        assert manager.load() and progress.step == steps.start
    losses = []
    for step in steps:
        tokens = batch_of(step)
        positions = torch.arange(16).expand(4, 16)
        logits = model(tokens[:, :-1], positions)
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizers.zero_grad()
        loss.backward()
        for group in optimizers.optimizers[0].param_groups:
            group["lr"] = LR
        optimizers.step()
        losses.append(loss.item())
        progress.step = step + 1
        if step + 1 == save:
            manager.save(save)
    manager.close()
    return losses


class Counted(Stateful):
    """TorchTitan's train_state, and its dataloader's state."""

    step = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step, "ntokens_seen": 64 * self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


@pytest.mark.skipif(
    importlib.util.find_spec("torchtitan") is None, reason="pip install torchtitan==0.3.0"
)
@pytest.mark.parametrize("name", DEBUG_MODELS)
def test_torchtitan_itself_moves_here_and_back(name, tmp_path):
    """Its next three losses are ours, and our next three are its, to 1e-5."""
    options = DEBUG_MODELS[name]
    (theirs,) = run_ranks(1, titans_losses, name, tmp_path / "theirs", range(5), 2)
    config = ["--config", toml_of(options, tmp_path)]
    folder = tmp_path / "theirs" / "checkpoint" / "step-2"
    assert converted("from-dcp", folder, tmp_path / "run", *config) == (0, "")
    ours = run_ranks(2, losses_from, tmp_path / "run", options, range(2, 5))[0]
    assert ours == pytest.approx(theirs[2:], abs=1e-5)
    back = tmp_path / "back"
    arguments = [back / "checkpoint" / "step-5", "--names", "torchtitan"]
    assert converted("to-dcp", tmp_path / "run", *arguments) == (0, "")
    (theirs,) = run_ranks(1, titans_losses, name, back, range(5, 8), 0)
    ours = run_ranks(2, losses_from, tmp_path / "run", options, range(5, 8))[0]
    assert theirs == pytest.approx(ours, abs=1e-5)


# --------------------------------------------------------------------------------------------------
# what is refused


def refused(folder: Path, place: Path, *more: object) -> str:
    """Return the sentence with which a folder is refused; nothing is left of what would have been
    made."""
    code, said = converted("from-dcp", folder, place / "out", *more)
    assert code == 2 and said.count("\n") == 1, said
    left = [path for path in (place / "out").rglob("*") if path.is_file()]
    assert not left and not list((place / "out").glob("checkpoints/*"))
    return said


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """Return a folder with our names, and `theirs` with TorchTitan's. Copy it before you damage
    it."""
    place = tmp_path_factory.mktemp("saved")
    write_checkpoint(SMALL, place / "run")
    toml_of(SMALL, place)
    for name, names in {"ours": "plumbline", "theirs": "torchtitan"}.items():
        assert converted("to-dcp", place / "run", place / name, "--names", names) == (0, "")
    return place


class Getattr(Attack):
    def __reduce__(self):
        return getattr, (Path, "mkdir")


class Inside(Attack):
    """Runs when an admitted class is given it."""

    def __reduce__(self):
        return of_dcp.StorageMeta, (Attack(self.marker),)


@pytest.mark.parametrize(
    ("kind", "words"),
    [(Attack, "names posix.mkdir"), (Inside, "names posix.mkdir"), (Getattr, "names pathlib.Path")],
)
def test_a_hostile_pickle_is_named_and_not_run(kind, words, saved, tmp_path):
    folder = Path(shutil.copytree(saved / "ours", tmp_path / "dcp"))
    marker = tmp_path / "marker"
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.planner_data = kind(marker)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    said = refused(folder, tmp_path)
    assert words in said and "none of DCP's classes and could run a program" in said
    assert not marker.exists()
    if kind is not Getattr:
        with (folder / ".metadata").open("rb") as stream:
            pickle.load(stream)
        assert marker.is_dir(), "the control: Python's own unpickler runs it"


@pytest.mark.parametrize(
    "opcodes",
    [
        # getattr(Metadata, "__init__").__globals__: a name with dots
        b"\x80\x04\x8c-torch.distributed.checkpoint.metadata\x8c\x19Metadata.__init__.__globals__\x93.",
        b"cbuiltins\neval\n(S'1'\ntR.",
        b"cbuiltins\ngetattr\n(cbuiltins\ngetattr\nS'__call__'\ntR(tR.",  # a record has no code
        b"Pany\n.",  # an object by its own reference
        b"no pickle",
        pickle.dumps(of_dcp.StorageMeta()),
        pickle.dumps(of_dcp.Metadata({"a": 3}, None, {})),
        pickle.dumps(of_dcp.Metadata({"a": of_dcp.BytesStorageMetadata()}, None, {})),
    ],
)
def test_what_is_no_metadata_is_refused(opcodes, tmp_path):
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").write_bytes(opcodes)
    assert str(tmp_path / "dcp" / ".metadata") in refused(tmp_path / "dcp", tmp_path)


def test_an_archive_runs_nothing_either(saved, tmp_path):
    folder = Path(shutil.copytree(saved / "ours", tmp_path / "dcp"))
    marker = tmp_path / "marker"
    move_value(folder, "plumbline", Attack(marker))
    said = refused(folder, tmp_path)
    assert "plumbline is damaged: Weights only load failed" in said and not marker.exists()
    torch.load(folder / "plumbline.distcp", weights_only=False)
    assert marker.is_dir(), "the control: torch.load runs it without weights_only"


def change(folder: Path, how: Callable[[Any], object]) -> None:
    """Change DCP's Metadata of a folder."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    how(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def place_of(name: str, file: str, length: int = 1 << 20) -> Callable[[Any], None]:
    """Make a value's location another file, so many bytes from its beginning."""

    def how(metadata: Any) -> None:
        for index, info in metadata.storage_data.items():
            if index.fqn == name:
                info.relative_path, info.offset, info.length = file, 0, length

    return how


def move_value(folder: Path, name: str, value: Any) -> None:
    """Move a value into a separate file."""
    path = folder / f"{name}.distcp"
    torch.save(value, path)
    change(folder, place_of(name, path.name, path.stat().st_size))


def resized(name: str, shape: list[int]) -> Callable[[Any], None]:
    def how(metadata: Any) -> None:
        stored = metadata.state_dict_metadata[name]
        stored.size = stored.chunks[0].sizes = torch.Size(shape)

    return how


def moved(name: str, to: str) -> Callable[[Any], None]:
    """Give a tensor another name."""

    def how(metadata: Any) -> None:
        metadata.state_dict_metadata[to] = metadata.state_dict_metadata.pop(name)
        for index in list(metadata.storage_data):
            if index.fqn == name:
                info = metadata.storage_data.pop(index)
                metadata.storage_data[of_dcp.MetadataIndex(to, index.offset)] = info

    return how


def outside(metadata: Any) -> None:
    metadata.state_dict_metadata["model.norm.weight"].chunks[0].offsets = torch.Size([1])
    for index in list(metadata.storage_data):
        if index.fqn == "model.norm.weight":
            info = metadata.storage_data[index]
            metadata.storage_data[of_dcp.MetadataIndex(index.fqn, [1])] = info


def half(metadata: Any) -> None:
    metadata.state_dict_metadata["model.norm.weight"].chunks[0].sizes = torch.Size([21])


def twice(metadata: Any) -> None:
    stored = metadata.state_dict_metadata["model.norm.weight"]
    stored.chunks[0].sizes = torch.Size([21])
    stored.chunks = stored.chunks * 2


def emptied(metadata: Any) -> None:
    metadata.storage_data.clear()


def transformed(metadata: Any) -> None:
    next(iter(metadata.storage_data.values())).transform_descriptors = ["zstd"]


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (resized("model.norm.weight", [41]), "model.norm.weight has shape [41], not [42]"),
        (
            moved("model.norm.weight", "model.norm.bias"),
            "model.norm.weight is missing; model.norm.b",
        ),
        (outside, "model.norm.weight has a chunk outside of its shape [42]"),
        (half, "the chunks of model.norm.weight do not have the elements of its shape [42]"),
        (twice, "model.norm.weight has another shape there"),
        (transformed, "it is transformed by ['zstd']"),
        (place_of("step", "../../evil"), "names '../../evil', which is not a file in its folder"),
        (place_of("model.norm.weight", "gone.distcp"), "gone.distcp cannot be read: No such file"),
        (place_of("model.norm.weight", "__0_0.distcp"), "model.norm.weight is damaged: "),
        (emptied, ".metadata is not DCP's: "),
    ],
)
def test_a_folder_that_does_not_fit_is_refused(how, words, saved, tmp_path):
    folder = Path(shutil.copytree(saved / "ours", tmp_path / "dcp"))
    change(folder, how)
    assert words in refused(folder, tmp_path)


def test_a_gap_between_chunks_is_seen(saved, tmp_path):
    """Two chunks with the elements of the whole, both at its beginning."""
    folder = Path(shutil.copytree(saved / "ours", tmp_path / "dcp"))
    move_value(folder, "model.norm.weight", torch.ones(21))
    change(folder, twice)
    assert "model.norm.weight has values that are not finite" in refused(folder, tmp_path)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (resized("norm.weight", [41]), "norm.weight has shape [41], not [42]"),
        (moved("norm.weight", "norm.bias"), "norm.weight is missing; norm.bias is not a tensor"),
        (
            moved("optimizer.state.norm.weight.step", "optimizer.state.norm.weight.count"),
            "optimizer.state.norm.weight.step is missing; optimizer.state.norm.weight.count is not",
        ),
        (moved("train_state.step", "train_state.other"), "has no train_state.step"),
    ],
)
def test_a_folder_of_torchtitans_that_does_not_fit_is_refused(how, words, saved, tmp_path):
    folder = Path(shutil.copytree(saved / "theirs", tmp_path / "dcp"))
    change(folder, how)
    assert words in refused(folder, tmp_path, "--config", saved / "config.toml")


def test_other_refusals(saved, tmp_path):
    assert "describe it with --config" in refused(saved / "theirs", tmp_path)
    assert "has no .metadata" in refused(saved / "run", tmp_path)
    (tmp_path / "runs").mkdir()
    shutil.copytree(saved / "theirs", tmp_path / "runs" / "step-2")
    said = refused(tmp_path / "runs", tmp_path)
    assert f"give one checkpoint, such as {tmp_path / 'runs' / 'step-2'}" in said
    (tmp_path / "olmo2.toml").write_text('[model]\nfamily = "olmo2"\n')
    said = refused(saved / "theirs", tmp_path, "--config", tmp_path / "olmo2.toml")
    assert "of the family olmo2 TorchTitan's names are not known" in said
    (tmp_path / "mtp.toml").write_text('[model]\nfamily = "deepseek_v3"\nmtp_depth = 1\n')
    said = refused(saved / "theirs", tmp_path, "--config", tmp_path / "mtp.toml")
    assert "TorchTitan's names of the layers of model.mtp_depth = 1 are not known" in said
    shutil.copytree(saved / "theirs", tmp_path / "there")
    code, said = converted("to-dcp", saved / "run", tmp_path / "there")
    assert code == 2 and "exists already" in said
    code, said = converted("from-dcp", saved / "ours", saved / "run")
    assert code == 2 and "holds checkpoints already" in said


@pytest.mark.parametrize("names", ["plumbline", "torchtitan"])
def test_a_full_disk_leaves_nothing(names, saved, tmp_path, monkeypatch):
    """A real ENOSPC, from /dev/full."""
    real = open

    def full(path: object, mode: str = "r"):
        return real("/dev/full", "wb") if mode == "xb" else real(path, mode)

    monkeypatch.setattr(dcp_folder, "open", full, raising=False)
    code, said = converted("to-dcp", saved / "run", tmp_path / "out", "--names", names)
    assert code == 2 and "No space left on device" in said
    assert not list(tmp_path.iterdir())


def routers_bias(folder: Path, value: float) -> None:
    """Fill the biases of a folder with TorchTitan's names."""
    for key, stored in dcp_folder.Folder(folder).tensors.items():
        if key.endswith(".expert_bias_E"):
            move_value(folder, key, torch.full(stored.shape, value))


@pytest.mark.slow
def test_what_has_no_parameter_here_must_say_nothing(tmp_path):
    """Qwen3's mixtures have a bias there that is moved in training; a tied projection is a copy."""
    options = MODELS_HERE["qwen3 experts"]
    write_checkpoint(options, tmp_path / "run")
    folder = tmp_path / "dcp"
    assert converted("to-dcp", tmp_path / "run", folder, "--names", "torchtitan") == (0, "")
    config = toml_of(options, tmp_path)
    routers_bias(folder, 0.0)
    assert converted("from-dcp", folder, tmp_path / "back", "--config", config) == (0, "")
    routers_bias(folder, 0.1)
    said = refused(folder, tmp_path, "--config", config)
    assert "layers.0.moe.expert_bias_E is not 0" in said
    tied = MODELS_HERE["llama tied"]
    write_checkpoint(tied, tmp_path / "tied")
    folder = tmp_path / "tied-dcp"
    assert converted("to-dcp", tmp_path / "tied", folder, "--names", "torchtitan") == (0, "")
    move_value(folder, "lm_head.weight", torch.zeros(263, 42))
    config = toml_of(tied, tmp_path)
    said = refused(folder, tmp_path, "--config", config)
    assert "lm_head.weight differs from tok_embeddings.weight, and the model ties them" in said
    change(folder, resized("lm_head.weight", [1 << 40, 42]))
    said = refused(folder, tmp_path, "--config", config)
    assert "lm_head.weight has shape [1099511627776, 42], not [263, 42]" in said


def test_muon_has_no_names_there(saved, tmp_path):
    run_folder = Path(shutil.copytree(saved / "run", tmp_path / "run"))
    rewrite(verify.newest(run_folder), optimizer="Muon")
    code, said = converted("to-dcp", run_folder, tmp_path / "out", "--names", "torchtitan")
    assert code == 2 and "only AdamW's has TorchTitan's names" in said
    assert converted("to-dcp", run_folder, tmp_path / "out") == (0, "")


@pytest.mark.parametrize(("old", "new"), convert.RETIRED.items())
def test_an_old_name_answers_with_the_new_one(old, new, tmp_path):
    assert new in convert.COMMANDS and old not in convert.COMMANDS
    code, said = converted(old, tmp_path, tmp_path / "out")
    assert (code, said) == (2, f"{old} is called {new} now, with the same arguments\n")
    assert not (tmp_path / "out").exists()
