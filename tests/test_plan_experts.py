"""`tools.plan` of models with MoE layers: what real steps over gloo do, under a routing
that is forced on both."""

import json
import os
import re
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

import train
from configs.load import load_config
from configs.schema import InputError
from models import moe
from parallelisms import ep_hosts
from tests.ranks import run_ranks
from tests.steps import apart, assert_same_step, composed_and_layers, real_step
from tools.plan import trace
from tools.plan.__main__ import main
from tools.plan.choices import bases
from tools.plan.device import load_device
from tools.plan.plan import PlanInputs, make_plan
from tools.plan.repeat import traced
from tools.plan.routing import Routing, load_routing, reached
from tools.plan.stack import load_stack

H100 = load_device("h100")
NONE, FULL, SELECTIVE = (
    f"--activation_checkpoint.mode={mode}" for mode in ("none", "full", "selective")
)
EXPERTS, CHOSEN = 16, 4  # of both debug flavors
BASE = (
    "--model.vocab_size=1031 --data.tokenizer=bytes --training.seq_len=64 "
    "--training.global_batch_size=8 --training.local_batch_size=2 "
    "--training.loss_chunk_tokens=50 --lr_schedule.warmup_steps=0 --training.param_dtype=bfloat16 "
    "--model.n_layers=3"
).split()
QWEN3 = [*BASE, "--model.family=qwen3", "--model.flavor=debug_moe"]
DEEPSEEK = [*BASE, "--model.family=deepseek_v3", "--model.flavor=debug"]
GPT_OSS = [*BASE, "--model.family=gpt_oss", "--model.flavor=debug"]
KIMI = [*BASE, "--model.family=kimi_linear", "--model.flavor=debug"]
CP2 = "--parallelism.context_parallel=2"
CHUNKS = "--parallelism.expert_chunks=4"
EP2, EP4 = (f"--parallelism.expert_parallel={ranks}" for ranks in (2, 4))


def config(options: list[str], ranks: int):
    return load_config(options, ranks, ranks)


def evenly(tokens: int) -> torch.Tensor:
    """The experts of each token, int64 [tokens, CHOSEN]: every expert gets equally many."""
    return (torch.arange(tokens)[:, None] * CHOSEN + torch.arange(CHOSEN)) % EXPERTS


def unevenly(tokens: int) -> torch.Tensor:
    """Two thirds of the tokens want the first four experts, and no token wants the last four."""
    rows = evenly(tokens) % 12
    rows[torch.arange(tokens) % 3 > 0] = torch.arange(CHOSEN)
    return rows


ROUTINGS = {"even": evenly, "uneven": unevenly}


def forced(name: str):
    """Routers decide as they do, but the experts are those of ROUTINGS. (Their tensor is written
    behind autograd's back, so the memory of a step stays what it is.)"""
    decide, tables = moe.Router.forward, {}

    def forward(router: moe.Router, x: torch.Tensor) -> moe.ExpertChoice:
        choice = decide(router, x)
        if len(x) not in tables:
            tables[len(x)] = ROUTINGS[name](len(x))
        choice.experts.data.copy_(tables[len(x)])
        return choice

    return mock.patch.object(moe.Router, "forward", forward)


