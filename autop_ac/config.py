"""Settings as frozen values; each is checked when it is made."""

from __future__ import annotations

import argparse
import math
import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal, Self

from .errors import ConfigError, HintError
from .near import did_you_mean, read_toml
from .policies import Rule, Selector, conflicts, parse_rules, parse_selectors, rule_conflicts

_UNITS = {"B": 1}
for _power, _letter in enumerate("KMGTPE", start=1):
    _UNITS[f"{_letter}B"] = 1000**_power
    _UNITS[f"{_letter}IB"] = 1024**_power

_SIZE = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]+)\s*")


class _RuleConflictError(HintError, ConfigError):
    """Two rules of one configuration contradict each other."""


def parse_bytes(
    value: Any, *, name: str = "size", off: str = "None", round_down: bool = False
) -> int:
    """Read a size in bytes, rounded up.

    Args:
        value: a positive int of bytes, or text with a unit: ``"512 MiB"`` (powers of 1024),
            ``"1.5 GB"`` (powers of 1000), ``"64 KiB"``, ``"100 B"``.
        name: the setting, for the message.
        off: how to turn the setting off, for the message.
        round_down: a limit that must hold is rounded down.

    Raises:
        ConfigError: not a size; a bool, a float, zero, negative, infinite or misspelt.
    """
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    letter = match[2].upper().removesuffix("I") if match else ""
    near = (
        f' (did you mean "{match[1]} {letter}iB" or "{match[1]} {letter}B"?)'
        if match and f"{letter}IB" in _UNITS and letter
        else ""
    )
    allowed = (
        f"{name}={value!r} is not a size{near}: allowed are a positive int of bytes, or a number and a "
        f'unit such as "512 MiB" or "1.5 GB" (B, KB to EB, KiB to EiB); say {name}={off} for off'
    )
    if isinstance(value, str):
        unit = _UNITS.get(match[2].upper()) if match else None
        if match is None or unit is None:
            raise ConfigError(allowed)
        exact = Fraction(match[1]) * unit
        size = math.floor(exact) if round_down else math.ceil(exact)
    elif isinstance(value, float):
        raise ConfigError(f"{allowed}. A float is a fraction, and {name} is no fraction")
    elif isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ConfigError(allowed)
    else:
        try:
            size = operator.index(value)
        except TypeError as error:
            raise ConfigError(allowed) from error
    if size <= 0:
        raise ConfigError(allowed)
    return size


OPTIMIZER_COPIES = {"adamw": 2, "adam": 2, "adagrad": 1, "sgd_momentum": 1, "sgd": 0}
"""How many values of the size of each parameter an optimizer holds."""


def parse_budget(value: Any) -> int | Fraction | Literal["device"] | None:
    """Read a memory budget: bytes rounded down, an exact fraction, ``"device"``, or None for off.

    Raises:
        ConfigError: none of these.
    """
    if value is None:
        return None
    if isinstance(value, str) and value == "device":
        return "device"
    if isinstance(value, float):
        if not 0 < value <= 1:  # NaN compares as False
            raise ConfigError(
                f"memory_budget={value!r}: a float is a fraction of the peak without AC, above 0 and at "
                'most 1; give bytes as an int or with a unit such as "40 GiB"; say memory_budget=None '
                "for off"
            )
        return Fraction(value)
    try:
        return parse_bytes(value, name="memory_budget", round_down=True)
    except ConfigError as error:
        raise ConfigError(
            f'{error}; or a float above 0 and at most 1, a fraction of the peak without AC; or "device"'
        ) from error


