"""Hypothesis strategies: graph facts built valid, actions on them, small random modules.

Each value draws its inputs among earlier ones, so that every drawn graph is one that could be traced:
nothing is filtered away, and shrinking drops or simplifies single nodes.
"""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from autop_ac.graph.facts import Facts, Value

KINDS = ("op", "op", "op", "view", "tuple", "collective", "random", "effectful", "size")


class _Builder:
    """Values in graph order, with storages numbered as they are made."""

    def __init__(self) -> None:
        self.values: list[Value] = []
        self.storage_bytes: list[int] = []

    def storage(self, nbytes: int) -> int:
        self.storage_bytes.append(nbytes)
        return len(self.storage_bytes) - 1

    def add(self, op, side, inputs=(), nbytes=None, storages=(), **more) -> int:
        index = len(self.values)
        if nbytes is not None:
            storages = (self.storage(nbytes),)
        self.values.append(
            Value(
                index=index,
                name=f"v{index}",
                op=op,
                side=side,
                inputs=tuple(dict.fromkeys(inputs)),
                bytes=nbytes or 0,
                storages=tuple(storages),
                **more,
            )
        )
        return index

    def alias(self, op, side, source) -> int:
        held = self.values[source].storages
        return self.add(op, side, (source,), storages=held, follows=source)


@st.composite
def facts(draw, max_forward: int = 14, max_backward: int = 14) -> Facts:
    """A valid joint graph with views, tuples, collectives and waits, random and effectful values."""
    sizes = st.integers(1, 64)
    build = _Builder()
    for role in [
        "parameter",
        *draw(st.lists(st.sampled_from(("parameter", "buffer", "input")), max_size=4)),
    ]:
        build.add("placeholder", "input", nbytes=draw(sizes), role=role)
    mutated = {v.index for v in build.values if v.role == "buffer" and draw(st.integers(0, 3)) == 0}
    primals = len(build.values)
    tangent = build.add("placeholder", "input", nbytes=draw(sizes), role="tangent")
    tensors = list(range(primals))
    sizes_made: list[int] = []
    mutated_storages = {s for i in mutated for s in build.values[i].storages}

    def some(pool, least=1, most=3):
        return draw(st.lists(st.sampled_from(pool), min_size=least, max_size=most, unique=True))

    def grow(side, pool, must=()):
        kind = draw(st.sampled_from(KINDS))
        if kind == "view":
            source = draw(st.sampled_from(pool)) if not must else must[0]
            made = build.alias("aten.view.default", side, source)
            pool.append(made)
            return made
        if kind == "size" and side == "forward":
            source = draw(st.sampled_from(pool))
            made = build.add("aten.sym_size.int", side, (source,), is_tensor=False)
            sizes_made.append(made)
            return None
        inputs = [*must, *some(pool)]
        if sizes_made and draw(st.booleans()):
            inputs.append(draw(st.sampled_from(sizes_made)))
        held = {s for i in inputs for s in build.values[i].storages}
        reads = side == "forward" and not held.isdisjoint(mutated_storages)
        if kind == "tuple":
            held = [build.storage(draw(sizes)) for _ in range(draw(st.integers(1, 3)))]
            nbytes = sum(build.storage_bytes[s] for s in held)
            made = build.add(
                "aten.native.default", side, inputs, storages=held, reads_mutated=reads
            )
            build.values[made] = _with(build.values[made], bytes=nbytes)
            for s in held:
                got = build.add("getitem", side, (made,), storages=(s,), follows=made)
                pool.append(got)
            return made + 1
        if kind == "collective":
            name = draw(
                st.sampled_from(("all_gather_into_tensor", "all_reduce", "reduce_scatter_tensor"))
            )
            made = build.add(
                f"_c10d_functional.{name}.default", side, inputs[:1], draw(sizes),
                collective=name, reads_mutated=reads,
            )  # fmt: skip
            waited = build.alias("_c10d_functional.wait_tensor.default", side, made)
            build.values[waited] = _with(build.values[waited], holds=tuple(inputs[:1]))
            pool.append(waited)
            return waited
        made = build.add(
            "aten.rand_like.default" if kind == "random" else "aten.op.default", side, inputs,
            draw(sizes), random=kind == "random", effectful=kind == "effectful", reads_mutated=reads,
        )  # fmt: skip
        pool.append(made)
        return made

    for _ in range(draw(st.integers(1, max_forward))):
        grow("forward", tensors)
    forward = [i for i in tensors if build.values[i].side == "forward"]
    if not forward:
        forward = [build.add("aten.op.default", "forward", (0,), draw(sizes))]
        tensors.append(forward[0])
    back = [tangent]
    for _ in range(draw(st.integers(1, max_backward))):
        pool = [*tensors, *back]
        made = grow("backward", pool, must=(draw(st.sampled_from(back)),))
        back.extend(i for i in pool if i not in tensors and i not in back)
        assert made is None or build.values[made].side == "backward"
    gradients = some([i for i in back if i != tangent], most=4)
    outputs = some(forward)
    build.add("output", "output", (*outputs, *gradients), is_tensor=False)
    own = sum(v.bytes for v in build.values if v.role in ("parameter", "buffer"))
    return Facts(
        values=tuple(build.values),
        forward_outputs=tuple(outputs),
        backward_outputs=tuple(gradients),
        storage_bytes=tuple(build.storage_bytes),
        parameter_bytes=own,
    )


