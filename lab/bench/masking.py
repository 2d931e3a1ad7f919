"""Measure the cost or savings of document masking: attention over packed documents, and a whole
training step with it and without.

    python -m lab.bench.masking [--rounds 7] [--windows 8x1024,1x8192] [--mean 10,100,1000] [--json out.json]
                                  [--table.key=value ...]

Documents of random lengths with that mean are packed into B x T windows. The contenders of the
first table, forward and backward of one attention layer with the model's heads:

- window: causal attention over the whole window, which is what runs without masking (and what the
  ratios refer to).
- documents: ours, `models/kernels/document_attention.py::document_attention`.
- in the open: one call of PyTorch per document, recorded by autograd.
- padded: documents of similar length gathered into one batch, padded on the right.
- T x T mask: one call with a boolean mask, up to T = 2048.

The second table is `train.train_step` on the same tokens, without and with `positions`.
"""

import argparse
import statistics
from typing import Any

import torch
import torch.nn.functional as F

import train
from configs import program
from configs.load import load_config
from lab.bench import harness
from models.kernels import document_attention as masked
from parallelisms import dp

MASK_LIMIT = 2048


def packed(rows: int, seq: int, mean: int) -> torch.Tensor:
    """positions int64 [rows, seq], on the CPU, of documents of 1 to 2 * mean - 1 tokens."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 2 * mean, (rows, seq), generator=generator)
    begins = torch.zeros(rows, seq, dtype=torch.bool)
    for row in range(rows):
        starts = lengths[row].cumsum(0)
        begins[row, starts[starts < seq]] = True
    begins[:, 0] = True
    index = torch.arange(seq).expand(rows, seq)
    return index - index.where(begins, 0).cummax(1).values


def window(q, k, v, documents):
    out = F.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True, enable_gqa=True
    )
    return out.transpose(1, 2)


def in_the_open(q, k, v, documents):
    return masked.one_by_one(*(x.flatten(0, 1) for x in (q, k, v)), documents.starts).view(q.shape)


def padded(q, k, v, documents):
    """Padding on the right is invisible to causal attention. Lengths within a factor of sqrt(2)
    share a batch."""
    starts = documents.starts[:-1].long()
    lengths = documents.starts.diff().long()
    kinds = (lengths.double().clamp(min=16).log2() * 2).ceil()
    outputs = []
    places = []
    for kind in kinds.unique():
        mine = kinds == kind
        index = torch.arange(lengths[mine].max(), device=q.device)
        real = index < lengths[mine][:, None]  # [n, longest]
        place = (starts[mine][:, None] + index).where(real, 0)
        pieces = (x.flatten(0, 1)[place].transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(*pieces, is_causal=True, enable_gqa=True).transpose(
            1, 2
        )
        outputs.append(out[real])
        places.append(place[real])
    return torch.cat(outputs)[torch.cat(places).argsort()].view(q.shape)


def with_a_mask(q, k, v, documents):
    B, T = q.shape[:2]
    # of its document
    number = torch.bucketize(
        torch.arange(B * T, device=q.device), documents.starts[1:], right=True
    ).view(B, T)
    mask = (number[:, :, None] == number[:, None, :]).tril()[:, None]  # [B, 1, T, T]
    out = F.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), attn_mask=mask, enable_gqa=True
    )
    return out.transpose(1, 2)


def attention(
    args: Any, device, dtype, rows: int, seq: int, mean: int, rounds: int
) -> list[list[str]]:
    documents = masked.Documents.of(packed(rows, seq, mean), device)
    heads = args.n_heads, args.n_kv_heads, args.n_kv_heads
    q, k, v = (
        torch.randn(rows, seq, h, args.head_dim, device=device, dtype=dtype, requires_grad=True)
        for h in heads
    )
    grad = torch.randn_like(q)
    contenders = {
        "window": window,
        "documents": masked.document_attention,
        "in the open": in_the_open,
        "padded": padded,
    }
    if seq <= MASK_LIMIT:
        contenders["T x T mask"] = with_a_mask
    want = in_the_open(q, k, v, documents).detach()
    for name, attend in list(contenders.items())[1:]:
        error = (attend(q, k, v, documents) - want).norm() / want.norm()
        assert error < (0.01 if dtype == torch.bfloat16 else 1e-5), f"{name} is off by {error:.1e}"
    calls = {
        name: lambda attend=attend: torch.autograd.grad(attend(q, k, v, documents), (q, k, v), grad)
        for name, attend in contenders.items()
    }
    seconds = harness.alternate(calls, rounds)
    shape = f"{rows} x {seq}, {len(documents.starts) - 1} documents of {mean}"
    return [
        [
            str(dtype).removeprefix("torch."),
            shape,
            name,
            f"{statistics.median(times) * 1e3:.1f} ms",
            f"{harness.ratio(seconds, name, 'window'):.2f}",
        ]
        for name, times in seconds.items()
    ]


def step(overrides: list[str], rows: int, seq: int, mean: int, rounds: int) -> list[list[str]]:
    shape = [
        f"--training.seq_len={seq}",
        f"--training.local_batch_size={rows}",
        f"--training.global_batch_size={rows}",
    ]
    cfg = load_config([*overrides, *shape, "--data.mask_documents=true"])
    job = train.build(cfg)
    size = (1, rows, seq)
    batch = {}
    for key in "tokens", "labels":
        batch[key] = torch.randint(0, job.args.vocab_size, size)
    masked = batch | {"positions": packed(rows, seq, mean)[None]}
    contenders = {
        "no masking": lambda: train.train_step(job, batch),
        "masking": lambda: train.train_step(job, masked),
    }
    seconds = harness.alternate(contenders, rounds)
    dtype = str(dp.param_dtype(cfg.training, job.mesh.device)).removeprefix("torch.")
    return [
        [
            dtype,
            f"{rows} x {seq}, documents of {mean}",
            name,
            f"{statistics.median(times) * 1e3:.0f} ms",
            f"{harness.ratio(seconds, name, 'no masking'):.2f}",
        ]
        for name, times in seconds.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--windows", default="8x1024,1x8192")
    parser.add_argument("--mean", default="10,100,1000")
    parser.add_argument("--json")
    args, overrides = parser.parse_known_args()
    cases = [
        (*map(int, window.split("x")), int(mean))
        for window in args.windows.split(",")
        for mean in args.mean.split(",")
    ]
    cfg = load_config(overrides)
    job = train.build(cfg)
    dtype = dp.param_dtype(cfg.training, job.mesh.device)
    one_layer = [
        row
        for case in cases
        for row in attention(job.args, job.mesh.device, dtype, *case, args.rounds)
    ]
    steps = [row for case in cases for row in step(overrides, *case, args.rounds)]
    columns = ["dtype", "windows", "contender", "median", "time / first"]
    notes = f"{args.rounds} alternating rounds."
    heads = (
        f"{job.args.n_heads} heads of {job.args.head_dim}, {job.args.n_kv_heads} of keys and values"
    )
    harness.report(
        "Attention over packed documents, forward and backward",
        columns,
        one_layer,
        f"{heads}; {notes}",
        args.json,
    )
    harness.report(
        "Training step with document masking",
        columns,
        steps,
        f"{cfg.model.flavor} model; {notes}",
        None,
    )


if __name__ == "__main__":
    program.run(main)
