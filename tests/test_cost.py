"""Predicted seconds: rooflines, collectives, described devices and links."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: TID251 makes a small graph to price

from autop_ac import AutoParallel
from autop_ac.errors import ConfigError
from autop_ac.graph.cost import collective_time_s, fx_node_time_s, node_time_s, tensor_bytes
from autop_ac.graph.devices import DEVICES, DeviceSpec, Link, Topology, find_device
from autop_ac.sharding.apply import apply_plan

SLOW = DeviceSpec("slow", {torch.float32: 1e9, torch.bfloat16: 4e9}, 1e9, 2**30)


def meta(*shape, dtype=torch.float32):
    return torch.empty(*shape, dtype=dtype, device="meta")


def test_a_large_product_is_bound_by_operations():
    a, b = meta(1024, 1024), meta(1024, 1024)
    time_s = node_time_s(torch.ops.aten.mm.default, (a, b), {}, meta(1024, 1024), SLOW)
    assert time_s == pytest.approx(2 * 1024**3 / 1e9)


def test_a_lower_precision_counts_its_own_rate():
    a = meta(1024, 1024, dtype=torch.bfloat16)
    time_s = node_time_s(torch.ops.aten.mm.default, (a, a), {}, a, SLOW)
    assert time_s == pytest.approx(2 * 1024**3 / 4e9)


def test_an_elementwise_operator_is_bound_by_bytes():
    a = meta(1000)
    time_s = node_time_s(torch.ops.aten.add.Tensor, (a, a), {}, meta(1000), SLOW)
    assert time_s == pytest.approx(3 * 4000 / 1e9)


def test_attention_on_cpu_counts_both_products():
    q = meta(2, 4, 512, 64)
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    time_s = node_time_s(op, (q, q, q), {}, (q, meta(2, 4, 512)), SLOW)
    assert time_s == pytest.approx(4 * 2 * 4 * 512 * 512 * 64 / 1e9)


def test_views_and_getitem_are_free_in_a_graph():
    def f(x, w):
        return x.t().view(8, 2, 2).split(1, 1)[0] + (x @ w).sum()

    graph = make_fx(f, tracing_mode="fake")(torch.randn(4, 8), torch.randn(8, 4)).graph
    for node in graph.nodes:
        time_s = fx_node_time_s(node, SLOW)
        free = node.op != "call_function" or any(
            word in str(node.target) for word in ("view", "aten.t.", "split", "getitem")
        )
        assert (time_s == 0) == free, node.target


def noted(graph, origins):
    """`graph` as if its operators had come of the captured ones named."""
    operators = [n for n in graph.nodes if n.op == "call_function"]
    for node, origin in zip(operators, origins, strict=True):
        node.meta["custom"] = {"autop_ac": {"origin": origin}}
    return [fx_node_time_s(node, SLOW) for node in operators]


def test_what_decompositions_made_of_one_operator_is_one_kernel():
    def f(x, w):
        y = torch.sigmoid(x)
        z = (y * x).view(-1, 8) + 1
        return torch.cos(z) @ w

    graph = make_fx(f, tracing_mode="fake")(torch.randn(8, 8), torch.randn(8, 8)).graph
    one = 8 * 8 * 4 / 1e9  # to read or write one matrix
    product = max(3 * one, 2 * 8**3 / 1e9)
    apart = noted(graph, "abcdef")
    assert apart == pytest.approx([2 * one, 3 * one, 0, 2 * one, 2 * one, product])
    # reads x twice; the product reads what the kernel wrote
    together = noted(graph, "aaaaae")
    assert together == pytest.approx([one, one, 0, 0, one, product])
    # a sum that is kept for another operator is written
    assert noted(graph, "aaaabc") == pytest.approx([one, one, 0, one, 2 * one, product])
    # a view in front of a kernel is read as what it is a view of
    assert noted(graph, "bbaaae") == pytest.approx([one, 2 * one, 0, one, one, product])
    # a product is a kernel of its own
    assert noted(graph, "aaaaaa") == pytest.approx([one, one, 0, 0, one, product])


@pytest.mark.parametrize(
    ("kind", "passes"),
    [("all_gather", 1), ("reduce_scatter", 1), ("all_to_all", 1), ("all_reduce", 2)],
)
def test_collectives_are_latency_and_bandwidth(kind, passes):
    assert collective_time_s(kind, 4000, 4, 1e6, 1e-3) == pytest.approx(passes * (1e-3 + 3e-3))
    assert collective_time_s(kind, 4000, 1, 1e6, 1e-3) == 0


@pytest.mark.parametrize("name", ["A100", "H100", "H200", "B200", "cpu", "h100"])
def test_known_devices_are_found(name):
    assert find_device(name) in DEVICES.values()


def test_an_unknown_device_is_refused_with_an_example():
    with pytest.raises(ConfigError, match=r"unknown device 'L4'.*DeviceSpec\("):
        find_device("L4")
    assert find_device(SLOW) is SLOW


def test_a_described_device_must_make_sense():
    with pytest.raises(ConfigError, match=r"must name torch\.float32"):
        DeviceSpec("odd", {torch.bfloat16: 1.0}, 1.0, 1)
    with pytest.raises(ConfigError, match="above zero"):
        DeviceSpec("odd", {torch.float32: -1.0}, 1.0, 1)
    with pytest.raises(ConfigError, match="one link_bandwidth"):
        Topology((1.0, 1.0), (0.0,))


def test_an_axis_inside_a_node_has_the_fast_link():
    topology = Topology.from_mesh_shape((32, 8))
    assert topology.link_bandwidth[1] > topology.link_bandwidth[0]
    assert topology.latency_s[1] < topology.latency_s[0]
    assert len(set(Topology.from_mesh_shape((2, 4)).link_bandwidth)) == 1


def test_a_collective_takes_the_time_of_its_link_and_its_wait_none(fake_pg):
    model = torch.nn.Linear(64, 64, bias=False)
    mesh = fake_pg((2, 4), ("dp", "tp"))
    times = {}
    for slower in (1, 10):
        links = {"dp": Link(2, 1e9 / slower, 1e-6), "tp": Link(4, 1e9, 1e-6)}
        ap = AutoParallel(model, lambda: torch.randn(16, 64), mesh).configure_compile("eager")
        with ap:
            ap.add_parameter_memory_constraint()
            plan = ap.optimize_placement()
            local = apply_plan(ap._joint, plan, mesh)
        for node in local.module.graph.nodes:
            note = (node.meta.get("custom") or {}).get("autop_ac", {})
            if node.op != "call_function" or not note.get("axis"):
                continue
            time_s = fx_node_time_s(node, SLOW, links)
            if "wait" in str(node.target):
                assert time_s == 0
            elif "all_gather" in str(node.target):
                moved, link = tensor_bytes(node.meta["val"]), links[note["axis"]]
                count = link.size
                expected = link.latency_s + moved * (count - 1) / count / link.bandwidth
                assert time_s == pytest.approx(expected)
                times.setdefault(note["axis"], []).append(time_s)
    assert times
    assert all(max(t) > 0 for t in times.values())
