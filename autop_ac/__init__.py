"""autop_ac: automatic parallelism with activation checkpointing under your control."""

from .annotate import ac_region, checkpoint_name, with_sharding_constraint
from .api import AutoParallel, auto_parallel
from .backend import ACBackend, autoparallel_backend, backend
from .capture.calling import ForwardInputs
from .config import ACConfig
from .errors import (
    AutopACError,
    CaptureError,
    ConfigError,
    HintError,
    InfeasibleError,
    PartitionError,
    PlanFileError,
    SolverError,
    UsageError,
)
from .graph.devices import DeviceSpec, Topology
from .policies import ATTENTION, COLLECTIVES, MATMUL, Rule, every
from .report.curve import ParetoCurve
from .report.estimate import Estimate
from .report.explain import Explanation
from .report.plan_table import plan_table
from .report.values import ACReport
from .runtime.launch import WorkerError, fake_mesh, launch
from .runtime.memory import measure_memory
from .sharding.plan import ShardingPlan

__version__ = "0.1.0.dev0"

__all__ = [
    "ACBackend",
    "autoparallel_backend",
    "backend",
    "ATTENTION",
    "COLLECTIVES",
    "MATMUL",
    "ACConfig",
    "ACReport",
    "AutoParallel",
    "AutopACError",
    "CaptureError",
    "ConfigError",
    "DeviceSpec",
    "Estimate",
    "Explanation",
    "ForwardInputs",
    "HintError",
    "InfeasibleError",
    "ParetoCurve",
    "PartitionError",
    "PlanFileError",
    "Rule",
    "ShardingPlan",
    "SolverError",
    "Topology",
    "UsageError",
    "WorkerError",
    "ac_region",
    "auto_parallel",
    "checkpoint_name",
    "every",
    "fake_mesh",
    "launch",
    "measure_memory",
    "plan_table",
    "with_sharding_constraint",
]
