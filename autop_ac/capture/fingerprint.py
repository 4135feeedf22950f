"""A captured graph in short, to tell whether two are the same."""

from __future__ import annotations

import hashlib

import torch

from .joint import JointGraph
from .local_map import is_local


def fingerprint(joint: JointGraph) -> str:
    """Operators, what they read, shapes and dtypes, and the names of parameters, as a hash."""
    lines = []
    for node in joint.module.graph.nodes:
        value = node.meta.get("val")
        look = (tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else None
        # groups and ranks in what is written for one device are that device's own
        reads = node.all_input_nodes if is_local(node) else (node.args, node.kwargs)
        lines.append(f"{node.name} {node.target} {reads} {look}")
    lines += [f"{name} {port.kind} {port.name}" for name, port in joint.placeholders.items()]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
