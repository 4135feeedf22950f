"""``layers.*=checkpoint`` against `torch.utils.checkpoint` around the same modules, in our graphs and in eager."""

import contextlib
from functools import partial

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard
from torch.utils.checkpoint import checkpoint

from autop_ac import (
    ATTENTION,
    AutoParallel,
    ac_region,
    fake_mesh,
    measure_memory,
    with_sharding_constraint,
)
from tests.gpt import GPT, GPTConfig

CONFIG = GPTConfig(layers=2, tied=False)
TOKENS = torch.randint(64, (8, 16))
RULE = "blocks.*=checkpoint"


class Checkpointed(GPT):
    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)
        return self.head(x)


class Shared(torch.nn.Module):
    """One module called twice."""

    def __init__(self, wrap=lambda f, x: f(x)):
        super().__init__()
        self.wrap = wrap
        self.mixer = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh())

    def forward(self, x):
        return self.wrap(self.mixer, self.wrap(self.mixer, x.sin())).cos()


class Gathers(torch.nn.Module):
    """The batch is whole inside of `inner`, and cut outside."""

    class Inner(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.up = torch.nn.Linear(8, 8)

        def forward(self, x):
            return x + self.up(with_sharding_constraint(x, (Replicate(),))).tanh()

    def __init__(self, wrap=lambda f, x: f(x)):
        super().__init__()
        self.wrap, self.inner = wrap, self.Inner()

    def forward(self, x):
        x = with_sharding_constraint(x.sin(), (Shard(0),))
        return with_sharding_constraint(self.wrap(self.inner, x), (Shard(0),)).cos()


def planned(model, inputs, devices=1):
    ap = AutoParallel(model, lambda: inputs, fake_mesh((devices,))).configure_compile("eager")
    with ap.configure_ac(stage_size=None):
        ap.add_input_constraints([(Shard(0),)])
        if devices > 1:
            ap.add_parameter_memory_constraint()
        ap.optimize_placement()
    return ap


def kept(report):
    return sorted((v.op, v.module, v.shape, v.dtype) for v in report.saved)


def under(ap, *rules):
    return ap.configure_ac(stage_size=None, rules=rules).preview()


@pytest.mark.parametrize("devices", [1, 4])
def test_what_is_kept_is_what_a_checkpoint_in_the_model_keeps(devices):
    theirs = planned(Checkpointed(CONFIG), TOKENS, devices).ac_report
    ap = planned(GPT(CONFIG), TOKENS, devices)
    ours = under(ap, RULE)
    assert kept(ours) == kept(theirs) != kept(under(ap))
    assert (ours.kept_bytes, ours.peak_bytes) == (theirs.kept_bytes, theirs.peak_bytes)
    assert ours.recompute_s == pytest.approx(theirs.recompute_s)
    inside = {v.reason for v in ours.saved if v.module.startswith("blocks.")}
    assert inside == {f'rule "{RULE}" keeps what enters'}
    assert ours.notes == theirs.notes
    if devices == 1:
        earlier_rules_hold(ap, ours)


def earlier_rules_hold(ap, alone):
    both = under(ap, "blocks.*.up::aten.addmm=save", RULE)
    more = [v for v in both.saved if v.module.endswith(".up")]
    assert len(more) == 2 and len(both.saved) == len(alone.saved) + 2
    outer = under(ap, "blocks.0=recompute", RULE).explain("blocks.0")
    assert all(v.fate != "saved" for v in outer.values), "what enters the next is taken, too"


def test_the_bytes_kept_are_those_that_eager_pytorch_keeps():
    model = torch.nn.Sequential(*(torch.nn.Sequential(
        torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 16)) for _ in range(3)))  # fmt: skip
    x = torch.randn(32, 16)
    run = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    with measure_memory() as memory:
        out = x
        for layer in model:
            out = run(layer, out)
        memory.mark("end of forward")
        out.sum().backward()
    ap = planned(model, x)
    output = 32 * 16 * 4
    assert under(ap, "*=checkpoint").kept_bytes + output == memory.kept_bytes == 3 * output
    assert under(ap, "*=recompute").kept_bytes == 0, "which keeps nothing that enters"


