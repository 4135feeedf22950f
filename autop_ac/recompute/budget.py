"""A memory budget: least recompute time with the predicted peak inside it.

Given facts, actions that higher origins fixed, and a budget B, choose for each free root v whether it
is saved, x_v in {0, 1}, so that

    minimise    sum of t_i over the forward values i that backward computes again under x
    subject to  max over all steps of forward and backward of the bytes alive under x <= B

with the order of steps and the bytes alive as `graph.liveness` has them; `evaluate` gives both sides,
`relax` the linear program and the bound, `pareto` the search. In general the problem is NP-hard (it
holds a knapsack). Compare Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016, for the
trade, and Jain et al., "Checkmate", MLSys 2020, for an integer program over all steps, which this is not:
the order of recomputation is given here, late and once, and only steps near the peak have rows.

Preferences bind as long as the budget can be met with them. Where it cannot, they are given up in
groups of one reason: first those that save, the group of most bytes first, then those that recompute;
what turns out not to have been needed is taken back, in the opposite order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from ..errors import InfeasibleError
from ..graph.facts import Facts
from .evaluate import Evaluator
from .layers import borders
from .pareto import Curve, ParetoPoint
from .plan import Action, BudgetResult, Origin, Wish
from .stages import candidates, free_values, stage_wishes


def budget_wishes(
    facts: Facts,
    budget_bytes: int,
    fixed: Mapping[int, Action],
    preferred: Mapping[int, Wish] | None = None,
    keep: Mapping[int, str] | None = None,
) -> tuple[Mapping[int, Wish], BudgetResult]:
    """What a budget asks of each value that decides for itself.

    Args:
        facts: the local graph.
        budget_bytes: the most that the predicted peak may be.
        fixed: actions that bind, by root.
        preferred: preferences by root, not in `fixed`; honoured where the budget allows.
        keep: roots that are kept in any case, with the reason; None for those that stages keep
            (collectives of activations, routing, outputs of forward, random draws).

    Returns:
        A wish by root for all that is not in `fixed` (none for honoured preferences), and the outcome.

    Raises:
        InfeasibleError: no choice is within the budget; it names the smallest peak.
    """
    preferred = {i: w for i, w in (preferred or {}).items() if i not in fixed}
    curve, kept, given_up = _curve_within(facts, budget_bytes, fixed, preferred, keep)
    point = curve.at(budget_bytes)
    if point is None:
        raise _infeasible(budget_bytes, curve)
    bound = curve.bound_s(point, budget_bytes)
    gap = 1.0 - bound / point.recompute_time_s if point.recompute_time_s else 0.0
    result = BudgetResult(
        budget_bytes=budget_bytes,
        peak_bytes=point.peak_bytes,
        recompute_time_s=point.recompute_time_s,
        lower_bound_s=bound,
        gap=gap,
        exact=curve.exact or gap == 0.0,
        given_up=given_up,
        notes=_unlike_layers(curve, point),
    )
    chosen = set(point.roots)
    wishes = {i: Wish("save", Origin.AUTO, reason) for i, reason in kept.items()}
    for i in curve.ev.free:
        wishes[i] = (
            Wish("save", Origin.AUTO, "kept, the memory budget has room for it")
            if i in chosen
            else Wish("recompute", Origin.AUTO, "recomputed to stay within the memory budget")
        )
    return dict(sorted(wishes.items())), result


def pareto(
    facts: Facts,
    fixed: Mapping[int, Action],
    keep: Mapping[int, str] | None = None,
    depth: int = 4,
) -> tuple[ParetoPoint, ...]:
    """The curve of peak against recompute time, from least peak to least recomputation.

    Args:
        facts: the local graph.
        fixed: actions that bind, by root, honoured preferences among them.
        keep: as for `budget_wishes`.
        depth: how often each part of the curve is halved; no matter where it is exact.

    Returns:
        Points ascending in peak and strictly descending in time.
    """
    return budget_curve(facts, fixed, keep)[0].points(depth)


def preference_note(facts: Facts, preferred: Mapping[int, Wish], given_up: tuple[int, ...]) -> str:
    """What to tell the user about preferences that were set aside."""
    reasons = sorted({preferred[i].reason for i in given_up})
    return (
        f"{len(given_up)} of {len(preferred)} preferences are set aside, since the memory limit cannot "
        f"be met with them ({'; '.join(reasons)}; such as {facts.values[given_up[0]].name}). Raise "
        "the limit, or leave out prefer=True to have them bind"
    )


def budget_curve(
    facts: Facts, fixed: Mapping[int, Action], keep: Mapping[int, str] | None = None
) -> tuple[Curve, dict[int, str]]:
    """The curve that budgets are answered from, and the roots kept in any case with the reason."""
    forward = free_values(facts, fixed)
    kept = dict(forward.kept)
    free = set(forward.free)
    if keep is not None:
        free |= kept.keys()
        kept = {i: reason for i, reason in keep.items() if i in free}
        free -= kept.keys()
    decided: dict[int, Action] = {**fixed, **dict.fromkeys(kept, "save")}
    evaluator = Evaluator(facts, decided, free)
    # after these no budget does worse than stages, or than checkpointing each layer or group of layers
    staged = (stage_wishes(facts, size, fixed)[0] for size in candidates(facts, fixed))
    seeds = [evaluator.mask([i for i, w in s.items() if w.action == "save"]) for s in staged]
    seeds += [evaluator.mask(borders(facts, evaluator.free, every)) for every in (1, 2, 3, 4, 6, 8)]
    return Curve(evaluator, seeds), kept


def _curve_within(
    facts: Facts,
    budget_bytes: int,
    fixed: Mapping[int, Action],
    preferred: Mapping[int, Wish],
    keep: Mapping[int, str] | None,
) -> tuple[Curve, dict[int, str], tuple[int, ...]]:
    """A curve that reaches the budget with as many preferences as that allows."""
    groups: dict[tuple[Action, str], list[int]] = defaultdict(list)
    for i, wish in sorted(preferred.items()):
        groups[wish.action, wish.reason].append(i)

    def weight(group: list[int]) -> tuple[bool, int, int]:
        saves = preferred[group[0]].action == "save"
        return not saves, -sum(facts.values[i].bytes for i in group), group[0]

    order = sorted(groups.values(), key=weight)

    def curve_without(dropped: list[list[int]]) -> tuple[Curve, dict[int, str]]:
        out = {i for group in dropped for i in group}
        held = {i: w.action for i, w in preferred.items() if i not in out}
        return budget_curve(facts, {**fixed, **held}, keep)

    dropped: list[list[int]] = []
    curve, kept = curve_without(dropped)
    for group in order:
        if curve.smallest_bytes <= budget_bytes:
            break
        dropped.append(group)
        curve, kept = curve_without(dropped)
    if curve.smallest_bytes > budget_bytes:
        raise _infeasible(budget_bytes, curve)
    for group in dropped[-2::-1]:  # without the last it was infeasible
        fewer = [g for g in dropped if g is not group]
        again, kept_again = curve_without(fewer)
        if again.smallest_bytes <= budget_bytes:
            dropped, curve, kept = fewer, again, kept_again
    return curve, kept, tuple(sorted(i for group in dropped for i in group))


def _infeasible(budget_bytes: int, curve: Curve) -> InfeasibleError:
    smallest = curve.smallest_bytes
    found = "the smallest peak that can be reached" if curve.exact else "the smallest peak found"
    return InfeasibleError(
        f"memory_budget of {budget_bytes} bytes ({_size(budget_bytes)}) cannot be met: {found} is "
        f"{smallest} bytes ({_size(smallest)}), of which {_size(curve.ev.base)} are parameters, inputs "
        "and optimizer state. Give a budget of at least that, drop hints that save, or shard over more "
        "devices",
        budget_bytes=budget_bytes,
        smallest_bytes=smallest,
    )


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.2f} MiB"


def _unlike_layers(curve: Curve, point: ParetoPoint) -> tuple[str, ...]:
    """Where equal layers are not decided alike."""
    notes = []
    for layers in curve.layers:
        runs: list[tuple[bytes, list[str]]] = []
        for layer in layers:
            part = bytes(point.mask[k] for k in layer.slots)
            if not runs or runs[-1][0] != part:
                runs.append((part, []))
            runs[-1][1].append(layer.name)
        if len(runs) > 1:
            told = ", ".join(
                f"{names[0]}{f' to {names[-1]}' if len(names) > 1 else ''} keep {sum(part)} values"
                for part, names in runs
            )
            notes.append(
                f"the budget falls between two decisions for {len(layers)} equal layers: {told}"
            )
    return tuple(notes)
