# %% [markdown]
# # Rules: the same without touching the model
#
#     python tutorials/03_rules_without_touching_the_model.py
#
# A model of someone else's, or one that several runs share, is steered from outside: by rules in the
# settings, in a TOML file, or on the command line. A rule is `MODULE::SELECTOR=ACTION`, and either of
# module and selector may be left out.
#
# Nothing is run in this tutorial: it plans for eight H100 that are not there.

# %%
import argparse
import tempfile
from pathlib import Path

import torch
from torch.distributed.tensor import Shard
from torch.nn import functional as F

from autop_ac import ACConfig, ACReport, AutoParallel, ConfigError, Rule, ac_region, fake_mesh

BATCH, LENGTH, DIM, HEADS, LAYERS = 64, 64, 64, 4, 4

# %% [markdown]
# ## A transformer
#
# One region is in it, so that rules meet a hint. All else is as it was written for one device.


# %%
class Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query_key_value = torch.nn.Linear(DIM, 3 * DIM, bias=False)
        self.project = torch.nn.Linear(DIM, DIM, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.query_key_value(x).unflatten(-1, (3, HEADS, DIM // HEADS))
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind(0)
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.project(out.transpose(1, 2).flatten(2))


class MLP(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(DIM, 4 * DIM, bias=False)
        self.down = torch.nn.Linear(4 * DIM, DIM, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with ac_region("activation", otherwise="auto", recompute=[torch.ops.aten.gelu]):
            return self.down(F.gelu(self.up(x)))


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = torch.nn.LayerNorm(DIM), torch.nn.LayerNorm(DIM)
        self.attention, self.mlp = Attention(), MLP()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Transformer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


# %% [markdown]
# ## One plan, many settings
#
# The search for placements takes the time; it is done once. `configure_ac(...).preview()` is the report
# under other settings, on the same plan.

# %%
with torch.device("meta"):  # no memory for weights
    model = Transformer()


def input_fn() -> torch.Tensor:
    return torch.empty(BATCH, LENGTH, DIM, device="meta")


ap = AutoParallel(model, input_fn, fake_mesh(8, ["dp"])).configure_device("H100")
with ap.configure_compile("eager"):
    ap.add_input_constraints([(Shard(0),)])
    ap.add_output_constraints([(Shard(0),)])
    plan = ap.optimize_placement()


def under(*rules: str | Rule) -> ACReport:
    """The report with these rules and no automatic part."""
    return ap.configure_ac(stage_size=None, rules=rules).preview()


def kept(report: ACReport, module: str) -> list[str]:
    """What is kept of a module: the last part of the module path, and the operator."""
    values = report.explain(module).saved
    return [f"{v.module.rpartition('.')[2]}:{v.op.split('.')[1]}" for v in values]


nothing_said = under()
print("kept of a layer without rules:", kept(nothing_said, "layers.1"))

# %% [markdown]
# ## By module
#
# The module is a glob on the paths of your own model, and stands for everything below what it matches.
# `*` does not cross a dot, `**` does.
#
# `=recompute` keeps nothing, not even what enters a layer. So with `layers.*=recompute` alone
# backward begins by making everything again, and all of it is alive at once: no bytes are kept, and the peak
# is *higher*. What `torch.utils.checkpoint` around each layer does is `layers.*=checkpoint`: what enters a layer
# is kept, the rest of it recomputed.

# %%
full = under("layers.*=recompute")
print("kept of a layer with layers.*=recompute:", kept(full, "layers.1"))
assert full.kept_bytes == 0
assert all(v.origin == "rule" for v in full.explain("layers.1.mlp.up").values)

around = under("layers.*=checkpoint")
assert {v.reason for v in around.saved} == {'rule "layers.*=checkpoint" keeps what enters'}
assert len(around.saved) == LAYERS - 1  # what enters the first is an input, there anyway
assert around.peak_bytes < nothing_said.peak_bytes < full.peak_bytes

mlps = under("layers.*.mlp=recompute")
assert kept(mlps, "layers.1.mlp") == []
assert kept(mlps, "layers.1.attention") == kept(nothing_said, "layers.1.attention")
assert under("**.mlp=recompute").saved == mlps.saved  # at any depth: here the same modules

# %% [markdown]
# ## By operator, and both together
#
# Of several rules the first that matches a value holds, so the narrow ones come first.

# %%
# two sums in each layer, on the way past attention and past the MLP: keep the first
per_layer = under("layers.*::aten.add/2=save", "layers.*=recompute")
assert kept(per_layer, "layers.1") == ["1:add"]
assert per_layer.peak_bytes < nothing_said.peak_bytes < full.peak_bytes

RULES = (
    "layers.*.attention::aten.mm=save",
    "layers.*::aten.add/2=save",
    "layers.*=recompute",
)
both = under(*RULES)
assert "query_key_value:mm" in kept(both, "layers.1")
assert "up:mm" not in kept(both, "layers.1")
assert per_layer.kept_bytes < both.kept_bytes < nothing_said.kept_bytes

second = under("::aten.mm/2=save", "layers.*=recompute")
matmuls = [v.module for v in second.saved if v.op == "aten.mm.default"]
assert "layers.1.attention.query_key_value" in matmuls and "layers.1.mlp.up" in matmuls
assert "layers.1.attention.project" not in matmuls, "the second of four"

as_object = Rule("layers.*.attention", "aten.mm", "save")
assert str(as_object) == "layers.*.attention::aten.mm=save"
assert under(as_object, *RULES[1:]) == both

# %% [markdown]
# ## Hints in the model go before rules
#
# The region in `MLP` asks for `gelu` to be recomputed. A rule against it is set aside, and the report says so.

# %%
against = under("layers.*.mlp::aten.gelu=save")
assert "mlp:gelu" not in kept(against, "layers.1")
(aside,) = [a for a in against.set_aside if a.asked == "save"]
print(aside.reason, "in", aside.module, "is set aside, decided by", aside.decided_by)
assert "gelu" in aside.reason and aside.decided_by.startswith("hint")

# %% [markdown]
# ## Slips are told
#
# A rule that matches nothing is a warning (in the notes of a preview, raised by `apply_placement`), with the
# nearest module or selector. What cannot be meant is an error when it is set.

# %%
note = under("layer.*=recompute").notes
print(*note)
assert any("matches none of" in n and "layers.*" in n for n in note)
for wrong in ("layers.*::aten.mn=save", "layers.*=keep", "aten.mm=save"):
    try:
        ACConfig(rules=[wrong])
    except ConfigError as error:
        print(f"{wrong}: {error}")
    else:
        raise AssertionError(wrong)

# %% [markdown]
# ## From a file, and from flags
#
# The names are those of `ACConfig`. A program of your own adds the same flags to its command line.

# %%
with tempfile.TemporaryDirectory() as folder:
    file = Path(folder) / "ac.toml"
    file.write_text(
        'stage_size = "none"\n'
        "rules = [\n"
        '    "layers.*.attention::aten.mm=save",\n'
        '    "layers.*::aten.add/2=save",\n'
        '    "layers.*=recompute",\n'
        "]\n"
    )
    from_file = ACConfig.from_toml(file)
assert ap.configure_ac(from_file).preview() == both

parser = argparse.ArgumentParser()
ACConfig.add_arguments(parser, "ac-")
words = ["--ac-stage-size", "none", "--ac-rule", "layers.*=recompute"]
from_flags = ACConfig.from_args(parser.parse_args(words), "ac-")
assert ap.configure_ac(from_flags).preview() == full

# %% [markdown]
# ## What it comes to
#
# A table of the settings tried. On the command line `autop-ac compare` prints one such. What is kept and what
# is recomputed trade off; the peak follows neither of them alone.

# %%
settings = {
    "no rule": nothing_said,
    "nothing kept": full,
    "per layer": per_layer,
    "both": both,
    "around": around,
}
for name, report in settings.items():
    print(
        f"{name:12} kept {report.kept_bytes:>10,} bytes, peak {report.peak_bytes:>10,},"
        f" recomputation {report.recompute_s * 1e6:.1f} us"
    )
assert min(settings.values(), key=lambda r: r.peak_bytes) is around
assert nothing_said.recompute_s < both.recompute_s < per_layer.recompute_s < full.recompute_s
