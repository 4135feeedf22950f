"""Facts about a sharded joint graph, as a frozen value that knows nothing of FX.

`Facts.values` holds one `Value` per FX node, in graph order, so that ``facts.values[i].index == i``.
Everything in `recompute/` decides on this alone and can be tested without tracing a model.

Vocabulary: a value is *forward* when neither it nor anything it reads comes from a tangent or from a
node that autograd made; *input* values are parameters, buffers, user inputs and tangents.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Side = Literal["input", "forward", "backward", "output"]
Role = Literal["parameter", "buffer", "input", "tangent", ""]


@dataclass(frozen=True, slots=True)
class Value:
    """What one node of the local joint graph is, reads, holds and costs.

    Attributes:
        index: position in graph order, dense from 0.
        name: the FX node's name, unique.
        op: operator as text, ``"aten.mm.default"``; ``"placeholder"``, ``"output"``, ``"getitem"``.
        side: where it is computed.
        inputs: indices of the values it reads, in order of first use, without repeats.
        role: what an input is; ``""`` for all others.
        parameter: user name of the parameter or buffer that an input is, or that a gather or
            reduce-scatter stamped by the shard pass moves; ``""`` for all others.
        bytes: bytes of storage that this node allocates on one device (0 for views and getitem).
        storages: ids of the storages that its tensors live in (a view has its base's).
        time_s: predicted seconds to compute it once.
        follows: index of the value whose decision it takes: getitem -> producer, view -> base,
            wait_tensor -> collective; None where it is decided by itself.
        is_tensor: False for symbolic sizes, tuples are True when they hold tensors.
        random: draws random numbers.  effectful: must run exactly once.
        reads_mutated: reads a graph input that is mutated in this graph.
        collective: kind of collective (``"all_gather_into_tensor"``, ...) or ``""``.
        holds: of a wait, what its collective reads: PyTorch keeps it until then.
        axis: name of the mesh axis the collective runs over, or ``""``.
        origin: name of the captured (unsharded) node that this one computes; ``""`` for what a
            rewrite of ours inserted (redistributions).
        serves: name of the captured node that an inserted node serves, ``""`` otherwise.
        captured_op: operator of the captured node, before rewrites; ``""`` for inserted nodes.
        module: the user's module path, ``"layers.0.attention"``; ``""`` at the root.
        source: ``"file.py:12"`` of the user's line, or ``""``.
        shape: local shape of the (first) tensor.  dtype: its dtype as text.
    """

    index: int
    name: str
    op: str
    side: Side
    inputs: tuple[int, ...] = ()
    role: Role = ""
    parameter: str = ""
    bytes: int = 0
    storages: tuple[int, ...] = ()
    time_s: float = 0.0
    follows: int | None = None
    is_tensor: bool = True
    random: bool = False
    effectful: bool = False
    reads_mutated: bool = False
    collective: str = ""
    holds: tuple[int, ...] = ()
    axis: str = ""
    origin: str = ""
    serves: str = ""
    captured_op: str = ""
    module: str = ""
    source: str = ""
    shape: tuple[int, ...] = ()
    dtype: str = ""


@dataclass(frozen=True, slots=True)
class Facts:
    """A local joint graph.

    Attributes:
        values: one per node, in graph order.
        forward_outputs: indices of what forward gives back (user outputs and mutated buffers).
        backward_outputs: indices of the gradients.
        storage_bytes: bytes of each storage id on one device.
        parameter_bytes: bytes of parameters and buffers on one device, alive throughout.
        prefetch_bytes: how many bytes of gathered parameters may be on their way before their use;
            None where each is gathered when it is used.
    """

    values: tuple[Value, ...]
    forward_outputs: tuple[int, ...]
    backward_outputs: tuple[int, ...]
    storage_bytes: tuple[int, ...]
    parameter_bytes: int = 0
    prefetch_bytes: int | None = None

    @property
    def forward(self) -> tuple[Value, ...]:
        """Values computed on the forward side: exactly those that get a decision."""
        return tuple(v for v in self.values if v.side == "forward")
