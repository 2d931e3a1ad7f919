"""The checks of `lab.bench device.checks` on a GPU: `./run_tests.sh -m gpu`. tests/test_device.py runs
the same ones on a CPU."""

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lab.bench.device.checks import CHECKS

ROOT = Path(__file__).resolve().parent.parent


def on_the_gpus(*arguments: str, seconds: int) -> subprocess.CompletedProcess:
    """Run Python in a separate process that sees the GPUs, which tests/conftest.py hides. A GPU
    does not survive a fork either."""
    shown = os.environ.copy()
    shown["CUDA_VISIBLE_DEVICES"] = visible = shown.pop("PLUMBLINE_GPUS")
    if visible == "all":
        del shown["CUDA_VISIBLE_DEVICES"]
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=shown, capture_output=True, text=True, timeout=seconds
    )


@functools.cache
def gpus() -> int:
    asked = on_the_gpus("-c", "import torch; print(torch.cuda.device_count())", seconds=100)
    return int(asked.stdout)


@pytest.mark.gpu
@pytest.mark.cap(500)
@pytest.mark.parametrize("name", CHECKS)
def test_on_a_gpu(name):
    if gpus() < CHECKS[name].ranks:
        pytest.skip(f"needs {CHECKS[name].ranks} GPUs, and there are {gpus()}")
    done = on_the_gpus("-m", "lab.bench", "device.checks", name, seconds=380)
    assert done.returncode == 0, done.stdout + done.stderr
