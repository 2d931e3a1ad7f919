"""Start a script as the ranks of this node: launcher.py says how, and what torchrun does instead."""

import sys

from configs.program import leave
from tools.launch.arguments import parse


def main(argv: list[str]) -> int:
    options = parse(argv, __doc__.partition(":")[0] + ".")
    from tools.launch.launcher import launch  # here, because it imports torch

    return launch(options, ["-m", *options.script] if options.module else options.script)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
