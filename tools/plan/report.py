"""Format a plan as text."""

from collections import Counter
from typing import Any

import torch

import train
from checkpoint.peers import GENERATIONS
from checkpoint.state import pinned_size
from configs import check
from configs import stages as training_stages
from configs.schema import SCHEDULES, Config
from configs.words import number_of, plural
from models.cores import ATTENTION, cores_in, kind_of, of_kind
from models.kernels.ruled_attention import PLAIN, why_slow
from parallelisms import ep_hosts
from parallelisms.cores import supports_spec
from parallelisms.schedules import layers_text
from tools.plan import counted
from tools.plan.plan import CONTEXT_GIB, Plan, PlanInputs
from tools.plan.routing import BALANCED, Chosen
from tools.plan.stack import SCALING_FROM, scaling_loss
from tools.plan.step import GIB, KINDS
from tools.plan.trace import EXCHANGES
from tools.plan.unmodelled import not_modelled

STATES = ("parameters", "frozen weights", "optimizer state")  # kinds of memory between steps
# the dimensions of which every rank has exactly one place
MESH = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
GATHERS = ("dp_shard", "dp_shard_cp", "edp")  # dimensions over which FSDP gathers weights
WORTH_A_LINE = 0.05  # of a step's time


def size_text(count: float) -> str:
    """Format bytes with a unit."""
    if count >= GIB / 10:
        return f"{count / GIB:,.2f} GiB"
    if count >= 2**20:
        return f"{count / 2**20:,.2f} MiB"
    if count >= 10 * 2**10:
        return f"{count / 2**10:,.1f} KiB"
    return f"{count:.0f} B"


def time_text(seconds: float) -> str:
    for unit, length in ("days", 86400), ("h", 3600), ("min", 60):
        if seconds >= 2 * length:
            return f"{seconds / length:,.1f} {unit}"
    return f"{seconds:,.1f} s" if seconds >= 1 else f"{seconds * 1e3:,.1f} ms"


def parameters_text(count: float) -> str:
    return f"{count / 1e9:,.2f}B" if count >= 1e8 else f"{count / 1e6:,.2f}M"


def token_text(count: float) -> str:
    for unit, length in ("T", 1e12), ("B", 1e9), ("M", 1e6):
        if count >= length:
            return f"{count / length:,.4g}{unit} tokens"
    return f"{count:,.4g} tokens"


def report(plan: Plan, all_stages: bool = False) -> str:
    """Format the whole plan. all_stages: with every rank of a pipeline, and not only the first, the
    last and the fullest."""
    lines = [
        *heading(plan),
        *training_stages.title(plan.cfg),
        "",
        *stages(plan, all_stages),
        *memory(plan),
        *communication(plan),
        "",
        *speed(plan),
        *network(plan),
        *counted.warning(plan),
        *scaling(plan),
        *run(plan),
    ]
    if ignored := not_modelled(plan.cfg, plan.inputs.device):
        lines += ["Not modelled", *(f"  {line}" for line in ignored)]
    if recomputes_often(plan.cfg):
        lines.append(
            "  A split backward recomputes a checkpointed block for each of its weights: without "
            "checkpointing, or with the schedule 1f1b or interleaved_1f1b, steps are faster."
        )
    if not plan.fits:
        lines += ["", f"It does not fit: {advice(plan)}"]
    return "\n".join(lines)


def model_name(cfg: Config) -> str:
    """Family and flavor, and the numbers of the flavor that the configuration changes."""
    given = {key: value for key, value in vars(cfg.model).items() if value is not None}
    for key in check.TRANSFER:
        if not given[key]:
            del given[key]
    name = f"{given.pop('family')} {given.pop('flavor')}"
    changed = ", ".join(f"{key} = {value}" for key, value in given.items())
    return f"{name} with {changed}" if changed else name


def recomputes_often(cfg: Config) -> bool:
    """Return True if blocks are recomputed more than once for a backward (docs/parallelism.md,
    "Pipeline parallelism")."""
    p = cfg.parallelism
    splits = p.pipeline_parallel > 1 and SCHEDULES[p.pipeline_schedule].splits_backward
    return splits and cfg.activation_checkpoint.mode != "none"


