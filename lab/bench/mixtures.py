"""Mixtures of experts at their published width on one GPU: ours, Hugging Face's, TorchTitan's.

    python -m lab.bench mixtures [--rounds 10] [--only "qwen3 mixture,gpt-oss layers"] [--json out.json]

mixture: the feed-forward layer of one block alone (router, dispatch, experts, combine). layers: two
whole blocks, with attention and the last norm. All have the same weights in bfloat16, the same
input and the same gradient of the output. Forward and backward; the optimizer is left out. Outputs
and gradients are compared before anything is timed: the median over the tokens of the relative
error against ours, since a token whose experts differ by a rounding of the router is another sum.
"""

import re
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import configs.cpu  # noqa: F401

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from configs.schema import Compile
from lab.bench import harness, isolated
from models import FORMATS, MODELS
from models.gpt_oss import ClampedExperts
from models.terms import InjectGradient
from parallelisms import blocks
from training.metrics import peak_flops

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
DTYPE = torch.bfloat16 if GPU else torch.float32
SMALL = {"dim": 64, "n_heads": 4, "n_kv_heads": 2, "head_dim": 16, "n_experts": 8, "expert_dim": 32}
COLUMNS = (
    "part",
    "contender",
    "forward and backward",
    "fastest",
    "TFLOP/s",
    "MFU",
    "ours / this",
    "error of output, of its gradient",
    "peak GiB",
    "share of kernels",
)


class Size(NamedTuple):
    family: str
    flavor: str
    batch: int
    seq_len: int


SIZES = {"qwen3": Size("qwen3", "30B-A3B", 1, 8192), "gpt-oss": Size("gpt_oss", "20B", 1, 8192)}
PARTS = {  # what fits into one GPU's memory at the same time
    "mixture": {
        "qwen3 mixture": ("ours", "ours with balance loss", "hf", "torchtitan"),
        "gpt-oss mixture": ("ours", "hf", "torchtitan"),
    },
    "layers": {"qwen3 layers": ("ours", "hf"), "gpt-oss layers": ("ours", "hf")},
}
LAYERS = 2
SINKS = "flex_attention" if GPU else "eager"  # what transformers has for attention with sinks


def sizes_of(name: str, layers: int, balance: float) -> tuple[Size, Any]:
    """Return the sizes, with a small vocabulary, since no embedding and no loss is measured."""
    size = SIZES[name]
    of_flavor = MODELS[size.family].numbers.flavors[size.flavor]
    more = {"n_layers": layers, "vocab_size": 256, "balance_loss": balance}
    if not GPU:
        more |= SMALL
        size = size._replace(batch=2, seq_len=128)
    args = MODELS[size.family].Args(**(of_flavor | more))
    return size, args


def our_model(name: str, layers: int, balance: float) -> tuple[Size, Any, nn.Module]:
    """Build our model, with values that are the same in every process."""
    size, args = sizes_of(name, layers, balance)
    torch.set_default_dtype(DTYPE)
    with DEVICE:
        model = MODELS[size.family].build(args)
    torch.set_default_dtype(torch.float32)
    random = torch.Generator(DEVICE).manual_seed(0)
    with torch.no_grad():
        for parameter_name, p in model.named_parameters():
            if parameter_name.endswith("norm.weight"):
                p.fill_(1.0)
            else:
                p.normal_(std=0.02, generator=random)
    return size, args, model


def ours(name: str, part: str, balance: float) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    layers = 1 if part == "mixture" else LAYERS
    size, args, model = our_model(name, layers, balance)
    scale = torch.full((), 1e-4, device=DEVICE)

    def with_terms(out: tuple) -> Tensor:
        h, terms = out
        for term in terms.values():
            if term.weight:
                h = InjectGradient.apply(h, term.value, scale, term.weight)
        return h

    if part == "mixture":
        layer = model.layers["0"].feed_forward
        layer.forward = torch.compile(layer.forward, fullgraph=True) if GPU else layer.forward
        return layer, lambda x: with_terms(layer(x))
    blocks.compile_blocks(model, Compile(enabled=GPU))
    cos, sin = model.rope(torch.arange(size.seq_len, device=DEVICE))

    def run(h: Tensor) -> Tensor:
        for block in model.layers.values():
            h = with_terms(block(h, cos, sin, None))
        return model.norm(h)

    return model, run


