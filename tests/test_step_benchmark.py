"""The benchmark of the step, small and under torchrun: its rows, and losses equal across systems."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.benchmarks.step import compared, interval

SCRIPT = Path(__file__).parent / "benchmarks" / "step.py"


def test_systems_have_equal_losses_and_every_figure_under_torchrun():
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
        SCRIPT, "--quick", "--json", "--policies", "second", "auto",
        "--systems", "fsdp2-eager", "ddp", "ours-eager",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [(row["policy"], row["system"]) for row in rows] == [
        ("second", "fsdp2-eager"), ("second", "ddp"), ("second", "ours-eager"), ("auto", "ours-eager"),
    ]  # fmt: skip
    for row in rows:
        assert row["losses"] == pytest.approx(rows[0]["losses"], abs=1e-5)
        assert row["losses"][-1] < row["losses"][0]
        assert row["step_s"] > 0 and row["peak_bytes"] > 0 and row["world"] == 2
    found = {(r["policy"], r["against"]): r for r in compared(rows)}
    assert found["second", "fsdp2-eager second"]["loss_difference"] <= 1e-5
    # the automatic part is compared with every policy of the others
    assert ("auto", "fsdp2-eager second") in found


def test_the_interval_is_of_the_median():
    middle, low, high = interval([1.0, 1.1, 0.9, 1.0, 1.05, 0.95] * 5)
    assert low <= middle <= high
    assert interval([2.0] * 9) == (2.0, 2.0, 2.0)
    assert low >= 0.95 and high <= 1.05
