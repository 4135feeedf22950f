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

import torch
from torch.distributed.device_mesh import DeviceMesh

from ..capture.joint import JointGraph
from ..errors import ConfigError
from ..graph.devices import DeviceSpec, Topology
from .build import build_problem
from .conflict import why_infeasible
from .constraints import Constraints
from .formulation import evaluate
from .groups import Settings
from .optimise import optimise
from .outcome import plan_of
from .plan import ShardingPlan

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
    time_limit_s: float = 60.0,
    gap: float = 0.001,
    stage: Callable[[str], AbstractContextManager[None]] = lambda name: nullcontext(),
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
        time_limit_s: of the solver.
        gap: relative distance to the best plan at which the solver may stop.
        stage: is told what runs, by a context around it.

    Raises:
        ConfigError: a constraint does not fit the graph.
        InfeasibleError: no plan meets all constraints; the message names those in conflict.
        SolverError: the solver found no plan in time.
    """
    if len(topology.link_bandwidth) != mesh.ndim:
        raise ConfigError(
            f"topology describes {len(topology.link_bandwidth)} axes, the mesh has {mesh.ndim} of "
            f"shape {tuple(mesh.shape)}"
        )
    started = time.monotonic()
    settings = Settings(mesh, device, topology, reduce_dtype, reshard_after_forward)
    with stage("options: what each operator can do"):
        built = build_problem(joint, constraints, settings)
    with stage("solve: which of it costs least"):
        found = optimise(built.problem, time_limit_s=time_limit_s, gap=gap)
    if found is None:
        raise why_infeasible(joint, constraints, settings, time_limit_s)
    chosen, reached = found
    evaluate(built.problem, chosen)
    _log.info("sharding search: %d groups, %.2f s", len(chosen), time.monotonic() - started)
    return plan_of(joint, mesh, built, chosen, reached)
