"""FSDP2's contract, rule by rule: what one sees when it is broken. The rows of the table in
docs/parallelism.md."""

import io
import itertools
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import train
from checkpoint import state
from configs.load import load_config
from configs.schema import InputError, Parallelism, Run
from parallelisms import contract, dp
from parallelisms import mesh as meshes
from parallelisms.progress import ProgressCounter
from tests.ranks import run_each, run_ranks
from tests.runs import ADAMW, SMALL_MODEL, whole
from training.loss import linear_cross_entropy
from training.optim import build_optimizer, clip_grad_norm

EXPERTS = [
    "--model.family=qwen3",
    "--model.n_experts=4",
    "--model.experts_per_token=2",
    "--model.expert_dim=12",
]


def job(*options: str) -> train.Job:
    warnings.simplefilter("ignore")
    here = meshes.world()
    batch = [
        "--training.global_batch_size=24",
        "--training.local_batch_size=1",
        "--training.steps=5",
        "--lr_schedule.warmup_steps=0",
    ]
    return train.build(
        load_config([*SMALL_MODEL, *ADAMW, *batch, *options], here.size, here.local_size)
    )


def refused(run: train.Job, words: str, same: dict | None = None) -> None:
    with pytest.raises(InputError, match=words):
        contract.verify(run.model, run.optimizer, run.mesh, same or {})


@pytest.fixture(scope="module")
def seen() -> dict:
    """Return what these functions return on both of two ranks."""
    return run_each(
        2,
        broken_rules,
        forward_called_directly,
        clipped_by_local_norm,
        saved_bytes,
        gradients_on_shards,
        meshes_of_experts,
        counts_of_exchanges,
        a_parameter_without_gradient,
        parts_of_a_checkpoint,
    )


def broken_rules() -> None:
    good = job()
    contract.verify(good.model, good.optimizer, good.mesh, {"config": "same"})

    rank = dist.get_rank()
    refused(
        good,
        r"config differs: rank 0 has 'c0', ranks \[1\] do not \(rank 1: 'c1'\)",
        {"config": f"c{rank}"},
    )

    model = train.build(good.cfg).model
    # before sharding: other tensors
    stale = build_optimizer(nn.Linear(2, 2), [("*", True)], good.cfg.optimizer)
    refused(
        train.Job(good.cfg, good.mesh, good.args, model, stale),
        r"not the model's parameters.*\n.*misses 30 of the model's 30 parameters: tok_emb\w+\.weight \.",
    )

    family = train.MODELS["llama"]
    with torch.device("meta"):
        top_only = family.build(good.args)
    fully_shard(top_only, mesh=good.mesh.fsdp_mesh)  # the root alone, not bottom-up
    refused(
        train.Job(good.cfg, good.mesh, good.args, top_only, stale),
        r"layers \[0, 1, 2\] are no FSDPModule.*",
    )
    refused(
        train.Job(good.cfg, good.mesh, good.args, top_only, stale),
        r"still on meta, without values: tok_embeddings\.weight \.",
    )

    whole_model = family.build(good.args)  # never sharded
    optimizer = build_optimizer(whole_model, family.decay, good.cfg.optimizer)
    never_sharded = train.Job(good.cfg, good.mesh, good.args, whole_model, optimizer)
    refused(
        never_sharded,
        r"gradients are never reduced \(ranks 0 to 1: 2 of 2\)\n +30 parameters are plain tensors "
        r"on a mesh of 2",
    )


def test_broken_contracts_are_named_on_every_rank(seen):
    assert seen[broken_rules] == [None, None]


def talk() -> dict:
    """Call the control collectives of the mesh, and those of opening and closing it."""
    settings = []
    meshes.cpu_settings = lambda: settings.append(1)
    mesh = job().mesh
    said = {
        "any": [mesh.any_rank(mesh.rank == 1), mesh.any_rank(False)],
        "gather": mesh.gather(f"rank {mesh.rank}"),
        "sum": mesh.sum_over_tokens(torch.tensor([mesh.rank + 1.0])).item(),
    }
    meshes.close_mesh()
    meshes.close_mesh()
    return said | {"settings": len(settings), "open": dist.is_initialized()}


def test_what_one_rank_knows_all_ranks_can_know():
    said = {"any": [True, False], "gather": ["rank 0", "rank 1"], "sum": 3.0}
    assert run_ranks(2, talk) == [said | {"settings": 1, "open": False}] * 2


def forward_called_directly() -> str:
    run = job()
    try:
        run.model.forward(torch.zeros(1, 16, dtype=torch.int64), torch.arange(16))
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_calling_forward_instead_of_the_module_runs_on_shards(seen):
    """The hooks that unshard the weights belong to the module's call; `forward` meets the
    shards."""
    assert "mixed torch.Tensor and DTensor" in seen[forward_called_directly][0]


