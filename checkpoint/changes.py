"""Report the options that a resumed run changes from those in its checkpoint.

A change of schedule bends the learning rate in silence, and a hash does not tell which option
changed. So one line names each option that changed, and the learning rate of the next step before
and after the change. Imports no torch, unless there is a change.
"""

import json
from typing import Any

import tomli

from configs import dropped, stages
from configs.schema import Config

# Tables of options whose change changes what is computed; the mesh is compared by its sizes.
TABLES = ("model", "data", "training", "optimizer", "lr_schedule", "lora")
# Options in these tables that are only places of files, and ways to read them.
ELSEWHERE = ("data.cache", "data.workers")

# What rows of data.mixture lack in checkpoints of an older version, and what it was there.
ADDED = {"loss_weight": 1.0}


def line(manifest: dict, facts: dict, mesh: dict[str, int]) -> str:
    """Describe all changes in one line; "" if there are none, or if one side has no options. facts:
    of this run, with the resolved options as TOML in "config"; mesh: sizes by dimension."""
    before, now = options(manifest["facts"]), options(facts)
    if not before or not now:
        return ""
    # of options that a checkpoint's version had, and this one has not
    now |= {name: old.holds for name, old in dropped.DROPPED.items() if old.changes_numbers}
    changed = []
    for name in sorted(before.keys() & now.keys()):
        is_ours = name.partition(".")[0] in TABLES and name not in ELSEWHERE
        if is_ours and before[name] != now[name]:
            changed.append(f"{name} {_shown(before[name])} -> {_shown(now[name])}")
    for name, size in mesh.items():
        there = manifest["mesh"].get(name, 1)
        if there != size:
            changed.append(f"mesh {name} {there} -> {size}")
    if not changed:
        return ""
    step = manifest["step"]
    # the next step, or the last one where the schedule has ended
    at = min(step, before.get("training.steps", step + 1) - 1)
    rates = [_rate(of, at) for of in (manifest["facts"], facts)]
    if rates[0] != rates[1] and None not in rates:
        changed.insert(0, f"learning rate of step {at + 1} {rates[0]:.3g} -> {rates[1]:.3g}")
    return f"changed since the checkpoint of step {step}: {', '.join(changed)}"


def options(facts: dict) -> dict[str, Any]:
    """Return the options in a manifest, by name, those of data.mixture by row; none for one that
    has no configuration, such as a converted model."""
    try:
        tables = tomli.loads(facts["config"])
    except (KeyError, TypeError, ValueError):
        return {}
    found = {}
    for table, values in tables.items():
        if isinstance(values, dict):
            found |= {f"{table}.{key}": value for key, value in values.items()}
    rows = found.get("data.mixture", [])
    if rows:
        found["data.mixture"] = [row["name"] for row in rows]
    for row in rows:
        of_row = ADDED | row
        found |= {f"data.mixture.{row['name']}.{key}": value for key, value in of_row.items()}
    return found


def refused(saved: dict, here: dict) -> list[str]:
    """Return sentences that say why a checkpoint is not of this run. saved, here: facts of both.
    Other numbers of the model follow from another family, so a different family is then the only
    sentence."""
    families = saved.get("family"), here.get("family")
    if None not in families and families[0] != families[1]:
        return mismatches(families[0], families[1], "model.family")
    before, now = (dict(facts.get("must_match", {})) for facts in (saved, here))
    # a number that a family has gained since then
    before["model"] = dict.fromkeys(now.get("model", {}), 0) | before.get("model", {})
    lines = []
    tokens = before.pop("tokenizer", None), now.pop("tokenizer", None)
    # a model that was converted without a tokenizer has none to compare
    if None not in tokens and tokens[0] != tokens[1]:
        names = [options(facts).get("data.tokenizer") for facts in (saved, here)]
        if None in names or names[0] == names[1]:
            lines.append(
                f"data.tokenizer ({_shown(names[1])}) has other tokens now than when the checkpoint "
                "was written"
            )
        else:
            lines += mismatches(names[0], names[1], "data.tokenizer")
    return lines + mismatches(before, now)


def mismatches(saved: Any, current: Any, key: str = "") -> list[str]:
    """Return sentences that say where two JSON values differ. A key that only one of two dicts has
    is not compared: the code that wrote the other did not know it."""
    if isinstance(saved, dict) and isinstance(current, dict):
        lines = []
        for k in saved:
            if k in current:
                lines += mismatches(saved[k], current[k], f"{key}.{k}" if key else k)
        return lines
    if saved == current:
        return []
    return [f"{key} is {json.dumps(saved)} in the checkpoint and {json.dumps(current)} here"]


def _rate(facts: dict, step: int) -> float | None:
    """Return the learning rate that these options give the step after so many; None where they are
    no longer a valid configuration."""
    from training.optim import learning_rate  # here, because it imports torch

    try:
        cfg = Config.model_validate(_known(tomli.loads(facts["config"])))
        warmup = cfg.lr_schedule.warmup_steps
        if warmup is None:
            warmup = round(cfg.lr_schedule.warmup_fraction * cfg.training.steps)
        schedule = cfg.lr_schedule.model_copy(update={"warmup_steps": warmup})
        if step >= cfg.training.steps:
            return None
        return learning_rate(
            step, stages.at(cfg.model_copy(update={"lr_schedule": schedule}), step)
        )
    except (KeyError, TypeError, ValueError, ArithmeticError):
        return None


def _known(tables: dict) -> dict:
    """Return the tables of options that the learning rate depends on."""
    training = {
        key: tables["training"][key] for key in ("steps", "stages") if key in tables["training"]
    }
    lr = tables["optimizer"]["lr"]
    fields = tables["lr_schedule"]
    return {"training": training, "optimizer": {"lr": lr}, "lr_schedule": fields}


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
