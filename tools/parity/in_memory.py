"""Cut batches out of token ids in memory, as a run cuts them out of its corpus."""

import numpy as np

from configs.check import tokens_ahead
from configs.schema import Config
from data import splice
from data.loader import Batches
from parallelisms.mesh import Mesh


class Held:
    """Token ids in memory, in place of data/tokens.py::Tokens."""

    split = "train"
    folder = "memory"
    is_stored = False

    def __init__(self, ids: np.ndarray) -> None:
        self.ids = ids

    def __len__(self) -> int:
        return len(self.ids)

    def read(self, start: int, stop: int) -> np.ndarray:
        return self.ids[start:stop]


def batches(cfg: Config, mesh: Mesh, ids: np.ndarray) -> Batches:
    """Return this rank's part of each global batch of a run whose corpus is `ids` (1D, uint32)."""
    t = cfg.training
    tokens = Held(ids)
    order = splice.begin(
        splice.describe(
            [("", "", tokens, [[0, 1.0]])], cfg.run.seed, t.seq_len, t.global_batch_size
        )
    )
    made = Batches(
        [tokens],
        order,
        t.local_batch_size,
        mesh.dp_rank,
        mesh.dp_size,
        token_ranges=mesh.token_ranges(t.seq_len),
    )
    made.depth = tokens_ahead(cfg.model)
    return made
