"""Takes out of a joint graph what hints left there as operators.

Marks of `checkpoint_name` go, and leave the names on the values. What `with_sharding_constraint` made
becomes an alias that has its placements in ``meta["custom"][PLACED_KEY]``; the shard pass drops it.
"""

from __future__ import annotations

import torch
from torch import fx

from .._torch_annotate import mark, placed

NAMES_KEY = "autop_ac_names"
PLACED_KEY = "autop_ac_placed"


def take_marks(gm: fx.GraphModule) -> None:
    """Erase each mark of `gm`; what it read has the name in ``meta["custom"][NAMES_KEY]``.

    The rest of the graph is the one that would have been without names.
    """
    for node in list(gm.graph.nodes):
        if node.target is placed:
            _become_alias(node)
        if node.target is not mark:
            continue
        value, name = node.args
        # nodes of one annotation share the dict: a new one, so that the name is this node's alone
        custom = dict(value.meta.get("custom") or {})
        custom[NAMES_KEY] = tuple(dict.fromkeys((*custom.get(NAMES_KEY, ()), name)))
        value.meta["custom"] = custom
        gm.graph.erase_node(node)
    gm.recompile()


def _become_alias(node: fx.Node) -> None:
    value, placements, source = node.args
    node.target, node.args = torch.ops.aten.alias.default, (value,)
    node.meta["val"] = value.meta["val"]  # one storage
    custom = dict(node.meta.get("custom") or {})
    node.meta["custom"] = {**custom, PLACED_KEY: (placements, source)}


def placed_of(node: fx.Node) -> tuple[str, str] | None:
    """Placements in text, and the user's line, where a sharding constraint stands; else None."""
    return (node.meta.get("custom") or {}).get(PLACED_KEY)


def names_of(node: fx.Node) -> tuple[str, ...]:
    """What `checkpoint_name` called the value of a node."""
    names: tuple[str, ...] = (node.meta.get("custom") or {}).get(NAMES_KEY, ())
    return names