def hosts(inputs: PlanInputs) -> str:
    """Describe the hosts; the last one may have fewer GPUs than the others."""
    full, rest = divmod(inputs.gpus, inputs.per_host)
    words = f"{full:,} {plural(full, 'host')} of {inputs.per_host}"
    return f"{words} and one of {rest}" if rest else words


def heading(plan: Plan) -> list[str]:
    """Describe the model, the machines, the mesh and the batch."""
    cfg = plan.cfg
    inputs = plan.inputs
    microbatches = plan.microbatches
    sizes = [f"{dim} {len(ranks)}" for dim, ranks in plan.step.groups.items() if dim in MESH]
    mesh = " x ".join(sizes)
    kept = ""
    if microbatches > 1:
        kept = f", gradients kept {cfg.parallelism.accumulate_gradients} in between"
    return [
        f"{model_name(cfg)}, {parameters_text(plan.parameters + plan.frozen)} parameters, on "
        f"{inputs.gpus:,} x {inputs.device.name} ({hosts(inputs)})",
        f"mesh {mesh}; sequences {cfg.training.global_batch_size:,} x "
        f"{cfg.training.seq_len:,} tokens = {number_of(microbatches, 'microbatch', 'microbatches')} "
        f"of {cfg.training.local_batch_size} per data-parallel rank{kept}; checkpointing "
        f"{cfg.activation_checkpoint.mode}; compile {'on' if cfg.compile.enabled else 'off'}",
        *adapters(plan),
        *mixers(plan),
        *attention(plan),
        *context(plan),
        *experts(plan),
    ]


def adapters(plan: Plan) -> list[str]:
    """Describe the trained part of a model that is otherwise frozen, and the savings."""
    lora = plan.cfg.lora
    if not lora.rank and not plan.frozen:
        return []
    if not lora.rank:
        frozen = parameters_text(plan.frozen)
        return [f"{parameters_text(plan.parameters)} parameters trained, {frozen} frozen"]
    return [
        f"adapters of rank {lora.rank} of {', '.join(lora.targets)}: "
        f"{parameters_text(plan.parameters)} trained, {parameters_text(plan.frozen)} frozen in "
        f"{plan.cfg.training.param_dtype}; to train all would take "
        f"{size_text(plan.saved_by_freezing)} more on each rank"
    ]


def cores_of(plan: Plan) -> list[Any]:
    """Return the cores of the whole model, of which no rank has a part yet."""
    family, args = train.architecture(plan.cfg)
    with torch.device("meta"):
        return cores_in(family.build(args))


def mixers(plan: Plan) -> list[str]:
    """Count the cores of a hybrid by their kind; none of a model that has attention alone."""
    counts = Counter(map(kind_of, cores_of(plan)))
    if set(counts) <= {ATTENTION}:
        return []
    described = [f"{count} of {kind}" for kind, count in counts.items()]
    return [f"mixers: cores {', '.join(described)}"]


def attention(plan: Plan) -> list[str]:
    """Describe attention's masks and biases (models/layers.py::AttentionCore), if any are not
    plain."""
    attention_cores = of_kind(cores_of(plan), ATTENTION)
    counts = Counter(core.spec for core in attention_cores if supports_spec(core))
    if set(counts) <= {PLAIN}:
        return []
    device = torch.device("cuda" if plan.inputs.on_gpu else "cpu")
    parts = []
    for rule, count in counts.items():
        slow = "" if why_slow(device, rule) is None else " (without a kernel: slower than planned)"
        layers = f"{count} {plural(count, 'layer')}"
        parts.append(f"{layers} with {rule.describe()}{slow}")
    return [f"attention: {'; '.join(parts)}"]


