"""How tokens are spread over experts, as a plan assumes it: evenly, with a stated imbalance, or as
a run has recorded it.

What a mixture of experts costs beside its share of the rows depends on no routing. With expert
parallelism a rank computes the rows of its own experts, whoever sends them, so the rank whose
experts are wanted most needs the most memory, and all others wait for it. The plan is of that rank,
in every mixture.
"""

from pathlib import Path
from typing import NamedTuple

from configs.schema import InputError
from training.experts import recorded


class Routing(NamedTuple):
    """The share of rows that every rank of an ep group gets: `factor` says how many times the mean
    the fullest one gets; `loads` are recorded instead, of every layer the tokens of every
    expert."""

    factor: float = 1.0
    loads: tuple[tuple[int, ...], ...] = ()

    def shares(self, ep: int) -> list[float]:
        """Of all rows, those that each of the ep ranks gets: the fullest rank first. Recorded
        shares are means over the layers, of the fullest rank of each layer, of the second, and so
        on. Raises InputError where the record does not fit."""
        if not self.loads:
            most = min(self.factor, ep) / ep
            return [most] + [(1 - most) / max(1, ep - 1)] * (ep - 1)
        experts = len(self.loads[0])
        if experts % ep:
            raise InputError(
                f"--routing has the loads of {experts} experts, which expert_parallel = {ep} does "
                "not divide"
            )
        size, ranked = experts // ep, []
        for load in self.loads:
            ranks = [sum(load[i : i + size]) / sum(load) for i in range(0, experts, size)]
            ranked.append(sorted(ranks, reverse=True))
        return [sum(column) / len(ranked) for column in zip(*ranked)]

    def exchange(self, rows: int, ep: int) -> tuple[list[int], list[int]]:
        """What `parallelisms/ep.py::rows_per_rank` returns on the fullest rank, if all ranks have
        so many rows and send as large a share of them to each rank."""
        total, ends = 0.0, [0]
        for share in self.shares(ep):
            total += share
            ends.append(round(rows * total))
        sent = [end - begin for begin, end in zip(ends, ends[1:])]
        return sent, [max(sent)] * ep

    def __str__(self) -> str:
        if self.loads:
            return f"the fullest rank gets as much as in {len(self.loads)} recorded layers"
        return (
            "balanced"
            if self.factor == 1
            else f"the fullest rank gets {self.factor:g} times the mean"
        )


BALANCED = Routing()


def load_routing(text: str) -> Routing:
    """The value of --routing: `balanced`, a number, or the folder of a run. Raises InputError."""
    if text == "balanced":
        return BALANCED
    try:
        factor = float(text)
    except ValueError:
        if not Path(text).is_dir():
            raise InputError(
                f"--routing {text}: give balanced, a factor such as 1.5, or the folder of a run "
                "that recorded the "
                "loads of its experts (docs/experts.md)"
            ) from None
        return of_run(Path(text))
    if not 1 <= factor < float("inf"):
        raise InputError(
            f"--routing {text}: the fullest rank gets at least the mean, so the factor is 1 or more"
        )
    return Routing(factor)


def of_run(folder: Path) -> Routing:
    """The newest record of a run. Raises InputError."""
    if not (lines := recorded(folder)) or not lines[-1]["counts"]:
        raise InputError(f"--routing {folder}: the run has recorded nothing yet")
    return Routing(loads=tuple(tuple(counts) for counts in lines[-1]["counts"].values()))
