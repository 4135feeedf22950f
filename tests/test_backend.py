"""Activation checkpointing of single-device models under `torch.compile`."""

import itertools
import math
import warnings
from fractions import Fraction

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import autop_ac
from autop_ac import MATMUL, ConfigError, UsageError, ac_region, checkpoint_name
from tests.gpt import GPT, GPTConfig, HintedGPT, mean_loss

CONFIG = GPTConfig(vocab_size=64, dim=32, heads=4, layers=3, context=16)
COMPILERS = ["eager", "inductor"]


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def tokens(batch=4):
    return torch.randint(64, (batch, CONFIG.context))


def loss_and_gradients(model, call, x, y):
    model.zero_grad()
    loss = mean_loss(call(x), y)
    loss.backward()
    return loss.detach(), [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize(
    ("settings", "model_class"),
    [
        ({"enable": False}, GPT),
        ({}, GPT),
        ({"stage_size": None}, HintedGPT),
        ({"stage_size": None, "rules": ["blocks.*=recompute"]}, GPT),
        ({"memory_budget": 0.8}, GPT),
    ],
    ids=["off", "staged", "hinted", "rules", "budget"],
)
def test_loss_and_gradients_are_eagers(settings, model_class, compiler):
    torch.manual_seed(0)
    model, x, y = model_class(CONFIG), tokens(), tokens()
    expected = loss_and_gradients(model, model, x, y)
    ac = autop_ac.backend(compile=compiler, **settings)
    compiled = torch.compile(model, backend=ac, fullgraph=True)
    loss, gradients = loss_and_gradients(model, compiled, x, y)
    assert torch.allclose(loss, expected[0])
    norm = torch.stack([g.norm() for g in expected[1]]).norm()
    for got, wanted in zip(gradients, expected[1], strict=True):
        assert (got - wanted).norm() <= 1e-5 * wanted.norm() + 1e-7 * norm
    assert len(ac.reports) == 1
    with torch.no_grad():
        assert torch.allclose(compiled(x), model(x), atol=1e-5)
    assert len(ac.reports) == 1


def compiled_once(model, x=None, **settings):
    ac = autop_ac.backend(compile="eager", **settings)
    out = torch.compile(model, backend=ac)(tokens() if x is None else x)
    out.float().square().mean().backward()
    return ac


def test_hints_keep_the_block_inputs_and_the_products():
    report = compiled_once(HintedGPT(CONFIG), stage_size=None).ac_report
    inside = [v for v in report.saved if v.module.startswith("blocks.")]
    assert {v.reason for v in inside} == {
        'enters ac_region "block"',
        'ac_region "block" saves MATMUL',
    }
    products = [v for v in inside if "saves" in v.reason]
    assert {v.op for v in products} <= {"aten.addmm.default", "aten.mm.default"}
    assert len(products) >= 3 * CONFIG.layers


def test_rules_speak_of_the_users_module_paths():
    report = compiled_once(GPT(CONFIG), stage_size=None, rules=["blocks.1=recompute"]).ac_report
    kept = {v.module.split(".")[1] for v in report.saved if v.module.startswith("blocks.")}
    by_rule = [v for v in report.saved if v.origin == "rule"]
    assert not by_rule
    inner = [v for v in report.saved if v.module.startswith("blocks.1.")]
    assert not inner
    assert {"0", "2"} <= kept


def test_a_budget_is_held_and_policies_order_the_bytes_kept():
    def report(model=GPT, **settings):
        torch.compiler.reset()
        return compiled_once(model(CONFIG), **settings).ac_report

    off = report(enable=False)
    half = report(memory_budget=0.8)
    assert half.peak_bytes <= 0.8 * off.peak_without_ac_bytes
    assert report().peak_bytes <= off.peak_bytes
    assert report(HintedGPT, stage_size=None).kept_bytes < off.kept_bytes


def test_a_changed_policy_is_never_answered_by_an_old_graph():
    model, x = GPT(CONFIG), tokens()
    kept = []
    for settings in ({"enable": False}, {"stage_size": None, "rules": ["**=recompute"]}, {}):
        ac = autop_ac.backend(**settings)
        torch.compile(model, backend=ac)(x).mean().backward()
        kept.append({v.name for v in ac.ac_report.saved})
    assert len(kept) == 3
    assert kept[0] != kept[1]
    assert kept[1] != kept[2]


@pytest.mark.parametrize(
    "settings", [{"enable": False}, {"stage_size": 64}, {"memory_budget": 1.0}]
)
def test_a_memory_budget_of_pytorch_is_told_to_be_unused_whatever_decides(settings):
    import torch._functorch.config as functorch_config

    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh())
    compiled = torch.compile(model, backend=autop_ac.backend(compile="eager", **settings))
    with (
        functorch_config.patch(activation_memory_budget=0.1),
        pytest.warns(UserWarning, match="activation_memory_budget=0.1 .* is not used"),
    ):
        compiled(torch.randn(4, 8)).sum().backward()


