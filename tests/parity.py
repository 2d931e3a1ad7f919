"""The parity check: a run on a mesh compared with the plain model, which is one process.

The oracle is the plain model in float32, without checkpointing, with one microbatch. The initial
weights must be equal bitwise. Loss, gradient norm and every gathered gradient of the first step
must agree to 1e-5, and so must the losses, the norms and the weights of three optimizer steps, or
to a bound that says how a model amplifies rounding (`bounds`). Three steps show every mistake of
tests/test_museum.py. The tokens that every expert got must be the same. (Where scores are equal up
to rounding, two meshes may choose different experts, and both are right. An oracle has the first
seed without such a tie, and what is compared with it has the same.) Meshes do not divide the sizes
of the model evenly: vocabulary 263, width 50. Labels that do not count are spread unevenly over
ranks and microbatches. A run is a combination of one setting per factor (FACTORS).
"""

import functools
import os
import warnings
from collections.abc import Collection

import numpy as np
import torch

import train
from checkpoint.storage import box_of, local
from configs.load import load_config
from parallelisms.mesh import Mesh, world
from tests.covering import covering_array, every_pair
from tests.ranks import run_ranks
from tests.runs import (
    ADAMW,
    CONTEXT_MESHES,
    EXPERT_MESHES,
    MESHES,
    SMALL_MODEL,
    ULYSSES,
    of_family,
)
from tools.parity import in_memory
from training import init

STEPS, SEQ, BATCH, VOCAB = 3, 16, 24, 263
OPTIONS = [
    *SMALL_MODEL,
    f"--training.global_batch_size={BATCH}",
    f"--training.steps={STEPS}",
    "--lr_schedule.warmup_steps=0",
]
# in bfloat16 the Newton-Schulz iteration would turn rounding into 2^-8 of an update, and in float32
# no run would be judged to EXACT
MUON = [*ADAMW, "--optimizer.kind=muon", "--optimizer.ns_dtype=float64"]
SGD = ["--optimizer.kind=sgd", "--optimizer.lr=0.2", "--optimizer.momentum=0.9"]
# six in a pipeline. trajectory() makes the option: it depends on the mesh
TWO_MICROBATCHES = "two microbatches"
# two ranks of a run say that they are on one host, and the next two that they are on another.
# trajectory() sets what a launcher would
TWO_ON_A_HOST = "two ranks on a host"
# windows have documents of 3 to 7 tokens, and attention stays inside each; no option of a run
# either
DOCUMENTS = "documents"
# the balancing biases send every token to expert 5 of each mixture; no option either
ONE_EXPERT = "one expert"
# labels count in the first quarter of a window alone, so some ranks of a cp group have none
FEW_LABELS = "few labels"

# the scores of experts differ by some 1e-7 of their size from mesh to mesh
LEAST_GAP, SEEDS = 1e-6, range(20)
# every initial weight is one unit in the last place larger or smaller; no option either
SHAKEN = "shaken"
# options of `more` that change the numbers, in addition to the markers
FLOAT64 = "--training.param_dtype=float64"
CHANGE_THE_MODEL = (
    "--model.",
    "--training.seq_len",
    "--training.expert_",
    "--training.z_loss",
    "--optimizer.ns_dtype",
    FLOAT64,
    "--lora.",
    "--checkpoint.load_",
)
MARKERS = DOCUMENTS, FEW_LABELS, ONE_EXPERT, SHAKEN

