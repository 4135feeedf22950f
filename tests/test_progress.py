"""What long work is at is told once, in the form that the place can show, and artifacts are traced."""

import io
import json
import logging

import pytest
import torch
from rich.console import Console

from autop_ac import AutoParallel, ConfigError, backend, fake_mesh
from autop_ac.progress import _can_display, progress
from autop_ac.report.plan_table import plan_table
from tests.test_api import Small, inputs

STAGES = ["capture", "options", "solve", "lower", "plan", "compile"]


def run(**verbose):
    ap = AutoParallel(Small(), inputs, fake_mesh((2,))).configure_compile("eager")
    if verbose:
        ap.configure_progress(**verbose)
    ap.parallelize()
    return ap


def told(caplog):
    return [r.getMessage() for r in caplog.records if r.name == "autop_ac" and ": " in r.message]


def test_elsewhere_each_stage_is_a_line_of_the_log_with_its_time(caplog, capsys):
    with caplog.at_level(logging.INFO, logger="autop_ac"):
        run()
    lines = [line for line in told(caplog) if line.split(":")[0] in STAGES]
    assert [line.split(":")[0] for line in lines] == STAGES
    assert all(line.endswith(" s") for line in lines)
    assert capsys.readouterr().out == ""


def test_without_verbose_nothing_is_told(caplog):
    with caplog.at_level(logging.INFO, logger="autop_ac"):
        run(verbose=False)
    assert not [line for line in told(caplog) if line.split(":")[0] in STAGES]
    with pytest.raises(ConfigError, match="verbose=1"):
        AutoParallel(Small(), inputs, fake_mesh((2,))).configure_progress(1)


def test_on_a_terminal_a_stage_is_a_line_with_a_clock(caplog):
    out = io.StringIO()
    stage = progress(console=Console(file=out, force_terminal=True, width=60, _environ={}))
    with caplog.at_level(logging.INFO, logger="autop_ac"), stage("solve: which costs least"):
        assert "solve: which costs least" in out.getvalue(), "it is shown while it runs"
    assert "+ solve: which costs least" in out.getvalue()
    assert not told(caplog)


def test_a_terminal_that_cannot_move_its_cursor_and_a_file_get_lines(caplog):
    for options in ({"force_terminal": True, "_environ": {"TERM": "dumb"}}, {}):
        out = io.StringIO()
        stage = progress(console=Console(file=out, **options))
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="autop_ac"), stage("solve"):
            pass
        assert out.getvalue() == "" and len(told(caplog)) == 1


def test_an_error_passes_and_the_stage_is_not_told_as_done(caplog):
    out = io.StringIO()
    for console in (Console(file=out, force_terminal=True, _environ={}), Console(file=out)):
        with pytest.raises(ZeroDivisionError), progress(console=console)("solve"):
            raise ZeroDivisionError
    assert "+" not in out.getvalue() and not told(caplog)


class Collect(logging.Handler):
    """What goes to PyTorch's structured trace."""

    def __init__(self):
        super().__init__()
        self.artifacts = {}

    def emit(self, record):
        about = getattr(record, "metadata", {}).get("artifact")
        if about and about["name"].startswith("autop_ac_"):
            self.artifacts[about["name"]] = record.payload


@pytest.fixture
def trace():
    handler = Collect()
    logger = logging.getLogger("torch.__trace")
    logger.addHandler(handler)
    yield handler.artifacts
    logger.removeHandler(handler)


def test_plans_graphs_and_reports_are_in_the_structured_trace(trace):
    ap = run()
    assert trace["autop_ac_sharding_plan"] == plan_table(ap._plan)
    assert json.loads(trace["autop_ac_report"]) == ap.ac_report.to_dict()
    assert "def forward" in trace["autop_ac_local_graph"]


def test_the_backend_of_torch_compile_traces_its_report(trace):
    ac = backend(compile="eager")
    torch.compile(Small(), backend=ac)(inputs()).sum().backward()
    assert json.loads(trace["autop_ac_report"]) == ac.ac_report.to_dict()


@pytest.mark.parametrize("widgets", [True, False])
def test_in_a_notebook_it_is_displayed_where_there_are_widgets(monkeypatch, widgets):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: widgets or None)
    notebook = Console(file=io.StringIO(), force_jupyter=True)
    assert _can_display(notebook) is widgets
