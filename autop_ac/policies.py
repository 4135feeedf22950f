"""Selectors: which operators a hint or a rule is about.

A selector is a small frozen value that hashes, compares and prints. It is matched against the text
of an operator (``str(node.target)``), so that everything that decides stays free of torch objects.
"""

from __future__ import annotations

import difflib
import enum
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from . import _torch_annotate as private
from .errors import ConfigError


class Group(enum.Enum):
    """Ready-made groups of operators; an enum, because Dynamo takes its members as constants."""

    MATMUL = "MATMUL"
    ATTENTION = "ATTENTION"
    COLLECTIVES = "COLLECTIVES"

    def __repr__(self) -> str:
        return self.name


MATMUL = Group.MATMUL
ATTENTION = Group.ATTENTION
COLLECTIVES = Group.COLLECTIVES

# Every overload of these packets, whatever the device picks, and higher-order operators by name.
_MEMBERS = {
    Group.MATMUL: (
        "aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm", "aten.matmul", "aten.linear",
        "aten.einsum",
    ),
    Group.ATTENTION: (
        "aten.scaled_dot_product_attention",
        "aten._scaled_dot_product_attention_math",
        "aten._scaled_dot_product_attention_math_for_mps",
        "aten._scaled_dot_product_flash_attention",
        "aten._scaled_dot_product_flash_attention_for_cpu",
        "aten._scaled_dot_product_efficient_attention",
        "aten._scaled_dot_product_cudnn_attention",
        "aten._scaled_dot_product_fused_attention_overrideable",
        "aten._flash_attention_forward",
        "aten._flash_attention_forward_no_dropout_inplace",
        "aten._efficient_attention_forward",
        "aten._cudnn_attention_forward",
        "flex_attention",
    ),
    Group.COLLECTIVES: (
        "_c10d_functional.all_gather_into_tensor",
        "_c10d_functional.all_gather_into_tensor_out",
        "_c10d_functional.all_gather_into_tensor_coalesced",
        "_c10d_functional.reduce_scatter_tensor",
        "_c10d_functional.reduce_scatter_tensor_coalesced",
        "_c10d_functional.all_reduce",
        "_c10d_functional.all_reduce_",
        "_c10d_functional.all_reduce_coalesced",
        "_c10d_functional.all_reduce_coalesced_",
        "_c10d_functional.all_to_all_single",
        "_c10d_functional.broadcast",
        "_c10d_functional.broadcast_",
        "_c10d_functional.wait_tensor",
        "_c10d_functional_autograd.all_gather_into_tensor",
        "_c10d_functional_autograd.reduce_scatter_tensor",
        "_c10d_functional_autograd.all_to_all_single",
        "_dtensor.shard_dim_alltoall",
    ),
}  # fmt: skip


def packet_of(op_text: str) -> str:
    """``"aten.mm"`` of ``"aten.mm.default"``; a higher-order operator is its own packet."""
    parts = op_text.split(".")
    return ".".join(parts[:2])


def short_name(op_text: str) -> str:
    """``"mm"`` of ``"aten.mm.default"``, for messages."""
    parts = op_text.split(".")
    return parts[1] if len(parts) > 1 else op_text


@dataclass(frozen=True, slots=True)
class Selector:
    """A set of operators.

    Attributes:
        text: ``"aten.mm.default"``, ``"aten.mm"`` (every overload), the name of a higher-order
            operator, or the name of a `Group`.
    """

    text: str

    @property
    def packets(self) -> tuple[str, ...]:
        """The packets that it covers, wholly or, for one overload, in part."""
        group = Group.__members__.get(self.text)
        return _MEMBERS[group] if group is not None else (packet_of(self.text),)

    def matches(self, op_text: str) -> bool:
        """Whether the operator with this text, such as ``"aten.mm.default"``, is selected."""
        return op_text == self.text or packet_of(op_text) in self._whole_packets()

    def overlap(self, other: Selector) -> tuple[str, ...]:
        """Packets or overloads that both select, sorted; empty when they are disjoint."""
        both = set(self.packets) & set(other.packets)
        if self._whole_packets() and other._whole_packets():
            return tuple(sorted(both))
        one, two = (self, other) if not self._whole_packets() else (other, self)
        return (one.text,) if two.matches(one.text) else ()

    def _whole_packets(self) -> tuple[str, ...]:
        return () if self.text.count(".") > 1 else self.packets

    def __str__(self) -> str:
        return self.text