def backward(model: nn.Module, tokens: torch.Tensor) -> None:
    """tokens [B, T], which are their own labels."""
    head = partial(linear_cross_entropy, labels=tokens, chunk_tokens=99)
    model(tokens, torch.arange(tokens.shape[1]), head).backward()


def norm_of_gradients(model: nn.Module) -> float:
    return sum(whole(p.grad).square().sum() for p in model.parameters()).sqrt().item()


def clipped_by_local_norm() -> tuple[float, float]:
    """(norm of this rank's shards alone, the true norm) of the same gradients."""
    run = job()
    torch.manual_seed(run.mesh.rank)
    backward(run.model, torch.randint(0, 263, (2, 16)))
    local = nn.utils.get_total_norm([p.grad.to_local() for p in run.model.parameters()]).item()
    every = norm_of_gradients(run.model)
    reported = clip_grad_norm(run.model.parameters(), 1.0).item()
    assert abs(reported / every - 1) < 1e-5
    assert abs(norm_of_gradients(run.model) - 1) < 1e-4
    return local, every


def test_a_local_norm_differs_between_ranks_and_the_true_one_does_not(seen):
    (local0, true0), (local1, true1) = seen[clipped_by_local_norm]
    assert true0 == true1
    assert local0 != local1 and max(local0, local1) < true0


def saved_bytes() -> tuple[int, int]:
    """(elements that torch.save of the state would write on this rank, elements of the model)."""
    run = job()
    buffer = io.BytesIO()
    torch.save({n: p.to_local() for n, p in run.model.state_dict().items()}, buffer)
    buffer.seek(0)
    return sum(t.numel() for t in torch.load(buffer).values()), sum(
        p.numel() for p in run.model.parameters()
    )


def test_torch_save_of_a_rank_holds_a_part_of_the_model(seen):
    (first, total), (second, _) = seen[saved_bytes]
    assert first < total and second < total and first + second == total


def gradients_on_shards() -> dict[str, list[bool]]:
    """Return for each of two microbatches whether the parameters had gradients after it."""
    had = {}
    for accumulate in "whole", "sharded":
        run = job()
        had[accumulate] = []
        for last in False, True:
            dp.synchronise_gradients(run.model, last, accumulate)
            backward(run.model, torch.full((1, 16), 3 + run.mesh.rank))
            had[accumulate].append(all(p.grad is not None for p in run.model.parameters()))
    return had


def test_gradients_reach_the_shards_with_the_last_microbatch_only(seen):
    assert seen[gradients_on_shards] == [{"whole": [False, True], "sharded": [True, True]}] * 2


def group_timeouts() -> list[float]:
    """Return the seconds that a collective of each group of the mesh may take, after
    set_timeout(7)."""
    run = job("--parallelism.context_parallel=2", "--parallelism.pipeline_parallel=2")
    run.mesh.set_timeout(7)
    of_mesh = run.mesh.device_mesh.get_all_groups() + run.mesh.fsdp_mesh.get_all_groups()
    groups = [dist.group.WORLD, *of_mesh, run.mesh.to_lower]
    assert run.mesh.timeout().total_seconds() == 7
    return [g._get_backend(torch.device("cpu")).options._timeout.total_seconds() for g in groups]


def test_the_timeout_reaches_every_group_of_the_mesh():
    assert run_ranks(4, group_timeouts) == [[7.0] * 8] * 4


def test_cuda_that_is_not_there_is_a_sentence():
    if torch.cuda.is_available():
        pytest.skip("this host has a GPU")
    with pytest.raises(InputError, match="torch sees no GPU"):
        meshes.pick_device(Run(device="cuda"), 0)


def test_every_rank_of_a_host_has_a_gpu_of_its_own(monkeypatch):
    set_to = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", set_to.append)
    assert meshes.pick_device(Run(), 1) == torch.device("cuda", 1)
    assert set_to == [1]
    with pytest.raises(InputError, match="local rank 2 has no GPU of its own"):
        meshes.pick_device(Run(), 2)


def coordinates() -> tuple[int, int, int]:
    mesh = meshes.open_mesh(Run(), Parallelism(tensor_parallel=2, pipeline_parallel=2), 2)
    return mesh.pp_rank, mesh.dp_rank, mesh.device_mesh.get_local_rank("tp")


