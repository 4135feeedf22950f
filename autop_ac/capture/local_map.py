"""`local_map` in a model: what a user wrote for the shapes of one device, in a graph of whole tensors.

Dynamo keeps a call as an operator with a graph inside. That graph is put in its place, between two
operators of ours: `enter` gives of a whole tensor the part that one device has, `leave` the whole of
which it has a part. What is between them then is differentiated, hinted at, kept and recomputed as
everything else is. Its nodes have ``meta[LOCAL_KEY]``: to the search they are values that every device
has for itself, to the shard pass `enter` and `leave` are nothing.

Gradients are those of the function that a call is on whole tensors. With ``n`` devices along an axis:

- a result that is replicated has one gradient, of which each of the ``n`` copies answers for its share:
  it enters as ``1 / n`` of it. So the sum over devices that `all_reduce` is in backward gives it once;
- the gradient of a replicated input is what the copies' add up to: Partial;
- a Partial result gives each part the whole gradient, a sharded one each part its own;
- parts whose mean is meant (Partial "avg") have a share each, in gradients as in values.

Along an axis where everything is replicated and nothing is sent, nothing is divided and added up again.
``in_grad_placements`` sets this aside: gradients enter whole, as in PyTorch, and leave as it says.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from .. import _torch_local_map as private
from ..errors import CaptureError
from ..placements import parse_placements, placement_text
from .names import source_line

LOCAL_KEY = "autop_ac_local"
Placements = tuple[Placement, ...]


@torch.library.custom_op("autop_ac::enter_local", mutates_args=())
def _enter(
    x: torch.Tensor, placements: str, gradient: str, shape: Sequence[int], source: str
) -> torch.Tensor:
    """The part of `x` on one device, of `shape`; its gradient has the placements `gradient`."""
    raise NotImplementedError("stands in graphs alone: the shard pass takes it out")


@torch.library.custom_op("autop_ac::leave_local", mutates_args=())
def _leave(
    x: torch.Tensor, placements: str, shares: int, shape: Sequence[int], source: str
) -> torch.Tensor:
    """The whole, of `shape`, that `x` is a part of; its gradient is divided among `shares` copies."""
    raise NotImplementedError("stands in graphs alone: the shard pass takes it out")


def _in_order(x: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """A dense tensor of another shape, its strides in the order of those of `x`."""
    order = sorted(range(x.dim()), key=x.stride, reverse=True)
    dense = x.new_empty([shape[d] for d in order])
    return dense.permute([order.index(d) for d in range(x.dim())])


@_enter.register_fake
def _(
    x: torch.Tensor, placements: str, gradient: str, shape: Sequence[int], source: str
) -> torch.Tensor:
    return _in_order(x, shape)


@_leave.register_fake
def _(
    x: torch.Tensor, placements: str, shares: int, shape: Sequence[int], source: str
) -> torch.Tensor:
    return _in_order(x, shape)


def _keep_enter(ctx: Any, inputs: Any, output: Any) -> None:
    x, _, ctx.gradient, _, ctx.source = inputs
    ctx.shape = list(x.shape)


def _back_out(ctx: Any, gradient: torch.Tensor) -> Any:
    out = _leave(gradient, ctx.gradient, 1, ctx.shape, ctx.source)
    return out, None, None, None, None


def _keep_leave(ctx: Any, inputs: Any, output: Any) -> None:
    x, placements, ctx.shares, _, ctx.source = inputs
    # what is still to be added up has one gradient for all its parts
    ctx.placements = placement_text([_whole(p) for p in parse_placements(placements)])
    ctx.shape = list(x.shape)


def _back_in(ctx: Any, gradient: torch.Tensor) -> Any:
    inner = _enter(gradient, ctx.placements, ctx.placements, ctx.shape, ctx.source)
    inner = inner if ctx.shares == 1 else inner / ctx.shares
    return inner, None, None, None, None


_enter.register_autograd(_back_out, setup_context=_keep_enter)
_leave.register_autograd(_back_in, setup_context=_keep_leave)
enter = torch.ops.autop_ac.enter_local.default
leave = torch.ops.autop_ac.leave_local.default


def _whole(placement: Placement) -> Placement:
    return Replicate() if isinstance(placement, Partial) else placement


# ------------------------------------------------------------- the body in its place


@dataclass(frozen=True)
class _Call:
    """The settings of one call of `local_map`, checked."""

    inputs: tuple[Placements, ...]
    outputs: tuple[Placements, ...]
    gradients: tuple[Placements, ...] | None


def inline_local_maps(graph: fx.GraphModule, mesh: DeviceMesh | None) -> None:
    """Put the graph inside each `local_map` in its place, `enter` in front of it and `leave` behind.

    Args:
        graph: as Dynamo gives it, with the graphs of checkpoints inside.
        mesh: that is planned for.

    Raises:
        CaptureError: what is inside has a backward of its own with communication in it.
    """
    for module in list(graph.modules()):
        if not isinstance(module, fx.GraphModule):
            continue
        calls = [n for n in module.graph.nodes if n.target is private.local_map_hop]
        for node in calls:
            assert mesh is not None
            _inline(module, node, mesh)
        if calls:
            module.graph.lint()
            module.recompile()


def _inline(module: fx.GraphModule, node: fx.Node, mesh: DeviceMesh) -> None:
    body = getattr(module, node.args[0].target)
    call = _call_of(body, node, mesh)
    source = source_line(node.meta.get("stack_trace"))
    silent = _silent_axes(body, call, mesh)
    values: dict[fx.Node, Any] = {}
    given = iter(zip(node.args[1:], call.inputs, strict=True))
    gradients = iter(call.gradients or [_gradient(p, silent) for p in call.inputs])
    for inner in body.graph.nodes:
        with module.graph.inserting_before(node):
            if inner.op == "placeholder":
                arg, placements = next(given)
                shape = _local_shape(arg.meta["example_value"].shape, placements, mesh)
                texts = placement_text(placements), placement_text(next(gradients))
                values[inner] = _made(module, node, enter, (arg, *texts, shape, source))
            elif inner.op == "output":
                continue
            elif inner.op == "get_attr":
                values[inner] = _attribute(module, body, inner)
            else:
                values[inner] = module.graph.node_copy(inner, values.__getitem__)
    results = []
    for value, placements in zip(body.graph.output_node().args[0], call.outputs, strict=True):
        with module.graph.inserting_before(node):
            shape = _global_shape(value.meta["example_value"].shape, placements, mesh)
            shares = 1 if call.gradients else _shares(placements, silent, mesh)
            args = (values[value], placement_text(placements), shares, shape, source)
            results.append(_made(module, node, leave, args))
    for user in list(node.users):
        assert user.target is operator.getitem
        result = results[user.args[1]]
        result.meta["example_value"] = user.meta["example_value"]  # for a call that reads it
        user.replace_all_uses_with(result)
        module.graph.erase_node(user)
    module.graph.erase_node(node)


def _call_of(body: fx.GraphModule, node: fx.Node, mesh: DeviceMesh) -> _Call:
    settings = private.settings_of(body)
    inputs = [
        _counted(p, arg.meta["example_value"].dim())
        for p, arg in zip(settings["in_placements"], node.args[1:], strict=True)
    ]
    gradients = settings["in_grad_placements"]
    if gradients is not None:
        pairs = zip(gradients, node.args[1:], strict=False)  # the rest are no tensors
        gradients = tuple(_counted(p, arg.meta["example_value"].dim()) for p, arg in pairs)
    results = body.graph.output_node().args[0]
    outputs = [
        _counted(p, value.meta["example_value"].dim())
        for p, value in zip(settings["out_placements"], results, strict=True)
    ]
    call = _Call(tuple(inputs), tuple(outputs), gradients)
    own = _own_backward(body)
    replicated = [p for entry in (*inputs, *outputs) for p in zip(entry, mesh.shape, strict=True)]
    if own is not None and gradients is None and any(
        isinstance(p, Replicate) and size > 1 for p, size in replicated
    ):  # fmt: skip
        line = source_line(node.meta.get("stack_trace")) or "an unknown line"
        raise CaptureError(
            f"local_map at {line}: an autograd.Function inside it communicates, so that it decides what the "
            "gradients of replicated tensors are. Say so with in_grad_placements=, an entry for each "
            "argument: Replicate() where its backward has added them up, Partial() where it has not"
        )
    return call


def _counted(entry: Sequence[Placement], ndim: int) -> Placements:
    """Dims counted from the front."""
    return tuple(
        Shard(p.dim % ndim) if isinstance(p, Shard) and -ndim <= p.dim < 0 else p for p in entry
    )


def _communicates(graph: fx.Graph) -> bool:
    return any(_is_collective(n) for n in graph.nodes)


def _is_collective(node: fx.Node) -> bool:
    return "_c10d_functional" in str(node.target) and "wait_tensor" not in str(node.target)


def _own_backward(body: fx.GraphModule) -> fx.Node | None:
    """An `autograd.Function` in a body with communication in it."""
    for module in body.modules():
        if not isinstance(module, fx.GraphModule):
            continue
        for node in module.graph.nodes:
            if getattr(node.target, "__name__", "") != "autograd_function_apply":
                continue
            inside = [
                getattr(module, a.target, None) for a in node.all_input_nodes if a.op == "get_attr"
            ]
            if any(isinstance(m, fx.GraphModule) and _communicates(m.graph) for m in inside):
                return node
    return None


def _silent_axes(body: fx.GraphModule, call: _Call, mesh: DeviceMesh) -> frozenset[int]:
    """Axes along which all devices do the same: nothing is in parts, and nothing is sent."""
    modules = [m for m in body.modules() if isinstance(m, fx.GraphModule)]
    sent = [n for m in modules for n in m.graph.nodes if _is_collective(n)]
    if any(axis_of(n, mesh) is None for n in sent):
        return frozenset()  # over a group that may be of any axes
    spoken = {axis_of(n, mesh) for n in sent}
    entries = [*call.inputs, *call.outputs]
    return frozenset(
        a for a in range(mesh.ndim)
        if a not in spoken and all(isinstance(e[a], Replicate) for e in entries)
    )  # fmt: skip


def axis_of(node: fx.Node, mesh: DeviceMesh) -> int | None:
    """The mesh axis that a collective is over, None where its group is that of no axis."""
    names = {str(mesh.get_group(a).group_name): a for a in range(mesh.ndim)}
    words = [a for a in (*node.args, *node.kwargs.values()) if isinstance(a, str)]
    return next((names[w] for w in words if w in names), None)


def _gradient(placements: Placements, silent: frozenset[int]) -> Placements:
    """How the gradient of an input leaves: copies of it add up, except along axes of copies alone.

    So do the gradients of parts whose mean the input is: each has a share in it.
    """
    return tuple(
        Partial() if _is_mean(p) or (isinstance(p, Replicate) and a not in silent) else _whole(p)
        for a, p in enumerate(placements)
    )


def _shares(placements: Placements, silent: frozenset[int], mesh: DeviceMesh) -> int:
    """Among how many copies the gradient of a result is divided."""
    pairs = enumerate(zip(placements, mesh.shape, strict=True))
    return math.prod(
        size for a, (p, size) in pairs
        if _is_mean(p) or (isinstance(p, Replicate) and a not in silent)
    )  # fmt: skip


def _is_mean(placement: Placement) -> bool:
    return isinstance(placement, Partial) and placement.reduce_op == "avg"


def _local_shape(shape: Sequence[int], placements: Placements, mesh: DeviceMesh) -> list[int]:
    left = list(shape)
    for placement, size in zip(placements, mesh.shape, strict=True):
        if isinstance(placement, Shard):
            left[placement.dim] //= size
    return left


def _global_shape(shape: Sequence[int], placements: Placements, mesh: DeviceMesh) -> list[int]:
    whole = list(shape)
    for placement, size in zip(placements, mesh.shape, strict=True):
        if isinstance(placement, Shard):
            whole[placement.dim] *= size
    return whole


def _made(module: fx.GraphModule, node: fx.Node, op: Any, args: tuple[Any, ...]) -> fx.Node:
    made = module.graph.call_function(op, args)
    made.meta.update(node.meta)
    made.meta.pop("example_value", None)
    return made


def _attribute(module: fx.GraphModule, body: fx.GraphModule, node: fx.Node) -> fx.Node:
    """A tensor or a graph that the body holds, held by the graph around it."""
    held, number = getattr(body, node.target), 0
    while hasattr(module, name := f"local_map_{node.target.replace('.', '_')}_{number}"):
        number += 1
    setattr(module, name, held)
    made = module.graph.get_attr(name)
    made.meta.update(node.meta)
    return made


# ------------------------------------------------------------- in the joint graph


def mark_local(graph: fx.Graph) -> None:
    """Write on each node between `enter` and `leave` the mesh axes along which its parts lie."""
    made: set[fx.Node] = set()  # of nothing
    for node in graph.nodes:
        if node.op == "call_function" and all(n in made for n in node.all_input_nodes):
            made.add(node)
        if node.target is enter:
            placements = parse_placements(node.args[1])
            cut = [a for a, p in enumerate(placements) if not isinstance(p, Replicate)]
            node.meta[LOCAL_KEY] = frozenset(cut)
        elif node.op == "call_function" and node.target is not leave:
            axes = [n.meta[LOCAL_KEY] for n in node.all_input_nodes if is_local(n)]
            if axes:
                node.meta[LOCAL_KEY] = frozenset().union(*axes)
    for node in reversed(graph.nodes):
        inside = [is_local(user) or user.target is leave for user in node.users]
        if node in made and inside and all(inside):
            node.meta[LOCAL_KEY] = frozenset()


def is_local(node: fx.Node) -> bool:
    """Whether a node's value is what one device has, inside a `local_map`."""
    return LOCAL_KEY in node.meta
