"""Resolves the stages of a run: `[[training.stages]]` change the length of sequences, the batch,
the mixture or the learning rate from a step on.

A stage is a start of the run with the options of its steps: it begins from the checkpoint in which
the stage before it ended (`checkpoint/stages.py`). So all that a start checks and builds holds for it
too, and a run with stages is exact wherever a run that is killed and goes on is.
"""

from collections.abc import Callable

from pydantic import PrivateAttr

from configs.schema import Config, Derived, InputError, LRSchedule, Training, TrainingStage


class OtherStage(InputError):
    """A checkpoint that belongs to another stage than the one that was opened. step: its step."""

    def __init__(self, step: int, sentence: str) -> None:
        super().__init__(sentence)
        self.step = step


class StageConfig(Config):
    """The configuration of one stage. `configs/load.py::dump` writes the whole run's."""

    _whole: Config = PrivateAttr()
    _number: int = PrivateAttr()


def whole(cfg: Config) -> Config:
    """Return the configuration of the run that this stage is a part of; without stages `cfg`."""
    return cfg._whole if isinstance(cfg, StageConfig) else cfg


def steps_of(cfg: Config) -> list[range]:
    """Return the steps of each stage of a run, 0-based, up to the last step that it does."""
    last = cfg.training.last_step
    begins = [0, *(row.begin for row in cfg.training.stages if row.begin < last)]
    ends = [*begins[1:], last]
    return [range(begin, end) for begin, end in zip(begins, ends, strict=True)]


def at(cfg: Config, step: int) -> Config:
    """Return the configuration of the stage that is in effect after `step` steps (at least 0); `cfg`
    itself for a run without stages."""
    if not cfg.training.stages:
        return cfg
    begun = [number for number, steps in enumerate(steps_of(cfg)) if steps.start <= step]
    return of(cfg, begun[-1])


def of(cfg: Config, number: int) -> StageConfig:
    """Return the configuration of a stage (0: what is before the first row). What a row does not
    set stays as in the stage before."""
    steps = steps_of(cfg)
    training, optimizer, schedule = cfg.training, cfg.optimizer, cfg.lr_schedule
    for row in cfg.training.stages[:number]:
        training = training.model_copy(update=_sizes(row))
        if row.seq_len or row.global_batch_size:
            training = _local_batch(training, row)
        if row.lr is not None:
            optimizer = optimizer.model_copy(update={"lr": row.lr})
        if row.lr_schedule is not None:
            schedule = _schedule(schedule, row)
    tables = vars(cfg) | {"optimizer": optimizer, "lr_schedule": schedule}
    if number < len(steps) - 1:
        # what is done at the end of the run alone
        training = training.model_copy(update={"stop_after": steps[number].stop})
        checkpoint = cfg.checkpoint.model_copy(update={"export_hf": ""})
        debug = cfg.debug.model_copy(update={"sample_tokens": 0})
        tables |= {"checkpoint": checkpoint, "debug": debug}
    stage = StageConfig.model_construct(**tables | {"training": training})
    stage._whole = cfg
    stage._number = number
    return stage


def _sizes(row: TrainingStage) -> dict:
    """Return the options of [training] that a row sets."""
    names = ("seq_len", "global_batch_size", "local_batch_size")
    return {name: getattr(row, name) for name in names if getattr(row, name) is not None}


def _local_batch(training: Training, row: TrainingStage) -> Training:
    """Derive local_batch_size anew where it was derived."""
    if row.local_batch_size is None and isinstance(training.local_batch_size, Derived):
        return training.model_copy(update={"local_batch_size": None})
    return training


def _schedule(before: LRSchedule, row: TrainingStage) -> LRSchedule:
    """Return the schedule that a row begins."""
    changed = {"kind": row.lr_schedule, "warmup_steps": row.lr_warmup_steps}
    if row.lr_min_ratio is not None:
        changed["min_ratio"] = row.lr_min_ratio
    return before.model_copy(update=changed)


def weights(cfg: Config, name: str) -> list[list]:
    """Return the weights that stages of a run give a source: [step, weight] of each."""
    rows = cfg.training.stages
    return [[row.begin, dict(row.weights)[name]] for row in rows if name in dict(row.weights)]


def sizes(cfg: Config) -> list[tuple[int, int, int]]:
    """Return (first step, seq_len, global_batch_size) of each stage of a run that changes one of
    the two."""
    changed = []
    for number, row in enumerate(cfg.training.stages, 1):
        if row.seq_len or row.global_batch_size:
            training = of(cfg, number).training
            changed.append((row.begin, training.seq_len, training.global_batch_size))
    return changed


def own_steps(cfg: Config) -> range:
    """Return the steps of this stage; of a whole run those of the first."""
    number = cfg._number if isinstance(cfg, StageConfig) else 0
    return steps_of(whole(cfg))[number]


def refuse(cfg: Config, by: str) -> None:
    """Raise InputError for a run with stages, which `by` cannot do."""
    if cfg.training.stages:
        raise InputError(f"{by} is of a run without stages: remove [[training.stages]]")


def schedule_steps(cfg: Config) -> range:
    """Return the steps over which the learning rate's schedule of this stage extends: those from
    the row that began it to the next that begins one."""
    training = cfg.training
    number = cfg._number if isinstance(cfg, StageConfig) else 0
    begins = [0, training.steps]
    for place, row in enumerate(training.stages):
        if row.lr_schedule is None:
            continue
        if place < number:
            begins[0] = row.begin
        else:
            begins[1] = row.begin
            break
    return range(*begins)


def check(cfg: Config, step: int) -> None:
    """Raise OtherStage where a checkpoint of `step` steps belongs to another stage than `cfg`: the
    newest may be damaged, and an older one is loaded."""
    if not isinstance(cfg, StageConfig):
        return
    expected = at(cfg._whole, step)
    if expected._number != cfg._number:
        raise OtherStage(
            step,
            f"the checkpoint of step {step} is in stage {expected._number + 1} of the run, and "
            f"stage {cfg._number + 1} was opened: that one is opened next",
        )


def title(cfg: Config) -> list[str]:
    """Return the line of the log about a stage; none in a run without stages."""
    if not isinstance(cfg, StageConfig):
        return []
    steps = steps_of(cfg._whole)
    own = steps[cfg._number]
    training = cfg.training
    return [
        f"stage {cfg._number + 1} of {len(steps)}, steps {own.start + 1} to {own.stop}: "
        f"seq_len {training.seq_len}, global_batch_size {training.global_batch_size}, "
        f"lr {cfg.optimizer.lr:g} ({cfg.lr_schedule.kind})"
    ]


def sentences(cfg: Config, broken_rules: Callable, *sizes: int | None) -> list[str]:
    """Return the rules that a stage breaks and the run before it does not, also of stages behind
    training.stop_after: a later start does them. broken_rules: of configs/check.py."""
    problems: list[str] = []
    to_the_end = cfg.training.model_copy(update={"stop_after": 0})
    cfg = cfg.model_copy(update={"training": to_the_end})
    for number, steps in enumerate(steps_of(cfg)[1:], 1):
        for sentence in broken_rules(of(cfg, number), *sizes):
            problems.append(f"in stage {number + 1} (from step {steps.start} on): {sentence}")
    return problems
