"""The nearest valid word to one that is not, for messages; and TOML files, told of where they are not."""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .errors import ConfigError


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """``"; did you mean stage_size?"`` after a message, or ``""`` where nothing is near."""
    by_lower = {k.lower(): k for k in known}
    found = difflib.get_close_matches(str(word).lower(), by_lower, n=1)
    return f"; did you mean {by_lower[found[0]]}?" if found else ""


def no_file(path: str | os.PathLike[str]) -> str:
    """``"modul.py: there is no such file"``, with the nearest of its folder or that the folder is missing."""
    path = Path(path)
    if not path.parent.is_dir():
        return f"{path}: there is no such file, and no folder {path.parent}"
    siblings = [p for p in path.parent.iterdir() if p.suffix == path.suffix and p.is_file()]
    return f"{path}: there is no such file" + did_you_mean(path, map(str, siblings))


def read_toml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What a TOML file holds.

    Raises:
        ConfigError: it is not there (the nearest is told), or is no TOML.
    """
    if not Path(path).is_file():
        raise ConfigError(no_file(path))
    try:
        with open(path, "rb") as file:
            return tomllib.load(file)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as TOML: {error}") from error
