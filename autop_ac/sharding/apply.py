"""The shard pass: the joint graph again, on one device's local shapes, collectives inserted.

The captured graph is interpreted on local fake tensors while `make_fx` records. Before each operator
its arguments are brought to the placements that the plan asks for; a value brought to one placement is
brought there once, and shared by all who want it there. What the operator gives is compared with the
local shape that the plan implies, so that an option that is wrong for local shapes cannot pass.

Each recorded node carries ``meta["custom"]["autop_ac"]``, a dict with where it came from: ``origin``
(the captured node it computes, "" for what was inserted), ``serves`` (the captured node that an
inserted one was made for), ``captured_op``, ``parameter`` (the user's name, on a redistribution of a
parameter or of its gradient), ``axis`` (of the mesh, on collectives), ``module`` and ``source``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.fx.traceback import preserve_node_meta, set_current_meta
from torch.utils import _pytree as pytree

from .. import _torch as private
from ..capture.joint import JointGraph, Port
from ..capture.local_map import enter, leave
from ..capture.marks import placed_of
from ..capture.names import module_path, source_line
from ..errors import AutopACError
from ..graph.collect import draws_random
from ..graph.random import drawn_with_offset, rank_offset, sharded_axes
from .chains import gradient_chains
from .flex_rules import FLEX, with_offsets
from .local_args import local_sizes
from .move import move
from .option import entries, producer_of
from .plan import Choice, Placements, ShardingPlan

_INSERTED = ("_c10d_functional.", "_dtensor.")
_VIEWS = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)
_TAGS = ("recompute", "ac_graph_id", "has_backward_hook")


@dataclass(frozen=True, eq=False)
class LocalGraph:
    """The joint graph of one device; `placeholders` by node name as in `JointGraph`."""

    module: torch.fx.GraphModule
    placeholders: Mapping[str, Port]
    results: tuple[Port | None, ...]
    num_forward_outputs: int


def local_shape(shape: Any, mesh: DeviceMesh, placements: Placements) -> tuple[int, ...]:
    """Shape of this rank's part of a tensor of global `shape`."""
    shape, _ = private.compute_local_shape_and_global_offset(
        shape, mesh, placements, skip_offset=True
    )
    return tuple(shape)


def apply_plan(
    joint: JointGraph,
    plan: ShardingPlan,
    mesh: DeviceMesh | None,
    decompositions: Mapping[Any, Callable[..., Any]] | None = None,
) -> LocalGraph:
    """Rewrite `joint` to local shapes under `plan`; the captured graph is left as it is.

    Args:
        mesh: None for one device, under `unsharded`.
        decompositions: applied while recording (Inductor's, where Inductor compiles the result).
    """
    holders = [n for n in joint.module.graph.nodes if n.op == "placeholder"]
    with joint.fake_mode:
        flat = [_local_fake(n, mesh, plan.choices[n.name].outputs[0]) for n in holders]
    sharder = _Sharder(joint, plan, mesh)
    with joint.fake_mode, preserve_node_meta():
        module = private.make_fx(sharder.run_flat, decomposition_table=dict(decompositions or {}))(
            *flat
        )
    _restore_placeholders(module, holders, joint)
    if mesh is not None:
        _name_axes(module, mesh)
    module.graph.eliminate_dead_code(is_impure_node=_must_stay)
    module.recompile()
    return LocalGraph(module, joint.placeholders, joint.results, joint.num_forward_outputs)


def unsharded(joint: JointGraph) -> ShardingPlan:
    """The plan of one device: nothing is placed, so nothing is moved."""
    choices = {}
    for node in joint.module.graph.nodes:
        leaves = pytree.arg_tree_leaves(*node.args, **node.kwargs)
        reads = sum(isinstance(a, torch.fx.Node) for a in leaves)
        value = node.meta.get("val")
        gives = len(entries(value))
        choices[node.name] = Choice(node.name, (None,) * reads, (None,) * gives)
    return ShardingPlan((), (), choices, {}, 0.0)


