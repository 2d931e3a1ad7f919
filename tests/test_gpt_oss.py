"""Parts that only gpt-oss has: clamped experts with biases compared with transformers' own, MXFP4
compared with transformers' dequantisation, and slices of fused tensors on a mesh.

tests/test_hf_parity.py compares the whole model with transformers', tests/test_experts.py and
tests/test_experts_tp.py every mesh with one process.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import train
from checkpoint import hf
from configs.load import load_config
from models import FORMATS, gpt_oss, moe
from models.formats import layouts
from models.formats.gpt_oss import FORMATS as OURS
from models.kernels.grouped_product import add_bias_of_group
from parallelisms.mesh import world
from tests.ranks import run_ranks
from tests.runs import whole
from tests.shapes import GPT_OSS, as_ours, hugging_face, random_pair
from training import init

TOKENS, POSITIONS = torch.arange(4 * 23).view(4, 23) % 97, torch.arange(23)


# --------------------------------------------------------------------------------------------------
# experts


@pytest.mark.parametrize("counts", [[3, 0, 4, 1], [8, 0, 0, 0], [0, 0, 0, 0]])
def test_each_row_gets_the_bias_of_its_group(counts):
    rows = torch.randn(sum(counts), 5, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    group = torch.arange(4).repeat_interleave(torch.tensor(counts))
    got = add_bias_of_group(rows, bias, torch.tensor(counts))
    assert torch.equal(got, rows + bias[group])
    upstream = torch.randn_like(got)
    of_rows, of_bias = torch.autograd.grad(got, (rows, bias), upstream)
    assert torch.equal(of_rows, upstream)
    torch.testing.assert_close(of_bias, torch.zeros_like(bias).index_add(0, group, upstream))


def test_clamped_experts_equal_transformers():
    """With weights so large that each clamp is at work, which those of random models are not."""
    modeling = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")
    torch.manual_seed(3)
    theirs = modeling.GptOssMLP(hugging_face(gpt_oss.FAMILY, GPT_OSS).config)
    ours = moe.MixtureOfExperts(
        GPT_OSS, gpt_oss.BiasedRouter(GPT_OSS), gpt_oss.ClampedExperts(GPT_OSS)
    )
    for p in theirs.parameters():
        nn.init.normal_(p, 0, 1.0)
    layers = "layers.0.feed_forward."
    names = {
        name.removeprefix(layers): hf_name.partition(".mlp.")[2]
        for name, hf_name in OURS.hf_names(GPT_OSS).items()
        if name.startswith(layers)
    }
    state = theirs.state_dict()
    for name, parameter in ours.named_parameters():
        layout = OURS.hf_layouts(GPT_OSS, ()).get(layers + name)
        box = tuple(slice(0, size) for size in parameter.shape)
        found = state[names[name]] if layout is None else layout.read(box, _reader(state))
        parameter.data.copy_(found)
    x = torch.randn(2, 11, GPT_OSS.dim)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    want = theirs(a)[0]
    got, _ = ours(b)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-4)
    want.square().sum().backward()
    got.square().sum().backward()
    torch.testing.assert_close(b.grad, a.grad, rtol=1e-4, atol=1e-3 * a.grad.abs().max().item())
    # the clamps hold more than a few numbers
    gate = torch.einsum("btd,xfd->btxf", x, ours.experts.w1)
    assert (gate > gpt_oss.LIMIT).float().mean() > 0.1


def _reader(tensors: dict[str, Tensor]):
    """Reads boxes of the tensors of a state_dict of GptOssMLP by the names of whole models."""
    return lambda name, box: tensors[name.partition(".mlp.")[2]][box]


def test_initial_values():
    args = replace(GPT_OSS, n_heads=60, n_layers=2)
    model = gpt_oss.GptOss(args)
    init.initialise(model, gpt_oss.initial_values(args), 0)
    for name, p in model.named_parameters():
        if name.endswith(".bias") or name[-2:] in ("b1", "b2", "b3"):
            assert not p.any(), name
        if name.endswith(".sinks"):
            assert p.std().item() == pytest.approx(0.02, rel=0.3)


# --------------------------------------------------------------------------------------------------
# files


def test_slices_of_a_fused_tensor_are_those_of_the_parameter():
    whole_one = torch.arange(3 * 5 * 8.0).view(3, 5, 8)  # theirs [X, C, 2 R]
    tensors = {"x": whole_one}
    for turn in 0, 1:
        layout = layouts.Interleaved("x", transposed=True, turn=turn, n=2)
        assert layout.files([3, 4, 5]) == {"x": [3, 5, 8]}
        box = (slice(1, 3), slice(2, 4), slice(1, 4))
        ours = whole_one[..., turn::2].mT
        got = layout.read(box, lambda name, part: tensors[name][part])
        assert torch.equal(got, ours[box]) and got.is_contiguous()
    parts = [whole_one[..., turn::2].mT for turn in (0, 1)]
    assert torch.equal(layouts.Interleaved("x", True, 0, 2).join(parts), whole_one)


def random_mxfp4(*shape: int) -> tuple[Tensor, Tensor]:
    """Blocks and scales of so many experts, rows and groups; values of a size that models have."""
    blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)
    return blocks, torch.randint(118, 124, shape, dtype=torch.uint8)


def test_mxfp4_is_dequantised_as_transformers_does_it():
    """Every byte, and every scale but the two that bfloat16 cannot express."""
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 16, 1, 16).expand(2, 16, 252, 16)
    scales = torch.arange(1, 253, dtype=torch.uint8).expand(2, 16, 252)
    want = mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    assert torch.equal(layouts.dequantise(blocks, scales), want.mT)
    odd = layouts.dequantise(blocks[:1, :1, :1], torch.tensor([[[255]]], dtype=torch.uint8))
    assert odd.isnan().all()


def test_slices_of_mxfp4_are_those_of_the_parameter():
    torch.manual_seed(5)
    blocks, scales = random_mxfp4(3, 8, 3)
    tensors = {"x_blocks": blocks, "x_scales": scales}
    for turn in 0, 1:
        layout = layouts.Mxfp4("x", turn, 2)
        assert layout.files([3, 4, 96]) == {"x_blocks": [3, 8, 3, 16], "x_scales": [3, 8, 3]}
        ours = layouts.dequantise(blocks, scales)[:, turn::2]
        for columns in slice(0, 96), slice(37, 61), slice(64, 65):
            box = (slice(1, 3), slice(1, 4), columns)
            got = layout.read(box, lambda name, part: tensors[name][part])
            assert torch.equal(got, ours[box])


HUB = replace(GPT_OSS, dim=64, expert_dim=32, vocab_size=263)


def write_hub(folder: Path) -> dict[str, Tensor]:
    """Write a folder in the hub's form, with experts in MXFP4; returns what transformers makes of
    it."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    torch.manual_seed(11)
    model = hugging_face(gpt_oss.FAMILY, HUB)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0, 0.2)
    model.to(torch.bfloat16).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    meant = dict(tensors)
    for name in list(tensors):
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, columns, rows = tensors.pop(name).shape
            blocks, scales = random_mxfp4(experts, rows, columns // 32)
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            meant[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config))
    return meant


