"""The checks of `tools.bench.device` on a GPU: `./run_tests.sh -m gpu`. tests/test_device.py runs
the same ones on a CPU."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tools.bench.device.checks import CHECKS

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.gpu
@pytest.mark.cap(400)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("name", CHECKS)
def test_on_a_gpu(name):
    """In a process of its own: a GPU does not survive a fork."""
    if torch.cuda.device_count() < CHECKS[name].ranks:
        pytest.skip(f"needs {CHECKS[name].ranks} GPUs")
    command = [sys.executable, "-m", "tools.bench.device.checks", name]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=380)
    assert done.returncode == 0, done.stdout + done.stderr
