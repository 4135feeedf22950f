# %% [markdown]
# # One device: activation checkpointing under `torch.compile`
#
#     python tutorials/07_one_device_with_torch_compile.py
#
# No mesh and no sharding: `autop_ac.backend(...)` is a backend of `torch.compile` that takes the same hints,
# rules, stages and budgets, and gives the same report. Inductor compiles what it decides.

# %%
import torch
from torch.nn import functional as F

import autop_ac
from autop_ac import MATMUL, ac_region, measure_memory

BATCH, DIM, LAYERS = 512, 64, 3


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(DIM)
        self.up = torch.nn.Linear(DIM, 4 * DIM)
        self.down = torch.nn.Linear(4 * DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with ac_region("block", save=[MATMUL]):
            return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.head = torch.nn.Linear(DIM, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(x))


torch.manual_seed(0)
model = Net()
x, target = torch.randn(BATCH, DIM), torch.randint(8, (BATCH,))


def step(call: torch.nn.Module) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A loss and its gradients."""
    model.zero_grad()
    loss = F.cross_entropy(call(x), target)
    loss.backward()
    return loss.detach(), [p.grad.clone() for p in model.parameters()]


# %% [markdown]
# ## The same numbers
#
# Make one backend for each model. The settings are those of `configure_ac`.

# %%
ac = autop_ac.backend(stage_size=None)  # hints alone
compiled = torch.compile(model, backend=ac)
loss, gradients = step(compiled)
expected, wanted = step(model)
print(f"loss {loss.item():.6f}, in eager {expected.item():.6f}")
torch.testing.assert_close(loss, expected)
for got, want in zip(gradients, wanted, strict=True):
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)

# %% [markdown]
# ## The report
#
# Of the graph that was compiled last; `ac.reports` has one for each graph with a backward.

# %%
report = ac.ac_report
print(report)
assert len(ac.reports) == 1
kept = [v for v in report.saved if v.module.startswith("blocks.")]
assert {v.reason for v in kept} == {'enters ac_region "block"', 'ac_region "block" saves MATMUL'}
print(report.explain("blocks.1"))
assert not any(v.op.startswith("aten.gelu") for v in report.explain("blocks.1").saved)

# %% [markdown]
# ## A budget
#
# `compile="eager"` runs the graphs node by node, without Inductor. Then predicted bytes are the measured ones.
# Another policy is another backend, and compiles again.

# %%
off = autop_ac.backend(compile="eager", enable=False)
budget = autop_ac.backend(compile="eager", memory_budget=0.75)
measured = {}
for name, backend in {"off": off, "budget": budget}.items():
    torch.compiler.reset()  # the same model under another backend
    call = torch.compile(model, backend=backend)
    loss, gradients = step(call)
    torch.testing.assert_close(loss, expected)
    for got, want in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(got, want)
    model.zero_grad()
    with measure_memory() as memory:
        out = call(x)
        memory.mark("end of forward")
        out.sum().backward()
    print(name, backend.ac_report.beside(memory), sep="\n")
    measured[name] = memory
    kept_bytes = backend.ac_report.kept_bytes + out.nbytes  # what forward gives is alive too
    assert memory.kept_bytes == kept_bytes

peak = budget.ac_report.peak_bytes
assert peak <= 0.75 * off.ac_report.peak_bytes
assert measured["budget"].peak_bytes < measured["off"].peak_bytes

# %% [markdown]
# ## Without gradients nothing is kept
#
# A call under `no_grad` is compiled as it is and adds no report. Hints do nothing under other backends.

# %%
with torch.no_grad():
    torch.testing.assert_close(call(x), model(x))
assert len(budget.reports) == 1
torch.compiler.reset()
other = torch.compile(model, backend="aot_eager")
torch.testing.assert_close(step(other)[0], expected)
assert len(budget.reports) == 1
