"""A captured graph in short, to tell whether two are the same."""

from __future__ import annotations

import hashlib

import torch

from .joint import JointGraph


def fingerprint(joint: JointGraph) -> str:
    """Operators, what they read, shapes and dtypes, and the names of parameters, as a hash."""
    lines = []
    for node in joint.module.graph.nodes:
        value = node.meta.get("val")
        look = (tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else None
        lines.append(f"{node.name} {node.target} {node.args} {node.kwargs} {look}")
    lines += [f"{name} {port.kind} {port.name}" for name, port in joint.placeholders.items()]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
