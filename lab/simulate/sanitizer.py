"""PyTorch's CUDA sanitizer, which looks for races between streams, with stacks that cost less.

It keeps a stack for each access of each operator, and formats those of a race. A `StackSummary`
looks every file up at once, which took half of the time of a run.
"""

import traceback
from collections.abc import Iterable
from types import CodeType, FrameType, SimpleNamespace

from torch.cuda import _sanitizer


class Stack(list[tuple[CodeType, int]]):
    """Stack with the code and the line of each frame, in place of a traceback.StackSummary."""

    @classmethod
    def extract(cls, frames: Iterable[tuple[FrameType, int]], lookup_lines: bool) -> "Stack":
        """frames: as traceback.walk_stack yields them. lookup_lines: lines are never read here."""
        return cls((frame.f_code, line) for frame, line in frames)

    def format(self) -> list[str]:
        rows = [(code.co_filename, line, code.co_name, None) for code, line in self]
        return traceback.StackSummary.from_list(rows).format()


def enable() -> None:
    """Enable in this process, from now on."""
    cheaper = SimpleNamespace(StackSummary=Stack, walk_stack=traceback.walk_stack)
    _sanitizer.traceback = cheaper
    _sanitizer.enable_cuda_sanitizer()
