"""Find the checkpoint of another run from which a new one branches off: `checkpoint.branch_from`.

A branch goes on with weights, optimizer, data position and step, in a new folder. So several
endings of one run, such as decays of a WSD schedule (Hu et al., arXiv:2404.06395), cost their own
steps alone.
"""

from pathlib import Path

from checkpoint import verify
from configs.schema import InputError
from reliability.objects import Key, location


def find(text: str) -> Path | Key:
    """Return the checkpoint that `RUN@STEP` names, or the newest of RUN; RUN is a folder, a URL, or
    a checkpoint. Raises InputError."""
    name, at, step = text.rpartition("@")
    if not at or not step.isdecimal():
        name, step = text, ""
    found = verify.find(location(name))
    if step:
        steps = {verify.parse_name(path.name)[1]: path for path in reversed(found)}
        if int(step) not in steps:
            raise InputError(
                f"checkpoint.branch_from = {text}, but {name} holds only steps {sorted(steps)}"
            )
        found = [steps[int(step)]]
    return found[0]
