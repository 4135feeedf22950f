"""The bound lies below every choice, the optimiser finds the best, prices agree with a plain count."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard

from autop_ac.errors import SolverError
from autop_ac.graph.cost import collective_time_s
from autop_ac.graph.devices import Topology
from autop_ac.sharding import optimise as optimise_module
from autop_ac.sharding.bound import lower_bound
from autop_ac.sharding.costs import RedistributionCosts
from autop_ac.sharding.formulation import Edge, Limit, Problem, Stream, Value, evaluate
from autop_ac.sharding.layout import local_bytes
from autop_ac.sharding.linear import linear_bound
from autop_ac.sharding.optimise import optimise
from autop_ac.sharding.option import Option

PLACES = ((Replicate(),), (Shard(0),), (Shard(1),))


@st.composite
def problems(draw):
    """Up to six groups, each reading earlier ones or itself, with shared and hidden moves, and memory."""
    size, hidden = draw(st.integers(2, 6)), draw(st.booleans())
    cents = st.integers(0, 20).map(lambda n: n / 4)
    options, seconds, edges, values = [], [], [], []
    readers = {}
    for group in range(size):
        slots = draw(st.integers(0, min(group, 2)))
        sources = [draw(st.integers(0, group - 1)) for _ in range(slots)]
        placed = draw(
            st.lists(
                st.tuples(*[st.sampled_from(PLACES)] * (slots + 1)),
                min_size=1,
                max_size=3,
                unique=True,
            )
        )
        computing = [draw(cents) for _ in placed]
        options.append(tuple(Option(p[1:], p[:1], t) for p, t in zip(placed, computing)))
        seconds.append(tuple(t + draw(cents) / 100 for t in computing))
        for slot, source in enumerate(sources):
            readers.setdefault(source, []).append((group, slot))
    prices = {}  # of a value, by move: what readers share
    for source, group_slots in readers.items():
        gives = tuple(dict.fromkeys(o.outputs[0] for o in options[source]))
        numbers = []
        for group, slot in group_slots:
            wants = tuple(dict.fromkeys(o.inputs[slot] for o in options[group]))
            table = np.zeros((len(gives), len(wants)))
            for (i, p), (j, q) in itertools.product(enumerate(gives), enumerate(wants)):
                key = (source, p, q)
                if key not in prices:
                    prices[key] = 0.0 if p == q else draw(st.one_of(cents, st.just(math.inf)))
                table[i, j] = prices[key]
            edges.append(Edge(source, 0, group, slot, gives, wants, table))
            numbers.append(len(edges) - 1)
        stream = draw(st.integers(-1, 1)) if hidden else -1
        values.append(Value(tuple(numbers), draw(st.integers(1, 3)), stream))
        if len(numbers) > 1:  # the same read, alone, elsewhere
            values.append(Value((numbers[0],), draw(st.integers(1, 2))))
    counts = tuple(draw(st.integers(1, 3)) for _ in range(size))
    beside = [draw(st.integers(-1, 1)) for _ in range(size)]
    streams = tuple(
        Stream(
            k, tuple((g, draw(st.integers(1, counts[g]))) for g in range(size) if beside[g] == k)
        )
        for k in ((0, 1) if hidden else ())
    )
    memory = tuple(
        (g, tuple(draw(st.integers(1, 9)) for _ in options[g])) for g in range(size) if g % 2
    )
    high = draw(st.one_of(st.none(), st.integers(2, 30).map(float)))
    return Problem(
        names=tuple(f"g{i}" for i in range(size)),
        options=tuple(options),
        option_s=tuple(seconds),
        counts=counts,
        edges=tuple(edges),
        values=tuple(values),
        limits=(Limit("memory", memory, None, high),),
        streams=streams,
    )


def choices(problem):
    """Every choice that breaks nothing, with its seconds."""
    for chosen in itertools.product(*(range(len(o)) for o in problem.options)):
        try:
            yield chosen, evaluate(problem, chosen)
        except SolverError:
            continue


@settings(max_examples=150, deadline=None, derandomize=True)
@given(problems(), st.sampled_from([None, 0.0, 0.3, 1.0, "linear"]))
def test_no_choice_is_below_its_bounds(problem, way):
    if way == "linear":
        bound = linear_bound(problem, time_limit_s=10.0).bound
    else:
        weights = None if way is None else [way] * len(problem.streams)
        bound = lower_bound(problem, weights)
    for chosen, seconds in choices(problem):
        slack = seconds + 1e-6
        assert bound.total_s <= slack
        for group, option in enumerate(chosen):
            assert bound.option_s[group][option] <= slack
        for edge, table in zip(problem.edges, bound.move_s):
            p = problem.options[edge.producer][chosen[edge.producer]].outputs[0]
            q = problem.options[edge.consumer][chosen[edge.consumer]].inputs[edge.slot]
            assert table[edge.sources.index(p), edge.targets.index(q)] <= slack


@settings(max_examples=100, deadline=None, derandomize=True)
@given(problems())
def test_the_linear_bound_says_where_nothing_is_possible_and_how_much_of_streams_counts(problem):
    linear = linear_bound(problem, time_limit_s=10.0)
    best = min((seconds for _, seconds in choices(problem)), default=math.inf)
    assert linear.bound.total_s <= best + 1e-6
    assert len(linear.weights) == len(problem.streams)
    assert all(0 <= weight <= 1 for weight in linear.weights)
    if math.isfinite(best) and all(limit.high is None for limit in problem.limits):
        # without a limit on memory, messages with these weights are a relaxation of the same program
        messages = lower_bound(problem, linear.weights)
        assert messages.total_s <= linear.bound.total_s * (1 + 1e-6) + 1e-6


@settings(max_examples=200, deadline=None, derandomize=True)
@given(problems(), st.sampled_from([1, 1, 1, 10_000]))
def test_the_optimiser_finds_what_brute_force_finds(problem, small):
    before = optimise_module._SMALL
    optimise_module._SMALL = small  # 1: through the bound; 10,000: straight to the solver
    try:
        found = optimise(problem, gap=0.0)
    finally:
        optimise_module._SMALL = before
    best = min((seconds for _, seconds in choices(problem)), default=None)
    if best is None:
        assert found is None
        return
    chosen, gap = found
    seconds = evaluate(problem, chosen)
    assert seconds == pytest.approx(best, abs=1e-6)
    assert gap <= 1e-6


def test_the_bound_is_reached_where_readers_share_a_move():
    give = (Option((), ((Shard(0),),)),)
    read = (Option(((Replicate(),),), ((Replicate(),),)),)
    edges = tuple(
        Edge(0, 0, g, 0, ((Shard(0),),), ((Replicate(),),), np.array([[3.0]])) for g in (1, 2, 3)
    )
    problem = Problem(
        ("a", "b", "c", "d"), (give, read, read, read), ((1.0,),) * 4, (1, 1, 1, 1), edges,
        (Value((0, 1, 2), 2),),
    )  # fmt: skip
    assert lower_bound(problem).total_s == pytest.approx(4 + 2 * 3)
    assert evaluate(problem, (0, 0, 0, 0)) == pytest.approx(4 + 2 * 3)


# ------------------------------------------------------------- prices against a plain count


def plain_price(costs, shape, itemsize, source, target):
    """One move, axis by axis, without arrays."""
    mesh, topology = costs.mesh_shape, costs.topology
    pairs = list(zip(source, target))
    if any(isinstance(q, Partial) and p != q for p, q in pairs):
        return math.inf
    swaps = any(isinstance(p, Shard) and isinstance(q, Shard) and p != q for p, q in pairs)

    def even(placements):
        sizes = list(shape)
        for p, n in zip(placements, mesh):
            if isinstance(p, Shard):
                if sizes[p.dim] % n:
                    return False
                sizes[p.dim] //= n
        return True

    if swaps and not (even(source) and even(target)):
        return math.inf
    now, total = list(source), 0.0
    for axis in reversed(range(len(mesh))):
        p, q = pairs[axis]
        held = local_bytes(shape, itemsize, tuple(now), mesh)
        if p == q and isinstance(p, Shard):
            if any(a != b and p in (a, b) for a, b in pairs[:axis]):
                q = Replicate()
        if p != q and not isinstance(p, Replicate):
            cut = isinstance(q, Shard)
            if isinstance(p, Partial):
                kind, full = ("reduce_scatter" if cut else "all_reduce"), held
            else:
                kind = "all_to_all" if cut else "all_gather"
                full = held if kind == "all_to_all" else held * mesh[axis]
            link = topology.link_bandwidth[axis], topology.latency_s[axis]
            total += collective_time_s(kind, full, mesh[axis], *link)
            if any(isinstance(x, Shard) and x.dim > 0 for x in (p, q)):
                total += 2 * full / costs.memory_bandwidth
        now[axis] = q
    return total


@pytest.mark.parametrize("shape", [(16, 8, 24), (10, 7, 12)])
@pytest.mark.parametrize("mesh", [(4,), (2, 4), (2, 2, 3), (1, 2)])
def test_prices_as_arrays_equal_a_plain_count(shape, mesh):
    axes = len(mesh)
    topology = Topology((1e9, 3e9, 7e9)[:axes], (1e-6, 2e-6, 3e-6)[:axes])
    costs = RedistributionCosts(mesh, topology, 1e10)
    each = [Replicate(), Shard(0), Shard(1), Shard(2), Partial("sum"), Partial("avg")]
    every = list(itertools.product(each, repeat=axes))[:: 1 if axes < 3 else 5]
    found = costs.matrix(torch.empty(shape, device="meta"), every, every)
    for (i, p), (j, q) in itertools.product(enumerate(every), enumerate(every)):
        assert found[i, j] == pytest.approx(plain_price(costs, shape, 4, p, q), rel=1e-12), (p, q)
