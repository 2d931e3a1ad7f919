"""Plan a run before it is paid for: arguments.py describes the command line."""

import signal
import sys

from configs import program
from tools.plan.arguments import arguments, configuration


@program.refuses
def main(argv: list[str] | None = None) -> int:
    """Return the exit code. Mistakes in the call are said before torch is imported."""
    flags, rest = arguments(sys.argv[1:] if argv is None else argv)
    configuration(flags, rest)
    from tools.plan.command import planned  # here, because it imports torch

    return planned(flags, rest)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `... | head` ends quietly
    program.run(main)
