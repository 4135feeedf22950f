"""Facts of a tagged joint FX graph: one pass over the nodes, linear in nodes and edges.

What is worth knowing about how values are told apart:

- *Side.* AOTAutograd's ``partitioner_tag`` is believed, then corrected by what a node reads: what
  depends on a tangent or on a backward value is backward, and what a forward output needs is forward.
- *Storage.* Two fake values that share an untyped storage share memory. A value whose tensors all live
  in storages of its inputs is a view, allocates nothing and follows the input that owns the storage.
  ``wait_tensor`` gives its argument back at run time although its fake value is a new one.
- *Effects.* An operator is effectful when FX would not remove it for a reason other than randomness;
  ``_c10d_functional`` collectives and their wait, which torch also marks, may be repeated or dropped.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from .._torch_partition import OpOverload
from ..capture.joint import Port
from ..capture.names import module_path, source_line
from .facts import Facts, Role, Side, Value

_ROLES: Mapping[str, Role] = {
    "parameter": "parameter", "buffer": "buffer", "input": "input", "tangent": "tangent",
}  # fmt: skip
_COLLECTIVE_NAMESPACES = ("_c10d_functional", "_c10d_functional_autograd", "_dtensor", "symm_mem")


def collect_facts(
    gm: fx.GraphModule,
    placeholders: Mapping[str, Port],
    results: tuple[Port | None, ...],
    num_forward_outputs: int,
    time_s: Callable[[fx.Node], float] = lambda node: 0.0,
) -> Facts:
    """Describe `gm` as a frozen value.

    Args:
        gm: local joint graph; each node has ``meta["val"]`` (fake) and ``meta["partitioner_tag"]``.
        placeholders: a port for each placeholder's name.
        results: a port for each entry of the output node's list.
        num_forward_outputs: how many leading results are forward's.
        time_s: seconds to compute a node once.
    """
    nodes = list(gm.graph.nodes)
    index = {n: i for i, n in enumerate(nodes)}
    flat = pytree.arg_tree_leaves(*nodes[-1].args)
    forward_results = [r for r in flat[:num_forward_outputs] if isinstance(r, fx.Node)]
    backward_results = [r for r in flat[num_forward_outputs:] if isinstance(r, fx.Node)]
    sides = sides_of(nodes, placeholders, forward_results)
    ledger = _Ledger()
    mutated = _mutated_inputs(nodes, placeholders, results)
    values: list[Value] = []
    mutated_storages: set[int] = set()
    for node in nodes:
        storages, new_bytes, follows = ledger.enter(node)
        if node in mutated:
            mutated_storages.update(storages)
        reads = set().union(*(ledger.storages_of[a] for a in node.all_input_nodes), ())
        port = placeholders.get(node.name) if node.op == "placeholder" else None
        note = _note(node)
        collective = _collective(node)
        val = node.meta.get("val")
        tensor = next(iter(_tensors(val)), None)
        values.append(
            Value(
                index=index[node],
                name=node.name,
                op=_op(node),
                side=sides[node],
                inputs=tuple(dict.fromkeys(index[a] for a in node.all_input_nodes)),
                role=_ROLES[port.kind] if port else "",
                parameter=_parameter(port, note, collective),
                bytes=new_bytes,
                storages=storages,
                time_s=_as_float(time_s(node)) if node.op == "call_function" else 0.0,
                follows=None if follows is None else index[follows],
                is_tensor=tensor is not None,
                random=draws_random(node),
                effectful=_is_effectful(node),
                reads_mutated=sides[node] == "forward" and not reads.isdisjoint(mutated_storages),
                collective=collective,
                holds=tuple(dict.fromkeys(index[a] for a in _held_until(node))),
                axis=note.get("axis", ""),
                origin=note.get("origin", ""),
                serves=note.get("serves", ""),
                captured_op=note.get("captured_op", ""),
                module=note["module"],
                source=note["source"],
                shape=() if tensor is None else tuple(as_int(s) for s in tensor.shape),
                dtype="" if tensor is None else str(tensor.dtype).removeprefix("torch."),
            )
        )
    held = (v for v in values if v.role in ("parameter", "buffer"))
    own = {s for v in held for s in v.storages}
    return Facts(
        values=tuple(values),
        forward_outputs=tuple(index[r] for r in forward_results),
        backward_outputs=tuple(index[r] for r in backward_results),
        storage_bytes=tuple(ledger.storage_bytes),
        parameter_bytes=sum(ledger.storage_bytes[s] for s in own),
    )


def follows_of(nodes: list[fx.Node]) -> dict[fx.Node, Any]:
    """The node whose decision each node takes, None where it is decided by itself."""
    ledger = _Ledger()
    return {node: ledger.enter(node)[2] for node in nodes}


def as_int(size: Any) -> int:
    """A size as a number; of a symbolic size its hint, without making a guard; 0 without one."""
    if isinstance(size, torch.SymInt):
        return int(size.node.hint) if size.node.has_hint() else 0
    return int(size)


def _as_float(time_s: Any) -> float:
    """Seconds as a number; of symbolic sizes at their hints, without making a guard."""
    if isinstance(time_s, torch.SymFloat):
        return float(time_s.node.hint) if time_s.node.has_hint() else 0.0
    return float(time_s)


def _tensors(val: Any) -> Iterable[torch.Tensor]:
    if isinstance(val, torch.Tensor):
        return (val,)
    return (t for t in pytree.tree_leaves(val) if isinstance(t, torch.Tensor))


def _op(node: fx.Node) -> str:
    if node.op != "call_function":
        return node.op
    return "getitem" if node.target is operator.getitem else _text(node.target)


def _text(target: Any) -> str:
    return _name(target) if isinstance(target, OpOverload) else str(target)


@cache
def _name(target: OpOverload) -> str:
    return str(target)


def draws_random(node: fx.Node) -> bool:
    """Whether an operator draws random numbers; attention with a dropout of zero does not."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    names = [a.name for a in node.target._schema.arguments]
    if "dropout_p" not in names:
        return True
    given = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    return given.get("dropout_p", 0.0) != 0.0


