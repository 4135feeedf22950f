"""From a module and its inputs to one joint forward and backward graph on global shapes.

The model is copied with fake parameters (a meta model and a real one alike), captured by Dynamo in
strict mode, and differentiated by AOTAutograd. Under a mixed-precision policy Dynamo sees a model
whose parameters already have ``param_dtype``, so that every dtype the model asks for is right; the
casts from the stored dtype are put in front of the captured graph afterwards.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils import _pytree as pytree

from .. import _torch as private
from ..annotate import capturing, is_region_object
from ..errors import CaptureError, ConfigError
from .joint import JointGraph, Port
from .marks import take_marks
from .names import source_line, user_name

_MODEL = "model"  # where `_Step` keeps the user's model
_DECOMPOSED = [torch.ops.aten.nll_loss_forward, torch.ops.aten.nll_loss_backward]


@dataclass(frozen=True)
class ForwardInputs:
    """Inputs of one forward call, by position and by name; global shapes."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Calling:
    """How a call of the parallel module becomes the flat list that the graph takes, and back.

    Attributes:
        parameters, buffers: user names in the order the compiled function takes them.
        in_spec: pytree of ``(args, kwargs)``.  leaves: traced leaves, fake tensors or plain values.
        out_spec: pytree of the outputs.
        module_prefix: path of the user's model inside what was traced.
    """

    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    in_spec: Any
    leaves: tuple[Any, ...]
    out_spec: Any
    module_prefix: str


class _Step(torch.nn.Module):
    """The user's model with what surrounds it in the graph: casts of inputs and outputs, the loss."""

    def __init__(
        self,
        model: torch.nn.Module,
        policy: MixedPrecisionPolicy | None,
        loss_fn: Callable[..., Any] | None,
    ) -> None:
        super().__init__()
        self.model = model
        self.input_dtype = policy.param_dtype if policy and policy.cast_forward_inputs else None
        self.output_dtype = policy.output_dtype if policy else None
        self.loss_fn = loss_fn
        self.has_target = loss_fn is not None and _positional(loss_fn) > 1

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        target = args[-1:] if self.has_target else ()
        args = args[: len(args) - len(target)]
        out = self.model(*_cast(args, self.input_dtype), **_cast(kwargs, self.input_dtype))
        out = _cast(out, self.output_dtype)
        return out if self.loss_fn is None else self.loss_fn(out, *target)


def _positional(fn: Callable[..., Any]) -> int:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    params = inspect.signature(fn).parameters.values()
    return sum(p.kind in kinds and p.default is p.empty for p in params)


def _cast(tree: Any, dtype: torch.dtype | None) -> Any:
    if dtype is None:
        return tree

    def cast(leaf: Any) -> Any:
        floating = isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
        return leaf.to(dtype) if floating else leaf

    return pytree.tree_map(cast, tree)


def capture(
    model: torch.nn.Module,
    input_fn: Callable[[], Any],
    device_type: str = "cpu",
    *,
    mp_policy: MixedPrecisionPolicy | None = None,
    loss_fn: Callable[..., Any] | None = None,
) -> JointGraph:
    """Trace one joint graph of `model` on the inputs that `input_fn` makes.

    Args:
        model: a single-device module, real or on the meta device; it is left as it is.
        input_fn: gives a tensor, a tuple, or a `ForwardInputs`, in global shapes.
        device_type: the device the graph is for.
        mp_policy: dtypes of parameters in the graph, and of outputs.
        loss_fn: ``loss_fn(output)`` or ``loss_fn(output, target)``, traced into the graph; the last
            positional input is then the target.

    Raises:
        CaptureError: the model has a graph break, an unsupported construct or no gradient.
    """
    # torch traces one thread at a time: annotations and the tracer's patches are the process's
    with private.compile_lock:
        return _capture(model, input_fn, device_type, mp_policy, loss_fn)


