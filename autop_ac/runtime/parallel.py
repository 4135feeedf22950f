"""The parallel module: the user's class, DTensor parameters under the user's names, our forward."""

from __future__ import annotations

import copy
import uuid
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.utils import _pytree as pytree

from ..annotate import compiled_by_ours
from ..capture.calling import Calling, closed
from ..capture.joint import JointGraph, Port
from ..capture.names import user_name
from ..errors import UsageError
from ..graph.random import draws_from_seeds, random_nodes, rank_offset, sharded_axes
from ..sharding.apply import LocalGraph
from ..sharding.plan import ShardingPlan
from .opaque import REASON, as_one_node
from .sizes import Shape, exchange, local_part, whole_shape
from .state import as_on_one_device, distributed, takes_whole_tensors

Outputs = Literal["local", "dtensor"]


@dataclass(frozen=True, eq=False)
class Runner:
    """What one call of the parallel module does, apart from the parameters themselves.

    Attributes:
        compiled: function of local parameters, buffers and inputs.
        calling: names of parameters and buffers, the form of a call, the outputs' dataclasses.
        expected: by leaf of a call the local shape and dtype, or the value that a leaf without a
            tensor was traced with.
        output_specs: of each tensor output, in order.
        random_offset: added to the seed of a call so that ranks that hold different parts draw
            different numbers; None where the graph draws none.
        outputs: what is handed out.
        read_in_backward: parameters that backward reads; autograd's own check of versions does not
            see them, because in-place operators on a DTensor count on the DTensor alone.
        trained: parameters that get a gradient.
        output_form: pytree of the outputs, dataclasses taken apart.
        local_outputs: a tensor like each output on this rank, and whether it has a gradient.
    """

    compiled: Callable[..., Any]
    calling: Calling
    expected: tuple[Any, ...]
    output_specs: tuple[_Given, ...]
    random_offset: int | None = None
    outputs: Outputs = "local"
    read_in_backward: tuple[str, ...] = ()
    trained: frozenset[str] = frozenset()
    output_form: Any = None
    local_outputs: tuple[tuple[torch.Tensor, bool], ...] = ()

    def input_shapes(self) -> list[Shape]:
        """Local shapes of the tensors that a call takes."""
        return [e.shape for e in self.expected if isinstance(e, _Expected)]

    def empty_outputs(self) -> list[torch.Tensor]:
        """Tensors as a call gives them, flat, with nothing in them."""
        grad = torch.is_grad_enabled()
        made: Any = [
            torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device).requires_grad_(
                grad and trained
            )
            for t, trained in self.local_outputs
        ]
        return self._handed_out(made)

    def __call__(self, module: torch.nn.Module, given: Sequence[Any]) -> Any:
        return closed(self.opened(module, given), iter(self.calling.output_types))

    def opened(self, module: torch.nn.Module, given: Sequence[Any]) -> Any:
        """What a call gives, dataclasses taken apart.

        Args:
            given: the leaves of the call, as `CallForm.flatten` gives them.
        """
        calling = self.calling
        leaves = [self._checked(i, x) for i, x in enumerate(given)]
        tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
        held = {n: _lookup(module, n) for n in (*calling.parameters, *calling.buffers)}
        if torch.is_grad_enabled():
            for n in calling.parameters:
                if held[n].requires_grad and n not in self.trained:
                    raise UsageError(
                        f"parameter {n} requires a gradient now and did not when the model was "
                        "captured, so the graph has none: capture it again"
                    )
        state = [_local(t) for t in held.values()]
        if self.random_offset is None:
            out = self.compiled(*state, *tensors)
        else:
            seed = int(torch.randint(2**31, ()))  # equal on ranks that were seeded alike
            with _forked_random(state):
                torch.manual_seed(seed + self.random_offset)
                out = self.compiled(*state, *tensors)
        self._check_unchanged_in_backward(module, out)
        if self.outputs == "dtensor" or any(s.is_moved for s in self.output_specs):
            out = self._handed_out(out)
        return out

    def _check_unchanged_in_backward(self, module: torch.nn.Module, out: Any) -> None:
        tensors = [t for t in pytree.tree_leaves(out) if isinstance(t, torch.Tensor)]
        differentiable = [t for t in tensors if t.grad_fn is not None]
        if not differentiable:
            return
        read = {name: _lookup(module, name) for name in self.read_in_backward}
        versions = {name: parameter._version for name, parameter in read.items()}

        def check(_: torch.Tensor) -> None:
            for name, parameter in read.items():
                if parameter._version != versions[name]:
                    raise UsageError(
                        f"parameter {name} was changed in place after this forward, and its backward "
                        f"reads it (version {versions[name]}, now {parameter._version}): call "
                        "backward before the optimizer steps, or forward again"
                    )

        for tensor in differentiable:
            tensor.register_hook(check)

    def _checked(self, index: int, leaf: Any) -> Any:
        expected = self.expected[index]
        name = self.calling.form.names[index]
        if not isinstance(expected, _Expected):
            same = type(leaf) is type(expected) and (leaf == expected or leaf != leaf)
            if not same:
                raise UsageError(
                    f"input {name} is {leaf!r}; the model was captured with {expected!r}, which is "
                    "part of the graph. Capture it again for another value"
                )
            return leaf
        if isinstance(leaf, DTensor):
            leaf = leaf.redistribute(expected.mesh, expected.given)
        value = _local(leaf)
        if torch.is_grad_enabled() and getattr(value, "requires_grad", False):
            if not expected.requires_grad:
                raise UsageError(
                    f"input {name} requires a gradient, and that of input_fn did not, so the graph has "
                    "none: give it requires_grad=True there"
                )
        shape = tuple(value.shape) if isinstance(value, torch.Tensor) else type(leaf).__name__
        if shape != expected.shape or value.dtype != expected.dtype:
            raise UsageError(
                f"input {name} has local shape {shape} and dtype {getattr(value, 'dtype', None)}; "
                f"this rank's part of the global {expected.global_shape} is {expected.shape}, "
                f"{expected.dtype}. Pass each rank its own part; for inputs of other sizes make the "
                "parallel module with AutoParallel(..., dynamic=True)"
            )
        return expected.laid_out(expected.moved(value))

    def _handed_out(self, out: Any) -> Any:
        specs = iter(self.output_specs)

        def wrap(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            spec = next(specs)
            if self.outputs == "local" and not spec.is_moved:
                return leaf
            made = spec.handed_out(leaf)
            return made if self.outputs == "dtensor" else made.to_local()

        return pytree.tree_map(wrap, out)


@dataclass(frozen=True, slots=True)
class _Given:
    """An output: as the graph gives it, and the placements in which it is handed out."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size
    stride: tuple[int, ...]
    handed: tuple[Placement, ...]

    @property
    def is_moved(self) -> bool:
        return self.handed != self.placements

    def handed_out(self, value: torch.Tensor) -> DTensor:
        made = DTensor.from_local(
            value, self.mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride
        )
        return made.redistribute(placements=self.handed) if self.is_moved else made


@dataclass(frozen=True, slots=True)
class _Expected:
    """An input: its part on this rank, in the placements `given` by the caller; and the graph's."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    global_shape: tuple[int, ...]
    requires_grad: bool
    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    given: tuple[Placement, ...]

    def moved(self, value: torch.Tensor) -> torch.Tensor:
        """The value in the placements of the graph."""
        if self.given == self.placements:
            return value
        whole = torch.empty(self.global_shape, device="meta")
        part = DTensor.from_local(
            value.contiguous(), self.mesh, self.given,
            run_check=False, shape=whole.shape, stride=whole.stride(),
        )  # fmt: skip
        return part.redistribute(placements=self.placements).to_local()

    def laid_out(self, value: torch.Tensor) -> torch.Tensor:
        """The value in the layout that the graph was traced with."""
        if value.stride() == self.stride:
            return value
        return torch.empty_strided(
            value.shape, self.stride, dtype=value.dtype, device=value.device
        ).copy_(value)


def _forked_random(state: list[Any]) -> Any:
    """The generators of the devices in use are as before when this ends."""
    devices = {t.device.index for t in state if t.device.type == "cuda"}
    return torch.random.fork_rng(devices=sorted(devices))


def _local(tensor: Any) -> Any:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _lookup(module: torch.nn.Module, name: str) -> Any:
    *path, leaf = name.split(".")
    for part in path:
        module = _unwrapped(getattr(_unwrapped(module), part))
    return getattr(_unwrapped(module), leaf)


def _unwrapped(module: Any) -> Any:
    for wrapper in ("_orig_mod", "_checkpoint_wrapped_module"):
        while wrapper in getattr(module, "_modules", {}):
            module = module._modules[wrapper]
    return module


def random_offset(
    joint: JointGraph, local: LocalGraph, plan: ShardingPlan, mesh: DeviceMesh
) -> int | None:
    """What is added to the seed of a call on this rank; None if nothing is drawn.

    Where all is drawn from seeds in the graph, these hold the offset of each operator. Otherwise one
    offset serves when all random operators are sharded along the same axes.

    Raises:
        UsageError: one random operator is sharded along an axis where another is replicated.
    """
    drawn = random_nodes(joint.module.graph)
    if not drawn:
        return None
    if draws_from_seeds(local.module.graph):
        return 0
    axes = {sharded_axes(n, plan.choices[n.name].outputs): n.name for n in drawn}
    if len(axes) > 1:
        raise UsageError(
            f"random operators {sorted(axes.values())} are sharded along different mesh axes, and not "
            "all of this graph can draw from seeds of their own: give them one placement with "
            "sharding_optimizer.add_node_constraint"
        )
    return rank_offset(mesh, next(iter(axes)))


def make_runner(
    joint: JointGraph,
    local: LocalGraph,
    plan: ShardingPlan,
    mesh: DeviceMesh,
    compiled: Callable[..., Any],
    outputs: Outputs,
    read_in_backward: tuple[str, ...] = (),
    ports: Ports | None = None,
) -> Runner:
    """Bind the compiled function to the shapes that it was made for.

    Args:
        ports: placements in which callers hold inputs and take outputs; None for the graph's.
    """
    calling = joint.calling
    placeholders = [n for n in local.module.graph.nodes if n.op == "placeholder"]
    kinds = [local.placeholders[n.name] for n in placeholders]
    values = {p.index: n.meta["val"] for n, p in zip(placeholders, kinds, strict=True)
              if p.kind == "input"}  # fmt: skip
    inputs = {p.index: name for name, p in joint.placeholders.items() if p.kind == "input"}
    trained = frozenset(p.name for p in joint.results if p is not None and p.kind == "gradient")
    expected: list[Any] = []
    index = 0
    for leaf in calling.leaves:
        if not isinstance(leaf, torch.Tensor):
            expected.append(leaf)
            continue
        part = values[index]
        shape, stride = tuple(part.shape), tuple(part.stride())
        where = tuple(plan.choices[inputs[index]].outputs[0] or ())
        given = where if ports is None else ports.inputs[index]
        if given != where:
            _check_unchanged(joint, inputs[index])
            coordinate = mesh.get_coordinate()
            assert coordinate is not None
            shape = local_part(tuple(leaf.shape), given, tuple(mesh.shape), coordinate)
        expected.append(
            _Expected(
                shape,
                stride,
                leaf.dtype,
                tuple(leaf.shape),
                leaf.requires_grad,
                mesh,
                where,
                given,
            )
        )
        index += 1
    output = joint.module.graph.output_node()
    nodes = [r for r in output.args[0] if isinstance(r, torch.fx.Node)]
    results = [p for p in joint.results if p is not None]
    specs: list[_Given] = []
    for node, port, placed in zip(nodes, results, plan.choices[output.name].inputs, strict=True):
        if port.kind == "output":
            value, where = node.meta["val"], tuple(placed or ())
            handed = where if ports is None or ports.outputs is None else ports.outputs[len(specs)]
            specs.append(_Given(mesh, where, value.size(), value.stride(), handed))
    return Runner(
        compiled,
        calling,
        tuple(expected),
        tuple(specs),
        random_offset(joint, local, plan, mesh),
        outputs,
        read_in_backward,
        trained,
        joint.descriptors.out_spec,
        _local_outputs(joint, local),
    )


def _check_unchanged(joint: JointGraph, placeholder: str) -> None:
    """A moved input is a copy, whose changes the caller would not see."""
    name = joint.placeholders[placeholder].name
    if any(p is not None and p.kind == "mutation" and p.name == name for p in joint.results):
        raise UsageError(
            f"forward changes input {name} in place, and a batch that does not divide over the mesh is "
            "computed on a copy: give it a size that divides"
        )


def _local_outputs(joint: JointGraph, local: LocalGraph) -> tuple[tuple[torch.Tensor, bool], ...]:
    """A tensor like each output of forward that is one, and whether it has a gradient."""
    infos = joint.descriptors._aot_state.fw_metadata.output_info
    first = joint.num_forward_outputs - len(infos)  # changed buffers stand in front
    (results,) = local.module.graph.output_node().args
    given = zip(results[first : joint.num_forward_outputs], infos, strict=True)
    nodes = [(r, i.requires_grad) for r, i in given if isinstance(r, torch.fx.Node)]
    return tuple((node.meta["val"], trained) for node, trained in nodes)


Modes = tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class Ports:
    """Placements of the tensors among inputs and outputs; outputs None where they are the graph's."""

    inputs: tuple[tuple[Placement, ...], ...]
    outputs: tuple[tuple[Placement, ...], ...] | None


@dataclass(frozen=True, slots=True)
class Variant:
    """What a graph is traced for.

    Attributes:
        modes: whether each module is in training mode.
        shapes: global, of each tensor among the inputs.
    """

    modes: Modes
    shapes: tuple[Shape, ...]


_MANY = 8  # sizes from which on a warning tells what they cost
_KEPT = 32  # graphs; the one not called for longest goes


class Runners:
    """One runner for each combination of training modes, and of sizes, that was used.

    Dropout and batch norm make another graph of a model in ``eval()``: it is traced at the first
    call in that mode, with the placements that parameters, inputs and outputs have. With `dynamic`
    so are inputs of other sizes; all ranks then tell each other their sizes at each call.

    Args:
        traced: the model in the modes that `runner` is for.
        dynamic: whether sizes of inputs may change between calls.
    """

    def __init__(
        self,
        traced: torch.nn.Module,
        runner: Runner,
        make: Callable[[Variant], Runner],
        dynamic: bool = False,
    ) -> None:
        self._modules = tuple(name for name, _ in traced.named_modules())
        self.first = runner
        self._inputs = [(n, e) for n, e in zip(runner.calling.form.names, runner.expected, strict=True)
                        if isinstance(e, _Expected)]  # fmt: skip
        self._shapes = tuple(e.global_shape for _, e in self._inputs)
        self._made = {Variant(self._modes(traced), self._shapes): runner}
        self._make = make
        self._dynamic = dynamic
        self._warned = False
        self._tell = exchange(self._inputs[0][1].mesh)

    def _modes(self, module: torch.nn.Module) -> Modes:
        held = dict(module.named_modules())
        return tuple(held[name].training for name in self._modules)

    def __call__(self, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        leaves = self.first.calling.form.flatten(args, kwargs)
        return self._runner(module, leaves)(module, leaves)

    def opened(self, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        """The same with dataclasses among the outputs taken apart; as `first` gives them in any mode."""
        leaves = self.first.calling.form.flatten(args, kwargs)
        runner = self._runner(module, leaves)
        self._check_form(runner)
        return runner.opened(module, leaves)

    def _check_form(self, runner: Runner) -> None:
        if runner.output_form != self.first.output_form:
            raise UsageError(
                "in this combination of train() and eval() the model gives other outputs than when it "
                "was captured, which one graph cannot: call the parallel module without torch.compile"
            )

    def _runner(self, module: torch.nn.Module, leaves: Sequence[Any]) -> Runner:
        shapes = self._whole_shapes(leaves) if self._dynamic else self._shapes
        variant = Variant(self._modes(module), shapes)
        runner = self._made.pop(variant, None)
        if runner is None:
            with torch.inference_mode(False):
                runner = self._make(variant)
            if len(self._made) == _KEPT:
                del self._made[next(iter(self._made))]
        self._made[variant] = runner  # the last called is the last
        sizes = len({v.shapes for v in self._made})
        if sizes > _MANY and not self._warned:
            self._warned = True
            warnings.warn(
                f"inputs of {sizes} different sizes were given: for each the model is traced and compiled "
                f"again, as long as that takes, and {_KEPT} graphs are kept. Pad to a few sizes",
                UserWarning,
                stacklevel=4,
            )
        return runner

    def _whole_shapes(self, leaves: Sequence[Any]) -> tuple[Shape, ...]:
        """Global shapes of a call on all ranks, which must all find the same."""
        numbers: list[int] = []
        for shape, (_, expected) in zip(self._local_shapes(leaves), self._inputs, strict=True):
            fits = len(shape) == len(expected.shape)
            numbers += shape if fits else [-1] * len(expected.shape)
        mesh = self._inputs[0][1].mesh
        told = self._tell(numbers)
        found: list[Shape] = []
        at = 0
        for name, expected in self._inputs:
            end = at + len(expected.shape)
            by_place = {place: tuple(given[at:end]) for place, given in told.items()}
            if any(n < 0 for shape in by_place.values() for n in shape):
                raise UsageError(
                    f"input {name} is a tensor of {len(expected.shape)} dims, and on ranks at "
                    f"{[p for p, s in by_place.items() if -1 in s]} of the mesh another or none was given"
                )
            found.append(whole_shape(name, by_place, expected.given, tuple(mesh.shape)))
            at = end
        return tuple(found)

    def _local_shapes(self, leaves: Sequence[Any]) -> list[Shape]:
        given = [
            x for x, e in zip(leaves, self.first.expected, strict=True) if isinstance(e, _Expected)
        ]
        shapes: list[Shape] = []
        for leaf, (_, expected) in zip(given, self._inputs, strict=True):
            shape = tuple(int(n) for n in getattr(leaf, "shape", ()))
            coordinate = expected.mesh.get_coordinate()
            if isinstance(leaf, DTensor) and coordinate is not None:
                shape = local_part(shape, expected.given, tuple(expected.mesh.shape), coordinate)
            shapes.append(shape)
        return shapes

    def fakes(self, module: torch.nn.Module, args: Any, kwargs: Any) -> list[torch.Tensor]:
        """Empty tensors as a call gives them, flat; fake ones, where a trace is under way."""
        modes = self._modes(module)
        made = [r for v, r in self._made.items() if v.modes == modes]
        if self._dynamic:
            local = self._local_shapes(self.first.calling.form.flatten(args, kwargs))
            made = [r for r in made if local == r.input_shapes()]
        if not made:
            raise UsageError(
                "the parallel module was not called in this combination of train() and eval() yet, or not "
                "with inputs of these sizes, and its graph cannot be traced within another trace: call it "
                "once before torch.compile does"
            )
        runner = made[-1]
        self._check_form(runner)
        if runner.output_form.num_leaves != len(runner.local_outputs):
            raise UsageError(
                "the model gives plain values besides tensors, which a node of a graph cannot: call the "
                "parallel module without torch.compile"
            )
        return runner.empty_outputs()


def make_parallel(
    model: torch.nn.Module, plan: ShardingPlan, mesh: DeviceMesh, runners: Runners
) -> torch.nn.Module:
    """A copy of `model` whose parameters and buffers are DTensors and whose forward is `runners`.

    Real weights are sharded in, rank 0's for all; what is on the meta device stays there until
    ``to_empty`` and ``init_weights``, or a checkpoint. `model` is left as it is.
    """
    memo: dict[int, Any] = {}
    for name, parameter in model.named_parameters():
        port = Port("parameter", user_name(name))
        placements = placed_state(plan, mesh, port, parameter)
        sharded = distributed(parameter.detach(), mesh, placements)
        memo[id(parameter)] = torch.nn.Parameter(sharded, parameter.requires_grad)
    for name, buffer in model.named_buffers():
        placements = placed_state(plan, mesh, Port("buffer", user_name(name)), buffer)
        memo[id(buffer)] = distributed(buffer.detach(), mesh, placements)
    parallel = copy.deepcopy(model, memo)
    takes_whole_tensors(parallel)
    base = type(parallel)

    form, types = runners.first.output_form, runners.first.calling.output_types
    as_it_is = torch.compiler.disable(runners.__call__, reason=REASON)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling() and compiled_by_ours() and self._autop_ac_guard:
            flat = list(self._autop_ac_node(args, kwargs))
            return closed(pytree.tree_unflatten(flat, form), iter(types))
        return as_it_is(self, args, kwargs)

    def own_node(self: Any) -> None:
        self._autop_ac_node = as_one_node(self, runners.opened, runners.fakes)
        self._autop_ac_guard = uuid.uuid4().hex  # Dynamo compares text, and not functions

    def set_state(self: Any, state: dict[str, Any]) -> None:
        base.__setstate__(self, state)  # of a copy: its node is another
        own_node(self)

    members = {
        "forward": forward,
        "__setstate__": set_state,
        "__module__": base.__module__,
        "__doc__": base.__doc__,
    }
    init = getattr(base, "init_weights", None)
    if callable(init):
        members["init_weights"] = as_on_one_device(init)
    parallel.__class__ = type(f"Parallel{base.__name__}", (base,), members)
    own_node(parallel)
    return parallel


def placed_state(
    plan: ShardingPlan, mesh: DeviceMesh, port: Port, tensor: torch.Tensor
) -> tuple[Placement, ...]:
    """The plan's placement of a parameter or buffer; of what its graph does not read, one of ours.

    Such a parameter is sharded on its first dim where that divides, such a buffer replicated.
    """
    if port.name in plan.parameters:
        return plan.parameters[port.name]
    whole = port.kind == "buffer" or not tensor.dim() or tensor.shape[0] % mesh.size()
    return tuple(Replicate() if whole else Shard(0) for _ in range(mesh.ndim))
