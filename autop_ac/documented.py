"""Calls that take the fields of a settings class as keywords: documented from that class alone."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def takes_fields(settings: type) -> Callable[[F], F]:
    """Show the fields of a settings class in the signature and the docstring of a ``**settings`` call.

    Args:
        settings: a dataclass whose docstring has a section ``Attributes:`` of its fields; it is put
            behind the section ``Args:`` of the call.
    """

    def documented(call: F) -> F:
        own = inspect.signature(call)
        kept = [p for p in own.parameters.values() if p.kind is not p.VAR_KEYWORD]
        shown = [
            inspect.Parameter(
                f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=f.type
            )
            for f in fields(settings)
            if f.init
        ]
        call.__signature__ = own.replace(parameters=[*kept, *shown])  # type: ignore[attr-defined]
        doc = inspect.cleandoc(call.__doc__ or "")  # None under python -OO
        before, raises, after = doc.partition("\n\nRaises:")
        call.__doc__ = f"{before}\n{_attributes(settings)}{raises}{after}"
        return call

    return documented


def _attributes(settings: type) -> str:
    """The lines of the section ``Attributes:``."""
    doc = inspect.cleandoc(settings.__doc__ or "")
    return doc.partition("\nAttributes:\n")[2].partition("\n\n")[0]
