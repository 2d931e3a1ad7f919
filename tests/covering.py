"""Pairwise covering arrays: few combinations in which every two settings of different factors meet
at least once.

A product of n factors grows by multiplication, such an array about as the product of the two widest
factors (Cohen et al., "The AETG system", IEEE TSE 23(7), 1997, whose greedy choice this is, without
its random restarts).
"""

from collections.abc import Sequence
from itertools import combinations

Pair = frozenset[tuple[str, str]]


def pairs(combination: dict[str, str]) -> set[Pair]:
    """Every two settings of a combination {factor: setting}."""
    return {frozenset(pair) for pair in combinations(combination.items(), 2)}


def every_pair(factors: dict[str, Sequence[str]]) -> list[Pair]:
    """Every two settings of two different factors, in the factors' order."""
    return [
        frozenset({(one, a), (two, b)})
        for one, two in combinations(factors, 2)
        for a in factors[one]
        for b in factors[two]
    ]


def covering_array(factors: dict[str, Sequence[str]]) -> list[dict[str, str]]:
    """Combinations {factor: setting} that contain every pair of settings; the same ones on every
    machine."""
    missing = dict.fromkeys(every_pair(factors))  # a set that keeps its order
    chosen = []
    while missing:
        combination = dict(next(iter(missing)))
        for factor in factors:
            if factor not in combination:
                known = combination.items()
                gain = {
                    s: sum(frozenset({(factor, s), other}) in missing for other in known)
                    for s in factors[factor]
                }
                combination[factor] = max(gain, key=gain.__getitem__)
        chosen.append({factor: combination[factor] for factor in factors})
        for pair in pairs(combination):
            missing.pop(pair, None)
    return chosen
