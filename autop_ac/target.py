"""What ``model.py:build`` of a command line names: a function that gives a model and its inputs."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from .errors import UsageError
from .near import did_you_mean, no_file

OPTIONS = ("mp_policy", "reshard_after_forward", "loss_fn", "inputs", "outputs")
"""What the dict may hold that the function gives as a third."""


def built(target: str, meta: bool) -> tuple[Any, Any, dict[str, Any]]:
    """Model, input_fn and options of a target.

    Args:
        target: ``"model.py:build"``, or ``"package.module:build"``.
        meta: build the model on the meta device.

    Raises:
        UsageError: there is no such function, it raises, or it gives something else.
    """
    build = _function(target)
    try:
        with torch.device("meta") if meta else nullcontext():
            made = build()
    except Exception as error:
        traceback.print_exc()
        raise UsageError(f"{target} raised {type(error).__name__}, as told above") from error
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        raise UsageError(
            f"{target} gave {type(made).__name__}: it is to give (model, input_fn), or "
            "(model, input_fn, options)"
        )
    options = dict(made[2]) if len(made) == 3 else {}
    if unknown := sorted(options.keys() - set(OPTIONS)):
        raise UsageError(
            f"{target} gave options {unknown}: known are {', '.join(OPTIONS)}"
            + did_you_mean(unknown[0], OPTIONS)
        )
    return made[0], made[1], options


def _function(target: str) -> Callable[[], Any]:
    where, colon, name = target.rpartition(":")
    if not colon:
        raise UsageError(f"{target!r}: name the function behind a colon, such as model.py:build")
    try:
        module = _from_file(Path(where)) if where.endswith(".py") else _from_path(where)
    except UsageError:
        raise
    except Exception as error:
        traceback.print_exc()
        raise UsageError(f"{where} cannot be imported: {error}") from error
    found = getattr(module, name, None)
    if not callable(found):
        own = [n for n, x in vars(module).items() if n[0] != "_" and callable(x)]
        raise UsageError(f"{where} has no function {name!r}{did_you_mean(name, own)}")
    return found


def _from_file(path: Path) -> Any:
    if not path.is_file():
        raise UsageError(no_file(path))
    sys.path.insert(0, str(path.resolve().parent))  # as when Python runs the file
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None, "the ending is .py"
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses and pickle look their module up by name
    spec.loader.exec_module(module)
    return module


def _from_path(where: str) -> Any:
    sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(where)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{where}.".startswith(f"{error.name}."):
            raise  # one that this one imports
        here = [p.stem for p in Path.cwd().glob("*.py")]
        raise UsageError(
            f"{where} cannot be imported: there is no module {error.name}, and a file ends in .py"
            + did_you_mean(where, here)
        ) from error
