# %% [markdown]
# # Coming from `torch.utils.checkpoint`, torchtitan's settings, or the public AutoParallel
#
#     python tutorials/08_coming_from_elsewhere.py
#
# What you have, and what it is called here. Most of it need not be changed: checkpoints that are in the model,
# or that another program wraps around its layers, are read as the hints that they are. Each line of the tables
# is tested below it.

# %%
import inspect
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor import Replicate, Shard
from torch.nn import functional as F
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from autop_ac import (
    ATTENTION,
    ACConfig,
    ACReport,
    AutoParallel,
    ac_region,
    auto_parallel,
    autoparallel_backend,
    every,
    fake_mesh,
)

aten = torch.ops.aten
BATCH, LENGTH, DIM, HEADS, LAYERS = 4, 16, 32, 4, 2

# %% [markdown]
# ## A transformer as torchtitan has them: `layers`, no biases


# %%
class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.RMSNorm(DIM)
        self.query_key_value = torch.nn.Linear(DIM, 3 * DIM, bias=False)
        self.project = torch.nn.Linear(DIM, DIM, bias=False)
        self.up = torch.nn.Linear(DIM, 4 * DIM, bias=False)
        self.down = torch.nn.Linear(4 * DIM, DIM, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.query_key_value(self.norm(x)).unflatten(-1, (3, HEADS, DIM // HEADS))
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind(0)
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(out.transpose(1, 2).flatten(2))
        return x + self.down(F.silu(self.up(x)))


Wrapper = Callable[[int, Layer], torch.nn.Module]


class Transformer(torch.nn.Module):
    def __init__(self, wrap: Wrapper = lambda _, layer: layer) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(wrap(i, Layer()) for i in range(LAYERS))

    def init_weights(self) -> None:
        for p in self.parameters():
            torch.nn.init.trunc_normal_(p, std=0.02) if p.dim() == 2 else torch.nn.init.ones_(p)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def batch() -> torch.Tensor:
    return torch.randn(BATCH, LENGTH, DIM)


def planned(wrap: Wrapper) -> AutoParallel:
    """The model with this around its layers, and no automatic part."""
    ap = AutoParallel(Transformer(wrap), batch, fake_mesh(1)).configure_ac(stage_size=None)
    with ap.configure_compile("eager").configure_progress(False):
        ap.optimize_placement()
    return ap


def reported(wrap: Wrapper) -> ACReport:
    return planned(wrap).ac_report


def kept(report: ACReport) -> Counter[tuple[str, str]]:
    """What is kept: module path and operator of each value."""
    return Counter((v.module, v.op) for v in report.saved)


# %% [markdown]
# ## From `torch.utils.checkpoint`
#
# | you have | here |
# |---|---|
# | `checkpoint(f, x, use_reentrant=False)` | the same, read as a hint; or `with ac_region():` |
# | `context_fn=` with a list of operators | the same; or `ac_region(save=[...])` |
# | a policy with MUST_SAVE, MUST_RECOMPUTE | the same; or `save=`, `recompute=` |
# | a policy with PREFER_... | the same; or `prefer=True` |
# | `checkpoint_wrapper(layer)` | the same: it leaves neither names nor paths changed |
# | `preserve_rng_state`, `early_stop` | not needed: masks come from seeds, only what backward reads is run |


# %%
class Around(torch.nn.Module):
    """Calls a layer under something."""

    def __init__(self, layer: Layer, call: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.call = layer, call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.call(self.layer, x)


def in_region(save: list[Any]) -> Callable[..., torch.Tensor]:
    def call(layer: Layer, x: torch.Tensor) -> torch.Tensor:
        with ac_region("layer", save=save):
            return layer(x)

    return call


def around(call: Callable[..., torch.Tensor]) -> Wrapper:
    return lambda _, layer: Around(layer, call)


full = reported(around(in_region([])))
assert len(full.saved) == LAYERS - 1, "what enters each layer; the first reads the input"
assert kept(reported(around(partial(checkpoint, use_reentrant=False)))) == kept(full)

matmuls = [aten.mm.default]
contexts = partial(create_selective_checkpoint_contexts, matmuls)
selective = partial(checkpoint, use_reentrant=False, context_fn=contexts)
listed = reported(around(selective))
products = [v for v in listed.saved if v.op == "aten.mm.default"]
assert products and {v.origin for v in products} == {"hint"}
assert len(listed.saved) == len(full.saved) + len(products)

# %% [markdown]
# ## From torchtitan's `activation_checkpoint`
#
# | `mode` | here |
# |---|---|
# | `"none"` | `enable=False` |
# | `"full"` | checkpoints around the layers stay; or `ac_region()` in the layer; or the rule `layers.*=checkpoint` |
# | `"selective"`, option `"op"` | `ac_region(save=[every(2, aten.mm), ATTENTION, ...])`, or rules |
# | `"selective"`, option `"2"` (every second layer) | rules on a part of the layers, `"layers.*[13579]..."` |
# | `"memory_budget"`, `memory_budget=0.5` | `memory_budget=`; see below |
# | `per_op_sac_force_recompute_mm_shapes_by_fqns` | a rule, `"**.router.gate::aten.mm=recompute"`, before the others |
#
# "Every second" counts as there: of a layer's matmuls the first and the third are kept.


# %%
def every_second_matmul() -> Any:
    """A policy of the form that torchtitan gives to `context_fn`."""
    seen = Counter[str]()

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        phase = "recompute" if ctx.is_recompute else "forward"
        if op == aten.mm.default:
            seen[phase] += 1
            if seen[phase] % 2 == 1:
                return CheckpointPolicy.MUST_SAVE
        if "attention" in str(op):
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


per_op = [every(2, aten.mm), ATTENTION]
by_region = reported(around(in_region(per_op)))
titan = reported(lambda _, layer: checkpoint_wrapper(layer, context_fn=every_second_matmul))
assert [(v.op, v.bytes) for v in titan.saved] == [(v.op, v.bytes) for v in by_region.saved]
assert all(
    ".".join(v.module.split(".")[:2]) in dict(Transformer().named_modules()) for v in titan.saved
)
products = [v.module for v in titan.saved if v.op == "aten.mm.default"]
assert products[:2] == ["layers.0.query_key_value", "layers.0.up"]

# without a line in the model; the first sum of each layer is what backward starts from (`aten.add` alone
# would mean the one inside of RMSNorm too)
untouched = planned(lambda _, layer: layer)
plain = untouched.ac_report


def with_rules(*rules: str) -> ACReport:
    return untouched.configure_ac(stage_size=None, rules=rules).preview()


by_rules = with_rules(
    "layers.*::aten.mm/2=save",
    "layers.*::ATTENTION=save",
    "layers.*::aten.add.Tensor/2=save",
    "layers.*=recompute",
)
assert [v.module for v in by_rules.saved if v.op == "aten.mm.default"] == products
assert by_rules.kept_bytes < plain.kept_bytes

# forced recomputation of some: a rule before the others
forced = with_rules("layers.*.up::aten.mm=recompute", "layers.*::aten.mm=save")
assert [v.module.split(".")[2] for v in forced.saved if v.op == "aten.mm.default"] != []
assert not any(v.module.endswith(".up") for v in forced.saved)
assert any(v.module.endswith(".up") for v in plain.saved)

# every second layer: a glob of those with an odd number
by_layer = with_rules("layers.*[13579]::aten.add.Tensor/2=save", "layers.*[13579]=recompute")
assert [v.op for v in by_layer.saved if v.module.startswith("layers.1")] == ["aten.add.Tensor"]
even = [[v for v in r.saved if v.module.startswith("layers.0.")] for r in (by_layer, plain)]
assert even[0] == even[1] != []

# %% [markdown]
# ### Budgets: three numbers that are called so
#
# - torchtitan's `memory_budget`, PyTorch's `torch._functorch.config.activation_memory_budget`: a fraction of the
#   bytes *kept for backward*, from 0 (all recomputed) to 1.
# - here a float is a fraction of the predicted *peak* with nothing recomputed: parameters, gradients and
#   temporaries count, because they are what fills a device. Bytes (`"40 GiB"`) are what one usually means.
#
# PyTorch's is not used where ours decides, and a warning says so.

# %%
within = untouched.configure_ac(memory_budget=0.8).preview()
assert within.peak_bytes <= within.budget_bytes
in_bytes = untouched.configure_ac(memory_budget=within.budget_bytes).preview()
assert in_bytes.saved == within.saved
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    with torch._functorch.config.patch(activation_memory_budget=0.5):  # noqa: TID251 as one sets it
        unchanged = with_rules()
assert unchanged == plain
assert any("set configure_ac(memory_budget=...) instead" in str(w.message) for w in caught)

# %% [markdown]
# ## From the public AutoParallel of meta-pytorch
#
# A script written for it runs with the import changed. Names and order of arguments are the same; what has
# another name:
#
# | there | here |
# |---|---|
# | `from autoparallel.api import AutoParallel, auto_parallel` | `from autop_ac import ...` |
# | `AutoParallel(..., compile=True)`, `False` | `.configure_compile("inductor")` (the default), `"eager"` |
# | `AutoParallel(..., enable_ac=False)` | `.configure_ac(enable=False)` |
# | `AutoParallel(..., ac_stage_size_in_GiB=2.0)` | `.configure_ac(stage_size="2 GiB")` |
# | `autoparallel_backend(enable_ac=, ac_stage_size_in_GiB=)` | the same, or `backend(...)` with all settings |
# | `autoparallel_backend(overlap_scheduling=True)` | accepted; collectives of parameters overlap by default (`.configure_comm(prefetch=...)`) |
# | `torch._functorch.config.joint_custom_pass` for AC | not needed: no global setting takes part |
# | meta device alone | real weights too, which are sharded in |
#
# `dynamic=True` traces a size at its first call, where the public one has symbolic sizes. What is not there: pipeline
# stages (`AutoParallelPP`).

# %%
ORDER: dict[Callable[..., Any], list[str]] = {
    AutoParallel: ["model", "input_fn", "mesh", "mp_policy"],
    AutoParallel.add_input_constraints: ["self", "placements"],
    AutoParallel.add_output_constraints: ["self", "placements"],
    AutoParallel.add_parameter_memory_constraint: ["self", "low", "high"],
    AutoParallel.optimize_placement: ["self", "verbose"],
    AutoParallel.apply_placement: ["self", "plan"],
    auto_parallel: ["model", "mesh", "sample_inputs", "out_shardings"],
}
for call, names in ORDER.items():
    assert list(inspect.signature(call).parameters)[: len(names)] == names
in_one_call = inspect.signature(auto_parallel).parameters.keys()
assert {"mp_policy", "parameter_memory_budget", "dynamic"} <= in_one_call
assert "ac" in in_one_call  # and an ACConfig
of_backend = inspect.signature(autoparallel_backend).parameters.keys()
assert of_backend == {"enable_ac", "ac_stage_size_in_GiB", "overlap_scheduling"}

COMPILERS = {True: "inductor", False: "eager"}
STAGE_SIZES = {"auto": "auto", None: "auto", 2.0: "2 GiB", 0.5: "512 MiB"}
for there, here in STAGE_SIZES.items():
    settings = autoparallel_backend(ac_stage_size_in_GiB=there).ac
    assert settings.stage_bytes == ACConfig(stage_size=here).stage_bytes
assert autoparallel_backend(enable_ac=False).ac == ACConfig(enable=False)
assert autoparallel_backend(overlap_scheduling=False).ac == autoparallel_backend().ac

with torch.device("meta"):
    model = Transformer()
mesh = fake_mesh(1, ["dp"])
x_sharding = (Shard(0),) + (Replicate(),) * (mesh.ndim - 1)

with AutoParallel(model, batch, mesh, None).configure_compile(COMPILERS[False]) as autop:
    autop.add_parameter_memory_constraint(low=None, high=None)
    autop.add_input_constraints([x_sharding])
    autop.add_output_constraints([x_sharding])
    sharding_placement = autop.optimize_placement(verbose=False)
    parallel_mod = autop.apply_placement(sharding_placement)

parallel_mod.to_empty(device="cpu")
torch.manual_seed(0)
parallel_mod.init_weights()
parallel_mod = torch.compile(
    parallel_mod, backend=autoparallel_backend()
)  # it stays as it was made
x = batch()
loss = parallel_mod(x).square().mean()
loss.backward()

single = Transformer()
torch.manual_seed(0)
single.init_weights()
expected = single(x).square().mean()
expected.backward()
print(f"loss {loss.item():.6f}, on one device {expected.item():.6f}")
torch.testing.assert_close(loss, expected)
for ours, theirs in zip(parallel_mod.parameters(), single.parameters(), strict=True):
    torch.testing.assert_close(ours.grad.to_local(), theirs.grad)
