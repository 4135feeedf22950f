"""`torch.cond`, `scan`, `while_loop` and `associative_scan` in a model."""

import warnings
from functools import partial

import pytest
import torch
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from autop_ac import AutoParallel, CaptureError, fake_mesh, launch
from tests.beside import assert_trains_alike, each


class Model(torch.nn.Module):
    def __init__(self, kind, kept=True):
        super().__init__()
        self.kind, self.kept = kind, kept
        self.up, self.down = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)

    def forward(self, x):
        y = torch.tanh(self.up(x))
        return self.down(getattr(self, self.kind if self.kept else f"plain_{self.kind}")(y))

    def cond(self, y):
        return torch.cond(y.sum() > 0, lambda y: y.sin(), lambda y: 2 * y.cos(), (y,))

    def plain_cond(self, y):
        return y.sin() if y.sum() > 0 else 2 * y.cos()

    def scan(self, y):
        def step(state, row):
            state = (state * 0.5 + row).sin()
            return state, state * 2

        return scan(step, torch.zeros_like(y[:, 0]), y, dim=1)[1]

    def plain_scan(self, y):
        state, rows = torch.zeros_like(y[:, 0]), []
        for i in range(y.shape[1]):
            state = (state * 0.5 + y[:, i]).sin()
            rows.append(state * 2)
        return torch.stack(rows, 1)

    def associative(self, y):
        """A state space: decays times states plus inputs."""

        def together(left, right):
            return left[0] * right[0], left[1] * right[0] + right[1]

        return associative_scan(together, (y.sigmoid(), y), 1, combine_mode="generic")[1]

    def plain_associative(self, y):
        state, rows = torch.zeros_like(y[:, 0]), []
        for i in range(y.shape[1]):
            state = state * y[:, i].sigmoid() + y[:, i]
            rows.append(state)
        return torch.stack(rows, 1)

    def loop(self, y):
        return while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, y.sin()), (torch.tensor(0), y))[
            1
        ]


KINDS = {"cond": "cond", "scan": "scan", "associative": None}


def compare(kind):
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2,))
    model, single = Model(kind).double(), Model(kind, kept=False).double()
    single.load_state_dict(model.state_dict())
    x = torch.randn(4, 8, 16).double()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with AutoParallel(model, lambda: x, mesh).configure_compile("eager") as ap:
            ap.add_input_constraints([(Shard(0),)])
            plan = ap.optimize_placement()
            parallel = ap.apply_placement(plan, outputs="dtensor")
    said = [str(w.message) for w in caught if "no sharding rule" in str(w.message)]
    if torch.distributed.get_rank():
        assert not said  # the first rank plans for all
    elif KINDS[kind] is not None:
        assert len(said) == 1 and f"rule for {KINDS[kind]} (" in said[0], said
        assert "test_control_flow.py:" in said[0]
    assert_trains_alike(parallel, single, x, mesh, (Shard(0),))
    return [c.outputs for n, c in plan.choices.items() if n == KINDS[kind]]


def run_all():
    return each({kind: partial(compare, kind) for kind in KINDS})


@pytest.fixture(scope="module")
def results():
    return launch(run_all, 2)


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_whole_with_a_warning_and_trains_as_one_process_does(results, kind):
    for found in results:
        placed, error = found[kind]
        assert not error, error
        assert all(p in (None, (Replicate(),)) for outputs in placed for p in outputs)


def test_a_loop_of_a_number_of_steps_that_depends_on_values_is_refused():
    with pytest.raises(
        CaptureError, match=r"while_loop.* at .*test_control_flow.py:\d+ gives a ten"
    ):
        AutoParallel(Model("loop"), lambda: torch.randn(4, 8, 16), fake_mesh((2,))).__enter__()
