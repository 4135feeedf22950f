"""The stages between the captured graph and what runs, in order, under one frozen set of settings."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import partial

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from ._torch import compile_lock
from ._torch_trace import artifact
from .agree import check_same, from_first_rank
from .capture.fingerprint import fingerprint
from .capture.joint import JointGraph
from .capture.trace import Request, capture
from .config import ACConfig, CommConfig, CompileConfig
from .graph.devices import DeviceSpec, Topology
from .graph.liveness import backward_order, forward_order
from .lowering.bucket import bucket
from .lowering.compile import compile_local, decompositions, partition_by
from .lowering.hooks import run_user_passes, user_passes_done
from .progress import Stage, silent
from .recompute.hints import ResolvedHints, resolve_hints
from .recompute.pipeline import Recompute, plan_recompute
from .runtime.parallel import Modes, Outputs, Runner, make_runner, placed_state
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
        self, joint: JointGraph, hints: ResolvedHints, plan: ShardingPlan
    ) -> tuple[Recompute, Runner]:
        """The recompute plan, the partition, and what runs."""
        # torch traces one thread at a time: what it notes on nodes meanwhile is the process's
        with compile_lock:
            return self._lowered(joint, hints, plan)

    def _lowered(
        self, joint: JointGraph, hints: ResolvedHints, plan: ShardingPlan
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
            joint, local, plan, self.mesh, compiled, self.outputs, parameters
        )

    def lower_in_modes(
        self, wanted: Request, traced: JointGraph, plan: ShardingPlan, modes: Modes
    ) -> Runner:
        """The same model in other training modes, between the same placements.

        Args:
            wanted: what was traced.  traced, plan: its graph and plan.
            modes: whether each module is in training mode.
        """
        with self.stage("capture: the model in another mode"):
            joint = capture(wanted, modes)
        inputs, outputs = _by_index(plan, traced, "input"), _outputs(plan, traced)
        given = sum(p is not None and p.kind == "output" for p in joint.results)
        nodes = {}
        for node in joint.module.graph.find_nodes(op="placeholder"):
            port = joint.placeholders[node.name]
            if port.kind in ("parameter", "buffer"):
                nodes[node.name] = placed_state(plan, self.mesh, port, node.meta["val"])
        constraints = Constraints(
            inputs=inputs,
            # another number of outputs has no placements to keep
            outputs=outputs if given == len(outputs) else None,
            nodes=nodes,
        )
        hints = resolve_hints(joint.module, joint.placeholders, joint.module_prefix)
        return self.lower(joint, hints, self.search(joint, constraints))[1]


def _collectives(recompute: Recompute) -> str:
    """Collectives in the order in which forward and backward run them, in short."""
    facts, saved = recompute.facts, recompute.plan.saved
    order = (*forward_order(facts, saved), *backward_order(facts, saved))
    run = [facts.values[i] for i in order if facts.values[i].collective]
    lines = [f"{v.op} {v.axis} {v.parameter} {v.serves} {v.dtype}" for v in run]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _by_index(plan: ShardingPlan, joint: JointGraph, kind: str) -> tuple[Placements | None, ...]:
    ports = {name: p for name, p in joint.placeholders.items() if p.kind == kind}
    found = {p.index: plan.choices[name].outputs[0] for name, p in ports.items()}
    return tuple(found[i] for i in sorted(found))


def _outputs(plan: ShardingPlan, joint: JointGraph) -> tuple[Placements | None, ...]:
    output = joint.module.graph.output_node()
    ports = [
        p
        for p, r in zip(joint.results, output.args[0], strict=True)
        if p is not None and isinstance(r, torch.fx.Node)
    ]
    placed = zip(ports, plan.choices[output.name].inputs, strict=True)
    found = {p.index: placements for p, placements in placed if p.kind == "output"}
    return tuple(found[i] for i in sorted(found))
