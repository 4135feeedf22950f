"""The stages between the captured graph and what runs, in order, under one frozen set of settings."""

from __future__ import annotations

import hashlib
import warnings
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from ._torch import compile_lock
from ._torch_trace import artifact
from .agree import check_same, from_first_rank
from .capture.fingerprint import fingerprint
from .capture.joint import JointGraph, Port
from .capture.trace import Request, capture, resized
from .config import ACConfig, CommConfig, CompileConfig
from .errors import AutopACError, ConfigError, InfeasibleError
from .graph.devices import DeviceSpec, Topology
from .graph.liveness import backward_order, forward_order
from .lowering.bucket import bucket
from .lowering.compile import compile_local, decompositions, partition_by
from .lowering.hooks import run_user_passes, user_passes_done
from .progress import Stage, silent
from .recompute.hints import ResolvedHints, resolve_hints
from .recompute.pipeline import Recompute, plan_recompute
from .runtime.parallel import Outputs, Ports, Runner, Variant, make_runner, placed_state
from .runtime.sizes import divided
from .sharding.apply import apply_plan
from .sharding.constraints import Constraints
from .sharding.explain import Explainer
from .sharding.groups import Settings as SearchSettings
from .sharding.plan import Placements, ShardingPlan
from .sharding.search import search_with


@dataclass(frozen=True)
class Settings:
    """Everything the user set that the stages after capture read."""

    mesh: DeviceMesh
    ac: ACConfig
    compile: CompileConfig
    device: DeviceSpec
    topology: Topology
    mp_policy: MixedPrecisionPolicy | None = None
    reshard_after_forward: bool = True
    outputs: Outputs = "local"
    stage: Stage = silent
    comm: CommConfig = CommConfig()

    def search(self, joint: JointGraph, constraints: Constraints) -> ShardingPlan:
        """The placement of every tensor that takes least time within the constraints."""
        check_same(self.mesh, "the captured graph", fingerprint(joint))
        return from_first_rank(
            self.mesh,
            lambda: search_with(joint, constraints, self._for_search(), stage=self.stage),
        )

    def explainer(self, joint: JointGraph, constraints: Constraints) -> Explainer:
        """What answers `ShardingPlan.explain`; each process asks for itself."""
        settings = self._for_search()
        again = partial(search_with, joint, settings=settings)
        return Explainer(joint, constraints, settings, again)

    def _for_search(self) -> SearchSettings:
        return SearchSettings(
            self.mesh,
            self.device,
            self.topology,
            self.mp_policy.reduce_dtype if self.mp_policy else None,
            self.reshard_after_forward,
            prefetch=self.comm.prefetch,
        )

    def recompute(self, joint: JointGraph, hints: ResolvedHints, plan: ShardingPlan) -> Recompute:
        """The shard pass and the recompute plan on what it gives, its tags written."""
        backend = self.compile.backend
        with self.stage("lower: the graph of one device"):
            local = apply_plan(joint, plan, self.mesh, decompositions(joint, backend))
            local = run_user_passes(bucket(local, self.comm), joint, backend)
        with self.stage("plan: what is kept for backward"):
            recompute = plan_recompute(
                local,
                hints,
                self.ac,
                self.device,
                self.topology.links(self.mesh),
                self.reshard_after_forward,
                partial(from_first_rank, self.mesh),
                self.comm.prefetch_bytes,
            )
        artifact("local_graph", lambda: str(local.module.print_readable(print_output=False)))
        return recompute

    def lower(
        self,
        joint: JointGraph,
        hints: ResolvedHints,
        plan: ShardingPlan,
        ports: Ports | None = None,
    ) -> tuple[Recompute, Runner]:
        """The recompute plan, the partition, and what runs."""
        # torch traces one thread at a time: what it notes on nodes meanwhile is the process's
        with compile_lock:
            return self._lowered(joint, hints, plan, ports)

    def _lowered(
        self, joint: JointGraph, hints: ResolvedHints, plan: ShardingPlan, ports: Ports | None
    ) -> tuple[Recompute, Runner]:
        recompute = self.recompute(joint, hints, plan)
        check_same(self.mesh, "the order of collectives", _collectives(recompute))
        local = recompute.local
        with (
            user_passes_done(),
            self.stage(f"compile: forward and backward ({self.compile.backend})"),
        ):
            compiled = compile_local(
                joint, local.module, partition_by(recompute), self.compile.backend
            )
        values = recompute.facts.values
        read = [values[i] for i in recompute.plan.saved_inputs]
        parameters = tuple(v.parameter for v in read if v.role == "parameter")
        return recompute, make_runner(
            joint, local, plan, self.mesh, compiled, self.outputs, parameters, ports
        )

    def after(self, first: Recompute) -> Settings:
        """Settings of what is made later: a budget that was a fraction is the bytes it came to at first.

        A device holds no less for a smaller batch, of whose own peak parameters may be nearly all.
        """
        if not isinstance(self.ac.memory_budget, float) or first.plan.budget is None:
            return self
        return replace(self, ac=replace(self.ac, memory_budget=first.plan.budget.budget_bytes))

    def lower_variant(
        self, wanted: Request, traced: JointGraph, plan: ShardingPlan, variant: Variant
    ) -> Runner:
        """The same model in other training modes, or for other sizes, between the same placements.

        Where only sizes differ, each value has the placement that it has in `plan`, as far as that cuts
        it into equal parts.

        Args:
            wanted: what was traced.  traced, plan: its graph and plan.
            variant: what to trace.
        """
        with self.stage("capture: the model in another mode or for other sizes"):
            joint = capture(resized(wanted, variant.shapes), variant.modes)
        ports = Ports(_by_index(plan, traced, "input"), _outputs(plan, traced))
        shape = tuple(self.mesh.shape)
        inputs = [divided(s, p, shape) for s, p in zip(variant.shapes, ports.inputs, strict=True)]
        given = _output_values(joint)
        if ports.outputs is None or len(given) != len(ports.outputs):
            ports = replace(ports, outputs=None)  # another number of outputs: no placements to keep
        outputs = ports.outputs and [
            divided(tuple(v.shape), p, shape) for v, p in zip(given, ports.outputs, strict=True)
        ]
        whole = [
            n for n, p, q in zip(_input_names(traced), inputs, ports.inputs, strict=True) if p != q
        ]
        if whole:
            warnings.warn(
                f"input {', '.join(whole)}: the sizes of this call do not divide over the mesh, so every "
                "device computes the whole batch, with the memory that takes. Drop the last part of the "
                "data, or pad it",
                UserWarning,
                stacklevel=5,
            )
        state = {}
        for node in joint.module.graph.find_nodes(op="placeholder"):
            port = joint.placeholders[node.name]
            if port.kind in ("parameter", "buffer"):
                state[node.name] = placed_state(plan, self.mesh, port, node.meta["val"])
        constraints = Constraints(
            inputs=tuple(inputs), outputs=tuple(outputs) if outputs else None, nodes=state
        )
        try:
            hints = resolve_hints(joint.module, joint.placeholders, joint.module_prefix)
            found = self._placed_again(joint, constraints, traced, plan)
            return self.lower(joint, hints, found, ports)[1]
        except AutopACError as error:
            error.add_note(f"in a graph for inputs of global shapes {list(variant.shapes)}")
            raise

    def _placed_again(
        self, joint: JointGraph, constraints: Constraints, traced: JointGraph, plan: ShardingPlan
    ) -> ShardingPlan:
        """A plan for `joint`, with the placements of `plan` where it is the same graph in other sizes."""
        if _operators(joint) == _operators(traced):
            placed = {n: c.outputs[0] for n, c in plan.choices.items() if c.outputs}
            nodes = {n: p for n, p in placed.items() if p is not None} | dict(constraints.nodes)
            try:
                return self.search(joint, replace(constraints, nodes=nodes))
            except (ConfigError, InfeasibleError):  # sizes that some of these do not divide
                pass
        return self.search(joint, constraints)


