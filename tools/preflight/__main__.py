"""Check that this cluster can do this run: arguments.py describes the command line."""

import os
import sys

from configs.schema import InputError
from tools.preflight.arguments import parse


def main(argv: list[str] | None = None) -> int:
    """Return the exit code. Mistakes in the call are said before torch is imported."""
    try:
        options, rest = parse(sys.argv[1:] if argv is None else argv)
        from tools.preflight.checks import answered  # here, because it imports torch

        return answered(options, rest)
    except InputError as error:
        if is_first():
            print(error, file=sys.stderr)
        return 2


def is_first() -> bool:
    """Return True for the rank of a host that speaks to its launcher."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not by the usual end: a check may still hang in its thread. One rank of a host tells its
    # launcher, which names each.
    os._exit(code if is_first() else 0)