def _is_wait(node: fx.Node) -> bool:
    return _text(node.target).endswith("wait_tensor.default")


def _held_until(node: fx.Node) -> list[fx.Node]:
    """What the collective reads that a wait is for."""
    if not _is_wait(node):
        return []
    source = node.args[0]
    if isinstance(source, fx.Node) and source.target is operator.getitem:
        source = source.args[0]
    if not isinstance(source, fx.Node) or not _collective(source):
        return []
    return source.all_input_nodes


def _collective(node: fx.Node) -> str:
    return _collective_of(node.target) if isinstance(node.target, OpOverload) else ""


@cache
def _collective_of(target: OpOverload) -> str:
    if target._opname == "wait_tensor":
        return ""
    return target._opname if target.namespace in _COLLECTIVE_NAMESPACES else ""


def _is_effectful(node: fx.Node) -> bool:
    if node.op in ("placeholder", "output", "get_attr"):
        return False
    target = node.target
    if isinstance(target, OpOverload) and target._schema.is_mutable:
        return True
    if _is_wait(node) or _collective(node):
        return False
    return "with_effects" in _text(target) or node.is_impure(impure_random=False)


def sides_of(
    nodes: list[fx.Node], placeholders: Mapping[str, Port], forward_results: list[fx.Node]
) -> dict[fx.Node, Side]:
    """The side of each node; placeholders without a port are told apart by AOTAutograd's names."""

    def is_tangent(node: fx.Node) -> bool:
        port = placeholders.get(node.name)
        return port.kind == "tangent" if port else "tangents" in str(node.target)

    for_forward = set(forward_results)
    for node in reversed(nodes):
        if node in for_forward:
            for_forward.update(node.all_input_nodes)
    after_tangent: set[fx.Node] = set()
    sides: dict[fx.Node, Side] = {}
    for node in nodes:
        if node.op == "placeholder":
            sides[node] = "input"
            if is_tangent(node):
                after_tangent.add(node)
            continue
        if node.op == "output":
            sides[node] = "output"
            continue
        if any(a in after_tangent for a in node.all_input_nodes):
            after_tangent.add(node)
        tag = node.meta.get("partitioner_tag")
        backward = node in after_tangent
        if node not in for_forward:
            backward = backward or tag in ("is_backward", "must_be_in_backward")
            backward = backward or any(sides[a] == "backward" for a in node.all_input_nodes)
        sides[node] = "backward" if backward else "forward"
    return sides


