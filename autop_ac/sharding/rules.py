"""Rules of one mesh axis: DTensor's own, by whichever of its four ways an operator has, and ours.

A row gives one placement per output and per tensor input. Only Partial("sum") and Partial("avg") are
kept, and rows that are right for DTensor but not for plain local operators are left out (`unsound`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard
from torch.utils import _pytree as pytree

from .. import _torch_sharding as private
from .flex_rules import FLEX, flex_rows
from .own_rules import OWN_RULES
from .unsound import is_unsound

Row = tuple[tuple[Placement | None, ...], tuple[Placement, ...]]  # outputs, inputs; one mesh axis


_MAX_DECOMPOSED = 4096  # combinations of input placements tried on a decomposition


def axis_rows(op: Any, args: Any, kwargs: Any, outputs: Any, mesh: DeviceMesh) -> list[Row] | None:
    """Rows of one mesh axis for `op`, or None where no rule is known.

    Args:
        args, kwargs: with fake tensors where the operator takes tensors.
        outputs: as `outputs_of`.
        mesh: of one axis.
    """
    if op in FLEX:
        return flex_rows(op, args)
    if not isinstance(op, private.OpOverload):
        return None
    tensors = [a for a in pytree.tree_leaves((args, kwargs)) if isinstance(a, torch.Tensor)]
    prop = private.sharding_propagator
    if op in OWN_RULES:
        rows: list[Any] | None = OWN_RULES[op](args, kwargs, outputs)
    elif not tensors or all(value is None for value in outputs):
        rows = []  # whole on every device: it makes something of nothing, or checks something
    elif op in prop.op_single_dim_strategy_funcs:
        rows = _single_dim_rows(op, args, kwargs, outputs, tensors)
    elif op in prop.op_strategy_funcs:
        rows = _strategy_rows(prop.op_strategy_funcs[op], op, args, kwargs, outputs, tensors, mesh)
    else:
        rows = _decomposed_rows(op, args, kwargs, outputs, tensors, mesh)
    if rows is None:
        return None
    tidy = [_tidy(op, args, kwargs, row, outputs, tensors) for row in rows]
    kept = [row for row in tidy if row is not None]
    return None if rows and not kept else kept  # rows of which we take none are no rule


def _tidy(op: Any, args: Any, kwargs: Any, row: Any, outputs: Any, tensors: Any) -> Row | None:
    """The row with plain placements in canonical form; None where we do not take it."""
    outs, ins = row
    if len(outs) != len(outputs) or len(ins) != len(tensors):
        return None
    clean_outs: list[Placement | None] = []
    for placement, value in zip(outs, outputs, strict=True):
        if value is None:
            clean_outs.append(None)
            continue
        # of the seeds that attention gives DTensor says nothing: each device has its own
        clean = Replicate() if placement is None else _plain(placement, value.dim())
        if clean is None:
            return None
        clean_outs.append(clean)
    clean_ins = [_plain(p, t.dim()) for p, t in zip(ins, tensors, strict=True)]
    if any(p is None for p in clean_ins):
        return None
    if is_unsound(op, args, kwargs, tensors, clean_outs, clean_ins):  # type: ignore[arg-type]
        return None
    return tuple(clean_outs), tuple(clean_ins)  # type: ignore[arg-type]


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


def _single_dim_rows(
    op: Any, args: Any, kwargs: Any, outputs: Any, tensors: Any
) -> list[Any] | None:
    def meta(arg: Any) -> Any:
        return _tensor_meta(arg) if isinstance(arg, torch.Tensor) else arg

    given, named = list(args), dict(kwargs)
    for argument in op._schema.arguments[len(args) :]:  # rules may look at those left out
        value = named.get(argument.name, argument.default_value)
        if argument.kwarg_only or isinstance(value, torch.Tensor):
            break  # tensors stay in the order of the row
        named.pop(argument.name, None)
        given.append(value)
    func = private.sharding_propagator.op_single_dim_strategy_funcs[op].func
    try:
        rows = func(op, *pytree.tree_map(meta, (tuple(given), named)))
    except Exception:  # a rule refuses arguments by whatever exception it likes
        return None
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
