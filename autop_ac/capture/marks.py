"""Takes the marks of `checkpoint_name` out of a joint graph, and leaves the names on the values."""

from __future__ import annotations

from torch import fx

from .._torch_annotate import mark

NAMES_KEY = "autop_ac_names"


def take_marks(gm: fx.GraphModule) -> None:
    """Erase each mark of `gm`; what it read has the name in ``meta["custom"][NAMES_KEY]``.

    The rest of the graph is the one that would have been without names.
    """
    for node in list(gm.graph.nodes):
        if node.target is not mark:
            continue
        value, name = node.args
        # nodes of one annotation share the dict: a new one, so that the name is this node's alone
        custom = dict(value.meta.get("custom") or {})
        custom[NAMES_KEY] = tuple(dict.fromkeys((*custom.get(NAMES_KEY, ()), name)))
        value.meta["custom"] = custom
        gm.graph.erase_node(node)
    gm.recompile()


def names_of(node: fx.Node) -> tuple[str, ...]:
    """What `checkpoint_name` called the value of a node."""
    names: tuple[str, ...] = (node.meta.get("custom") or {}).get(NAMES_KEY, ())
    return names