def parse_selector(x: Any) -> Selector:
    """Read a selector: an operator overload, a packet, a name as text, a group, or a selector.

    Raises:
        ConfigError: there is no such operator; the message names the nearest real one.
    """
    if isinstance(x, Selector):
        return x
    if isinstance(x, Group):
        return Selector(x.name)
    if isinstance(x, (private.OpOverload, private.OpOverloadPacket)):
        return Selector(str(x))
    if isinstance(x, private.HigherOrderOperator):
        return Selector(str(x))
    if not isinstance(x, str):
        raise ConfigError(
            f"{x!r} ({type(x).__name__}) selects no operator: give an operator such as "
            'torch.ops.aten.mm, its name "aten.mm", or a group (MATMUL, ATTENTION, COLLECTIVES)'
        )
    text = x.strip().removeprefix("torch.ops.").replace("::", ".")
    if text in Group.__members__ or text in _known():
        return Selector(text)
    raise ConfigError(f"there is no operator {x!r}; the nearest one is {_nearest(text)!r}")


def parse_selectors(xs: Any) -> tuple[Selector, ...]:
    """Read one selector or an iterable of them, keeping the order, without repeats."""
    single = isinstance(xs, (str, Selector, Group)) or not isinstance(xs, Iterable)
    # a packet iterates over the names of its overloads
    single = single or isinstance(xs, private.OpOverloadPacket)
    return tuple(dict.fromkeys(parse_selector(x) for x in ([xs] if single else xs)))


def conflicts(save: Iterable[Selector], recompute: Iterable[Selector]) -> tuple[str, ...]:
    """One line for each pair of a saved and a recomputed selector that share an operator."""
    recompute = tuple(recompute)
    return tuple(
        f"save={s} and recompute={r} both select {', '.join(common)}"
        for s in save
        for r in recompute
        if (common := s.overlap(r))
    )


def groups_covering(packets: Iterable[str]) -> tuple[Group, ...]:
    """The groups that hold every one of these packets."""
    wanted = set(packets)
    return tuple(g for g, members in _MEMBERS.items() if wanted and wanted <= set(members))


def nearest_selector(selector: Selector, present: Iterable[str]) -> str:
    """What to write instead of a selector that matches none of the operators `present`.

    A group that holds what was named and something present; else the most alike present name.
    """
    ops = tuple(dict.fromkeys(packet_of(op) for op in present))
    for group in groups_covering(selector.packets):
        covered = [op for op in ops if op in _MEMBERS[group]]
        if covered and group.name != selector.text:
            return f"{group.name} covers {', '.join(short_name(op) for op in covered)}"
    near = difflib.get_close_matches(selector.text, ops, n=1, cutoff=0.6)
    return f"the nearest operator here is {near[0]}" if near else ""


@lru_cache(maxsize=1)
def _names(_count: int) -> frozenset[str]:
    overloads = private.operator_names()
    return frozenset((*overloads, *map(packet_of, overloads), *private.higher_order_names()))


def _known() -> frozenset[str]:
    # libraries register operators as they are imported, so the cache is keyed by how many there are
    return _names(private.operator_count())


def _nearest(text: str) -> str:
    if f"aten.{text}" in _known():
        return f"aten.{text}"
    candidates = sorted((*_known(), *Group.__members__))
    tries = (text,) if "." in text else (text, f"aten.{text}", text.upper())
    near = [
        (difflib.SequenceMatcher(None, name, match).ratio(), match)
        for name in tries
        for match in difflib.get_close_matches(name, candidates, n=1, cutoff=0.6)
    ]
    return max(near)[1] if near else "aten.mm"
