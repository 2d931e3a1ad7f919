"""Prove the cheap properties of a family at the start of a run, once for each state of its code.

A family whose files are those that were proved last costs nothing: models/proved.json has a digest
of each that is shipped, and a run's folder has that of a fork. `python -m tools.parity.proved`
proves all families, and writes models/proved.json.
"""

import argparse
import ast
import hashlib
import json
import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from configs import program
from configs.schema import Config, InputError, Lora
from models import FAMILIES, MODELS

if TYPE_CHECKING:
    from models.family import Family

logger = logging.getLogger("plumbline")

MODELS_FOLDER = Path(__file__).resolve().parent.parent.parent / "models"
SHIPPED = MODELS_FOLDER / "proved.json"
IN_RUN = "proved.json"  # in a run's folder


def digest(family: str, folder: Path = MODELS_FOLDER) -> str:
    """Return a hash of the files that a family's model may be made of: all of models/ but the files
    of families that it does not import, and the formats of published weights."""
    others = {f"{name}.py" for name in set(FAMILIES) - rests_on(family, folder)}
    total = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        place = path.relative_to(folder)
        if place.parts[0] == "formats" or place.name in others:
            continue
        total.update(f"{place.as_posix()}\n".encode())
        total.update(path.read_bytes())
    return total.hexdigest()[:32]


def rests_on(family: str, folder: Path) -> set[str]:
    """Return the families whose modules this one imports, itself among them, and what these import."""
    found: set[str] = set()
    names = [family]
    while names:
        name = names.pop()
        found.add(name)
        imported: set[str] = set()
        for node in ast.walk(ast.parse((folder / f"{name}.py").read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import | ast.ImportFrom):
                words = [getattr(node, "module", None) or "", *(one.name for one in node.names)]
                imported |= set(".".join(words).split("."))
        names += imported & set(FAMILIES) - found
    return found


def recorded(path: Path) -> dict[str, str]:
    """Return the digests in a file: family -> that of its files when they were proved last."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def at_start(cfg: Config, family: "Family", args: Any) -> None:
    """Prove a family whose code differs from what was proved last, on rank 0; the others wait. Every
    rank calls it, with the same code. Raises InputError on all of them, naming the property and the
    module that breaks it first."""
    own = digest(family.name)
    if own != recorded(SHIPPED).get(family.name):
        from checkpoint.agreement import on_rank_0  # here, because it imports torch

        on_rank_0(None, prove_once, cfg, family, args, own)


def prove_once(cfg: Config, family: "Family", args: Any, own: str) -> None:
    """Prove this code unless the run's folder says that it is proved, and then note it there."""
    note = Path(cfg.run.folder) / IN_RUN
    if own == recorded(note).get(family.name):
        return
    import torch  # here, because `--help` is answered without it

    began = time.monotonic()
    with torch.random.fork_rng(devices=[]):  # a model that draws numbers changes none of the run's
        holding = prove(family, args, cfg.lora, cfg.data.mask_documents)
    seconds = time.monotonic() - began
    logger.info(
        f"models/ differs from what was proved last. On a small copy of {family.name} hold: "
        f"{', '.join(holding) or 'none'} ({seconds:.1f} s)"
    )
    note.write_text(json.dumps({family.name: own}) + "\n", encoding="utf-8")


def prove(family: "Family", args: Any, lora: Lora, masks_documents: bool) -> list[str]:
    """Return the names of the cheap properties, which hold. Raises InputError for the first that does
    not. masks_documents: whether the run keeps documents apart. What a small copy cannot compute is
    logged, and refuses no run."""
    # here, because most runs have nothing to prove
    from tools.parity import properties
    from tools.parity.tiny import copy_of

    holding = []
    try:
        tiny = copy_of(family, args, lora)
    except InputError as error:
        logger.warning(f"no property is proved: {error}")
        return holding
    for one in properties.AT_START:
        if one.name == "isolation" and not masks_documents:
            continue
        verdict = properties.verdict_on(one, tiny)
        if verdict.raised:
            logger.warning(f"{one.name} is not proved, since a small copy {verdict.failure}")
        elif verdict.failure:
            raise InputError(
                f"the model is wrong ({one.name}): {verdict.failure}. `python -m tools.parity CONFIG "
                "--properties` says more; debug.self_check = false trains it as it is"
            )
        elif not verdict.left_out:
            holding.append(one.name)
    return holding


def main() -> int:
    """Prove every shipped family in its smallest flavor, and write models/proved.json."""
    argparse.ArgumentParser(
        prog="python -m tools.parity.proved", description=main.__doc__
    ).parse_args()
    found = {}
    for name in FAMILIES:
        family = MODELS[name]
        for flavor, numbers in family.numbers.flavors.items():
            if "debug" in flavor:
                prove(family, family.Args(**numbers), Lora(), masks_documents=True)
        found[name] = digest(name)
    SHIPPED.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(f"{', '.join(found)}: proved, and written to {SHIPPED}")
    return 0


if __name__ == "__main__":
    program.run(main)
