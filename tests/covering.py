"""Pairwise covering arrays: few combinations in which every two settings of different factors meet
at least once.

A product of n factors grows by multiplication, such an array about as the product of the two widest
factors (Cohen et al., "The AETG system", IEEE TSE 23(7), 1997, whose greedy choice this is, without
its random restarts).
"""

from collections import Counter
from collections.abc import Collection, Sequence
from itertools import combinations

Pair = frozenset[tuple[str, str]]


def pairs(combination: dict[str, str]) -> set[Pair]:
    """Return every two settings of a combination {factor: setting}."""
    return {frozenset(pair) for pair in combinations(combination.items(), 2)}


def every_pair(factors: dict[str, Sequence[str]]) -> list[Pair]:
    """Return every two settings of two different factors, in the factors' order."""
    return [
        frozenset({(one, a), (two, b)})
        for one, two in combinations(factors, 2)
        for a in factors[one]
        for b in factors[two]
    ]


def covering_array(
    factors: dict[str, Sequence[str]], needless: Collection[Pair] = ()
) -> list[dict[str, str]]:
    """Return combinations {factor: setting} that contain every pair of settings but the needless
    ones; the same on every machine."""
    missing = {pair: None for pair in every_pair(factors) if pair not in needless}  # in order
    used = Counter()
    chosen = []
    while missing:
        combination = dict(next(iter(missing)))
        while len(combination) < len(factors):
            factor, setting = _best(factors, combination, missing, used)
            combination[factor] = setting
        chosen.append({factor: combination[factor] for factor in factors})
        for pair in pairs(combination):
            missing.pop(pair, None)
            used[pair] += 1
    return chosen


def _best(
    factors: dict[str, Sequence[str]],
    combination: dict[str, str],
    missing: Collection[Pair],
    used: Counter,
) -> tuple[str, str]:
    """Return the setting that adds most missing pairs to this combination; of equals, the one with
    most missing pairs elsewhere; of these, the one whose pairs were used least, and then the
    first."""
    in_missing = Counter(setting for pair in missing for setting in pair)
    ranked = []
    for factor in factors:
        if factor in combination:
            continue
        for setting in factors[factor]:
            added = (factor, setting)
            new = [frozenset({added, other}) for other in combination.items()]
            gain = sum(pair in missing for pair in new)
            uses = sum(used[pair] for pair in new)
            ranked.append(((gain, in_missing[added], -uses), added))
    return max(ranked, key=lambda row: row[0])[1]
