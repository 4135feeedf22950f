"""Each command on a small model in a file: what it prints, writes, and answers as exit status."""

import json
import logging
import subprocess
import sys

import pytest

from autop_ac.cli import COMPARED, main

MODEL = """
import torch
from torch.distributed.tensor import Shard

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(64, 256)
        self.down = torch.nn.Linear(256, 64)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))

def model():
    return torch.nn.Sequential(*(Block() for _ in range(3)))

def build():
    return model(), lambda: torch.randn(512, 64)

def sharded():
    places = [(Shard(0),)]
    return model(), lambda: torch.randn(512, 64), {"inputs": places, "outputs": places}

def on_meta():
    made = model()
    assert made[0].up.weight.is_meta
    return made, lambda: torch.randn(512, 64, device="meta")

def wrong():
    return model()

def unknown():
    return model(), lambda: torch.randn(512, 64), {"input": None}

def fails():
    raise KeyError("no weights here")
"""


@pytest.fixture
def run(tmp_path, capsys, monkeypatch):
    """``run("report build --mesh 2")`` gives exit status, output and errors."""
    (tmp_path / "small_model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "small_model", raising=False)

    def call(line):
        command, name, *rest = line.split()
        capsys.readouterr()
        status = main([command, f"small_model.py:{name}", *rest, "--compile", "eager"])
        told = capsys.readouterr()
        return status, told.out, told.err

    return call


def test_plan_tells_placements_and_the_estimate_on_a_mesh_of_two_axes(run):
    status, out, _ = run("plan build --mesh 4,2 --axes dp,tp --parameter-memory 0.125 --quiet")
    assert status == 0
    assert "Sharding plan on mesh dp=4 x tp=2" in out and "0-2.up.weight" in out
    assert "Estimate on each of 8 devices (H100, 80.00 GiB)" in out


def test_report_writes_a_page_and_json_and_follows_flags(run, tmp_path):
    status, out, err = run(
        "report sharded --mesh 2 --device-spec A100 --rule 1.up=save --stage-size none "
        "--optimizer adamw --html r.html --json r.json"
    )
    assert status == 0
    assert "no stages" in out and 'rule "1.up=save"' in out and "(A100" in out
    assert "wrote r.html" in err and "<!doctype html>" in (tmp_path / "r.html").read_text()
    plain = json.loads((tmp_path / "r.json").read_text())
    held = {h["holder"]: h["bytes"] for h in plain["estimate"]["holdings"]}
    assert held["optimizer state"] == 2 * held["parameters"]


def test_settings_come_from_a_file_and_flags_go_first(run, tmp_path):
    (tmp_path / "ac.toml").write_text('enable = false\noptimizer = "sgd"\n')
    _, off, _ = run("report build --mesh 2 --config ac.toml --quiet")
    _, on, _ = run("report build --mesh 2 --config ac.toml --enable --quiet")
    assert "(auto)" not in off and "(auto)" in on
    (tmp_path / "ac.toml").write_text("stagesize = 5\n")
    status, out, err = run("report build --config ac.toml --quiet")
    assert (status, out) == (2, "") and "did you mean stage_size" in err and "ac.toml" in err


def test_compare_is_one_table_of_all_settings(run, tmp_path):
    (tmp_path / "mine.toml").write_text('save = ["aten.relu"]\nstage_size = "none"\n')
    status, out, _ = run(
        "compare on_meta --mesh 2 --meta --config mine.toml --stage-size 4096 --quiet"
    )
    assert status == 0
    assert max(map(len, out.splitlines())) <= 80
    rows = {line.split("|")[1].strip(): line for line in out.splitlines() if "|" in line}
    assert set(rows) == {"settings", *COMPARED, "mine", "given"}
    peaks = {name: row.split("|")[2].strip() for name, row in rows.items()}
    assert peaks["off"] == peaks["hints"] == peaks["budget"]
    recompute = {name: row.split("|")[4].strip() for name, row in rows.items()}
    assert recompute["full"] != recompute["off"] == recompute["budget"]
    below = " ".join(out.split("what each row is set to:")[1].split())
    for said in ("off no activation checkpointing: enable=False", 'rules=["**=recompute"]',
                 'staged stages, of the size of least peak: the defaults, stage_size="auto"',
                 "given the flags: stage_size=4096", "half least", "memory_budget=0.5",
                 'mine from its file: stage_size=None, save=["aten.relu"]'):  # fmt: skip
        assert said in below, said
    assert "optimizer state not counted: --optimizer adamw" in out


@pytest.mark.parametrize(
    "line",
    [
        "compare build --mesh 2 --with staged --rule 3.*=save --quiet",
        "explain build 0 --mesh 2 --rule 3.*=save --quiet",
    ],
)
def test_a_rule_that_matches_nothing_is_told_by_every_command(run, line):
    status, _, told = run(line)
    assert status == 0
    assert 'autop-ac: rule "3.*=save": 3.* matches none' in told and "UserWarning" not in told


def test_compare_shows_what_cannot_be_met_and_fails_where_nothing_fits(run):
    status, out, _ = run("compare build --mesh 2 --with off --memory-budget 1KiB --quiet")
    assert status == 0 and "infeasible" in out
    assert "the smallest peak found is " in " ".join(out.split())
    status, out, _ = run("compare build --with budgit --quiet")
    assert status == 2 and out == ""


def test_explain_answers_each_question(run):
    status, out, _ = run("explain build 1.up 0.down.weight --rule 1.*=recompute --quiet")
    assert status == 0
    assert "1.up (module)" in out and "0.down.weight (parameter" in out
    assert 'rule "1.*=recompute"' in out and "small_model.py:" in out
    status, _, err = run("explain build 1.upp --quiet")
    assert status == 2 and "nearest are 1.up" in err


def test_a_limit_that_cannot_be_met_or_a_device_that_is_too_small_is_exit_one(run, monkeypatch):
    status, out, err = run("report build --memory-budget 1KiB --quiet")
    assert (status, out) == (1, "") and "cannot be met" in err
    from autop_ac.graph import devices

    small = devices.DeviceSpec("small", devices.DEVICES["cpu"].flops, 1e11, 2**20)
    monkeypatch.setattr(devices, "DEVICES", {"small": small})
    status, out, err = run("plan build --device-spec small --quiet")
    assert status == 1 and "DOES NOT FIT" in out and "--memory-budget device" in err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("report wrong", "it is to give (model, input_fn)"),
        ("report unknown", "options ['input']: known are"),
        ("report fails", "raised KeyError"),
        ("report bild", "has no function 'bild'; nearest is build"),
        ("report build --device-spec H1000", "unknown device 'H1000'"),
        ("report build --axes a,b --mesh 2", "give each axis a name"),
        ("report build --save aten.mn", "aten.mn"),
        ("report build --mesh 2,x", "give sizes of axes"),
        ("report build --stagesize 5", "unrecognized arguments"),
        ("compare build --with budgit", "did you mean budget?"),
    ],
)
def test_wrong_use_is_exit_two_with_the_remedy(run, line, message):
    status, out, err = run(f"{line} --quiet")
    assert (status, out) == (2, "")
    assert message in err


def test_targets_are_files_or_modules(run, capsys):
    assert main(["explain", "small_model:build", "0.up", "--quiet", "--compile", "eager"]) == 0
    for target, message in (
        ("nowhere.py:build", "no file nowhere.py"),
        ("small_model.py", "behind a colon"),
        ("no_such_module:build", "cannot be imported"),
    ):
        capsys.readouterr()
        assert main(["plan", target, "--quiet"]) == 2
        assert message in capsys.readouterr().err


def test_loggers_are_left_as_they_were(run):
    logger = logging.getLogger("torch.distributed")
    before = logger.level
    run("explain build nothing.here --quiet")
    assert logger.level == before


def test_the_module_runs_as_a_program():
    done = subprocess.run(
        [sys.executable, "-m", "autop_ac", "--help"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0 and "compare" in done.stdout and "Exit status" in done.stdout