class Dropped(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(64))

    def forward(self, x):
        with ac_region():
            return F.dropout(torch.sigmoid(x * self.weight), 0.5, self.training)


@pytest.mark.parametrize("compiler", COMPILERS)
def test_the_mask_of_backward_is_the_one_of_forward(compiler):
    model = Dropped()
    ac = autop_ac.backend(compile=compiler, stage_size=None)
    compiled = torch.compile(model, backend=ac)
    x = torch.ones(8, 64)
    out = compiled(x)
    out.sum().backward()
    s = torch.sigmoid(torch.tensor(1.0))
    assert torch.allclose(model.weight.grad, (out != 0).sum(0) * 2 * s * (1 - s), atol=1e-5)
    assert 0.3 < (out != 0).float().mean() < 0.7
    model.eval()
    assert torch.allclose(compiled(x), torch.sigmoid(x))


class DropsOnes(torch.nn.Module):
    def forward(self, x):
        for _ in range(3):
            x = torch.tanh(F.dropout(x, 0.5)) + x
        return F.dropout(x, 0.5)


@pytest.mark.parametrize(
    "settings",
    [
        {"enable": False},
        {"stage_size": None},
        {},
        {"stage_size": 4},
        {"recompute": ["aten.tanh", "aten.mul"]},
        {"save": ["aten.tanh"]},
        *({"memory_budget": part} for part in (1.0, 0.9, 0.8)),
    ],
    ids=str,
)
def test_dropout_of_ones_has_one_mask_under_every_policy(settings):
    # of 1 + tanh(2 or 0) the derivative tells which mask it was made with
    x = torch.ones(64, 8, requires_grad=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*matches", category=UserWarning)
        out = torch.compile(DropsOnes(), backend=autop_ac.backend(compile="eager", **settings))(x)
    out.sum().backward()
    expected = []
    for mask in _masks(3):  # every way that the three inner masks can fall
        value, slope = torch.ones(()), torch.ones(())
        for keeps in mask:
            inner = torch.tanh(2 * keeps * value)
            value, slope = inner + value, slope * (1 + (1 - inner**2) * 2 * keeps)
        expected.append((2 * value, 2 * slope))
    for given, got in zip(out.detach().flatten(), x.grad.flatten()):
        if given == 0:
            assert got == 0
        else:
            assert any(
                torch.allclose(given, v, atol=1e-5) and torch.allclose(got, s, atol=1e-4)
                for v, s in expected
            )


def _masks(count):
    return itertools.product((0.0, 1.0), repeat=count)


class Routed(torch.nn.Module):
    """A mixture of experts whose router would choose others if it ran again on other rounding."""

    def __init__(self):
        super().__init__()
        self.gate = torch.nn.Linear(8, 4, bias=False)
        self.experts = torch.nn.Parameter(torch.randn(4, 8, 8))

    def forward(self, x):
        weights, chosen = self.gate(x).softmax(-1).topk(2, dim=-1)
        y = torch.einsum("td,edf->tef", x, self.experts)
        picked = y.gather(1, chosen[..., None].expand(-1, -1, y.shape[-1]))
        return torch.sin((picked * weights[..., None]).sum(1))


@pytest.mark.parametrize("settings", [{}, {"stage_size": 1}, {"stage_size": "1 MiB"}], ids=str)
def test_outputs_of_routing_are_kept_unless_a_hint_says_otherwise(settings):
    def kept(**more):
        torch.manual_seed(0)
        model, x = Routed(), torch.randn(16, 8)
        ac = autop_ac.backend(compile="eager", **settings, **more)
        model(x).sum().backward()
        plain = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        torch.compile(model, backend=ac)(x).sum().backward()
        for p, expected in zip(model.parameters(), plain):
            assert torch.allclose(p.grad, expected, atol=1e-6)
        return {v.op for v in ac.ac_report.explain("").saved}

    assert "aten.topk.default" in kept()
    assert "aten.topk.default" not in kept(rules=["::aten.topk=recompute"])


class Mutates(torch.nn.Module):
    """A buffer is multiplied in place and then read: what reads it must not be computed again."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(8, 8))
        self.register_buffer("scale", torch.full((8, 8), 2.0))

    def forward(self, x):
        with ac_region():
            self.scale.mul_(1.5)
            return torch.sin(x @ self.scale) @ self.weight


@pytest.mark.parametrize("compiler", COMPILERS)
def test_a_buffer_that_is_changed_and_then_read_gives_eagers_gradients(compiler):
    torch.manual_seed(0)
    plain, x = Mutates(), torch.randn(4, 8, requires_grad=True)
    model = Mutates()
    model.load_state_dict(plain.state_dict())
    compiled = torch.compile(model, backend=autop_ac.backend(compile=compiler, stage_size=None))
    for _ in range(3):
        x.grad = None
        plain(x).square().sum().backward()
        wanted, x.grad = x.grad, None
        compiled(x).square().sum().backward()
        assert torch.allclose(x.grad, wanted, rtol=1e-4)
        assert torch.equal(model.scale, plain.scale)
        assert torch.allclose(model.weight.grad, plain.weight.grad, rtol=1e-4, atol=1e-5)


class Checkpointed(GPT):
    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


def test_checkpoints_in_the_model_hold_with_ac_off():
    report = compiled_once(Checkpointed(CONFIG), enable=False).ac_report
    inside = [v for v in report.saved if v.module.startswith("blocks.")]
    assert {v.reason for v in inside} == {"enters torch.utils.checkpoint"}


class Splits(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    def forward(self, x):
        with ac_region("both", save=[MATMUL]):
            x = torch.relu(self.one(x))
            torch._dynamo.graph_break()  # noqa: TID251 the documented way to ask for one
            return torch.relu(self.two(x))


def test_a_graph_break_in_a_region_is_told_and_the_gradients_are_right():
    model, x = Splits(), torch.randn(4, 8)
    model(x).sum().backward()
    wanted = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    ac = autop_ac.backend(compile="eager", stage_size=None)
    with pytest.warns(
        UserWarning, match=r"hints at .*test_backend\.py:\d+ are not read: Dynamo left"
    ):
        torch.compile(model, backend=ac)(x).sum().backward()
    for p, g in zip(model.parameters(), wanted, strict=True):
        assert torch.allclose(p.grad, g)


class Named(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x):
        with ac_region(save=["inner"]):
            return torch.sin(checkpoint_name(torch.cos(self.linear(x)), "inner"))


@pytest.mark.parametrize("other", ["eager", "aot_eager", "inductor"])
def test_hints_do_nothing_under_other_backends(other):
    model, x = Named(), torch.randn(4, 8)
    assert torch.allclose(torch.compile(model, backend=other)(x), model(x), atol=1e-6)
    report = compiled_once(model, x, stage_size=None).ac_report
    (saved,) = [v for v in report.saved if v.op == "aten.cos.default"]
    assert "inner" in saved.reason


def test_another_batch_size_compiles_again_and_is_right():
    model = GPT(CONFIG)
    ac = autop_ac.backend(compile="eager")
    compiled = torch.compile(model, backend=ac)
    for batch in (4, 6, 8):
        x = tokens(batch)
        expected = loss_and_gradients(model, model, x, x)
        got = loss_and_gradients(model, compiled, x, x)
        assert torch.allclose(got[0], expected[0])
        for a, b in zip(got[1], expected[1], strict=True):
            assert torch.allclose(a, b, atol=1e-6)
    # the second graph has a symbolic batch; reports are plain numbers all the same
    assert all(type(v.time_s) is float for v in ac.ac_report.basis.facts.values)
    assert "predicted step" in str(ac.ac_report.estimate())


def test_a_function_of_tensors_is_compiled_as_a_module_is():
    weight = torch.randn(8, 8, requires_grad=True)

    def loss(x, w):
        return torch.relu(x @ w).square().sum()

    ac = autop_ac.backend(compile="eager", stage_size=None)
    x = torch.randn(4, 8)
    torch.compile(loss, backend=ac)(x, weight).backward()
    wanted = torch.autograd.grad(loss(x, weight), weight)[0]
    assert torch.allclose(weight.grad, wanted)


def test_bad_settings_and_early_questions_are_refused():
    with pytest.raises(ConfigError, match="no setting .* 'stage'; did you mean stage_size"):
        autop_ac.backend(stage="auto")
    with pytest.raises(UsageError, match="no report yet"):
        _ = autop_ac.backend().ac_report


def test_nothing_is_warned_of_on_a_plain_run():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert compiled_once(HintedGPT(CONFIG), stage_size=None).ac_report.notes == ()


def test_the_backend_under_its_other_name_says_the_same():
    named = autop_ac.autoparallel_backend
    assert named().ac == autop_ac.ACConfig()
    assert named(enable_ac=False, overlap_scheduling=False).ac == autop_ac.ACConfig(enable=False)
    assert named(ac_stage_size_in_GiB=None).ac.stage_size == "auto"
    assert named(ac_stage_size_in_GiB=2).ac.stage_bytes == 2 * 2**30
    assert named(ac_stage_size_in_GiB=0.1).ac.stage_bytes == math.ceil(Fraction(1, 10) * 2**30)
    assert named(ac_stage_size_in_GiB=1e-6).ac.stage_bytes == 1074
    for wrong in (0.0, -1, float("nan"), float("inf"), True, "2"):
        with pytest.raises(ConfigError, match="stage_size"):
            named(ac_stage_size_in_GiB=wrong)
    with pytest.raises(ConfigError, match="overlap_scheduling=1"):
        named(overlap_scheduling=1)
