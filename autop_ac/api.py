"""`AutoParallel`: holds settings and results, and calls the stages in order; no algorithm is here."""

from __future__ import annotations

import dataclasses
import logging
import operator
import warnings
from collections.abc import Callable
from functools import cache
from types import TracebackType
from typing import Any, Literal, Self

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from ._torch_trace import artifact
from .build import Settings
from .capture.fingerprint import fingerprint
from .capture.joint import JointGraph
from .capture.trace import Request, capture, request
from .config import ACConfig, CommConfig, CompileConfig, ac_config
from .constrain import Constrained
from .documented import takes_fields
from .errors import ConfigError, UsageError
from .graph.devices import DeviceSpec, Topology, described_gpu, find_device
from .progress import progress
from .recompute.hints import ResolvedHints, resolve_hints
from .recompute.pipeline import Recompute
from .report.build import ACReport, build_report
from .report.curve import ParetoCurve
from .report.estimate import Estimate
from .report.explain import Explanation
from .report.plan_table import plan_table
from .runtime.parallel import Outputs, Runner, Runners, Variant, make_parallel
from .sharding.plan import ShardingPlan

log = logging.getLogger("autop_ac")


class AutoParallel(Constrained):
    """Shard a single-device module over a mesh, with activation checkpointing under your control.

    Use it as a context manager::

        with AutoParallel(model, input_fn, mesh).configure_ac(stage_size="auto") as ap:
            plan = ap.optimize_placement()
            parallel_model = ap.apply_placement(plan)
        print(ap.ac_report)

    Args:
        model: a single-device module, with real weights or on the meta device; left as it is.
        input_fn: a function without arguments that makes one batch in global shapes: a tensor, a tuple
            of positional inputs, or a `ForwardInputs`. Only shapes and dtypes of its tensors are used.
        mesh: the devices, one or more axes: of `init_device_mesh`, or of `fake_mesh` to plan for devices
            that are not there.
        mp_policy: dtypes, as FSDP2 takes them.
        reshard_after_forward: gather parameters again for backward (True) or keep them gathered.
        dynamic: whether sizes of inputs may change between calls. Each new size is traced and compiled
            at its first call, between the same placements; sizes that do not divide over the mesh are
            computed whole on every device.
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
                f"input_fn is a {type(input_fn).__name__}; give a function without arguments that "
                "makes one batch: lambda: torch.empty(64, 2048)"
            )
        if not isinstance(mesh, DeviceMesh):
            raise ConfigError(
                f"mesh is a {type(mesh).__name__}; give a DeviceMesh: init_device_mesh(...), or "
                "autop_ac.fake_mesh((8, 4)) to plan for devices that are not there"
            )
        if mp_policy is not None and not isinstance(mp_policy, MixedPrecisionPolicy):
            raise ConfigError(
                f"mp_policy is {mp_policy!r}; give torch.distributed.fsdp.MixedPrecisionPolicy("
                "param_dtype=..., reduce_dtype=...)"
            )
        if not isinstance(dynamic, bool):
            raise ConfigError(f"dynamic={dynamic!r}: allowed are True and False")
        super().__init__(mesh)
        self._model = model
        self._input_fn = input_fn
        self._mp_policy = mp_policy
        self._reshard = reshard_after_forward
        self._loss_fn = loss_fn
        self._dynamic = dynamic
        self._ac = ACConfig()
        self._compile = CompileConfig()
        self._comm = CommConfig()
        self._device: DeviceSpec | None = None  # the one at hand
        self._topology: Topology | None = None
        self._stage = progress()
        self._request: Request | None = None
        self._hints: ResolvedHints | None = None
        self._plan: ShardingPlan | None = None
        self._report: Callable[[], ACReport] | None = None
        self._applied = False  # whether that report is of a module that was made

    # settings: each call replaces what the earlier one set

    @takes_fields(ACConfig)
    def configure_ac(self, config: ACConfig | bool | None = None, /, **settings: Any) -> Self:
        """Set activation checkpointing; what is not given has its default, whatever an earlier call set.

        Args:
            config: an `ACConfig` in place of the keywords; True and False are `enable`.

        Raises:
            ConfigError: a name is unknown (the nearest is told), a value is out of range, or both a
                config and keywords are given.
        """
        self._ac = ac_config(config, settings)
        return self._changed()

    def configure_compile(self, backend: Literal["eager", "inductor"] = "inductor") -> Self:
        """Set how forward and backward are run.

        Args:
            backend: "inductor" (the default) compiles them, "eager" runs them node by node.

        Raises:
            ConfigError: another word.
        """
        self._compile = CompileConfig(backend=backend)
        return self._changed()

    def configure_comm(
        self,
        *,
        all_gather_bucket: str | int | None = "1 MiB",
        reduce_scatter_bucket: str | int | None = "1 MiB",
        prefetch: bool = True,
    ) -> Self:
        """Set how parameters are gathered and their gradients scattered.

        Args:
            all_gather_bucket: parameters of one block are gathered together while they sum to at most
                this many bytes; a larger one is gathered alone, and so is each where None.
            reduce_scatter_bucket: the same for the reduce-scatters of gradients.
            prefetch: start gathers ahead of their use, with at most `all_gather_bucket` gathered bytes on
                their way or one that is larger, and wait for sums of gradients one later; what can run so
                is hidden in the times that placements are chosen by.

        Raises:
            ConfigError: no size, or `prefetch` is no bool.
        """
        self._comm = CommConfig(all_gather_bucket, reduce_scatter_bucket, prefetch)
        return self._changed()

    def configure_device(
        self, device: str | DeviceSpec | None = None, topology: Topology | None = None
    ) -> Self:
        """Describe the device that is planned for, and the links between devices.

        Args:
            device: "A100", "H100", "H200", "B200" or "cpu", the path of a TOML file (``"L4.toml"``, as
                `DeviceSpec.from_toml` reads it), or a `DeviceSpec`; None for the device at hand.
            topology: the links along each mesh axis; None for NVLink within eight neighbouring devices
                and a network beyond.

        Raises:
            ConfigError: the device is not known, or the topology is of another number of axes.
        """
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
                f"fingerprint is {plan.fingerprint[:12]}, and this one's {fingerprint(joint)[:12]}. Search "
                "again, by optimize_placement"
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
        inputs = self._request.inputs() if self._request is not None else ()
        config = self._ac
        report = cache(
            lambda: build_report(
                recompute, plan, device=device, names=names, inputs=inputs, config=config
            )
        )
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
        wanted, settings = self._request, settings.after(recompute)

        def of_variant(variant: Variant) -> Runner:
            return settings.lower_variant(wanted, joint, plan, variant)

        runners = Runners(wanted.model, runner, of_variant, self._dynamic)
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

    def pareto(self, depth: int = 4) -> ParetoCurve:
        """The curve of predicted peak against recompute time; after `optimize_placement`.

        What binds (hints, rules, the all-gather contract) holds in every point; what stages or a budget
        decided is free. To run a point, apply the plan again with the settings as they were and its
        peak as budget: ``dataclasses.replace(config, stage_size="auto", memory_budget=point.peak_bytes)``.

        Args:
            depth: how often each part of the curve is halved; more takes longer.

        Returns:
            Points of growing peak (bytes on one device) and falling recompute time (seconds): a tuple of
            `ParetoPoint` that prints as a table.
        """
        return self.ac_report.pareto(depth)


def _check_mesh(mesh: DeviceMesh) -> None:
    # torch ends the process where a fake tensor is on a device that its build does not know
    if mesh.device_type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "the mesh is one of cuda devices, and torch sees none here: plan on "
            'autop_ac.fake_mesh(...), of cpu, and describe the device by configure_device("H100")'
        )
    if any(bool((mesh.mesh.diff(dim=axis) <= 0).any()) for axis in range(mesh.ndim)):
        # a process group counts its ranks upwards, so that parts would be told apart in two ways
        raise ConfigError(
            f"the ranks of the mesh are {mesh.mesh.tolist()}: they must grow along each axis. Put them in "
            "order, as init_device_mesh does"
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
