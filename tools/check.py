"""Is on this machine what a configuration names? `run_train.sh` asks on each node before it starts
a rank.

    python -m tools.check configs/llama_8b.toml [--table.key=value ...] [--world-size=64 --local-world-size=8]

`configs/load.py` reads the configuration alone, on any machine. This looks at the machine: the
text, the tokenizer and its size, the checkpoints to start from, optional packages, and a GPU where
an option needs one. All mistakes are reported at once, with exit code 2; a run that is done already
with 3, if it has one node (--one-node). Nothing is written or downloaded but a tokenizer in a store.
Torch, which takes seconds to import, is imported only for a check that nothing else can answer.
"""

import argparse
import importlib.util
import shlex
import sys
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

from checkpoint import branches, ended, lease, verify
from checkpoint.stores import lease as store_lease
from configs import check, program
from configs.done import NothingToDo
from configs.load import ConfigError, as_given, help_asked_for, load_config
from configs.schema import Config, InputError
from reliability.objects import Key, Unreachable, location, missing_package

ENDING = 2.0  # seconds
IS_DONE = 3  # exit code: nothing is to be started


def problems(cfg: Config, local_world_size: int) -> Iterator[str]:
    """Yield a sentence for each thing that this machine lacks for so many ranks of its own."""
    if cfg.metrics.wandb_project and importlib.util.find_spec("wandb") is None:
        yield (
            f'metrics.wandb_project = "{cfg.metrics.wandb_project}" needs the package wandb: pip '
            "install wandb, or leave the option empty"
        )
    yield from input_problems(cfg)
    for option in ("store", "load_path", "branch_from"):
        url = getattr(cfg.checkpoint, option)
        if isinstance(location(url), Key) and (problem := missing_package(url)):
            yield f"checkpoint.{option}: {problem}"
    folder = location(cfg.checkpoint.store or Path(cfg.run.folder, "checkpoints"))
    # the run itself lists the store, not every node
    fresh = isinstance(folder, Path) and not any(folder.glob("step-*"))
    for option in ("load_path", "load_hf"):
        place = getattr(cfg.checkpoint, option)
        is_here = isinstance(location(place), Key) or Path(location(place)).exists()
        if place and fresh and not is_here:
            yield (
                f'checkpoint.{option} = "{place}" does not exist here: name the folder to start '
                "from, or remove the option"
            )
        elif place and fresh and option == "load_hf":
            yield from model_problems(cfg, Path(place))
    if cfg.checkpoint.branch_from and fresh:
        yield from branch_problems(cfg.checkpoint.branch_from)
    if cfg.checkpoint.export_hf:
        yield from export_problems(cfg)
    yield from gpu_problems(cfg, local_world_size)
    yield from torch_problems(cfg)


def input_problems(cfg: Config) -> Iterator[str]:
    from data import inputs  # here, because it takes as long as all else

    return inputs.problems(cfg, check.architecture(cfg.model)["vocab_size"])


def check_free(cfg: Config) -> None:
    """Raise InputError if another run of this machine writes where this one would: seconds before a
    rank finds out. One that has just been killed gets ENDING seconds to be gone. A mirror asks for
    itself, and a run on another machine is known by its beats, for which a rank watches."""
    place = location(cfg.checkpoint.store or Path(cfg.run.folder, "checkpoints"))
    deadline = time.monotonic() + ENDING
    while True:
        try:
            if isinstance(place, Path):
                lease.check_free(place)
            elif not cfg.run.mirror:
                store_lease.check_free(place)
            return
        except Unreachable:
            raise
        except InputError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.1)


def nothing_to_do(cfg: Config) -> str:
    """Return the sentence of a run that is done; "" where it is not, or a store has to be asked."""
    place = location(cfg.checkpoint.store or Path(cfg.run.folder, "checkpoints"))
    try:
        if isinstance(place, Path):
            ended.refuse_done(cfg, place, verify.published(place))
    except NothingToDo as done:
        return str(done)
    except OSError:  # a folder that cannot be read: taking its lease will say so
        pass
    return ""


def without_files(cfg: Config, argv: list[str]) -> str:
    """Return a command that tries the preset without its corpus and tokenizer, on what every
    machine has; "" where that would not help: the files exist, or the user named others.

    argv: the configuration's arguments. Validation is off, because the preset's small share of
    Python's library is shorter than one of its sequences. The command uses another folder, because
    the run that the preset is for has another tokenizer.
    """
    _, given = as_given(argv)
    if cfg.data.mixture or cfg.validation.sets or {"data.source", "data.tokenizer"} & given.keys():
        return ""
    # adapters are nothing without their base
    if cfg.lora.rank or not any(input_problems(cfg)):
        return ""
    words = [
        "--data.source=stdlib",
        "--data.tokenizer=bpe",
        "--validation.interval=0",
        "--run.folder=runs/try",
    ]
    of_tokenizers = ("end_token", "tokenizer_pattern")
    words += [f"--data.{name}=" for name in of_tokenizers if getattr(cfg.data, name)]
    return shlex.join(["./run_train.sh", *argv, *words])


