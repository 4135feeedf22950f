"""The user's own names: of parameters, of module paths, of source lines."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from .._torch_annotate import is_users_file

_WRAPPERS = re.compile(r"(^|\.)(_orig_mod|_checkpoint_wrapped_module|_export_root)(?=\.|$)")
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


def user_name(name: str) -> str:
    """Drop what wrappers (`checkpoint_wrapper`, `torch.compile`) add to a dotted name."""
    return _WRAPPERS.sub("", name).lstrip(".")


def module_path(stack: Mapping[str, Any] | None, *, prefix: str = "") -> str:
    """Module path of the innermost entry of an ``nn_module_stack``, ``""`` at the root.

    Args:
        stack: ``node.meta["nn_module_stack"]`` of a forward or of a backward node.
        prefix: path of the user's model inside what was traced, removed where it leads.
    """
    if not stack:
        return ""
    return _user_path(str(next(reversed(list(stack.values())))[0]), prefix)


def block_instance(stack: Mapping[str, Any] | None, *, prefix: str = "") -> str:
    """The repeated block that an ``nn_module_stack`` is in, ``""`` where it is in none.

    A block is a module path to its first number, ``layers.3``; ``layers.3@1`` is its second call.

    Args:
        stack, prefix: as for `module_path`.
    """
    block = block_of_path(module_path(stack, prefix=prefix))
    calls = module_calls(stack, prefix=prefix) if block else ()
    return next((call for path, call in calls if path == block), block)


def module_calls(
    stack: Mapping[str, Any] | None, *, prefix: str = ""
) -> tuple[tuple[str, str], ...]:
    """Of an ``nn_module_stack`` each module path with its call: ``layers.3@1`` is the second of ``layers.3``.

    Args:
        stack, prefix: as for `module_path`.
    """
    found = []
    for key, entry in (stack or {}).items():
        path = _user_path(str(entry[0]), prefix)
        _, at, call = str(key).partition("@")
        found.append((path, path + at + call))
    return tuple(found)


def block_of_path(path: str) -> str:
    """A module path to its first number, ``""`` where it has none."""
    parts = path.split(".")
    place = next((i for i, part in enumerate(parts) if part.isdecimal()), None)
    return "" if place is None else ".".join(parts[: place + 1])


@lru_cache(maxsize=4096)  # a graph has as many as modules, and asks for them at every node
def _user_path(entry: str, prefix: str) -> str:
    # the local or global variable that Dynamo found the model in: `L['self'].layers.0`
    text = re.sub(r"^[LG]\['[^']+'\]", "", entry)
    text = re.sub(r"\['([^']+)'\]|\[(\d+)\]", lambda m: "." + (m.group(1) or m.group(2)), text)
    text = re.sub(r"@\d+", "", text)
    # an attribute that a wrapper looks up by hand: `__dict__["_modules"]["_checkpoint_wrapped_module"]`
    text = text.replace(".__dict__.", ".").replace("._modules.", ".")
    text = user_name(text.lstrip("."))
    if prefix and (text == prefix or text.startswith(prefix + ".")):
        text = text[len(prefix) :].lstrip(".")
    return text


def source_line(stack_trace: str | None) -> str:
    """``"file.py:12"`` of the innermost frame outside torch in a stack trace, or ``""``."""
    frames = _FRAME.findall(stack_trace or "")
    own = [f for f in frames if is_users_file(f[0])]
    return f"{own[-1][0]}:{own[-1][1]}" if own else ""
