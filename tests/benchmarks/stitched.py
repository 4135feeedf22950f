"""Local joint graphs of any depth without tracing at that depth: one traced block, laid end to end.

One transformer block with its backward is traced once. Its forward nodes are copied once for each layer,
its backward nodes in the opposite order, each parameter gathered from shards over eight devices as FSDP
does and each gradient reduced and scattered. All values are fake, with storages of their own.
"""

from __future__ import annotations

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from autop_ac.capture.joint import Port
from autop_ac.sharding.apply import LocalGraph
from tests.benchmarks.llama import Block, LlamaConfig

WORLD = 8
_ops = torch.ops._c10d_functional


def _traced_block(config: LlamaConfig, mode: FakeTensorMode):
    """Joint graph of a block: placeholders x, tangent, cos, sin, parameters; results y, dx, gradients."""
    with mode:
        with torch.device("meta"):
            block = Block(config)
        x = torch.empty(1, config.sequence, config.dim, dtype=torch.bfloat16, requires_grad=True)
        half = config.dim // config.heads // 2
        table = torch.empty(config.sequence, half)
        names = [name for name, _ in block.named_parameters()]
        weights = [
            torch.empty(p.shape, dtype=torch.bfloat16, requires_grad=True)
            for p in block.parameters()
        ]

        def step(x, tangent, cos, sin, *weights):
            y = torch.func.functional_call(
                block, dict(zip(names, weights, strict=True)), (x, cos, sin)
            )
            return (y, *torch.autograd.grad(y, (x, *weights), tangent))

        given = (x, torch.empty_like(x), table, torch.empty_like(table), *weights)
        return make_fx(step, pre_dispatch=False)(*given), names, given


def stitched(layers: int, config: LlamaConfig | None = None) -> LocalGraph:
    """A local graph of `layers` equal blocks."""
    config = config or LlamaConfig(dim=256, heads=4, kv_heads=2, ffn=512, sequence=128)
    mode = FakeTensorMode()
    traced, names, given = _traced_block(config, mode)
    x, tangent, cos, sin, *weights = given
    inner = list(traced.graph.nodes)
    holders = [n for n in inner if n.op == "placeholder"]
    y, dx, *gradients = inner[-1].args[0]
    ahead = {y}
    for node in reversed(inner):
        if node in ahead:
            ahead.update(node.all_input_nodes)
    graph = fx.Graph()
    ports: dict[str, Port] = {}

    def placeholder(name, kind, like, index=-1):
        node = graph.placeholder(name.replace(".", "_"))
        with mode:
            node.meta["val"] = torch.empty_like(like)
        ports[node.name] = Port(kind, name, index)
        return node

    def call(target, args, kwargs, note, backward):
        node = graph.call_function(target, args, kwargs)
        with mode:
            node.meta["val"] = target(*fx.map_arg(args, _val), **fx.map_arg(kwargs, _val))
        node.meta["custom"] = {"autop_ac": {"source": "", **note}}
        if backward:
            node.meta["partitioner_tag"] = "is_backward"
        return node

    shards = []
    for k in range(layers):
        for name, weight in zip(names, weights, strict=True):
            shards.append(placeholder(f"layers.{k}.{name}", "parameter", weight[::WORLD]))
    state = placeholder("x", "input", x, 0)
    tables = [placeholder("cos", "buffer", cos), placeholder("sin", "buffer", sin)]
    seed = placeholder("tangents_1", "tangent", tangent, 0)  # PyTorch knows it by this name

    def gathered(shard, module):
        note = {"module": "", "parameter": ports[shard.name].name, "axis": "dp", "serves": module}
        sent = call(_ops.all_gather_into_tensor.default, (shard, WORLD, "0"), {}, note, False)
        return call(_ops.wait_tensor.default, (sent,), {}, note, False)

    def reduced(gradient, shard):
        note = {"module": "", "parameter": ports[shard.name].name, "axis": "dp"}
        args = (gradient, "sum", WORLD, "0")
        sent = call(_ops.reduce_scatter_tensor.default, args, {}, note, True)
        return call(_ops.wait_tensor.default, (sent,), {}, note, True)

    def copies(env, nodes, module, backward):
        for node in nodes:
            args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
            note = {"module": module, "origin": f"{module}.{node.name}"}
            env[node] = call(node.target, args, kwargs, note, backward)

    body = [n for n in inner if n.op == "call_function"]
    envs = []
    for k in range(layers):
        module, own = f"layers.{k}", shards[k * len(names) : (k + 1) * len(names)]
        env = dict(zip(holders[:1] + holders[2:4], (state, *tables), strict=True))
        env.update((h, gathered(s, module)) for h, s in zip(holders[4:], own, strict=True))
        copies(env, [n for n in body if n in ahead], module, False)
        envs.append((env, own))
        state = env[y]
    results: dict[fx.Node, fx.Node] = {}
    for k in reversed(range(layers)):
        env, own = envs[k]
        env[holders[1]] = seed
        copies(env, [n for n in body if n not in ahead], f"layers.{k}", True)
        results.update((s, reduced(env[g], s)) for g, s in zip(gradients, own, strict=True))
        seed = env[dx]
    graph.output([state, *(results[s] for s in shards)])
    found = [Port("output", "", 0), *(Port("gradient", ports[s.name].name) for s in shards)]
    module = fx.GraphModule(torch.nn.Module(), graph)
    return LocalGraph(module, ports, tuple(found), 1)


def _val(node):
    return node.meta["val"]
