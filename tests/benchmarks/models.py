"""Plan each model of `tests.zoo`, run it on gloo processes, compare with one process.

    python tests/benchmarks/models.py                    every model, on (4,) and on (2, 2)
    python tests/benchmarks/models.py --models unet --meshes 2,2 --ways tensor

Ways: "plain" has no constraints, "data" the batch over all devices and parameters cut to one part each,
"tensor" whole inputs, so that work is spread by cutting models. One JSON line each; the exit status says
whether all outputs, gradients and buffers are equal.
"""

import argparse
import contextlib
import json
import math
import sys
import time
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils import _pytree as pytree

from autop_ac import AutoParallel, launch
from tests.zoo import MODELS, OnMesh

WAYS = ("plain", "data", "tensor")
WITHIN = 1e-9  # of the norm of each tensor, in float64


def wide(value):
    floating = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.double() if floating else value


def loss_of(outputs, weights):
    """A number that every output has a part in, other parts for other elements."""
    tensors = [t for t in pytree.tree_leaves(outputs) if isinstance(t, torch.Tensor)]
    whole = [t.full_tensor() if isinstance(t, DTensor) else t for t in tensors]
    return sum((t * w).sum() for t, w in zip(whole, weights, strict=True)), whole


def farthest(expected, got):
    """The largest distance, of each tensor relative to its norm, and whose it is."""
    expected = {str(name): t.detach() for name, t in expected.items()}
    got = {str(name): t.detach() for name, t in got.items()}
    scale = max((float(t.norm()) for t in expected.values()), default=1.0)
    worst = (0.0, "")
    for name, right in expected.items():
        value = got[name]
        value = value.full_tensor() if isinstance(value, DTensor) else value
        if value.shape != right.shape:
            return math.inf, f"{name} has shape {tuple(value.shape)}, not {tuple(right.shape)}"
        distance = float((value - right).norm()) / (float(right.norm()) + 1e-3 * scale)
        worst = max(worst, (distance, name))
    return worst


def compare(name, shape, way):
    """One model on one mesh: distances of outputs, gradients and buffers, and what the plan did."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[: len(shape)])
    make, inputs = MODELS[name]
    model = (make(mesh) if isinstance(make, OnMesh) else make()).double()
    given = tuple(map(wide, inputs()))
    ap = AutoParallel(model, lambda: given, mesh).configure_ac().configure_compile("eager")
    # before the single process runs it: buffers change
    started = time.monotonic()
    placements = {
        "plain": (Shard(0), *[Replicate()] * (len(shape) - 1)),
        "data": (Shard(0),) * len(shape),
        "tensor": (Replicate(),) * len(shape),
    }[way]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with ap:
            if way != "plain":
                ap.add_input_constraints([placements] * len(given))
            if way == "data":
                ap.add_parameter_memory_constraint(0.0, 1 / mesh.size())
            plan = ap.optimize_placement()
            parallel = ap.apply_placement(plan, outputs="dtensor")
    planned_s = time.monotonic() - started
    local = [distribute_tensor(x, mesh, placements).to_local() for x in given]
    outputs = parallel(*local)
    single = model
    if isinstance(make, OnMesh):
        single = make().double()
        single.load_state_dict(model.state_dict())
    expected = single(*given)
    weights = [
        torch.randn_like(t) for t in pytree.tree_leaves(expected) if isinstance(t, torch.Tensor)
    ]
    loss, found = loss_of(outputs, weights)
    loss.backward()
    right_loss, right = loss_of(expected, weights)
    right_loss.backward()
    moved = sum(c.redistribute_s > 0 for c in plan.choices.values())
    spread = sum(any(p.is_shard() for p in placed) for placed in plan.parameters.values())
    return {
        "outputs": farthest(dict(enumerate(right)), dict(enumerate(found))),
        "gradients": farthest(
            {n: p.grad for n, p in single.named_parameters()},
            {n: p.grad for n, p in parallel.named_parameters()},
        ),
        "buffers": farthest(
            {n: b for n, b in single.named_buffers() if b.is_floating_point()},
            dict(parallel.named_buffers()),
        ),
        "sharded_parameters": f"{spread} of {len(plan.parameters)}",
        "moves": moved,
        "planned_s": round(planned_s, 2),
        "warnings": sorted({str(w.message)[:160] for w in caught if w.category is UserWarning}),
    }


def compare_all(cases):
    """The cases one after the other: starting processes takes long."""
    torch.set_num_threads(1)
    results = []
    for name, shape, way in cases:
        try:
            results.append(compare(name, shape, way))
        except Exception as error:
            error.add_note(f"{name} on {shape}, {way}")
            raise
    return results


def is_equal(result):
    return all(result[k][0] <= WITHIN for k in ("outputs", "gradients", "buffers"))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--meshes", default="4;2,2", help="shapes, separated by semicolons")
    parser.add_argument("--ways", default=",".join(WAYS))
    args = parser.parse_args()
    failed = 0
    for name in args.models.split(","):
        cases = [
            (name, tuple(int(n) for n in shape.split(",")), way)
            for shape in args.meshes.split(";")
            for way in args.ways.split(",")
        ]
        results = {}
        with contextlib.suppress(KeyboardInterrupt):
            try:
                results = launch(compare_all, math.prod(cases[0][1]), cases)[0]
            except Exception as error:
                print(f"{name}: {type(error).__name__}: {str(error)[-3000:]}", flush=True)
                failed += 1
                continue
        for case, result in zip(cases, results):
            line = {"model": case[0], "mesh": case[1], "way": case[2], "equal": is_equal(result)}
            print(json.dumps({**line, **result}), flush=True)
            failed += not is_equal(result)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