# factor -> {setting: options}. The first setting of a factor is the plain model's.
NUMBERS = {  # settings that change the numbers: every combination has its own oracle
    "model": {
        "llama": [],
        "qwen3": ["--model.family=qwen3"],
        # three layers with a window, and one without
        "olmo2": ["--model.family=olmo2", "--model.n_layers=4", "--model.window=5"],
    },
    "embeddings": {
        "untied": ["--model.tied_embeddings=false"],
        "tied": ["--model.tied_embeddings=true"],
    },
    "optimizer": {"adamw": ADAMW, "sgd": SGD, "muon": MUON},
    # every norm of these runs is above 0.1 and below 1
    "clipping": {"none": [], "in force": ["--training.max_norm=0.1"]},
    # judged to EXACT: a mistake that float32's rounding hides is seen
    "dtype": {"float32": [], "float64": [FLOAT64]},
}
EXECUTION = {  # how it is computed: no setting may change the numbers
    "checkpointing": {
        mode: [f"--activation_checkpoint.mode={mode}"]
        for mode in ("none", "full", "every_n", "selective")
    },
    "weights": {
        "default": [],
        "kept for the step": [
            "--parallelism.reshard_after_forward=false",
            "--parallelism.reshard_after_backward=false",
        ],
        "last two kept": [
            "--parallelism.keep_gathered=2",
            "--parallelism.reshard_after_forward=true",
        ],
        "always freed": ["--parallelism.reshard_after_forward=true"],
    },
    "accumulation": {
        "none": [],
        "reduced once": [TWO_MICROBATCHES],
        "reduced each time": [TWO_MICROBATCHES, "--parallelism.accumulate_gradients=sharded"],
    },
}
FACTORS = NUMBERS | EXECUTION
# they differ from the other settings by the blocks that they are for
BETWEEN_OTHERS = "every_n", "last two kept"
CONTEXT = {  # further factors of context parallelism; the last two change what is computed
    "method": {"gather": [], "ulysses": [ULYSSES]},
    "documents": {"none": [], "masked": [DOCUMENTS]},
    "labels": {"everywhere": [], "at the beginning": [FEW_LABELS]},
}
# Models with experts: 8 of odd width, 3 for each token, a loss and biases that balance strongly
# enough to matter.
_EXPERTS = [
    "--model.n_experts=8",
    "--model.experts_per_token=3",
    "--model.expert_dim=11",
    "--model.balance_loss=0.05",
]
DEEPSEEK = ["--model.family=deepseek_v3", *_EXPERTS, "--training.expert_bias_speed=0.01"]
GPT_OSS = ["--model.family=gpt_oss", *_EXPERTS, "--model.window=5"]
# a gated delta net, attention, and a gated delta net; a document is longer than the convolution or not
QWEN3_NEXT = [
    "--model.family=qwen3_next",
    *_EXPERTS,
    "--model.shared_dim=14",
    "--model.attention_interval=2",
    "--model.rope_dim=4",
    "--model.delta_key_heads=4",
    "--model.delta_value_heads=8",
    "--model.delta_key_dim=5",
    "--model.delta_value_dim=7",
]
# KDA and a dense layer, KDA, and latent attention; a head of KDA has an odd width
KIMI_LINEAR = [
    "--model.family=kimi_linear",
    *_EXPERTS,
    "--training.expert_bias_speed=0.01",
    "--model.attention_interval=3",
    "--model.delta_heads=4",
    "--model.delta_dim=5",
]
EXPERTS = {
    "qwen3 experts": ["--model.family=qwen3", *_EXPERTS],
    "deepseek_v3": DEEPSEEK,
    "gpt_oss": GPT_OSS,
}
# Adapters on a base that is not read. LORA_OSS: of a mixture of experts with sinks and windows
_LORA = ["--lora.rank=5", "--lora.alpha=10", "--checkpoint.load_hf=nowhere"]
LORA_DENSE = [*_LORA, '--lora.targets=["wq", "wk", "wv", "wo", "w1", "w2", "w3"]']
LORA_OLMO2 = [*LORA_DENSE, "--model.family=olmo2", "--model.n_layers=4", "--model.window=5"]
LORA_OSS = [*LORA_DENSE, *GPT_OSS]
LORA_NEXT = [*_LORA, *QWEN3_NEXT, '--lora.targets=["wq", "wv", "wg", "wz", "wb", "wo", "w1"]']
LORA_KIMI = [
    *_LORA,
    *KIMI_LINEAR,
    '--lora.targets=["wq", "wb", "wf_a", "wf_b", "wg_b", "wkv_b", "wo", "w1"]',
]
LORA_MLA = [*_LORA, *DEEPSEEK, '--lora.targets=["wq_b", "wkv_a", "wkv_b", "wo", "w1", "w2", "w3"]']
Combination = dict[str, str]  # factor -> setting; "mesh" is a factor too


