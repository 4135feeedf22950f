"""Figures of the recompute part: ``python tests/benchmarks/recompute.py [--json] [--kinds scaling]``.

`scaling` takes the CPU seconds of facts, of decisions and tags (with a given stage size, and with the
best one) and of a budget on local graphs of repeated Llama blocks; `quality` compares recompute times at
equal peaks; `peak` sets predicted peaks beside measured ones.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from time import process_time
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from autop_ac.config import ACConfig  # noqa: E402
from autop_ac.graph.collect import collect_facts  # noqa: E402
from autop_ac.graph.cost import fx_node_time_s  # noqa: E402
from autop_ac.graph.devices import Link, find_device  # noqa: E402
from autop_ac.recompute.hints import ResolvedHints  # noqa: E402
from autop_ac.recompute.pipeline import plan_recompute  # noqa: E402
from tests.benchmarks.peak import peak  # noqa: E402
from tests.benchmarks.quality import quality  # noqa: E402
from tests.benchmarks.stitched import WORLD, stitched  # noqa: E402

SIZES = (1_000, 5_000, 20_000, 80_000)
LINKS = {"dp": Link(WORLD, 400e9, 1e-5)}


def scaling(sizes: tuple[int, ...] = SIZES) -> Iterator[dict[str, Any]]:
    """CPU seconds at several sizes; facts are part of what tags and budgets take, and taken off."""
    a_layer = len(stitched(2).module.graph.nodes) - len(stitched(1).module.graph.nodes)
    device = find_device("H100")
    for nodes in sizes:
        local = stitched(nodes // a_layer)
        gc.collect()
        gc.freeze()  # the graph itself is no work of ours
        start = process_time()
        facts = collect_facts(
            local.module, local.placeholders, local.results, local.num_forward_outputs,
            lambda node: fx_node_time_s(node, device, LINKS),
        )  # fmt: skip
        facts_s = process_time() - start

        def planned(local=local, facts_s=facts_s, **settings: Any) -> tuple[float, Any]:
            start = process_time()
            made = plan_recompute(
                local,
                ResolvedHints(),
                ACConfig(**settings),
                device,
                LINKS,
                reshard_after_forward=True,
            )
            return round(process_time() - start - facts_s, 3), made

        tags_s, _ = planned(stage_size=sum(v.bytes for v in facts.forward) // 20)
        auto_s, _ = planned()
        budget_s, budgeted = planned(memory_budget=0.75)
        gc.unfreeze()
        yield {
            "kind": "scaling",
            "nodes": len(facts.values),
            "facts_cpu_s": round(facts_s, 3),
            "tags_cpu_s": tags_s,
            "tags_auto_cpu_s": auto_s,
            "budget_cpu_s": budget_s,
            "gap": round(budgeted.plan.budget.gap, 5),
        }


KINDS = {"scaling": scaling, "quality": quality, "peak": peak}


def main() -> None:
    """Print a table, or with ``--json`` an object a line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--kinds", nargs="+", choices=sorted(KINDS), default=sorted(KINDS))
    asked = parser.parse_args()
    for kind in asked.kinds:
        for number, row in enumerate(KINDS[kind]()):
            if asked.json:
                print(json.dumps(row), flush=True)
            else:
                if not number:
                    print("  ".join(f"{name:>14}" for name in row))
                print("  ".join(f"{value!s:>14}" for value in row.values()), flush=True)


if __name__ == "__main__":
    main()
