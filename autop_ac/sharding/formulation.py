"""The search as an integer linear program.

Groups g (placeholders, operators, results; equal layers share them) have options o in O(g) and stand
for n[g] nodes. An edge e brings what its producer gives from a placement p to a placement q that the
reader wants; c(e, p, q) is its price in seconds. A value v is read along the edges E(v) and stands for
n[v] values that are read alike; a move that several readers of one value want is made once.

    x[g, o] in {0, 1}                       one option per group            (solve._choose_one)
    y[e, p, q] >= 0                         the placements on both ends     (solve._flows)
    z[v, p, q] >= 0                         a move shared by readers        (solve._moves)
    r[k] >= 0                               what computation cannot hide    (solve._streams)

    minimise   sum n[g] s[g, o] x[g, o]  +  sum w[v] n[v] c(e, p, q) z[v, p, q]  +  (1 - VISIBLE) sum r[k]

    sum_o x[g, o] = 1                                             for each g
    sum_q y[e, p, q] = sum x[producer(e), o : gives p]            for each e, p
    sum_p y[e, p, q] = sum x[reader(e), o : wants q]              for each e, q
    z[v, p, q] >= y[e, p, q]                                      for each v and e in E(v)
    sum x[a, o : k] = sum x[b, o : k]                             for each tie (a, b), key k  (_ties)
    low <= sum bytes[g, o] x[g, o] <= high                        for each limit  (_limits)
    r[k] >= sum n[v] c(e, p, q) z[v, p, q] - sum n[g] t[g, o] x[g, o]   v and g of stream k

Gathers of parameters and sums of their gradients wait for nothing and run beside computation. A stream k
has those of one side of one layer, and the computation t of that side and layer: as much as the layer
next to it computes, where layers are equal. What is longer shows; of what is not, the share VISIBLE does,
because it takes bandwidth and parts of the device from computation. w is VISIBLE for such values, 1 for
others. Equal layers are one stream, in which all are added up. Weakness: what is in no numbered module
is one layer, though it stands at both ends of the model.

With x integral, y is the product of two indicators and z the "or" over readers, so only x is integer;
z is y where a value has one reader. s holds the seconds of an option and a tie-break towards less memory
that is far below the gap. Deterministic: a fixed order of variables, seed and thread count. The solution
is rounded and priced again by `evaluate`, which knows nothing of the matrices. Weakness: each mesh axis
multiplies the number of placements, and so the y variables of an edge by its square.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..errors import SolverError
from .option import Option, given, wanted, whole
from .plan import Placements

VISIBLE = 0.1  # of collectives that run beside computation


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
    """What is read along `edges` (numbers of edges), in each of `count` equal layers.

    Attributes:
        stream: number of the stream that its moves are in; -1 where nothing hides them.
        weight: of its moves in the sum.
    """

    edges: tuple[int, ...]
    count: int = 1
    stream: int = -1
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Stream:
    """What runs beside the moves of the values that name it.

    Attributes:
        side: 0 for forward, 1 for backward.
        computing: (group, for how many nodes of it).
    """

    side: int
    computing: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Limit:
    """Bounds on a sum of bytes.

    Attributes:
        name: what errors call it.
        sizes: (group, bytes per option), of all nodes of the group together.
        low, high: None for no bound.
    """

    name: str
    sizes: tuple[tuple[int, tuple[float, ...]], ...]
    low: float | None = None
    high: float | None = None

    def held(self, chosen: Sequence[int]) -> float:
        """The sum for a choice."""
        return sum(sizes[chosen[group]] for group, sizes in self.sizes)

    def allows(self, held: float) -> bool:
        """Whether a sum is within the bounds."""
        above = self.low is None or held >= self.low - 0.5
        return above and (self.high is None or held <= self.high + 0.5)


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
        limits: bounds on bytes.
        streams: see `Stream`; empty: nothing is hidden.
    """

    names: tuple[str, ...]
    options: tuple[tuple[Option, ...], ...]
    option_s: tuple[tuple[float, ...], ...]
    counts: tuple[int, ...]
    edges: tuple[Edge, ...]
    values: tuple[Value, ...]
    ties: tuple[tuple[int, int], ...] = ()
    limits: tuple[Limit, ...] = ()
    streams: tuple[Stream, ...] = ()

    @property
    def variables(self) -> int:
        """How many options and moves there are to choose from."""
        moves = sum(int(np.isfinite(e.seconds).sum()) for e in self.edges)
        return sum(map(len, self.options)) + moves


def relaxed(problem: Problem, weights: Sequence[float]) -> Problem:
    """A problem without streams of which no choice costs more than in `problem`.

    Args:
        weights: in [0, 1], one per stream; r >= weight (moves - computation) takes the place of r.
    """
    part = [(1 - VISIBLE) * weight for weight in weights]
    off = [0.0] * len(problem.options)  # of each node's computation
    for stream, own in zip(problem.streams, part, strict=True):
        for group, count in stream.computing:
            off[group] += own * count / problem.counts[group]
    option_s = tuple(
        tuple(x - share * o.compute_s for x, o in zip(s, options, strict=True))
        for s, options, share in zip(problem.option_s, problem.options, off, strict=True)
    )
    values = tuple(
        v if v.stream < 0 else
        replace(v, stream=-1, weight=v.weight * (VISIBLE + part[v.stream]))
        for v in problem.values
    )  # fmt: skip
    return replace(problem, option_s=option_s, values=values, streams=())


def hidden_s(problem: Problem, chosen: Sequence[int]) -> float:
    """Seconds of collectives that computation hides."""
    picked = [options[i] for options, i in zip(problem.options, chosen, strict=True)]
    beside = [0.0] * len(problem.streams)
    for value in problem.values:
        if value.stream >= 0:
            moves = _moves(problem, value, picked)
            beside[value.stream] += value.count * value.weight * sum(moves.values())
    computing = [sum(n * picked[g].compute_s for g, n in s.computing) for s in problem.streams]
    return (1 - VISIBLE) * sum(map(min, beside, computing))


def _moves(problem: Problem, value: Value, picked: Sequence[Option]) -> dict[Placements, float]:
    return dict(move_on(problem, problem.edges[number], picked) for number in value.edges)


def evaluate(problem: Problem, chosen: Sequence[int]) -> float:
    """Seconds of a complete choice, counted from the groups and not from the program.

    Raises:
        SolverError: the choice breaks a constraint.
    """
    picked = [options[i] for options, i in zip(problem.options, chosen, strict=True)]
    total = sum(n * s[i] for n, s, i in zip(problem.counts, problem.option_s, chosen, strict=True))
    for value in problem.values:
        total += value.count * value.weight * sum(_moves(problem, value, picked).values())
    total -= hidden_s(problem, chosen)
    for a, b in problem.ties:
        if given(picked[a], 0) != whole(wanted(picked[b], 0)):
            raise SolverError(f"{problem.names[a]} and {problem.names[b]} are placed differently")
    for limit in problem.limits:
        if not limit.allows(limit.held(chosen)):
            held = limit.held(chosen)
            raise SolverError(f"{limit.name}: {held} bytes, outside [{limit.low}, {limit.high}]")
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
