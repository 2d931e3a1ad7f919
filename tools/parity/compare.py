"""Join the values that the ranks of a mesh noted (tools/parity/trajectory.py), and compare them
with the plain model's.

Shapes:  S sequences of the global batch   T tokens of a sequence   F features
"""

from dataclasses import dataclass

import numpy as np

from tools.differences import relative
from tools.parity.trajectory import Notes


@dataclass(frozen=True)
class Difference:
    """First place at which a mesh and the plain model differ by more than rounding."""

    step: int  # from 1
    where: str
    error: float  # relative

    def __str__(self) -> str:
        return f"step {self.step}: {self.where}, {self.error:.1e}"


@dataclass(frozen=True)
class Parity:
    """Largest relative errors of a mesh, and every difference, in the order of a step."""

    loss: float
    norm: float
    outputs: float
    gradients: float
    weights: float  # after all steps
    found: list[Difference]

    @property
    def first(self) -> Difference | None:
        return self.found[0] if self.found else None


def by_token(ranks: list[Notes], name: str, features: int | None, T: int) -> np.ndarray | None:
    """Join a module's output over all ranks, [S, T, F]; None if no rank has it.

    features: F of the plain model. It tells ranks of tensor parallelism that hold columns from
    those that hold tokens.
    """
    having = [seen for seen in ranks if seen.outputs.get(name)]
    if not having:
        return None
    every = windows(ranks)
    groups: dict[bytes, list[Notes]] = {}
    for seen in having:
        groups.setdefault(seen.samples.tobytes() + seen.positions.tobytes(), []).append(seen)
    result: np.ndarray | None = None
    for group in groups.values():
        group.sort(key=lambda seen: seen.tp_rank)
        own = {seen.tp_rank: seen for seen in group}.values()
        for a, samples in enumerate(group[0].samples):
            outputs = [seen.outputs[name][a] for seen in own]
            parts = [output.reshape(*output.shape[:2], -1) for output in outputs]
            tokens = joined(parts, len(group[0].positions), features)
            if result is None:
                result = np.full((len(every), T, tokens.shape[-1]), np.nan)
            if tokens.shape[1:] != (len(group[0].positions), result.shape[-1]):
                return np.empty(0)
            rows = np.searchsorted(every, samples)
            result[rows[:, None], group[0].positions] = tokens
    return result


def windows(ranks: list[Notes]) -> np.ndarray:
    """int64 [S]: the numbers of the sequences in the corpus, in order."""
    return np.unique(np.concatenate([seen.samples.ravel() for seen in ranks]))


def joined(parts: list[np.ndarray], t: int, features: int | None) -> np.ndarray:
    """Join the parts of the ranks of a tp group, each [b, t or fewer, F or fewer] -> [b, t, F]."""
    first = parts[0]
    if len(parts) == 1 or (first.shape[1] == t and first.shape[2] == features):
        return first  # every rank has all of it
    return np.concatenate(parts, axis=1 if first.shape[1] < t else 2)


def merged(ranks: list[Notes], kind: str, step: int | None = None) -> dict[str, np.ndarray]:
    """Merge gradients or weights by name: in a pipeline each rank holds others."""
    result: dict[str, np.ndarray] = {}
    for seen in ranks:
        values = getattr(seen, kind)
        result |= values if step is None else values[step]
    return result


def furthest(
    ranks: list[Notes], kind: str, name: str, want: np.ndarray, step: int | None = None
) -> tuple[float, np.ndarray]:
    """Return the largest error of a tensor among the ranks that have it, and its values there;
    infinite and empty if none does. Replicas may differ, and each goes on with its own."""
    worst, there = -1.0, np.empty(0)
    for seen in ranks:
        values = getattr(seen, kind)
        of_step = values if step is None else values[step]
        if name in of_step:
            error = relative(of_step[name], want)
            if error > worst:
                worst, there = error, of_step[name]
    return (worst, there) if worst >= 0 else (float("inf"), there)