def theirs_of(layer: Any) -> dict[str, Tensor]:
    """Return the weights of one of our blocks, as transformers names and lays them out."""
    own = dict(layer.named_parameters())
    mixture = layer.feed_forward
    if not isinstance(mixture.experts, ClampedExperts):
        found = {"mlp.gate.weight": mixture.router.weight}
        gate_up = torch.cat((mixture.experts.w1, mixture.experts.w3), 1)
        found |= {"gate_up_proj": gate_up, "down_proj": mixture.experts.w2}
    else:
        e = mixture.experts
        gate_up = torch.stack((e.w1, e.w3), 2).flatten(1, 2).mT
        found = {
            "mlp.router.weight": mixture.router.weight,
            "mlp.router.bias": mixture.router.bias,
            "self_attn.sinks": own["attention.sinks"],
            "gate_up_proj": gate_up.contiguous(),
            "gate_up_proj_bias": torch.stack((e.b1, e.b3), 2).flatten(1, 2),
            "down_proj": e.w2.mT.contiguous(),
            "down_proj_bias": e.b2,
        }
    renamed = {n if "." in n else f"mlp.experts.{n}": x for n, x in found.items()}
    table = {
        "attention_norm.weight": "input_layernorm.weight",
        "ffn_norm.weight": "post_attention_layernorm.weight",
        "attention.q_norm.weight": "self_attn.q_norm.weight",
        "attention.k_norm.weight": "self_attn.k_norm.weight",
    }
    for letter in "qkvo":
        for kind in ("weight", "bias"):
            table[f"attention.w{letter}.{kind}"] = f"self_attn.{letter}_proj.{kind}"
    return renamed | {table[n]: x for n, x in own.items() if n in table}


def hf(name: str, part: str, attention: str) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    import transformers

    layers = 1 if part == "mixture" else LAYERS
    size, args, model = our_model(name, layers, 0.0)
    fields = FORMATS[size.family].hf_config(args)
    cfg = transformers.AutoConfig.for_model(**fields)
    cfg._experts_implementation = "grouped_mm"
    cfg._attn_implementation = attention
    with DEVICE:
        theirs = transformers.AutoModel.from_config(cfg, dtype=DTYPE, attn_implementation=attention)
    assert theirs.config._experts_implementation == "grouped_mm"
    for number, layer in model.layers.items():
        weights = {n: x.detach() for n, x in theirs_of(layer).items()}
        theirs.layers[int(number)].load_state_dict(weights, strict=True)
    theirs.norm.load_state_dict({"weight": model.norm.weight.detach()})
    theirs.train()
    if part == "mixture":
        layer = theirs.layers[0].mlp
        if GPU:
            layer.compile()

        def mixture(x: Tensor) -> Tensor:
            out = layer(x)
            return out[0] if isinstance(out, tuple) else out

        return layer, mixture
    if GPU:
        for layer in theirs.layers:
            layer.compile()
    return theirs, lambda x: theirs(inputs_embeds=x, use_cache=False).last_hidden_state


