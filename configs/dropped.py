"""Name the options that earlier versions had: the value that holds now, and the sentence that
answers a run that sets another value.

Old configurations, such as config.toml in a run's folder or in a checkpoint, set every option. So an
old option is accepted where it has the value that holds now. With another value the run goes on and
says so, unless its numbers would be others: then it is refused.
"""

import argparse
from typing import Any, NamedTuple


class Dropped(NamedTuple):
    """An option of earlier versions."""

    holds: object
    """Its value in every run of this version: its default at the time."""
    sentence: str
    """What is done now, and what to set instead."""
    changes_numbers: bool = False
    """Whether another value computed other numbers."""


DROPPED = {
    "run.gc_interval": Dropped(50, "Python garbage is collected every 50 steps"),
    "run.logs": Dropped(
        "auto",
        "all ranks write a log if there are fewer than 1,024, otherwise one of each host, and all "
        "that fail",
    ),
    "run.max_failures_at_step": Dropped(
        3,
        "a run ends with 76 after 3 starts in a row that failed at one step for one cause "
        "(reliability/record.py::MOST_FAILURES)",
    ),
    "data.prefetch": Dropped(2, "a loader worker keeps 2 batches ready; data.workers adds workers"),
    "data.fim_spm_rate": Dropped(
        0.5, "half of the documents that are rearranged begin with the suffix", True
    ),
    "data.retries": Dropped(
        5, "what a stream cannot read is opened again 5 times (data/stream.py::RETRIES)"
    ),
    "data.retry_seconds": Dropped(
        1.0, "the pauses before a stream opens it again begin with 1 s, and double up to 30 s"
    ),
    "data.stream_epochs": Dropped(
        0, "a stream is read again from its beginning; training.stop_after ends a run", True
    ),
    "data.verify": Dropped(
        False, "python -m data.prepare --source FOLDER --verify compares a corpus with its hashes"
    ),
    "lora.quantization": Dropped(
        "none", "frozen weights are kept in training.param_dtype and sharded", True
    ),
    "optimizer.moment_dtype": Dropped(
        "float32", "AdamW keeps its averages in float32, as it keeps weights", True
    ),
    "optimizer.adamw_lr_scale": Dropped(
        1.0,
        "optimizer.lr_multipliers gives AdamW's parameters other rates, by patterns of their names",
        True,
    ),
    "optimizer.nesterov": Dropped(True, "Muon's momentum is always Nesterov's", True),
    "optimizer.ns_steps": Dropped(5, "Muon takes 5 Newton-Schulz iterations", True),
    "optimizer.normuon_beta2": Dropped(0.95, "NorMuon's second moment has a decay of 0.95", True),
    "optimizer.soap_max_dim": Dropped(
        10000, "SOAP turns no side of a matrix that is longer than 10,000", True
    ),
    "optimizer.soap_frequency": Dropped(10, "SOAP decomposes its factors every 10 steps", True),
    "parallelism.prefetch": Dropped(0, "FSDP2 gathers the next block ahead"),
    "compile.optimizer": Dropped(
        False, "gradients are clipped in a pass of their own, before the optimizer's", True
    ),
    "checkpoint.load_path_content": Dropped(
        "model",
        "checkpoint.load_path gives the weights alone; checkpoint.branch_from goes on with the "
        "optimizer's averages too",
        True,
    ),
    "checkpoint.verify_on_load": Dropped(True, "every block that is read is verified"),
    "checkpoint.max_failures": Dropped(
        3, "a run ends after 3 failed saves in a row (checkpoint/manager.py::MOST_FAILURES)"
    ),
    "checkpoint.peer_rate": Dropped(
        0.0,
        "copies are sent as fast as the network takes them; checkpoint.peer_interval spaces them",
    ),
    "metrics.expert_interval": Dropped(50, "the load of experts is reported every 50 steps"),
    "metrics.progress": Dropped(
        "auto", "a terminal has a progress bar; TQDM_DISABLE=1 in the environment hides it"
    ),
    "metrics.straggler_interval": Dropped(50, "late ranks are named every 50 steps"),
    "metrics.peak_tflops": Dropped(
        0.0, "a device's peak is its row in training/metrics.py::PEAK_TFLOPS"
    ),
    "profiler.start_step": Dropped(5, "a trace begins with the fifth step of a process"),
    "profiler.steps": Dropped(3, "a trace has three steps"),
}


class _Flag(argparse.Action):
    """Flag of earlier versions of a tool: it ends the program with the sentence in `const`."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any, **__: Any) -> None:
        parser.error(f"{self.option_strings[0]} is gone: {self.const}")


def flag(parser: argparse.ArgumentParser, name: str, sentence: str) -> None:
    """Answer a tool's old flag with what to do now; exit code 2."""
    parser.add_argument(
        name,
        nargs="?",
        action=_Flag,
        const=sentence,
        default=argparse.SUPPRESS,
        help=argparse.SUPPRESS,
    )


def holds(name: str, value: object) -> bool:
    """Return whether an old option is set to what every run does now."""
    now = DROPPED[name].holds
    return value == now and isinstance(value, bool) == isinstance(now, bool)


def without(tables: dict[str, Any]) -> dict[str, Any]:
    """Return the tables of a stored configuration without old options."""
    found = {}
    for table, options in tables.items():
        kept = {key: value for key, value in options.items() if f"{table}.{key}" not in DROPPED}
        found[table] = kept
    return found
