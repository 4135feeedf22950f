"""Rules: hints written in the settings, by module, operator and name.

The text form is ``MODULE::SELECTOR=ACTION``, where either of module and selector may be left out::

    layers.*.attention::aten.mm=save      matmuls below the attention of each layer
    layers.*=recompute                    all of each layer, and what enters it is not kept either
    layers.*=checkpoint                   keep what enters each layer, recompute the rest of it
    ::MATMUL/2=save                       every second matmul, everywhere
    ::query=prefer_save                   values that checkpoint_name names "query", as a preference

`Rule` is the same as an object; it prints as its text and is read back from it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from .errors import ConfigError
from .selectors import (
    ATTENTION,
    COLLECTIVES,
    MATMUL,
    Group,
    Selector,
    check_name,
    conflicts,
    every,
    groups_covering,
    is_operator_text,
    nearest_selector,
    packet_of,
    parse_selector,
    parse_selectors,
    short_name,
)

__all__ = [
    "ATTENTION",
    "COLLECTIVES",
    "MATMUL",
    "Group",
    "Rule",
    "Selector",
    "check_name",
    "conflicts",
    "every",
    "groups_covering",
    "module_matches",
    "nearest_selector",
    "packet_of",
    "parse_rule",
    "parse_rules",
    "parse_selector",
    "parse_selectors",
    "rule_conflicts",
    "short_name",
]

_ACTIONS = ("save", "recompute", "checkpoint")
_PREFER = "prefer_"
_PART = re.compile(r"\*\*|(?:[\w\-?]|\*(?!\*)|\[!?[\w\-]+\])+")


@dataclass(frozen=True, slots=True)
class Rule:
    """What `ACConfig` asks of some values.

    Attributes:
        module: a glob on the user's module path: ``*`` stands for one part of it or a piece of one and
            does not cross a dot, ``**`` for any number of parts, ``?`` and ``[0-3]`` for one character.
            A module that it matches is meant with everything below it: ``layers.*`` covers
            ``layers.0`` and ``layers.0.attention.query``. ``""`` is the whole model.
        op: a selector of operators or of a name; None is every operator.
        action: ``"save"``, ``"recompute"``, or, of modules without `op`, ``"checkpoint"``: what enters each
            module that the glob matches is kept and all in it is recomputed, as `torch.utils.checkpoint`
            around it does.
        prefer: a preference, which the automatic part may go against where its limit demands it.

    Raises:
        ConfigError: it says nothing, or something unknown.
    """

    module: str = ""
    op: Any = None
    action: Literal["save", "recompute", "checkpoint"] | str = ""
    prefer: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.module, str):
            raise ConfigError(
                f"Rule: module={self.module!r} is no text: give a glob such as "
                '"layers.*.attention", or "" for the whole model'
            )
        if self.action not in _ACTIONS:
            raise ConfigError(
                f'Rule: action={self.action!r}; allowed are "save", "recompute" and "checkpoint" (in text '
                'also "prefer_save", "prefer_recompute" and "prefer_checkpoint")'
            )
        if not isinstance(self.prefer, bool):
            raise ConfigError(f"Rule: prefer={self.prefer!r}; allowed are True and False")
        if self.op is not None:
            object.__setattr__(self, "op", parse_selector(self.op))
        if self.op is not None and self.action == "checkpoint":
            raise ConfigError(
                f"Rule: a checkpoint is around a module, and {self.op} are operators in it: write "
                f'"{self.module or "layers.*"}::{self.op}=save" before "{self.module or "layers.*"}=checkpoint" '
                "to keep them too"
            )
        if self.op is None and not self.module:
            raise ConfigError(
                f'Rule: neither module nor operator is given; "**={self.action}" is everything'
            )
        if is_operator_text(self.module):
            raise ConfigError(
                f"Rule: {self.module!r} stands in the place of a module, and is an operator: write "
                f'"::{self.module}={self.action}"'
            )
        joined = f"{self.module}.{self.op}"
        if self.op is not None and self.op.is_name and is_operator_text(joined):
            raise ConfigError(
                f'Rule: "{self.module}::{self.op}" reads as module and name, and is an operator: '
                f'write "::{joined}={self.action}"'
            )
        _pattern(self.module)

    @property
    def selector(self) -> Selector | None:
        """`op`, parsed."""
        return self.op

    def covers(self, module: str) -> bool:
        """Whether it speaks of what is computed in a module."""
        return module_matches(self.module, module)

    def instance(self, module: str) -> str | None:
        """The module meant, by its path: the outermost that is matched, itself or around `module`."""
        parts = module.split(".") if module else []
        paths = [".".join(parts[:i]) for i in range(len(parts) + 1)]
        whole = _pattern(self.module).fullmatch
        return next((p for p in paths if whole(f"{p}." if p else "")), None)

    def __str__(self) -> str:
        op = "" if self.op is None else f"::{self.op}"
        return f"{self.module}{op}={_PREFER if self.prefer else ''}{self.action}"


def parse_rule(x: Any) -> Rule:
    """Read a rule from its text; a `Rule` is given back.

    Raises:
        ConfigError: no text of that form.
    """
    if isinstance(x, Rule):
        return x
    if not isinstance(x, str):
        raise ConfigError(
            f"{x!r} ({type(x).__name__}) is no rule: give a Rule, or text such as "
            '"layers.*::aten.mm=save"'
        )
    left, equals, action = (part.strip() for part in x.rpartition("="))
    if not equals:
        raise ConfigError(
            f'rule {x!r} has no action: write "MODULE::OPERATOR=save", or "=recompute"'
        )
    module, colons, op = (part.strip() for part in left.partition("::"))
    if colons and not op:
        raise ConfigError(f'rule {x!r} has no operator behind "::"; leave "::" out for all of them')
    prefer = action.startswith(_PREFER)
    try:
        return Rule(module, op if colons else None, action.removeprefix(_PREFER), prefer)
    except ConfigError as error:
        raise ConfigError(f"rule {x!r}: {str(error).removeprefix('Rule: ')}") from error


def parse_rules(xs: Any) -> tuple[Rule, ...]:
    """Read one rule or an iterable of them, keeping the order, without repeats."""
    single = isinstance(xs, (str, Rule)) or not isinstance(xs, Iterable)
    return tuple(dict.fromkeys(parse_rule(x) for x in ([xs] if single else xs)))


def rule_conflicts(rules: Iterable[Rule]) -> tuple[str, ...]:
    """One line for each pair of rules that ask different things of the very same values."""
    first: dict[tuple[str, Selector | None], Rule] = {}
    clash = []
    for rule in rules:
        earlier = first.setdefault((rule.module, rule.selector), rule)
        if earlier != rule:
            clash.append(f'"{earlier}" and "{rule}" speak of the same values')
    return tuple(clash)


def module_matches(glob: str, path: str) -> bool:
    """Whether a module path, or one above it, is matched by a glob; see `Rule.module`."""
    return _pattern(glob).match(f"{path}." if path else "") is not None


@lru_cache(maxsize=1024)
def _pattern(glob: str) -> re.Pattern[str]:
    """The glob over a path with a dot behind each of its parts; what is below need not match."""
    text = ""
    for part in glob.split(".") if glob else ():
        if not _PART.fullmatch(part):
            raise ConfigError(
                f"Rule: {glob!r} is no glob of a module path: parts of letters, digits, _ and -, with "
                '*, ?, [0-3], and ** as a part of its own, joined by dots, as in "layers.*.attention"'
            )
        if part == "**":
            text += r"(?:[^.]+\.)*"
            continue
        for piece in re.findall(r"\[[^\]]+\]|.", part):
            wild = {"*": "[^.]*", "?": "[^.]"}.get(piece)
            in_class = piece.replace("[!", "[^") if piece.startswith("[") else re.escape(piece)
            text += wild or in_class
        text += r"\."
    try:
        return re.compile(text)
    except re.error as error:
        raise ConfigError(f"Rule: {glob!r} is no glob of a module path: {error}") from error
