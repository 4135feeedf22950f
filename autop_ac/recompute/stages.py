"""The automatic part: stages of the forward pass, recomputed one after the other in backward.

Let v_1 .. v_n be the forward values that decide for themselves, in graph order, b_i their bytes,
and u_i the last forward reader of v_i or of a view of it. Values that nobody decided yet are
*free*. A cut after position p keeps every free v_i with i <= p < u_i; A(p) is their bytes and
those of the user inputs still to be read, so that a first layer is cut as the others. A stage is the free values between two cuts; what no cut keeps of it is recomputed, together, when
backward reaches it.

`stage_wishes` walks forward. The free values since the last cut may sum to at most `stage_bytes`,
and among the cuts that keep to this the one with the least A(p) is taken; of equals one between
two layers, and then the latest. A layer that is larger than a stage is cut off from its
neighbours, so that the walk through each of several equal layers starts alike and they get equal
decisions. A layer is a run of values whose module path agrees up to its first number. A cut in the
first half of what fits is taken only where it keeps at most half of the bytes of the best one in
the second half: otherwise a graph whose A(p) only grows (DenseNet) would be cut after every node.

Linear where cuts fall in the second half; a run of early cuts may look at values of a window again.
All in integers, and free of units: sizes scaled by an integer scale the answer. The greedy walk is
not optimal; after Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016, section 4.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate, combinations, pairwise

from ..capture.names import block_of_path
from ..graph.facts import Facts, Value
from .hints import root_of
from .plan import Action, Origin, Wish

_HALVINGS = 10  # the smallest stage tried holds a thousandth of the whole
_SMALL = 12  # free values up to which every size is tried
_MULTIPLES = (1, 2, 3, 4, 6, 8, 12, 16)  # layers in one stage
_ROUTING = ("aten.topk.",)


@dataclass(frozen=True)
class Forward:
    """Free values in graph order, with what the walk needs of each.

    Attributes:
        free: value indices.  bytes: their bytes.
        last: by position among `free`, the last position whose value was computed when the value
            is read for the last time in forward, so that a cut before it keeps the value.
        inputs: bytes and last position, likewise, of each user input that forward reads.
        layers: by position among `free`, the layer, ``"layers.3"``, or ``""``.
        kept: values that the automatic part keeps wherever the cuts fall, with the reason.
    """

    free: tuple[int, ...]
    bytes: tuple[int, ...]
    last: tuple[int, ...]
    inputs: tuple[tuple[int, int], ...]
    layers: tuple[str, ...]
    kept: Mapping[int, str]


def stage_wishes(
    facts: Facts, stage_bytes: int | None, fixed: Mapping[int, Action]
) -> tuple[Mapping[int, Wish], tuple[str, ...]]:
    """What stages of at most `stage_bytes` ask of each value that decides for itself.

    Args:
        facts: the local graph.
        stage_bytes: the most that the free values of one stage may sum to; None for no stages.
        fixed: actions that higher origins decided; these values get no wish.

    Returns:
        A wish by value index, and notes for the report.
    """
    if stage_bytes is None:
        return {}, ()
    assert stage_bytes > 0, f"stage_bytes={stage_bytes}"
    forward = free_values(facts, fixed)
    cuts = _cuts(forward, stage_bytes)
    wishes = {i: Wish("save", Origin.AUTO, reason) for i, reason in forward.kept.items()}
    large = []
    for position, index in enumerate(forward.free):
        stage = bisect.bisect_left(cuts, position)  # cut k comes after position cuts[k]
        crosses = stage < len(cuts) and forward.last[position] > cuts[stage]
        if crosses:
            wishes[index] = Wish("save", Origin.AUTO, f"alive across the cut after stage {stage}")
        else:
            wishes[index] = Wish("recompute", Origin.AUTO, f"recomputed with stage {stage}")
            if forward.bytes[position] > stage_bytes:
                large.append(index)
    notes = tuple(
        f"{facts.values[i].name} of {facts.values[i].bytes} bytes is larger than the stage size of "
        f"{stage_bytes} bytes and makes a stage of its own"
        for i in large
    )
    return dict(sorted(wishes.items())), notes


def yielding_stages(
    facts: Facts,
    stage_bytes: int | None,
    fixed: Mapping[int, Action],
    preferred: Mapping[int, Wish],
) -> tuple[Mapping[int, Wish], tuple[int, ...], tuple[str, ...]]:
    """Stages that preferences bind, but for those without which a stage would be too large.

    What is preferred to be saved never is in the way. A value preferred to be recomputed counts in the
    stage that it lies in; where a stage is too large with such values, these are decided as any others.

    Returns:
        Wishes as of `stage_wishes`, the preferences given up (roots, ascending), and notes.
    """
    given_up: set[int] = set()
    while True:
        held = {i: w.action for i, w in preferred.items() if i not in given_up}
        wishes, notes = stage_wishes(facts, stage_bytes, {**fixed, **held})
        again = [i for i, action in held.items() if action == "recompute"]
        crowded = (
            _crowded(facts, {**fixed, **held}, again, stage_bytes)
            if stage_bytes and again
            else set()
        )
        if not crowded:
            # what is recomputed all the same kept its preference
            against = {i for i in given_up if i in wishes and wishes[i].action != "recompute"}
            kept = {i: w for i, w in wishes.items() if i not in given_up - against}
            return kept, tuple(sorted(against)), notes
        given_up |= crowded


def _crowded(
    facts: Facts, held: Mapping[int, Action], again: list[int], stage_bytes: int
) -> set[int]:
    """Values of `again` in stages that are larger than allowed with them."""
    forward = free_values(facts, held)
    cuts = _cuts(forward, stage_bytes)
    ends = [forward.free[c] for c in cuts]  # graph index of the last value of each stage
    members: dict[int, list[int]] = {}
    for i in again:
        members.setdefault(bisect.bisect_left(ends, i), []).append(i)
    sums: dict[int, int] = {}
    for position, i in enumerate(forward.free):
        stage = bisect.bisect_left(cuts, position)
        crosses = stage < len(cuts) and forward.last[position] > cuts[stage]
        sums[stage] = sums.get(stage, 0) + (0 if crosses else facts.values[i].bytes)
    return {
        i
        for stage, held_here in members.items()
        if sums.get(stage, 0) + sum(facts.values[i].bytes for i in held_here) > stage_bytes
        for i in held_here
    }


def free_values(facts: Facts, fixed: Mapping[int, Action]) -> Forward:
    """The values that the automatic part decides, and those that it keeps in any case."""
    outputs = {
        root_of(facts, i) for i in facts.forward_outputs if facts.values[i].side == "forward"
    }
    kept: dict[int, str] = {}
    free = []
    for value in facts.forward:
        if root_of(facts, value.index) != value.index or value.index in fixed:
            continue
        if value.op == "get_attr":
            continue  # a constant, at hand in both graphs
        reason = _reason_to_keep(value, value.index in outputs)
        if reason:
            kept[value.index] = reason
        else:
            free.append(value.index)
    # a reader at graph index r was preceded by the free values before r
    reader = _last_readers(facts, fixed)
    last = tuple(bisect.bisect_left(free, reader.get(i, i)) for i in free)
    inputs = tuple(
        (v.bytes, bisect.bisect_left(free, reader[v.index]))
        for v in facts.values
        if v.role == "input" and v.index in reader
    )
    sizes = tuple(facts.values[i].bytes for i in free)
    layers = tuple(block_of_path(facts.values[i].module) for i in free)
    return Forward(tuple(free), sizes, last, inputs, layers, kept)


def _last_readers(facts: Facts, fixed: Mapping[int, Action]) -> dict[int, int]:
    """By value, where it is read for the last time in forward, or by what must be recomputed there.

    What a hint or the contract has recomputed is computed again wherever it is read, and then its
    own inputs are read too.
    """
    last: dict[int, int] = {}
    for value in reversed(facts.forward):
        root = root_of(facts, value.index)
        at = value.index
        if fixed.get(root) == "recompute":
            at = max(at, last.get(root, at))
        for i in value.inputs:
            read = root_of(facts, i)
            base = facts.values[read].follows  # of a view of an input, which root_of stops at
            read = read if base is None else base
            last[read] = max(at, last.get(read, at))
    return last


def _reason_to_keep(value: Value, is_output: bool) -> str:
    if value.random or value.effectful or value.reads_mutated:
        return "cannot be recomputed"
    if value.collective and not value.parameter:
        return f"the {value.collective} of an activation is not sent twice"
    if value.op.startswith(_ROUTING) or value.captured_op.startswith(_ROUTING):
        return "routing must not change between forward and recompute"
    if is_output:
        return "an output of forward, alive anyway"
    return ""


def _cuts(forward: Forward, stage_bytes: int) -> list[int]:
    """Positions among the free values, ascending; a cut comes after its position."""
    n = len(forward.free)
    total = [0, *accumulate(forward.bytes)]
    edges = {p for p in range(n - 1) if forward.layers[p] != forward.layers[p + 1]}
    bounds = [-1, *sorted(edges), n - 1]
    large = [
        (before + 1, after)
        for before, after in pairwise(bounds)
        if total[after + 1] - total[before + 1] > stage_bytes
    ]
    forced = sorted({p for first, last in large for p in (first - 1, last)} - {-1, n - 1})
    alive = _alive(forward, large)
    cuts: list[int] = []
    start = 0
    while total[n] - total[start] > stage_bytes or (forced and start <= forced[-1]):
        # the furthest position whose stage fits, or one value alone
        end = max(bisect.bisect_right(total, total[start] + stage_bytes) - 2, start)
        at = bisect.bisect_left(forced, start)
        if at < len(forced) and forced[at] <= end:
            cut = forced[at]
        else:
            half = bisect.bisect_right(total, total[start] + stage_bytes // 2, start, end + 2) - 1
            half = min(half, end)
            cut = _least(alive, edges, half, end)
            early = _least(alive, edges, start, half - 1) if half > start else cut
            halves = alive[early] < alive[cut] and 2 * alive[early] <= alive[cut]
            if halves and total[early + 1] > total[start]:
                cut = early
        cuts.append(cut)
        start = cut + 1
    return cuts


def _alive(forward: Forward, large: list[tuple[int, int]]) -> list[int]:
    """Bytes alive across the cut after each position.

    In a large layer only its own values count: what entered it was kept by the cut before it.
    """
    n = len(forward.free)
    change, inside = [0] * (n + 1), [0] * (n + 1)
    end_of = {p: last for first, last in large for p in range(first, last + 1)}
    for position, (size, last) in enumerate(zip(forward.bytes, forward.last, strict=True)):
        change[position] += size
        # a last reader that is not free may come after free value `last - 1` and before `last`
        change[max(last, position)] -= size
        if position in end_of:
            inside[position] += size
            inside[max(min(last, end_of[position] + 1), position)] -= size
    for size, last in forward.inputs:
        change[0] += size
        change[last] -= size
    both = zip(accumulate(change), accumulate(inside), strict=True)
    return [own if p in end_of else everything for p, (everything, own) in enumerate(both)]


def _least(alive: list[int], edges: set[int], first: int, last: int) -> int:
    """Where ``alive[first : last + 1]`` is least; of equals an edge of a layer, then the latest."""
    return min(range(last, first - 1, -1), key=lambda p: (alive[p], p not in edges))


def auto_stage_bytes(
    facts: Facts,
    evaluate: Callable[[int | None], int],
    fixed: Mapping[int, Action] | None = None,
) -> int | None:
    """The stage size with the lowest predicted peak; of equal ones the larger, which saves less.

    Args:
        facts: the local graph.
        evaluate: the predicted peak in bytes under a stage size, or without stages (None).
        fixed: actions that higher origins decided, as for `stage_wishes`: their values are no part
            of a stage, so that sizes are tried for what is left.

    Returns:
        A number of bytes, or None where no stages at all give a peak below that of any size.
    """
    best, least = None, None
    for size in candidates(facts, fixed or {}):  # from large to small
        peak = evaluate(size)
        if least is None or peak < least:
            best, least = size, peak
    return best if least is not None and least <= evaluate(None) else None


def candidates(facts: Facts, fixed: Mapping[int, Action] | None = None) -> tuple[int, ...]:
    """Stage sizes to try, descending: sums of values that occur in the graph, so free of units.

    The whole; prefixes of about its half, quarter, and so on; and multiples of the largest layer.
    In a small graph every size at which some cut changes.
    """
    forward = free_values(facts, fixed or {})
    prefixes = list(accumulate(forward.bytes))
    if not prefixes or prefixes[-1] == 0:
        return ()
    whole = prefixes[-1]
    if len(forward.free) <= _SMALL:
        sums = {b - a for a, b in combinations([0, *prefixes], 2)}
        sizes = sums | {2 * s for s in sums}
    else:
        sizes = {whole}
        for k in range(1, _HALVINGS + 1):
            at = bisect.bisect_right(prefixes, whole >> k)
            if at:
                sizes.add(prefixes[at - 1])
        layers: dict[str, int] = {}
        for layer, size in zip(forward.layers, forward.bytes, strict=True):
            if layer:
                layers[layer] = layers.get(layer, 0) + size
        if layers:
            largest = max(layers.values())
            sizes.update(k * largest for k in _MULTIPLES if k <= len(layers))
    return tuple(sorted((s for s in sizes if 0 < s <= whole), reverse=True))
