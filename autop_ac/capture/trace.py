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
import itertools
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from .. import _torch as private
from .._torch_annotate import mark
from .._torch_flex import traced_with_gradients
from .._torch_local_map import keeping_local_maps
from ..annotate import Entries, capturing, region_numbers
from ..errors import AutopACError, CaptureError, ConfigError
from .batch_norm import BATCH_NORM
from .calling import CallForm, Calling, FlatForward, call_form, described, noting
from .failures import (
    mixed_dtypes,
    no_graph_text,
    own_error,
    own_error_text,
    unknown_sizes,
    users_line,
)
from .joint import JointGraph, Port
from .local_map import inline_local_maps, mark_local
from .local_map_call import check_call
from .marks import take_marks
from .names import module_path, user_name

_MODEL = "model"  # where `FlatForward` keeps the user's model
_aten = torch.ops.aten
# with the whole number of elements in them, so that each device may compute its part
_DECOMPOSED = [
    _aten.nll_loss_forward,
    _aten.nll_loss_backward,
    _aten.mse_loss_backward,
    _aten.smooth_l1_loss_backward,
    _aten.huber_loss_backward,
    _aten.soft_margin_loss_backward,
    _aten.binary_cross_entropy_backward,
]


@dataclass(frozen=True, eq=False)
class Request:
    """What is to be traced, so that the same can be traced again in another mode.

    Attributes:
        model: over fake tensors, the parameters in the dtype that forward sees.
        originals: by id of each fake tensor its kind, user name, stored dtype and whether it
            requires a gradient.
        form, leaves: of the call; tensors are fake.
        mp_policy, loss_fn: as the user gave them.
        fake_mode: that all fake tensors belong to.
        mesh: that the model is planned for, and its calls of `local_map` are for.
    """

    model: torch.nn.Module
    originals: Mapping[int, _Stored]
    form: CallForm
    leaves: tuple[Any, ...]
    mp_policy: MixedPrecisionPolicy | None
    loss_fn: Callable[..., Any] | None
    fake_mode: Any
    mesh: DeviceMesh | None = None

    def inputs(self) -> tuple[str, ...]:
        """Each tensor of the call with its global shape, ``"x (8, 16)"``."""
        held = zip(self.form.names, self.leaves, strict=True)
        return tuple(f"{n} {tuple(x.shape)}" for n, x in held if isinstance(x, torch.Tensor))


@dataclass(frozen=True, slots=True)
class _Stored:
    kind: str
    name: str
    size: torch.Size
    dtype: torch.dtype
    requires_grad: bool


def _positional(fn: Callable[..., Any]) -> int:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    params = inspect.signature(fn).parameters.values()
    return sum(p.kind in kinds and p.default is p.empty for p in params)


def request(
    model: torch.nn.Module,
    input_fn: Callable[[], Any],
    device_type: str = "cpu",
    *,
    mp_policy: MixedPrecisionPolicy | None = None,
    loss_fn: Callable[..., Any] | None = None,
    mesh: DeviceMesh | None = None,
) -> Request:
    """Everything that a trace needs, on fake tensors.

    Args:
        model: a single-device module, real or on the meta device; it is left as it is.
        input_fn: gives a tensor, a tuple, or a `ForwardInputs`, in global shapes; on the meta device
            where real inputs would be too large.
        device_type: the device the graph is for.
        mp_policy: dtypes of parameters in the graph, and of outputs.
        loss_fn: ``loss_fn(output)`` or ``loss_fn(output, target)``, traced into the graph; the last
            positional input is then the target.
        mesh: that the model is planned for; without one it may not call `local_map`.

    Raises:
        ConfigError: what `input_fn` gives is no input of `model`.
    """
    fake_mode = private.FakeTensorMode(shape_env=private.ShapeEnv(), allow_non_fake_inputs=True)
    args, kwargs = _inputs(input_fn, model)
    has_target = loss_fn is not None and _positional(loss_fn) > 1
    form, leaves = call_form(model.forward, args, kwargs, has_target)
    if not any(isinstance(x, torch.Tensor) for x in leaves):
        raise ConfigError(
            "input_fn gave no tensor: return a tensor, a tuple of inputs or "
            "ForwardInputs(args, kwargs), in global shapes"
        )
    fakes = [_fake_input(x, fake_mode, device_type) for x in leaves]
    originals, traced = _fake_copy(model, fake_mode, device_type, mp_policy)
    return Request(traced, originals, form, tuple(fakes), mp_policy, loss_fn, fake_mode, mesh)


