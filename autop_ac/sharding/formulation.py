"""The search as an integer linear program, solved by HiGHS.

Groups g (placeholders, operators, results) have options o in O(g). An edge e brings value v (one
output of its producer) from a placement p that the producer gives to a placement q that the reader
wants; c(v, p, q) is its price in seconds and pairs without a price are left out.

    x[g, o] in {0, 1}                       one option per group            (_choose_one)
    y[e, p, q] >= 0                         the move made on an edge        (_edges)
    z[v, p, q] >= 0                         a move shared by its readers    (_edges)

    minimise   sum s[g, o] x[g, o]  +  sum c(v, p, q) z[v, p, q]

    sum_o x[g, o] = 1                                             for each g
    sum_q y[e, p, q] = sum x[producer(e), o : gives p]            for each e, p
    sum_p y[e, p, q] = sum x[reader(e), o : wants q]              for each e, q
    z[v, p, q] >= y[e, p, q]                                      for each e of v
    sum x[a, o : k] = sum x[b, o : k]                             for each tie (a, b), key k  (_ties)
    low <= sum bytes[g, o] x[g, o] <= high                        parameter memory  (_memory)

With x integral, y is the product of two indicators and z the "or" over readers, so only x is integer.
s holds the seconds of an option and a tie-break towards less memory that is far below the gap.
Deterministic: a fixed order of variables, seed and thread count. The solution is rounded and priced
again by `evaluate`, which knows nothing of the matrices. Weakness: two mesh axes square the number
of placements and so the y variables of an edge; repeated layers are not tied together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..errors import SolverError
from .option import Option, given, wanted, whole
from .plan import Placements


@dataclass(frozen=True)
class Edge:
    """One read of one value.

    Attributes:
        value: number of the value read; edges of one value share moves.
        producer, output: group that gives it, and which of its outputs.
        consumer, slot: group that reads it and which of its inputs; slot -1: the reader wants the
            placement of the consumer's own first output (the gradient of a parameter).
        seconds: price by (placement given, placement wanted); pairs not in it are forbidden.
    """

    value: int
    producer: int
    output: int
    consumer: int
    slot: int
    seconds: Mapping[tuple[Placements, Placements], float]


@dataclass(frozen=True)
class Problem:
    """Everything that the solver sees.

    Attributes:
        names: of the groups.
        options: per group.
        option_s: per group and option, seconds with the tie-break.
        edges: see `Edge`.
        ties: (a, b): group a gives what group b wants as its first input, Partial read as Replicate.
        memory: (group, bytes per option) of each parameter.
        memory_low, memory_high: bounds on the sum of chosen bytes; None: no bound.
    """

    names: tuple[str, ...]
    options: tuple[tuple[Option, ...], ...]
    option_s: tuple[tuple[float, ...], ...]
    edges: tuple[Edge, ...]
    ties: tuple[tuple[int, int], ...] = ()
    memory: tuple[tuple[int, tuple[int, ...]], ...] = ()
    memory_low: float | None = None
    memory_high: float | None = None


def evaluate(problem: Problem, chosen: Sequence[int]) -> float:
    """Seconds of a complete choice, counted from the graph and not from the program.

    Raises:
        SolverError: the choice breaks a constraint.
    """
    picked = [options[i] for options, i in zip(problem.options, chosen, strict=True)]
    total = sum(s[i] for s, i in zip(problem.option_s, chosen, strict=True))
    moved: dict[tuple[int, Placements], float] = {}
    for edge in problem.edges:
        source = given(picked[edge.producer], edge.output)
        target = wanted(picked[edge.consumer], edge.slot)
        if (source, target) not in edge.seconds:
            raise SolverError(
                f"{problem.names[edge.consumer]} cannot be given {target} from {source} of "
                f"{problem.names[edge.producer]}: the plan is not valid"
            )
        moved[edge.value, target] = edge.seconds[source, target]
    for a, b in problem.ties:
        if given(picked[a], 0) != whole(wanted(picked[b], 0)):
            raise SolverError(f"{problem.names[a]} and {problem.names[b]} are placed differently")
    held = sum(sizes[chosen[g]] for g, sizes in problem.memory)
    low, high = problem.memory_low, problem.memory_high
    if (high is not None and held > high + 0.5) or (low is not None and held < low - 0.5):
        raise SolverError(f"parameters take {held} bytes, outside [{low}, {high}]")
    return total + sum(moved.values())