def _must_stay(node: torch.fx.Node) -> bool:
    """Collectives without a reader and pure operators may go; everything else stays."""
    inserted = str(node.target).startswith(_INSERTED)
    return node.op in ("placeholder", "output") or (node.is_impure() and not inserted)


def _local_fake(node: torch.fx.Node, mesh: DeviceMesh | None, placements: Placements | None) -> Any:
    value = node.meta["val"]
    if not isinstance(value, torch.Tensor) or placements is None or mesh is None:
        return value
    shape = local_shape(value.shape, mesh, placements)
    if shape == tuple(value.shape):
        return torch.empty_strided(
            shape, value.stride(), dtype=value.dtype, device=value.device
        ).requires_grad_(value.requires_grad)
    order = sorted(range(value.dim()), key=lambda d: value.stride(d), reverse=True)
    dense = torch.empty([shape[d] for d in order], dtype=value.dtype, device=value.device)
    inverse = [order.index(d) for d in range(value.dim())]
    return dense.permute(inverse).requires_grad_(value.requires_grad)


class _Sharder:
    """One interpretation of the captured graph on local tensors."""

    def __init__(self, joint: JointGraph, plan: ShardingPlan, mesh: DeviceMesh | None) -> None:
        self.joint = joint
        self.plan = plan
        self.mesh = mesh
        self.values: dict[torch.fx.Node, Any] = {}
        self.moved: dict[tuple[torch.fx.Node, Placements], Any] = {}
        self.parameter_of = _parameter_chains(joint)
        self.output = joint.module.graph.output_node()
        self.gradients = self._gradients()

    def _gradients(self) -> dict[torch.fx.Node, tuple[Placements | None, ...]]:
        """What backward gives, with the placements at which it leaves."""
        found: dict[torch.fx.Node, tuple[Placements | None, ...]] = {}
        for _, result, wanted in self._leaving():
            if not _is_forward(result):
                found[result] = (*found.get(result, ()), wanted)
        return found

    def run_flat(self, *flat: Any) -> list[Any]:
        incoming = iter(flat)
        results: list[Any] = []
        for node in self.joint.module.graph.nodes:
            if node.op == "placeholder":
                self.values[node] = next(incoming)
            elif node.op == "output":
                results = self._results()
            elif node.op == "get_attr":
                self.values[node] = getattr(self.joint.module, node.target)
            elif placed_of(node) is not None or node.target in (enter, leave):
                self.values[node] = self._gone(node)
            elif node.target is operator.getitem:
                with self._recorded_as(node, origin=node.name):
                    self.values[node] = self.values[node.args[0]][node.args[1]]
            else:
                self.values[node] = self._compute(node)
            for wanted in self.gradients.get(node, ()):
                # at once: at the end of backward all gradients would be held whole until then
                self._bring_out(node, wanted, backward=True)
        return results

    def _placements(self, node: torch.fx.Node) -> Placements | None:
        source, index = producer_of(node)
        choice = self.plan.choices.get(source.name)
        return choice.outputs[index] if choice else None

    def _bring(self, node: torch.fx.Node, wanted: Placements | None, reader: torch.fx.Node) -> Any:
        """The value of `node` at the placements wanted, moved there at most once."""
        value, have = self.values[node], self._placements(node)
        if wanted is None or have is None or tuple(wanted) == tuple(have) or self.mesh is None:
            return value
        key = (node, tuple(wanted))
        if key not in self.moved:
            parameter = self.parameter_of.get(node, "")
            # a gather of a parameter belongs to the parameter's side, whoever asks first
            owner = node if parameter and _is_forward(node) else reader
            with self._recorded_as(owner, serves=reader.name, parameter=parameter):
                self.moved[key] = move(value, node.meta["val"], have, wanted, self.mesh)
        return self.moved[key]

    def _gone(self, node: torch.fx.Node) -> Any:
        """What an operator that only says where a value is gives: what it reads, brought there."""
        value = self._bring(node.args[0], self.plan.choices[node.name].inputs[0], node)
        if node.target is enter and node.meta["val"].is_contiguous():
            with self._recorded_as(node, serves=node.name):
                return value.contiguous()  # as the body was traced with
        return value

    def _compute(self, node: torch.fx.Node) -> Any:
        choice = self.plan.choices[node.name]
        leaves = [a for a in pytree.arg_tree_leaves(*node.args, **node.kwargs)]
        nodes = [a for a in leaves if isinstance(a, torch.fx.Node)]
        wanted = dict(zip(range(len(nodes)), choice.inputs, strict=True))
        counter = iter(range(len(nodes)))

        def local(arg: Any) -> Any:
            if not isinstance(arg, torch.fx.Node):
                return arg
            return self._bring(arg, wanted[next(counter)], node)

        args, kwargs = pytree.tree_map(local, (tuple(node.args), dict(node.kwargs)))
        value = node.meta.get("val")  # an assertion gives nothing
        placed = choice.outputs[0]
        if self.mesh is not None:
            shape = None
            if placed is not None and isinstance(value, torch.Tensor):
                shape = local_shape(value.shape, self.mesh, placed)
            args = local_sizes(node.target, args, value, shape)
            args = self._shifted(node, args, choice)
        offset = None
        if self.mesh is not None and draws_random(node):
            axes = sharded_axes(node, choice.outputs)
            offset = rank_offset(self.mesh, axes) if axes else None
        if node.target in _VIEWS and not _is_viewable(*args):
            # a copy that the user's view is not: made for it, as a move is
            with self._recorded_as(node, serves=node.name):
                args = (args[0].contiguous(), *args[1:])
        with self._recorded_as(node, origin=node.name), drawn_with_offset(offset):
            result = node.target(*args, **kwargs)
        self._check(node, result, choice.outputs)
        return result

    def _shifted(self, node: torch.fx.Node, args: Any, choice: Choice) -> Any:
        """Flex attention's functions of the numbers of a batch and a head, for a device that has some."""
        placed = choice.inputs[0] if node.target in FLEX else None
        if placed is None or all(p.is_replicate() for p in placed):
            return args
        assert self.mesh is not None
        shape = node.args[0].meta["val"].shape
        return with_offsets(node.target, args, shape, placed, self.mesh)

    def _check(self, node: torch.fx.Node, result: Any, outputs: Any) -> None:
        if self.mesh is None:
            return
        values = node.meta.get("val")
        if values is None:
            return
        for i, (value, got) in enumerate(zip(entries(values), entries(result), strict=True)):
            if not isinstance(value, torch.Tensor) or outputs[i] is None:
                continue
            expected = local_shape(value.shape, self.mesh, outputs[i])
            if tuple(got.shape) != expected:
                raise AutopACError(
                    f"{node.target} ({node.name}, {source_line(node.meta.get('stack_trace'))}) gives "
                    f"{tuple(got.shape)} on one device where the plan's {outputs[i]} of "
                    f"{tuple(value.shape)} implies {expected}. Please report it; until then give "
                    "the node another placement with sharding_optimizer.add_node_constraint"
                )

    def _leaving(self) -> Iterator[tuple[int, torch.fx.Node, Placements | None]]:
        """(index, node, placements at which it leaves) of each result that a node gives."""
        wanted = iter(self.plan.choices[self.output.name].inputs)
        for i, result in enumerate(self.output.args[0]):
            if isinstance(result, torch.fx.Node):
                yield i, result, next(wanted)

    def _results(self) -> list[Any]:
        results = list(self.output.args[0])
        for i, node, wanted in self._leaving():
            backward = i >= self.joint.num_forward_outputs
            results[i] = self._bring_out(node, wanted, backward=backward)
        return results

    def _bring_out(self, node: torch.fx.Node, wanted: Placements | None, *, backward: bool) -> Any:
        """Results are moved on the side that gives them: the output node itself has no side."""
        before = self.output.meta.get("partitioner_tag")
        self.output.meta["partitioner_tag"] = "is_backward" if backward else "is_forward"
        try:
            return self._bring(node, wanted, self.output)
        finally:
            self.output.meta["partitioner_tag"] = before

    def _recorded_as(
        self, node: torch.fx.Node, *, origin: str = "", serves: str = "", parameter: str = ""
    ) -> Any:
        meta = dict(node.meta)
        stack = meta.get("nn_module_stack") or meta.get("fwd_nn_module_stack")
        prefix = self.joint.module_prefix
        facts = {
            "origin": origin,
            "serves": serves,
            "captured_op": str(node.target) if origin else "",
            "parameter": parameter,
            "axis": "",
            "module": module_path(stack, prefix=prefix),
            "source": source_line(meta.get("stack_trace")),
        }
        return _Recorded(node, {**meta.get("custom", {}), "autop_ac": facts})