def test_tensor_parallel_ranks_are_neighbours_and_stages_are_far_apart():
    """The ranks of a tensor-parallel group and those of a pipeline share their batch."""
    assert run_ranks(8, coordinates) == [(r // 4, r // 2 % 2, r % 2) for r in range(8)]


def meshes_of_experts() -> list[tuple[str, ...] | None]:
    runs = (
        job("--parallelism.tensor_parallel=2"),
        job(*EXPERTS),
        job(*EXPERTS, "--parallelism.tensor_parallel=2"),
    )
    return [run.mesh.experts_mesh and run.mesh.experts_mesh.mesh_dim_names for run in runs]


def test_only_experts_that_ranks_share_have_a_mesh_of_their_own(seen):
    """Every mesh is groups that all ranks have to open."""
    assert seen[meshes_of_experts] == [[None, None, ("pp", "dp_replicate", "edp", "ep")]] * 2


def test_a_gpu_of_two_ranks_is_named():
    assert contract._shared_devices(["a", "b", "c"]) == []
    assert contract._shared_devices(["a", "b", "a"]) == [
        "ranks [0, 2] share GPU a: start one process per GPU"
    ]


def test_exchanges_are_counted_in_a_file(tmp_path):
    """The launcher reads it after the rank has died (tools/launch)."""
    counter = ProgressCounter(str(tmp_path / "begun"))
    for _ in range(3):
        counter.advance()
    assert (tmp_path / "begun").read_bytes() == (3).to_bytes(8, "little")
    full = ProgressCounter("/dev/full")  # a disk without room costs the file, not the rank
    full.advance()
    assert full.count == 1


def counts_of_exchanges() -> list[int]:
    mesh = job().mesh
    x = torch.zeros(())
    exchanges = [
        lambda: mesh.sum_over_tokens(x),
        lambda: mesh.sum_over_pp(x),
        lambda: mesh.sum_over_tp(x),
        lambda: mesh.sum_over_ranks(x),
        lambda: mesh.any_rank(False),
        lambda: mesh.gather(1),
    ]
    counts = [mesh.progress_counter.count]
    for exchange in exchanges:
        exchange()
        counts.append(mesh.progress_counter.count)
    return [after - before for before, after in itertools.pairwise(counts)]


def test_every_exchange_of_a_mesh_counts_once(seen):
    """A rank that hangs is known by the fewest, so an exchange that is not counted would hide it."""
    assert seen[counts_of_exchanges] == [[1] * 6] * 2


def a_parameter_without_gradient() -> None:
    """A router's bias: a plain tensor on any mesh, and not the optimizer's."""
    model = job().model
    model.register_parameter("bias", nn.Parameter(torch.ones(3), requires_grad=False))
    run = job()
    optimizer = build_optimizer(model, [("*", True)], run.cfg.optimizer)
    assert not any(p is model.bias for group in optimizer.param_groups for p in group["params"])
    contract.verify(model, optimizer, run.mesh, {})
    model.bias.requires_grad_(True)
    refused(
        train.Job(run.cfg, run.mesh, run.args, model, optimizer),
        "1 parameters are plain tensors.*\n.*misses 1 of",
    )


def test_a_parameter_that_is_not_trained_keeps_the_contract(seen):
    assert seen[a_parameter_without_gradient] == [None, None]


# of a checkpoint that holds a, b and c: what each rank wants of it, a capital letter as a tensor of
# another shape -> what all ranks say
PARTS = {
    ("ab", "c"): "fits",
    ("ab", "bc"): "fits",
    ("a", "b"): "model.c is in it and not in this run",
    ("ab", "cx"): "model.x is missing from it",
    ("ab", "C"): "model.c has shape [2] there and [3] here",
}


def part_of_a_checkpoint(wanted: str, group: dist.ProcessGroup | None) -> str:
    manifest = {"tensors": {f"model.{name}": {"shape": [2], "dtype": "F32"} for name in "abc"}}
    tensors = {
        f"model.{name.lower()}": torch.ones(2 if name == name.lower() else 3) for name in wanted
    }
    try:
        state.check_fits(Path("step"), manifest, tensors, "model", (), group)
    except InputError as error:
        return str(error).partition(": ")[2]
    return "fits"


def parts_of_a_checkpoint() -> tuple[list[str], str]:
    """Return the messages of PARTS, and that of a rank by itself."""
    rank = dist.get_rank()
    together = [part_of_a_checkpoint(wanted[rank], dist.group.WORLD) for wanted in PARTS]
    return together, part_of_a_checkpoint(("ab", "c")[rank], None)


def test_a_checkpoint_is_compared_with_what_all_ranks_hold(seen):
    """Ranks hold parts of the model, as the stages of a pipeline do."""
    for together, _ in seen[parts_of_a_checkpoint]:
        assert together == list(PARTS.values())
    assert "c is in it" in seen[parts_of_a_checkpoint][0][1], "the control: one rank by itself"
