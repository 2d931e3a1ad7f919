"""Run a clone of karpathy/autoresearch, unchanged, on given texts: for lab/bench/device/in_300s.py,
which starts it in another process, with another home folder.

Its prepare.py downloads a corpus and its train.py a kernel; a machine without a network has neither.
So the texts are written where prepare.py looks for them, and PyTorch's FlashAttention answers for the
kernel.
"""

import json
import runpy
import sys
import types
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention

VALIDATION = "shard_06542.parquet"  # autoresearch's prepare.py: VAL_SHARD
TRAINING = "shard_00000.parquet"
BYTES_PER_TOKEN = 4  # about; no more is validated on than there is
GROUP = 1_000  # texts that are read at a time
ROUNDING = 0.01  # relative error of attention in bfloat16


def attend(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = True, window_size: tuple[int, int] = (-1, -1)
) -> Tensor:
    """Compute FlashAttention's `flash_attn_func` of tensors [B, T, H, E] by PyTorch's kernel.
    window_size: how many tokens before and after its own a token sees; -1: all."""
    rows, length = q.shape[:2]
    window = (window_size[0], 0) if causal else window_size
    out = varlen_attn(
        q.flatten(0, 1),
        k.flatten(0, 1),
        v.flatten(0, 1),
        ends(rows, length, q.device),
        ends(rows, length, q.device),
        length,
        length,
        window_size=window,
    )
    return out.view_as(q)


@cache
def ends(rows: int, length: int, device: torch.device) -> Tensor:
    """Return where each of these rows begins, and the end of the last, in int32."""
    return torch.arange(0, rows * length + 1, length, dtype=torch.int32, device=device)


def attention_error(device: torch.device) -> float:
    """Return the largest relative error of `attend`, in bfloat16, of whole rows and of windows;
    compared with a mask in float32."""
    how = {"device": device, "dtype": torch.bfloat16}
    q, k, v = (torch.randn(2, 64, 4, 64, **how) for _ in range(3))
    position = torch.arange(64, device=device)
    before = position[:, None] - position
    errors = []
    for window in (-1, 16):
        seen = (before >= 0) & ((before <= window) | (window < 0))
        wide = (x.float().transpose(1, 2) for x in (q, k, v))
        want = scaled_dot_product_attention(*wide, attn_mask=seen).transpose(1, 2)
        got = attend(q, k, v, window_size=(window, 0))
        errors.append(float((got.float() - want).norm() / want.norm()))
    return max(errors)


def kernels_package() -> types.ModuleType:
    """Return what answers for the package `kernels`, whose get_kernel downloads FlashAttention 3."""
    package = types.ModuleType("kernels")
    interface = types.SimpleNamespace(flash_attn_func=attend)
    package.get_kernel = lambda repository: types.SimpleNamespace(flash_attn_interface=interface)
    return package


def write_texts(prepare: Any, train: str, held_out: str) -> None:
    """Write both files as the parquet shards that prepare.py reads."""
    import pyarrow
    import pyarrow.parquet

    folder = Path(prepare.DATA_DIR)
    folder.mkdir(parents=True, exist_ok=True)
    for name, source in ((TRAINING, train), (VALIDATION, held_out)):
        if not (folder / name).exists():
            with open(source, encoding="utf-8") as lines:
                texts = [json.loads(line)["text"] for line in lines]
            table = pyarrow.table({"text": texts})
            pyarrow.parquet.write_table(table, folder / name, row_group_size=GROUP)


def get_ready(settings: dict) -> Any:
    """Return the rival's module `prepare`, with the texts and the tokenizer in place."""
    sys.path.insert(0, settings["folder"])
    sys.modules["kernels"] = kernels_package()
    prepare = __import__("prepare")
    write_texts(prepare, settings["train"], settings["held_out"])
    prepare.train_tokenizer()
    prepare.TIME_BUDGET = settings["seconds"]
    tokens = Path(settings["held_out"]).stat().st_size // BYTES_PER_TOKEN
    prepare.EVAL_TOKENS = min(prepare.EVAL_TOKENS, tokens)
    return prepare


def main() -> None:
    settings = json.loads(sys.argv[1])
    if not attention_error(torch.device("cuda")) < ROUNDING:
        sys.exit("lab/bench/device/rival.py: its attention computes something else on this GPU")
    get_ready(settings)
    seed = torch.manual_seed
    torch.manual_seed = lambda fixed: seed(fixed + settings["seed"])  # its seed is written into it
    runpy.run_path(str(Path(settings["folder"]) / "train.py"), run_name="__main__")