def loaded_on_this_mesh(folder: Path, options: list[str]) -> dict[str, Tensor]:
    sizes = [f"--model.{key}={getattr(HUB, key)}" for key in SIZES]
    base = [
        "--model.family=gpt_oss",
        *sizes,
        "--data.tokenizer=bytes",
        "--training.param_dtype=float32",
        "--training.seq_len=16",
        "--training.local_batch_size=1",
        "--training.global_batch_size=6",
    ]
    here = world()
    cfg = load_config([*base, *options], here.size, here.local_size)
    job = train.build(cfg)
    args = replace(job.args, rope_scaling=HUB.rope_scaling)
    hf.load(folder, job.model, FORMATS, "gpt_oss", args, dist.group.WORLD)
    return {name: whole(p) for name, p in job.model.state_dict().items()}


SIZES = (
    "dim n_layers n_heads n_kv_heads head_dim window n_experts experts_per_token expert_dim "
    "vocab_size rope_theta"
).split()


@pytest.mark.parametrize("mesh", ["tp2", pytest.param("fsdp3", marks=pytest.mark.slow)])
def test_the_hubs_weights_are_those_of_transformers(mesh, tmp_path):
    """In MXFP4, into a live mesh of which a shard may begin within a group of 32."""
    pytest.importorskip("transformers")
    meant = write_hub(tmp_path / "hub")
    ranks, options = {
        "fsdp3": (3, []),
        "tp2": (2, ["--parallelism.tensor_parallel=2"]),
    }[mesh]
    seen = run_ranks(ranks, loaded_on_this_mesh, tmp_path / "hub", options)[0]
    _, _, pairs = random_pair(gpt_oss.FAMILY, HUB)
    assert seen.keys() == {mine for mine, _ in pairs}
    for mine, theirs in pairs:
        assert torch.equal(seen[mine], as_ours(meant, theirs).float()), mine
