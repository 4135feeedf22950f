"""Each command on a small model in a file: what it prints, writes, and answers as exit status."""

import json
import logging
import subprocess
import sys

import pytest
import torch

from autop_ac import AutoParallel, DeviceSpec
from autop_ac.cli import COMPARED, main
from autop_ac.graph.devices import find_device

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

def other():
    return model()[:2], lambda: torch.randn(512, 64)

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
        ("report bild", "has no function 'bild'; did you mean build?"),
        ("report build --device-spec H1000", "unknown device 'H1000': known are A100, H100"),
        (
            "report build --device-spec H1000",
            "did you mean H100? Describe another one in a TOML file",
        ),
        ("report build --device-spec h100.toml", "h100.toml: there is no such file"),
        ("report build --config missing.toml", "missing.toml: there is no such file"),
        ("report build --memory-budget 40G", 'did you mean "40 GiB" or "40 GB"?'),
        ("report build --optimizer adamv", "did you mean adam?"),
        ("report build --compile egaer", "did you mean eager?"),
        (
            "report build --stage-sise 5",
            "unrecognized arguments: --stage-sise 5; did you mean --stage-size?",
        ),
        ("report build --html no/r.html", "'no/r.html': there is no folder no: make it first"),
        ("report build --json .", "'.' is a folder"),
        ("plan build --save-plan no/p.json", "there is no folder no"),
        ("plan build --plan p.json", "p.json: there is no such file\nA plan is written by"),
        ("report build --plan small_model.py", "small_model.py: no complete plan"),
        ("report build --axes a,b --mesh 2", "give each axis a name"),
        ("report build --save aten.mn", "aten.mn"),
        ("report build --parameter-memory 2", "'2': give a fraction above 0 and at most 1"),
        ("report build --parameter-memory half", "'half': give a fraction"),
        ("report build --mesh 2,x", "give sizes of axes"),
        ("report build --stagesize=5", "did you mean --stage-size?"),
        ("reprot build", "did you mean report?"),
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
        ("nowhere.py:build", "nowhere.py: there is no such file"),
        ("small_modle.py:build", "no such file; did you mean small_model.py?"),
        (
            "small_modle:build",
            "there is no module small_modle, and a file ends in .py; did you mean",
        ),
        ("small_model.py", "behind a colon"),
        ("no_such_module:build", "cannot be imported"),
    ):
        capsys.readouterr()
        assert main(["plan", target, "--quiet"]) == 2
        assert message in capsys.readouterr().err


def test_wrong_words_are_told_before_the_model_is_built(run, tmp_path):
    (tmp_path / "small_model.py").write_text("def build():\n    raise SystemExit('too late')\n")
    for words in (
        "--html no/r.html",
        "--plan p.json",
        "--device-spec H1000",
        "--axes a,b --mesh 2",
        "--memory-budget 40G",
    ):
        status, _, err = run(f"report build {words} --quiet")
        assert status == 2 and "too late" not in err, words


def test_a_plan_is_saved_and_taken_in_place_of_a_search(run, tmp_path, monkeypatch):
    status, found, err = run("plan build --mesh 4 --axes dp --save-plan p.json --quiet")
    assert status == 0 and "wrote p.json" in err
    monkeypatch.setattr(AutoParallel, "optimize_placement", None)  # no search from here on
    status, loaded, _ = run("plan build --plan p.json --quiet")
    assert (status, loaded) == (0, found) and "mesh dp=4" in found
    status, out, _ = run("compare build --plan p.json --with off,full --quiet")
    assert status == 0 and "full" in out
    status, out, _ = run("explain build 0.up --plan p.json --mesh 4 --quiet")
    assert status == 0 and "0.up (module)" in out
    for line, message in (
        ("report other --plan p.json", "--plan p.json: the plan is for another model"),
        ("report build --plan p.json --mesh 2", "--plan p.json: the plan is for mesh (4,), not"),
        ("report build --plan p.json --parameter-memory 0.5", "drop one of them"),
    ):
        status, out, err = run(f"{line} --quiet")
        assert (status, out) == (2, "") and message in err


def test_a_device_is_described_in_a_file(run, tmp_path):
    text = 'memory_bytes = "24 GiB"\nmemory_bandwidth = 300e9\nflops = {float32 = 30e12}\n'
    (tmp_path / "L4.toml").write_text(text)
    status, out, _ = run("plan build --device-spec L4.toml --quiet")
    assert status == 0 and "(L4, 24.00 GiB)" in out
    assert find_device("L4.toml") == DeviceSpec("L4", {torch.float32: 30e12}, 300e9, 24 * 2**30)
    for wrong, message in (
        (
            text.replace("bytes", "size"),
            "a device has no 'memory_size'; did you mean memory_bytes?",
        ),
        (text.replace("float32", "flaot32"), "'flaot32' is no dtype; did you mean float32?"),
        (text.replace("{float32 = 30e12}", "3"), "flops=3: give a number by dtype"),
        (text.replace("300e9", '"300 GB"'), "memory_bandwidth='300 GB': give bytes per second"),
        (text.replace("24 GiB", "24G"), 'did you mean "24 GiB"'),
        (text.replace("float32", "bfloat16"), "flops must name torch.float32"),
        ("flops = {float32 = 1}", "memory_bandwidth, memory_bytes of the device missing"),
    ):
        (tmp_path / "L4.toml").write_text(wrong)
        status, _, err = run("plan build --device-spec L4.toml --quiet")
        assert status == 2 and "autop-ac: L4.toml: " in err and message in err


def test_what_cannot_be_written_at_last_is_wrong_use(run, monkeypatch):
    def full(report, path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("autop_ac.report.values.ACReport.save", full)
    status, _, err = run("report build --json r.json --quiet")
    assert status == 2 and "r.json cannot be written: [Errno 28] No space left" in err


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
