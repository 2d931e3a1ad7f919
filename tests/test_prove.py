"""tools/prove: the types of distributed tensors, and one page of proofs."""

from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from configs.load import load_config
from models.local import local
from parallelisms import tp_plain
from tools.prove import __main__ as prove

pytest.importorskip("spmd_types")
from tools.prove.types import first_mistake

TP = "--parallelism.tensor_parallel=2"


def mistake(ranks: int, preset: str, *options: str) -> str:
    per_host = min(ranks, 8)
    cfg = load_config([f"configs/{preset}.toml", *options], ranks, per_host)
    return first_mistake(cfg, ranks, per_host)


CP, PP = "--parallelism.context_parallel=2", "--parallelism.pipeline_parallel=2"
EP = "--parallelism.expert_parallel"
SLOW = pytest.mark.slow
DEBUG = [
    (4, "llama_debug", ()),
    (8, "llama_debug", (TP, CP)),
    (4, "gpt_oss_debug", (TP, f"{EP}=2")),
    pytest.param(8, "deepseek_v3_debug", (TP, CP, f"{EP}=8"), marks=SLOW),
    pytest.param(8, "llama_debug_lora", (TP, PP), marks=SLOW),
    (4, "olmo2_7b", (TP, "--model.n_layers=1", "--training.global_batch_size=32")),
]


@pytest.mark.parametrize(("ranks", "preset", "options"), DEBUG)
def test_presets_have_right_types(ranks: int, preset: str, options: tuple[str, ...]) -> None:
    assert mistake(ranks, preset, *options) == ""


# Mistakes that compute in silence ---------------------------------------------------------------


def gather_without_the_sum(self: object, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Gather a sequence, and leave each rank the gradient of its own heads."""

    def gather(_: nn.Module, inputs: tuple) -> tuple:
        part = DTensor.from_local(inputs[0], mesh, [Shard(1)])
        return part.redistribute(placements=[Replicate()]).to_local(), *inputs[1:]

    module.register_forward_pre_hook(gather)
    return module


def weight_without_the_sum(weight: Tensor, factor: float = 1.0) -> Tensor:
    """Use a whole weight for a part of the tokens, and leave each rank its own gradient."""
    return weight.to_local() if isinstance(weight, DTensor) else weight


def part_of_an_embedding_as_whole(self: tp_plain.SplitEmbedding, x: Tensor) -> Tensor:
    weight = local(self.weight)
    own = x - self.first
    is_own = (own >= 0) & (own < len(weight))
    embedded = F.embedding(own.where(is_own, 0), weight) * is_own[..., None]
    whole = DTensor.from_local(embedded, self.mesh, [Replicate()])
    return whole.redistribute(placements=[Shard(1)]).to_local()


def sum_without_a_gradient(self: tp_plain.SplitRMSNorm, x: Tensor) -> Tensor:
    wide = x.float()
    squares = wide.square().sum(-1, keepdim=True)
    dist.all_reduce(squares, group=self.group)
    normalised = wide * torch.rsqrt(squares / self.columns + self.eps)
    return (normalised * local(self.weight)).type_as(x)


MLA = "deepseek_v3_debug"
MISTAKES = [  # preset, what is replaced in parallelisms/tp_plain.py, and the module that is named
    (MLA, "GatherPlain._apply", gather_without_the_sum, "attention.wkv_b"),
    (MLA, "local", weight_without_the_sum, "attention.wkv_a"),
    ("llama_debug", "SplitEmbedding.forward", part_of_an_embedding_as_whole, "tok_embeddings"),
    ("olmo2_7b", "SplitRMSNorm.forward", sum_without_a_gradient, "attention.q_norm"),
]


@pytest.mark.parametrize(("preset", "name", "wrong", "where"), MISTAKES)
def test_a_mistake_that_computes_in_silence_is_named(
    preset: str, name: str, wrong: Callable, where: str
) -> None:
    options = ["--model.n_layers=1", "--training.global_batch_size=32"]
    with mock.patch(f"parallelisms.tp_plain.{name}", wrong):
        assert where in mistake(4, preset, TP, *options).split(":")[0]


# The page ---------------------------------------------------------------------------------------


def test_a_page_ends_with_a_row_for_each_proof(capsys: pytest.CaptureFixture) -> None:
    argv = ["configs/llama_debug.toml", "--gpus", "4", TP, "--only", "configuration", "types"]
    assert prove.main(argv) == 0
    rows = capsys.readouterr().out.split("---\n")[-1].splitlines()
    assert [row.split()[:2] for row in rows] == [["configuration", "holds"], ["types", "holds"]]


def test_a_proof_that_fails_is_the_exit_code(capsys: pytest.CaptureFixture) -> None:
    argv = ["configs/llama_debug.toml", "--gpus", "4", TP, "--only", "types", "configuration"]
    with mock.patch.object(tp_plain.SplitEmbedding, "forward", part_of_an_embedding_as_whole):
        assert prove.main(argv) == 1
    assert "tok_embeddings: SPMD type mismatch on axis tp" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["configs/llama_debug.toml", "--gpus", "0"], "--gpus"),
        (["configs/llama_debug.toml", "--gpus", "3", TP], "tensor_parallel"),
        (["configs/nope.toml", "--gpus", "4"], "nope.toml"),
    ],
)
def test_a_mistake_in_the_call_is_a_sentence(
    argv: list[str], words: str, capsys: pytest.CaptureFixture
) -> None:
    assert prove.main(argv) == 2
    assert words in capsys.readouterr().err


FOUR = ["fsdp2xpp2xcp2", "fsdp2xpp2xtp2", "fsdp2xcp2xtp2", "pp2xcp2xtp2"]


@pytest.mark.parametrize(
    ("gpus", "preset", "options", "meshes"),
    [
        (1, "llama_debug", (), []),
        (8, "llama_debug", ("--parallelism.data_parallel_replicate=4",), ["hsdp2x2"]),
        (16, "qwen3_30b_a3b", (), ["fsdp2xep2"]),
        (16, "llama_debug", (TP, CP, PP), FOUR),
    ],
)
def test_numbers_are_compared_on_the_dimensions_of_the_run(
    gpus: int, preset: str, options: tuple[str, ...], meshes: list[str]
) -> None:
    cfg = load_config([f"configs/{preset}.toml", *options], gpus, min(gpus, 8))
    assert prove.few_ranks(cfg, gpus) == meshes
