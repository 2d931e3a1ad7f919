"""Read the launcher's arguments: all that is wrong with them is a sentence and exit code 2."""

import argparse
import os
import re
import tempfile
from collections.abc import Callable


def whole(least: int, most: int = 10**6) -> Callable[[str], int]:
    """Make the reader of a whole number within these bounds."""

    def read(text: str) -> int:
        number = int(text) if text.lstrip("-").isdecimal() else least - 1
        if not least <= number <= most:
            bounds = f"{least} to {most}" if most < 10**6 else f"at least {least}"
            raise argparse.ArgumentTypeError(f"{text} must be a whole number, {bounds}")
        return number

    return read


def _nodes(text: str) -> tuple[int, int]:
    """Read N as (N, N), and MIN:MAX as (MIN, MAX)."""
    found = re.fullmatch(r"(\d+)(?::(\d+))?", text)
    least, most = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 0 < least <= most:
        raise argparse.ArgumentTypeError(f"{text} is neither a number of nodes nor MIN:MAX")
    return least, most


def parse(argv: list[str], description: str) -> argparse.Namespace:
    """Read the arguments. Ends the process with a sentence and exit code 2 where they are wrong."""
    usage = "%(prog)s [--nproc-per-node=4] [--help] [...] SCRIPT [ARGUMENT ...]"
    parser = argparse.ArgumentParser(
        prog="python -m tools.launch", usage=usage, description=description
    )
    add = parser.add_argument
    add("--nproc-per-node", type=whole(1), default=1, help="ranks on this node")
    add(
        "--nnodes",
        type=_nodes,
        default=(1, 1),
        help="nodes of the job; MIN:MAX: as many of these as come",
    )
    add("--node-rank", type=whole(0), default=0, help="which of them this is, from 0")
    add("--master-addr", default="", help="address of node 0, where the nodes meet")
    add("--master-port", type=whole(1, 65535), default=29500, help="a free port there")
    add("--join-timeout", type=whole(1), default=600, help="seconds to wait for the other nodes")
    # The default is what the ranks of another node may take to end (30), and a little.
    add(
        "--last-call",
        type=whole(0),
        default=45,
        help="seconds for which MIN of MIN:MAX nodes wait for more",
    )
    add(
        "--max-restarts",
        type=whole(0),
        default=0,
        help="how often to start again when a rank has failed",
    )
    add("--shutdown-timeout", type=whole(0), default=30, help="seconds from a signal to SIGKILL")
    add("-m", "--module", action="store_true", help="the script is a module")
    add("script", nargs=argparse.REMAINDER, help="the script and its arguments")
    options = parser.parse_args(argv)
    if not options.script:
        parser.error("a script is needed")
    if not options.module and not os.path.isfile(options.script[0]):
        parser.error(f"there is no script {options.script[0]}")
    _, most = options.nnodes
    if options.node_rank >= most:
        parser.error(f"--node-rank={options.node_rank} must be below --nnodes, {most}")
    if most > 1 and not options.master_addr.strip():
        parser.error(f"--nnodes={most} needs --master-addr, the address of node 0")
    try:
        tempfile.gettempdir()
    except OSError:
        parser.error("no folder for temporary files can be written: let TMPDIR name one")
    return options
