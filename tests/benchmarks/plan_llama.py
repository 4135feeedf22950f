"""Plan a Llama on a mesh of devices that are not there; one JSON line says what it took.

    python tests/benchmarks/plan_llama.py --layers 32 --mesh 32,8

Times are CPU seconds of this process and of its children; `total_*` start after the imports.
"""

import argparse
import collections
import json
import resource
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor.placement_types import Replicate, Shard

from autop_ac import ACConfig, fake_mesh
from autop_ac.capture.trace import capture, request
from autop_ac.graph.devices import Topology, find_device
from autop_ac.recompute.hints import resolve_hints
from autop_ac.recompute.pipeline import plan_recompute
from autop_ac.report.plan_table import plan_table
from autop_ac.sharding.apply import apply_plan
from autop_ac.sharding.build import build_problem
from autop_ac.sharding.constraints import Constraints
from autop_ac.sharding.groups import Settings
from autop_ac.sharding.optimise import optimise
from autop_ac.sharding.outcome import plan_of
from tests.benchmarks.llama import Llama, LlamaConfig


def cpu_s():
    """CPU seconds of this process and of the children it waited for."""
    own = resource.getrusage(resource.RUSAGE_SELF)
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


class Clock:
    """CPU seconds per step of the way."""

    def __init__(self):
        self.start = self.last = cpu_s()
        self.wall = time.monotonic()
        self.steps = {}

    def lap(self, name):
        now = cpu_s()
        self.steps[f"{name}_cpu_s"] = round(now - self.last, 2)
        self.last = now


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--mesh", default="32,8", help="sizes of the mesh axes")
    for name in ("dim", "heads", "kv_heads", "ffn", "vocab", "sequence"):
        default = getattr(LlamaConfig, name)
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--batch", type=int, default=2, help="per rank of the first mesh axis")
    parser.add_argument("--device", default="H100")
    parser.add_argument("--gap", type=float, default=0.001)
    parser.add_argument("--time-limit", type=float, default=120.0)
    parser.add_argument("--search-only", action="store_true", help="stop after the solver")
    parser.add_argument("--no-fold", action="store_true", help="no shared variables")
    parser.add_argument("--show", action="store_true", help="print the plan too")
    return parser.parse_args()


def main():
    args = arguments()
    shape = tuple(int(n) for n in args.mesh.split(","))
    sizes = ("dim", "heads", "kv_heads", "ffn", "vocab", "layers", "sequence")
    config = LlamaConfig(**{name: getattr(args, name) for name in sizes})
    device, topology = find_device(args.device), Topology.from_mesh_shape(shape)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    clock = Clock()
    mesh = fake_mesh(shape, device_type="cpu")
    with torch.device("meta"):
        model = Llama(config)
    batch = args.batch * shape[0]
    joint = capture(
        request(
            model, lambda: torch.zeros(batch, config.sequence, dtype=torch.long), mp_policy=policy
        )
    )
    hints = resolve_hints(joint.module, joint.placeholders, joint.module_prefix)
    clock.lap("capture")
    data = (Shard(0), *(Replicate() for _ in shape[1:]))
    free = (Shard(0), *(Shard(2) for _ in shape[1:]))
    constraints = Constraints((data,), (free,), parameter_high=1 / mesh.size())
    settings = Settings(mesh, device, topology, policy.reduce_dtype, fold=not args.no_fold)
    built = build_problem(joint, constraints, settings)
    clock.lap("options")
    found = optimise(built.problem, time_limit_s=args.time_limit, gap=args.gap)
    plan = plan_of(joint, mesh, built, *found)
    clock.lap("solve")
    kinds = collections.Counter()
    if not args.search_only:
        local = apply_plan(joint, plan, mesh)
        clock.lap("shard")
        plan_recompute(local, hints, ACConfig(), device, topology.links(mesh), True)
        clock.lap("recompute")
        for node in local.module.graph.nodes:
            name = str(node.target)
            if name.startswith("_c10d_functional.") and "wait" not in name:
                kinds[name.split(".")[1]] += 1
    if args.show:
        print(plan_table(plan))
    print(
        json.dumps(
            {
                "layers": args.layers,
                "mesh": list(shape),
                "nodes": len(joint.module.graph.nodes),
                "variables": built.problem.variables,
                **clock.steps,
                "total_cpu_s": round(cpu_s() - clock.start, 2),
                "total_wall_s": round(time.monotonic() - clock.wall, 2),
                "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
                "objective_s": plan.objective_s,
                "gap": plan.gap,
                "collectives": dict(kinds),
            }
        )
    )


if __name__ == "__main__":
    main()