def _collectives(recompute: Recompute) -> str:
    """Collectives in the order in which forward and backward run them, in short."""
    facts, saved = recompute.facts, recompute.plan.saved
    order = (*forward_order(facts, saved), *backward_order(facts, saved))
    run = [facts.values[i] for i in order if facts.values[i].collective]
    lines = [f"{v.op} {v.axis} {v.parameter} {v.serves} {v.dtype}" for v in run]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _operators(joint: JointGraph) -> list[tuple[str, str]]:
    return [(node.name, str(node.target)) for node in joint.module.graph.nodes]


def _input_names(joint: JointGraph) -> list[str]:
    found = {p.index: p.name for p in joint.placeholders.values() if p.kind == "input"}
    return [found[i] for i in sorted(found)]


def _by_index(plan: ShardingPlan, joint: JointGraph, kind: str) -> tuple[Placements, ...]:
    ports = {name: p for name, p in joint.placeholders.items() if p.kind == kind}
    found = {p.index: plan.choices[name].outputs[0] or () for name, p in ports.items()}
    return tuple(found[i] for i in sorted(found))


def _results(joint: JointGraph) -> list[tuple[Port, torch.fx.Node]]:
    given = zip(joint.results, joint.module.graph.output_node().args[0], strict=True)
    return [(p, r) for p, r in given if p is not None and isinstance(r, torch.fx.Node)]


def _outputs(plan: ShardingPlan, joint: JointGraph) -> tuple[Placements, ...]:
    output = joint.module.graph.output_node()
    placed = zip(_results(joint), plan.choices[output.name].inputs, strict=True)
    found = {p.index: placements or () for (p, _), placements in placed if p.kind == "output"}
    return tuple(found[i] for i in sorted(found))


def _output_values(joint: JointGraph) -> list[torch.Tensor]:
    found = {p.index: r.meta["val"] for p, r in _results(joint) if p.kind == "output"}
    return [found[i] for i in sorted(found)]
