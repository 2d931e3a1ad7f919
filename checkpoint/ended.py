"""Tell whether a run is done before anything is built or written: a start that has nothing to do
changes nothing, and a requeued job ends at once.

`tools/check.py` asks before torch is imported, which takes seconds, and a start that has claimed the
run's folder asks again. Only the common case is found here. Where options outside the schedule have
changed, or the newest checkpoint is damaged, the start goes on: loading says what is wrong, or goes
back.
"""

from pathlib import Path

from checkpoint import branches, changes, verify
from configs import done
from configs.load import dump
from configs.schema import Config, InputError
from reliability.objects import Key

# With other options than these a start may be refused, or warned.
FREE = ("training.steps", "training.stop_after", "optimizer.lr", *changes.ELSEWHERE)
TABLES = ("model", "data", "training", "optimizer", "lora")


def refuse_done(cfg: Config, place: Path | Key, names: list[str]) -> None:
    """Raise NothingToDo if the run has done all of its steps. Called on rank 0.

    place: where its checkpoints are; names: theirs, newest first.
    """
    if not names or cfg.checkpoint.load_step >= 0:
        return
    newest = place / names[0]
    _, step = verify.parse_name(names[0])
    if step < cfg.training.last_step or not verify.is_whole(newest):
        return
    exported = Path(cfg.run.folder) / "hf" / names[0]
    if cfg.checkpoint.export_hf and not exported.exists():
        return
    parent = cfg.checkpoint.branch_from
    if parent and branches.begun_by(Path(cfg.run.folder))[1] != parent:
        return
    if _is_of_this_run(newest, cfg):
        raise done.NothingToDo(done.sentence(cfg.run.folder, step, cfg.training))


def _is_of_this_run(path: Path | Key, cfg: Config) -> bool:
    """Return whether the options that a checkpoint was written with are those of this start."""
    try:
        before = changes.options(verify.read_manifest(path)["facts"])
    except (verify.Damaged, InputError):
        return False
    now, defaults = (changes.options({"config": dump(one)}) for one in (cfg, Config()))
    for name in before.keys() | now.keys():
        is_judged = name.partition(".")[0] in TABLES or name == "run.seed"
        # one that is not set is left out, as is one that is newer than the checkpoint
        if is_judged and name not in FREE and before.get(name, defaults.get(name)) != now.get(name):
            return False
    return bool(before)
