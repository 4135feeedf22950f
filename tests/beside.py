"""A parallel model beside the same model on one process."""

import traceback

import torch
from torch.distributed.tensor import distribute_tensor


def assert_trains_alike(parallel, single, x, mesh, placements):
    """Outputs, and every gradient of a loss with random weights, are equal.

    Args:
        parallel: gives a DTensor.  x: the whole input, of which each rank is given its part.
    """
    got = parallel(distribute_tensor(x, mesh, placements).to_local()).full_tensor()
    expected = single(x)
    weights = torch.randn_like(expected)
    (got * weights).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(got, expected)
    pairs = zip(parallel.named_parameters(), single.named_parameters(), strict=True)
    for (name, p), (_, q) in pairs:
        if q.grad is not None:
            got = p.grad.full_tensor()
            torch.testing.assert_close(got, q.grad, msg=lambda m, n=name: f"{n}: {m}")


def each(cases):
    """What each case comes to in a worker process, so that one that fails leaves the others to run.

    Args:
        cases: by name a function without arguments.

    Returns:
        By name ``(result, "")``, or ``(None, traceback)``.
    """
    torch.set_num_threads(1)
    found = {}
    for name, case in cases.items():
        try:
            found[name] = case(), ""
        except Exception:
            found[name] = None, traceback.format_exc()
    return found
