"""Make conversations of PIQA's questions (arXiv:1911.11641): which of two ways reaches a goal."""

from __future__ import annotations

import json
from pathlib import Path

from pyarrow import ipc


def conversations(folder: Path) -> bytes:
    """Return JSON lines with a prompt, the goal, and a completion, the right way, of a folder that
    `datasets` has saved."""
    with ipc.open_stream(folder / "data-00000-of-00001.arrow") as stream:
        questions = stream.read_all().to_pylist()
    lines = []
    for question in questions:
        answer = question[f"sol{question['label'] + 1}"]
        line = {"prompt": f"Question: {question['goal']}\nAnswer:", "completion": f" {answer}"}
        lines.append(json.dumps(line, ensure_ascii=False) + "\n")
    return "".join(lines).encode()
