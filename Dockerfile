# This repository in /plumbline, with what it needs:
#
#   docker build -t plumbline .                              to train: requirements.txt
#   docker run --rm --init plumbline                         ./run_train.sh
#   docker build --target test -t plumbline:test .           to test: requirements-test.txt too
#   docker run --rm --init --shm-size=2g plumbline:test      ./run_tests.sh
#
# For real runs add `--gpus all --shm-size=32g -v DATA:/plumbline/runs` and the command, for example
# `./run_train.sh configs/llama_8b.toml`. pip takes the CUDA build of torch, which also runs without a GPU.
# The user's number is 1000: what is mounted for a run must be writable for it.
FROM python:3.11-slim AS base

# inductor and Triton compile with g++, and so do the simulated GPUs. Where a checkout is mounted, a start records what
# git says of it.
RUN apt-get update && apt-get install --yes --no-install-recommends g++ git && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home --uid 1000 plumbline && install --directory --owner=plumbline /plumbline /plumbline/runs /runs
WORKDIR /plumbline
COPY requirements.txt ./
RUN pip install --no-cache-dir obstore==0.12.1 -r requirements.txt

FROM base AS test
COPY requirements-test.txt ./
RUN pip install --no-cache-dir -r requirements-test.txt
COPY --chown=plumbline . .
USER 1000
CMD ["./run_tests.sh"]

FROM base AS train
COPY --chown=plumbline . .
USER 1000
CMD ["./run_train.sh"]