def _capture(
    model: torch.nn.Module,
    input_fn: Callable[[], Any],
    device_type: str,
    mp_policy: MixedPrecisionPolicy | None,
    loss_fn: Callable[..., Any] | None,
) -> JointGraph:
    fake_mode = private.FakeTensorMode(shape_env=private.ShapeEnv(), allow_non_fake_inputs=True)
    args, kwargs = _fake_inputs(input_fn, fake_mode, device_type)
    originals, traced = _fake_copy(model, fake_mode, device_type, mp_policy)
    wrapped = mp_policy is not None or loss_fn is not None
    entry = _Step(traced, mp_policy, loss_fn) if wrapped else traced
    entry.train(model.training)
    where = f"while capturing {type(model).__name__}"
    try:
        with capturing(), torch.enable_grad():
            graph = private._dynamo_graph_capture_for_export(entry)(*args, **kwargs)
    except private.TorchDynamoException as error:
        line = source_line(str(error)) or source_line(_user_frames(error))
        if is_region_object(str(error)):
            raise CaptureError(
                f"{where}: an ac_region that was made outside of forward is entered at "
                f"{line or 'an unknown line'}, and Dynamo enters no object from outside. Call it there: "
                "`with self.region():` in place of `with self.region:`; or make it there, "
                "`with ac_region(...):`"
            ) from error
        raise CaptureError(
            f"{where}: Dynamo cannot trace the model as one graph, at {line or 'an unknown line'}. "
            f"Remove what it names from forward, or move it out of the model.\n{error}"
        ) from error
    names = _restore_dtypes(graph, originals, fake_mode)
    joint = _export_joint(graph, args, kwargs, where)
    take_marks(joint.graph_module)
    return _describe(joint, names, args, kwargs, _MODEL if wrapped else "")


def _user_frames(error: BaseException) -> str:
    stack = getattr(error, "real_stack", None)
    return "\n".join(stack.format()) if stack is not None else ""