def trajectory(options: list[str], dp_size: int = 1) -> dict:
    """Train `training.steps` steps on this rank through train.build and train.train_step; gathers
    everything worth comparing."""
    warnings.simplefilter("ignore")
    in_pipeline = any("pipeline_parallel" in option for option in options)
    rows = BATCH // dp_size // ((6 if in_pipeline else 2) if TWO_MICROBATCHES in options else 1)
    has_documents, has_few_labels, has_one_expert, is_shaken = (
        marker in options for marker in MARKERS
    )
    os.environ["LOCAL_WORLD_SIZE"] = str(2 if TWO_ON_A_HOST in options else world().size)
    markers = TWO_MICROBATCHES, TWO_ON_A_HOST, *MARKERS
    options = [option for option in options if option not in markers]
    base = options_of_a_family(options)
    cfg = load_config(
        [*base, f"--training.local_batch_size={rows}", *options], world().size, world().local_size
    )
    job = train.build(cfg)
    if has_one_expert:
        for name, bias in job.model.named_parameters():
            if name.endswith("router.bias"):
                bias.data[5] = 100.0
    if cfg.lora.rank:
        begin_adapters(job.model)
    if is_shaken:
        shake(job.model)
    seen = {
        "init": gathered(job.mesh, dict(job.model.named_parameters())),
        "loss": [],
        "norm": [],
        "counts": [],
    }

    def keep_gradients(*_):
        if "grad" not in seen:
            missing = torch.zeros_like
            trained = {n: p for n, p in job.model.named_parameters() if p.requires_grad}
            gradients = {n: missing(p) if p.grad is None else p.grad for n, p in trained.items()}
            seen["grad"] = gathered(job.mesh, gradients)

    job.optimizer.register_step_pre_hook(keep_gradients)
    batches = in_memory.batches(
        cfg, job.mesh, np.random.default_rng(0).integers(0, VOCAB, 4000).astype(np.uint16)
    )
    length = cfg.training.seq_len
    # of this rank's tokens
    positions = torch.cat(
        [torch.arange(part.start, part.stop) for part in job.mesh.token_ranges(length)]
    )
    for step in range(cfg.training.steps):
        batch = batches[step]
        sample = batch["window"].view(*batch["labels"].shape[:2], 1)  # [A, b, 1]
        # by sample, so that ranks hold different counts
        masked = (sample * 7 + positions) % 11 < sample % 5
        if has_few_labels:
            masked |= positions >= length // 4
        if has_documents:
            batch["positions"] = torch.arange(length) % (3 + sample % 5)
        batch["labels"] = batch["labels"].masked_fill(masked, -100)
        result = train.train_step(job, batch)
        assert not unfinished_works(), (
            f"step {step} has begun collectives without a wait: {unfinished_works()}"
        )
        seen["loss"].append(result.loss)
        seen["norm"].append(result.grad_norm)
        seen["counts"].append(
            {layer: counts.tolist() for layer, counts in result.terms.sums["expert_counts"].items()}
        )
    seen["weights"] = gathered(job.mesh, dict(job.model.named_parameters()))
    return seen


