"""A training step of `train.py` against the barest loop around the same model, and against Hugging Face's Llama.

    python -m tools.bench.step [--rounds 15] [--json out.json] [--table.key=value ...]

Same shape, batch, dtype and optimizer for all; in alternation, each in a process of its own. What each contender is:

- ours: `train.build` and `train.train_step`, as a run does it, metrics and all checks included.
- bare: our model in a loop of five lines, with torch's own clipping. In bfloat16 it keeps float32 masters by hand.
- hf: `LlamaForCausalLM` in that same loop; in bfloat16 under autocast, as its users train it.
- accelerate, litgpt: the same model prepared by Hugging Face's Accelerator, and Lightning's GPT of the same shape in that
  loop; where they are installed (they are no requirement of ours: use an environment that you can throw away).
- "memory kept": on a CPU, the same with the setting of glibc that our runs make (`parallelisms/mesh.py::keep_memory`).
"""

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec

import torch

import train
from checkpoint.hf import config_json
from configs import check
from configs.load import load_config
from configs.schema import Config
from models import llama
from parallelisms import dp
from parallelisms.mesh import keep_memory, pick_device
from tools.bench import harness
from training.loss import linear_cross_entropy
from training.metrics import flops_per_token

CLIP = 1.0


def bare_float32(arch, cfg, tokens, labels):
    model = llama.build(arch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step():
        head = partial(linear_cross_entropy, labels=labels, chunk_tokens=cfg.training.loss_chunk_tokens)
        (model(tokens, head) / labels.numel()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()

    return step


def bare_bfloat16(arch, cfg, tokens, labels):
    model = llama.build(arch).to(torch.bfloat16)
    masters = [p.detach().float().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=1e-4, fused=True)

    def step():
        head = partial(linear_cross_entropy, labels=labels, chunk_tokens=cfg.training.loss_chunk_tokens)
        (model(tokens, head) / labels.numel()).backward()
        for master, p in zip(masters, model.parameters()):
            master.grad, p.grad = p.grad.float(), None
        torch.nn.utils.clip_grad_norm_(masters, CLIP)
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(list(model.parameters()), masters)

    return step


def looped(model, logits_of, labels, dtype):
    """A peer's model in the bare loop; in bfloat16 under autocast."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step():
        with torch.autocast(labels.device.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
            logits = logits_of()
        torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()

    return step


def hf(arch, cfg, tokens, labels, dtype):
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**config_json(arch)))
    return looped(model, lambda: model(tokens, use_cache=False).logits, labels, dtype)


def accelerate(arch, cfg, tokens, labels, dtype):
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from transformers import LlamaConfig, LlamaForCausalLM

    AcceleratorState._reset_state(reset_partial_state=True)  # it remembers the type of the first one
    runner = Accelerator(cpu=tokens.device.type == "cpu", mixed_precision="bf16" if dtype == torch.bfloat16 else "no")
    model = LlamaForCausalLM(LlamaConfig(**config_json(arch)))
    model, optimizer = runner.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True))

    def step():
        logits = model(tokens, use_cache=False).logits
        runner.backward(torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten()))
        runner.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()

    return step


def litgpt(arch, cfg, tokens, labels, dtype):
    from litgpt import GPT, Config

    model = GPT(Config(
        n_layer=arch["n_layers"], n_head=arch["n_heads"], n_query_groups=arch["n_kv_heads"], n_embd=arch["dim"],
        head_size=arch["head_dim"], intermediate_size=arch["hidden_dim"], padded_vocab_size=arch["vocab_size"],
        vocab_size=arch["vocab_size"], block_size=cfg.training.seq_len, rotary_percentage=1.0, rope_base=int(arch["rope_theta"]),
        parallel_residual=False, bias=False, norm_class_name="RMSNorm", norm_eps=arch["norm_eps"], mlp_class_name="LLaMAMLP",
    ))  # fmt: skip
    return looped(model, lambda: model(tokens), labels, dtype)


PEERS = {"hf": hf, "accelerate": accelerate, "litgpt": litgpt}  # those that are installed are measured


def contender(name: str, cfg: Config) -> Callable[[], None]:
    """A step of it on random tokens."""
    arch, t = check.architecture(cfg.model), cfg.training
    device = pick_device(cfg.run, 0)
    dtype = dp.param_dtype(t, device)
    with torch.device(device):
        window = torch.randint(0, arch["vocab_size"], (t.local_batch_size, t.seq_len + 1))
        tokens, labels = window[:, :-1].contiguous(), window[:, 1:].contiguous()
        if name == "ours":
            job, batch = train.build(cfg), {"tokens": tokens[None], "labels": labels[None]}
            return lambda: train.train_step(job, batch)
        if name == "bare":
            return (bare_float32 if dtype == torch.float32 else bare_bfloat16)(arch, cfg, tokens, labels)
        return PEERS[name](arch, cfg, tokens, labels, dtype)


def measure(dtype: str, overrides: list[str], rounds: int) -> list[list[str]]:
    installed = [name for name in PEERS if find_spec("transformers" if name == "hf" else name)]
    one = ["-m", "tools.bench.step", f"--training.param_dtype={dtype}", *overrides]
    contenders = {name: [*one, f"--one={name}"] for name in ("ours", "bare", *installed)}
    if not torch.cuda.is_available():
        contenders |= {f"{name}, memory kept": [*one, f"--one={name}", "--keep-memory"] for name in ("bare", *installed)}
    seconds = harness.in_turn(contenders, rounds)
    cfg = load_config(overrides)
    tokens = cfg.training.local_batch_size * cfg.training.seq_len
    flops = flops_per_token(check.architecture(cfg.model), cfg.training.seq_len) * tokens
    rows = []
    for name, times in seconds.items():
        median = statistics.median(times)
        rows.append([
            dtype, name, f"{median * 1e3:.0f} ms", f"{min(times) * 1e3:.0f} ms", f"{tokens / median:,.0f}",
            f"{flops / median / 1e9:.0f}", f"{harness.ratio(seconds, 'ours', name):.3f}",
        ])  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json")
    parser.add_argument("--one", choices=("ours", "bare", *PEERS), help="this contender, step by step as it is asked to")
    parser.add_argument("--keep-memory", action="store_true", help="with --one: as our runs do on a CPU")
    args, overrides = parser.parse_known_args()
    if args.one:
        if args.keep_memory:
            keep_memory()
        harness.serve(contender(args.one, load_config([*overrides, f"--training.max_norm={CLIP}"])))
        train.meshes.close_mesh()
        return
    rows = [row for dtype in ("float32", "bfloat16") for row in measure(dtype, overrides, args.rounds)]
    columns = ["dtype", "contender", "median step", "fastest", "tokens/s", "GFLOP/s", "ours / this (median of pairs)"]
    cfg = load_config(overrides)
    arch = f"{cfg.model.flavor} model, batch {cfg.training.local_batch_size} x {cfg.training.seq_len} tokens"
    harness.report("Training step", columns, rows, f"{arch}; {args.rounds} alternating rounds.", args.json)


if __name__ == "__main__":
    main()