def _fake_inputs(input_fn: Callable[[], Any], fake_mode: Any, device_type: str) -> Any:
    with fake_mode:
        made = input_fn()
    if isinstance(made, ForwardInputs):
        args, kwargs = tuple(made.args), dict(made.kwargs)
    elif hasattr(made, "args") and hasattr(made, "kwargs"):
        args, kwargs = tuple(made.args), dict(made.kwargs)
    elif isinstance(made, (tuple, list)):
        args, kwargs = tuple(made), {}
    else:
        args, kwargs = (made,), {}

    def fake(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        with fake_mode:
            new = torch.empty_strided(
                leaf.size(), leaf.stride(), dtype=leaf.dtype, device=device_type
            )
        return new.requires_grad_(leaf.requires_grad)

    args, kwargs = pytree.tree_map(fake, (args, kwargs))
    if not any(isinstance(x, torch.Tensor) for x in pytree.tree_leaves((args, kwargs))):
        raise ConfigError(
            f"input_fn gave no tensor but {type(made).__name__}: return a tensor, a tuple of inputs "
            "or ForwardInputs(args, kwargs), in global shapes"
        )
    return args, kwargs


def _fake_copy(
    model: torch.nn.Module,
    fake_mode: Any,
    device_type: str,
    policy: MixedPrecisionPolicy | None,
) -> tuple[dict[int, tuple[str, str, torch.Tensor]], torch.nn.Module]:
    """The model over fake tensors; by id of each fake tensor its kind, name and stored original."""
    memo: dict[int, Any] = {}
    originals: dict[int, tuple[str, str, torch.Tensor]] = {}
    named: list[tuple[str, str, torch.Tensor]] = []
    named += [("parameter", n, t) for n, t in model.named_parameters()]
    named += [("buffer", n, t) for n, t in model.named_buffers()]
    for kind, name, tensor in named:
        dtype = tensor.dtype
        if kind == "parameter" and policy and policy.param_dtype and dtype.is_floating_point:
            dtype = policy.param_dtype
        with fake_mode:  # contiguous, as the shards of a DTensor are
            fake = torch.empty(tensor.size(), dtype=dtype, device=device_type)
        if kind == "parameter":
            fake = torch.nn.Parameter(fake, tensor.requires_grad)
        memo[id(tensor)] = fake
        originals[id(fake)] = (kind, user_name(name), tensor)
    return originals, copy.deepcopy(model, memo)


def _restore_dtypes(
    graph: torch.fx.GraphModule, originals: Mapping[int, Any], fake_mode: Any
) -> dict[str, str]:
    """Give each parameter its stored dtype back, a cast behind it; user names by captured name."""
    names: dict[str, str] = {}
    tensors = [*graph.named_parameters(), *graph.named_buffers()]
    for target, tensor in tensors:
        if id(tensor) not in originals:
            continue  # a constant of the model that is no registered buffer: found by its own name
        _, names[target], stored = originals[id(tensor)]
        if stored.dtype == tensor.dtype:
            continue
        with fake_mode:
            fake = torch.empty(stored.size(), dtype=stored.dtype, device=tensor.device)
        setattr(graph, target, torch.nn.Parameter(fake, stored.requires_grad))
        for node in [n for n in graph.graph.nodes if n.op == "get_attr" and n.target == target]:
            with graph.graph.inserting_after(node):
                cast = graph.graph.call_method("to", (node, tensor.dtype))
            node.replace_all_uses_with(cast, delete_user_cb=lambda user, c=cast: user is not c)
    graph.recompile()
    return names


def _export_joint(graph: torch.fx.GraphModule, args: Any, kwargs: Any, where: str) -> Any:
    table = torch._decomp.get_decompositions(_DECOMPOSED)  # noqa: TID251 documented entry point
    with contextlib.ExitStack() as stack, torch.enable_grad():
        try:
            return private.aot_export_joint_with_descriptors(
                stack, graph, args, kwargs, decompositions=table
            )
        except RuntimeError as error:
            raise CaptureError(f"{where}: AOTAutograd cannot differentiate it. {error}") from error


def _describe(
    joint: Any, names: Mapping[str, str], args: Any, kwargs: Any, prefix: str
) -> JointGraph:
    leaves, in_spec = pytree.tree_flatten((args, kwargs))
    tensor_index, count = {}, 0
    for i, leaf in enumerate(leaves):
        tensor_index[i] = count
        count += isinstance(leaf, torch.Tensor)
    paths = [pytree.keystr(p) for p, _ in pytree.tree_flatten_with_path((args, kwargs))[0]]
    module = joint.graph_module
    output = module.graph.output_node()
    descs = output.meta["desc"]
    results = list(output.args[0])
    plain = [d.idx for d, r in zip(descs, results, strict=True)
             if isinstance(d, private.PlainAOTOutput) and isinstance(r, torch.fx.Node)]  # fmt: skip
    out_index = {idx: i for i, idx in enumerate(plain)}

    def port_of_input(desc: Any) -> Port:
        if isinstance(desc, private.ParamAOTInput):
            return Port("parameter", names.get(desc.target, desc.target))
        if isinstance(desc, private.BufferAOTInput):
            return Port("buffer", names.get(desc.target, desc.target))
        if isinstance(desc, private.PlainAOTInput):
            # the flat list that AOTAutograd takes holds tensors only where Dynamo lifted them
            return Port("input", paths[desc.idx], tensor_index[desc.idx])
        if isinstance(desc, private.TangentAOTInput):
            if isinstance(desc.output, private.PlainAOTOutput):
                return Port("tangent", f"output[{desc.output.idx}]", out_index[desc.output.idx])
        raise CaptureError(f"a graph input of a kind that is not supported: {desc}")

    def port_of_result(desc: Any, result: Any) -> Port | None:
        if not isinstance(result, torch.fx.Node):
            return None
        if isinstance(desc, private.PlainAOTOutput):
            return Port("output", f"output[{desc.idx}]", out_index[desc.idx])
        if isinstance(desc, private.InputMutationAOTOutput):
            return Port("mutation", port_of_input(desc.mutated_input).name)
        if isinstance(desc, private.GradAOTOutput):
            port = port_of_input(desc.grad_of)
            kind = "gradient" if port.kind == "parameter" else "input_gradient"
            return Port(kind, port.name, port.index)  # type: ignore[arg-type]
        raise CaptureError(f"a graph output of a kind that is not supported: {desc}")

    holders = [n for n in module.graph.nodes if n.op == "placeholder"]
    placeholders = {n.name: port_of_input(n.meta["desc"]) for n in holders}
    ports = tuple(port_of_result(d, r) for d, r in zip(descs, results, strict=True))
    if not any(p.kind == "tangent" for p in placeholders.values()):
        raise CaptureError(
            "the model is not differentiable: no output depends on a parameter that requires a "
            "gradient. Return a floating-point output computed from the parameters"
        )
    backward_kinds = ("gradient", "input_gradient")
    grads = [i for i, d in enumerate(descs) if isinstance(d, private.GradAOTOutput)]
    forward = grads[0] if grads else len(descs)
    assert all(p is None or p.kind not in backward_kinds for p in ports[:forward])
    return JointGraph(
        module=module,
        placeholders=placeholders,
        results=ports,
        num_forward_outputs=forward,
        fake_mode=joint.fake_mode,
        descriptors=joint,
        calling=Calling(
            parameters=tuple(names.get(n, n) for n in joint.params_spec),
            buffers=tuple(names.get(n, n) for n in joint.buffers_spec),
            in_spec=in_spec,
            leaves=tuple(leaves),
            out_spec=joint.out_spec,
            module_prefix=prefix,
        ),
    )