class _Recorded:
    """While active, what is recorded carries `node`'s metadata with another ``custom``."""

    def __init__(self, node: torch.fx.Node, custom: dict[str, Any]) -> None:
        self.node, self.custom = node, custom
        self.before: dict[str, Any] = {}
        self.current: Any = None

    def __enter__(self) -> None:
        self.before = dict(self.node.meta)
        self.node.meta["custom"] = self.custom
        for tag in _TAGS:  # hints were resolved on the captured graph; tags are written later
            self.node.meta.pop(tag, None)
        self.current = set_current_meta(self.node)
        self.current.__enter__()

    def __exit__(self, *exc: Any) -> None:
        self.current.__exit__(*exc)
        self.node.meta.clear()
        self.node.meta.update(self.before)


def _is_viewable(value: torch.Tensor, shape: Any) -> bool:
    """Whether a local tensor, whose strides need not be in the order of the global ones, has the view."""
    # numpy's rule is the same, and a tensor made here would be recorded; one byte stands for all
    layout = np.lib.stride_tricks.as_strided(np.empty(1, np.int8), value.shape, value.stride())
    try:
        layout.shape = tuple(shape)
    except AttributeError:
        return False
    return True


def _is_forward(node: torch.fx.Node) -> bool:
    return node.meta.get("partitioner_tag") != "is_backward"


