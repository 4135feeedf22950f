"""From a joint graph and constraints to the cheapest `ShardingPlan`.

The search fixes what the user fixed (`ports`), asks `options` for what each operator can do, prices
moves with `costs`, and hands the integer program of `formulation` to the solver. See there for the
program.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh

from ..capture.fingerprint import fingerprint
from ..capture.joint import JointGraph
from ..errors import ConfigError
from ..graph.devices import DeviceSpec, Topology
from .build import Built, build_problem
from .conflict import why_infeasible
from .constraints import Constraints
from .formulation import Problem, evaluate
from .groups import Settings
from .limits import first_plan_notes
from .optimise import optimise
from .outcome import plan_of
from .plan import ShardingPlan

_SMALL = 50_000  # variables of a program without shared ones that is solved too
_Stage = Callable[[str], AbstractContextManager[None]]
_log = logging.getLogger("autop_ac")


def search(
    joint: JointGraph,
    mesh: DeviceMesh,
    constraints: Constraints,
    *,
    device: DeviceSpec,
    topology: Topology,
    reduce_dtype: torch.dtype | None = None,
    reshard_after_forward: bool = True,
    prefetch: bool = True,
    time_limit_s: float = 60.0,
    gap: float = 0.001,
    stage: _Stage = lambda name: nullcontext(),
) -> ShardingPlan:
    """The plan with the least predicted seconds of one step that meets the constraints.

    Args:
        joint: graph on global shapes.
        mesh: devices.
        constraints: see `Constraints`.
        device, topology: what the times are predicted for.
        reduce_dtype: dtype in which gradients of parameters are summed, where the graph casts them
            to it; None: in whichever is cheaper.
        reshard_after_forward: whether parameters are gathered a second time for backward.
        prefetch: whether collectives of parameters run beside computation, as far as there is any.
        time_limit_s: of the solver.
        gap: relative distance to the best plan at which the solver may stop.
        stage: is told what runs, by a context around it.

    Raises:
        ConfigError: a constraint does not fit the graph.
        InfeasibleError: no plan meets all constraints; the message names those in conflict.
        SolverError: the solver found no plan in time.
    """
    settings = Settings(
        mesh, device, topology, reduce_dtype, reshard_after_forward, prefetch=prefetch
    )
    return search_with(
        joint, constraints, settings, time_limit_s=time_limit_s, gap=gap, stage=stage
    )


def best_choice(
    joint: JointGraph,
    constraints: Constraints,
    settings: Settings,
    *,
    time_limit_s: float = 60.0,
    gap: float = 0.001,
    stage: _Stage = lambda name: nullcontext(),
) -> tuple[Built, tuple[int, ...], float] | None:
    """The program, its cheapest choice and the gap reached; None where no choice is possible.

    A model so small that its latencies count may gain by a plan that changes from layer to layer: where
    the program without shared variables is small, it is solved too, and taken where it is better.
    """
    with stage("options: what each operator can do"):
        built = build_problem(joint, constraints, settings)
    with stage("solve: which of it costs least"):
        found = optimise(built.problem, time_limit_s=time_limit_s, gap=gap)
    if found is None:
        return None
    chosen, reached = found
    seconds = evaluate(built.problem, chosen)
    if settings.fold and len(built.problem.names) < sum(built.problem.counts):
        if _unfolded_size(built.problem) <= _SMALL:
            apart = build_problem(joint, constraints, replace(settings, fold=False))
            other = optimise(apart.problem, time_limit_s=time_limit_s, gap=gap)
            if other is not None and evaluate(apart.problem, other[0]) < seconds * (1 - gap):
                return apart, *other
    return built, chosen, reached


def _unfolded_size(problem: Problem) -> int:
    """Variables without shared ones, counted too high where values share an edge."""
    moves = [int(np.isfinite(e.seconds).sum()) for e in problem.edges]
    options = sum(n * len(o) for n, o in zip(problem.counts, problem.options, strict=True))
    return options + sum(v.count * sum(moves[e] for e in v.edges) for v in problem.values)


def search_with(
    joint: JointGraph,
    constraints: Constraints,
    settings: Settings,
    *,
    time_limit_s: float = 60.0,
    gap: float = 0.001,
    stage: _Stage = lambda name: nullcontext(),
) -> ShardingPlan:
    """`search`, its settings in one value."""
    mesh, topology = settings.mesh, settings.topology
    if len(topology.link_bandwidth) != mesh.ndim:
        raise ConfigError(
            f"topology describes {len(topology.link_bandwidth)} axes, the mesh has {mesh.ndim} of "
            f"shape {tuple(mesh.shape)}"
        )
    started = time.monotonic()
    best = best_choice(
        joint, constraints, settings, time_limit_s=time_limit_s, gap=gap, stage=stage
    )
    if best is None:
        raise why_infeasible(joint, constraints, settings, time_limit_s)
    built, chosen, reached = best
    _log.info("sharding search: %d groups, %.2f s", len(chosen), time.monotonic() - started)
    plan = plan_of(joint, mesh, built, chosen, reached)
    notes = (*plan.notes, *first_plan_notes(built.problem, chosen, settings.device))
    return replace(plan, notes=notes, fingerprint=fingerprint(joint))
