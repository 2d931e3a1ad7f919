"""Compare a training step of `train.py` with the barest loop around the same model, and with
Hugging Face's Llama.

    python -m lab.bench step [--rounds 15] [--dtypes float32,bfloat16] [--only ours,torchtitan] [--json out.json]
                               [--table.key=value ...]

Same shape, batch, dtype and optimizer for all; in alternation, each in a separate process, whose
peak memory is reported. With --compile.enabled=true the blocks of all are compiled. The contenders:

- ours: `train.build` and `train.train_step`, as a run does it, metrics and all checks included.
- bare: our model in a loop of five lines, with torch's own clipping. In bfloat16 it keeps float32
  masters by hand.
- hf: `LlamaForCausalLM` in that same loop; in bfloat16 under autocast, as its users train it.
- torchtitan (0.3.0): its Llama 3 with its FSDP2 on one rank, which is what its mixed precision is
  made of, its loss in eight pieces and its activation checkpointing (the others have none here). It
  has attention for language models on GPUs only (FlexAttention with a mask); on a CPU we give it
  the class that calls PyTorch's kernel. Of 0.2.2, which torch 2.11 can run: the same with its loss
  of whole logits and its own attention. It begins with our values, and no speed is reported unless
  its first loss is ours. The peers are measured where they are installed: they are no requirement
  of ours, use an environment to throw away.
- torchtitan_autocast (0.2.2): the same without FSDP2, as its trainer does on one GPU.
- "our settings": on a CPU, the same with what our runs ask of the libraries there
  (`configs/cpu.py::cpu_settings`).
"""

import statistics
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec

from configs.cpu import cpu_settings

import torch
import torch.distributed as dist
from torch import Tensor

import train
from configs.load import load_config
from configs.schema import Config, InputError
from lab.bench import harness, isolated
from models import FORMATS, llama
from models.formats.torchtitan import in_pairs, rotated_heads
from parallelisms import blocks, dp
from parallelisms.mesh import pick_device
from training import init
from training.loss import linear_cross_entropy

CLIP = 1.0
COLUMNS = (
    "dtype",
    "contender",
    "median step",
    "fastest",
    "tokens/s",
    "GFLOP/s",
    "ours / this (median of pairs)",
    "peak GiB",
    "loss, first and last",
)
# of two first losses, relative: the same weights and tokens, rounded in different places
SAME_LOSS = {"float32": 1e-5, "bfloat16": 1e-3}


def adamw(parameters, cfg):
    given = cfg.optimizer
    return torch.optim.AdamW(
        parameters,
        lr=given.lr,
        betas=given.betas,
        eps=given.eps,
        weight_decay=given.weight_decay,
        fused=True,
    )


def loop(model, cfg, loss_of):
    """Return the bare loop around a model whose loss is the result of `loss_of`."""
    optimizer = adamw(model.parameters(), cfg)

    def step():
        loss = loss_of()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def bare_float32(args, cfg, tokens, labels):
    model = blocks.compile_blocks(llama.FAMILY.build(args), cfg.compile)
    loss_head = partial(
        linear_cross_entropy, labels=labels, chunk_tokens=cfg.training.loss_chunk_tokens
    )
    positions = torch.arange(tokens.shape[1], device=tokens.device)
    return loop(model, cfg, lambda: model(tokens, positions, loss_head) / labels.numel())


def bare_bfloat16(args, cfg, tokens, labels):
    model = blocks.compile_blocks(llama.FAMILY.build(args).to(torch.bfloat16), cfg.compile)
    masters = [p.detach().float().requires_grad_() for p in model.parameters()]
    optimizer = adamw(masters, cfg)
    positions = torch.arange(tokens.shape[1], device=tokens.device)

    def step():
        loss_head = partial(
            linear_cross_entropy, labels=labels, chunk_tokens=cfg.training.loss_chunk_tokens
        )
        loss = model(tokens, positions, loss_head) / labels.numel()
        loss.backward()
        for master, p in zip(masters, model.parameters()):
            master.grad = p.grad.float()
            p.grad = None
        torch.nn.utils.clip_grad_norm_(masters, CLIP)
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(list(model.parameters()), masters)
        return loss.detach()

    return step


