"""Figures of the recompute part: ``python tests/benchmarks/recompute.py [--json] [--kinds scaling]``.

`scaling` takes the CPU seconds of a budget on synthetic joint graphs of repeated layers. Facts and tags
need a traced graph and are not taken here: these columns are null.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from time import process_time
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from autop_ac.recompute.budget import budget_wishes  # noqa: E402
from autop_ac.recompute.evaluate import Evaluator  # noqa: E402
from autop_ac.recompute.stages import free_values  # noqa: E402
from tests.benchmarks.quality import quality  # noqa: E402
from tests.synthetic import transformer  # noqa: E402

SIZES = (1_000, 5_000, 20_000, 80_000)


def scaling(sizes: tuple[int, ...] = SIZES) -> Iterator[dict[str, Any]]:
    """Seconds of one budget, halfway between what is least kept and the peak without AC."""
    a_layer = len(transformer(2).values) - len(transformer(1).values)
    for nodes in sizes:
        facts = transformer(nodes // a_layer)
        forward = free_values(facts, {})
        evaluate = Evaluator(facts, dict.fromkeys(forward.kept, "save"), forward.free)
        most = evaluate(b"\1" * len(forward.free)).peak_bytes
        budget = (evaluate.base + most) // 2
        start = process_time()
        _, result = budget_wishes(facts, budget, {})
        yield {
            "kind": "scaling",
            "nodes": len(facts.values),
            "facts_cpu_s": None,
            "tags_cpu_s": None,
            "budget_cpu_s": round(process_time() - start, 3),
            "gap": round(result.gap, 5),
        }


KINDS = {"scaling": scaling, "quality": quality}


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
