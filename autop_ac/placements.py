"""Placements as text, for plans in files and for graphs: ``"S(0) R"``, one word per mesh axis."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

_WORD = re.compile(r"R|S\((-?\d+)\)|P\((\w+)\)")


def placement_text(placements: Sequence[Placement]) -> str:
    """``"S(0) R P(sum)"``.

    Raises:
        ValueError: a placement that no plan has.
    """
    words = []
    for placement in placements:
        if type(placement) is Shard:
            words.append(f"S({placement.dim})")
        elif type(placement) is Replicate:
            words.append("R")
        elif type(placement) is Partial:
            words.append(f"P({placement.reduce_op})")
        else:
            raise ValueError(f"{placement!r} is no Shard, Replicate or Partial")
    return " ".join(words)


def parse_placements(text: str) -> tuple[Placement, ...]:
    """The inverse of `placement_text`.

    Raises:
        ValueError: not such a text.
    """
    found: list[Placement] = []
    for word in text.split():
        match = _WORD.fullmatch(word)
        if match is None:
            raise ValueError(f"{word!r} is no placement: S(0), R and P(sum) are")
        if match[1] is not None:
            found.append(Shard(int(match[1])))
        else:
            found.append(Partial(match[2]) if match[2] is not None else Replicate())
    return tuple(found)