def test_what_moves_in_a_module_is_in_it():
    x = torch.randn(64, 8)
    theirs = planned(Gathers(partial(checkpoint, use_reentrant=False)), x, 4).ac_report
    ours = under(planned(Gathers(), x, 4), "inner=checkpoint")
    assert kept(ours) == kept(theirs)
    fates = [
        {(v.op, v.fate) for v in r.explain("inner").values if "all_gather" in v.op}
        for r in (ours, theirs)
    ]
    assert fates[0] == fates[1] and {fate for _, fate in fates[0]} == {"recomputed"}


def test_what_enters_the_second_call_of_a_module_is_kept_too():
    x = torch.randn(4, 8)
    theirs = planned(Shared(partial(checkpoint, use_reentrant=False)), x).ac_report
    ours = under(planned(Shared(), x), "mixer=checkpoint")
    assert kept(ours) == kept(theirs)
    assert [v.module for v in ours.saved if "enters" in v.reason] == ["", "mixer.1"]


class BatchFirst(torch.nn.Module):
    """Attention of PyTorch: on a part of the batch, a view of its result is a copy."""

    def __init__(self, region):
        super().__init__()
        self.layers = torch.nn.ModuleList(
            torch.nn.MultiheadAttention(16, 4, batch_first=True) for _ in range(2)
        )
        self.region = region

    def forward(self, x):
        for layer in self.layers:
            with self.region() if self.region else contextlib.nullcontext():
                x = x + layer(x, x, x, need_weights=False)[0]
        return x


@pytest.mark.parametrize(
    ("region", "rules", "own"),
    [
        (None, ["layers.*=checkpoint"], set()),
        (ac_region, [], set()),
        (
            partial(ac_region, "attention", save=[ATTENTION]),
            [],
            {"aten._scaled_dot_product_flash_attention_for_cpu.default"},
        ),
    ],
    ids=["rule", "region", "attention saved"],
)
def test_a_copy_made_for_a_view_is_recomputed_as_what_it_is_a_view_of(region, rules, own):
    ap = AutoParallel(BatchFirst(region), lambda: torch.randn(8, 8, 16), fake_mesh((2,)))
    with ap.configure_compile("eager").configure_ac(stage_size=None, rules=rules):
        ap.add_input_constraints([(Shard(0),)])
        ap.add_parameter_memory_constraint()
        ap.optimize_placement()
    assert any(v.op == "aten.clone.default" for v in ap.preview().basis.facts.forward)
    assert {v.op for v in ap.ac_report.saved} - {"aten.add.Tensor"} == own


class MovedTwice(torch.nn.Module):
    """Gathered, viewed, and cut elsewhere."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.randn(16))

    def forward(self, x):
        h = with_sharding_constraint((x * self.scale).sin(), (Shard(0),))
        h = with_sharding_constraint(h, (Replicate(),)).view(8, 4, 4)
        return with_sharding_constraint(h, (Shard(2),)).exp().cos()


def test_what_is_moved_on_from_a_view_of_a_moved_value_is_recomputed_with_it():
    ap = AutoParallel(MovedTwice(), lambda: torch.randn(8, 16), fake_mesh((2,)))
    ap.configure_compile("eager").configure_ac(stage_size=None, rules=["**=recompute"])
    with ap:
        ap.add_input_constraints([(Shard(0),)])
        ap.optimize_placement()
    basis = ap.preview().basis
    moved = [v for v in basis.facts.forward if v.op == "aten.clone.default" and v.serves]
    assert moved
    assert all(basis.plan.decisions[v.index].reason == 'rule "**=recompute"' for v in moved)
