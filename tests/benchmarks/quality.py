"""Recompute time of several policies at equal or lower predicted peak, on graphs of real models.

All policies are priced by the same facts, liveness and order of recomputation: what differs is what they
keep. PyTorch's memory budget is asked for a row of budgets with each solver, and what it keeps is taken as
its answer; the two policies of fixed form are written as rules.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import Replicate, Shard

from autop_ac import AutoParallel, checkpoint_name, fake_mesh
from autop_ac.graph.liveness import backward_order, profile
from autop_ac.recompute import default
from autop_ac.recompute.pipeline import Recompute, pareto_of
from autop_ac.recompute.verify import closure
from tests.benchmarks.llama import Llama, LlamaConfig
from tests.gpt import GPT, GPTConfig

BUDGETS = tuple(i / 20 for i in range(1, 20))
# what PyTorch runs by its cost model must not depend on this machine
_ESTIMATOR = {"activation_memory_budget_runtime_estimator": "flops"}
FULL = ("::block_input=save", "BLOCKS.*=recompute")
EVERY_SECOND = ("::block_input=save", "BLOCKS.*::MATMUL/2=save", "BLOCKS.*=recompute")


class MarkedLlama(Llama):
    def forward(self, tokens):
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(checkpoint_name(x, "block_input"), self.cos, self.sin)
        return self.output(self.norm(x))


class MarkedGPT(GPT):
    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(checkpoint_name(x, "block_input"))
        return self.head(x)


@dataclass(frozen=True)
class Case:
    """A model on a mesh; `blocks` is where its blocks are."""

    name: str
    model: Any
    tokens: tuple[int, int, int]  # vocabulary, global batch, length
    mesh: tuple[int, ...]
    blocks: str


def cases() -> list[Case]:
    """The graphs that are compared on."""
    with torch.device("meta"):
        llama = MarkedLlama(LlamaConfig(layers=8))
        sizes = GPTConfig(vocab_size=50257, dim=768, heads=12, layers=12, context=1024)
        gpt2 = MarkedGPT(sizes)
    return [
        Case("llama3-8b-8-layers", llama, (128256, 8, 8192), (8,), "layers"),
        Case("gpt2", gpt2, (50257, 8, 1024), (1,), "blocks"),
    ]


def planned(case: Case) -> tuple[AutoParallel, Any]:
    """The builder and its plan: the batch and the parameters are sharded along the first axis."""
    _, batch, length = case.tokens
    mesh = fake_mesh(case.mesh)
    data = (Shard(0), *[Replicate()] * (len(case.mesh) - 1))
    ap = AutoParallel(
        case.model,
        lambda: torch.zeros(batch, length, dtype=torch.long, device="meta"),
        mesh,
    )
    ap.configure_device("H100").configure_compile("eager")
    with ap:
        ap.add_input_constraints([data])
        ap.add_output_constraints([data])
        ap.add_parameter_memory_constraint()
        plan = ap.optimize_placement()
    return ap, plan


def priced(recompute: Recompute, saved: tuple[int, ...]) -> tuple[int, float]:
    """Predicted peak, and seconds of what backward computes again, when `saved` is kept."""
    facts = recompute.facts
    again = [i for i in backward_order(facts, saved) if facts.values[i].side == "forward"]
    return profile(facts, saved).peak_bytes, sum(facts.values[i].time_s for i in again)


def by_rules(ap: AutoParallel, plan: Any, rules: tuple[str, ...], blocks: str) -> Any:
    """Peak and time of a policy written as rules."""
    ap.configure_ac(stage_size=None, rules=[r.replace("BLOCKS", blocks) for r in rules])
    recompute = lowered(ap, plan)
    return priced(recompute, recompute.plan.saved)


def lowered(ap: AutoParallel, plan: Any) -> Recompute:
    """The recompute plan alone: nothing is compiled."""
    settings = ap._settings()
    return settings.recompute(ap._joint, ap._hints, plan)


def by_budgets(recompute: Recompute, solver: str) -> list[tuple[int, float]]:
    """Peak and time of PyTorch's memory budget with a solver, for each of `BUDGETS`."""
    facts, local = recompute.facts, recompute.local
    contract = frozenset(
        facts.values[i].name for i, d in recompute.plan.decisions.items() if d.origin == 2
    )
    found = []
    for budget in BUDGETS:
        pinned = {
            **default.PINNED,
            "activation_memory_budget": budget,
            "activation_memory_budget_solver": solver,
            **_ESTIMATOR,
        }
        kept = default.default_saved(local.module, contract, local.num_forward_outputs, pinned)
        actions = {v.index: "save" if v.name in kept else "recompute" for v in facts.forward}
        found.append(priced(recompute, closure(facts, actions)[0]))
    return found


def quality() -> Iterator[dict[str, Any]]:
    """A row for each graph and each of five peaks between the least and the most."""
    logging.getLogger("torch").setLevel(logging.ERROR)
    for case in cases():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield from _of_case(case)


def _of_case(case: Case) -> Iterator[dict[str, Any]]:
    ap, plan = planned(case)
    ap.configure_ac(stage_size=None)
    base = lowered(ap, plan)
    curve = pareto_of(base.facts, base.plan, 0)
    least, most = curve[0].peak_bytes, curve[-1].peak_bytes
    others = {
        "pytorch budget, dp": by_budgets(base, "dp"),
        "pytorch budget, greedy": by_budgets(base, "greedy"),
        "every second matmul": [by_rules(ap, plan, EVERY_SECOND, case.blocks)],
        "full per block": [by_rules(ap, plan, FULL, case.blocks)],
    }
    for k in range(1, 6):
        peak = least + (most - least) * k // 6
        ap.configure_ac(memory_budget=peak)
        ours = lowered(ap, plan)
        got_peak, ours_s = priced(ours, ours.plan.saved)
        assert got_peak <= peak
        within = {
            name: min((t for p, t in points if p <= peak), default=None)
            for name, points in others.items()
        }
        result = ours.plan.budget
        yield {
            "kind": "quality",
            "graph": case.name,
            "peak_bytes": peak,
            "ours_s": ours_s,
            "others_s": within,
            "optimum_s": ours_s if result.exact else None,
            "gap": result.gap,
        }
