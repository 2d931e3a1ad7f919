"""Benchmarks. `python -m lab.bench` lists them."""

import sys

MODULE = next((word for word in sys.orig_argv if word.startswith("lab.bench.")), "")
if sys.argv[0] == "-m" and MODULE:  # it would end without a word
    sys.exit(f"a benchmark is run as: python -m lab.bench {MODULE.removeprefix('lab.bench.')}")
