"""The planner's short way for operators on fake tensors (tools/plan/quick.py) gives what PyTorch's
FakeTensorMode gives: operator by operator, and in whole steps."""

from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.fsdp._fully_shard import _fsdp_param

from configs.load import load_config
from tests.steps import LOSS, outline
from tools.plan import quick
from tools.plan.trace import trace_step

aten = torch.ops.aten
CHUNK = _fsdp_param._chunk_with_empty
SHORT = {*quick.SHAPES, *quick.ELEMENTWISE}


def of(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Callable[[], torch.Tensor]:
    return lambda: torch.empty(shape, dtype=dtype)


def turned() -> torch.Tensor:
    return torch.empty(4, 6).t()


wide = of(4, 6)
real = of(4, 6, dtype=torch.float32)
# Operator and arguments; functions make tensors.
CALLS = [
    (aten._to_copy.default, (wide,), {"dtype": torch.float32}),
    (aten._to_copy.default, (turned,), {"dtype": torch.bfloat16}),
    (aten._to_copy.default, (wide,), {"device": "cpu"}),
    (aten._unsafe_view.default, (wide, [24]), {}),
    (aten.add.Tensor, (wide, wide), {}),
    (aten.add.Tensor, (wide, real), {}),
    (aten.add.Tensor, (wide, of(6)), {}),
    (aten.add.Tensor, (turned, turned), {"alpha": 2}),
    (aten.as_strided.default, (wide, [2, 3], [6, 1], 6), {}),
    (aten.detach.default, (turned,), {}),
    (aten.div.Tensor, (wide, 3), {}),
    (aten.div.Tensor, (of(4, dtype=torch.int64), 3), {}),
    (aten.expand.default, (of(1, 6), [4, 6]), {}),
    (aten.mm.default, (wide, of(6, 5)), {}),
    (aten.mul.Scalar, (wide, 2.0), {}),
    (aten.mul.Tensor, (turned, turned), {}),
    (aten.mul.Tensor, (real, of(4, 1, dtype=torch.float32)), {}),
    (aten.neg.default, (wide,), {}),
    (aten.new_empty.default, (wide, [3]), {}),
    (aten.new_zeros.default, (wide, [3]), {"dtype": torch.float32}),
    (aten.permute.default, (wide, [1, 0]), {}),
    (aten.pow.Tensor_Scalar, (wide, 2), {}),
    (aten.rsqrt.default, (real,), {}),
    (aten.select.int, (wide, 0, 2), {}),
    (aten.sigmoid.default, (wide,), {}),
    (aten.silu.default, (turned,), {}),
    (aten.silu_backward.default, (wide, wide), {}),
    (aten.slice.Tensor, (wide, 1, 2, 5), {}),
    (aten.split.Tensor, (wide, 2), {}),
    (aten.split_with_sizes.default, (wide, [1, 3]), {}),
    (aten.squeeze.dim, (of(1, 6), 0), {}),
    (aten.sub.Tensor, (wide, wide), {}),
    (aten.sum.dim_IntList, (wide, [0]), {}),
    (aten.sum.dim_IntList, (wide, [1]), {"dtype": torch.float32}),
    (aten.t.default, (wide,), {}),
    (aten.transpose.int, (wide, 0, 1), {}),
    (aten.unsqueeze.default, (wide, 1), {}),
    (aten.view.default, (wide, [2, 12]), {}),
    (aten.view_as.default, (wide, of(24)), {}),
]


def described(mode: FakeTensorMode, short: bool, func, args: tuple, kwargs: dict) -> list:
    """Describe the results, and which of them are views of an argument."""
    with mode:
        made = [part() if callable(part) else part for part in args]
        tensors = [part for part in made if isinstance(part, torch.Tensor)]
        if not short:
            out = func(*made, **kwargs)
    if short:
        out = quick.run(func, mode, tuple(made), kwargs, tensors)
    storages = [tensor.untyped_storage()._cdata for tensor in tensors]
    found = []
    for part in [out] if isinstance(out, torch.Tensor) else out:
        assert type(part) is FakeTensor
        storage = part.untyped_storage()
        source = storages.index(storage._cdata) if storage._cdata in storages else None
        layout = part.shape, part.stride(), part.storage_offset(), storage.nbytes()
        found.append((part.dtype, part.device, layout, source))
    return found


def differences() -> list[str]:
    mode = FakeTensorMode()
    wrong = []
    for func, args, kwargs in CALLS:
        if described(mode, True, func, args, kwargs) != described(mode, False, func, args, kwargs):
            wrong.append(str(func))
    return wrong


def test_every_operator_gives_what_fake_tensor_mode_gives():
    assert {func for func, _, _ in CALLS} == SHORT
    assert differences() == []


@pytest.mark.slow
def test_negative_control_arguments_that_differ_are_seen(monkeypatch):
    monkeypatch.setattr(quick, "have_equal_layout", lambda tensors: True)
    assert "aten.add.Tensor" in differences()


@pytest.mark.parametrize(("ranks", "rows"), ((4, 10), (4, 8), (8, 3), (8, 9), (3, 3)))
def test_shards_are_those_of_fsdp(ranks, rows):
    """Shards are also right where rows do not divide, or there are fewer than ranks."""
    tensor = torch.arange(2 * rows).view(rows, 2)
    for dim, whole in (0, tensor), (1, tensor.t()):
        shards = quick.Shards(whole, ranks, dim)
        for number, chunk in enumerate(CHUNK(whole, ranks, dim)):
            assert shards[number].shape == chunk.shape
            assert torch.equal(shards[number], chunk)


MESHES = {
    "TP": ["--parallelism.tensor_parallel=2"],
    "experts": [
        *"--model.family=deepseek_v3 --model.flavor=debug --parallelism.expert_parallel=2".split(),
        "--activation_checkpoint.mode=full",
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_a_step_is_the_same_operator_by_operator(mesh):
    options = [*LOSS, *MESHES[mesh]]
    if mesh == "experts":
        options = [
            o for o in options if not o.startswith(("--model.dim", "--model.n_", "--model.v"))
        ]
    cfg = load_config(options, 4, 4)
    short = outline(trace_step(cfg, 4, 4, True))

    def slow(func, mode, args, kwargs, tensors):
        return func(*args, **kwargs)

    with mock.patch.object(quick, "run", slow), mock.patch.object(quick, "Shards", CHUNK):
        assert short == outline(trace_step(cfg, 4, 4, True))
