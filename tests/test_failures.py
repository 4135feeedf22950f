"""What a capture that fails tells: the model's own error on wrong inputs is no graph break."""

import logging

import pytest
import torch

from autop_ac import AutoParallel, CaptureError, fake_mesh


class Picky(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.linear = torch.nn.Embedding(10, 8), torch.nn.Linear(8, 4)

    def forward(self, x, mask=None):
        assert x.shape[0] != 5, "five rows"
        if x.shape[0] == 7:
            raise KeyError("seven rows")
        if x.shape[0] == 6:
            torch._dynamo.graph_break()  # noqa: TID251 the documented way to ask for one
        return self.linear(self.embed(x) if x.dtype == torch.long else x)


def failing(made):
    with (
        pytest.raises(CaptureError) as caught,
        AutoParallel(Picky(), lambda: made, fake_mesh(1)),
    ):
        pass
    return caught.value


@pytest.mark.parametrize(
    ("made", "kind", "parts"),
    [
        (torch.randn(4, 9), RuntimeError, ("got [4, 9] X [8, 4]", "x float32 (4, 9), mask = None")),
        ((torch.randn(5, 8), 3), AssertionError, ("five rows", "x float32 (5, 8), mask = 3")),
        (torch.randn(7, 8), KeyError, ("seven rows", "x float32 (7, 8)")),
        (
            torch.zeros(4, 8, dtype=torch.int32),
            None,
            ("aten.addmm.default takes one dtype and gets float32 and int32", "x int32 (4, 8)"),
        ),
    ],
)
def test_an_error_of_the_model_is_told_as_its_own_with_line_and_inputs(made, kind, parts, caplog):
    error = failing(made)
    assert kind is None or type(error.__cause__) is kind
    for part in (
        "while capturing Picky: the model raises an error of its own",
        "input_fn",
        "test_failures.py:",
        *parts,
    ):
        assert part in str(error)
    assert "graph break" not in str(error) and all(
        r.levelno < logging.ERROR for r in caplog.records
    )


def test_a_graph_break_is_not_the_models_error():
    assert "Dynamo cannot trace the model as one graph, at" in str(failing(torch.randn(6, 8)))


def test_what_fails_on_fake_tensors_alone_is_not_the_models_error():
    model = Picky()
    model.forward = lambda x: model.linear(x) if x.sum() > 0 else torch.linalg.no_such_name(x)
    with (
        pytest.raises(CaptureError, match="Dynamo cannot trace"),
        AutoParallel(model, lambda: torch.randn(4, 8), fake_mesh(1)),
    ):
        pass
