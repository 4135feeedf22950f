# %% [markdown]
# # Shardings: where tensors lie, and how to say it
#
#     python tutorials/05_shardings_and_constraints.py
#
# A plan gives every tensor a placement on the mesh. It is searched for by predicted time; what you know better
# you fix, by a call outside or a line in the model, and the search does the rest. This tutorial plans for eight
# devices that are not there, four for data and two for tensors.

# %%
import math
import tempfile
from pathlib import Path

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Replicate, Shard

from autop_ac import (
    AutoParallel,
    ConfigError,
    InfeasibleError,
    ShardingPlan,
    UsageError,
    fake_mesh,
    plan_table,
    with_sharding_constraint,
)

R, S0, S1 = Replicate(), Shard(0), Shard(1)
BATCH, DIM, LAYERS = 16384, 1024, 2


class MLP(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(DIM, 4 * DIM)
        self.down = torch.nn.Linear(4 * DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def opened(
    layer: type[MLP] = MLP, width: int = 1, policy: MixedPrecisionPolicy | None = None
) -> AutoParallel:
    """The model on the mesh, to be entered by `with`; no memory is used, and nothing is compiled."""
    mesh = fake_mesh((4, 2), ["dp", "tp"])
    with torch.device("meta"):
        model = torch.nn.Sequential(*(layer() for _ in range(LAYERS * width)))
    ap = AutoParallel(model, lambda: torch.empty(BATCH, DIM, device="meta"), mesh, policy)
    return ap.configure_device("H100").configure_progress(False)


# %% [markdown]
# ## The plan without a word
#
# The batch is cut along the first axis; of so small a model parameters are cut where that takes no longer. A note
# of the plan says what was assumed.

# %%
with opened() as ap:
    free = ap.optimize_placement()
print(plan_table(free))
print(*free.notes, sep="\n")
assert free.mesh_shape == (4, 2) and free.axis_names == ("dp", "tp")
assert any("no limit on memory" in note for note in free.notes)


with torch.device("meta"):
    parameters = dict(torch.nn.Sequential(*(MLP() for _ in range(LAYERS))).named_parameters())
whole = sum(p.nbytes for p in parameters.values())


def held_bytes(plan: ShardingPlan) -> int:
    """Parameter bytes of one device."""
    total = 0
    for name, placements in plan.parameters.items():
        axes = zip(plan.mesh_shape, placements, strict=True)
        total += parameters[name].nbytes // math.prod(n for n, p in axes if p.is_shard())
    return total


# %% [markdown]
# ## Inputs, outputs, and bytes
#
# One entry for each tensor, one placement for each mesh axis; `None` leaves a tensor free.
# `add_parameter_memory_constraint(low, high)` bounds the parameter bytes of a device as fractions of all:
# `high` of one eighth is fully sharded, as FSDP over all devices does it.

# %%
with opened() as ap:
    ap.add_input_constraints([(S0, R)])
    ap.add_output_constraints([(S0, R)])
    ap.add_parameter_memory_constraint(0.0, 1 / 8)
    sharded = ap.optimize_placement()
print(plan_table(sharded))
assert held_bytes(sharded) == whole // 8
assert held_bytes(free) >= held_bytes(sharded)
assert sharded.objective_s >= free.objective_s  # what is fixed does not make a step faster

# %% [markdown]
# In bytes, with gradients and the optimizer's state: `add_state_memory_constraint`. Here each device may hold a
# quarter of parameter, gradient, and two values of AdamW.

# %%
with opened() as ap:
    ap.add_state_memory_constraint(whole * 4 // 4, optimizer="adamw")
    quarter = ap.optimize_placement()
assert held_bytes(quarter) <= whole // 4

# %% [markdown]
# ## A value in the model
#
# `with_sharding_constraint` fixes where a value lies, and its gradient with it. Nothing of it is left in what
# runs, and without a mesh it does nothing. Here the hidden activations are cut along "tp", and the weight that
# makes them follows: each device has some of its rows, as in tensor parallelism by hand.


# %%
class TensorParallel(MLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = with_sharding_constraint(self.up(x), (S0, S1))
        return x + self.down(torch.relu(hidden))


plain, constrained = MLP(), TensorParallel()
constrained.load_state_dict(plain.state_dict())
x = torch.randn(4, DIM)
assert torch.equal(plain(x), constrained(x))

with opened(TensorParallel) as ap:
    ap.add_parameter_memory_constraint(0.0, 1.0)
    tensor = ap.optimize_placement()
print(plan_table(tensor))
assert all(tensor.parameters[f"{i}.up.weight"] == (R, S0) for i in range(LAYERS))

# %% [markdown]
# ## A module, or one node, from outside
#
# `add_module_constraint` says what modules hand to others in forward, by a glob on their paths. It costs
# the same here. `add_node_constraint` fixes a single node of the captured graph, or a parameter.

# %%
with opened() as ap:
    ap.add_parameter_memory_constraint(0.0, 1.0)
    ap.sharding_optimizer.add_module_constraint("*.up", (S0, S1))
    outside = ap.optimize_placement()
assert all(outside.parameters[f"{i}.up.weight"] == (R, S0) for i in range(LAYERS))
assert abs(outside.objective_s - tensor.objective_s) <= 0.01 * tensor.objective_s

with opened() as ap:
    ap.sharding_optimizer.add_node_constraint("0.down.weight", (S1, R))
    one = ap.optimize_placement()
assert one.parameters["0.down.weight"] == (S1, R)

# %% [markdown]
# ## Why
#
# `explain()` of a plan gives the mesh axes, of a parameter each other placement with what it would cost; with a
# placement, the best plan that has it.

# %%
print(sharded.explain())
reasons = sharded.explain("0.up.weight")
print(reasons)
(reason,) = reasons.nodes
assert reason.chosen == sharded.parameters["0.up.weight"]
other = sharded.explain("0.up.weight", (S0, S1) if reason.chosen != (S0, S1) else (S1, S0))
print(other)
assert other.difference is not None or other.why_not

# %% [markdown]
# ## Two plans, and a plan in a file
#
# `diff` says what moved and what it costs. A file has a fingerprint of the captured graph: on another model it is
# refused.

# %%
difference = free.diff(sharded)
print(difference)
assert difference.parameters
assert abs(difference.objective_s - (sharded.objective_s - free.objective_s)) < 1e-9

with tempfile.TemporaryDirectory() as folder:
    file = Path(folder) / "plan.json"
    sharded.save(file)
    loaded = ShardingPlan.load(file)
assert loaded == sharded
with opened() as ap:
    print(ap.preview(loaded).estimate("adamw"))  # no search
    assert ap.ac_report.kept_bytes > 0
with opened(width=2) as ap:
    try:
        ap.preview(loaded)
    except UsageError as error:
        print(error)
        assert "another model" in str(error)
    else:
        raise AssertionError("a plan of another model is refused")

# %% [markdown]
# ## What cannot be is told
#
# A constraint that does not fit is an error when it is given; constraints that no plan meets together are named
# with what would do.

# %%
with opened() as ap:
    try:
        ap.add_input_constraints([(S0,)])
    except ConfigError as error:
        print(error)
        assert "the mesh has 2 axes" in str(error)
    else:
        raise AssertionError("one placement for two axes")
    ap.add_state_memory_constraint(whole * 4 // 16)  # eight devices hold an eighth each at least
    try:
        ap.optimize_placement()
    except InfeasibleError as error:
        print(error)
        assert "state memory" in str(error)
        assert error.smallest_bytes == whole * 4 // 8
    else:
        raise AssertionError("a sixteenth on eight devices")

# %% [markdown]
# ## In which dtype gradients are summed
#
# `MixedPrecisionPolicy` is FSDP2's: `param_dtype` for computing, `reduce_dtype` for the sums over devices. With
# bfloat16 the gathers move half the bytes, so that the same placements take less time.

# %%
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
with opened(policy=policy) as ap:
    ap.add_parameter_memory_constraint(0.0, 1 / 8)
    mixed = ap.optimize_placement()
assert held_bytes(mixed) == whole // 8  # the shards stay float32
assert mixed.objective_s < sharded.objective_s