def routing(name: str, cfg) -> Routing:
    """Return the record of a run with this routing."""
    p, of_sequences = cfg.parallelism, cfg.training.local_batch_size * cfg.training.seq_len
    # the tokens of a rank in a mixture
    rows = ROUTINGS[name](of_sequences // (p.context_parallel * p.tensor_parallel))
    return Routing(loads=(tuple(rows.flatten().bincount(minlength=EXPERTS).tolist()),))


def real_routed_step(name: str, options: list[str]) -> tuple:
    with forced(name):
        return real_step(config(options, 2))


WHOLE_BATCH = "--training.local_batch_size=8"
CASES = {  # name: (routing, options); of two ranks
    "ep2 of cp2": ("uneven", [*QWEN3, EP2, FULL, CP2, WHOLE_BATCH]),
    "ep2 of tp2": (
        "uneven",
        [*DEEPSEEK, EP2, SELECTIVE, "--parallelism.tensor_parallel=2", WHOLE_BATCH],
    ),
    "ep2": ("even", [*GPT_OSS, EP2, NONE, CHUNKS, "--training.local_batch_size=4"]),
}


@pytest.mark.slow
@pytest.mark.cap(240)
@pytest.mark.parametrize("name", CASES)
def test_memory_and_collectives_are_those_of_a_real_step(name):
    """Negative control: the plan of another routing is not within 1%."""
    forced_routing, options = CASES[name]
    cfg, outcomes = config(options, 2), run_ranks(2, real_routed_step, *CASES[name], timeout=200)
    assert_same_step(apart(traced, cfg, 2, 2, False, routing(forced_routing, cfg)), outcomes)
    if name == "ep2 of cp2":
        assert apart(traced, cfg, 2, 2, False).peak()[0] < 0.99 * outcomes[0][0]


BY_HOST = [EP4, "--parallelism.expert_exchange=hierarchical", "--training.local_batch_size=1"]


def sizes_by_host(cfg) -> ep_hosts.Sizes:
    """Return the sizes that rank 0 of two hosts of two ranks really sends and gets, if every rank
    routes its tokens by ROUTINGS["uneven"]."""
    rows = unevenly(cfg.training.local_batch_size * cfg.training.seq_len)
    to_hosts = ep_hosts.reached(rows, 2, 8).sum(0).tolist()
    to_ranks = (2 * ep_hosts.reached(rows, 4, 4).sum(0)[:2]).tolist()
    of_rank_0 = 4 * (rows < 4).sum().item()
    return ep_hosts.Sizes(to_hosts, [to_hosts[0]] * 2, to_ranks, [to_ranks[0]] * 2, of_rank_0)


def traced_by_host(cfg, sizes: ep_hosts.Sizes):
    with mock.patch.object(Routing, "hosts_and_ranks", lambda *_: sizes):
        return traced(cfg, 4, 2, False)


def real_step_by_host(options: list[str]) -> tuple:
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    with forced("uneven"):
        return real_step(load_config(options, 4, 2))


@pytest.mark.slow
@pytest.mark.cap(240)
def test_memory_and_collectives_by_host_are_those_of_a_real_step():
    """Negative control: the plan of the flat exchange has other collectives."""
    options = [*DEEPSEEK, FULL, *BY_HOST]
    cfg = load_config(options, 4, 2)
    outcomes = run_ranks(4, real_step_by_host, options, timeout=200)
    assert_same_step(apart(traced_by_host, cfg, sizes_by_host(cfg)), outcomes)
    flat = trace.changed(cfg, parallelism={"expert_exchange": "flat"})
    with pytest.raises(AssertionError):
        assert_same_step(apart(traced, flat, 4, 2, False, routing("uneven", cfg)), outcomes)


PIPELINE = [
    *QWEN3,
    EP2,
    FULL,
    "--model.n_layers=4",
    "--training.local_batch_size=1",
    "--parallelism.pipeline_parallel=2",
]


def real_peak() -> tuple[int, dict[tuple[str, str], tuple]]:
    """Live bytes at the peak of this rank's second step; and of its collectives, by dimension and
    kind: their number, the bytes of all, and of the smallest and the largest."""
    with forced("uneven"):
        job = train.build(config(PIPELINE, 4))
        batch = trace.batch_of(job, job.cfg.training.microbatches(job.mesh.dp_size))
        train.train_step(job, batch)
        with trace.Trace() as accountant:
            step = trace.run_step(accountant, job, batch, len(batch["tokens"]))
    messages: dict[tuple[str, str], list[int]] = {}
    for _, times, op in step.ops():
        if op.kind:
            messages.setdefault((op.dimension, op.kind), []).extend([op.message] * times)
    return step.peak()[0], {
        key: (len(sizes), sum(sizes), min(sizes), max(sizes)) for key, sizes in messages.items()
    }


@pytest.mark.slow
@pytest.mark.cap(240)
def test_memory_and_collectives_of_every_stage_are_those_of_a_real_step():
    """The ranks 0 and 2 are the fullest of their stages. Negative control: what another routing
    would send."""
    cfg, of_ranks = config(PIPELINE, 4), run_ranks(4, real_peak, timeout=200)
    plans = [
        make_plan(cfg, PlanInputs(4, 4, H100, on_gpu=False, routing=rows))
        for rows in (routing("uneven", cfg), Routing())
    ]
    for plan, uneven in zip(plans, (True, False)):
        for rank, (peak, collectives) in zip(plan.pipeline.ranks, of_ranks[::2]):
            lines = {
                key: (line.count, line.sent, line.smallest, line.largest)
                for key, line in rank.total().lines.items()
            }
            assert (lines == collectives) == uneven, (rank.number, lines, collectives)
            if uneven:
                assert rank.peak()[0] == pytest.approx(peak, rel=0.01), rank.number


@pytest.mark.slow
@pytest.mark.parametrize(
    "options, layers",
    [
        # dense layers in front, and counts of experts that are summed in one message of a row for
        # each MoE layer
        ([*DEEPSEEK, EP2, "--model.n_layers=8", "--model.n_dense_layers=2"], 7),
        # every other layer has a window
        ([*GPT_OSS, "--model.n_layers=8", "--model.window=16"], 6),
    ],
)
def test_a_step_put_together_from_few_layers_is_the_whole_step(options, layers):
    few, whole, traces = apart(composed_and_layers, config(options, 4), 4)
    assert few == whole
    assert traces == [layers]  # of what the first was made from


TWO_STAGES = [EP2, "--model.n_layers=6", "--model.n_dense_layers=3"]
TWO_STAGES += ["--parallelism.pipeline_parallel=2", "--training.local_batch_size=1"]


def counted(options: list[str], ranks: int) -> tuple[float, float, float, int]:
    plan = make_plan(config(options, ranks), PlanInputs(ranks, ranks, H100))
    return *plan.flops(), plan.parameters


@pytest.mark.slow
@pytest.mark.parametrize(
    "options, ranks, recomputed",
    [
        ([*DEEPSEEK, FULL], 1, (0.1, 0.4)),
        # of KDA what chunks add, and the narrow vectors that both ranks compute
        ([*KIMI, NONE, "--parallelism.tensor_parallel=2"], 2, (0.05, 0.6)),
        ([*DEEPSEEK, NONE, *TWO_STAGES], 4, (0.0, 0.1)),
    ],
)
def test_counted_flops_are_those_of_active_parameters(options, ranks, recomputed):
    """Padded values, as latent attention has them, count separately, as recomputation does. The
    second stage of the pipeline has one layer of each kind if the first has two that are dense."""
    cfg = config([*options, "--model.vocab_size=1032"], ranks)
    # a pipeline's plan starts processes itself
    run = counted if cfg.parallelism.pipeline_parallel > 1 else partial(apart, counted)
    derived, in_step, extra, parameters = run([*options, "--model.vocab_size=1032"], ranks)
    family, args = train.architecture(cfg)
    assert parameters == family.parameters(args)
    with torch.device("meta"):
        weights = family.build(args).named_parameters()
    convolved = sum(weight.numel() for name, weight in weights if ".conv_" in name)  # no matmul
    assert in_step == pytest.approx(derived - 6 * convolved, rel=1e-9)
    assert recomputed[0] <= extra / derived <= recomputed[1]


def unsharded_in_a_block(options: list[str]) -> int:
    """Return how many elements a rank of four holds while FSDP has the last block unsharded."""
    step = trace.trace_step(config([*QWEN3, NONE, *options], 4), 4, 4, on_gpu=False)
    return step.parameters[2].gathered


@pytest.mark.slow
def test_fsdp_unshards_the_experts_of_a_rank_alone():
    """With expert parallelism a rank never holds the experts of other ep ranks."""
    family, args = train.architecture(config(QWEN3, 1))
    experts = 3 * args.n_experts * args.dim * args.expert_dim
    one, two, four = (apart(unsharded_in_a_block, options) for options in ([], [EP2], [EP4]))
    assert (one - two, two - four) == (experts // 2, experts // 4)


def test_routings(tmp_path):
    assert load_routing("balanced").all_to_all_splits(12, 4) == ([3] * 4, [3] * 4)
    assert load_routing("1.5").all_to_all_splits(12, 2) == ([9, 3], [9, 9])
    assert load_routing("7").shares(2) == [1.0, 0.0]  # no rank can get more than everything
    lines = [
        {"step": 9, "steps": 1, "counts": counts}
        for counts in ({"1": [1, 0, 0, 0]}, {"1": [0, 0, 6, 2], "2": [3, 3, 1, 1]})
    ]
    (tmp_path / "experts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    # the fullest rank has 1 and 0.75 of the rows
    assert load_routing(str(tmp_path)).shares(2) == [0.875, 0.125]
    nowhere = str(tmp_path / "no")
    for text, words in ("0.5", "1 or more"), ("nan", "1 or more"), (nowhere, "the folder of a run"):
        with pytest.raises(InputError, match=words):
            load_routing(text)
    with pytest.raises(InputError, match="loads of 4 experts"):
        load_routing(str(tmp_path)).shares(8)
    (tmp_path / "experts.jsonl").write_text("")
    with pytest.raises(InputError, match="recorded nothing"):
        load_routing(str(tmp_path))


@pytest.mark.parametrize("groups, chosen", [(1, 1), (8, 4), (8, 8), (2, 1)])
@pytest.mark.parametrize("places", [2, 8, 16])
def test_tokens_reach_as_many_hosts_as_those_of_a_router(groups, chosen, places):
    """Checked on a router with random scores. Negative control: the formula for a router without
    groups."""
    args = SimpleNamespace(
        n_experts=256, experts_per_token=8, expert_groups=groups, groups_per_token=chosen
    )
    scores = torch.rand(4000, 256, generator=torch.Generator().manual_seed(0))
    if groups > 1:
        # as the formula has it: groups are chosen first, and at random
        best = torch.rand(4000, groups, generator=torch.Generator().manual_seed(1))
        scores += 10 * best.repeat_interleave(256 // groups, 1)
        scores = moe.Router.within_best_groups(SimpleNamespace(args=args), scores)
        scores = torch.where(scores.isinf(), -1.0, scores % 1)
    experts = scores.topk(8, -1).indices
    seen = ep_hosts.reached(experts, places, 256 // places).float().mean().item()
    assert reached(1 / places, places, args) == pytest.approx(seen, rel=0.03)
    without = SimpleNamespace(**vars(args) | {"expert_groups": 1, "groups_per_token": 1})
    if chosen < groups <= places:
        assert reached(1 / places, places, without) > 1.1 * seen


def test_a_search_shares_experts():
    """Degrees that divide the experts and the ranks; a dense model has none to share."""
    inputs = PlanInputs(8, 8, H100)

    def degrees(*options: str) -> set[int]:
        cfg = load_config([*BASE, "--training.local_batch_size=1", *options])
        return {base.expert_parallel for base in bases(cfg, inputs)}

    experts = ["--model.family=qwen3", "--model.flavor=debug_moe"]
    assert degrees(*experts) == {1, 4, 8}
    assert degrees(*experts, "--model.n_experts=12") == {1, 4}
    assert degrees("--model.family=qwen3") == {1}


@pytest.mark.slow
def test_the_report_names_the_routing(capsys):
    options = [*DEEPSEEK, EP2, "--training.local_batch_size=1", "--gpus", "8", "--routing", "1.5"]
    assert main(options) == 0
    said = capsys.readouterr().out
    routing = "routing: the fullest rank gets 1.5 times the mean"
    assert f"expert parallel: 2 ranks on one host have 8 experts each; {routing}" in said
    assert "6N of the active ones + 6LH(W+V)T" in said
    for stream in "ep all-to-all", "edp all-gather":
        assert re.search(rf"{stream} +\d+ ", said)
    assert main([*options[:-1], "nowhere"]) == 2
    assert "the folder of a run" in capsys.readouterr().err


@pytest.mark.slow
def test_the_report_says_what_would_hide_what_is_exposed(capsys):
    """Chunks of an exchange, larger microbatches. Negative control: neither, where both are so."""
    options = [*DEEPSEEK, "--training.local_batch_size=1", "--gpus", "16"]
    slow = ["--parallelism.expert_parallel=8", "--network-gb-per-s", "0.01", "--gpus-per-node=4"]
    hints = ("parallelism.expert_chunks = 2 would", "a larger training.local_batch_size gathers")
    assert main([*options, "--training.global_batch_size=16", *slow]) == 0
    said = capsys.readouterr().out
    assert hints[0] in said and hints[1] not in said  # of one microbatch
    assert main([*options, "--training.global_batch_size=32", CHUNKS, *slow]) == 0
    said = capsys.readouterr().out
    assert hints[0] not in said and hints[1] in said


def times_of(stack: str) -> tuple[float, float, float]:
    inputs = PlanInputs(4, 4, H100, stack=load_stack(stack))
    time = make_plan(config([*DEEPSEEK, EP4], 4), inputs).time
    return time.seconds, time.computing, time.exposed


@pytest.mark.parametrize("stack", ["plumbline", "deepseek"])
def test_an_exchange_that_is_hidden_is_counted_once(stack):
    seconds, computing, exposed = apart(times_of, stack)
    assert seconds == pytest.approx(computing + exposed)
