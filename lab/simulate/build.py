"""Compiles the stand-ins for CUDA and NCCL (lab/simulate/device) into one library, once per
version of their source."""

import functools
import hashlib
import os
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path

SOURCES = Path(__file__).resolve().parent / "device"
# of the packages that the CUDA build of torch brings
HEADERS = (
    "cuda_runtime_api.h",
    "cuda.h",
    "nccl.h",
)
NAME = "libcuda.so.1"  # PyTorch asks for the driver by this name


class CannotSimulate(Exception):
    """Raised where no GPU can be simulated, with a sentence for the user."""


def torch_folder() -> Path:
    return Path(sysconfig.get_paths()["purelib"]) / "torch"


@functools.cache
def include_folders() -> list[Path]:
    """Return the folders in which the wheels have CUDA's and NCCL's headers."""
    packages = Path(sysconfig.get_paths()["purelib"]) / "nvidia"
    folders = []
    for header in HEADERS:
        folders += [path.parent for path in packages.glob(f"*/include/{header}")]
    return folders


@functools.cache
def missing() -> str | None:
    """Describe what this machine lacks; None where a GPU can be simulated."""
    if not (torch_folder() / "lib" / "libtorch_cuda.so").exists():
        return (
            'a simulated GPU needs the CUDA build of torch (pip install "torch===2.13.0"); '
            "this environment has another build"
        )
    if len(include_folders()) < len(HEADERS):
        return (
            f"a simulated GPU needs the headers {', '.join(HEADERS)}, which the CUDA build of "
            "torch brings"
        )
    if not shutil.which("g++"):
        return "a simulated GPU needs a C++ compiler: install g++"
    return None


@functools.cache
def library() -> Path:
    """Return the compiled library; it takes 10 s the first time. Raises CannotSimulate."""
    if reason := missing():
        raise CannotSimulate(reason)
    sources = sorted(SOURCES.rglob("*.*"))
    text = b"".join(path.read_bytes() for path in sources)
    digest = hashlib.sha256(text + str(include_folders()).encode()).hexdigest()[:16]
    place = Path(tempfile.gettempdir()) / f"plumbline-simulated-{os.getuid()}-{digest}"
    made = place / NAME
    if made.exists():
        return made
    place.mkdir(mode=0o700, exist_ok=True)
    fresh = place / f"{NAME}.{os.getpid()}"
    command = [
        "g++",
        "-std=c++17",
        "-O2",
        "-fPIC",
        "-shared",
        "-o",
        str(fresh),
        f"-Wl,-soname,{NAME}",
        f"-I{SOURCES}",
    ]
    command += [f"-I{folder}" for folder in include_folders()]
    command += [str(path) for path in sources if path.suffix == ".cpp"]
    done = subprocess.run([*command, "-lpthread"], capture_output=True, text=True)
    if done.returncode:
        raise CannotSimulate(
            f"the stand-in for CUDA does not compile with this g++:\n{done.stderr[-2000:]}"
        )
    fresh.rename(made)
    return made
