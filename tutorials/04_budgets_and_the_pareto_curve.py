# %% [markdown]
# # Budgets: the least recomputation that fits
#
#     python tutorials/04_budgets_and_the_pareto_curve.py
#
# Hints say *what* is kept. A budget says *how much memory there is* and leaves the rest to a solver: of all
# ways to stay within it, one with least recompute time. The curve of peak against recompute time shows what
# each byte costs.
#
# Run on one process, on a mesh of one device, so that predicted peaks can be set beside measured ones.

# %%
import dataclasses

import torch
from torch.nn import functional as F

from autop_ac import ACConfig, AutoParallel, DeviceSpec, InfeasibleError, fake_mesh, measure_memory
from autop_ac.report.text import size

BATCH, DIM, LAYERS = 512, 64, 4


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(DIM)
        self.up = torch.nn.Linear(DIM, 4 * DIM)
        self.down = torch.nn.Linear(4 * DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


torch.manual_seed(0)
model = torch.nn.Sequential(*(Block() for _ in range(LAYERS)))
x = torch.randn(BATCH, DIM)

ap = AutoParallel(model, lambda: x, fake_mesh(1)).configure_compile("eager")
with ap.configure_progress(False):
    plan = ap.optimize_placement()

# %% [markdown]
# ## What it takes without a limit
#
# `enable=False` turns activation checkpointing off: what PyTorch's own partitioner keeps is kept, here all
# that backward reads. The prediction names who holds the peak.

# %%
off = ap.configure_ac(enable=False).preview()
print(ap.estimate("adamw"))
assert off.peak_bytes == off.peak_without_ac_bytes
assert off.recompute_s == 0
state = sum(2 * p.nbytes for p in model.parameters())
assert ap.estimate("adamw").peak_bytes == off.peak_bytes + state

# %% [markdown]
# ## A budget
#
# As text with a unit, an int of bytes, or a fraction of the peak with nothing recomputed. A budget is rounded down and replaces
# stages. `budget_gap` is how far the recompute time can be above the least possible.

# %%
tight = ap.configure_ac(memory_budget=0.7).preview()
print(tight)
assert tight.budget_bytes == int(0.7 * tight.peak_without_ac_bytes)
assert tight.peak_bytes <= tight.budget_bytes
assert tight.recompute_s > 0 and tight.budget_gap >= 0
same = ap.configure_ac(memory_budget=tight.budget_bytes).preview()
assert same.saved == tight.saved

# %% [markdown]
# Stages recompute by a size, with no limit to hold. The budget at their peak takes no longer.

# %%
stages = ap.configure_ac(stage_size="auto").preview()
at_their_peak = ap.configure_ac(memory_budget=stages.peak_bytes).preview()
print(f"stages: peak {size(stages.peak_bytes)}, {stages.recompute_s * 1e6:.1f} us")
print(f"budget at that peak: {at_their_peak.recompute_s * 1e6:.1f} us")
assert stages.peak_bytes < off.peak_bytes
assert at_their_peak.peak_bytes <= stages.peak_bytes
assert at_their_peak.recompute_s <= stages.recompute_s

# %% [markdown]
# ## The curve
#
# Points of growing peak and falling recompute time, each with the setting that reaches it.
# `ap.ac_report.plot_pareto(curve)` draws it (extra `viz`), and the saved page has it too.

# %%
curve = ap.pareto(depth=2)
print(curve)
peaks = [p.peak_bytes for p in curve]
times = [p.recompute_time_s for p in curve]
assert peaks == sorted(set(peaks)) and times == sorted(set(times), reverse=True)
assert len(curve) > 3 and times[-1] == 0

# %% [markdown]
# To run a point, give its peak as the budget.

# %%
settings = ACConfig(optimizer=None)
point = curve[1]
chosen = dataclasses.replace(settings, memory_budget=point.peak_bytes)
report = ap.configure_ac(chosen).preview()
assert report.peak_bytes <= point.peak_bytes
assert report.recompute_s <= point.recompute_time_s * (1 + 1e-9)

# %% [markdown]
# ## Too little is an error with the least that can be
#
# Nothing is guessed: the smallest peak that can be reached is in the message and in the exception.

# %%
try:
    ap.configure_ac(memory_budget="1 MiB").preview()
except InfeasibleError as error:
    print(error)
    least = error.smallest_bytes
else:
    raise AssertionError("1 MiB is too little")
assert least <= peaks[0]
assert ap.configure_ac(memory_budget=least).preview().peak_bytes <= least

# %% [markdown]
# ## The device as the budget
#
# `memory_budget="device"` is nine tenths of the described device's memory. Where all fits, nothing is
# recomputed; on a smaller device as much as it takes. `optimizer=` counts its state.

# %%
flops = {torch.float32: 1e12}
roomy = DeviceSpec("roomy", flops, memory_bandwidth=1e11, memory_bytes=2 * off.peak_bytes)
small = DeviceSpec("small", flops, memory_bandwidth=1e11, memory_bytes=off.peak_bytes)
fits = ap.configure_device(roomy).configure_ac(memory_budget="device").preview()
assert fits.recompute_s == 0
forced = ap.configure_device(small).preview()
assert forced.budget_bytes == off.peak_bytes * 9 // 10
assert forced.recompute_s > 0 and ap.estimate().fits

# %% [markdown]
# ## Beside reality
#
# The module is made and run under the tight budget. The peak predicted is the peak measured, and gradients
# are those of the model without it.

# %%
parallel = ap.configure_device("cpu").configure_ac(memory_budget=0.7).apply_placement(plan)
parallel(x).square().mean().backward()
loss = model(x).square().mean()
loss.backward()
for ours, theirs in zip(parallel.parameters(), model.parameters(), strict=True):
    torch.testing.assert_close(ours.grad.to_local(), theirs.grad)

parallel.zero_grad()
grad = torch.ones_like(x)  # made before, since what the block allocates is counted
with measure_memory() as memory:
    out = parallel(x)
    memory.mark("end of forward")
    out.backward(grad)
beside = ap.ac_report.beside(memory)
print(beside)
print(f"loss {loss.item():.6f}")
always = sum(p.nbytes for p in model.parameters()) + x.nbytes
assert memory.peak_bytes + always == ap.ac_report.peak_bytes