@dataclass(frozen=True)
class ACConfig:
    """Settings of activation checkpointing.

    Attributes:
        enable: True (the default), or False, which turns hints, rules and the automatic part off. Tags
            made by `torch.utils.checkpoint` stay, and parameter gathers are recomputed all the same.
        stage_size: most bytes that the recomputed values of a stage sum to: ``"auto"`` (the default: the
            size with the lowest predicted peak), text with a unit (``"512 MiB"``), an int of bytes, or
            None for no automatic part.
        memory_budget: the most that the predicted peak may be, with least recomputation: text with a
            unit (``"40 GiB"``), an int of bytes, a float above 0 and at most 1 (of the peak with nothing
            recomputed but gathers of parameters), ``"device"`` (nine tenths of the described device's
            memory), or None (the default) for no budget. Bytes are rounded down. It replaces stages.
        save: selectors of operators whose results are kept, everywhere in the model; one, or several:
            ``aten.mm``, ``"aten.mm"``, ``MATMUL``, ``every(2, aten.mm)``, a name of `checkpoint_name`.
        recompute: selectors of operators whose results are recomputed in backward.
        rules: `Rule` values or their text, ``"layers.*.attention::aten.mm=save"``; of those that match
            a value the first holds, and each goes before `save` and `recompute`.
        optimizer: ``"adamw"``, ``"adam"``, ``"adagrad"``, ``"sgd_momentum"`` or ``"sgd"``: its state, of
            the dtype of the parameter shards, counts in the predicted peak; None (the default) counts
            no state.

    Raises:
        ConfigError: a value is out of range, misspelt, or contradicts another.
    """

    enable: bool = True
    # text comes last: tyro and its like take the first of a union that a word can be read as
    stage_size: int | None | str = "auto"
    memory_budget: int | float | None | str = None
    save: Any = ()
    recompute: Any = ()
    rules: Any = ()
    optimizer: str | None = None
    budget: int | Fraction | Literal["device"] | None = field(
        init=False, compare=False, repr=False, default=None
    )
    """`memory_budget`, read."""
    stage_bytes: int | None = field(init=False, compare=False, repr=False, default=None)
    """`stage_size` in bytes; None for ``"auto"`` and for no stages."""

    def __post_init__(self) -> None:
        if not isinstance(self.enable, bool):
            raise ConfigError(f"enable={self.enable!r}: allowed are True and False; False is off")
        if self.optimizer is not None and (
            not isinstance(self.optimizer, str) or self.optimizer not in OPTIMIZER_COPIES
        ):
            raise ConfigError(
                f"optimizer={self.optimizer!r}: allowed are {', '.join(OPTIMIZER_COPIES)}; None counts "
                f"no optimizer state{did_you_mean(self.optimizer, OPTIMIZER_COPIES)}"
            )
        object.__setattr__(self, "budget", parse_budget(self.memory_budget))
        auto = isinstance(self.stage_size, str) and self.stage_size == "auto"
        if self.budget is not None and not auto:
            raise ConfigError(
                f"memory_budget={self.memory_budget!r} and stage_size={self.stage_size!r}: a budget "
                'replaces stages; leave stage_size at its default "auto", or say memory_budget=None'
            )
        if self.stage_size is not None and not auto:
            try:
                size = parse_bytes(self.stage_size, name="stage_size")
            except ConfigError as error:
                raise ConfigError(f'{error}; or stage_size="auto"') from error
            object.__setattr__(self, "stage_bytes", size)
        for name in ("save", "recompute"):
            try:
                selectors = parse_selectors(getattr(self, name))
            except ConfigError as error:
                raise ConfigError(f"{name}: {error}") from error
            object.__setattr__(self, name, selectors)
        try:
            object.__setattr__(self, "rules", parse_rules(self.rules))
        except ConfigError as error:
            raise ConfigError(f"rules: {error}") from error
        clash = conflicts(self.saved_selectors, self.recomputed_selectors)
        clash = (*clash, *rule_conflicts(self.rules_in_order))
        if clash:
            raise _RuleConflictError(
                f"ACConfig contradicts itself: {'; '.join(clash)}. Remove it from one of them"
            )

    @property
    def saved_selectors(self) -> tuple[Selector, ...]:
        """`save`, parsed."""
        return tuple(self.save)

    @property
    def recomputed_selectors(self) -> tuple[Selector, ...]:
        """`recompute`, parsed."""
        return tuple(self.recompute)

    @property
    def rules_in_order(self) -> tuple[Rule, ...]:
        """`rules`, then `save` and `recompute` as rules of the whole model, each `every` first."""
        both = [Rule("", s, "save") for s in self.save]
        both += [Rule("", s, "recompute") for s in self.recompute]
        # names and every are more specific than operators
        return (*self.rules, *sorted(both, key=lambda rule: rule.op.rank))

    # from and to files and command lines

    def to_dict(self) -> dict[str, Any]:
        """The settings in plain values: selectors and rules as text. `from_dict` reads them back."""
        return {
            name: [str(x) for x in value] if isinstance(value, tuple) else value
            for name in setting_names()
            for value in [getattr(self, name)]
        }

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> Self:
        """Settings by name. The text ``"none"`` is None, for files that have no word for it.

        Raises:
            ConfigError: a name is unknown (the nearest is told), or a value is out of range.
        """
        check_names(settings)
        return cls(**{name: _none(name, value) for name, value in settings.items()})

    @classmethod
    def from_toml(cls, path: str | Path) -> Self:
        """Settings from a TOML file with the names of this class::

            stage_size = "512 MiB"
            rules = ["layers.*.attention::aten.mm=save", "layers.*=recompute"]

        Raises:
            ConfigError: the file cannot be read, a name is unknown, or a value is out of range; the
                message begins with the path.
        """
        settings = read_toml(path)
        try:
            return cls.from_dict(settings)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser, prefix: str = "") -> None:
        """Add a flag for each setting to a program's own command line; `from_args` reads them.

        Args:
            parser: gets a group of flags, ``--stage-size``, ``--memory-budget``, ``--save``, ``--rule``, ...
            prefix: put before each name: ``"ac-"`` makes ``--ac-save``.
        """
        group = parser.add_argument_group("activation checkpointing")
        for name, (flag, words) in _FLAGS.items():
            options: dict[str, Any] = {"dest": _dest(prefix, name), "help": words}
            options["default"] = argparse.SUPPRESS  # what is not given leaves a file's word alone
            if name == "enable":
                options["action"] = argparse.BooleanOptionalAction
            elif name in _LISTS:
                options |= {"action": "append", "metavar": "RULE" if name == "rules" else "OP"}
            elif name == "optimizer":
                options["choices"] = (*OPTIMIZER_COPIES, "none")
            else:
                options["metavar"] = "SIZE"
            group.add_argument(f"--{prefix}{flag}", **options)

    @classmethod
    def from_args(
        cls, args: argparse.Namespace, prefix: str = "", base: ACConfig | None = None
    ) -> Self:
        """Settings from the flags of `add_arguments`.

        Args:
            args: what ``parser.parse_args()`` gave.
            prefix: the one given to `add_arguments`.
            base: settings that hold where a flag is not given; None for the defaults. A budget given as
                a flag replaces its stages, and stages given as a flag its budget.

        Raises:
            ConfigError: a value is out of range.
        """
        given = {n: getattr(args, d) for n in _FLAGS if hasattr(args, d := _dest(prefix, n))}
        for name in _LISTS & given.keys():
            given[name] = [part for text in given[name] for part in text.split(",")]
        for name in ("stage_size", "memory_budget"):
            if name in given:
                given[name] = _number(_none(name, given[name]))
        settings = {} if base is None else base.to_dict()
        if given.get("memory_budget") is not None:
            settings.pop("stage_size", None)
        if "stage_size" in given:
            settings.pop("memory_budget", None)
        return cls.from_dict({**settings, **given})