def _with(value: Value, **changes) -> Value:
    fields = {name: getattr(value, name) for name in Value.__slots__}
    return Value(**{**fields, **changes})


@st.composite
def facts_with_actions(draw):
    """Facts, and an action for each forward value."""
    given_facts = draw(facts())
    action = st.sampled_from(("save", "recompute"))
    return given_facts, {v.index: draw(action) for v in given_facts.forward}


class RandomModule(torch.nn.Module):
    """A chain of named layers, each adding to a residual stream of width 4."""

    def __init__(self, layers: tuple[str, ...]) -> None:
        super().__init__()
        self.layers = layers
        self.linears = torch.nn.ModuleList([torch.nn.Linear(4, 4) for _ in layers])
        self.norm = torch.nn.LayerNorm(4)
        self.register_buffer("scale", torch.ones(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for kind, linear in zip(self.layers, self.linears, strict=True):
            y = linear(x)
            if kind == "dropout":
                y = torch.nn.functional.dropout(y, 0.5)
            elif kind == "norm":
                y = self.norm(y)
            elif kind == "split":
                left, right = y.chunk(2, dim=-1)
                y = torch.cat([right.sin(), left], dim=-1)
            elif kind == "transpose":
                y = (y.t() @ y).relu()
                y = x @ y
            elif kind == "buffer":
                self.scale.mul_(1.5)
                y = y @ self.scale.sin()
            x = x + y.tanh()
        return x


LAYERS = ("plain", "dropout", "norm", "split", "transpose", "buffer")


def random_modules():
    """Small modules over all kinds of layers; each has parameters."""
    chains = st.lists(st.sampled_from(LAYERS), min_size=1, max_size=3).map(tuple)
    return chains.map(RandomModule)


@st.composite
def timed_facts(draw, max_forward: int = 14, max_backward: int = 14) -> Facts:
    """Facts whose forward operators take some whole seconds; views take none."""
    drawn = draw(facts(max_forward, max_backward))
    seconds = draw(st.lists(st.integers(0, 9), min_size=8, max_size=8))
    values = (
        _with(v, time_s=float(seconds[v.index % 8])) if v.side == "forward" and v.bytes else v
        for v in drawn.values
    )
    return Facts(
        tuple(values), drawn.forward_outputs, drawn.backward_outputs, drawn.storage_bytes,
        drawn.parameter_bytes,
    )  # fmt: skip