def losses_of_tokens(ranks: list[Notes], T: int) -> np.ndarray:
    """Return the losses [S, T] of the ranks that have the last stage."""
    every = windows(ranks)
    result = np.zeros((len(every), T))
    for seen in ranks:
        of_rank = np.zeros((len(every), T))
        for a, samples in enumerate(seen.samples):
            rows = np.searchsorted(every, samples)
            of_rank[rows[:, None], seen.positions] = seen.token_losses[a]
        result = np.where(of_rank != 0, of_rank, result)
    return result


def compare(
    ranks: list[Notes], plain: Notes, limit: float, later_limit: float, initial_limit: float = 0.0
) -> Parity:
    """limit: of errors at equal weights, which are those of step 1; later_limit: of what follows
    from weights that differ by rounding; initial_limit: of the weights before step 1."""
    T = len(plain.positions)
    found: list[Difference] = []

    def judge(step: int, where: str, error: float, largest: float) -> float:
        if not error <= largest:
            found.append(Difference(step, where, error))
        return error

    def judge_number(step: int, key: str, where: str, largest: float) -> float:
        error = relative(getattr(ranks[0], key)[step - 1], getattr(plain, key)[step - 1])
        return judge(step, where, error, largest)

    def judge_counts(step: int) -> None:
        differs = counts(ranks, step - 1) != counts([plain], step - 1)
        judge(step, "tokens that experts got", float(differs), 0.0)

    for name, want in plain.weights[0].items():
        error, _ = furthest(ranks, "weights", name, want, 0)
        judge(1, f"initial value of {name}", error, initial_limit)

    outputs = [0.0]
    for name in plain.outputs:
        want = by_token([plain], name, None, T)
        assert want is not None
        got = by_token(ranks, name, want.shape[-1], T)
        if got is None or got.shape != want.shape:
            continue  # another module has its work on this mesh
        outputs.append(judge(1, f"forward, output of {name}", relative(got, want), limit))
    judge_counts(1)
    loss_of_tokens = relative(losses_of_tokens(ranks, T), losses_of_tokens([plain], T))
    judge(1, "loss of the tokens", loss_of_tokens, max(limit, 1e-5))  # noted in float32
    loss = judge_number(1, "loss", "loss", limit)

    for name, want in plain.terms.items():
        of_all = sum(seen.terms.get(name, 0.0) for seen in ranks)
        judge(1, f"terms, {name}", relative(np.array(of_all), np.array(want)), limit)

    gradients = [0.0]
    for name in in_order_of_backward(plain):
        error, _ = furthest(ranks, "gradients", name, plain.gradients[name])
        gradients.append(judge(1, f"backward, gradient of {name}", error, limit))
    norm = judge_number(1, "norm", "norm of the gradient", limit)
    # An update by SGD is these times the learning rate; AdamW's does not depend on their scale.
    for name, want in plain.clipped.items():
        error, _ = furthest(ranks, "clipped", name, want)
        gradients.append(judge(1, f"clipping, gradient of {name}", error, limit))

    weights = [0.0]
    for step in range(1, len(plain.weights)):
        if step > 1:
            for key in "loss", "norm":
                judge_number(step, key, key, later_limit)
            judge_counts(step)
        for name, want in plain.weights[step].items():
            error, _ = furthest(ranks, "weights", name, want, step)
            weights.append(judge(step, f"optimizer, {name} after the step", error, later_limit))
    for rank, seen in enumerate(ranks):
        if seen.loss != ranks[0].loss or seen.norm != ranks[0].norm:
            judge(1, f"rank {rank} reports another loss or norm than rank 0", float("inf"), 0.0)
    return Parity(loss, norm, max(outputs), max(gradients), max(weights), found)


def counts(ranks: list[Notes], step: int) -> dict[str, list[int]]:
    return {layer: value for seen in ranks for layer, value in seen.counts[step].items()}


def in_order_of_backward(plain: Notes) -> list[str]:
    """Sort weights so that those of modules whose forward ran last come first."""
    ran = {name: number for number, name in enumerate(plain.outputs)}

    def place(weight: str) -> int:
        module = weight.rpartition(".")[0]
        while module and module not in ran:
            module = module.rpartition(".")[0]
        return ran.get(module, -1)

    names = list(plain.gradients)
    # the output projection runs inside the loss, after all modules
    return sorted(names, key=lambda name: -len(ran) if "output" in name else -place(name))