def _mutated_inputs(
    nodes: list[fx.Node], placeholders: Mapping[str, Port], results: tuple[Port | None, ...]
) -> set[fx.Node]:
    """Placeholders that get a new value: by a mutation among the results, or by an operator."""
    names = {p.name for p in results if p is not None and p.kind == "mutation"}
    holders = [n for n in nodes if n.op == "placeholder"]
    found = {
        n
        for n in holders
        if n.name in placeholders
        and placeholders[n.name].kind != "tangent"
        and placeholders[n.name].name in names
    }
    for node in nodes:
        target = node.target
        if not isinstance(target, OpOverload) or not target._schema.is_mutable:
            continue
        for argument, given in zip(target._schema.arguments, node.args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                written = pytree.arg_tree_leaves(given)
                found.update(n for n in written if isinstance(n, fx.Node) and n.op == "placeholder")
    return found


@dataclass
class _Ledger:
    """Ids of storages, dense in order of first sight; local to one call of `collect_facts`."""

    id_of: dict[int, int] = field(default_factory=dict)
    storage_bytes: list[int] = field(default_factory=list)
    storages_of: dict[fx.Node, tuple[int, ...]] = field(default_factory=dict)

    def enter(self, node: fx.Node) -> tuple[tuple[int, ...], int, fx.Node | None]:
        """Storages of a node's tensors, the bytes it allocates, and the node that it follows."""
        tensors = [] if node.op == "output" else list(_tensors(node.meta.get("val")))
        if _is_wait(node) and isinstance(node.args[0], fx.Node):
            waited = self.storages_of[node.args[0]]
            for (
                tensor
            ) in tensors:  # later views of the fake result land in the collective's storage
                self.id_of.setdefault(_key(tensor), waited[0] if waited else self._new(tensor))
            self.storages_of[node] = waited
            return waited, 0, node.args[0]
        known = len(self.storage_bytes)
        ids = tuple(dict.fromkeys(self._id(t, node) for t in tensors))
        self.storages_of[node] = ids
        new = sum(self.storage_bytes[s] for s in ids if s >= known)
        if node.target is operator.getitem:
            return ids, 0, node.args[0]
        follows = None
        if ids and node.op == "call_function" and all(s < known for s in ids):
            owners = (
                a for a in node.all_input_nodes if not set(ids).isdisjoint(self.storages_of[a])
            )
            follows = next(owners, None)
        return ids, new, follows

    def _id(self, tensor: torch.Tensor, node: fx.Node) -> int:
        key = _key(tensor)
        if key not in self.id_of:
            # a constant of the graph module is alive whatever is decided: no bytes of ours
            self.id_of[key] = self._new(tensor, free=node.op == "get_attr")
        return self.id_of[key]

    def _new(self, tensor: torch.Tensor, free: bool = False) -> int:
        self.storage_bytes.append(0 if free else _storage_bytes(tensor))
        return len(self.storage_bytes) - 1


def _key(tensor: torch.Tensor) -> int:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # sparse and opaque layouts have no storage
        return -id(tensor)


def _storage_bytes(tensor: torch.Tensor) -> int:
    try:
        return as_int(tensor.untyped_storage().nbytes())
    except (NotImplementedError, RuntimeError):
        count = 1
        for size in tensor.shape:
            count *= as_int(size)
        return count * tensor.element_size()


def _note(node: fx.Node) -> dict[str, str]:
    """What the shard pass wrote on a node; module and source from torch's metadata otherwise."""
    custom = node.meta.get("custom")
    note = dict(custom.get("autop_ac") or {}) if isinstance(custom, dict) else {}
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if "module" not in note:
        note["module"] = module_path(stack)
    if "source" not in note:
        note["source"] = source_line(node.meta.get("stack_trace")) or ""
    return note


def _parameter(port: Port | None, note: Mapping[str, str], collective: str) -> str:
    if port is not None:
        return port.name if port.kind in ("parameter", "buffer") else ""
    return note.get("parameter", "") if collective else ""
