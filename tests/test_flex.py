"""Flex attention, cut along batch and heads, trains as plain attention on one process does."""

from functools import partial

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from autop_ac import AutoParallel, ConfigError, fake_mesh, launch
from autop_ac.capture.trace import capture, request
from autop_ac.graph.devices import find_device
from autop_ac.sharding.options import OptionFinder
from tests.beside import assert_trains_alike, each

R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()
LENGTH, WIDTH, HEADS = 16, 8, 4


class Attention(torch.nn.Module):
    """Plain or flex; `kinds`: what the scores and the mask look at."""

    def __init__(self, flex, kinds, kv_heads=2):
        super().__init__()
        self.flex, self.kinds, self.kv_heads = flex, kinds, kv_heads
        self.query = torch.nn.Linear(32, HEADS * WIDTH)
        self.keys = torch.nn.Linear(32, 2 * kv_heads * WIDTH)
        self.slopes = torch.nn.Parameter(torch.rand(HEADS))
        # where documents begin differs from one element of the batch to the next
        ends = torch.tensor([3, 9, 5, 16])[:, None]
        self.register_buffer("documents", (torch.arange(LENGTH) >= ends).long())

    def score(self, score, b, h, i, j):
        score = score + self.slopes[h] * (j - i) if "slopes" in self.kinds else score * 0.5
        return score

    def mask(self, b, h, i, j):
        keep = i >= j
        if "documents" in self.kinds:
            keep = keep & (self.documents[b, i] == self.documents[b, j])
        return keep

    def forward(self, x):
        q = self.query(x).unflatten(-1, (HEADS, WIDTH)).transpose(1, 2)
        parts = self.keys(x).chunk(2, -1)
        k, v = (t.unflatten(-1, (self.kv_heads, WIDTH)).transpose(1, 2) for t in parts)
        attend = self.flexible if self.flex else self.plain
        return attend(q, k, v).transpose(1, 2).flatten(2)

    def flexible(self, q, k, v):
        block = None
        if "mask" in self.kinds:
            batches = q.shape[0] if "documents" in self.kinds else None

            def mask(b, h, i, j):  # of torch, a function alone will do
                return self.mask(b, h, i, j)

            sizes = (batches, None, LENGTH, LENGTH)
            block = create_block_mask(mask, *sizes, device=q.device, BLOCK_SIZE=8)
        return flex_attention(q, k, v, self.score, block, enable_gqa=self.kv_heads < HEADS)

    def plain(self, q, k, v):
        k, v = (t.repeat_interleave(HEADS // self.kv_heads, 1) for t in (k, v))
        i, j = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)[None]
        b = torch.arange(q.shape[0])[:, None, None, None]
        h = torch.arange(HEADS)[None, :, None, None]
        scores = self.score(q @ k.mT / WIDTH**0.5, b, h, i, j)
        if "mask" in self.kinds:
            scores = scores.masked_fill(~self.mask(b, h, i, j), -torch.inf)
        return scores.softmax(-1) @ v


ALL = ("mask", "documents", "slopes")
CASES = {
    "one head of keys, by heads": (dict(kinds=("mask",), kv_heads=1), S1, {}),
    "all by heads, two of keys": (dict(kinds=ALL), S1, {}),
    "all by batch, recomputed": (dict(kinds=ALL), S0, {"ac": "1 KiB"}),
}


def compare(settings, placed, ac=None, backend="eager"):
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2,))
    model, single = Attention(True, **settings).double(), Attention(False, **settings).double()
    single.load_state_dict(model.state_dict())
    x = torch.randn(4, LENGTH, 32).double()
    given = S0 if placed == S0 else R
    with AutoParallel(model, lambda: x, mesh).configure_compile(backend) as ap:
        ap.configure_ac(stage_size=ac)
        ap.add_input_constraints([(given,)])
        ap.sharding_optimizer.add_node_constraint("flex_attention", (placed,))
        ap.sharding_optimizer.add_node_constraint("flex_attention_backward", (placed,))
        parallel = ap.apply_placement(ap.optimize_placement(), outputs="dtensor")
    assert_trains_alike(parallel, single, x, mesh, (given,))


def run_all():
    return each(
        {
            name: partial(compare, settings, placed, **how)
            for name, (settings, placed, how) in CASES.items()
        }
    )


@pytest.fixture(scope="module")
def results():
    return launch(run_all, 2)


@pytest.mark.parametrize("case", CASES)
def test_it_trains_as_plain_attention_does(results, case):
    for found in results:
        _, error = found[case]
        assert not error, error


def options_of(mesh, **settings):
    joint = capture(request(Attention(True, **settings), lambda: torch.randn(4, LENGTH, 32)))
    finder = OptionFinder(mesh, find_device("H100"))
    nodes = {n.name: n for n in joint.module.graph.nodes}
    found = [finder.options(nodes[n]) for n in ("flex_attention", "flex_attention_backward")]
    assert not finder.notes
    return found


def test_a_block_mask_is_cut_where_it_has_a_batch_and_what_is_looked_up_is_whole():
    forward, backward = options_of(fake_mesh((2,)), kinds=("mask", "documents", "slopes"))
    assert [o.outputs[0] for o in forward] == [(R,), (S0,), (S1,)]
    for option, masks in zip(forward, ((R,), (S0,), (R,))):
        placed = [p for p in option.inputs if p is not None]
        # queries, keys, values; eight tensors of a mask for each batch; slopes, documents
        assert placed == [option.outputs[0]] * 3 + [masks] * 8 + [(R,)] * 2
    assert [o.outputs for o in backward] == [
        ((R,),) * 4, ((S0,),) * 3 + ((P,),), ((S1,),) * 3 + ((P,),)
    ]  # fmt: skip
    whole, *parts = (o.compute_s for o in forward)
    assert all(part < whole for part in parts)


def test_heads_are_cut_only_with_their_keys():
    forward, _ = options_of(fake_mesh((4,)), kinds=("mask",), kv_heads=2)
    assert [o.outputs[0] for o in forward] == [(R,), (S0,)]
    forward, backward = options_of(fake_mesh((4,)), kinds=("mask",), kv_heads=1)
    assert forward[-1].inputs[:3] == ((S1,), (R,), (R,))
    assert backward[-1].outputs == ((S1,), (P,), (P,))


def test_a_backward_that_inductor_lacks_is_said():
    model = Attention(True, kinds=("mask",))
    with AutoParallel(model, lambda: torch.randn(4, LENGTH, 32), fake_mesh((2,))) as ap:
        plan = ap.optimize_placement()
        with pytest.raises(
            ConfigError, match=r"test_flex.py:\d+: Inductor has no backward .*eager"
        ):
            ap.apply_placement(plan)
