"""The process that forks the ranks of lab/simulate/ranks.py. It loads all that they need, and
computes nothing itself."""

import gc
import os
import pickle
import sys

import torch
import torch._dynamo  # what ranks would import at their first FSDP or checkpoint, each for itself
import torch.distributed.fsdp
import torch.distributed.tensor

import train  # noqa: F401  for the same reason
from configs import program
from lab.simulate import kernels
from lab.simulate.ranks import _send, answer
from models import MODELS


def main() -> None:
    requests = sys.stdin.buffer
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what is printed must not run into the answers
    torch.set_num_threads(1)
    list(MODELS.values())  # imports every family
    kernels.install()
    # What was imported stays: no rank's garbage collector need look at it, which costs 0.26 s of
    # processor time and a copy of every page.
    gc.freeze()
    while True:
        try:
            request = pickle.load(requests)
        except EOFError:
            return
        _send(answers, answer(request))


if __name__ == "__main__":
    program.run(main)
