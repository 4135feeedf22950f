"""Bounds on the bytes of one device: of parameters, and of all that training keeps for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ..capture.joint import JointGraph
from ..graph.devices import DeviceSpec
from .constraints import Constraints
from .formulation import Limit, Problem
from .groups import Draft, Settings

DEFAULT_SHARE = 0.5  # of the device's memory, for parameters and what goes with them
_WORTH = 0.05  # of the time of all computation: what the memory of a whole device is worth
_DEFAULT_COPIES = 2  # as AdamW holds
PARAMETERS, STATE = "parameter memory", "state memory"
DEFAULT_STATE = "state memory (the default)"


def limits_of(
    joint: JointGraph,
    draft: Draft,
    constraints: Constraints,
    smallest: Mapping[int, int],
    settings: Settings,
) -> tuple[Limit, ...]:
    """The bounds that the user set; where there are none, one that keeps half of the device's memory free.

    Args:
        smallest: per group the least bytes that any of its placements takes.
    """
    found = [_parameters(joint, draft, constraints, smallest, settings.mesh.size())]
    none_given = constraints.parameter_high is None and constraints.state_bytes is None
    if constraints.state_bytes is not None:
        sizes = state_sizes(joint, draft, constraints.state_copies)
        found.append(Limit(STATE, sizes, None, float(constraints.state_bytes)))
    elif none_given:
        sizes = state_sizes(joint, draft, _DEFAULT_COPIES)
        least = sum(min(s) for _, s in sizes)
        high = max(least, DEFAULT_SHARE * settings.device.memory_bytes)
        found.append(Limit(DEFAULT_STATE, sizes, None, high))
    return tuple(found)


def state_sizes(
    joint: JointGraph, draft: Draft, copies: int
) -> tuple[tuple[int, tuple[float, ...]], ...]:
    """Per option of each parameter the bytes of itself, its gradient and the optimizer's `copies` of it."""
    trained = {p.name for p in joint.results if p is not None and p.kind == "gradient"}
    found = []
    for group, node, count in _parameter_groups(joint, draft):
        each = count * (2 + copies if joint.placeholders[node.name].name in trained else 1)
        found.append((group, tuple(float(each * o.output_bytes) for o in draft.options[group])))
    return tuple(found)


def _parameter_groups(joint: JointGraph, draft: Draft) -> list[tuple[int, torch.fx.Node, int]]:
    return [
        (group, node, count)
        for group, (node, count) in enumerate(zip(draft.nodes, draft.counts, strict=True))
        if node is not None
        and node.op == "placeholder"
        and joint.placeholders[node.name].kind == "parameter"
    ]


def _parameters(
    joint: JointGraph,
    draft: Draft,
    constraints: Constraints,
    smallest: Mapping[int, int],
    devices: int,
) -> Limit:
    """Parameter bytes as fractions of all.

    The upper bound allows each parameter the least that it can take, where that is above its share:
    a bias of 3 elements on 8 devices cannot be cut in eight. A share that 8 devices cannot reach
    however well parameters are cut, a ninth, stays out of reach.
    """
    sizes, total, slack = [], 0, 0.0
    high, low = constraints.parameter_high, constraints.parameter_low
    for group, node, count in _parameter_groups(joint, draft):
        value = node.meta["val"]
        size = value.numel() * value.element_size()
        sizes.append((group, tuple(float(count * o.output_bytes) for o in draft.options[group])))
        total += count * size
        if high is not None:
            slack += count * max(0.0, smallest[group] - max(high, 1 / devices) * size)
    upper = None if high is None else high * total + slack
    lower = None if low is None else low * total
    return Limit(PARAMETERS, tuple(sizes), lower, upper)


def worth_s(problem: Problem, device: DeviceSpec) -> tuple[tuple[float, ...], ...]:
    """Seconds of each option with what its bytes are worth, where the user set no limit.

    Memory that is free lets less be recomputed and batches be larger. So parameters are sharded where
    that costs little, also while they would fit whole.
    """
    limit = next((x for x in problem.limits if x.name == DEFAULT_STATE), None)
    if limit is None:
        return problem.option_s
    pairs = zip(problem.options, problem.counts, strict=True)
    least_s = sum(n * min((o.compute_s for o in options), default=0.0) for options, n in pairs)
    per_byte_s = _WORTH * least_s / device.memory_bytes
    option_s = list(problem.option_s)
    for group, sizes in limit.sizes:
        each = [per_byte_s * held / problem.counts[group] for held in sizes]
        option_s[group] = tuple(s + more for s, more in zip(option_s[group], each, strict=True))
    return tuple(option_s)


def first_plan_notes(
    problem: Problem, chosen: Sequence[int], device: DeviceSpec
) -> tuple[str, ...]:
    """Which parameters are sharded, and why, where the user set no limit."""
    limit = next((x for x in problem.limits if x.name == DEFAULT_STATE), None)
    if limit is None or not limit.sizes:
        return ()
    whole = sum(max(sizes) for _, sizes in limit.sizes)
    held, memory = limit.held(chosen), float(device.memory_bytes)
    assert limit.high is not None
    what = f"parameters, gradients and the state of AdamW take {_gib(whole)} whole"
    if whole <= limit.high:
        why = (
            f"{what}, within half of the {_gib(memory)} of a device ({device.name}): parameters are sharded "
            f"where that costs little time (all of that memory is worth {_WORTH:.0%} of a step)"
        )
    elif limit.high <= DEFAULT_SHARE * memory:
        why = f"{what}, more than half of the {_gib(memory)} of a device ({device.name}): they are sharded"
    else:
        why = (
            f"{what}, and cut as far as can be still more than half of the {_gib(memory)} of a device "
            f"({device.name})"
        )
    return (
        f"no limit on memory was given: {why}; as planned they take {_gib(held)} on each device",
    )


def _gib(count: float) -> str:
    return f"{count / 2**30:.2f} GiB"
