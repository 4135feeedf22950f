"""Rows of DTensor's that local operators must not take."""

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from autop_ac.sharding.unsound import is_unsound

aten = torch.ops.aten
X, ROWS = torch.randn(4, 8), torch.zeros(2, 8, dtype=torch.long)
SUM, MEAN = 2, 1


@pytest.mark.parametrize(
    "op", [aten.mse_loss_backward.default, aten.soft_margin_loss_backward.default]
)
@pytest.mark.parametrize(("reduction", "unsound"), [(SUM, False), (MEAN, True)])
def test_a_backward_that_divides_by_what_it_sees_takes_no_parts(op, reduction, unsound):
    parts = [Replicate(), Shard(0), Shard(0)]
    args = (torch.ones(()), X, X, reduction)
    assert is_unsound(op, args, {}, args[:3], [Shard(0)], parts) is unsound
    assert not is_unsound(op, args, {}, args[:3], [Replicate()], [Replicate()] * 3)


def test_a_gather_takes_parts_where_both_sizes_are_equal():
    op, args = aten.gather.default, (X, 1, ROWS)
    assert is_unsound(op, args, {}, [X, ROWS], [Shard(0)], [Shard(0), Shard(0)])
    whole = torch.zeros(4, 8, dtype=torch.long)
    assert not is_unsound(op, (X, 1, whole), {}, [X, whole], [Shard(0)], [Shard(0), Shard(0)])


@pytest.mark.parametrize("counted", [False, True])
def test_an_embedding_that_counts_its_indices_takes_no_parts(counted):
    indices = torch.zeros(4, dtype=torch.long)
    args = (X, indices, 16, -1, counted)
    parts = [Shard(0), Shard(0)]
    op = aten.embedding_dense_backward.default
    assert is_unsound(op, args, {}, [X, indices], [Replicate()], parts) is counted
