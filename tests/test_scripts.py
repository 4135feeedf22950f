"""What a training script does with a module, done with the parallel one and with the plain one."""

import copy
import traceback
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from autop_ac import AutoParallel, ForwardInputs, fake_mesh, launch

WIDTH, BATCH, RANKS = 16, 8, 2


class Net(nn.Module):
    def __init__(self, norm=nn.LayerNorm):
        super().__init__()
        self.one, self.norm, self.two = nn.Linear(WIDTH, 32), norm(32), nn.Linear(32, WIDTH)

    def forward(self, x):
        return self.two(torch.relu(self.norm(self.one(x))))


class Pair:
    """The same model on one device and on two, and the parts of a batch that each takes."""

    def __init__(self, mesh, model=None, inputs=None, **options):
        torch.manual_seed(0)
        self.mesh, self.single = mesh, model or Net()
        make = inputs or (lambda: torch.randn(BATCH, WIDTH))
        ap = AutoParallel(self.single, make, mesh, **options).configure_compile("eager")
        with ap:
            ap.add_parameter_memory_constraint(0.0, 0.6)
            self.parallel = ap.apply_placement(ap.optimize_placement())

    def own(self, x):
        return x.chunk(RANKS)[self.mesh.get_rank()]

    def losses(self, x, y, call=lambda module, x: module(x)):
        """Mean losses of the whole batch; the second is this rank's share of it."""
        single = F.mse_loss(call(self.single, x), y)
        share = F.mse_loss(call(self.parallel, self.own(x)), self.own(y)) / RANKS
        return single, share

    def assert_alike(self, what=lambda p: p):
        for (name, a), b in zip(
            self.single.named_parameters(), self.parallel.parameters(), strict=True
        ):
            a, b = what(a), what(b)
            if a is None or b is None:
                assert a is b, name
                continue
            torch.testing.assert_close(whole(b), a, rtol=1e-4, atol=1e-6, msg=name)


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gradient(parameter):
    return parameter.grad


def batches(count):
    torch.manual_seed(7)
    return [(torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH)) for _ in range(count)]


def accumulation(mesh):
    pair = Pair(mesh)
    for x, y in batches(3):
        for loss in pair.losses(x, y):
            loss.backward()
    pair.assert_alike(gradient)


def clipping(mesh):
    pair = Pair(mesh)
    for foreach in (True, False):
        ((x, y),) = batches(1)
        for loss in pair.losses(x, y):
            loss.backward()
        norms = [
            whole(nn.utils.clip_grad_norm_(module.parameters(), 0.01, foreach=foreach))
            for module in (pair.single, pair.parallel)
        ]
        torch.testing.assert_close(*norms)
        assert norms[0] > 0.01
        pair.assert_alike(gradient)


def optimizers(mesh):
    pair = Pair(mesh)
    made = [
        lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-3, fused=True),
        lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-3, foreach=True),
        lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, foreach=True),
    ]
    for make in made:
        both = [make(m.parameters()) for m in (pair.single, pair.parallel)]
        for x, y in batches(3):
            for loss, optimizer in zip(pair.losses(x, y), both, strict=True):
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        pair.assert_alike()


def scheduler(mesh):
    pair = Pair(mesh)
    both = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (pair.single, pair.parallel)]
    rates = [torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.5, total_steps=4) for o in both]
    for x, y in batches(4):
        for loss, optimizer, rate in zip(pair.losses(x, y), both, rates, strict=True):
            optimizer.zero_grad(set_to_none=False)
            loss.backward()
            optimizer.step()
            rate.step()
    pair.assert_alike()
    assert rates[0].get_last_lr() == rates[1].get_last_lr() != [0.1]


