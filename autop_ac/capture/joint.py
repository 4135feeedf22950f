"""The captured joint graph: forward and backward in one, on global shapes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

Kind = Literal[
    "parameter", "buffer", "input", "tangent",  # placeholders
    "output", "mutation", "gradient", "input_gradient",  # results
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Port:
    """What a placeholder, or one entry of the output node, is to the user.

    Attributes:
        kind: what it is.
        name: user name of the parameter or buffer (parameter, buffer, mutation, gradient); text of
            the pytree path otherwise.
        index: position among the tensor inputs (input, input_gradient) or among the tensor outputs
            (output, tangent), counted on the flattened pytree; -1 otherwise.
    """

    kind: Kind
    name: str
    index: int = -1


@dataclass(frozen=True, eq=False)
class JointGraph:
    """One joint forward and backward graph on global shapes, under fake tensors.

    Attributes:
        module: the joint graph. Each node has ``meta["val"]``; ``meta["partitioner_tag"]`` is
            ``"is_backward"`` on what autograd made.
        placeholders: a port for each placeholder node's name.
        results: a port for each entry of the output node's flat list, None where the entry is None.
        num_forward_outputs: how many leading entries of `results` forward gives back.
        fake_mode: the fake mode that the values of `module` belong to.
        descriptors: AOTAutograd's own handle, needed to compile.
        calling: what the runtime needs to flatten inputs and rebuild outputs (capture's own).
        module_prefix: path of the user's model inside what was traced.
    """

    module: torch.fx.GraphModule
    placeholders: Mapping[str, Port]
    results: tuple[Port | None, ...]
    num_forward_outputs: int
    fake_mode: Any
    descriptors: Any
    calling: Any
    module_prefix: str = ""
