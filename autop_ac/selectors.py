"""Selectors: which values a hint or a rule is about.

A selector is a small frozen value that hashes, compares and prints. It is matched against the text
of an operator (``str(node.target)``) and the names that `checkpoint_name` gave, so that everything
that decides stays free of torch objects. A word without a dot is a name, unless it is a `Group` or a
higher-order operator; an operator always has a dot (``"aten.mm"``), and `checkpoint_name` refuses
the names that could be taken for one of the former.
"""

from __future__ import annotations

import difflib
import enum
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

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


_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")


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
    """A set of values.

    Attributes:
        text: ``"aten.mm.default"``, ``"aten.mm"`` (every overload), the name of a higher-order
            operator, the name of a `Group`, or a name given by `checkpoint_name`.
        every: of what it selects in one instance of a repeated block, the first of each so many.
    """

    text: str
    every: int = 1

    @property
    def is_name(self) -> bool:
        """Whether it selects by the name that `checkpoint_name` gave."""
        return not ("." in self.text or self.text in Group.__members__
                    or private.is_higher_order(self.text))  # fmt: skip

    @property
    def is_collective(self) -> bool:
        """Whether it selects collectives only."""
        return bool(self.packets) and set(self.packets) <= set(_MEMBERS[Group.COLLECTIVES])

    @property
    def rank(self) -> int:
        """Smaller for the more specific, which are asked first where no order is written."""
        return 0 if self.is_name else 1 if self.every > 1 else 2

    @property
    def packets(self) -> tuple[str, ...]:
        """The packets that it covers, wholly or, for one overload, in part."""
        if self.is_name:
            return ()
        group = Group.__members__.get(self.text)
        return _MEMBERS[group] if group is not None else (packet_of(self.text),)

    def matches(self, op_text: str, names: Iterable[str] = ()) -> bool:
        """Whether a value of the operator ``"aten.mm.default"`` with these names is selected.

        `every` is left aside: it depends on the values before this one.
        """
        if self.is_name:
            return self.text in names
        return op_text == self.text or packet_of(op_text) in self._whole_packets()

    def overlap(self, other: Selector) -> tuple[str, ...]:
        """Packets, overloads or names that both select, sorted; empty when they are disjoint.

        One of each so many is more specific than all of them, and overlaps with its like only.
        """
        if (self.every > 1) != (other.every > 1):
            return ()
        if self.is_name or other.is_name:
            return (self.text,) if self.text == other.text else ()
        both = set(self.packets) & set(other.packets)
        if self._whole_packets() and other._whole_packets():
            return tuple(sorted(both))
        one, two = (self, other) if not self._whole_packets() else (other, self)
        return (one.text,) if two.matches(one.text) else ()

    def _whole_packets(self) -> tuple[str, ...]:
        return () if self.text.count(".") > 1 else self.packets

    def __str__(self) -> str:
        return self.text if self.every == 1 else f"{self.text}/{self.every}"


def parse_selector(x: Any) -> Selector:
    """Read a selector: an operator overload, a packet, text, a group, or a selector.

    Text is the name of an operator, of a group, or one given by `checkpoint_name`; ``/2`` behind it
    is `every` second.

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
            'torch.ops.aten.mm, its name "aten.mm", a group (MATMUL, ATTENTION, COLLECTIVES), or a '
            "name given by checkpoint_name"
        )
    text, slash, count = (part.strip() for part in x.partition("/"))
    if slash:
        if not count.isdecimal() or int(count) < 1:
            raise ConfigError(
                f'{x!r}: behind "/" stands a whole number from 1 on, as in "aten.mm/2"'
            )
        return Selector(parse_selector(text).text, int(count))
    text = text.removeprefix("torch.ops.").replace("::", ".")
    if text in Group.__members__ or text in _known():
        return Selector(text)
    if "." in text:
        raise ConfigError(f"there is no operator {x!r}; the nearest one is {_nearest(text)!r}")
    return Selector(check_name(text))


def parse_selectors(xs: Any) -> tuple[Selector, ...]:
    """Read one selector or an iterable of them, keeping the order, without repeats."""
    single = isinstance(xs, (str, Selector, Group)) or not isinstance(xs, Iterable)
    # a packet iterates over the names of its overloads
    single = single or isinstance(xs, private.OpOverloadPacket)
    return tuple(dict.fromkeys(parse_selector(x) for x in ([xs] if single else xs)))


def check_name(name: Any) -> str:
    """`name` itself where `checkpoint_name` may give it.

    Raises:
        ConfigError: it is no word, or could be taken for a group or a higher-order operator.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r} is no name of a value: give a word of letters, digits, _ and -, such as "
            '"query"; an operator has a dot, as in "aten.mm"'
        )
    if is_operator_text(name):
        kind = "a group" if name in Group.__members__ else "a higher-order operator"
        raise ConfigError(f"the name {name!r} is taken by {kind} of operators; choose another")
    if name.isupper() and (near := difflib.get_close_matches(name, Group.__members__, n=1)):
        raise ConfigError(
            f"there is no operator {name!r}; the nearest one is {near[0]!r}, which is a group. As a "
            "name of a value it would be taken for a slip: choose another"
        )
    return name


def every(n: int, op: Any) -> Any:
    """Of the values of `op` in one instance of a repeated block, the first of each `n`.

    Every second are the first, third, fifth, ...: of seven matmuls four. A block is the module path to
    its first number, ``layers.3``, each call of it counted anew (and each entry of the region, where
    a region selects), so that equal layers get equal decisions. What is left over is
    for the other selectors: ``save=[every(2, aten.mm)], recompute=[aten.mm]`` says both halves.

    Args:
        n: a whole number from 1 on.
        op: what a selector may be: an operator, a group, a name.
    """
    # Dynamo takes text for a constant, but no object of ours
    return _every_text(n, op) if torch.compiler.is_dynamo_compiling() else _every(n, op)


def _every(n: int, op: Any) -> Selector:
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise ConfigError(f"every({n!r}, ...): the first is a whole number from 1 on")
    selector = parse_selector(op)
    if selector.every > 1:
        raise ConfigError(f"every({n}, {selector}): it says already one of {selector.every}")
    return Selector(selector.text, n)


@private.constant_while_tracing
def _every_text(n: int, op: Any) -> str:
    return str(_every(n, op))


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


def nearest_selector(selector: Selector, present: Iterable[str], names: Iterable[str] = ()) -> str:
    """What to write instead of a selector that matches none of what is `present`.

    For a name the most alike name, group or operator. For operators a group that holds what was named
    and something present; else the most alike present operator.

    Args:
        selector: what matched nothing.
        present: operators as text.
        names: what `checkpoint_name` gave.
    """
    ops = tuple(dict.fromkeys(packet_of(op) for op in present))
    if selector.is_name:
        if near := difflib.get_close_matches(selector.text, tuple(names), n=1, cutoff=0.6):
            return f"the nearest name is {near[0]}"
        if f"aten.{selector.text}" in _known():
            return f"the operator is written aten.{selector.text}"
        if selector.text.upper() in Group.__members__:
            return f"the group is written {selector.text.upper()}"
        short = {short_name(op): op for op in ops}
        near = difflib.get_close_matches(selector.text, short, n=1, cutoff=0.6)
        return f"the nearest operator here is {short[near[0]]}" if near else ""
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


def is_operator_text(text: str) -> bool:
    """Whether text names a registered operator, all its overloads, or a group."""
    return text in Group.__members__ or text in _known()
