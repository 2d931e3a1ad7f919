"""Model how tokens are spread over experts, as a plan assumes it: evenly, with a stated imbalance,
or as a run has recorded it.

Only the number of rows on each rank depends on the routing. With expert parallelism a rank computes
the rows of the experts it holds, from all ranks. So the rank whose experts get the most tokens
needs the most memory, and all others wait for it. The plan is of that rank, in every MoE layer.
"""

from math import comb
from pathlib import Path
from typing import Any, NamedTuple

from configs.schema import InputError
from parallelisms.ep_hosts import Sizes
from tools.plan.rows import check_routing
from training.experts import recorded


class Routing(NamedTuple):
    """Share of the rows that each rank of an ep group gets. The fullest rank gets `factor` times
    the mean, unless `loads` gives recorded counts: for each layer, the tokens of each expert."""

    factor: float = 1.0
    loads: tuple[tuple[int, ...], ...] = ()

    def shares(self, ep: int) -> list[float]:
        """Return each rank's share of all rows, the fullest rank first. Recorded shares are sorted
        within each layer and then averaged over the layers. Raises InputError where the number of
        recorded experts is no multiple of ep."""
        if not self.loads:
            most = min(self.factor, ep) / ep
            return [most] + [(1 - most) / max(1, ep - 1)] * (ep - 1)
        experts = len(self.loads[0])
        if experts % ep:
            raise InputError(
                f"--routing has the loads of {experts} experts, which expert_parallel = {ep} does "
                "not divide"
            )
        size = experts // ep
        ranked = []
        for load in self.loads:
            total = sum(load)
            ranks = [sum(load[i : i + size]) / total for i in range(0, experts, size)]
            ranked.append(sorted(ranks, reverse=True))
        return [sum(column) / len(ranked) for column in zip(*ranked)]

    def all_to_all_splits(self, rows: int, ep: int) -> tuple[list[int], list[int]]:
        """Return what `parallelisms/ep_dispatch.py::rows_per_rank` returns on the fullest rank: the split
        sizes of the dispatch's all-to-all, if every rank has `rows` rows with the same routing."""
        total = 0.0
        ends = [0]
        for share in self.shares(ep):
            total += share
            ends.append(round(rows * total))
        sent = [end - begin for begin, end in zip(ends, ends[1:])]
        return sent, [max(sent)] * ep

    def hosts_and_ranks(self, tokens: int, args: Any, hosts: int, ranks: int) -> Sizes:
        """Return what `parallelisms/ep_hosts.py::on_the_host` returns on the fullest rank, if every
        rank has so many tokens with the same routing. args: of the model. The fullest ranks are
        taken to be those of one host."""
        shares = self.shares(hosts * ranks)
        of_hosts = [sum(shares[host * ranks :][:ranks]) for host in range(hosts)]
        to_hosts = [round(tokens * reached(share, hosts, args)) for share in of_hosts]
        everyone = tokens * hosts  # tokens of this rank and of its peers
        to_ranks = [
            round(everyone * reached(share, hosts * ranks, args)) for share in shares[:ranks]
        ]
        return Sizes(
            to_peers=to_hosts,
            from_peers=[to_hosts[0]] * hosts,
            to_ranks=to_ranks,
            from_ranks=[to_ranks[0]] * ranks,
            rows=round(everyone * ranks * args.experts_per_token * shares[0]),
        )

    def __str__(self) -> str:
        if self.loads:
            return f"the fullest rank gets as much as in {len(self.loads)} recorded layers"
        if self.factor == 1:
            return "balanced"
        return f"the fullest rank gets {self.factor:g} times the mean"


class Chosen(NamedTuple):
    """Choice of a token: its number of experts, and of groups of experts."""

    n_experts: int = 0
    experts_per_token: int = 0
    expert_groups: int = 1
    groups_per_token: int = 1

    @classmethod
    def by(cls, numbers: dict[str, Any]) -> "Chosen":
        """numbers: of a model, as `configs.check.architecture` gives them."""
        return cls(**{name: numbers[name] for name in cls._fields if name in numbers})

    def places(self, number: int) -> float:
        """Return on how many of so many hosts, or ranks, the experts of a token are, for each of
        them."""
        return number * reached(1 / number, number, self) / self.experts_per_token

    def places_of_consecutive(self, number: int) -> float:
        """Return the same where the experts of a token follow each other, from a multiple of their
        number."""
        return max(1.0, number * self.experts_per_token / self.n_experts) / self.experts_per_token


NO_EXPERTS = Chosen()


def reached(share: float, places: int, args: Any) -> float:
    """Return the part of the tokens that have an expert on one of so many places, which gets this
    share of all rows. The experts of a token are drawn independently, from its groups alone where
    the router chooses groups (models/moe.py::Router.within_best_groups)."""
    of_place = max(1, args.expert_groups // places)  # groups
    result = 0.0
    for here in range(1, min(of_place, args.groups_per_token) + 1):
        elsewhere = args.groups_per_token - here
        ways = comb(of_place, here) * comb(args.expert_groups - of_place, elsewhere)
        chance = ways / comb(args.expert_groups, args.groups_per_token)
        # of a token that has chosen so many groups of this place
        its_share = share * args.expert_groups * here / (of_place * args.groups_per_token)
        result += chance * (1 - (1 - min(1.0, its_share)) ** args.experts_per_token)
    return result


BALANCED = Routing()


def load_routing(text: str) -> Routing:
    """Parse --routing: `balanced`, a number, or the folder of a run. Raises InputError."""
    check_routing(text)
    if text == "balanced":
        return BALANCED
    return of_run(Path(text)) if Path(text).is_dir() else Routing(float(text))


def of_run(folder: Path) -> Routing:
    """Return the newest record of a run. Raises InputError."""
    if not (lines := recorded(folder)) or not lines[-1]["counts"]:
        raise InputError(f"--routing {folder}: the run has recorded nothing yet")
    return Routing(loads=tuple(tuple(counts) for counts in lines[-1]["counts"].values()))
