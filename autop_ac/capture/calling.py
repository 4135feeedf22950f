"""From a call of forward to the flat tensors that a graph takes, and from its results back.

A call is brought to one form, whatever mixture of positions, keywords and defaults it is written in:
arguments by name, in the order of forward's signature. Tensors among them become inputs of the graph;
everything else is part of the graph. Dataclasses among the outputs are taken apart while tracing,
because a graph cannot give them, and put together again after each call.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from .. import _torch as private
from ..errors import ConfigError, UsageError

_PLAIN = (
    type(None), bool, int, float, complex, str, bytes, enum.Enum,
    torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip


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
        form: the form of the call that was traced.
        leaves: traced leaves, fake tensors or plain values.
        output_types: dataclasses among the outputs, in the order in which they were taken apart.
    """

    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    form: CallForm
    leaves: tuple[Any, ...]
    output_types: tuple[Dataclass, ...]


@dataclass(frozen=True, eq=False)
class CallForm:
    """The one form that calls of a forward are brought to.

    Attributes:
        signature: of the user's forward.
        has_target: whether the last positional input is the target of the loss.
        spec: pytree of ``(arguments by name, (target,) or ())``.
        names: by leaf, where it stands, ``"batch['mask']"``.
    """

    signature: inspect.Signature
    has_target: bool
    spec: Any
    names: tuple[str, ...]

    def flatten(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        """The leaves of a call, in the order of the traced one.

        Raises:
            UsageError: the call does not fit forward, or is structured otherwise than the traced one.
        """
        try:
            tree = _by_name(self.signature, self.has_target, args, kwargs)
        except TypeError as error:
            raise UsageError(f"the call does not fit forward{self.signature}: {error}") from error
        leaves, spec = pytree.tree_flatten(tree)
        if spec != self.spec:
            got, traced = set(_names(tree)), set(self.names)
            raise UsageError(
                f"the inputs are {_listed(got - traced)} more and {_listed(traced - got)} less than "
                f"input_fn gave when the model was captured ({_listed(traced)}), or differ in order "
                "or kind of container. Call the parallel module with that structure"
            )
        return leaves


def _listed(names: set[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"


def call_form(
    forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], has_target: bool
) -> tuple[CallForm, list[Any]]:
    """The form of a call and its leaves.

    Raises:
        ConfigError: the call does not fit `forward`, or holds what is neither tensor nor plain.
    """
    signature = inspect.signature(forward)
    try:
        tree = _by_name(signature, has_target, args, kwargs)
    except TypeError as error:
        raise ConfigError(
            f"what input_fn gave does not fit forward{signature}: {error}. Return a tensor, a tuple "
            "of positional inputs, or ForwardInputs(args, kwargs)"
        ) from error
    leaves, spec = pytree.tree_flatten(tree)
    names = _names(tree)
    for name, leaf in zip(names, leaves, strict=True):
        if not isinstance(leaf, (torch.Tensor, *_PLAIN)):
            raise ConfigError(
                f"input {name} is a {type(leaf).__name__}: inputs are tensors, plain values, and "
                "containers that torch.utils._pytree knows; register this class there"
            )
    return CallForm(signature, has_target, spec, tuple(names)), leaves


def _by_name(
    signature: inspect.Signature, has_target: bool, args: tuple[Any, ...], kwargs: Any
) -> tuple[dict[str, Any], tuple[Any, ...]]:
    target: tuple[Any, ...] = ()
    if has_target:
        if not args:
            raise TypeError("the target of loss_fn, the last positional input, is missing")
        args, target = args[:-1], args[-1:]
    bound = signature.bind(*args, **kwargs)
    given = bound.arguments
    arguments = {}
    for name, parameter in signature.parameters.items():
        if name in given:
            arguments[name] = given[name]
        elif isinstance(parameter.default, _PLAIN):  # so that a default may be given or left out
            arguments[name] = parameter.default
    return arguments, target


def _names(tree: tuple[dict[str, Any], tuple[Any, ...]]) -> list[str]:
    arguments, target = tree
    names = []
    for path, _ in pytree.tree_flatten_with_path(arguments)[0]:
        first: Any = path[0]
        names.append(f"{first.key}{pytree.keystr(path[1:])}")
    for path, _ in pytree.tree_flatten_with_path(target)[0]:
        names.append(f"target{pytree.keystr(path[1:])}")
    return names


class FlatForward(torch.nn.Module):
    """A forward of flat tensors alone, with what surrounds the user's model in the graph.

    Args:
        model: the user's, over fake tensors; it stands at ``model`` in module paths.
        form, leaves: of the call; tensors among the leaves are replaced by the inputs.
        input_dtype, output_dtype: floating tensors are cast to these, None for no cast.
        loss_fn: the loss, in the graph.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        form: CallForm,
        leaves: list[Any],
        input_dtype: torch.dtype | None,
        output_dtype: torch.dtype | None,
        loss_fn: Callable[..., Any] | None,
    ) -> None:
        super().__init__()
        self.model = model
        self.spec = form.spec
        self.constants = [None if isinstance(x, torch.Tensor) else x for x in leaves]
        self.places = [i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor)]
        arguments, _ = pytree.tree_unflatten(leaves, form.spec)
        bound = inspect.BoundArguments(form.signature, OrderedDict(arguments))
        self.positional, self.keywords = _how_to_call(form.signature, bound)
        self.input_dtype, self.output_dtype = input_dtype, output_dtype
        self.loss_fn = loss_fn

    def forward(self, *tensors: torch.Tensor) -> Any:
        leaves = list(self.constants)
        for place, tensor in zip(self.places, tensors):  # noqa: B905 Dynamo knows no strict=
            leaves[place] = tensor
        arguments, target = pytree.tree_unflatten(leaves, self.spec)
        arguments = _cast(arguments, self.input_dtype)
        args: list[Any] = []
        for name, spread in self.positional:
            args += arguments[name] if spread else [arguments[name]]
        kwargs: dict[str, Any] = {}
        for name, spread in self.keywords:
            kwargs.update(arguments[name] if spread else {name: arguments[name]})
        # not by a call: hooks of the root run around the parallel module, as they do around this one
        out = self.model.forward(*args, **kwargs)
        if self.loss_fn is not None:
            out = self.loss_fn(_cast_output(out, self.output_dtype), *target)
        result = opened(out)
        private.comptime(_note_changes)
        return _cast(result, self.output_dtype) if self.loss_fn is None else result


def _how_to_call(
    signature: inspect.Signature, bound: inspect.BoundArguments
) -> tuple[list[tuple[str, bool]], list[tuple[str, bool]]]:
    """Names of the arguments passed by position and by name, and whether one is ``*`` or ``**``."""
    positional: list[tuple[str, bool]] = []
    keywords: list[tuple[str, bool]] = []
    room = True  # until an argument was left out
    for name, parameter in signature.parameters.items():
        here = name in bound.arguments
        if parameter.kind is parameter.VAR_POSITIONAL and here:
            positional.append((name, True))
        elif parameter.kind is parameter.VAR_KEYWORD and here:
            keywords.append((name, True))
        elif parameter.kind is parameter.KEYWORD_ONLY or not room:
            if here:
                keywords.append((name, False))
        elif here:
            positional.append((name, False))
        elif parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            room = False
    return positional, keywords


def _cast(tree: Any, dtype: torch.dtype | None) -> Any:
    if dtype is None:
        return tree

    def cast(leaf: Any) -> Any:
        floating = isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
        return leaf.to(dtype) if floating else leaf

    return pytree.tree_map(cast, tree)


def _cast_output(value: Any, dtype: torch.dtype | None) -> Any:
    """`value` cast, with dataclasses as they are, for code that reads their fields; in the trace."""
    if dtype is None:
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, (dict, type)):
        made = {}
        for f in dataclasses.fields(value):
            if f.init:
                made[f.name] = _cast_output(getattr(value, f.name), dtype)
        return type(value)(**made)
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if type(value) is dict or type(value) is list or isinstance(value, tuple):
        return _rebuilt(value, lambda item: _cast_output(item, dtype))
    return _cast(value, dtype)


class Fields(NamedTuple):
    """A dataclass taken apart: the values of its fields, in their order."""

    values: list[Any]


def opened(value: Any) -> Any:
    """`value` with dataclasses replaced by `Fields`; runs inside the trace."""
    if dataclasses.is_dataclass(value):
        private.comptime(_note_type)
        return Fields([opened(getattr(value, f.name)) for f in dataclasses.fields(value)])
    return _rebuilt(value, opened)


def _rebuilt(value: Any, change: Callable[[Any], Any]) -> Any:
    """A container of the same kind over changed items; anything else as it is."""
    if type(value) is dict:
        return {k: change(x) for k, x in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*[change(x) for x in value])
    if type(value) is list or type(value) is tuple:
        return type(value)([change(x) for x in value])
    return value


@dataclass
class Noted:
    """What a trace tells beside its graph.

    Attributes:
        output_types: dataclasses that were taken apart, in order.
        changes: what forward changes in objects of the model other than by operators on tensors:
            ``"L['self']...layers.0"`` and the attribute, ``""`` for the content of a container.
    """

    output_types: list[type] = field(default_factory=list)
    changes: list[tuple[str, str]] = field(default_factory=list)


# of the trace that is under way in this thread
_noted: ContextVar[Noted] = ContextVar("autop_ac_noted")


@contextlib.contextmanager
def noting() -> Iterator[Noted]:
    """While open, a trace of `FlatForward` fills what is given."""
    noted = Noted()
    token = _noted.set(noted)
    try:
        yield noted
    finally:
        _noted.reset(token)


def _note_type(context: Any) -> None:
    """Runs at trace time, in `opened`: the dataclass that is being taken apart."""
    _noted.get().output_types.append(context.get_local("value").python_type())


def _note_changes(context: Any) -> None:
    """Runs at trace time, at the end: Dynamo's list of what eager Python would have changed."""
    _noted.get().changes[:] = private.changed_objects(context)


class Dataclass(NamedTuple):
    """A dataclass, and of each of its fields the name and whether the constructor takes it."""

    cls: type
    fields: tuple[tuple[str, bool], ...]


def described(cls: Any) -> Dataclass:
    """What `closed` needs to know of a dataclass."""
    return Dataclass(cls, tuple((f.name, f.init) for f in dataclasses.fields(cls)))


def closed(value: Any, types: Iterator[Dataclass]) -> Any:
    """The inverse of `opened`, with the dataclasses in the order in which they were noted."""
    if not isinstance(value, Fields):
        return _rebuilt(value, lambda item: closed(item, types))
    cls, fields = next(types)
    given: dict[str, Any] = {}
    rest: dict[str, Any] = {}
    for (name, init), item in zip(fields, value.values):  # noqa: B905 Dynamo knows no strict=
        (given if init else rest)[name] = closed(item, types)
    made = cls(**given)
    for name, item in rest.items():
        object.__setattr__(made, name, item)
    return made