_LISTS = frozenset(("save", "recompute", "rules"))
_FLAGS: Mapping[str, tuple[str, str]] = {
    "enable": ("enable", "hints, rules and the automatic part are on (the default) or off"),
    "stage_size": (
        "stage-size",
        'bytes that a stage recomputes at most: "512 MiB", "auto", or "none"',
    ),
    "memory_budget": (
        "memory-budget",
        'most that the predicted peak may be: "40 GiB", a fraction such as 0.5, or "device"',
    ),
    "optimizer": ("optimizer", "counts its state in the peak"),
    "save": ("save", "an operator, group or name to keep; may be repeated"),
    "recompute": ("recompute", "an operator, group or name to compute again; may be repeated"),
    "rules": (
        "rule",
        '"MODULE::OPERATOR=ACTION", such as "layers.*::aten.mm=save"; may be repeated',
    ),
}


def _dest(prefix: str, name: str) -> str:
    return f"{prefix}{name}".replace("-", "_")


def _none(name: str, value: Any) -> Any:
    may_be_none = name in ("stage_size", "memory_budget", "optimizer")
    return None if may_be_none and isinstance(value, str) and value.lower() == "none" else value


def _number(text: Any) -> Any:
    """A word of a command line: a whole number is bytes, another number a fraction."""
    if not isinstance(text, str):
        return text
    if text.strip().isdecimal():
        return int(text)
    try:
        return float(text)
    except ValueError:
        return text


