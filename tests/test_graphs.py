"""compile.cuda_graphs without a GPU: refused configurations, and outputs that must survive a
graph's next replay. On a GPU the check "recorded" compares it bit by bit (tests/test_gpu.py)."""

from types import SimpleNamespace

import pytest
import torch

import train
from configs.load import load_config
from configs.schema import InputError
from lab.bench.device import checks
from parallelisms.mesh import close_mesh
from training import graphs

CPU = torch.device("cpu")
TWO = "--training.local_batch_size=2"
KINDS = {
    "bfloat16": (TWO, "--training.param_dtype=bfloat16"),
    "experts": (TWO, *checks.EXPERTS, "--training.z_loss=1e-4"),
}


class OnCpu(graphs.GraphRecorder):
    """Recorder for a machine without a GPU. A replay computes the step again and writes it into the
    recorded buffers, as a graph does."""

    def __init__(self):
        self.batch, self.gradients, self.graph = {}, [], None
        self.device = CPU
        self.launched = 0

    def first(self, gradients, job, given, flags):
        self.batch = {name: x.to(CPU, copy=True) for name, x in given.items()}
        return gradients(job, self.batch, flags)

    def record(self, gradients, job):
        self.graph = SimpleNamespace(replay=lambda: self.replay(gradients, job))
        self.result = gradients(job, self.batch)
        self.gradients = [(p, p.grad) for p in job.model.parameters() if p.grad is not None]

    def replay(self, gradients, job):
        self.launched += 1
        job.optimizer.zero_grad(set_to_none=True)
        new = gradients(job, self.batch)
        for name in ("loss", "raised", "losses"):
            getattr(self.result, name).copy_(getattr(new, name))
        for name, of_layers in new.terms.sums.items():
            for layer, value in of_layers.items():
                self.result.terms.sums[name][layer].copy_(value)
        for parameter, gradient in self.gradients:
            gradient.copy_(parameter.grad)


def steps(options: tuple[str, ...], recorder: graphs.Compute = graphs.directly) -> list:
    """Return the outputs of six steps, kept until the end, and the weights after them."""
    cfg = checks.config(CPU, *options)
    job = train.build(cfg)
    job.compute = recorder
    results = []
    shape = (-1, cfg.training.local_batch_size, checks.TOKENS)
    for number, batch in enumerate(checks.batches() * 2):
        flags = train.Flags(saving=number == 3)
        batch = {name: x.view(shape) if x.ndim > 1 else x for name, x in batch.items()}
        results.append(train.train_step(job, batch, flags=lambda flags=flags: flags))
    weights = [p.detach().clone() for p in job.model.parameters()]
    close_mesh()
    seen = [(r.loss, r.grad_norm, tuple(r.flags), r.losses, sums(r)) for r in results]
    return [seen, weights]


def numbers(cfg):
    return train.architecture(cfg)[1]


def sums(result: train.StepResult) -> dict:
    return {name: dict(of_layers) for name, of_layers in result.terms.sums.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_steps_of_a_recorder_are_those_without(kind):
    recorder = OnCpu()
    torch.testing.assert_close(steps(KINDS[kind], recorder), steps(KINDS[kind]), rtol=0, atol=0)
    assert recorder.launched == 5


def test_a_recorder_reads_the_loss_weights_of_each_step(monkeypatch):
    made = checks.batches()
    for step, batch in enumerate(made):
        batch["loss_weights"] = torch.arange(checks.ROWS).double() + step
    monkeypatch.setattr(checks, "batches", lambda: made)
    torch.testing.assert_close(steps((TWO,), OnCpu()), steps((TWO,)), rtol=0, atol=0)
    monkeypatch.setattr(graphs, "READ", ("tokens", "labels"))
    with pytest.raises(AssertionError):
        torch.testing.assert_close(steps((TWO,), OnCpu()), steps((TWO,)), rtol=0, atol=0)


@pytest.mark.slow
def test_negative_control_results_that_lie_where_the_graph_writes_are_seen():
    class Shared(OnCpu):
        def copied(self, flags):
            return self.result

    with pytest.raises(AssertionError):
        torch.testing.assert_close(steps((TWO,), Shared()), steps((TWO,)), rtol=0, atol=0)


def test_a_batch_of_another_shape_runs_kernel_by_kernel():
    recorder = OnCpu()
    job = train.build(checks.config(CPU))
    job.compute = recorder
    for batch in checks.batches():
        train.train_step(job, batch)
    shorter = {name: x[..., :30].contiguous() for name, x in checks.batches()[0].items()}
    assert train.train_step(job, shorter).losses.shape[-1] == 30
    assert recorder.launched == 2
    close_mesh()


def test_what_only_the_device_tells_is_refused():
    cfg = load_config([*checks.config_words(torch.device("cuda")), "--compile.cuda_graphs=true"])
    with pytest.raises(InputError, match="is for a GPU, and this run is on a cpu: set it to false"):
        graphs.open_recorder(cfg, CPU, numbers(cfg))
    gpu = torch.device("cuda")
    graphs.check(cfg, gpu, numbers(cfg))
    experts = [*checks.config_words(gpu), *checks.EXPERTS, "--compile.cuda_graphs=true"]
    with pytest.raises(InputError, match="with experts needs their grouped GEMM.*bfloat16"):
        graphs.check(load_config(experts), gpu, numbers(load_config(experts)))
    narrow = load_config([*experts, "--training.param_dtype=bfloat16"])
    graphs.check(narrow, gpu, numbers(narrow))
