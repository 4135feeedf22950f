"""A lower bound on the cost of every choice, by passing messages between groups.

The program of `formulation` is relaxed to a sum over groups and over pairs of groups: where a value has
several readers, the price of a move is split among those that may want it, so that readers which agree
pay it once and others too little, never too much. Such a sum is bounded by moving cost between
groups and pairs without changing it (a reparametrisation): with t the costs of groups and c those of
pairs after the moves,

    every choice costs at least   sum_g min t[g]  +  sum_e min c[e],

and one with option o of group g at least what is in excess of the minimum there on top of it. We move
cost in graph order, forwards and backwards in turn (sequential tree-reweighted message passing,
V. Kolmogorov, Convergent Tree-Reweighted Message Passing for Energy Minimization, TPAMI 2006), which
never lowers the bound, except where splits are shifted towards the readers that make a move in the
choice read off the messages. Memory limits are left out: a choice that breaks them may lie below.

What a stream hides is relaxed too: in place of max(0, moves - computation) stands a weight in [0, 1] times
the difference, which is never more, and which leaves a sum as above. Good weights are the dual values of
the streams' rows in the linear program of a part of the problem (`linear`).

One sweep takes time linear in the entries of the edges' tables; deterministic. Weakness: the bound
need not reach that of the linear program.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .formulation import Problem, relaxed
from .option import given, wanted, whole
from .plan import Placements

Array = np.ndarray
_BIG = 1e5  # seconds; stands for a forbidden move
_ROUNDS = 60  # of two sweeps and a new split
_BLEND, _LAST_BLEND = 0.5, 0.02  # of the new split into the old, at first and at last
_SHARPNESS = 3.0  # of the split: a reader for which a move costs 1/3 of its price more counts 1/e
_SHARPER = 1.3  # from round to round, as the messages settle
_State = tuple[list[list[np.ndarray]], list[tuple[np.ndarray, np.ndarray]]]


@dataclass(frozen=True, eq=False)
class Bound:
    """What every choice costs at least, in seconds.

    Attributes:
        total_s: any choice.
        option_s: per group, with each of its options.
        move_s: per edge of the problem, with each [source, target].
    """

    total_s: float
    option_s: tuple[Array, ...]
    move_s: tuple[Array, ...]


class _End:
    """One end of a pair: of which group, and which key each option has there."""

    def __init__(self, group: int, keys: Array, count: int) -> None:
        self.group, self.keys = group, keys
        self.order = np.argsort(keys, kind="stable")
        self.present, self.starts = np.unique(keys[self.order], return_index=True)
        self.message = np.zeros(count)

    def least(self, costs: Array) -> Array:
        """Per key the least cost of an option that has it."""
        found = np.full(len(self.message), _BIG)
        found[self.present] = np.minimum.reduceat(costs[self.order], self.starts)
        return found


class _Pair:
    """A table of costs between two ends; `price` is the whole cost, `table` the share of this edge."""

    def __init__(self, left: _End, right: _End, table: Array) -> None:
        self.ends = (left, right)
        self.table = table

    @property
    def is_loop(self) -> bool:
        """Whether both ends are of one group."""
        return self.ends[0].group == self.ends[1].group

    def rest(self) -> Array:
        """The table less what was moved to its groups."""
        left, right = self.ends
        return self.table - left.message[:, None] - right.message[None, :]

    def left_to(self, side: int) -> Array:
        """Per key of one end the least that the table holds after what the other end took."""
        other = self.ends[1 - side].message
        return (self.table - (other[None, :] if side == 0 else other[:, None])).min(1 - side)


def lower_bound(
    problem: Problem, weights: Sequence[float] | None = None, rounds: int = _ROUNDS
) -> Bound:
    """See the module's text.

    Args:
        weights: in [0, 1], one per stream; None: 1/2 each.
        rounds: of two sweeps and a new split, at most.
    """
    if problem.streams:
        problem = relaxed(problem, weights or [0.5] * len(problem.streams))
    return _Messages(problem).run(rounds)


def highest(first: Bound, second: Bound) -> Bound:
    """The better of two bounds of one problem, for each option and move."""
    return Bound(
        max(first.total_s, second.total_s),
        tuple(map(np.maximum, first.option_s, second.option_s)),
        tuple(map(np.maximum, first.move_s, second.move_s)),
    )


class _Messages:
    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.costs = [
            np.array(s) * n for s, n in zip(problem.option_s, problem.counts, strict=True)
        ]
        self.edges = [self._pair(i) for i in range(len(problem.edges))]
        self.pairs = [*self.edges, *(self._tie(a, b) for a, b in problem.ties)]
        self.shares = self._equal_shares()
        self._set_tables()
        self.incident: dict[int, list[tuple[_Pair, int]]] = defaultdict(list)
        self.loops: dict[int, list[_Pair]] = defaultdict(list)
        for pair in self.pairs:
            left, right = pair.ends
            if left.group == right.group:
                self.loops[left.group].append(pair)
                continue
            for side in (0, 1):
                self.incident[pair.ends[side].group].append((pair, side))

    def _pair(self, number: int) -> _Pair:
        problem, edge = self.problem, self.problem.edges[number]
        sources = {p: i for i, p in enumerate(edge.sources)}
        targets = {q: i for i, q in enumerate(edge.targets)}
        gives = [sources[given(o, edge.output)] for o in problem.options[edge.producer]]
        wants = [targets[wanted(o, edge.slot)] for o in problem.options[edge.consumer]]
        return _Pair(
            _End(edge.producer, np.array(gives), len(sources)),
            _End(edge.consumer, np.array(wants), len(targets)),
            np.zeros(edge.seconds.shape),
        )

    def _tie(self, a: int, b: int) -> _Pair:
        left = [given(o, 0) for o in self.problem.options[a]]
        right = [whole(wanted(o, 0)) for o in self.problem.options[b]]
        keys = {key: i for i, key in enumerate(dict.fromkeys([*left, *right]))}
        table = np.where(np.eye(len(keys), dtype=bool), 0.0, _BIG)
        return _Pair(
            _End(a, np.array([keys[k] for k in left]), len(keys)),
            _End(b, np.array([keys[k] for k in right]), len(keys)),
            table,
        )

    def _equal_shares(self) -> list[list[Array]]:
        """Per value and reader its share of each [source, target]."""
        found = []
        for value in self.problem.values:
            edges = [self.problem.edges[n] for n in value.edges]
            wanting: dict[Placements, int] = defaultdict(int)
            for edge in edges:
                for q in edge.targets:
                    wanting[q] += 1
            found.append(
                [
                    np.broadcast_to([1.0 / wanting[q] for q in e.targets], e.seconds.shape)
                    for e in edges
                ]
            )
        return found

    def _set_tables(self) -> None:
        for pair, edge in zip(self.edges, self.problem.edges, strict=True):
            pair.table = np.where(np.isfinite(edge.seconds), 0.0, _BIG)
        for value, shares in zip(self.problem.values, self.shares, strict=True):
            for number, share in zip(value.edges, shares, strict=True):
                seconds = self.problem.edges[number].seconds
                known = np.where(np.isfinite(seconds), seconds, 0.0)
                price = value.count * value.weight * known
                self.edges[number].table = self.edges[number].table + share * price

    def _gathered(self, group: int) -> Array:
        """The group's costs with all that was moved to it."""
        total = self.costs[group].copy()
        for pair in self.loops[group]:
            left, right = pair.ends
            total += pair.table[left.keys, right.keys]
        for pair, side in self.incident[group]:
            end = pair.ends[side]
            total += end.message[end.keys]
        return total

    def _sweep(self, groups: range) -> None:
        """Each group takes what its pairs can give, and hands it to the pairs that lie ahead."""
        forwards = groups.step > 0
        for group in groups:
            ahead = []
            for pair, side in self.incident[group]:
                own, other = pair.ends[side], pair.ends[1 - side]
                own.message = pair.left_to(side)
                if (other.group > group) == forwards:
                    ahead.append(own)
            if ahead:
                behind = len(self.incident[group]) - len(ahead)
                part = self._gathered(group) / max(len(ahead), behind)
                for own in ahead:
                    own.message = own.message - own.least(part)

    def _total(self) -> float:
        groups = sum(float(self._gathered(g).min()) for g in range(len(self.costs)))
        return groups + sum(float(p.rest().min()) for p in self.pairs if not p.is_loop)

    def _resplit(self, sharpness: float, blend: float) -> None:
        """Give a move's price to the readers that are nearest to making it."""
        nearness: dict[int, Array] = {}
        for value, shares in zip(self.problem.values, self.shares, strict=True):
            if len(value.edges) == 1:
                continue
            totals: dict[Placements, Array] = {}
            weights = []
            for number in value.edges:
                if number not in nearness:
                    nearness[number] = self._excess(number)
                edge = self.problem.edges[number]
                price = np.where(np.isfinite(edge.seconds), edge.seconds, 0.0)
                price = price * (value.count * value.weight)
                weight = np.exp(-np.minimum(nearness[number] * sharpness / (price + 1e-12), 50.0))
                weights.append(weight)
                for j, q in enumerate(edge.targets):
                    totals[q] = totals.get(q, 0.0) + weight[:, j]
            for i, number in enumerate(value.edges):
                edge = self.problem.edges[number]
                total = np.stack([totals[q] for q in edge.targets], 1)
                shares[i] = (1 - blend) * shares[i] + blend * weights[i] / total

    def _excess(self, number: int) -> Array:
        """How far each [source, target] is above the best target from that source."""
        pair = self.edges[number]
        right = pair.ends[1]
        if pair.is_loop:
            return np.zeros(pair.table.shape)
        cost = pair.rest() + right.least(self._gathered(right.group))[None, :]
        return cost - cost.min(1, keepdims=True)

    def run(self, rounds: int) -> Bound:
        """Sweep and split in turn; back to the best state, with smaller steps, when it gets worse."""
        groups = range(len(self.costs))
        best, blend, sharpness = -np.inf, _BLEND, _SHARPNESS
        saved = self._state()
        for _ in range(rounds):
            self._sweep(groups)
            self._sweep(groups[::-1])
            total = self._total()
            if total >= best:
                best, saved = total, self._state()
            else:
                blend /= 2
                self._restore(saved)
            if blend < _LAST_BLEND:
                break
            self._resplit(sharpness, blend)
            self._set_tables()
            sharpness *= _SHARPER
        self._restore(saved)
        return self._read_off()

    def _state(self) -> _State:
        messages = [(pair.ends[0].message, pair.ends[1].message) for pair in self.pairs]
        return [list(shares) for shares in self.shares], messages

    def _restore(self, state: _State) -> None:
        shares, messages = state
        self.shares = [list(s) for s in shares]
        for pair, (left, right) in zip(self.pairs, messages, strict=True):
            pair.ends[0].message, pair.ends[1].message = left, right
        self._set_tables()

    def _read_off(self) -> Bound:
        rests = [np.zeros_like(p.table) if p.is_loop else p.rest() for p in self.pairs]
        gathered = [self._gathered(g) for g in range(len(self.costs))]
        total = sum(float(g.min()) for g in gathered) + sum(float(r.min()) for r in rests)
        excess = [g - g.min() for g in gathered]
        moves = []
        for pair, rest in zip(self.edges, rests, strict=False):
            left, right = (
                end.least(gathered[end.group] - gathered[end.group].min()) for end in pair.ends
            )
            ends = 0.0 if pair.is_loop else left[:, None] + right[None, :]
            moves.append(total + rest - rest.min() + ends)
        for pair, rest in zip(self.pairs, rests, strict=True):
            for side, end in enumerate(pair.ends):
                if not pair.is_loop:
                    least = rest.min(1 - side) - rest.min()
                    excess[end.group] = excess[end.group] + least[end.keys]
        return Bound(total, tuple(total + e for e in excess), tuple(moves))