def torchtitan(name: str, part: str) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    """Build TorchTitan's layer, compiled as its parallelize.py does it: router and GEMMs, not
    dispatch."""
    if part != "mixture":
        raise SystemExit("only the mixture alone is compared with TorchTitan's")
    from torchtitan.models.moe import moe as titans

    size, args, model = our_model(name, 1, 0.0)
    own = model.layers["0"].feed_forward
    numbers = titans.MoEArgs(
        num_experts=args.n_experts,
        num_shared_experts=0,
        score_func="softmax",
        route_norm=True,
        gate_bias=size.family == "gpt_oss",
        score_before_experts=False,
        top_k=args.experts_per_token,
        load_balance_coeff=None,
    )
    torch._dynamo.config.capture_scalar_outputs = True
    e = own.experts
    weights = {"router.gate.weight": own.router.weight}
    if size.family == "gpt_oss":
        from torchtitan.models.gpt_oss.model import moe as of_gpt_oss
        from torchtitan.models.gpt_oss.model.args import GptOssModelArgs

        sizes = GptOssModelArgs(dim=args.dim, moe_inter_dim=args.expert_dim, moe_args=numbers)
        with DEVICE:
            layer = of_gpt_oss.GptOssMoE(sizes, args.dim, args.expert_dim)
        weights |= {
            "router.gate.bias": own.router.bias,
            "experts.mlp1_weight": torch.stack((e.w1, e.w3), 2).flatten(1, 2),
            "experts.mlp1_bias": torch.stack((e.b1, e.b3), 2).flatten(1, 2),
            "experts.mlp2_weight": e.w2,
            "experts.mlp2_bias": e.b2,
        }
    else:
        with DEVICE:
            layer = titans.MoE(numbers, args.dim, args.expert_dim)
        weights |= {"experts.w1": e.w1, "experts.w2": e.w2, "experts.w3": e.w3}
    layer.to(DTYPE).load_state_dict({n: x.detach() for n, x in weights.items()}, strict=False)
    if GPU:
        layer.router = torch.compile(layer.router, fullgraph=True)
        layer.reorderer = torch.compile(layer.reorderer, fullgraph=True)
    if GPU and size.family != "gpt_oss":  # whose experts it does not compile
        compiled = torch.compile(titans._run_experts_grouped_mm, fullgraph=True)
        titans._run_experts_grouped_mm = compiled
    return layer, layer


def flops(size: Size, args: Any, part: str) -> float:
    """Return the FLOPs of forward and backward: 6 for each weight that a token multiplies with, and
    attention's 6 of the causal half of its scores, as models/arithmetic.py counts."""
    tokens = size.batch * size.seq_len
    of_mixture = 3 * args.dim * args.expert_dim * args.experts_per_token
    of_mixture += args.n_experts * args.dim
    if part == "mixture":
        return 6.0 * of_mixture * tokens
    heads = (2 * args.n_heads + 2 * args.n_kv_heads) * args.head_dim
    scores = 0.0
    for number in range(LAYERS):
        seen = size.seq_len / 2
        if getattr(args, "window", 0) and number % 2 == 0:
            seen = min(seen, args.window)
        scores += 12.0 * args.n_heads * args.head_dim * seen
    return tokens * (6.0 * LAYERS * (of_mixture + heads * args.dim) + scores)


KINDS = (  # the first that matches the name of a kernel counts
    ("attention", r"flash|fmha|sdpa|flex_attention|cudnn_generated|attention"),
    ("grouped GEMM", r"group|GroupProblemShape|PtrArray"),
    ("GEMM", r"gemm|nvjet|cutlass|cublas|gemv|splitK"),
    ("sort", r"sort|radix|scan|topk|gatherTopK|histogram|bitonic|elementwise_kernel_with_index"),
    ("permutation", r"index|gather|scatter|fill_indices"),
    ("other fused", r"triton"),
    ("copies and sums", r"."),
)


def kernels(run: Callable[[], object]) -> list[tuple[str, int, float]]:
    """Name, calls and microseconds of each kernel of one call, the longest first."""
    if not GPU:
        return []
    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        run()
        torch.cuda.synchronize()
    found = [(e.key, e.count, e.self_device_time_total) for e in recorded.key_averages()]
    return sorted((row for row in found if row[2] > 0), key=lambda row: -row[2])


def shares(found: list) -> str:
    if not found:
        return "-"
    total = sum(row[2] for row in found)
    of_kind = dict.fromkeys((kind for kind, _ in KINDS), 0.0)
    for name, _, time in found:
        kind = next(kind for kind, pattern in KINDS if re.search(pattern, name, re.IGNORECASE))
        of_kind[kind] += time / total
    return ", ".join(f"{kind} {share:.0%}" for kind, share in of_kind.items() if share >= 0.005)


def median_error(a: Tensor, b: Tensor) -> float:
    a, b = a.float().flatten(0, 1), b.float().flatten(0, 1)
    return ((a - b).norm(dim=-1) / b.norm(dim=-1)).median().item()


