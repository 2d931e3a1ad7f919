"""What several test files share: meshes, small models, whole runs of train.py, and what can be read from a run's folder."""

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

MESHES = {  # name: (ranks, options, data-parallel ranks)
    "one": (1, [], 1),
    "fsdp2": (2, [], 2),
    "ddp2": (2, ["--parallelism.data_parallel_replicate=2"], 2),
    "tp2": (2, ["--parallelism.tensor_parallel=2"], 1),
    "fsdp3": (3, [], 3),
    "fsdp4": (4, [], 4),
    "hsdp2x2": (4, ["--parallelism.data_parallel_replicate=2"], 4),
    "tp4": (4, ["--parallelism.tensor_parallel=4"], 1),
    "fsdp2xtp2": (4, ["--parallelism.tensor_parallel=2"], 2),
    "hsdp2x2xtp2": (8, ["--parallelism.tensor_parallel=2", "--parallelism.data_parallel_replicate=2"], 4),
}
SMALL_MODEL = (  # sizes that meshes do not divide evenly, in float32, with sequences of 16 tokens
    "--model.dim=50 --model.n_layers=3 --model.n_heads=8 --model.n_kv_heads=4 --model.head_dim=6 --model.hidden_dim=44 "
    "--model.vocab_size=263 --data.tokenizer=bytes --training.param_dtype=float32 --training.seq_len=16 "
    "--training.loss_chunk_tokens=40"
).split()
ADAMW = ["--optimizer.lr=0.01", "--optimizer.eps=1e-4"]  # with eps 1e-8 Adam amplifies rounding where gradients are near 0


def whole(x: torch.Tensor) -> torch.Tensor:
    """A copy of the whole tensor, gathered where it is a DTensor (a collective)."""
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach().clone()


class Count(TorchDispatchMode):
    """How often a step runs a matrix product, attention, and a SiLU (which stands for the cheap rest)."""

    def __init__(self):
        super().__init__()
        self.seen = {"mm": 0, "attention": 0, "silu": 0}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        kind = {"mm": "mm", "silu": "silu", "_scaled_dot_product_flash_attention_for_cpu": "attention",
                "document_attention": "attention"}.get(name)  # fmt: skip
        if kind:
            self.seen[kind] += 1
        return func(*args, **(kwargs or {}))
