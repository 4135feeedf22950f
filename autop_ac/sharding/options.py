"""The placements that an operator may compute with: rules of each mesh axis, checked on local shapes.

An option of an operator gives placements of its tensor inputs and of its outputs such that running
the operator on each device's local inputs gives each device its local outputs. Rules are asked for
one mesh axis at a time (`rules.axis_rows`), the product over the axes is taken, and an option stays when

- every Shard divides its dim evenly, so that all devices run the same graph, and
- the operator, run on meta tensors of the local shapes, gives the local shapes of the outputs.

Where no rule is found everything is replicated, and a warning says so.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Replicate
from torch.utils import _pytree as pytree

from ..capture.local_map import enter, is_local, leave
from ..capture.names import source_line
from ..errors import CaptureError
from ..graph.cost import node_time_s, tensor_bytes
from ..graph.devices import DeviceSpec, Topology
from .flex_rules import FLEX, flex_shapes
from .layout import divides, even_local_shape
from .local_args import local_sizes
from .local_map_rules import LocalMapRules
from .option import Option, entries, leaves_of, outputs_of
from .plan import Placements
from .rules import Row, axis_rows


@dataclass(frozen=True, slots=True)
class _Run:
    """What an operator gives on local shapes: shapes and bytes per output, seconds."""

    shapes: tuple[tuple[int, ...] | None, ...]
    bytes: tuple[int, ...]
    time_s: float


class OptionFinder:
    """Options of the operators of one graph on one mesh, memoised by operator and arguments."""

    def __init__(
        self, mesh: DeviceMesh, device: DeviceSpec, topology: Topology | None = None
    ) -> None:
        self.mesh_shape = tuple(mesh.shape)
        self.device_type = mesh.device_type
        self.device = device
        self.notes: list[str] = []
        topology = topology or Topology.from_mesh_shape(tuple(mesh.shape))
        self._written = LocalMapRules(mesh, device, topology)
        self._memo: dict[Any, tuple[Option, ...]] = {}
        self._rows: dict[Any, list[Row] | None] = {}
        self._shapes: dict[Any, tuple[int, ...] | None] = {}
        self._meshes: dict[int, DeviceMesh] = {}

    def options(self, node: torch.fx.Node) -> tuple[Option, ...]:
        """Options of one call_function node, the replicated one among them."""
        if node.target in (enter, leave) or is_local(node):
            return (self._written.option(node),)
        args, kwargs = _values(node)
        key = _key(node.target, args, kwargs)
        if key not in self._memo:
            self._memo[key] = self._find(node, args, kwargs, key)
        return self._memo[key]

    def _find(self, node: torch.fx.Node, args: Any, kwargs: Any, key: Any) -> tuple[Option, ...]:
        inputs = [n.meta.get("val") for n in leaves_of(node)]
        tensors = [v for v in inputs if isinstance(v, torch.Tensor)]
        outputs = outputs_of(node)
        replicated: Row = (
            tuple(None if v is None else Replicate() for v in outputs),
            (Replicate(),) * len(tensors),
        )
        per_axis = []
        for size in self.mesh_shape:
            rows = self._axis_rows(node, args, kwargs, key, size)
            if rows is None:
                self._without_rule(node)
                rows = []
            fitting = [
                r for r in _unique([replicated, *rows]) if _row_divides(r, outputs, tensors, size)
            ]
            per_axis.append(fitting)
        found: list[Option] = []
        tried: dict[Any, _Run | None] = {}
        for chosen in itertools.product(*per_axis):
            outs = tuple(
                None if v is None else tuple(r[0][i] for r in chosen) for i, v in enumerate(outputs)
            )
            ins = [tuple(r[1][i] for r in chosen) for i in range(len(tensors))]
            option = self._check(node, args, kwargs, inputs, outputs, ins, outs, tried)
            if option is not None:
                found.append(option)
        return tuple(found)

    def _check(
        self,
        node: torch.fx.Node,
        args: Any,
        kwargs: Any,
        inputs: Any,
        outputs: Any,
        ins: Any,
        outs: Any,
        tried: dict[Any, _Run | None],
    ) -> Option | None:
        """The option with its cost, or None where local shapes do not agree with it.

        `tried` holds what came of local shapes that another option of the same node has too.
        """
        tensors = [v for v in inputs if isinstance(v, torch.Tensor)]
        local = [self._local(v, p) for v, p in zip(tensors, ins, strict=True)]
        shapes = tuple(
            None if o is None else self._local(v, o) for v, o in zip(outputs, outs, strict=True)
        )
        if any(o is not None and s is None for o, s in zip(outs, shapes, strict=True)):
            return None
        if any(s is None for s in local):
            return None
        key = (tuple(local), shapes[0])
        if key not in tried:
            whole = all(s == tuple(v.shape) for s, v in zip(local, tensors, strict=True))
            unchanged = all(
                s is None or s == tuple(v.shape) for s, v in zip(shapes, outputs, strict=True)
            )
            if whole and unchanged:
                time = node_time_s(node.target, args, kwargs, node.meta.get("val"), self.device)
                sizes = tuple(0 if v is None else tensor_bytes(v) for v in outputs)
                tried[key] = _Run(shapes, sizes, time)
            else:
                tried[key] = self._run(node, args, kwargs, tensors, local, shapes[0])
        run = tried[key]
        if run is None or len(run.shapes) != len(shapes):
            return None
        if any(s is not None and s != got for s, got in zip(shapes, run.shapes, strict=True)):
            return None
        position = iter(ins)
        given = tuple(next(position) if isinstance(v, torch.Tensor) else None for v in inputs)
        held = sum(n for n, s in zip(run.bytes, shapes, strict=True) if s is not None)
        return Option(given, outs, run.time_s, held)

    def _local(self, value: torch.Tensor, placements: Placements) -> tuple[int, ...] | None:
        key = (value.shape, placements)
        if key not in self._shapes:
            self._shapes[key] = even_local_shape(value.shape, placements, self.mesh_shape)
        return self._shapes[key]

    def _run(
        self,
        node: torch.fx.Node,
        args: Any,
        kwargs: Any,
        tensors: Any,
        local: Any,
        shape: tuple[int, ...] | None,
    ) -> _Run | None:
        """Run the operator on meta tensors of local shapes; None where it refuses them."""
        queue = iter([_meta_like(v, s) for v, s in zip(tensors, local, strict=True)])
        local_args, local_kwargs = pytree.tree_map(
            lambda a: next(queue) if isinstance(a, torch.Tensor) else a, (args, kwargs)
        )
        local_args = local_sizes(node.target, local_args, node.meta["val"], shape)
        local_kwargs = {
            k: (torch.device("meta") if isinstance(v, torch.device) else v)
            for k, v in local_kwargs.items()
        }
        try:
            if node.target in FLEX:
                result = flex_shapes(node.target, local_args)
            else:
                result = node.target(*local_args, **local_kwargs)
        except (
            RuntimeError,
            IndexError,
            ValueError,
            TypeError,
            AssertionError,
            NotImplementedError,
        ):
            return None
        known = [r if isinstance(r, torch.Tensor) else None for r in entries(result)]
        return _Run(
            tuple(None if r is None else tuple(r.shape) for r in known),
            tuple(0 if r is None else tensor_bytes(r) for r in known),
            node_time_s(node.target, local_args, local_kwargs, result, self.device),
        )

    def _axis_rows(
        self, node: torch.fx.Node, args: Any, kwargs: Any, key: Any, size: int
    ) -> list[Row] | None:
        if (key, size) not in self._rows:
            if size not in self._meshes:
                self._meshes[size] = DeviceMesh(
                    self.device_type, list(range(size)), _init_backend=False, _rank=0
                )
            mesh = self._meshes[size]
            self._rows[key, size] = axis_rows(node.target, args, kwargs, outputs_of(node), mesh)
        return self._rows[key, size]

    def _without_rule(self, node: torch.fx.Node) -> None:
        line = source_line(node.meta.get("stack_trace")) or "an unknown line"
        if str(node.target).startswith("_c10d_functional."):
            # on the whole tensors that the graph is about, a sum over devices would add up equal copies
            raise CaptureError(
                f"communication written by hand ({node.target}, {line}): outside of local_map the graph is one "
                "of whole tensors. Take the call out, the search adds what placements need; or put it in a "
                "function under torch.distributed.tensor.experimental.local_map"
            )
        text = (
            f"no sharding rule for {node.target} ({line}): its inputs and outputs are replicated on "
            "every device"
        )
        if text not in self.notes:
            self.notes.append(text)
            warnings.warn(text, UserWarning, stacklevel=2)


def _meta_like(value: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """A dense meta tensor with the order of strides of `value`."""
    order = sorted(range(value.dim()), key=value.stride, reverse=True)
    dense = torch.empty([shape[d] for d in order], dtype=value.dtype, device="meta")
    return dense.permute([order.index(d) for d in range(value.dim())])


def _values(node: torch.fx.Node) -> tuple[Any, Any]:
    def value(arg: Any) -> Any:
        return arg.meta.get("val")

    args = torch.fx.map_arg(tuple(node.args), value)
    kwargs = torch.fx.map_arg(dict(node.kwargs), value)
    return (
        tuple(pytree.tree_map(lambda x: x, list(args))),
        dict(pytree.tree_map(lambda x: x, dict(kwargs))),
    )


def _key(op: Any, args: Any, kwargs: Any) -> Any:
    leaves, spec = pytree.tree_flatten((args, kwargs))
    parts = tuple(
        (tuple(a.shape), a.stride(), a.dtype) if isinstance(a, torch.Tensor) else repr(a)
        for a in leaves
    )
    return op, parts, str(spec)


def _unique(rows: Iterable[Row]) -> list[Row]:
    return list(dict.fromkeys(rows))


def _row_divides(row: Row, outputs: Any, inputs: Any, size: int) -> bool:
    values = [*outputs, *inputs]
    return all(
        v is None or p is None or divides(v.shape, (p,), (size,))
        for v, p in zip(values, [*row[0], *row[1]], strict=True)
    )
