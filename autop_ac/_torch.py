"""Private parts of torch that the way through needs, imported here and nowhere else.

Each name was seen in torch 2.13.0. None has a public replacement yet; `torch.export` offers a joint
graph without descriptors, which is where to move once it carries them.
"""

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

from torch._dynamo import graph_break_hints
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
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._redistribute import redistribute_local_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv

# results that AOTAutograd makes again as views of something after each call
VIEW_OUTPUTS = (
    OutputType.alias_of_input,
    OutputType.alias_of_intermediate,
    OutputType.alias_of_intermediate_save_as_output,
    OutputType.alias_of_intermediate_base_is_user_output,
)

# what a model raises on fake tensors though it may not on real ones
FAKE_LIMITS = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    GuardOnDataDependentSymNode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)


def may_be_users(error: Exception) -> bool:
    """Whether Dynamo gave up where the code may raise in eager as well, an assertion included."""
    text = str(error)
    return graph_break_hints.USER_ERROR[0].strip() in text or "assertion failed" in text


@contextlib.contextmanager
def quiet_fakes() -> Iterator[None]:
    """An operator that fails on fake tensors is logged with a traceback, and raised all the same."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def changed_objects(context: Any) -> list[tuple[str, str]]:
    """Objects from outside that the code traced so far changes: where Dynamo found each, and what.

    What ends as it began, as a flag that is set and reset, is no change.

    Args:
        context: what `comptime` hands to its function.

    Returns:
        The source as Dynamo writes it, and the attribute, or ``""`` for the content of a container.
    """
    effects = context._ComptimeContext__tx.output.side_effects
    real = {id(x): x for x in effects.keepalive}
    originals = {id(v): real.get(key) for key, v in effects.id_to_variable.items()}
    found = []
    for variable in effects._get_modified_vars():
        source = getattr(variable, "source", None)
        kind = type(variable.mutation_type).__name__
        # no source of an object: the stack of modes, which is left as it was
        if source is None or type(source) is Source or not kind.endswith("Existing"):
            continue
        original = originals.get(id(variable))
        stored = effects.store_attr_mutations.get(variable, {})
        names = [n for n, v in stored.items() if not _is(v, getattr(original, n, _ABSENT))]
        if not stored and not _is(variable, original):
            names = [""]
        found += [(str(source.name), name) for name in names]
    return found


_ABSENT = object()


def _is(variable: Any, value: Any) -> bool:
    """Whether what Dynamo knows of a value is a constant, or a container of some, equal to `value`."""
    try:
        known = variable.as_python_constant()
    except NotImplementedError:  # no constant, such as a tensor
        return False
    return type(known) is type(value) and bool(known == value)


sharding_propagator = DTensor._op_dispatcher.sharding_propagator

__all__ = [
    "BufferAOTInput",
    "DTensorSpec",
    "FAKE_LIMITS",
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
    "may_be_users",
    "quiet_fakes",
    "redistribute_local_tensor",
    "sharding_propagator",
]
