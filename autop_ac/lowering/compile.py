"""From the tagged local graph to a callable: partitioned once, run as it is or by Inductor.

AOTAutograd's second half makes the autograd function, keeps input mutations, aliased outputs and
non-tensor outputs right, and asks us for the partition. Forward and backward are compiled at once, so
no setting has to outlive the `with` block.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import torch

from .. import _torch_compile as private
from .._torch_flex import backward_with_gradients, flex_attention_backward
from ..capture.joint import JointGraph
from ..capture.names import source_line
from ..errors import ConfigError
from ..graph.random import random_decompositions
from ..recompute.pipeline import Recompute
from .partition import partition

Backend = Literal["eager", "inductor"]
Partition = Callable[..., tuple[torch.fx.GraphModule, torch.fx.GraphModule]]


def decompositions(joint: JointGraph, backend: Backend) -> Mapping[Any, Callable[..., Any]]:
    """What must be decomposed before the recompute part sees the graph: random operators, by seed.

    Inductor has the rest of its own decompositions too. A user's ``fallback_random`` asks for the
    numbers that PyTorch draws by itself, and gets them.
    """
    table = private.select_decomp_table()
    inductor = backend == "inductor"
    seeded = random_decompositions(joint.module.graph, table, inductor)
    if not inductor:
        return seeded
    if private.inductor_config.fallback_random:
        return table
    if not seeded:  # some operator draws by itself, and so do all: left to PyTorch's kernels
        return {op: fn for op, fn in table.items() if not private.is_seeded(op)}
    return {**table, **seeded}


def compile_local(
    joint: JointGraph, local: torch.fx.GraphModule, partition: Partition, backend: Backend
) -> Callable[..., Any]:
    """A function of ``(*parameters, *buffers, *inputs)``, local tensors, giving the user's outputs.

    Args:
        joint: the capture that `local` was made from; it can be compiled again with another graph.
        local: joint graph on local shapes, tagged.
        partition: called once as AOTAutograd calls a partitioner.
        backend: "eager" runs the two graphs node by node; "inductor" compiles them.

    Raises:
        ConfigError: Inductor has no kernel for an operator on this device.
    """
    for node in local.graph.find_nodes(op="call_function", target=flex_attention_backward):
        if backend == "inductor" and node.args[0].meta["val"].device.type == "cpu":
            raise ConfigError(
                f"flex attention at {source_line(node.meta.get('stack_trace')) or 'an unknown line'}: Inductor "
                'has no backward of it for the CPU. Run the graphs node by node, configure_compile("eager"), '
                "or on a GPU"
            )
    descriptors = _with_graph(joint, local)
    if backend == "eager":
        forward = backward = _node_by_node
    else:
        forward = partial(_inductor, is_backward=False)
        backward = partial(_inductor, is_backward=True)
    # donated buffers would forbid a second backward (retain_graph); node by node they save nothing
    donated = private.functorch_config.donated_buffer and backend == "inductor"
    if not donated:
        descriptors._aot_state.fw_metadata.bw_donated_idxs = []
    with private.functorch_config.patch(donated_buffer=donated):
        return private.aot_compile_joint_with_descriptors(
            descriptors, partition_fn=partition, fw_compiler=forward, bw_compiler=backward
        )


def _node_by_node(gm: torch.fx.GraphModule, _: Any) -> Any:
    """The graph as Python code that drops each value after its last reader, inputs included.

    `torch.fx.Interpreter` runs the same in the same order; it takes more time than small kernels do.
    """
    for node in gm.graph.find_nodes(op="call_function", target=flex_attention_backward):
        node.target = backward_with_gradients
    gm.graph.set_codegen(private._BoxedCodeGen())
    gm.recompile()

    def run(args: list[Any]) -> Any:
        return gm.forward(args)

    run._boxed_call = True  # type: ignore[attr-defined]  # AOTAutograd's word: `args` may be emptied
    return run


def _inductor(gm: torch.fx.GraphModule, inputs: Any, **options: Any) -> Any:
    # what still draws from the generator here was left to PyTorch's own kernels
    native = any(private.is_seeded(n.target) and n.target is not private.seeds
                 for n in gm.graph.nodes)  # fmt: skip
    if not native:
        return private.compile_fx_inner(gm, inputs, **options)
    with private.inductor_config.patch(fallback_random=True):
        return private.compile_fx_inner(gm, inputs, **options)


def partition_by(recompute: Recompute) -> Partition:
    """The partitioner of a recompute plan, as AOTAutograd calls one; it runs once."""

    def partitioner(
        module: torch.fx.GraphModule,
        inputs: Any,
        *,
        num_fwd_outputs: int,
        static_lifetime_input_indices: list[int] | None = None,
        **_: Any,
    ) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
        return partition(
            module,
            recompute.facts,
            recompute.plan,
            num_fwd_outputs=num_fwd_outputs,
            static_lifetime_input_indices=static_lifetime_input_indices,
        )

    return partitioner


def _with_graph(joint: JointGraph, local: torch.fx.GraphModule) -> Any:
    """AOTAutograd's handle with the local graph and local arguments in place of the global ones."""
    descriptors = copy.copy(joint.descriptors)
    state = copy.copy(descriptors._aot_state)
    captured = copy.copy(descriptors._aot_graph_capture)
    metadata = copy.copy(state.fw_metadata)
    values = [n.meta["val"] for n in local.graph.nodes if n.op == "placeholder"]
    kinds = [p.kind for p in joint.placeholders.values()]
    primals = [v for v, kind in zip(values, kinds, strict=True) if kind != "tangent"]
    tangents = [v for v, kind in zip(values, kinds, strict=True) if kind == "tangent"]
    metadata.traced_tangents = tangents
    metadata.subclass_tangent_meta = private.create_subclass_meta(
        tangents, count_symints=False, with_memory_format=True
    )
    captured.graph_module = local
    captured.updated_flat_args = (primals, tangents)
    state.flat_args = primals
    state.fw_metadata = metadata
    descriptors._aot_state = state
    descriptors._aot_graph_capture = captured
    return descriptors