def _parameter_chains(joint: JointGraph) -> dict[torch.fx.Node, str]:
    """Nodes that hold a parameter, through operators of one input, or its gradient: its user name."""
    found: dict[torch.fx.Node, str] = {}
    for node in joint.module.graph.nodes:
        if node.op == "placeholder":
            port = joint.placeholders[node.name]
            if port.kind == "parameter":
                found[node] = port.name
        elif node.op == "call_function" and len(node.all_input_nodes) == 1:
            source = node.all_input_nodes[0]
            if source in found:
                found[node] = found[source]
    return gradient_chains(joint) | found


def _restore_placeholders(module: Any, holders: list[torch.fx.Node], joint: JointGraph) -> None:
    """Names and descriptors of the captured placeholders, which the recording replaced."""
    new = [n for n in module.graph.nodes if n.op == "placeholder"]
    taken = {n.name for n in holders}
    for node in module.graph.nodes:
        if node.name in taken:
            node._rename(f"{node.name}_local")
    for node, old in zip(new, holders, strict=True):
        node._rename(old.name)
        node.target = old.name
        for key in ("desc", "partitioner_tag"):
            if key in old.meta:
                node.meta[key] = old.meta[key]
    module.graph.output_node().meta["desc"] = joint.module.graph.output_node().meta["desc"]


def _name_axes(module: torch.fx.GraphModule, mesh: DeviceMesh) -> None:
    """Write the mesh axis on each collective, known by the process group it runs over."""
    names = mesh.mesh_dim_names or tuple(f"axis{i}" for i in range(mesh.ndim))
    axis_of = {str(mesh.get_group(i).group_name): name for i, name in enumerate(names)}
    for node in module.graph.nodes:
        if node.op != "call_function" or not str(node.target).startswith(_INSERTED):
            continue
        group = next((a for a in node.args if isinstance(a, str) and a in axis_of), None)
        custom = dict(node.meta.get("custom", {}))
        custom["autop_ac"] = {**custom.get("autop_ac", {}), "axis": axis_of.get(group or "", "")}
        node.meta["custom"] = custom
