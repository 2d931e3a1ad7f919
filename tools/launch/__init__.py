"""How the launcher speaks."""

import sys


def log(sentence: str) -> None:
    # one write with the newline: print writes it separately, and threads would share a line
    sys.stderr.write(f"launch: {sentence}\n")
    sys.stderr.flush()
