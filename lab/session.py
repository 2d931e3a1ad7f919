"""Record docs/session.txt: what a terminal of 100 columns shows of a mistake, of a run that Ctrl-C
stops, and of the run that goes on.

    python -m lab.session [FILE]
"""

import argparse
import fcntl
import os
import pty
import re
import struct
import sys
import tempfile
import termios
from pathlib import Path

from configs import program

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "docs" / "session.txt"
TRAIN = (
    "./run_train.sh --run.folder=runs/session --data.source='docs/*.md' --model.n_layers=2 "
    "--training.seq_len=64 --training.steps={} --validation.interval=0 --debug.sample_tokens=0"
)
# what is typed, and the words at which Ctrl-C is pressed
SESSION = (
    ("./run_train.sh --optimiser.lr=1e-3 --model.flavor=7B", ""),
    (TRAIN.format(2000), "step 20/"),
    (TRAIN.format(40) + " --optimizer.lr=1e-3", ""),
)
COLUMNS = 100  # of the terminal
ANSI = re.compile(r"\x1b\[[\d;]*[A-Za-z]")


def typed(command: str, until: str) -> str:
    """Return what a terminal shows of a command, after Ctrl-C at the words `until`, if there are
    any."""
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(ROOT)
        os.environ |= {"NO_COLOR": "1", "CUDA_VISIBLE_DEVICES": ""}
        os.execvp("bash", ["bash", "-c", command])
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, COLUMNS, 0, 0))
    seen = b""
    while True:
        try:
            more = os.read(terminal, 65536)
        except OSError:  # Linux's end of a terminal that all have closed
            break
        seen += more
        if until and until.encode() in seen:
            os.write(terminal, b"\x03")
            until = ""
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os.close(terminal)
    return f"$ {command}\n{screen(seen.decode())}$ echo $?\n{code}\n"


def screen(text: str) -> str:
    """Return the lines as they stand in the end: what a carriage return begins again is gone."""
    lines = [line.rstrip("\r").rpartition("\r")[2].rstrip() for line in text.split("\n")]
    return ANSI.sub("", "\n".join(line for line in lines if line) + "\n")


def record(folder: Path) -> str:
    """Return the whole session, of a run in this folder instead of runs/session, without a cache."""
    shown = []
    for command, until in SESSION:
        here = command.replace("runs/session", f"{folder} --data.cache={folder}-cache")
        text = typed(here, until).replace(f" --data.cache={folder}-cache", "")
        shown.append(text.replace(str(folder), "runs/session"))
    return "\n".join(shown).replace(f"{ROOT}/", "")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m lab.session", description=__doc__)
    parser.add_argument("file", type=Path, nargs="?", default=FILE, help="[docs/session.txt]")
    file = parser.parse_args(argv).file
    with tempfile.TemporaryDirectory() as place:
        file.write_text(record(Path(place, "run")), encoding="utf-8")
    print(file)
    return 0


if __name__ == "__main__":
    program.run(main, sys.argv[1:])