def frozen(mesh):
    model = Net()
    model.one.requires_grad_(False)
    model.norm.bias.requires_grad_(False)
    pair = Pair(mesh, model)
    both = [
        torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=1e-2, eps=1e-3)
        for m in (pair.single, pair.parallel)
    ]
    for x, y in batches(2):
        for loss, optimizer in zip(pair.losses(x, y), both, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    pair.assert_alike(gradient)
    pair.assert_alike()
    assert pair.parallel.one.weight.grad is None and pair.parallel.two.weight.grad is not None


def batch_norm(mesh):
    pair = Pair(mesh, Net(nn.BatchNorm1d))
    for x, y in batches(3):
        for loss in pair.losses(x, y):
            loss.backward()
    pair.assert_alike(gradient)
    for (name, a), (_, b) in zip(
        pair.single.named_buffers(), pair.parallel.named_buffers(), strict=True
    ):
        torch.testing.assert_close(whole(b), a, msg=name)
    assert pair.parallel.norm.num_batches_tracked.full_tensor() == 3
    pair.single.eval(), pair.parallel.eval()
    torch.testing.assert_close(pair.parallel(pair.own(x)), pair.own(pair.single(x)))


def without_gradients(mesh):
    pair = Pair(mesh)
    ((x, _),) = batches(1)
    expected = pair.own(pair.single(x))
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            out = pair.parallel(pair.own(x))
        assert not out.requires_grad
        torch.testing.assert_close(out, expected)
    # and training goes on
    loss = pair.losses(*batches(1)[0])
    [each.backward() for each in loss]
    pair.assert_alike(gradient)


def retained(mesh):
    pair = Pair(mesh)
    for loss in pair.losses(*batches(1)[0]):
        loss.backward(retain_graph=True)
        loss.backward()
    pair.assert_alike(gradient)


def forwards_before_backward(mesh):
    pair = Pair(mesh)
    shares = [pair.losses(x, y) for x, y in batches(3)]
    sum(single for single, _ in shares).backward()
    sum(share * (i == i) for i, (_, share) in enumerate(reversed(shares))).backward()
    pair.assert_alike(gradient)


class TakesDict(Net):
    def forward(self, batch, *, scale=1.0):
        hidden = super().forward(batch["x"]) * batch["mask"]
        return {"hidden": hidden * scale, "count": batch["mask"].sum(-1)}


def dict_batches(mesh):
    def inputs():
        batch = {"x": torch.randn(BATCH, WIDTH), "mask": torch.ones(BATCH, WIDTH)}
        return ForwardInputs((batch,), {"scale": 0.5})

    pair = Pair(mesh, TakesDict(), inputs)
    ((x, y),) = batches(1)

    def call(module, x):
        batch = {"x": x, "mask": (x > 0).float()}
        out = module(batch, scale=0.5)
        assert out["count"].shape == x.shape[:1]
        return out["hidden"]

    for loss in pair.losses(x, y, call):
        loss.backward()
    pair.assert_alike(gradient)


def mixed_precision(mesh):
    """Dtypes and numbers are those of FSDP2 under the same policy."""
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32
    )
    pair = Pair(mesh, mp_policy=policy)
    theirs = fully_shard(copy.deepcopy(pair.single), mesh=mesh, mp_policy=policy)
    ((x, y),) = batches(1)
    outputs = []
    for module, share in ((theirs, 1), (pair.parallel, RANKS)):
        out = module(pair.own(x))
        outputs.append(out)
        (F.mse_loss(out, pair.own(y)) / share).backward()
    assert outputs[0].dtype == outputs[1].dtype == torch.float32
    torch.testing.assert_close(*outputs)
    for (name, a), b in zip(theirs.named_parameters(), pair.parallel.parameters(), strict=True):
        assert a.dtype == b.dtype == b.grad.dtype == torch.float32
        a, b = a.grad.full_tensor(), b.grad.full_tensor()
        assert (a - b).norm() <= 0.02 * a.norm(), name


FEATURES = (
    accumulation, clipping, optimizers, scheduler, frozen, batch_norm, without_gradients, retained,
    forwards_before_backward, dict_batches, mixed_precision,
)  # fmt: skip


def each_feature():
    """By feature the traceback of its failure, None where it works; all in one process group."""
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("dp",))
    found = {}
    for feature in FEATURES:
        try:
            feature(mesh)
            found[feature.__name__] = None
        except Exception:
            found[feature.__name__] = traceback.format_exc()
    return found


@pytest.fixture(scope="module")
def outcomes():
    return launch(each_feature, RANKS)


@pytest.mark.parametrize("feature", [f.__name__ for f in FEATURES])
def test_a_training_script_gives_what_it_gives_on_one_device(feature, outcomes):
    assert [found[feature] for found in outcomes] == [None] * RANKS


@dataclass(frozen=True)
class Inner:
    values: list


@dataclass
class Given:
    logits: torch.Tensor
    inner: Inner
    places: torch.Tensor


class GivesDataclass(Net):
    def forward(self, x):
        out = super().forward(x)
        return Given(out, Inner([out.sin()]), out.argmax(-1))


def error_of(given, target):
    assert given.logits.dtype is torch.float32, "logits"
    assert given.inner.values[0].dtype is torch.float32, "values"
    return F.mse_loss(given.logits, target) + given.inner.values[0].mean()


@pytest.mark.parametrize("loss_fn", [None, error_of])
def test_output_dtype_reaches_into_dataclasses_with_and_without_a_loss(loss_fn):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    x, y = torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH)
    given = (x, y) if loss_fn else x
    ap = AutoParallel(GivesDataclass(), lambda: given, fake_mesh(1), policy, loss_fn=loss_fn)
    parallel = ap.configure_compile("eager").parallelize()
    if loss_fn:
        assert parallel(x, y).dtype == torch.float32
        return
    out = parallel(x)
    assert type(out) is Given and type(out.inner) is Inner
    assert out.logits.dtype == out.inner.values[0].dtype == torch.float32
    assert out.places.dtype == torch.int64
    # computed in the lower precision, and cast at the end
    assert torch.equal(out.logits, out.logits.bfloat16().float())