def context(plan: Plan) -> list[str]:
    """Describe the ranks that share a sequence, and how attention sees all of it."""
    p = plan.cfg.parallelism
    seq_len = plan.cfg.training.seq_len
    if p.context_parallel == 1:
        return []
    return [
        f"context parallel, {p.context_parallel_method}: {p.context_parallel} ranks on "
        f"{hosts_of(plan, 'cp')} share a sequence, {seq_len // p.context_parallel:,} tokens each; "
        "FSDP's dimension is dp_shard_cp"
    ]


def hosts_of(plan: Plan, dimension: str) -> str:
    """Say on how many hosts a group of the mesh is."""
    hosts = len({rank // plan.inputs.per_host for rank in plan.step.groups[dimension]})
    return "one host" if hosts == 1 else f"{hosts} hosts"


def experts(plan: Plan) -> list[str]:
    """Describe the active parameters of a token, and how its rows are dispatched to the experts."""
    family, args = train.architecture(plan.cfg)
    if not getattr(args, "n_experts", 0):
        return []
    ep = plan.cfg.parallelism.expert_parallel
    lines = [
        f"MoE layers of {args.n_experts} experts, {args.experts_per_token} for each token: "
        f"{family.active_parameters(args) / 1e9:,.2f}B active parameters"
    ]
    if ep > 1:
        where = hosts_of(plan, "ep")
        routing = str(plan.inputs.routing)
        if plan.inputs.routing != BALANCED:
            routing += " (this plan is of that rank)"
        lines.append(
            f"expert parallel: {ep} ranks on {where} have {number_of(args.n_experts // ep, 'expert')} each; "
            f"routing: {routing}"
        )
        if where != "one host":
            lines.append(
                f"{plan.cfg.parallelism.expert_exchange} exchange: dispatch and combine of a step "
                f"send {size_text(sent_between_hosts(plan))} from each rank to other hosts"
            )
    return lines


def sent_between_hosts(plan: Plan) -> float:
    """Return the bytes of the experts' all-to-alls that a rank sends to other hosts in a step."""
    total = 0.0
    for dim in "ep", ep_hosts.PEERS:
        if line := plan.time.lines.get((dim, "all-to-all")):
            ranks = plan.step.groups[dim]
            first = ranks[0] // plan.inputs.per_host
            here = sum(rank // plan.inputs.per_host == first for rank in ranks)
            part = 1 - here / len(ranks)
            if dim == "ep":
                chosen = Chosen.by(check.architecture(plan.cfg.model))
                hosts = round(len(ranks) / here)
                part *= plan.inputs.stack.sent(len(ranks), hosts, chosen)[1]
            total += part * line.sent
    return total


def stages(plan: Plan, all_stages: bool) -> list[str]:
    """Describe the ranks of a pipeline, with the layers, the memory and the work of each; and the
    cost of the schedule."""
    pipeline = plan.pipeline
    if not pipeline:
        return []
    ranks = pipeline.ranks
    shown = ranks
    if not all_stages and len(ranks) > 4:
        shown = [ranks[i] for i in sorted({0, plan.step.number, len(ranks) - 1})]
    stages_of_one = number_of(len(ranks[0].stages), "stage")
    title = (
        f"Pipeline {plan.cfg.parallelism.pipeline_schedule}, {len(ranks)} ranks of {stages_of_one}"
    )
    lines = [f"{title:48}{'parameters':>14}{'live at the peak':>20}{'works for':>14}"]
    for rank in shown:
        layers = ", ".join(layers_text(rank.layers_of[stage]) for stage in sorted(rank.layers_of))
        layers = layers if len(layers) < 30 else f"{rank.layers} in all"
        total = sum(p.elements for p in rank.parameters.values())
        lines.append(
            f"  {f'rank {rank.number}: layers {layers}':46}{parameters_text(total):>14}"
            f"{size_text(rank.peak()[0]):>20}{time_text(rank.busy):>14}"
        )
    if len(shown) < len(ranks):
        lines.append(f"  (--stages shows all {len(ranks)} ranks)")
    return [
        *lines,
        f"  bubble {pipeline.bubble:.1%} of the ranks' time; messages between stages make the step "
        f"{time_text(pipeline.p2p)} longer, reductions after the last backward "
        f"{time_text(pipeline.reduction)}",
        "",
    ]


def memory(plan: Plan) -> list[str]:
    """Describe memory: bytes by kind at the peak and at most, their sum with the allocator's share,
    and whether they fit."""
    inputs = plan.inputs
    step = plan.step
    live, place, at_peak = plan.peak
    at_most = step.highest_by_kind()
    title = "Memory of rank 0, which has the largest shards"
    if plan.pipeline:
        title = f"Memory of rank {step.number}, which needs the most"
    lines = [f"{title:48}{'at the peak':>14}{'at most':>14}"]
    for kind, name in KINDS.items():
        if at_most.get(kind):
            then = size_text(at_peak.get(kind, 0))
            lines.append(f"  {name:44}{then:>16}{size_text(at_most[kind]):>14}")
    lines += [f"  {'live at the peak':44}{size_text(live):>16}   in {step.place(place)}"]
    if inputs.on_gpu:
        margin = f"+ {inputs.margin:.0%} that the caching allocator holds idle"
        idle = size_text(live * inputs.margin)
        outside = size_text(CONTEXT_GIB * GIB)
        lines += [
            f"  {margin:44}{idle:>16}   (published runs: 14 to 23 %)",
            f"  {'+ context, cuBLAS, NCCL (assumed)':44}{outside:>16}",
        ]
    verdict = "fits" if plan.fits else "DOES NOT FIT"
    lines += [
        f"  {'needed':44}{size_text(plan.needed):>16}   of {inputs.device.memory_gib:.1f} GiB: "
        f"{verdict}",
        "",
    ]
    gathered = plan.cfg.parallelism.keep_gathered
    if plan.has_room_for_all:
        lines += [
            "  Room for all gathered weights: parallelism.reshard_after_forward = false and "
            f"reshard_after_backward = false would gather them once a step, not with each of "
            f"{plan.microbatches} microbatches.",
            "",
        ]
    if (blocks := plan.room_for_gathered) > gathered:
        lines += [
            f"  Room for the gathered weights of the last {blocks} blocks: parallelism.keep_gathered "
            f"= {blocks} would save as many all-gathers with each microbatch (now {gathered}).",
            "",
        ]
    if plan.cfg.compile.enabled:
        lines += ["  Traced uncompiled: compiled blocks keep no more, often less.", ""]
    return lines


def communication(plan: Plan) -> list[str]:
    """Return a line for each kind of collective on each mesh dimension."""
    sizes = {dim: len(ranks) for dim, ranks in plan.step.groups.items()}
    of = f" of rank {plan.pipeline.slowest.number}" if plan.pipeline else ""
    title = f"Communication of a step{of}"
    columns = f"{'count':>8}{'bytes':>14}{'a message':>26}{'time':>11}{'exposed':>11}"
    lines = [f"{title:34}{columns}"]
    for (dim, kind), line in sorted(plan.time.lines.items()):
        if sizes.get(dim, 2) == 1:
            continue
        name = f"{dim} {kind}"
        message = size_text(line.smallest)
        if size_text(line.largest) != message:
            message += f" - {size_text(line.largest)}"
        counts = f"{line.count:>8,}{size_text(line.sent):>14}{message:>26}"
        times = f"{time_text(line.seconds):>11}{time_text(line.exposed):>11}"
        lines.append(f"  {name:32}{counts}{times}")
    return lines + less_exposed(plan) if plan.time.lines else [*lines, "  none"]


def less_exposed(plan: Plan) -> list[str]:
    """Suggest how to hide the gathers of weights, or the exchange of experts, if a step waits for
    them longer than WORTH_A_LINE of it."""
    gathers = exchange = 0.0
    for (dim, kind), line in plan.time.lines.items():
        if dim in EXCHANGES and kind == "all-to-all":
            exchange += line.exposed
        elif dim in GATHERS and kind == "all-gather":
            gathers += line.exposed
    least = WORTH_A_LINE * plan.time.seconds
    lines = []
    if gathers > least and plan.microbatches > 1:
        lines.append(
            f"  Gathers of weights are exposed for {time_text(gathers)}: a larger "
            "training.local_batch_size gathers them for fewer microbatches."
        )
    if exchange > least and plan.cfg.parallelism.expert_chunks == 1:
        lines.append(
            f"  Dispatch and combine are exposed for {time_text(exchange)}: "
            "parallelism.expert_chunks = 2 would run most of it behind the experts."
        )
    return lines


def speed(plan: Plan) -> list[str]:
    """Describe FLOPs, the time of a step and its parts, tokens per second."""
    t = plan.time
    d = plan.inputs.device
    # narrow heads, documents and windows are slower than the device's row says
    attended = t.attended_flops / t.attention / d.peak if t.attention else 0.0
    _, args = train.architecture(plan.cfg)
    latent = hasattr(args, "value_dim")  # latent attention pads its values
    active = "of the active ones " if getattr(args, "n_experts", 0) else ""
    weights = "4N" if plan.cfg.lora.rank else "6N"
    of_adapters = "+ 6n of adapters " if plan.cfg.lora.rank else ""
    formula = f"{weights} {active}{of_adapters}+ {'6LH(W+V)T' if latent else '12LHET'}"
    if mixers(plan):
        formula += " of layers with attention + states"
    if attention(plan):
        formula += ", of the keys that windows leave"
    fullest = ""
    if plan.inputs.routing != BALANCED and plan.cfg.parallelism.expert_parallel > 1:
        fullest = ", of the fullest rank"
    derived, counted, recomputed = plan.flops()
    whose = waits = ""
    if plan.pipeline:
        waiting = max(0.0, t.seconds - t.computing - t.exposed)
        whose = f" (rank {plan.pipeline.slowest.number}, the slowest)"
        waits = f"; it waits for other stages {time_text(waiting)}"
    return [
        f"FLOPs per token  {derived:.4g} derived ({formula}), {counted:.4g} counted "
        f"({counted / derived - 1:+.2%}{fullest}); "
        f"recomputed{' or padded' * latent}{' or repeated' * bool(plan.repeated)} on top of those "
        f"{recomputed:.3g} ({recomputed / derived:.1%})",
        f"Time of a step   {time_text(t.seconds)}{whose}: matmuls {time_text(t.matmul)} at "
        f"{d.matmul_efficiency:.0%} of {d.peak / 1e12:,.{0 if d.peak > 1e13 else 2}f} TFLOP/s, "
        f"attention {time_text(t.attention)} at {attended:.0%} (causal: half), "
        f"memory-bound {time_text(t.memory_bound)}, of which recomputed "
        f"{time_text(t.recomputed)}; communication exposed {time_text(t.exposed)}{waits}",
        f"Speed            {plan.tokens_per_second:,.0f} tokens/s, "
        f"{plan.tokens_per_second / plan.inputs.gpus:,.0f} per GPU; MFU {plan.mfu:.1%}",
    ]


def scaling(plan: Plan) -> list[str]:
    """Return the scaling loss of published runs, as a range: no plan has it in its figures."""
    least, most = scaling_loss(plan.inputs.gpus)
    if not most:
        return []
    return [
        f"Scaling loss     {least:.0%} to {most:.0%}, in no figure here: what published runs "
        f"lost from {SCALING_FROM} GPUs to {plan.inputs.gpus:,}"
    ]


def network(plan: Plan) -> list[str]:
    """Say which rate between hosts the plan assumes: it is nowhere measured, and decides what of the
    communication is exposed."""
    if plan.inputs.gpus <= plan.inputs.per_host:
        return []
    return [
        f"Between hosts    {plan.inputs.device.fabric_gb_per_s:g} GB/s of each GPU, one direction: "
        "the device's row, or --network-gb-per-s, which takes the measured rate"
    ]


def run(plan: Plan) -> list[str]:
    """Describe the whole run: its time and cost, its checkpoints, its interruptions."""
    inputs = plan.inputs
    step_seconds = plan.time.seconds
    configured = plan.cfg.checkpoint.interval
    seconds = plan.steps * step_seconds
    copy, write, stall = plan.saving()
    interval = plan.configured_interval
    goodput = plan.configured_goodput
    best = plan.best_interval
    hours = plan.gpu_hours()
    dollars = ""
    if inputs.usd_per_gpu_hour:
        cost = hours * inputs.usd_per_gpu_hour
        dollars = f"; ${cost:,.0f} at ${inputs.usd_per_gpu_hour:g} per GPU-hour"
    steps = (
        f"{number_of(round(plan.steps), 'step')}, {token_text(plan.steps * plan.tokens_per_step)}"
    )
    lines = [
        f"The run          {steps}: {time_text(seconds)} of training, "
        f"{time_text(seconds / goodput) if goodput else 'never'} with what interruptions cost; "
        f"{hours:,.0f} GPU-hours{dollars}",
        f"Checkpoints      {size_text(plan.checkpoint_bytes)} each; copy to the host "
        f"{time_text(copy)}, training waits {time_text(stall)}; written in {time_text(write)} at "
        f"{inputs.storage_gb_per_s:g} GB/s",
        f"Interruptions    {hours / inputs.mtbf_gpu_hours:,.1f} expected, one in "
        f"{time_text(plan.mtbf)} ({inputs.mtbf_gpu_hours:,.0f} GPU-hours each); checkpoint every "
        f"{time_text(interval)} as configured: {goodput:.1%} goodput; best: every "
        f"{number_of(max(1, round(best / step_seconds)), 'step')} ({time_text(best)}), "
        f"{plan.goodput(best):.1%}",
    ]
    if plan.staging or plan.cfg.checkpoint.peers:
        lines.insert(2, host_memory(plan))
    if write > interval:
        lines.append(
            f"  A checkpoint takes longer to write than checkpoint.interval = {number_of(configured, 'step')}: "
            "save less often, or to faster storage."
        )
    return lines


def host_memory(plan: Plan) -> str:
    """Describe the host memory for copies of checkpoints. On GPUs they are pinned."""
    size = plan.staging
    ranks = plan.inputs.per_host
    line = f"Host memory      for copies of checkpoints {size_text(size)} of each rank"
    if plan.inputs.on_gpu:
        size = pinned_size(size)
        line += f", pinned {size_text(size)} (CUDA rounds up to a power of two)"
    line += f": {size_text(size * ranks)} on each host"
    if peers := plan.cfg.checkpoint.peers:
        copies = GENERATIONS * (1 + peers) * plan.written_by_rank * ranks
        line += f"; {GENERATIONS} copies of {1 + peers} hosts' state {size_text(copies)}"
    return line


def advice(plan: Plan) -> str:
    """Advise what to change, by what fills the memory."""
    hints = []
    _, _, at_peak = plan.peak
    if at_peak.get("whole gradients", 0) > plan.live / 4 and plan.microbatches > 1:
        hints.append(
            "accumulation keeps every gradient whole in float32 until the last microbatch: "
            'parallelism.accumulate_gradients = "sharded" keeps shards, for a reduce-scatter with '
            "each microbatch"
        )
    checkpointing = plan.cfg.activation_checkpoint
    keeps_gathered = checkpointing.mode == "selective" and not checkpointing.gather_again
    if keeps_gathered and plan.cfg.parallelism.tensor_parallel > 1:
        hints.append(
            "activation_checkpoint.gather_again = true keeps no gathered sequences, for two more "
            "all-gathers in a block"
        )
    if at_peak.get("activations", 0) > plan.live / 4:
        hints.append(
            'activations fill it: activation_checkpoint.mode = "full", a smaller '
            "training.local_batch_size, more tensor_parallel or context_parallel"
        )
    states = sum(at_peak.get(kind, 0) for kind in STATES)
    if states > plan.live / 4:
        hints.append("weights and optimizer state fill it: more GPUs to shard them over")
    hints.append("--search tries them all")
    return "; ".join(hints)
