# %% [markdown]
# # Hints in model code: say what is kept where it is computed
#
#     python tutorials/02_hints_in_model_code.py
#
# A hint is a line in the model that says which activations are kept for backward and which are computed
# again. It binds: what the automatic part would have chosen there does not matter. In plain eager and
# under plain `torch.compile` a `with ac_region(...)` does nothing, so that one model serves both.
#
# Everything here runs on one process: `fake_mesh(1)` is a mesh of one device.

# %%
import warnings

import torch
from torch.nn import functional as F

from autop_ac import (
    MATMUL,
    AutoParallel,
    HintError,
    ac_region,
    checkpoint_name,
    every,
    fake_mesh,
    measure_memory,
)

aten = torch.ops.aten
BATCH, LENGTH, DIM, LAYERS = 8, 32, 32, 3

# %% [markdown]
# ## A model to put hints in
#
# `hint` is a method of its own so that the variants below can override it. In a model of yours the `with`
# stands in `forward`.


# %%
class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(DIM)
        self.up = torch.nn.Linear(DIM, 4 * DIM)
        self.down = torch.nn.Linear(4 * DIM, DIM)

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(x)


class Net(torch.nn.Module):
    def __init__(self, block: type[Block]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = torch.nn.Sequential(*(block() for _ in range(LAYERS)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x).tanh()


def batch() -> torch.Tensor:
    return torch.randn(BATCH, LENGTH, DIM, generator=torch.Generator().manual_seed(1))


# %% [markdown]
# `parallelize` goes the whole way. `stage_size=None` turns the automatic part off, so that what is kept is
# the hints' doing alone, and "eager" runs the two graphs node by node.


# %%
def parallel(block: type[Block]) -> tuple[AutoParallel, torch.nn.Module]:
    ap = AutoParallel(Net(block), batch, fake_mesh(1))
    ap.configure_ac(stage_size=None).configure_compile("eager").configure_progress(False)
    return ap, ap.parallelize()


def ops(values: object) -> list[str]:
    """The operators of values, in order of execution."""
    return [str(v.op).split(".")[1] for v in values]


# %% [markdown]
# ## A region that keeps some and recomputes the rest
#
# `save` takes selectors: an operator, a group such as `MATMUL`, or a name. The rest of the region is
# recomputed. What enters the region is kept, as with `torch.utils.checkpoint`. Of the two matmuls here the
# second is not read by backward (its result goes into a sum), so it is neither kept nor recomputed.


# %%
class KeepMatmuls(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with ac_region("mlp", save=[MATMUL]):
            return self.mlp(x)


ap, model = parallel(KeepMatmuls)
told = ap.explain("blocks.1")
print(told)
assert ops(told.saved) == ["addmm", "add"]  # up, and what the next region begins with
assert ops(told.recomputed) == ["native_layer_norm", "gelu"]
assert all(value.origin == "hint" for value in (*told.saved, *told.recomputed))

# %% [markdown]
# It is a matter of memory alone: loss and gradients are those of the model without hints. The report says
# what is kept, and `measure_memory` what really is.

# %%
plain = Net(Block)
inputs = batch()
loss, expected = model(inputs).square().mean(), plain(inputs).square().mean()
loss.backward()
expected.backward()
print(f"loss {loss.item():.6f}, without autop_ac {expected.item():.6f}")
torch.testing.assert_close(loss, expected)
for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
    torch.testing.assert_close(ours.grad.to_local(), theirs.grad)

with measure_memory() as memory:
    out = model(inputs)
    memory.mark("end of forward")
    out.sum().backward()
print(f"kept: predicted {ap.ac_report.kept_bytes:,}, measured {memory.kept_bytes:,} bytes")
assert memory.kept_bytes == ap.ac_report.kept_bytes

# %% [markdown]
# ## All of it again, or all kept
#
# `ac_region()` alone is "recompute all of this". Where only `recompute` is given, the rest is left to the
# later parts: rules, the automatic part, the default. `otherwise` says it outright.


# %%
class Nothing(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with ac_region():
            return self.mlp(x)


class AllButGelu(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with ac_region(recompute=[aten.gelu], otherwise="save"):
            return self.mlp(x)


ap_nothing, _ = parallel(Nothing)
ap_gelu, _ = parallel(AllButGelu)
assert ops(ap_nothing.explain("blocks.1").saved) == ["add"]  # the next region's input alone
assert ops(ap_gelu.explain("blocks.1").recomputed) == ["gelu"]
assert ap_nothing.ac_report.kept_bytes < ap.ac_report.kept_bytes < ap_gelu.ac_report.kept_bytes

# %% [markdown]
# ## Names
#
# Where an operator is too coarse, name the value. `checkpoint_name` gives back the value itself. What a
# `Linear` gives for three dims is a view of its matmul's result. A view holds no memory, so the hint goes to
# what it views.


# %%
class KeepByName(Block):
    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        hidden = checkpoint_name(self.up(self.norm(x)), "hidden")
        return x + self.down(F.gelu(hidden))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with ac_region("mlp", save=["hidden"]):
            return self.mlp(x)


ap_named, _ = parallel(KeepByName)
(hidden,) = [v for v in ap_named.explain("blocks.1").saved if v.module == "blocks.1.up"]
assert hidden.op == "aten.addmm.default"
assert hidden.reason == 'ac_region "mlp" saves hidden, a view of it'
for view in ap_named.explain("hidden").values:  # asked by its name: one in each block
    assert "which is kept" in view.reason

# %% [markdown]
# ## Every second one
#
# `every(n, op)` is the first of each n, counted within one block, so that equal layers are treated alike.


# %%
class EverySecond(Block):
    @ac_region("mlp", save=[every(2, MATMUL)])  # the region as a decorator
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.down_up(torch.relu(self.up(x)))))

    def down_up(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(self.down(x))


ap_second, _ = parallel(EverySecond)
for layer in range(LAYERS - 1):
    told = ap_second.explain(f"blocks.{layer}")
    kept = [v for v in told.saved if v.reason == 'ac_region "mlp" saves MATMUL/2']
    assert [v.module for v in kept] == [f"blocks.{layer}.up"] * 2  # first and third of four

# %% [markdown]
# ## Regions in regions: the inner one wins


# %%
class Inner(Block):
    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        with ac_region("inner", otherwise="save"):
            normed = self.norm(x)
        return x + self.down(F.gelu(self.up(normed)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with ac_region("outer"):
            return self.mlp(x)


ap_inner, _ = parallel(Inner)
normed = ap_inner.explain("blocks.1.norm").saved  # with the mean and deviation that backward reads
assert normed and all(v.reason == 'ac_region "inner" saves all of it' for v in normed)
assert all('"outer"' in v.set_aside[0] for v in normed)  # what was overridden is told
assert ops(ap_inner.explain("blocks.1").recomputed) == ["addmm", "gelu"]

# %% [markdown]
# ## What a hint overrides is told, and so is a hint that misses
#
# A `Linear` with bias is an `addmm`, not an `mm`. `save=[aten.mm]` keeps nothing here, and a warning says so
# and names what would. A region that contradicts itself is an error, with its line.


# %%
class Misses(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with ac_region("mlp", save=[aten.mm]):
            return self.mlp(x)


with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    ap_misses, _ = parallel(Misses)
print(*(w.message for w in caught), sep="\n")
assert any("aten.mm" in str(w.message) and "MATMUL" in str(w.message) for w in caught)
assert {str(w.message) for w in caught} <= set(ap_misses.ac_report.notes)

try:
    ac_region("mlp", save=[aten.gelu], recompute=[aten.gelu])
except HintError as error:
    print(error)
    assert "contradicts itself" in str(error)
else:
    raise AssertionError("a contradiction is refused")

# %% [markdown]
# ## A wish rather than an order
#
# With `prefer=True` a hint holds only as long as the automatic part can meet its limit with it. Here the
# preference is to keep everything, and the budget asks for half.


# %%
class Wish(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with ac_region("mlp", otherwise="save", prefer=True):
            return self.mlp(x)


ap_wish, _ = parallel(Wish)
free = ap_wish.ac_report
half = ap_wish.configure_ac(memory_budget=0.7).preview()
assert half.peak_bytes <= 0.7 * free.peak_without_ac_bytes < free.peak_bytes
assert half.set_aside, "the report names each wish that was not granted"
print(half)