def resized(wanted: Request, shapes: Sequence[tuple[int, ...]]) -> Request:
    """The same request for tensors of other sizes.

    Args:
        shapes: global, of each tensor among the leaves.
    """
    given = iter(shapes)
    leaves = [_of_shape(x, next(given), wanted.fake_mode) if isinstance(x, torch.Tensor) else x
              for x in wanted.leaves]  # fmt: skip
    return replace(wanted, leaves=tuple(leaves))


def _of_shape(leaf: torch.Tensor, shape: tuple[int, ...], fake_mode: Any) -> torch.Tensor:
    """A dense tensor of another shape, its dims in the same order in memory."""
    if tuple(leaf.shape) == shape:
        return leaf
    order = sorted(range(leaf.dim()), key=leaf.stride, reverse=True)
    with fake_mode:
        dense = torch.empty([shape[d] for d in order], dtype=leaf.dtype, device=leaf.device)
        made = dense.permute([order.index(d) for d in range(leaf.dim())])
    return made.requires_grad_(leaf.requires_grad)


def capture(wanted: Request, training: Sequence[bool] | None = None) -> JointGraph:
    """Trace one joint graph.

    Args:
        training: whether each module of the model, in the order of ``modules()``, is in training
            mode; None as it was when the request was made.

    Raises:
        CaptureError: the model has a graph break, an unsupported construct or no gradient.
    """
    # torch traces one thread at a time: annotations and the tracer's patches are the process's
    with private.compile_lock, private.quiet_fakes():
        return _capture(wanted, training)


def _capture(wanted: Request, training: Sequence[bool] | None) -> JointGraph:
    policy = wanted.mp_policy
    model = copy.deepcopy(wanted.model, {id(t): t for t in _tensors_of(wanted.model)})
    for module, mode in zip(model.modules(), training or (), strict=bool(training)):
        module.training = mode
    entry = FlatForward(
        model,
        wanted.form,
        list(wanted.leaves),
        policy.param_dtype if policy and policy.cast_forward_inputs else None,
        policy.output_dtype if policy else None,
        wanted.loss_fn,
    )
    entry.training = model.training
    tensors = [x for x in wanted.leaves if isinstance(x, torch.Tensor)]
    where = f"while capturing {type(model).__name__}"
    inputs = list(zip(wanted.form.names, wanted.leaves, strict=True))
    failed: Exception | None = None
    try:
        with (
            capturing() as entries,
            noting() as noted,
            keeping_local_maps(partial(check_call, mesh=wanted.mesh)),
            traced_with_gradients(),
            torch.enable_grad(),
        ):
            graph = private._dynamo_graph_capture_for_export(entry)(*tensors)
    except AutopACError:
        raise
    except Exception as error:  # Dynamo's own, and assertions of its export
        failed = error
    if failed is not None:  # out of the handler, so that the model's own error stands alone
        cause = own_error(entry, tensors, failed)
        if cause is not None:
            told = f"{users_line(cause)}: {type(cause).__name__}: {cause}"
            raise CaptureError(f"{where}: {own_error_text(told, inputs)}") from cause
        raise CaptureError(f"{where}: {no_graph_text(failed)}") from failed
    if training is None:  # in another mode a region may well be empty
        _tell_empty_regions(entries, graph, where)
    _check_changes(noted.changes, wanted.model, where)
    inline_local_maps(graph, wanted.mesh)
    names = _restore_dtypes(graph, wanted.originals, wanted.fake_mode)
    joint = _export_joint(graph, tensors, where, divisible=True)
    if told := mixed_dtypes(joint.graph_module.graph):
        raise CaptureError(f"{where}: {own_error_text(told, inputs)}")
    if told := unknown_sizes(joint.graph_module.graph):
        raise CaptureError(f"{where}: {told}")
    take_marks(joint.graph_module)
    mark_local(joint.graph_module.graph)
    given = [name for name, leaf in inputs if isinstance(leaf, torch.Tensor)]
    if lost := [n for n in (*joint.params_spec, *joint.buffers_spec) if n not in names]:
        raise CaptureError(
            f"{where}: the model holds tensors that are no parameters and no buffers "
            f"({', '.join(n.partition('model_')[2] or n for n in lost)}): register each with "
            "register_buffer, so that it is placed and moved with the module; a BlockMask is made in forward"
        )
    calling = Calling(
        parameters=tuple(names.get(n, n) for n in joint.params_spec),
        buffers=tuple(names.get(n, n) for n in joint.buffers_spec),
        form=wanted.form,
        leaves=wanted.leaves,
        output_types=tuple(described(cls) for cls in noted.output_types),
    )
    ports = [Port("input", name, i) for i, name in enumerate(given)]
    return _describe(joint, names, ports, calling, _MODEL)