def cross_entropy_of(logits_of, labels, dtype):
    """Return the loss of a peer's model; in bfloat16 under autocast."""
    with torch.autocast(labels.device.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
        logits = logits_of()
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def compiled(blocks, cfg):
    """Compile a peer's blocks, as its own users do."""
    for block in blocks if cfg.compile.enabled else ():
        block.compile(backend=cfg.compile.backend)


def hf(args, cfg, tokens, labels, dtype):
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**FORMATS["llama"].hf_config(args)))
    compiled(model.model.layers, cfg)
    return loop(
        model,
        cfg,
        lambda: cross_entropy_of(lambda: model(tokens, use_cache=False).logits, labels, dtype),
    )


def titans_scaling(args):
    """Return its names for how our model scales rotary positions."""
    given = {
        "factor": "scaling_factor",
        "original_max_seq_len": "original_max_position_embeddings",
    }
    return {given.get(key, key): value for key, value in (args.rope_scaling or {}).items()}


def mesh_of_one(device):
    """Return a mesh for FSDP2 on one rank, of which TorchTitan's mixed precision is made."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return dist.init_device_mesh(device.type, (1,), mesh_dim_names=("fsdp",))


def torchtitan(args, cfg, tokens, labels, dtype):
    if version("torchtitan").startswith("0.2."):
        return torchtitan_2(args, cfg, tokens, labels, dtype)
    from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
    from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
    from torchtitan.distributed.fsdp import apply_fsdp_to_decoder, disable_fsdp_gradient_division
    from torchtitan.models import llama3
    from torchtitan.models.common.attention import ScaledDotProductAttention

    device = tokens.device
    dim = args.dim
    seq_len = tokens.shape[1]
    scaling = titans_scaling(args)
    if scaling:
        scaling["scaling"] = "llama"
    layers = llama3._build_llama3_layers(
        n_layers=args.n_layers,
        dim=dim,
        n_heads=args.n_heads,
        n_kv_heads=args.n_kv_heads,
        hidden_dim=args.hidden_dim,
        rope=llama3.ComplexRoPE.Config(
            dim=args.head_dim, max_seq_len=seq_len, theta=args.rope_theta, **scaling
        ),
        attn_backend="flex",
    )
    if device.type == "cpu":
        for layer in layers:
            layer.attention.inner_attention = ScaledDotProductAttention.Config()
    tied = args.tied_embeddings
    vocab_size = args.vocab_size
    embedding_init = llama3._EMBEDDING_SKIP_INIT if tied else llama3._EMBEDDING_INIT
    head_init = llama3._output_linear_init(dim)
    model = llama3.Llama3Model.Config(
        dim=dim,
        vocab_size=vocab_size,
        layers=layers,
        enable_weight_tying=tied,
        norm=llama3.RMSNorm.Config(
            normalized_shape=dim, eps=args.norm_eps, param_init=llama3._NORM_INIT
        ),
        tok_embeddings=llama3.Embedding.Config(
            num_embeddings=vocab_size, embedding_dim=dim, param_init=embedding_init
        ),
        lm_head=llama3.Linear.Config(
            in_features=dim, out_features=vocab_size, param_init=head_init
        ),
    ).build()
    with torch.no_grad():
        model.init_states(buffer_device=device)
    kinds = {"full": FullAC, "selective": SelectiveAC}
    if kind := kinds.get(cfg.activation_checkpoint.mode):
        kind.Config().build(dump_folder="").apply(model)
    compiled(model.layers.values(), cfg)
    mesh = mesh_of_one(device)
    apply_fsdp_to_decoder(
        model, mesh, param_dtype=dtype, reduce_dtype=torch.float32, pp_enabled=False
    )
    disable_fsdp_gradient_division(model)
    loss = ChunkedLossWrapper.Config(
        loss_fn=CrossEntropyLoss.Config(global_vocab_size=vocab_size)
    ).build()
    loss.set_lm_head(model.lm_head)
    model._skip_lm_head = True
    positions = torch.arange(seq_len).expand_as(tokens)
    masks = None if device.type == "cpu" else model.get_attention_masks(positions)
    count = torch.tensor(float(labels.numel()))
    return loop(model, cfg, lambda: loss(model(tokens, positions, masks), labels, count)[0])


def torchtitan_2(args, cfg, tokens, labels, dtype, autocast=False):
    """Build TorchTitan 0.2.2's model, the last release for torch 2.11, with our initial values. It
    begins with our initial values.

    autocast: as its trainer does on one GPU; otherwise FSDP2, as it does on several.
    """
    from torchtitan.components.loss import build_cross_entropy_loss
    from torchtitan.config import JobConfig
    from torchtitan.distributed.activation_checkpoint import apply_ac
    from torchtitan.models.llama3.infra import parallelize
    from torchtitan.models.llama3.model.args import RoPEScalingArgs, TransformerModelArgs
    from torchtitan.models.llama3.model.model import Transformer

    if args.tied_embeddings:
        raise InputError("TorchTitan 0.2 ties no weights: add --model.tied_embeddings=false")
    device = tokens.device
    # it rounds two thirds of 4 * dim times this factor up to a multiple
    hidden = {"ffn_dim_multiplier": args.hidden_dim / int(8 * args.dim / 3), "multiple_of": 16}
    sizes = TransformerModelArgs(
        dim=args.dim,
        n_layers=args.n_layers,
        n_heads=args.n_heads,
        n_kv_heads=args.n_kv_heads,
        vocab_size=args.vocab_size,
        norm_eps=args.norm_eps,
        rope_theta=args.rope_theta,
        rope_scaling_args=RoPEScalingArgs(**titans_scaling(args)),
        max_seq_len=tokens.shape[1],
        **hidden,
    )
    model = Transformer(sizes)
    assert model.layers["0"].feed_forward.w1.out_features == args.hidden_dim
    with torch.no_grad():
        model.init_weights(buffer_device=device)
    begin_as_ours(model, args, cfg)
    job = JobConfig()
    job.compile.enable = cfg.compile.enabled
    job.compile.backend = cfg.compile.backend
    mode = job.activation_checkpoint.mode = cfg.activation_checkpoint.mode
    job.activation_checkpoint.selective_ac_option = "op"
    if mode != "none":
        apply_ac(
            model,
            job.activation_checkpoint,
            model_compile_enabled=cfg.compile.enabled,
            op_sac_save_list=parallelize._op_sac_save_list,
        )
    if cfg.compile.enabled:
        parallelize.apply_compile(model, job.compile)
    if not autocast:
        mesh = mesh_of_one(device)
        parallelize.apply_fsdp(
            model, mesh, param_dtype=dtype, reduce_dtype=torch.float32, pp_enabled=False
        )
    loss = build_cross_entropy_loss(job)

    def loss_of():
        narrow = torch.autocast(device.type, dtype) if autocast else nullcontext()
        with narrow:
            return loss(model(tokens), labels) / labels.numel()

    return loop(model, cfg, loss_of)


def begin_as_ours(model, args, cfg):
    """Copy our initial values. Its parameters have our names."""
    init.initialise(model, llama.FAMILY.initial_values(args), cfg.run.seed)
    for name, weight in model.named_parameters():
        if heads := rotated_heads("llama", name, args):
            weight.data.copy_(in_pairs(weight.data, heads))


PEERS = {
    "hf": hf,
    "torchtitan": torchtitan,
    "torchtitan_autocast": partial(torchtitan_2, autocast=True),
}


def installed_peers() -> Iterator[str]:
    for name in PEERS:
        package = package_of(name)
        is_old = name == "torchtitan_autocast"
        if find_spec(package) and (not is_old or version(package).startswith("0.2.")):
            yield name


def package_of(name: str) -> str:
    """Return the package of a contender."""
    packages = {"bare": "torch", "hf": "transformers"}
    return packages.get(name, name.removesuffix("_autocast"))


def contender(name: str, cfg: Config) -> Callable[[], Tensor | float]:
    """Return a step of it on random tokens, the same for all; it returns the loss."""
    torch.manual_seed(0)
    _, args = train.architecture(cfg)
    t = cfg.training
    device = pick_device(cfg.run, 0)
    dtype = dp.param_dtype(t, device)
    with torch.device(device):
        window = torch.randint(0, args.vocab_size, (t.local_batch_size, t.seq_len + 1))
        tokens = window[:, :-1].contiguous()
        labels = window[:, 1:].contiguous()
        if name == "ours":
            job = train.build(cfg)
            batch = {"tokens": tokens[None], "labels": labels[None]}
            return lambda: train.train_step(job, batch).loss
        if name == "bare":
            return (bare_float32 if dtype == torch.float32 else bare_bfloat16)(
                args, cfg, tokens, labels
            )
        return PEERS[name](args, cfg, tokens, labels, dtype)


def measure(dtype: str, names: list[str], overrides: list[str], rounds: int) -> list[list[str]]:
    one = ["-m", "lab.bench", "step", f"--training.param_dtype={dtype}", *overrides]
    contenders = {name: [*one, f"--one={name}"] for name in names}
    if not torch.cuda.is_available():
        contenders |= {
            f"{name}, our settings": [*one, f"--one={name}", "--our-settings"]
            for name in names
            if name != "ours"
        }
    seconds, ended = isolated.timed(contenders, rounds)
    compare_losses(dtype, {name: words["losses"][0] for name, words in ended.items()})
    cfg = load_config(overrides)
    tokens = cfg.training.local_batch_size * cfg.training.seq_len
    family, sizes = train.architecture(cfg)
    flops = family.flops_per_token(sizes, cfg.training.seq_len) * tokens
    rows = []
    for name, times in seconds.items():
        median = statistics.median(times)
        rows.append(
            [
                dtype,
                name,
                f"{median * 1e3:.0f} ms",
                f"{min(times) * 1e3:.0f} ms",
                f"{tokens / median:,.0f}",
                f"{flops / median / 1e9:.0f}",
                f"{harness.ratio(seconds, 'ours', name):.3f}",
                f"{ended[name]['gib']:.2f}",
                f"{ended[name]['losses'][0]:.4f}, {ended[name]['losses'][-1]:.4f}",
            ]
        )
    return rows


def compare_losses(dtype: str, losses: dict[str, float]) -> None:
    """Compare the first losses of those that begin with our values, before anyone reads their
    speed. Raises RuntimeError."""
    for name, loss in losses.items():
        begins_as_ours = name.startswith("torchtitan") and version("torchtitan").startswith("0.2.")
        apart = abs(loss / losses["ours"] - 1)
        if begins_as_ours and not apart <= SAME_LOSS[dtype]:
            raise RuntimeError(f"{name} does not compute what ours does: {losses}")


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--dtypes", default="float32,bfloat16")
    installed = list(installed_peers())
    parser.add_argument(
        "--only",
        default=",".join(("ours", "bare", *installed)),
        help="ours, and these; default: all there are",
    )
    parser.add_argument(
        "--one",
        choices=("ours", "bare", *PEERS),
        help="this contender, one step per line of input",
    )
    parser.add_argument(
        "--our-settings", action="store_true", help="with --one: as our runs do on a CPU"
    )
    args, overrides = parser.parse_known_args()
    if args.one:
        if args.our_settings:
            cpu_settings()
        step = contender(args.one, load_config([*overrides, f"--training.max_norm={CLIP}"]))
        losses = []
        isolated.serve(
            lambda: losses.append(step()),
            last=lambda: {"losses": [float(loss) for loss in losses]},
        )
        train.meshes.close_mesh()
        return
    names = list(dict.fromkeys(("ours", *args.only.split(","))))
    if unknown := set(names) - {"ours", "bare", *installed}:
        parser.error(
            f"--only {', '.join(unknown)}: not installed here; there are ours, bare, "
            f"{', '.join(installed)}"
        )
    dtypes = [dtype for dtype in args.dtypes.split(",") if not harness.is_slow(dtype)]
    if unknown := set(dtypes) - {"float32", "bfloat16"}:
        parser.error(f"--dtypes {', '.join(unknown)}: there are float32 and bfloat16")
    cfg = load_config(overrides)
    rows = [row for dtype in dtypes for row in measure(dtype, names, overrides, args.rounds)]
    arch = (
        f"{cfg.model.flavor} model, batch {cfg.training.local_batch_size} x "
        f"{cfg.training.seq_len} tokens"
    )
    harness.report(
        "Training step",
        list(COLUMNS),
        rows,
        f"{arch}; {args.rounds} alternating rounds.",
        args.json,
    )
