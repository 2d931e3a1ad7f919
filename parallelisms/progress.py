"""Record for a run that hangs how many collectives each rank has begun, and NCCL's flight recorder.
You can skip this file."""

import contextlib
import logging
import mmap
import os
import struct
from pathlib import Path


class ProgressCounter:
    """Counts the collectives that this rank has begun, in memory that outlives it.

    Under NCCL all ranks of a run that hangs may die at the same second. The rank that they waited
    for has begun fewer collectives than the others, and its launcher reads that from the file
    (tools/launch). Memory that is mapped to a file needs no system call when it changes, and no GIL
    when it is read.
    """

    def __init__(self, path: str | None) -> None:
        """path: of the file to make, 8 bytes on a disk of this host; None to count without a
        file, as is done where the disk is full."""
        self.count = 0
        self.memory: bytearray | mmap.mmap = bytearray(8)
        if not path:
            return
        with contextlib.suppress(OSError), open(path, "wb+", buffering=0) as file:
            # a page that the disk has no block for would kill the process (SIGBUS)
            file.write(bytes(8))
            self.memory = mmap.mmap(file.fileno(), 8)

    def advance(self, by: int = 1) -> None:
        self.count += by
        struct.pack_into("<q", self.memory, 0, self.count)


def counter_of_this_rank() -> ProgressCounter:
    """Return the counter, whose file is in the folder of the file into which this rank writes its
    exception for the launcher; without a launcher there is no file."""
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return ProgressCounter(error_file and f"{error_file}.begun")


def record_flights(folder: Path) -> None:
    """Let NCCL's flight recorder keep the last collectives, and leave them in nccl-<rank> there
    when one times out, for `torchfrtrace`. What the environment says already counts."""
    settings = {
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_DUMP_TEMP_FILE": f"{folder}/nccl-",
    }
    for name, value in settings.items():
        os.environ.setdefault(name, value)
    logging.getLogger("plumbline").info(
        f"when a collective times out: {os.environ['TORCH_FR_DUMP_TEMP_FILE']}<rank>"
    )