def setting_names() -> tuple[str, ...]:
    """The names of the settings of `ACConfig`."""
    return tuple(f.name for f in fields(ACConfig) if f.init)


def check_names(settings: Mapping[str, Any]) -> None:
    """Hold that every name is one of a setting of `ACConfig`.

    Raises:
        ConfigError: one is not; the nearest is told.
    """
    known = setting_names()
    for name in settings:
        if name not in known:
            raise ConfigError(
                f"no setting of activation checkpointing is called {name!r}"
                f"{did_you_mean(name, known) or '.'} Settings are {', '.join(known)}"
            )


@dataclass(frozen=True)
class CompileConfig:
    """How forward and backward are compiled: run node by node, or by Inductor."""

    backend: Literal["eager", "inductor"] = "inductor"

    def __post_init__(self) -> None:
        if self.backend not in ("eager", "inductor"):
            raise ConfigError(
                f'backend={self.backend!r}: allowed are "eager" (no compiler) and "inductor"'
                f"{did_you_mean(self.backend, ('eager', 'inductor'))}"
            )


@dataclass(frozen=True)
class CommConfig:
    """How parameters are gathered and their gradients scattered.

    Attributes:
        all_gather_bucket: the gathers of one block's parameters that share a collective hold at most
            this many bytes, on one device after the gather; None for a collective each.
        reduce_scatter_bucket: the same of gradients, before the reduce-scatter.
        prefetch: start gathers before they are used, and wait for sums of gradients later. On their way
            are at most `all_gather_bucket` gathered bytes, or one gather that is larger.
    """

    all_gather_bucket: str | int | None = "1 MiB"
    reduce_scatter_bucket: str | int | None = "1 MiB"
    prefetch: bool = True
    all_gather_bytes: int | None = field(init=False, repr=False, default=None)
    reduce_scatter_bytes: int | None = field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        for kind in ("all_gather", "reduce_scatter"):
            size = getattr(self, f"{kind}_bucket")
            if size is not None:
                size = parse_bytes(size, name=f"{kind}_bucket")
            object.__setattr__(self, f"{kind}_bytes", size)
        if not isinstance(self.prefetch, bool):
            raise ConfigError(f"prefetch={self.prefetch!r}: allowed are True and False")

    @property
    def prefetch_bytes(self) -> int | None:
        """Bytes that may be gathered ahead, 0 for one gather at a time; None without prefetching."""
        return (self.all_gather_bytes or 0) if self.prefetch else None


def ac_config(config: ACConfig | bool | None, settings: Mapping[str, Any]) -> ACConfig:
    """One `ACConfig` from what a call was given: a config, or its fields as keywords.

    Raises:
        ConfigError: both are given, a field is unknown, or a value is out of range.
    """
    if isinstance(config, ACConfig):
        if settings:
            raise ConfigError(f"give an ACConfig or keywords, not both; got {sorted(settings)}")
        return config
    check_names(settings)
    if config is not None:
        settings = {**settings, "enable": config}
    return ACConfig(**settings)