def gathered(mesh: Mesh, tensors: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """Return this rank's tensors, whole. Every rank of the mesh must call it. In one collective,
    since `full_tensor` needs up to three for each tensor, which would be a fifth of a run."""
    own = {}
    for name, tensor in tensors.items():
        start, _ = box_of(name, tensor)
        own[name] = start, local(tensor).cpu().numpy()
    of_ranks = mesh.gather(own)
    result = {}
    for name, tensor in tensors.items():
        result[name] = np.full(tuple(tensor.shape), np.nan, own[name][1].dtype)
        # its own comes last: where there is a mistake, replicas may differ
        for parts in (*of_ranks, own):
            if name in parts:
                start, part = parts[name]
                place = (slice(first, first + n) for first, n in zip(start, part.shape))
                result[name][tuple(place)] = part
    return result


def options_of_a_family(options: list[str]) -> list[str]:
    """Return OPTIONS without those that the family of these options does not have."""
    chosen = [o.partition("=")[2] for o in options if o.startswith("--model.family=")]
    return of_family(chosen[-1] if chosen else "llama", OPTIONS)


def begin_adapters(model: torch.nn.Module) -> None:
    """Give B values: while it is 0, as at the start of a run, A has no gradient."""
    for name, param in model.named_parameters():
        if name.endswith("lora_b"):
            init.fill(param, name, "normal", 0.02, 0)


@torch.no_grad()
def shake(model: torch.nn.Module) -> None:
    """Move every trained weight to an adjacent float32."""
    up = torch.tensor(torch.inf)
    generator = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        if weight.requires_grad:
            goes_up = torch.rand(weight.shape, generator=generator) < 0.5
            weight.copy_(torch.where(goes_up, weight.nextafter(up), weight.nextafter(-up)))


def unfinished_works() -> int:
    """Return how many functional collectives this process has begun and not waited for. PyTorch
    keeps their tensors."""
    return torch._C._distributed_c10d._get_work_registry_size()


def options_of(combination: Combination, factors: dict = FACTORS) -> list[str]:
    return [option for factor in factors for option in factors[factor][combination[factor]]]


def trajectories(runs: list[list[str]], dp_size: int) -> list[dict]:
    """Run trajectories one after another in the same processes: the first run pays for what PyTorch
    looks up once."""
    return [trajectory(options, dp_size) for options in runs]


def pairwise(
    factors: dict, simple: list[str], composed: list[str], meeting: Collection[str]
) -> list[Combination]:
    """Return combinations of a mesh and a setting of each of `factors`, in which every setting meets
    each simple mesh, and every two settings of the factors `meeting` meet. A composed mesh meets two
    settings of each factor: the last ones, without BETWEEN_OTHERS."""
    settings = {factor: list(table) for factor, table in factors.items()}
    needless = set(every_pair(settings))
    needless -= set(every_pair({factor: settings[factor] for factor in meeting}))
    fewer = {}
    for factor, options in settings.items():
        fewer[factor] = [option for option in options if option not in BETWEEN_OTHERS][-2:]
    return [
        *covering_array({"mesh": simple} | settings, needless),
        *covering_array({"mesh": composed} | fewer, every_pair(fewer)),
    ]


def combination_of(**settings: str) -> Combination:
    """Return the plain model's settings, except for these."""
    return {factor: next(iter(table)) for factor, table in FACTORS.items()} | settings


def numbers_of(*more: str, **settings: str) -> tuple[str, ...]:
    """Return the options of the plain model: of `more` options, those of a mesh, the ones that change
    the model count."""
    combination = combination_of(**settings)
    numbers = options_of({factor: combination[factor] for factor in NUMBERS}, NUMBERS)
    return (*numbers, *(o for o in more if o.startswith(CHANGE_THE_MODEL) or o in MARKERS))


def plain(*more: str, **numbers: str) -> dict:
    """Run the oracle of these settings: one process, no parallelism, no accumulation, no
    checkpointing. What is compared with it needs `seed_of` it among its options."""
    return oracle_of(numbers_of(*more, **numbers))


def seed_of(oracle: dict) -> str:
    """Return the option of a run that is compared with this oracle."""
    return f"--run.seed={oracle['seed']}"


@functools.cache
def oracle_of(options: tuple[str, ...]) -> dict:
    """Return a trajectory in which every choice of experts is clear, with its "seed" and its
    "options"."""
    return run_ranks(1, _clear, list(options))[0]


def _clear(options: list[str]) -> dict:
    gaps = {}
    for seed in SEEDS:
        own = [*options, f"--run.seed={seed}"]
        seen, gaps[seed] = _with_gap(own)
        if gaps[seed] > LEAST_GAP:
            return seen | {"seed": seed, "options": own}
    raise AssertionError(
        f"with each of {len(SEEDS)} seeds rounding may change an expert of {options}: {gaps}"
    )


def clear_trajectories(runs: list[list[str]]) -> list[dict]:
    """Return what oracle_of returns for each of these options, from one process."""
    return [_clear(options) for options in runs]


def _with_gap(options: list[str]) -> tuple[dict, float]:
    """Return a trajectory, and the smallest lead in it of a chosen expert, or group of experts,
    over one that was not chosen, as a part of its score."""
    gaps, real = [], torch.Tensor.topk

    def topk(scores, k, dim):
        if k < scores.shape[-1]:
            best = real(scores, k + 1, dim).values
            chosen, left_out = best[..., -2], best[..., -1]
            gaps.append(((chosen - left_out) / chosen.abs()).min().item())
        return real(scores, k, dim)

    torch.Tensor.topk = topk
    try:
        return trajectory(options), min(gaps, default=1.0)
    finally:
        torch.Tensor.topk = real


# At equal weights, which are those of step 1, a mesh and the plain model differ by the rounding of
# sums: 1e-7 to 1e-6 in the gradients. So loss, norm and gradients are judged there to EQUAL.
# Afterwards the weights themselves are apart, and training amplifies that. By how much is a
# property of the model and the optimizer, and is measured: the plain model is trained once more,
# with every initial weight moved by one unit in the last place (SHAKEN), which is an error like
# that of rounding. In a norm or a weight a correct mesh was up to 3 times as far off as that run,
# so the trajectory may be AMPLIFIED times as far. Most models stay below EQUAL, and are judged to
# that. Where a bound came above LARGEST it would let mistakes pass.
EQUAL, AMPLIFIED, LARGEST = 1e-5, 8, 1e-2
# In float64 right meshes differ by 1e-16 to 1e-13, along the trajectory too.
EXACT = 1e-12


def apart(seen: dict, oracle: dict) -> tuple[dict[str, float], dict[str, float]]:
    """Relative differences by name: at equal weights, and along the trajectory."""
    equal_weights, later = {}, {}
    for key in "loss", "norm":
        error = np.abs(np.array(seen[key]) / np.array(oracle[key]) - 1)
        equal_weights[key], later[key] = error[0], np.max(error[1:])
    for key, errors in ("grad", equal_weights), ("weights", later):
        assert seen[key].keys() == oracle[key].keys()
        for n, want in oracle[key].items():
            size = np.linalg.norm(want) or np.finfo(np.float32).tiny
            errors[f"{key} of {n}"] = np.linalg.norm(seen[key][n] - want) / size
    return equal_weights, later


def bounds(oracle: dict) -> dict[str, float]:
    """Return the limits for "loss", "norm" and "weights" along the trajectory. Without its options,
    an oracle allows EQUAL."""
    if "options" not in oracle:
        return dict.fromkeys(("loss", "norm", "weights"), EQUAL)
    if "bounds" not in oracle:
        shaken = run_ranks(1, trajectory, [*oracle["options"], SHAKEN])[0]
        oracle["bounds"] = rounding_bounds(shaken, oracle)
    return oracle["bounds"]


def rounding_bounds(shaken: dict, oracle: dict) -> dict[str, float]:
    """Return the bounds that follow from a plain run whose initial weights were moved by
    rounding."""
    _, later = apart(shaken, oracle)
    result = {}
    for key in "loss", "norm", "weights":
        error = max(error for name, error in later.items() if name.startswith(key))
        result[key] = min(max(EQUAL, AMPLIFIED * error), LARGEST)
    return result


def compare(name: str, seen: dict, oracle: dict, limit: float = EQUAL) -> list[str]:
    """List the differences as sentences, empty when all is equal. limit: of relative differences,
    where kernels are not the same, or EXACT, which amplified rounding does not excuse."""
    problems = [
        f"{name}: initial {n} is not bitwise equal"
        for n, w in oracle["init"].items()
        if not np.array_equal(w, seen["init"][n])
    ]
    if seen["counts"] != oracle["counts"]:
        problems.append(f"{name}: experts got other numbers of tokens")
    equal_weights, later = apart(seen, oracle)
    for what, error in equal_weights.items():
        if not error <= limit:
            problems.append(f"{name}: {what} off by {error:.1e} relative at equal weights")
    for what, error in later.items():
        if error <= limit:
            continue
        if limit == EXACT or not error <= bounds(oracle)[what.partition(" ")[0]]:
            problems.append(f"{name}: {what} off by {error:.1e} relative after step 1")
    return problems


def whole_model(ranks: list[dict]) -> dict:
    """Join what all ranks have seen of a run: in a pipeline each one has other parameters."""
    both = {
        key: {n: x for seen in ranks for n, x in seen[key].items()}
        for key in ("init", "grad", "weights")
    }
    counts = [
        {layer: x for seen in ranks for layer, x in seen["counts"][step].items()}
        for step in range(len(ranks[0]["counts"]))
    ]
    return ranks[0] | both | {"counts": counts}


def check(
    mesh: str,
    combinations: list[Combination],
    more: list[str] | None = None,
    timeout: float = 270,
    factors: dict = FACTORS,
) -> None:
    """Check that every combination of `factors` on this mesh, with `more` options, is its plain
    model; all ranks report the same numbers."""
    ranks, options, dp_size = (MESHES | CONTEXT_MESHES | EXPERT_MESHES)[mesh]
    runs, oracles = [], []
    for combination in combinations:
        run = [*options_of(combination, factors), *options, *(more or [])]
        numbers = {factor: combination[factor] for factor in NUMBERS if factor in combination}
        oracles.append(plain(*run, **numbers))
        runs.append([*run, seed_of(oracles[-1])])
    results = run_ranks(ranks, trajectories, runs, dp_size, timeout=timeout)
    problems = []
    for i, combination in enumerate(combinations):
        name = (
            f"{mesh} {', '.join(f'{factor}: {combination[factor]}' for factor in factors)} "
            f"{' '.join(more or [])}"
        )
        seen = whole_model([of_rank[i] for of_rank in results])
        problems += compare(name, seen, oracles[i], EXACT if FLOAT64 in runs[i] else EQUAL)
        for rank, of_rank in enumerate(results):
            if (
                of_rank[i]["loss"] != results[0][i]["loss"]
                or of_rank[i]["norm"] != results[0][i]["norm"]
            ):
                problems.append(f"{name}: rank {rank} reports a different loss or norm than rank 0")
    assert not problems, "\n".join(problems)
