"""Calls in every form that forward takes, and outputs of every kind that it gives."""

from collections import OrderedDict, namedtuple
from dataclasses import dataclass, field, fields

import pytest
import torch
from torch.distributed.tensor import DTensor

from autop_ac import AutoParallel, ConfigError, ForwardInputs, UsageError, fake_mesh

X, Y = torch.randn(4, 8), torch.randn(4, 8)


class Scaled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x, mask=None, *, scale=1.0, residual=False):
        out = self.linear(x) * scale
        out = out if mask is None else out * mask
        return out + x if residual else out


class Variadic(Scaled):
    def forward(self, *xs, **named):
        return self.linear(sum(xs) + named["bias"])


class Batch(Scaled):
    def forward(self, batch):
        return {"out": self.linear(batch["x"]), "pair": [batch["x"] * 2, batch["flag"]]}


def parallelized(model, inputs, **options):
    ap = AutoParallel(model, lambda: inputs, fake_mesh((1,))).configure_compile("eager")
    with ap:
        return ap.apply_placement(ap.optimize_placement(), **options)


@pytest.mark.parametrize(
    "inputs",
    [
        X,
        (X, None),
        (X, Y),
        ForwardInputs((X,), {"mask": Y}),
        ForwardInputs((), {"mask": Y, "x": X}),
        ForwardInputs((X, None), {"scale": 3.0, "residual": True}),
        ForwardInputs((X,), {"scale": 2, "mask": Y}),
    ],
    ids=["x", "x none", "x mask", "mask by name", "all by name", "keywords", "mixed"],
)
def test_arguments_by_position_by_name_and_left_out_give_what_the_model_gives(inputs):
    model = Scaled()
    parallel = parallelized(model, inputs)
    if isinstance(inputs, ForwardInputs):
        args, kwargs = inputs.args, inputs.kwargs
    else:
        args, kwargs = (inputs if isinstance(inputs, tuple) else (inputs,)), {}
    expected = model(*args, **kwargs)
    assert torch.equal(parallel(*args, **kwargs), expected)
    # the same call in two other forms
    given = dict(zip(("x", "mask"), args, strict=False)) | dict(kwargs)
    assert torch.equal(parallel(**given), expected)
    assert torch.equal(parallel(given.pop("x"), **dict(reversed(given.items()))), expected)


def test_star_arguments_and_dicts_are_taken():
    model = Variadic()
    parallel = parallelized(model, ForwardInputs((X, Y), {"bias": X}))
    assert torch.equal(parallel(X, Y, bias=Y), model(X, Y, bias=Y))
    model = Batch()
    batch = {"x": X, "flag": True}
    parallel = parallelized(model, (batch,))
    got = parallel(batch)
    assert torch.equal(got["out"], model(batch)["out"])
    assert got["pair"][1] is True


def test_a_call_that_does_not_fit_is_refused_in_the_users_words():
    parallel = parallelized(Scaled(), ForwardInputs((X,), {"mask": Y, "scale": 2.0}))
    with pytest.raises(UsageError, match="missing a required argument: 'x'"):
        parallel(mask=Y)
    with pytest.raises(UsageError, match="unexpected keyword argument 'maks'"):
        parallel(X, maks=Y)
    with pytest.raises(UsageError, match="input scale is 3.0; the model was captured with 2.0"):
        parallel(X, Y, scale=3.0)
    with pytest.raises(UsageError, match="input mask has local shape"):
        parallel(X, Y[:2], scale=2.0)
    with pytest.raises(UsageError, match=r"mask has local shape NoneType"):
        parallel(X, scale=2.0)
    parallel = parallelized(Batch(), ({"x": X, "flag": True},))
    with pytest.raises(UsageError, match=r"batch\['flags'\] more and batch\['flag'\] less"):
        parallel({"x": X, "flags": True})


def test_an_input_fn_that_does_not_fit_is_refused_in_the_users_words():
    mesh = fake_mesh((1,))
    cases = [
        ((X, Y, X), "too many positional arguments"),
        ({"x": X, "mask": Y}, r"dict of x, mask.*ForwardInputs\(kwargs"),
        ((X, object()), "input mask is a object"),
        ((1.0,), "no tensor"),
    ]
    for inputs, message in cases:
        with (
            pytest.raises(ConfigError, match=message),
            AutoParallel(Scaled(), lambda inputs=inputs: inputs, mesh),
        ):
            pass


def test_input_fn_may_read_values_and_leaves_the_random_state_alone():
    def inputs():
        x = torch.randn(4, 8)
        return ForwardInputs((x,), {"scale": float(x.sum() > -1e9)})

    ap = AutoParallel(Scaled(), inputs, fake_mesh((1,)))
    before = torch.random.get_rng_state()
    with ap:
        assert torch.equal(torch.random.get_rng_state(), before)


Pair = namedtuple("Pair", "first second")


@dataclass
class Output:
    logits: torch.Tensor
    steps: int = 3
    hidden: object = None


@dataclass(frozen=True)
class Frozen:
    logits: torch.Tensor
    norm: torch.Tensor = field(init=False)

    def __post_init__(self):
        object.__setattr__(self, "norm", self.logits.sum())


@dataclass
class ModelOutput(OrderedDict):
    """Shaped as the outputs of Hugging Face are."""

    loss: object = None
    logits: object = None

    def __post_init__(self):
        for f in fields(self):
            if getattr(self, f.name) is not None:
                self[f.name] = getattr(self, f.name)


KINDS = {
    "dataclass": lambda h: Output(h, 5, (h + 1, None)),
    "frozen": Frozen,
    "model output": lambda h: ModelOutput(logits=h),
    "nested": lambda h: {"a": [h, Output(Frozen(h * 2))], "b": 2.5, "c": Pair(h, None)},
    "tuple": lambda h: (h, None, "text", (h * 2,)),
}


class Gives(torch.nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)
        self.kind = kind

    def forward(self, x):
        return KINDS[self.kind](self.linear(x))


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        plain = list(a) == list(b) and all(same(a[k], b[k]) for k in a)
        return plain and (not hasattr(a, "__dict__") or same(dict(vars(a)), dict(vars(b))))
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return same(vars(a), vars(b)) if hasattr(a, "__dict__") else a == b


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_come_back_as_what_they_were(kind):
    model = Gives(kind)
    parallel = parallelized(model, X)
    expected, got = model(X), parallel(X)
    assert same(expected, got)
    assert not same(expected, parallel(Y))


def test_tensors_inside_a_dataclass_are_handed_out_as_dtensors_and_carry_gradients():
    model = Gives("dataclass")
    parallel = parallelized(model, X, outputs="dtensor")
    got = parallel(X)
    assert isinstance(got.logits, DTensor)
    assert isinstance(got.hidden[0], DTensor)
    assert got.steps == 5
    got.logits.sum().backward()
    model(X).logits.sum().backward()
    assert torch.equal(parallel.linear.weight.grad.full_tensor(), model.linear.weight.grad)
