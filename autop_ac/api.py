"""`AutoParallel`: holds settings and results, and calls the stages in order; no algorithm is here."""

from __future__ import annotations

import dataclasses
import difflib
import logging
import operator
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from types import TracebackType
from typing import Any, Literal, Self

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor.placement_types import Placement

from ._torch_trace import artifact
from .build import Settings
from .capture.fingerprint import fingerprint
from .capture.joint import JointGraph
from .capture.trace import Request, capture, request
from .config import OPTIMIZER_COPIES, ACConfig, CommConfig, CompileConfig, ac_config, parse_bytes
from .errors import ConfigError, UsageError
from .graph.devices import DeviceSpec, Topology, described_gpu, find_device
from .progress import progress
from .recompute.hints import ResolvedHints, resolve_hints
from .recompute.pareto import ParetoPoint
from .recompute.pipeline import Recompute
from .report.build import ACReport, build_report
from .report.estimate import Estimate
from .report.explain import Explanation
from .report.plan_table import plan_table
from .runtime.parallel import Modes, Outputs, Runner, Runners, make_parallel
from .sharding.constraints import Constraints
from .sharding.plan import ShardingPlan

log = logging.getLogger("autop_ac")

PlacementsPerTensor = Sequence[Sequence[Placement] | None]


class AutoParallel:
    """Shard a single-device module over a mesh, with activation checkpointing under your control.

    Use it as a context manager::

        with AutoParallel(model, input_fn, mesh).configure_ac(stage_size="auto") as ap:
            plan = ap.optimize_placement()
            parallel_model = ap.apply_placement(plan)
        print(ap.ac_report)

    Args:
        model: a single-device module, with real weights or on the meta device; left as it is.
        input_fn: makes the inputs in global shapes: a tensor, a tuple, or a `ForwardInputs`.
        mesh: the devices, one or more axes.
        mp_policy: dtypes, as FSDP2 takes them.
        reshard_after_forward: gather parameters again for backward (True) or keep them gathered.
        dynamic: reserved for varying batch sizes; True is refused at present.
        loss_fn: ``loss_fn(output)`` or ``loss_fn(output, target)`` with the last input as target;
            the parallel module then gives the loss of the whole batch.

    Raises:
        ConfigError: a setting is out of range.
        CaptureError: on entering the block, where the model cannot be traced.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        input_fn: Callable[[], Any],
        mesh: DeviceMesh,
        mp_policy: MixedPrecisionPolicy | None = None,
        *,
        reshard_after_forward: bool = True,
        dynamic: bool = False,
        loss_fn: Callable[..., Any] | None = None,
    ) -> None:
        if not isinstance(model, torch.nn.Module):
            raise ConfigError(f"model is a {type(model).__name__}; give an nn.Module")
        if not callable(input_fn):
            raise ConfigError(
                f"input_fn is a {type(input_fn).__name__}; give a function of nothing"
            )
        if not isinstance(mesh, DeviceMesh):
            raise ConfigError(f"mesh is a {type(mesh).__name__}; give a DeviceMesh")
        if mp_policy is not None and not isinstance(mp_policy, MixedPrecisionPolicy):
            raise ConfigError(
                f"mp_policy is {mp_policy!r}; give torch.distributed.fsdp.MixedPrecisionPolicy("
                "param_dtype=..., reduce_dtype=...)"
            )
        if dynamic:
            raise ConfigError("dynamic=True is not available yet; leave it False")
        self._model = model
        self._input_fn = input_fn
        self._mesh = mesh
        self._mp_policy = mp_policy
        self._reshard = reshard_after_forward
        self._loss_fn = loss_fn
        self._ac = ACConfig()
        self._compile = CompileConfig()
        self._comm = CommConfig()
        self._device: DeviceSpec | None = None  # the one at hand
        self._topology: Topology | None = None
        self._stage = progress()
        self._constraints = Constraints()
        self._state: Literal["new", "open", "closed"] = "new"
        self._request: Request | None = None
        self._joint: JointGraph | None = None
        self._hints: ResolvedHints | None = None
        self._plan: ShardingPlan | None = None
        self._report: Callable[[], ACReport] | None = None
        self._applied = False  # whether that report is of a module that was made
        self.sharding_optimizer = NodeConstraints(self)

    # settings: each call replaces what the earlier one set

    def configure_ac(self, config: ACConfig | bool | None = None, /, **settings: Any) -> Self:
        """Set activation checkpointing by an `ACConfig`, or by its fields as keywords."""
        self._ac = ac_config(config, settings)
        return self._changed()

    def configure_compile(self, backend: Literal["eager", "inductor"] = "inductor") -> Self:
        """Run the graphs compiled by Inductor (the default), or node by node ("eager")."""
        self._compile = CompileConfig(backend=backend)
        return self._changed()

    def configure_comm(
        self,
        *,
        all_gather_bucket: str | int | None = "1 MiB",
        reduce_scatter_bucket: str | int | None = "1 MiB",
        prefetch: bool = False,
    ) -> Self:
        """Set how parameters are gathered and their gradients scattered.

        Args:
            all_gather_bucket: parameters of one block are gathered together while they sum to at most
                this many bytes; a larger one is gathered alone, and so is each where None.
            reduce_scatter_bucket: the same for the reduce-scatters of gradients.
            prefetch: start gathers ahead of their use, with at most `all_gather_bucket` bytes on their
                way, and wait for reduce-scatters later.
        """
        self._comm = CommConfig(all_gather_bucket, reduce_scatter_bucket, prefetch)
        return self._changed()

    def configure_device(
        self, device: str | DeviceSpec | None = None, topology: Topology | None = None
    ) -> Self:
        """Describe the device, by name or by `DeviceSpec`, and the links between devices."""
        if device is not None:
            self._device = find_device(device)
        if topology is not None and len(topology.link_bandwidth) != self._mesh.ndim:
            raise ConfigError(
                f"topology describes {len(topology.link_bandwidth)} axes; the mesh has "
                f"{self._mesh.ndim}, give one number for each"
            )
        self._topology = topology
        return self._changed()

    def _changed(self) -> Self:
        """A preview is of the settings of this moment; the report on a module that was made stays."""
        if not self._applied:
            self._report = None
        return self

    def configure_progress(self, verbose: bool = True) -> Self:
        """Tell what runs: a display on a terminal and in a notebook, else lines of the logger "autop_ac".

        Args:
            verbose: True is the default; False tells nothing.
        """
        if not isinstance(verbose, bool):
            raise ConfigError(
                f"verbose={verbose!r}: allowed are True and False; False tells nothing"
            )
        self._stage = progress(verbose)
        return self

    # the block

    def __enter__(self) -> Self:
        if self._state != "new":
            raise UsageError(
                "this AutoParallel was entered before; make a new one for a new capture"
            )
        _check_mesh(self._mesh)
        self._state = "closed"  # stays so if the capture fails
        with self._stage("capture: forward and backward in one graph"):
            self._request = request(
                self._model,
                self._input_fn,
                self._mesh.device_type,
                mp_policy=self._mp_policy,
                loss_fn=self._loss_fn,
                mesh=self._mesh,
            )
            self._joint = capture(self._request)
        self._hints = resolve_hints(
            self._joint.module, self._joint.placeholders, self._joint.module_prefix
        )
        self._state = "open"
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._state = "closed"

    def _open_joint(self, call: str) -> JointGraph:
        if self._state == "new":
            raise UsageError(f"{call} needs the captured graph: call it inside the `with` block")
        if self._joint is None:
            raise UsageError(f"{call}: the capture failed, so there is no graph; make a new object")
        return self._joint

    def _constrain(self, call: str, **changes: Any) -> None:
        self._open_joint(call)
        if self._state == "closed":
            raise UsageError(f"{call} came after the `with` block ended; constrain before that")
        self._constraints = dataclasses.replace(self._constraints, **changes)

    def add_input_constraints(self, placements: PlacementsPerTensor | None) -> None:
        """Fix the placements of the inputs: one entry per tensor input, None leaves it free."""
        self._constrain("add_input_constraints", inputs=self._per_tensor(placements, "input"))

    def add_output_constraints(self, placements: PlacementsPerTensor | None) -> None:
        """Fix the placements of the outputs: one entry per tensor output, None leaves it free."""
        self._constrain("add_output_constraints", outputs=self._per_tensor(placements, "output"))

    def add_parameter_memory_constraint(
        self, low: float | None = None, high: float | None = None
    ) -> None:
        """Bound the parameter bytes of one device, as fractions of all parameter bytes.

        Args:
            low: least fraction, None for 0.  high: most, None for ``1 / mesh.size()``.
        """
        high = 1 / self._mesh.size() if high is None else high
        low = 0.0 if low is None else low
        if not 0 <= low <= high <= 1:
            raise ConfigError(
                f"parameter memory between low={low} and high={high} of all bytes: give "
                "0 <= low <= high <= 1"
            )
        self._constrain("add_parameter_memory_constraint", parameter_low=low, parameter_high=high)

    def add_state_memory_constraint(
        self, limit: str | int, optimizer: str | None = "adamw"
    ) -> None:
        """Bound the bytes of parameters, gradients and optimizer state together, on one device.

        Args:
            limit: ``"40 GiB"``, or an int of bytes; rounded down.
            optimizer: as in `ACConfig`; None for one without state.
        """
        limit_bytes = parse_bytes(limit, name="limit", round_down=True, off="no call")
        if optimizer is not None and optimizer not in OPTIMIZER_COPIES:
            raise ConfigError(
                f"optimizer={optimizer!r}: allowed are {', '.join(OPTIMIZER_COPIES)}; None for one without "
                "state"
            )
        copies = 0 if optimizer is None else OPTIMIZER_COPIES[optimizer]
        self._constrain("add_state_memory_constraint", state_bytes=limit_bytes, state_copies=copies)

    def _per_tensor(self, placements: PlacementsPerTensor | None, kind: str) -> Any:
        joint = self._open_joint(f"add_{kind}_constraints")
        if placements is None:
            return None
        ports = joint.placeholders.values() if kind == "input" else joint.results
        count = sum(p is not None and p.kind == kind for p in ports)
        if len(placements) != count:
            raise ConfigError(
                f"{len(placements)} {kind} constraints for {count} {kind} tensors: give one tuple "
                "of placements (or None) for each"
            )
        for i, entry in enumerate(placements):
            if entry is None:
                continue
            if not isinstance(entry, Iterable) or isinstance(entry, Placement):
                raise ConfigError(f"{kind} constraint {i} is {entry!r}; give a tuple of placements")
            if len(tuple(entry)) != self._mesh.ndim:
                raise ConfigError(
                    f"{kind} constraint {i} is {tuple(entry)}; the mesh has {self._mesh.ndim} axes, "
                    "give one placement for each"
                )
            if not all(isinstance(p, Placement) for p in entry):
                raise ConfigError(f"{kind} constraint {i} is {tuple(entry)}, not all placements")
        return tuple(None if e is None else tuple(e) for e in placements)

    def optimize_placement(self, verbose: bool = False) -> ShardingPlan:
        """Search the placement of every tensor that takes least time within the constraints.

        Args:
            verbose: log the plan, as a table, at level INFO of the logger "autop_ac" (else DEBUG), and
                what sharding parameters along each mesh axis saves, for which the search runs once more per axis.

        Raises:
            InfeasibleError: no plan satisfies the constraints; they are named.
        """
        joint = self._open_joint("optimize_placement")
        settings, constraints = self._settings(), self._constraints
        plan = settings.search(joint, constraints)
        plan = dataclasses.replace(plan, explainer=settings.explainer(joint, constraints))
        log.log(logging.INFO if verbose else logging.DEBUG, "%s", plan_table(plan))
        if verbose and log.isEnabledFor(logging.INFO):
            log.info("%s", plan.explain())
        artifact("sharding_plan", lambda: plan_table(plan))
        self._plan, self._report, self._applied = plan, None, False
        return plan

    def _settings(self, outputs: Outputs = "local") -> Settings:
        topology = self._topology or Topology.from_mesh_shape(tuple(self._mesh.shape))
        device = self._device
        if device is None:
            device = find_device("cpu") if self._mesh.device_type == "cpu" else _this_gpu()
        return Settings(
            self._mesh, self._ac, self._compile, device, topology,
            self._mp_policy, self._reshard, outputs, self._stage, self._comm,
        )  # fmt: skip

    def _planned(self, call: str, plan: ShardingPlan) -> JointGraph:
        """The captured graph, after a check that the plan is for it and for this mesh."""
        if not isinstance(plan, ShardingPlan):
            raise UsageError(
                f"{call} takes the plan of optimize_placement, not {type(plan).__name__}"
            )
        joint = self._open_joint(call)
        if plan.fingerprint and plan.fingerprint != fingerprint(joint):
            raise UsageError(
                "the plan is for another model, for inputs of other shapes or for other settings: its graph's "
                f"fingerprint is {plan.fingerprint[:12]}, and this one's {fingerprint(joint)[:12]}. Take "
                "one from optimize_placement of this object"
            )
        computed = {
            n.name
            for n in joint.module.graph.nodes
            if n.target is not operator.getitem
            # the inner graph of a higher-order operator has no placement
            and not (
                n.op == "get_attr"
                and isinstance(getattr(joint.module, str(n.target), None), torch.nn.Module)
            )
        }
        if missing := sorted(computed - set(plan.choices)):
            raise UsageError(
                f"the plan is for another model: it has no placement for {len(missing)} nodes of this "
                f"one, such as {missing[0]}. Take one from optimize_placement of this object"
            )
        if plan.mesh_shape != tuple(self._mesh.shape):
            raise UsageError(f"the plan is for mesh {plan.mesh_shape}, not {self._mesh.shape}")
        return joint

    def _reported(self, recompute: Recompute, plan: ShardingPlan) -> Callable[[], ACReport]:
        """The report, made when it is asked for."""
        assert self._hints is not None
        names: dict[str, tuple[str, ...]] = {}
        for entry in self._hints.catalog:
            for name in entry.names:
                names[name] = (*names.get(name, ()), entry.name)
        device = self._settings().device
        report = cache(lambda: build_report(recompute, plan, device=device, names=names))
        artifact("report", lambda: report().to_json(), "json")
        return report

    def apply_placement(self, plan: ShardingPlan, *, outputs: Outputs = "local") -> torch.nn.Module:
        """Make the parallel module of a plan; may be called again with other settings.

        Args:
            plan: from `optimize_placement` of this object.
            outputs: "local" gives each rank its part, "dtensor" gives DTensors.
        """
        if outputs not in ("local", "dtensor"):
            raise ConfigError(f'outputs={outputs!r}: give "local" or "dtensor"')
        joint = self._planned("apply_placement", plan)
        assert self._hints is not None and self._request is not None
        settings = self._settings(outputs)
        recompute, runner = settings.lower(joint, self._hints, plan)
        self._plan, self._report, self._applied = plan, self._reported(recompute, plan), True
        for note in recompute.plan.notes:
            warnings.warn(note, UserWarning, stacklevel=2)
        wanted = self._request

        def in_modes(modes: Modes) -> Runner:
            return settings.lower_in_modes(wanted, joint, plan, modes)

        runners = Runners(wanted.model, runner, in_modes)
        return make_parallel(self._model, plan, self._mesh, runners)

    def parallelize(
        self, inputs: Any = None, outputs: Any = None, *, parameter_memory: float | None = None
    ) -> torch.nn.Module:
        """The whole way in one call: capture, constraints, search, application.

        Args:
            inputs: as for `add_input_constraints`.
            outputs: as for `add_output_constraints`, or "dtensor" to get DTensors.
            parameter_memory: as `high` of `add_parameter_memory_constraint`; None for no bound.
        """
        if isinstance(outputs, str) and outputs not in ("local", "dtensor"):
            raise ConfigError(
                f'outputs={outputs!r}: give placements of each output, "local" or "dtensor"'
            )
        handed: Outputs = "dtensor" if outputs == "dtensor" else "local"
        with self:
            if inputs is not None:
                self.add_input_constraints(inputs)
            if outputs is not None and not isinstance(outputs, str):
                self.add_output_constraints(outputs)
            if parameter_memory is not None:
                self.add_parameter_memory_constraint(0.0, parameter_memory)
            return self.apply_placement(self.optimize_placement(), outputs=handed)

    def preview(self, plan: ShardingPlan | None = None) -> ACReport:
        """The report on a plan under the settings of this moment, without compiling or running anything.

        With several processes, call it on all of them.

        Args:
            plan: from `optimize_placement` of this object; None for the one found or applied last.

        Raises:
            InfeasibleError: the memory budget cannot be met.
        """
        plan = self._plan if plan is None else plan
        if plan is None:
            raise UsageError("preview: there is no plan yet: call optimize_placement first")
        joint = self._planned("preview", plan)
        assert self._hints is not None
        recompute = self._settings().recompute(joint, self._hints, plan)
        self._plan, self._report, self._applied = plan, self._reported(recompute, plan), False
        return self._report()

    @property
    def ac_report(self) -> ACReport:
        """What is saved and recomputed, why, and what it costs.

        Of the plan that was applied, or previewed, last; after `optimize_placement` alone, its `preview`.
        """
        if self._report is not None:
            return self._report()
        if self._plan is None:
            raise UsageError(
                "there is no report yet: call apply_placement first, or optimize_placement for a "
                "prediction alone"
            )
        report = self.preview()  # whose notes are easily overlooked behind an estimate or an answer
        for note in report.basis.plan.notes:
            warnings.warn(note, UserWarning, stacklevel=2)
        return report

    def estimate(self, optimizer: str | None = None) -> Estimate:
        """Bytes of one device at the predicted peak and who holds them, seconds of a step, and whether
        it fits the described device; after `optimize_placement`.

        Args:
            optimizer: counts the state of this one, ``"adamw"`` and others as in `ACConfig`; None for
                the state that the settings name.
        """
        return self.ac_report.estimate(optimizer)

    def explain(self, asked: str) -> Explanation:
        """What is saved and recomputed of a module, a tensor or a parameter, why, and what it costs.

        Args:
            asked: a module path or a glob of some (``"layers.3.attention"``), a tensor's name in the graph
                or by `checkpoint_name`, or a parameter's name.

        Raises:
            UsageError: nothing is called so; the nearest names are told.
        """
        return self.ac_report.explain(asked)

    def pareto(self, depth: int = 4) -> tuple[ParetoPoint, ...]:
        """The curve of predicted peak against recompute time; after `optimize_placement`.

        What binds (hints, rules, the all-gather contract) holds in every point; what stages or a budget
        decided is free. To run a point, apply the plan again with the settings as they were and its
        peak as budget: ``dataclasses.replace(config, stage_size="auto", memory_budget=point.peak_bytes)``.

        Args:
            depth: how often each part of the curve is halved; more takes longer.

        Returns:
            Points of growing peak (bytes on one device) and falling recompute time (seconds).
        """
        return self.ac_report.pareto(depth)


class NodeConstraints:
    """Constraints on nodes of the captured graph and on modules (``ap.sharding_optimizer``)."""

    def __init__(self, owner: AutoParallel) -> None:
        self._owner = owner

    def add_node_constraint(self, node: Any, placement: Sequence[Placement]) -> None:
        """Fix the placement of what a node gives.

        Args:
            node: an FX node of the captured graph, its name, or a parameter's name.
            placement: one placement per mesh axis.
        """
        owner = self._owner
        joint = owner._open_joint("add_node_constraint")
        name = node if isinstance(node, str) else node.name
        known = {n.name for n in joint.module.graph.nodes}
        known |= {p.name for p in joint.placeholders.values() if p.kind == "parameter"}
        if name not in known:
            nearest = difflib.get_close_matches(name, known, n=1)
            raise ConfigError(
                f"no node or parameter {name!r} in the captured graph; nearest: {nearest}"
            )
        given = self._per_axis("node", placement)
        nodes = {**owner._constraints.nodes, name: given}
        owner._constrain("add_node_constraint", nodes=nodes)

    def add_module_constraint(self, modules: str, placement: Sequence[Placement]) -> None:
        """Fix the placement of what modules hand to others in forward.

        Args:
            modules: a module path or a glob on paths, ``"layers.*.attention"``.
            placement: one placement per mesh axis.
        """
        owner = self._owner
        given = self._per_axis("module", placement)
        held = {**owner._constraints.modules, modules: given}
        owner._constrain("add_module_constraint", modules=held)

    def _per_axis(self, kind: str, placement: Sequence[Placement]) -> tuple[Placement, ...]:
        axes = self._owner._mesh.ndim
        given = (placement,) if isinstance(placement, Placement) else tuple(placement)
        if len(given) != axes or not all(isinstance(p, Placement) for p in given):
            raise ConfigError(
                f"{kind} constraint {placement!r}: the mesh has {axes} axes, give one placement for each"
            )
        return given


def _check_mesh(mesh: DeviceMesh) -> None:
    # torch ends the process where a fake tensor is on a device that its build does not know
    if mesh.device_type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "the mesh is one of cuda devices, and torch sees none here: plan on "
            'autop_ac.fake_mesh(...), of cpu, and describe the device by configure_device("H100")'
        )
    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 0
    if mesh.size() > world:
        raise ConfigError(
            f"the mesh has {mesh.size()} devices, the process group {world} processes: start one "
            "process per device (torchrun or autop_ac.launch), or plan on autop_ac.fake_mesh"
        )


def _this_gpu() -> DeviceSpec:
    if not torch.cuda.is_available():
        return find_device("H100")
    return described_gpu(torch.cuda.get_device_name())


def auto_parallel(
    model: torch.nn.Module,
    mesh: DeviceMesh,
    sample_inputs: Any,
    out_shardings: Any = None,
    *,
    mp_policy: MixedPrecisionPolicy | None = None,
    parameter_memory_budget: tuple[float | None, float | None] | None = None,
    dynamic: bool = False,
    ac: ACConfig | None = None,
) -> torch.nn.Module:
    """`AutoParallel` in one call, as a function.

    Args:
        sample_inputs: the inputs themselves (global shapes), or a function that makes them.
        out_shardings: placements of each output tensor, None for the batch on the first axis.
        parameter_memory_budget: ``(low, high)`` fractions of all parameter bytes per device.
        ac: settings of activation checkpointing.
    """
    input_fn = sample_inputs if callable(sample_inputs) else lambda: sample_inputs
    builder = AutoParallel(model, input_fn, mesh, mp_policy, dynamic=dynamic)
    if ac is not None:
        builder.configure_ac(ac)
    with builder:
        if out_shardings is not None:
            builder.add_output_constraints(out_shardings)
        if parameter_memory_budget is not None:
            builder.add_parameter_memory_constraint(*parameter_memory_budget)
        return builder.apply_placement(builder.optimize_placement())
