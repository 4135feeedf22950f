"""The search as an integer linear program.

Groups g (placeholders, operators, results; equal layers share them) have options o in O(g) and stand
for n[g] nodes. An edge e brings what its producer gives from a placement p to a placement q that the
reader wants; c(e, p, q) is its price in seconds. A value v is read along the edges E(v) and stands for
n[v] values that are read alike; a move that several readers of one value want is made once.

    x[g, o] in {0, 1}                       one option per group            (solve._choose_one)
    y[e, p, q] >= 0                         the placements on both ends     (solve._flows)
    z[v, p, q] >= 0                         a move shared by readers        (solve._moves)

    minimise   sum n[g] s[g, o] x[g, o]  +  sum n[v] c(e, p, q) z[v, p, q]

    sum_o x[g, o] = 1                                             for each g
    sum_q y[e, p, q] = sum x[producer(e), o : gives p]            for each e, p
    sum_p y[e, p, q] = sum x[reader(e), o : wants q]              for each e, q
    z[v, p, q] >= y[e, p, q]                                      for each v and e in E(v)
    sum x[a, o : k] = sum x[b, o : k]                             for each tie (a, b), key k  (_ties)
    low <= sum bytes[g, o] x[g, o] <= high                        parameter memory  (_memory)

With x integral, y is the product of two indicators and z the "or" over readers, so only x is integer;
z is y where a value has one reader. s holds the seconds of an option and a tie-break towards less memory
that is far below the gap. Deterministic: a fixed order of variables, seed and thread count. The solution
is rounded and priced again by `evaluate`, which knows nothing of the matrices. Weakness: each mesh axis
multiplies the number of placements, and so the y variables of an edge by its square.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import SolverError
from .option import Option, given, wanted, whole
from .plan import Placements


@dataclass(frozen=True, eq=False)
class Edge:
    """One read, or the same read in each of equal layers.

    Attributes:
        producer, output: group that gives the value, and which of its outputs.
        consumer, slot: group that reads it and which of its inputs; slot -1: the reader wants the
            placement of the consumer's own first output (the gradient of a parameter).
        sources, targets: the placements that the producer may give, and that the reader may want.
        seconds: price by [source, target], infinite where the move is forbidden.
    """

    producer: int
    output: int
    consumer: int
    slot: int
    sources: tuple[Placements, ...]
    targets: tuple[Placements, ...]
    seconds: np.ndarray


@dataclass(frozen=True, slots=True)
class Value:
    """What is read along `edges` (numbers of edges), in each of `count` equal layers."""

    edges: tuple[int, ...]
    count: int = 1


@dataclass(frozen=True)
class Problem:
    """Everything that the solver sees.

    Attributes:
        names: of the groups.
        options: per group.
        option_s: per group and option, seconds of one node with the tie-break.
        counts: per group, for how many nodes it stands.
        edges: see `Edge`.
        values: see `Value`.
        ties: (a, b): group a gives what group b wants as its first input, Partial read as Replicate.
        memory: (group, bytes per option) of parameters, of all nodes of the group together.
        memory_low, memory_high: bounds on the sum of chosen bytes; None: no bound.
    """

    names: tuple[str, ...]
    options: tuple[tuple[Option, ...], ...]
    option_s: tuple[tuple[float, ...], ...]
    counts: tuple[int, ...]
    edges: tuple[Edge, ...]
    values: tuple[Value, ...]
    ties: tuple[tuple[int, int], ...] = ()
    memory: tuple[tuple[int, tuple[int, ...]], ...] = ()
    memory_low: float | None = None
    memory_high: float | None = None

    @property
    def variables(self) -> int:
        """How many options and moves there are to choose from."""
        moves = sum(int(np.isfinite(e.seconds).sum()) for e in self.edges)
        return sum(map(len, self.options)) + moves


def evaluate(problem: Problem, chosen: Sequence[int]) -> float:
    """Seconds of a complete choice, counted from the groups and not from the program.

    Raises:
        SolverError: the choice breaks a constraint.
    """
    picked = [options[i] for options, i in zip(problem.options, chosen, strict=True)]
    total = sum(n * s[i] for n, s, i in zip(problem.counts, problem.option_s, chosen, strict=True))
    for value in problem.values:
        moved: dict[Placements, float] = {}
        for number in value.edges:
            target, seconds = move_on(problem, problem.edges[number], picked)
            moved[target] = seconds
        total += value.count * sum(moved.values())
    for a, b in problem.ties:
        if given(picked[a], 0) != whole(wanted(picked[b], 0)):
            raise SolverError(f"{problem.names[a]} and {problem.names[b]} are placed differently")
    held = sum(sizes[chosen[g]] for g, sizes in problem.memory)
    low, high = problem.memory_low, problem.memory_high
    if (high is not None and held > high + 0.5) or (low is not None and held < low - 0.5):
        raise SolverError(f"parameters take {held} bytes, outside [{low}, {high}]")
    return total


def move_on(problem: Problem, edge: Edge, picked: Sequence[Option]) -> tuple[Placements, float]:
    """The placement that the reader of an edge wants, and the seconds of bringing the value there.

    Raises:
        SolverError: the move is forbidden.
    """
    source = given(picked[edge.producer], edge.output)
    target = wanted(picked[edge.consumer], edge.slot)
    seconds = float(edge.seconds[edge.sources.index(source), edge.targets.index(target)])
    if not np.isfinite(seconds):
        raise SolverError(
            f"{problem.names[edge.consumer]} cannot be given {target} from {source} of "
            f"{problem.names[edge.producer]}: the plan is not valid"
        )
    return target, seconds
