"""Train the tree that contains this file on several meshes, for tests/test_forking.py, which has
changed a copy of the tree:

    python -m tests.examples FOLDER RANKS:OPTION,OPTION[;RANKS:OPTION,OPTION] ... -- OPTION ...

A run after a ; resumes the one before it. Prints one line of JSON: for each mesh the exit code, the
output, and the loss of each step.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

from tests import fork_server
from tests.programs import ROOT
from tests.ranks import run_ranks
from tests.runs import run, series, tiny_run


def fork(folder: Path, name: str = "") -> Path:
    """Return a copy of the tree with the example in it."""
    excluded = shutil.ignore_patterns(".*", "__pycache__", "runs", "*.egg-info", "golden")
    tree = folder / "tree"
    shutil.copytree(ROOT, tree, ignore=excluded)
    if name:
        diff = ROOT / "docs" / "forking" / f"{name}.diff"
        subprocess.run(["git", "apply", "--verbose", diff], cwd=tree, check=True)
    return tree


def main(argv: list[str]) -> None:
    folder = Path(argv[0])
    folder.mkdir()
    divider = argv.index("--")
    options = tiny_run(folder) + argv[divider + 1 :]
    fork_server.start_server()
    results = {}
    for mesh in argv[1:divider]:
        place = folder / f"mesh-{len(results)}"
        for part in mesh.split(";"):
            ranks, _, of_mesh = part.partition(":")
            of_mesh = of_mesh.split(",") if of_mesh else []
            code, said = run_ranks(int(ranks), run, [*options, *of_mesh], place)[0]
        losses = series(place) if code == 0 else {}
        results[mesh] = {"code": code, "said": said, "losses": losses, "folder": str(place)}
    print(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1:])
