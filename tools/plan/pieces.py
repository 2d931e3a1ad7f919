"""Trace the loss of a long sequence from four of its pieces.

training/loss.py works through a sequence in pieces, and all between the first and the last do the
same. The second and the third are traced and compared. If they are equal, copies of them replace
the pieces that are not traced.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tools.plan.step import Op

if TYPE_CHECKING:
    from tools.plan.trace import Trace

TRACED = 4  # the first, two from the middle, the last


@dataclass
class LossPiece:
    """Events of one piece."""

    rows: list  # as in `Stretch`
    born: list[int]  # storages, in the order of their births

    def storages(self) -> set[int]:
        """Return all storages that it makes, frees, reads or writes."""
        found: set[int] = set()
        for row in self.rows:
            found |= row.inputs.union(row.writes) if isinstance(row, Op) else {row[1]}
        return found

    def outline(self, trace: "Trace") -> list:
        """Return the events with storages named so that two pieces can be compared: those of the
        piece by the order of their births. A storage that lives on keeps its number."""
        names: dict[int, tuple] = {}
        for number in self.storages() - trace.alive.keys():
            names[number] = "of an earlier piece", trace.memory[number].size
        for n, number in enumerate(self.born):
            names[number] = "of this piece", n, trace.memory[number].size
        return moved(self.rows, names)


def few(trace: "Trace", firsts: range) -> Iterator[int]:
    """Yield those of `firsts` (training/loss.py::first_tokens) that are traced, and add the others
    to the trace."""
    if len(firsts) <= TRACED:
        yield from firsts
        return
    yield firsts[0]
    pieces = []
    for first in firsts[1:3]:
        rows = trace.rows()
        begin = len(rows)
        yield first
        pieces.append(piece_of(rows[begin:]))
    second, third = pieces
    if not are_equivalent(trace, second, third):
        yield from firsts[3:]
        return
    rows[begin:] = with_copies(trace, second, third, len(firsts) - TRACED)
    yield firsts[-1]


def piece_of(rows: list) -> LossPiece:
    born = [row[1] for row in rows if not isinstance(row, Op) and row[0] == "+"]
    return LossPiece(rows, born)


def are_equivalent(trace: "Trace", second: LossPiece, third: LossPiece) -> bool:
    """Return True if both do the same, and the third frees all that the second left and nothing
    older."""
    if second.outline(trace) != third.outline(trace):
        return False
    if trace.alive.keys() & second.born:
        return False
    return third.storages() <= {*second.born, *third.born, *trace.alive}


def with_copies(trace: "Trace", second: LossPiece, third: LossPiece, copies: int) -> list:
    """Return the rows of `copies` pieces between the second and the third, and then those of the
    third, which frees what the last copy left. Storages that live on are the third's, so it keeps
    its own."""
    rows = []
    previous = second.born
    for _ in range(copies):
        born = [copy_of(trace, number) for number in third.born]
        rows += moved(third.rows, dict(zip(second.born + third.born, previous + born)))
        previous = born
    return rows + moved(third.rows, dict(zip(second.born, previous)))


def copy_of(trace: "Trace", number: int) -> int:
    """Return a storage like this one, of the same stretch."""
    memory = trace.memory[number]
    trace.births[memory.born] += 1
    copy = next(trace.counter)
    order = trace.births[memory.born]
    trace.memory[copy] = replace(memory, order=order, died=memory.born)
    return copy


def moved(rows: list, names: dict) -> list:
    """Return the rows with renamed storages. Those without a new name keep theirs."""
    changed = []
    for row in rows:
        if isinstance(row, Op):
            reads = {names.get(number, number): size for number, size in row.reads.items()}
            writes = {names.get(number, number): size for number, size in row.writes.items()}
            inputs = {names.get(number, number) for number in row.inputs}
            changed.append(replace(row, reads=reads, writes=writes, inputs=inputs))
        else:
            changed.append((row[0], names.get(row[1], row[1])))
    return changed
