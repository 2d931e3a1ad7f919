"""Adapters: the formula, every mesh against one plain process, checkpoints, and what is refused."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.utils.flop_counter import FlopCounterMode

import train
from checkpoint import adapters, hf, verify
from configs.load import load_config
from configs.schema import InputError, Lora
from models import MODELS, lora
from parallelisms import lora as on_a_mesh
from parallelisms.mesh import world
from tests.parity import (
    BATCH,
    LORA_DENSE,
    LORA_MLA,
    LORA_OLMO2,
    LORA_OSS,
    OPTIONS,
    VOCAB,
    check,
    combination_of,
    compare,
    options_of_a_family,
    plain,
    trajectory,
)
from tests.ranks import run_ranks
from tests.runs import ADAMW, COMPILED, EXPERT_MESHES, run, series, tiny_run
from tests.runs import MESHES as ALL_MESHES
from tests.shapes import SHAPES
from tools import adapters as of_tools
from tools import convert, evaluate
from tools.parity import in_memory

ADAPTED = ["llama3", "qwen3 experts", "deepseek_v3", "olmo2", "gpt_oss", "gemma3"]


def lora_of(family) -> Lora:
    return Lora(rank=3, alpha=7.0, targets=family.numbers.layers)


# The formula ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", ADAPTED)
def test_a_model_with_adapters_is_the_model_of_the_merged_weights(shape):
    """Its output is that of W + scale B A, and with the gradient G of that weight, those of A and B
    are scale B^T G and scale G A^T."""
    family, args = SHAPES[shape]
    torch.manual_seed(0)
    whole, merged = family.build(args), family.build(args)
    options = lora_of(family)
    lora.add(whole, options)
    weights = dict(whole.named_parameters())
    with torch.no_grad():
        for weight in weights.values():
            weight.normal_(0, 0.2)
        for name, weight in merged.named_parameters():
            weight.copy_(weights[name])
            a, b = adapters_of(name, weights)
            if a is not None:
                weight += 7 / 3 * (b @ a)
    assert {n for n in weights if lora.is_adapter(n)} == weights.keys() - dict(
        merged.named_parameters()
    ).keys()
    tokens = torch.randint(args.vocab_size, (2, 11))
    outputs = []
    for model in whole, merged:
        logits = model(tokens, torch.arange(11))
        logits.square().mean().backward()
        outputs.append(logits.detach())
    assert off(*outputs) < 1e-5
    seen = 0
    for name, weight in merged.named_parameters():
        a, b = adapters_of(name, weights)
        if a is not None:
            assert off(a.grad, 7 / 3 * (b.mT @ weight.grad)) < 1e-5, name
            assert off(b.grad, 7 / 3 * (weight.grad @ a.mT)) < 1e-5, name
            seen += 1
    assert seen == sum(lora.is_adapter(name) for name in weights) / 2


@pytest.mark.parametrize("width", [48, 300])
def test_a_has_the_deviation_of_the_authors_code(width):
    """torch's kaiming_uniform_ with a = sqrt(5), by which peft fills A too."""
    family = MODELS["llama"]
    args = family.small(width)
    rows = lora.adapted(family, Lora(rank=4, targets=["wq", "w2"])).initial_values(args)
    found = {name: row for name, *row in rows if name.endswith("lora_a")}
    assert len(found) == 2
    for name, in_features in ("wq", args.dim), ("w2", args.hidden_dim):
        (row,) = (row for pattern, row in found.items() if f".{name}." in pattern)
        filled = torch.nn.init.kaiming_uniform_(torch.empty(2000, in_features), a=5**0.5)
        assert row == ["normal", pytest.approx(filled.std().item(), rel=0.02)]


def adapters_of(name: str, weights: dict) -> tuple:
    stem = name.removesuffix("weight") if name.endswith(".weight") else f"{name}_"
    return weights.get(f"{stem}lora_a"), weights.get(f"{stem}lora_b")