def one(part_name: str, contender: str, folder: Path) -> None:
    name, part = part_name.split(" ")
    size, args = sizes_of(name, LAYERS, 0.0)
    makers = {
        "ours": lambda: ours(name, part, 0.0),
        "ours with balance loss": lambda: ours(name, part, 1e-3),
        "hf": lambda: hf(name, part, "sdpa" if name == "qwen3" else SINKS),
        "torchtitan": lambda: torchtitan(name, part),
    }
    module, forward = makers[contender]()
    random = torch.Generator(DEVICE).manual_seed(7)
    shape = (size.batch, size.seq_len, args.dim)
    x = torch.randn(shape, device=DEVICE, dtype=DTYPE, generator=random).requires_grad_()
    grad = torch.randn(shape, device=DEVICE, dtype=DTYPE, generator=random)

    def run() -> Tensor:
        x.grad = None
        for p in module.parameters():
            p.grad = None
        out = forward(x)
        out.backward(grad)
        return out

    out = run()
    torch.save((out.detach().cpu(), x.grad.cpu()), folder / f"{part_name}; {contender}.pt")
    del out

    def last() -> dict:
        found = kernels(run)
        return {"shares": shares(found), "kernels": found[:40]}

    isolated.serve(run, {"flops": flops(size, args, part)}, last)


def rows_of(running: dict[str, isolated.Contender], folder: Path) -> list[list[str]]:
    peak = peak_flops(torch.cuda.get_device_name(), 0, DTYPE) if GPU else None
    rows = []
    for key, contender in running.items():
        part, name = key.split("; ")
        base = running[f"{part}; ours"]
        if not contender.seconds:
            rows.append([part, name, *["-"] * 7, contender.cell()])
            continue
        seconds = statistics.median(contender.seconds)
        rate = contender.facts["flops"] / seconds
        ratios = [a / b for a, b in zip(base.seconds, contender.seconds)]
        rows.append(
            [
                part,
                name,
                f"{seconds * 1e3:.2f} ms",
                f"{min(contender.seconds) * 1e3:.2f} ms",
                f"{rate / 1e12:.1f}",
                f"{rate / peak:.1%}" if peak else "-",
                f"{statistics.median(ratios):.2f}" if ratios else "-",
                errors(folder, key, f"{part}; ours"),
                f"{contender.facts.get('gib', 0):.2f}",
                contender.facts.get("shares", "-"),
            ]
        )
    return rows


def errors(folder: Path, key: str, base: str) -> str:
    try:
        one, other = (torch.load(folder / f"{name}.pt") for name in (key, base))
    except OSError:
        return "-"
    return ", ".join(f"{median_error(a, b):.1e}" for a, b in zip(one, other))


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    every = [part for parts in PARTS.values() for part in parts]
    parser.add_argument("--only", default=",".join(every))
    parser.add_argument("--seconds", type=float, default=55, help="to compile, all of a part")
    parser.add_argument("--one", nargs=3, metavar=("PART", "CONTENDER", "FOLDER"))
    args = parser.parse_args()
    if args.one:
        return one(args.one[0], args.one[1], Path(args.one[2]))
    asked = harness.named(args.only, every)
    running: dict[str, isolated.Contender] = {}
    with tempfile.TemporaryDirectory() as folder:
        for parts in PARTS.values():
            contenders = {
                f"{part}; {name}": ["-m", "lab.bench", "mixtures", "--one", part, name, folder]
                for part, names in parts.items()
                for name in names
                if part in asked
            }
            rounds = 2 + args.rounds
            running |= isolated.in_turn(contenders, rounds, args.seconds, 10, args.json)
            isolated.note(args.json, running)
        for contender in running.values():
            contender.seconds = contender.seconds[2:]
        rows = rows_of(running, Path(folder))
    notes = (
        f"{DTYPE}, {args.rounds} alternating rounds; layers: {LAYERS} blocks. Shares: by the names "
        "of kernels."
    )
    sizes = ", ".join(f"{name} {size.batch} x {size.seq_len}" for name, size in SIZES.items())
    harness.report(
        "Mixtures of experts",
        list(COLUMNS),
        rows,
        f"{notes} Tokens: {sizes}.",
        args.json,
        isolated.numbers(running),
    )
