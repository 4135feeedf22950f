"""The placements that an operator may compute with: DTensor's own rules, checked on local shapes.

An option of an operator gives placements of its tensor inputs and of its outputs such that running
the operator on each device's local inputs gives each device its local outputs. Rules are asked for
one mesh axis at a time (`axis_rows`), the product over the axes is taken, and an option stays when

- every Shard divides its dim evenly, so that all devices run the same graph, and
- the operator, run on meta tensors of the local shapes, gives the local shapes of the outputs.

Only Partial("sum") and Partial("avg") are kept. Where no rule is found everything is replicated, and
a warning says so.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard
from torch.utils import _pytree as pytree

from .. import _torch_sharding as private
from ..capture.names import source_line
from ..graph.cost import node_time_s, tensor_bytes
from ..graph.devices import DeviceSpec
from .plan import Placements

aten = torch.ops.aten
Row = tuple[tuple[Placement | None, ...], tuple[Placement, ...]]  # outputs, inputs; one mesh axis
_MAX_DECOMPOSED = 4096  # combinations of input placements tried on a decomposition


@dataclass(frozen=True, slots=True)
class Option:
    """One way to place a node; `inputs` and `outputs` as in `Choice`.

    Attributes:
        compute_s: seconds of the local computation.
        output_bytes: bytes of the local outputs, for breaking ties.
    """

    inputs: tuple[Placements | None, ...]
    outputs: tuple[Placements | None, ...]
    compute_s: float = 0.0
    output_bytes: int = 0


def leaves_of(node: torch.fx.Node) -> list[torch.fx.Node]:
    """The FX-node arguments in the order that `Choice.inputs` uses."""
    leaves = pytree.arg_tree_leaves(*node.args, **node.kwargs)
    return [a for a in leaves if isinstance(a, torch.fx.Node)]


def outputs_of(node: torch.fx.Node) -> tuple[torch.Tensor | None, ...]:
    """What the operator gives: one value for a tensor, one per entry for a tuple or list."""
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else (value,)
    return tuple(v if isinstance(v, torch.Tensor) else None for v in values)


def divides(shape: Sequence[int], placements: Placements, mesh_shape: Sequence[int]) -> bool:
    """Whether every Shard cuts its dim into equal parts."""
    return even_local_shape(shape, placements, mesh_shape) is not None


def even_local_shape(
    shape: Sequence[int], placements: Placements, mesh_shape: Sequence[int]
) -> tuple[int, ...] | None:
    """The local shape, or None where a dim does not divide."""
    local = list(shape)
    for placement, size in zip(placements, mesh_shape, strict=True):
        if isinstance(placement, Shard):
            if placement.dim >= len(local) or local[placement.dim] % size:
                return None
            local[placement.dim] //= size
    return tuple(local) if 0 not in local or 0 in shape else None


def free_placements(
    shape: Sequence[int], mesh_shape: Sequence[int], *, uneven: bool = False
) -> list[Placements]:
    """Every placement without Partial of a tensor; with `uneven`, shards need not be equal."""
    per_axis = [[Replicate(), *(Shard(d) for d in range(len(shape)))] for _ in mesh_shape]
    found = []
    for placements in itertools.product(*per_axis):
        ok = divides(shape, placements, mesh_shape)
        if ok or (uneven and _large_enough(shape, placements, mesh_shape)):
            found.append(tuple(placements))
    return found


def _large_enough(shape: Sequence[int], placements: Placements, mesh_shape: Sequence[int]) -> bool:
    """Uneven shards of which none is empty, each dim cut by one axis only."""
    dims = [p.dim for p in placements if isinstance(p, Shard)]
    pairs = zip(placements, mesh_shape, strict=True)
    return len(set(dims)) == len(dims) and all(
        shape[p.dim] > n * (-(-shape[p.dim] // n) - 1) and shape[p.dim] >= n
        and -(-shape[p.dim] // n) * (n - 1) < shape[p.dim]
        for p, n in pairs if isinstance(p, Shard)
    )  # fmt: skip


class OptionFinder:
    """Options of the operators of one graph on one mesh, memoised by operator and arguments."""

    def __init__(self, mesh: DeviceMesh, device: DeviceSpec) -> None:
        self.mesh_shape = tuple(mesh.shape)
        self.device_type = mesh.device_type
        self.device = device
        self.notes: list[str] = []
        self._memo: dict[Any, tuple[Option, ...]] = {}
        self._rows: dict[Any, list[Row] | None] = {}
        self._meshes: dict[int, DeviceMesh] = {}

    def options(self, node: torch.fx.Node) -> tuple[Option, ...]:
        """Options of one call_function node, the replicated one among them."""
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
            rows = self._axis_rows(node, args, kwargs, key, size) if tensors else []
            if rows is None:
                self._warn(node)
                rows = []
            fitting = [
                r for r in _unique([replicated, *rows]) if _row_divides(r, outputs, tensors, size)
            ]
            per_axis.append(fitting)
        found: list[Option] = []
        for chosen in itertools.product(*per_axis):
            outs = tuple(
                None if v is None else tuple(r[0][i] for r in chosen) for i, v in enumerate(outputs)
            )
            ins = [tuple(r[1][i] for r in chosen) for i in range(len(tensors))]
            option = self._check(node, args, kwargs, inputs, outputs, ins, outs)
            if option is not None:
                found.append(option)
        return tuple(found)

    def _check(
        self, node: Any, args: Any, kwargs: Any, inputs: Any, outputs: Any, ins: Any, outs: Any
    ) -> Option | None:
        """The option with its cost, or None where local shapes do not agree with it."""
        given, position = [], iter(ins)
        for value in inputs:
            given.append(next(position) if isinstance(value, torch.Tensor) else None)
        replicated = all(_is_plain_replicate(p) for p in [*ins, *(o for o in outs if o)])
        shapes = [
            None if o is None else even_local_shape(v.shape, o, self.mesh_shape)
            for v, o in zip(outputs, outs, strict=True)
        ]
        if any(o is not None and s is None for o, s in zip(outs, shapes, strict=True)):
            return None
        if replicated:
            time = node_time_s(node.target, args, kwargs, node.meta.get("val"), self.device)
            total = sum(tensor_bytes(v) for v in outputs if v is not None)
            return Option(tuple(given), outs, time, total)
        tensors = [v for v in inputs if isinstance(v, torch.Tensor)]
        local_inputs = []
        for value, placements in zip(tensors, ins, strict=True):
            shape = even_local_shape(value.shape, placements, self.mesh_shape)
            if shape is None:
                return None
            local_inputs.append(_meta_like(value, shape))
        queue = iter(local_inputs)
        local_args, local_kwargs = pytree.tree_map(
            lambda a: next(queue) if isinstance(a, torch.Tensor) else a, (args, kwargs)
        )
        local_args = local_sizes(node.target, local_args, node.meta["val"], shapes[0])
        local_kwargs = {
            k: (torch.device("meta") if isinstance(v, torch.device) else v)
            for k, v in local_kwargs.items()
        }
        try:
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
        results = result if isinstance(result, (tuple, list)) else (result,)
        if len(results) != len(outs):
            return None
        total = 0
        for got, shape in zip(results, shapes, strict=True):
            if shape is None:
                continue
            if not isinstance(got, torch.Tensor) or tuple(got.shape) != shape:
                return None
            total += tensor_bytes(got)
        time = node_time_s(node.target, local_args, local_kwargs, result, self.device)
        return Option(tuple(given), outs, time, total)

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

    def _warn(self, node: torch.fx.Node) -> None:
        line = source_line(node.meta.get("stack_trace")) or "an unknown line"
        text = (
            f"no sharding rule for {node.target} ({line}): its inputs and outputs are replicated on "
            "every device"
        )
        if text not in self.notes:
            self.notes.append(text)
            warnings.warn(text, UserWarning, stacklevel=2)


def local_sizes(op: Any, args: Any, value: Any, shape: tuple[int, ...] | None) -> Any:
    """Size arguments that speak of the output, replaced by its local shape."""
    where = private.sharding_propagator.op_to_shape_and_stride_idx.get(op)
    if where is None or shape is None or not isinstance(value, torch.Tensor):
        return args
    if shape == tuple(value.shape):
        return args
    changed = list(args)
    changed[where[0] if isinstance(where, tuple) else where] = list(shape)
    if isinstance(where, tuple):
        changed[where[1]] = list(torch.empty(shape, device="meta").stride())
    return tuple(changed)


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


def _is_plain_replicate(placements: Placements) -> bool:
    return all(isinstance(p, Replicate) for p in placements)


def _row_divides(row: Row, outputs: Any, inputs: Any, size: int) -> bool:
    values = [*outputs, *inputs]
    return all(
        v is None or p is None or divides(v.shape, (p,), (size,))
        for v, p in zip(values, [*row[0], *row[1]], strict=True)
    )


# ---------------------------------------------------------------- rules of one mesh axis


def axis_rows(op: Any, args: Any, kwargs: Any, outputs: Any, mesh: DeviceMesh) -> list[Row] | None:
    """Rows of one mesh axis for `op`, or None where no rule is known.

    Args:
        args, kwargs: with fake tensors where the operator takes tensors.
        outputs: as `outputs_of`.
        mesh: of one axis.
    """
    if not isinstance(op, private.OpOverload):
        return None
    tensors = [a for a in pytree.tree_leaves((args, kwargs)) if isinstance(a, torch.Tensor)]
    prop = private.sharding_propagator
    if op in _OWN_RULES:
        rows: list[Any] | None = _OWN_RULES[op](args, kwargs, outputs)
    elif op in prop.op_single_dim_strategy_funcs:
        rows = _single_dim_rows(op, args, kwargs, outputs, tensors)
    elif op in prop.op_strategy_funcs:
        rows = _strategy_rows(prop.op_strategy_funcs[op], op, args, kwargs, outputs, tensors, mesh)
    else:
        rows = _decomposed_rows(op, args, kwargs, outputs, tensors, mesh)
    if rows is None:
        return None
    return [r for r in (_tidy(op, row, outputs, tensors) for row in rows) if r is not None]


def _tidy(op: Any, row: Any, outputs: Any, tensors: Any) -> Row | None:
    """The row with plain placements in canonical form; None where we do not take it."""
    outs, ins = row
    if len(outs) != len(outputs) or len(ins) != len(tensors):
        return None
    clean_outs: list[Placement | None] = []
    for placement, value in zip(outs, outputs, strict=True):
        if value is None:
            clean_outs.append(None)
            continue
        clean = _plain(placement, value.dim())
        if clean is None:
            return None
        clean_outs.append(clean)
    clean_ins = [_plain(p, t.dim()) for p, t in zip(ins, tensors, strict=True)]
    if any(p is None for p in clean_ins):
        return None
    if _is_random(op) and any(isinstance(p, Partial) for p in clean_ins):
        return None
    if "nll_loss" in str(op) and Partial("avg") in clean_outs:
        return None  # devices may ignore different numbers of targets
    if "batch_norm" in str(op) and "no_training" not in str(op):
        # local statistics are not those of the whole batch
        if isinstance(clean_ins[0], Shard) and clean_ins[0].dim != 1:
            return None
        if any(isinstance(p, Partial) for p in [*clean_outs, *clean_ins]):
            return None
    if op in private.sharding_propagator.op_to_scalar_shape_adjuster:
        # its scalar sizes speak of global shapes, and nothing adapts them
        if not all(isinstance(p, Replicate) for p in clean_ins):
            return None
    return tuple(clean_outs), tuple(clean_ins)  # type: ignore[arg-type]


def _is_random(op: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in op.tags


def _plain(placement: Any, ndim: int) -> Placement | None:
    if type(placement) is Shard:
        return Shard(placement.dim % ndim) if ndim else None
    if type(placement) is Replicate:
        return placement
    if type(placement) is Partial and placement.reduce_op in ("sum", "avg"):
        return placement
    if isinstance(placement, private.ShardingPlaceholder):
        return Shard(placement.dim % ndim) if ndim else None
    return None


def _tensor_meta(value: torch.Tensor) -> Any:
    return private.TensorMeta(value.shape, value.stride(), value.dtype)


def _single_dim_rows(op: Any, args: Any, kwargs: Any, outputs: Any, tensors: Any) -> list[Any]:
    def meta(arg: Any) -> Any:
        return _tensor_meta(arg) if isinstance(arg, torch.Tensor) else arg

    args_meta, kwargs_meta = pytree.tree_map(meta, (tuple(args), dict(kwargs)))
    rows = private.sharding_propagator.op_single_dim_strategy_funcs[op].func(
        op, args_meta, kwargs_meta
    )
    count = len(outputs)
    return [(row[:count], row[count:]) for row in rows if len(row) == count + len(tensors)]


def _candidates(tensors: Sequence[torch.Tensor]) -> list[Placement]:
    ndim = max((t.dim() for t in tensors), default=0)
    return [Replicate(), *(Shard(d) for d in range(ndim)), Partial("sum"), Partial("avg")]


def _strategy_rows(
    func: Callable[..., Any],
    op: Any,
    args: Any,
    kwargs: Any,
    outputs: Any,
    tensors: Any,
    mesh: DeviceMesh,
) -> list[Any] | None:
    """Ask a strategy with every input at one same placement, for each placement in turn."""
    prop = private.sharding_propagator
    rows: list[Any] = []
    errors = 0
    candidates = _candidates(tensors)
    for candidate in candidates:

        def strategy(value: Any, p: Placement = candidate) -> Any:
            fits = not isinstance(p, Shard) or p.dim < value.dim()
            spec = private.DTensorSpec(
                mesh, (p if fits else Replicate(),), tensor_meta=_tensor_meta(value)
            )
            return private.OpStrategy([private.OpSpec(spec)])

        def wrap(arg: Any, strategy: Any = strategy) -> Any:
            if isinstance(arg, torch.Tensor):
                return strategy(arg)
            if isinstance(arg, (list, tuple)) and arg:
                if all(isinstance(a, torch.Tensor) for a in arg):
                    return private.TupleStrategy([strategy(a) for a in arg])
                return type(arg)(wrap(a) for a in arg)
            return arg

        schema = private.OpSchema(
            op,
            tuple(wrap(a) for a in args),
            {k: wrap(v) for k, v in kwargs.items()},
            schema_info=prop.op_to_schema_info.get(op),
        )
        try:
            found = func(schema)
        except Exception:  # a rule refuses a placement by whatever exception it likes
            errors += 1
            continue
        rows.extend(_rows_of(found, outputs, tensors))
    return None if errors == len(candidates) else rows


def _rows_of(found: Any, outputs: Any, tensors: Any) -> list[Any]:
    if isinstance(found, private.TupleStrategy):
        children = [c.strategies for c in found.children]
        rows = []
        for specs in zip(*children, strict=False):
            outs = [_one(s.output_specs) for s in specs]
            ins = [_one(i) for i in (specs[0].input_specs or [specs[0].output_specs])]
            rows.append((outs, ins))
        return rows
    rows = []
    for spec in found.strategies:
        out = spec.output_specs
        outs = [_one(o) for o in out] if isinstance(out, (tuple, list)) else [_one(out)]
        if len(outs) == 1 and len(outputs) > 1:
            outs = outs * len(outputs)
        given = spec.input_specs
        ins = [_one(i) for i in given] if given is not None else [outs[0]] * len(tensors)
        rows.append((outs, ins))
    return rows


def _one(spec: Any) -> Any:
    return None if spec is None else spec.placements[0]


def _decomposed_rows(
    op: Any, args: Any, kwargs: Any, outputs: Any, tensors: Any, mesh: DeviceMesh
) -> list[Any] | None:
    strategy = private.sharding_propagator.decomp_strategy
    combinations = 1
    ndim = max(t.dim() for t in tensors)
    for _ in tensors:
        combinations *= ndim + 1
    if not strategy.has_decomp(op) or combinations > _MAX_DECOMPOSED or ndim == 0:
        return None

    def spec(arg: Any) -> Any:
        if not isinstance(arg, torch.Tensor):
            return arg
        placement = Shard(0) if arg.dim() else Replicate()
        return private.DTensorSpec(mesh, (placement,), tensor_meta=_tensor_meta(arg))

    try:
        strategy.ensure_schema_info(op)
        schema = private.OpSchema(
            op,
            tuple(pytree.tree_map(spec, list(args))),
            pytree.tree_map(spec, dict(kwargs)),
            schema_info=private.sharding_propagator.op_to_schema_info.get(op),
        )
        found = strategy.propagate_strategy(schema)
    except Exception:  # decompositions fail in as many ways as there are operators
        return None
    return None if found is None else _rows_of(found, outputs, tensors)


# ---------------------------------------------------------------- rules of ours


def _elementwise(args: Any, kwargs: Any, outputs: Any) -> list[Any]:
    """One tensor in, outputs of its shape: every dim may be sharded."""
    value = next(a for a in pytree.tree_leaves((args, kwargs)) if isinstance(a, torch.Tensor))
    return [
        ([None if o is None else Shard(d) for o in outputs], [Shard(d)])
        for d in range(value.dim())
        if all(o is None or o.dim() == value.dim() for o in outputs)
    ]


def _copy(args: Any, kwargs: Any, outputs: Any) -> list[Any]:
    """``copy(self, src)`` where both have one shape."""
    target, source = args[0], args[1]
    dims = range(target.dim()) if target.shape == source.shape else ()
    return [([Shard(d)], [Shard(d), Shard(d)]) for d in dims]


def _attention(args: Any, kwargs: Any, outputs: Any) -> list[Any]:
    """Batch and heads (dims 0 and 1 of every tensor) are independent of each other."""
    tensors = [a for a in pytree.tree_leaves((args, kwargs)) if isinstance(a, torch.Tensor)]
    mask = kwargs.get("attn_mask")
    rows: list[Any] = []
    for dim in (0, 1):
        ins: list[Placement] = []
        for t in tensors:
            from_end = t.dim() == 4 or t is not mask
            there = from_end and t.shape[dim] > 1
            ins.append(Shard(dim) if there or t is not mask else Replicate())
        rows.append(([None if o is None else Shard(dim) for o in outputs], ins))
    return rows


_OWN_RULES: Mapping[Any, Callable[[Any, Any, Any], list[Any]]] = {
    aten.bernoulli.p: _elementwise,
    aten.bernoulli.default: _elementwise,
    aten.lift_fresh_copy.default: _elementwise,
    aten.copy.default: _copy,
    aten.native_dropout.default: _elementwise,
    aten._scaled_dot_product_flash_attention_for_cpu.default: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention,
}