def branch_problems(given: str) -> Iterator[str]:
    """Look for the checkpoint on a disk that a new run branches off. One in a store is looked for
    by the run itself, not by every node."""
    try:
        if isinstance(location(given), Path):
            branches.find(given)
    except InputError as error:
        yield str(error)


def model_problems(cfg: Config, folder: Path) -> Iterator[str]:
    """Check that a folder of Hugging Face's describes the run's model, as a rank does."""
    from checkpoint import hf  # here, because it imports torch, as the families do
    from models import FORMATS

    try:
        hf.check_model(folder, FORMATS, cfg.model.family, check.architecture(cfg.model))
    except InputError as error:
        yield f"checkpoint.load_hf: {error}"


def export_problems(cfg: Config) -> Iterator[str]:
    """Check before training that the model can be exported for Hugging Face at the end."""
    import torch  # here, because it takes seconds, as do those that import it

    from checkpoint import hf
    from models import FORMATS, MODELS

    option = f'checkpoint.export_hf = "{cfg.checkpoint.export_hf}"'
    try:
        formats = hf.formats_of(FORMATS, cfg.model.family)
        args = formats.Args(**check.architecture(cfg.model))
        hf.config_of(formats, args)
    except InputError as error:
        yield f"{option}: {error}"
        return
    with torch.device("meta"):
        model = MODELS[cfg.model.family].build(args)
    known = formats.hf_names(args)
    unknown = [name for name, _ in model.named_parameters() if name not in known]
    if unknown:
        yield (
            f"{option}: the published format of {cfg.model.family} has no {unknown[0]}: leave the "
            f"option empty, or name it in models/formats/{cfg.model.family}.py"
        )


def torch_problems(cfg: Config) -> Iterator[str]:
    """List options that the installed version of torch does not support. The newest version
    supports all of them, so then nothing is imported."""
    numbers = tuple(int(number) for number in version("torch").split(".")[:2])
    if numbers >= (2, 13):
        return
    from parallelisms import check_torch

    p = cfg.parallelism
    has_experts = bool(check.architecture(cfg.model).get("n_experts"))
    try:
        check_torch(cfg, has_experts and p.expert_parallel * p.tensor_parallel > 1, numbers)
    except InputError as error:
        yield str(error)


def gpu_problems(cfg: Config, local_world_size: int) -> Iterator[str]:
    """List options that need a GPU that this machine lacks, by the code that a rank has."""
    t, p = cfg.training, cfg.parallelism
    width = check.query_width(cfg.model)
    gathers = p.context_parallel > 1 and p.context_parallel_method == "gather"
    # else every GPU of today has a kernel
    gathers &= check.no_flash(t.param_dtype, width)
    needs = [
        cfg.run.device == "cuda",
        t.attention != "auto",
        t.delta_rule == "flash",
        t.float8 != "none",
        t.param_dtype == "float64",
        p.async_tensor_parallel,
        gathers,
        cfg.compile.cuda_graphs,
    ]
    if not any(needs):
        return
    # here, because they import torch
    from parallelisms import async_tp, cp, delta_kernel, dp, float8, mesh
    from training import attention, graphs

    try:
        device = mesh.pick_device(cfg.run, local_world_size - 1)
    except InputError as error:
        yield str(error)
        return
    numbers = SimpleNamespace(**check.architecture(cfg.model))
    checks = [
        lambda: attention.choose(t.attention, device),
        lambda: delta_kernel.is_flash(t.delta_rule, device),
        lambda: dp.param_dtype(t, device),
        lambda: graphs.check(cfg, device, numbers),
    ]
    if t.float8 != "none":
        checks.append(lambda: float8.check(t.float8, device, cfg.debug.emulate_float8))
    if p.async_tensor_parallel:
        checks.append(lambda: async_tp.check_overlap(device.type))
    if gathers:
        checks.append(lambda: cp.check_kernel(device, dp.param_dtype(t, device), width))
    for ask in checks:
        try:
            ask()
        except InputError as error:
            yield str(error)


@program.refuses
def held(cfg: Config) -> int:
    """Say who writes where this run would. Returns the exit code."""
    check_free(cfg)
    return 0


@program.refuses
def main(argv: list[str]) -> int:
    if text := help_asked_for(argv):
        print(text)
        return 0
    parser = argparse.ArgumentParser(
        prog="python -m tools.check", add_help=False, allow_abbrev=False
    )
    parser.add_argument("--world-size", type=int)
    parser.add_argument("--local-world-size", type=int, default=1)
    parser.add_argument("--one-node", action="store_true")
    sizes, arguments = parser.parse_known_args(argv)
    typed = argv == sys.argv[1:]
    cfg = load_config(arguments, sizes.world_size, sizes.local_world_size, typed)
    if sizes.one_node and (sentence := nothing_to_do(cfg)):
        code = held(cfg)
        if not code:
            print(sentence)
        return code or IS_DONE
    found = list(dict.fromkeys(problems(cfg, sizes.local_world_size)))
    if not found:
        return held(cfg) if sizes.one_node else 0
    print(ConfigError(found), file=sys.stderr)
    if command := without_files(cfg, arguments):
        words = "README.md says where a tokenizer and a corpus come from. To try it without them:"
        print(f"{words}\n    {command}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    program.run(main, sys.argv[1:])