def off(seen: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((seen - wanted).norm() / wanted.norm()).item()


@pytest.mark.parametrize("shape", ADAPTED)
def test_a_familys_layers_and_counts_are_those_of_its_model(shape):
    family, args = SHAPES[shape]
    options = lora_of(family)
    with torch.device("meta"):
        model = family.build(args)
    lora.add(model, options)
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    trained = sum(size for name, size in sizes.items() if lora.is_adapter(name))
    numbers = lora.adapted(family, options)
    assert numbers.trained_parameters(args) == trained
    assert numbers.parameters(args) == family.parameters(args) + trained
    assert f"{trained:,} of the parameters are trained" in numbers.describe(args)
    layers = [model.layers[number] for number in model.layers]
    linear = {
        name.rpartition(".")[2]
        for layer in layers
        for name, module in layer.named_modules()
        if isinstance(module, torch.nn.Linear)
    }
    experts = {"w1", "w2", "w3"} if model.mixtures() else set()
    assert set(family.numbers.layers) == linear | experts


@pytest.mark.slow
def test_flops_are_those_of_a_step_without_gradients_of_frozen_weights():
    """All matmuls of a step, but for those that the formula names: the first block needs no gradient
    of its input."""
    family, args = SHAPES["llama3"]
    options = Lora(rank=3, targets=("wq", "w2"))
    torch.manual_seed(0)
    model = family.build(args)
    lora.add(model, options)
    on_a_mesh.freeze(model, options)
    with FlopCounterMode(display=False) as counter:
        model(torch.randint(args.vocab_size, (1, 13)), torch.arange(13)).sum().backward()
    matmuls = {op: n for op, n in counter.get_flop_counts()["Global"].items() if "mm" in str(op)}
    left_out = 2 * args.dim * (args.n_heads + 2 * args.n_kv_heads) * args.head_dim
    left_out += 2 * args.dim * 3
    per_token = lora.adapted(family, options).flops_per_token(args, 0)
    assert sum(matmuls.values()) == 13 * (per_token - left_out)
    of_attention = [f.flops_per_token(args, 9) for f in (family, lora.adapted(family, options))]
    assert of_attention[0] - family.flops_per_token(args, 0) == of_attention[1] - per_token


# Meshes ---------------------------------------------------------------------------------------------

ZBV = ["--parallelism.pipeline_schedule=zbv", "--model.n_layers=4"]
# These have one oracle for each model: its settings are the same.
CLIPPED = combination_of(clipping="in force", embeddings="tied")
KEPT = CLIPPED | {"checkpointing": "selective", "accumulation": "reduced once"}
RECOMPUTED = CLIPPED | {
    "checkpointing": "full",
    "weights": "always freed",
    "accumulation": "reduced each time",
}


def slowly(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.cap(300)
@pytest.mark.parametrize(
    "mesh, settings, more",
    [
        ("fsdp2", RECOMPUTED, LORA_DENSE),
        slowly("tp2", KEPT | {"dtype": "float64"}, LORA_DENSE + COMPILED),
        slowly("pp2", CLIPPED | {"accumulation": "reduced once"}, LORA_DENSE + ZBV),
        slowly("experts on ep2xtp2", CLIPPED, [*LORA_MLA, "--model.expert_dim=12"]),
        slowly("ep2", RECOMPUTED, LORA_OSS),
        slowly("cp2xtp2", KEPT, LORA_OLMO2),
    ],
)
def test_adapters_on_a_mesh_equal_the_plain_model(mesh, settings, more):
    check(mesh, [settings], more)


def test_frozen_weights_stay_as_they_are():
    """Bit by bit, a router's balancing bias too, after steps that move each adapter."""
    [seen] = run_ranks(1, trajectory, [*ADAMW, *LORA_MLA])
    moved = {n for n, value in seen["weights"].items() if (value != seen["init"][n]).any()}
    assert moved == {name for name in seen["weights"] if lora.is_adapter(name)} == set(seen["grad"])
    assert len(moved) == 2 * (4 * 3 + 3 * 3 + 2 * 3)  # attention, experts, shared and dense layers


# Negative controls: the comparison must see these.


def without_reduction(options: list[str], dp_size: int) -> dict:
    """A side of an adapter that is whole on every rank, whose gradient each takes for the sum."""

    def local(weight):
        return weight.to_local()  # its gradient has the placements of the weight

    on_a_mesh.local = local
    return trajectory(options, dp_size)


@pytest.mark.slow
def test_negative_control_a_gradient_that_is_not_reduced():
    ranks, options, dp_size = ALL_MESHES["tp2"]
    seen = run_ranks(ranks, without_reduction, [*ADAMW, *LORA_DENSE, *options], dp_size)[0]
    problems = compare("not reduced", seen, plain(*LORA_DENSE))
    for adapter in "wq.lora_a", "wo.lora_b", "w1.lora_a", "w2.lora_b":
        assert any(f"grad of layers.1.{kind}.{adapter}" in p for p in problems for kind in KINDS)
    assert not any("wq.lora_b off" in p for p in problems if "equal weights" in p)


KINDS = "attention", "feed_forward"


# Types of numbers -----------------------------------------------------------------------------------


def types_and_losses(options: list[str], dp_size: int) -> tuple[set, list[float]]:
    local = f"--training.local_batch_size={BATCH // dp_size}"
    cfg = load_config([*OPTIONS, local, *options], world().size, world().local_size)
    job = train.build(cfg)
    tokens = np.random.default_rng(0).integers(0, VOCAB, 4000).astype(np.uint16)
    batches = in_memory.batches(cfg, job.mesh, tokens)
    losses = [train.train_step(job, batches[step]).loss for step in range(3)]
    parameters = job.model.named_parameters()
    found = {(lora.is_adapter(name), p.requires_grad, p.dtype) for name, p in parameters}
    return found, losses


@pytest.mark.slow
def test_the_base_has_the_type_of_forward_and_adapters_have_float32_masters():
    options = [*ADAMW, *LORA_DENSE, "--training.param_dtype=bfloat16"]
    [one] = run_ranks(1, types_and_losses, options, 1)
    two = run_ranks(2, types_and_losses, options, 2)[0]
    offloaded = [*options, "--parallelism.cpu_offload=true"]
    [on_cpu] = run_ranks(1, types_and_losses, offloaded, 1)
    for found, losses in one, two, on_cpu:
        assert found == {(False, False, torch.bfloat16), (True, True, torch.float32)}
        assert losses == pytest.approx(one[1], rel=1e-3)
    assert on_cpu == one


# Runs, and what they save ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict:
    """Run a whole model, "base", and adapters on it, "adapters", with checkpoints of steps 5 and
    10: their folders. "options": of the second; "whole model": of these, those of the first too."""
    place = tmp_path_factory.mktemp("runs")
    options = tiny_run(place)
    base, trained = place / "base", place / "adapters"
    base.mkdir()
    trained.mkdir()
    whole = ["--training.steps=4", "--checkpoint.export_hf=float32"]
    assert run_ranks(1, run, [*options, *whole], base) == [(0, "")]
    of_adapters = [
        "--lora.rank=3",
        "--lora.alpha=6",
        '--lora.targets=["wq", "wk", "wv", "wo"]',
        f"--checkpoint.load_path={base}",
        "--training.steps=10",
        "--training.max_norm=0.01",
    ]
    both = [*options, *of_adapters]
    assert run_ranks(1, run, both, trained) == [(0, "")]
    return {"base": base, "adapters": trained, "options": both, "whole model": options}


def test_a_run_says_how_many_parameters_are_trained(runs):
    said = (runs["adapters"] / "logs" / "rank-00000.log").read_text()
    assert "1,536 of the parameters are trained, adapters of rank 3 of wq, wk, wv, wo; " in said
    assert "are frozen" in said


def from_step_5(runs: dict, folder: Path) -> Path:
    """Return a copy of the run of adapters as it was after step 5."""
    name = verify.step_name(5, 0)
    shutil.copytree(runs["adapters"] / "checkpoints" / name, folder / "checkpoints" / name)
    return folder


def manifest_of(folder: Path) -> dict:
    return verify.read_manifest(verify.newest(folder))


def test_a_checkpoint_holds_adapters_and_names_their_base(runs):
    manifest = manifest_of(runs["adapters"])
    kinds = {name.rpartition(".")[2] for name in manifest["tensors"] if name.startswith("model.")}
    assert kinds == {"lora_a", "lora_b"}
    assert not [n for n in manifest["tensors"] if n.startswith("optimizer.") and "lora_" not in n]
    base = manifest["facts"]["base"]
    assert base["folder"] == str(verify.newest(runs["base"])) and base["dtype"] == "F32"
    found = adapters.read(runs["adapters"])
    assert len(found) == 2 * 4 * 2  # layers, weights, A and B
    assert found["layers.1.attention.wk.lora_a"].shape == (3, 32)
    assert all(b.any() for name, b in found.items() if name.endswith("lora_b"))


@pytest.mark.parametrize(
    "ranks, mesh",
    [
        (1, []),
        pytest.param(2, ["--parallelism.tensor_parallel=2"], marks=pytest.mark.slow),
    ],
    ids=["one", "tp2"],
)
def test_a_run_resumes_on_any_mesh(runs, tmp_path, ranks, mesh):
    folder = from_step_5(runs, tmp_path)
    results = run_ranks(ranks, run, [*runs["options"], *mesh], folder)
    assert results == [(0, "")] * ranks
    losses = series(folder)
    expected = {step: loss for step, loss in series(runs["adapters"]).items() if step > 5}
    assert manifest_of(folder)["facts"]["base"] == manifest_of(runs["adapters"])["facts"]["base"]
    if ranks == 1:
        assert losses == expected
    assert losses == pytest.approx(expected, rel=1e-5)
    ours, theirs = adapters.read(folder), adapters.read(runs["adapters"])
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert (tensor - theirs[name]).norm() <= 1e-5 * theirs[name].norm(), name


@pytest.mark.slow
def test_the_same_base_from_another_folder_has_the_same_hash(runs, tmp_path):
    folder = from_step_5(runs, tmp_path)
    published = runs["base"] / "hf" / verify.step_name(4, 0)
    options = ["--checkpoint.load_path=", f"--checkpoint.load_hf={published}"]
    assert run_ranks(1, run, [*runs["options"], *options], folder) == [(0, "")]
    assert series(folder)[10] == series(runs["adapters"])[10]
    base = manifest_of(folder)["facts"]["base"]
    assert base["folder"] == str(published)
    assert base["hash"] == manifest_of(runs["adapters"])["facts"]["base"]["hash"]


def hash_of_base(options: list[str]) -> str:
    local = "--training.local_batch_size=1"
    cfg = load_config([*options_of_a_family(options), local, *options], world().size, world().size)
    job = train.build(cfg)
    group = dist.new_group(backend="gloo")
    return adapters.hash_of(hf.base_of(job.model), job.mesh, group)


@pytest.mark.slow
def test_the_hash_of_a_base_is_the_same_on_a_mesh():
    """A router's bias, which is no DTensor, counts once too."""
    ranks, options, _ = EXPERT_MESHES["experts on ep2 of tp2"]
    model = [*LORA_MLA, "--model.expert_dim=12"]
    [one] = run_ranks(1, hash_of_base, model)
    assert run_ranks(ranks, hash_of_base, [*options, *model]) == [one] * ranks


def test_another_base_is_refused_by_name(runs, tmp_path):
    folder = from_step_5(runs, tmp_path)
    other = tmp_path / "other"
    shutil.copytree(runs["base"], other)
    [(code, said)] = run_ranks(1, run_with_another_base, runs["options"], folder, other)
    assert code == 2
    base = manifest_of(runs["adapters"])["facts"]["base"]
    assert f"were trained on the weights of {base['folder']} (F32, hash {base['hash']})" in said
    assert f"and those of {verify.newest(other)} (F32, hash " in said
    assert "load_path to start" not in said, "adapters are no model to start from"


def run_with_another_base(options: list[str], folder: Path, other: Path) -> tuple[int, str]:
    """`other` is a copy of the base. One number of it is changed as it is read."""
    real = adapters.hash_of

    def changed(tensors, *rest):
        with torch.no_grad():
            tensors["norm.weight"][7] += 1e-6
        return real(tensors, *rest)

    adapters.hash_of = changed
    return run([*options, f"--checkpoint.load_path={other}"], folder)


def test_adapters_are_no_model_to_start_from(runs, tmp_path):
    start = f"--checkpoint.load_path={runs['adapters']}"
    for options in runs["whole model"], runs["options"]:
        [(code, said)] = run_ranks(1, run, [*options, start], tmp_path)
        assert code == 2
        assert (
            f"holds adapters of the weights of {verify.newest(runs['base'])}, and no model" in said
        )


def test_a_folder_of_adapters_is_not_resumed_as_a_whole_model(runs, tmp_path):
    folder = from_step_5(runs, tmp_path)
    [(code, said)] = run_ranks(1, run, runs["whole model"], folder)
    assert code == 2
    assert "it holds adapters of the weights of" in said and "this run has no [lora]" in said


def test_a_checkpoint_of_a_whole_model_has_no_adapters(runs):
    with pytest.raises(InputError, match="holds no adapters"):
        adapters.read(runs["base"])


@pytest.mark.slow
@pytest.mark.parametrize("source", ["load_path", "load_hf"])
def test_a_base_in_float32_is_merged_as_it_is_after_a_run_in_bfloat16(source, runs, tmp_path):
    """The run rounds the base to compute with it, as forward rounds any weights; peft does not."""
    [exported] = (runs["base"] / "hf").iterdir()
    folder = tmp_path / "adapters"
    folder.mkdir()
    options = [*runs["options"], "--training.param_dtype=bfloat16"]
    if source == "load_hf":
        options += ["--checkpoint.load_path=", f"--checkpoint.load_hf={exported}"]
    assert run_ranks(1, run, options, folder) == [(0, "")]
    assert manifest_of(folder)["facts"]["base"]["dtype"] == "BF16"
    assert convert.main(["lora-merge", str(folder), str(tmp_path / "merged")]) == 0

    before = load_file(exported / hf.ONE_FILE)
    after = load_file(tmp_path / "merged" / hf.ONE_FILE)
    trained = of_tools.open_run(folder)
    names = trained.formats.hf_names(trained.args)
    assert names.keys() == trained.parameters.keys()
    adapted = of_tools.by_parameter(trained.tensors)
    assert adapted
    for ours, theirs in names.items():
        expected = before[theirs]
        assert not torch.equal(expected, expected.bfloat16().float()) or "norm" in ours
        if ours in adapted:
            expected = of_tools.add(expected, adapted[ours], trained.alpha / trained.rank)
        assert torch.equal(after[theirs], expected), ours


@pytest.mark.slow
def test_a_run_of_adapters_is_scored_as_its_merged_model(runs, tmp_path):
    """By tools.evaluate, and not as its base."""
    merged, task = tmp_path / "merged", tmp_path / "words.jsonl"
    assert convert.main(["lora-merge", str(runs["adapters"]), str(merged)]) == 0
    task.write_text('{"context": "document 7: 14", "text": "28"}\n{"text": "21 35"}\n')
    found = {}
    for name, folder in (runs | {"merged": merged}).items():
        if name in ("base", "adapters", "merged"):
            out = tmp_path / f"{name}.json"
            asked = [str(folder), f"--task={task}", "--window=16", f"--json={out}"]
            assert evaluate.main(asked) == 0
            [result] = json.loads(out.read_text())
            found[name] = np.array([row["log_likelihoods"] for row in result["samples"]])
    np.testing.assert_allclose(found["adapters"], found["merged"], rtol=1e-5)
    assert np.abs(found["adapters"] / found["base"] - 1).max() > 1e-4