def differentiate(graph: torch.fx.GraphModule, inputs: Sequence[Port]) -> JointGraph:
    """The joint graph of what Dynamo hands to a backend of `torch.compile`.

    Args:
        graph: a function of tensors and sizes; its placeholders carry ``example_value``.
        inputs: what each placeholder is.

    Raises:
        CaptureError: AOTAutograd cannot differentiate it.
    """
    values = [n.meta["example_value"] for n in graph.graph.find_nodes(op="placeholder")]
    joint = _export_joint(graph, values, "while compiling", divisible=False)
    take_marks(joint.graph_module)
    return _describe(joint, {}, inputs, None, "")


def _check_changes(changes: Sequence[tuple[str, str]], model: torch.nn.Module, where: str) -> None:
    """Tell of what forward changes in Python: it was done while tracing, once, and not in a call.

    Raises:
        CaptureError: a buffer is assigned.
    """
    told = []
    for source, attribute in changes:
        path = module_path({"": (source, None)}, prefix=_MODEL)
        name = ".".join(part for part in (path, attribute) if part)
        if name.rpartition(".")[2] in ("_buffers", "_parameters"):
            owner = name.rpartition(".")[0] or type(model).__name__
            raise CaptureError(
                f"{where}: forward assigns a buffer or parameter of {owner}, and a graph cannot: write "
                "into it, `self.name.copy_(...)` in place of `self.name = ...`"
            )
        told.append(name or "an object of the model")
    if told:
        warnings.warn(
            f"{where}: what forward does to {', '.join(dict.fromkeys(told))} in Python is done while "
            "tracing, once, and not in each call of the parallel module. Keep such state in a buffer, "
            "changed in place, or outside of forward",
            UserWarning,
            stacklevel=4,
        )


def _tell_empty_regions(entries: Entries, graph: torch.nn.Module, where: str) -> None:
    # those inside checkpoints and the like, too
    graphs = (m.graph for m in graph.modules() if isinstance(m, torch.fx.GraphModule))
    held = [
        number
        for node in itertools.chain.from_iterable(g.nodes for g in graphs)
        if node.op not in ("placeholder", "get_attr", "output") and node.target is not mark
        for number in region_numbers(node.meta)
    ]
    for spec in entries.without(held):
        warnings.warn(
            f"{where}: {spec.label} at {spec.source or 'an unknown line'} holds no operation, so it decides "
            "nothing: put what it is for into its block, or take it out",
            UserWarning,
            stacklevel=5,
        )


def _tensors_of(model: torch.nn.Module) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers()]


def _inputs(input_fn: Callable[[], Any], model: torch.nn.Module) -> tuple[Any, Any]:
    with torch.random.fork_rng(devices=[]):
        made = input_fn()
    if hasattr(made, "args") and hasattr(made, "kwargs"):  # ForwardInputs, ours or another's
        return tuple(made.args), dict(made.kwargs)
    known = inspect.signature(model.forward).parameters
    if isinstance(made, dict) and made and all(k in known for k in made):
        raise ConfigError(
            f"input_fn gave a dict of {', '.join(made)}, which are arguments of forward: return "
            "ForwardInputs(kwargs=...) to pass them by name"
        )
    return tuple(made) if isinstance(made, (tuple, list)) else (made,), {}


