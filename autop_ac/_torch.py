"""Private parts of torch that the way through needs, imported here and nowhere else.

Each name was seen in torch 2.13.0. None has a public replacement yet; `torch.export` offers a joint
graph without descriptors, which is where to move once it carries them.
"""

from typing import Any

from torch._dynamo.comptime import comptime
from torch._dynamo.convert_frame import compile_lock
from torch._dynamo.exc import TorchDynamoException
from torch._dynamo.functional_export import _dynamo_graph_capture_for_export
from torch._functorch._aot_autograd.descriptors import (
    BufferAOTInput,
    GradAOTOutput,
    InputMutationAOTOutput,
    ParamAOTInput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)
from torch._functorch._aot_autograd.schemas import OutputType
from torch._functorch.aot_autograd import (
    aot_compile_joint_with_descriptors,
    aot_export_joint_with_descriptors,
)
from torch._guards import Source
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._redistribute import redistribute_local_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

# results that AOTAutograd makes again as views of something after each call
VIEW_OUTPUTS = (
    OutputType.alias_of_input,
    OutputType.alias_of_intermediate,
    OutputType.alias_of_intermediate_save_as_output,
    OutputType.alias_of_intermediate_base_is_user_output,
)


def changed_objects(context: Any) -> list[tuple[str, str]]:
    """Objects from outside that the code traced so far changes: where Dynamo found each, and what.

    Args:
        context: what `comptime` hands to its function.

    Returns:
        The source as Dynamo writes it, and the attribute, or ``""`` for the content of a container.
    """
    effects = context._ComptimeContext__tx.output.side_effects
    found = []
    for variable in effects._get_modified_vars():
        source = getattr(variable, "source", None)
        kind = type(variable.mutation_type).__name__
        # no source of an object: the stack of modes, which is left as it was
        if source is None or type(source) is Source or not kind.endswith("Existing"):
            continue
        names = list(effects.store_attr_mutations.get(variable, {})) or [""]
        found += [(str(source.name), name) for name in names]
    return found


sharding_propagator = DTensor._op_dispatcher.sharding_propagator

__all__ = [
    "BufferAOTInput",
    "DTensorSpec",
    "FakeTensor",
    "FakeTensorMode",
    "GradAOTOutput",
    "InputMutationAOTOutput",
    "ParamAOTInput",
    "PlainAOTInput",
    "PlainAOTOutput",
    "ShapeEnv",
    "VIEW_OUTPUTS",
    "TangentAOTInput",
    "TensorMeta",
    "TorchDynamoException",
    "_dynamo_graph_capture_for_export",
    "aot_compile_joint_with_descriptors",
    "aot_export_joint_with_descriptors",
    "comptime",
    "changed_objects",
    "compile_lock",
    "compute_local_shape_and_global_offset",
    "make_fx",
    "redistribute_local_tensor",
    "sharding_propagator",
]