def _fake_input(leaf: Any, fake_mode: Any, device_type: str) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    with fake_mode:
        new = torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device=device_type)
    return new.requires_grad_(leaf.requires_grad)


def _fake_copy(
    model: torch.nn.Module,
    fake_mode: Any,
    device_type: str,
    policy: MixedPrecisionPolicy | None,
) -> tuple[dict[int, _Stored], torch.nn.Module]:
    """The model over fake tensors; by id of each fake tensor what is known of its original."""
    memo: dict[int, Any] = {}
    originals: dict[int, _Stored] = {}
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
        originals[id(fake)] = _Stored(
            kind, user_name(name), tensor.size(), tensor.dtype, tensor.requires_grad
        )
    return originals, copy.deepcopy(model, memo)


def _restore_dtypes(
    graph: torch.fx.GraphModule, originals: Mapping[int, _Stored], fake_mode: Any
) -> dict[str, str]:
    """Give each parameter its stored dtype back, a cast behind it; user names by captured name."""
    names: dict[str, str] = {}
    tensors = [*graph.named_parameters(), *graph.named_buffers()]
    for target, tensor in tensors:
        if id(tensor) not in originals:
            continue  # a constant of the model that is no registered buffer: found by its own name
        stored = originals[id(tensor)]
        names[target] = stored.name
        if stored.dtype == tensor.dtype:
            continue
        with fake_mode:
            fake = torch.empty(stored.size, dtype=stored.dtype, device=tensor.device)
        setattr(graph, target, torch.nn.Parameter(fake, stored.requires_grad))
        for node in [n for n in graph.graph.nodes if n.op == "get_attr" and n.target == target]:
            with graph.graph.inserting_after(node):
                cast = graph.graph.call_method("to", (node, tensor.dtype))
            node.replace_all_uses_with(cast, delete_user_cb=lambda user, c=cast: user is not c)
    graph.recompile()
    return names


def _export_joint(
    graph: torch.fx.GraphModule, tensors: list[Any], where: str, *, divisible: bool
) -> Any:
    """The joint graph; `divisible`: of operators that compute a part of the batch as they do the whole."""
    joint = _exported(graph, tensors, where, divisible)
    infos = joint._aot_state.fw_metadata.output_info
    views = [i for i, info in enumerate(infos) if info.output_type in private.VIEW_OUTPUTS]
    if not views:
        return joint
    # AOTAutograd would make these views again after each call, with the global sizes that it saw
    output = graph.graph.output_node()
    (results,) = output.args
    for i in views:
        with graph.graph.inserting_before(output):
            copied = graph.graph.call_method("clone", (results[i],))
        results = (*results[:i], copied, *results[i + 1 :])
    output.args = (results,)
    graph.recompile()
    return _exported(graph, tensors, where, divisible)


def _exported(graph: torch.fx.GraphModule, tensors: list[Any], where: str, divisible: bool) -> Any:
    table = dict(torch._decomp.get_decompositions(_DECOMPOSED))  # noqa: TID251 documented entry point
    if divisible:
        table |= BATCH_NORM
    with contextlib.ExitStack() as stack, torch.enable_grad():
        try:
            return private.aot_export_joint_with_descriptors(
                stack, graph, tuple(tensors), {}, decompositions=table
            )
        except Exception as error:  # as many kinds as there are ways not to be traceable
            raise CaptureError(
                f"{where}: AOTAutograd cannot trace it with its backward, at "
                f"{users_line(error)}. Sizes that depend on values, changes of parameters and "
                f"sparse tensors are what it often is: move that out of forward.\n{error}"
            ) from error


def _describe(
    joint: Any, names: Mapping[str, str], inputs: Sequence[Port], calling: Any, prefix: str
) -> JointGraph:
    """The joint graph with a port for each placeholder and result.

    Args:
        names: user names of parameters and buffers by captured name.
        inputs: what each argument is.
    """
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
            return inputs[desc.idx]
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
        calling=calling,
        module_prefix=prefix,
    )
