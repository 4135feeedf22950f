"""The page holds all numbers and fetches nothing; in a browser it draws them and answers to clicks."""

import dataclasses
import json
import re
import shutil
import subprocess

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from autop_ac import ConfigError, UsageError
from autop_ac.graph.devices import DeviceSpec
from autop_ac.recompute.pareto import ParetoPoint
from autop_ac.report import plots
from autop_ac.report.build import make_report
from autop_ac.report.page import page_data
from autop_ac.runtime.memory import MeasuredMemory
from autop_ac.sharding.plan import ShardingPlan
from tests.test_report import chain, save_matmuls

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
SIZES = dict.fromkeys(
    ("peak_bytes", "peak_without_ac_bytes", "kept_bytes", "kept_without_ac_bytes"), 640
)
POINTS = tuple(ParetoPoint(p, t, (), ()) for p, t in ((500, 3e-3), (640, 2e-3), (900, 0.0)))
MEASURED = MeasuredMemory(900, 8, {"end of forward": 700}, (100, 700, 900, 8), (0.0, 1.0, 2.0, 3.0),
                          {"end of forward": 1.0})  # fmt: skip
SHARDING = ShardingPlan(
    (4, 2),
    ("dp", "tp"),
    {},
    {
        "layers.0.<weight>": (Shard(0), Replicate()),
        "layers.1.<weight>": (Shard(0), Replicate()),
        "head": (Shard(1), Shard(0)),
    },
    1.5e-3,
)


def report(layers=4, memory_bytes=2**30, notes=("</script> & <b>",), sharding=SHARDING):
    facts = chain(layers)
    spec = DeviceSpec("small", {torch.float32: 1e12}, 1e11, memory_bytes)
    return make_report(facts, save_matmuls(facts, notes), sharding, **SIZES, device=spec)


def data_of(text):
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    return json.loads(found[1])


def test_a_page_is_one_file_without_network_and_what_users_write_stays_text(tmp_path):
    path = report().save(tmp_path / "report.html", pareto=POINTS, measured=MEASURED)
    text = path.read_text()
    assert not re.search(
        r"(src|href)\s*=|@import|fetch\(|XMLHttp|https?://(?!www\.w3\.org/2000/svg)", text
    )
    assert text.count("</script>") == 2, "no text of the user's ends a script"
    data = data_of(text)
    assert data["report"]["notes"] == ["</script> & <b>"]
    assert [p["peak"] for p in data["pareto"]] == [500, 640, 900]


def test_what_is_drawn_is_what_is_predicted():
    made = report()
    data = page_data(made, POINTS, MEASURED)
    line = made.timeline()
    drawn = [sum(at) for at in zip(*data["memory"]["holders"].values())]
    assert tuple(drawn) == line.live
    assert data["memory"]["peak"] == line.peak_step
    assert drawn[line.peak_step] == data["estimate"]["peak_bytes"]
    base = sum(line.always.values())
    forward = line.forward_steps
    count = len(line.steps)
    middle = forward + (count - forward) / 2
    assert data["memory"]["measured"] == [
        (0.0, base + 100), (float(forward), base + 700), (middle, base + 900), (float(count), base + 8)
    ]  # fmt: skip
    assert data["mesh"]["parameters"][0]["name"] == "layers.0-1.<weight>"
    assert json.loads(json.dumps(data))["mesh"]["shape"] == [4, 2]


def test_of_many_steps_the_highest_of_neighbours_are_drawn():
    made = report(layers=800)
    data = page_data(made, ())["memory"]
    line = made.timeline()
    assert len(data["steps"]) == 600 < data["count"] == len(line.steps)
    drawn = [sum(at) for at in zip(*data["holders"].values())]
    assert drawn == [line.live[i] for i in data["steps"]]
    assert drawn[data["peak"]] == max(line.live)
    assert data["steps"] == sorted(set(data["steps"]))


def test_the_ending_says_the_form(tmp_path):
    made = report()
    plain = json.loads(made.save(tmp_path / "r.json").read_text())
    assert plain == json.loads(made.to_json()) == made.to_dict()
    assert plain["timeline"]["live_bytes"] == list(made.timeline().live)
    assert plain["estimate"]["holdings"][0]["holder"] == made.estimate().holdings[0].holder
    text = made.save(tmp_path / "r.txt").read_text()
    without = dataclasses.replace(made.estimate(), notes=())
    assert str(made) in text and str(without) in text and text.count("note:") == len(made.notes)
    with pytest.raises(ConfigError, match="r.pdf.*give .html, .json or .txt"):
        made.save(tmp_path / "r.pdf")


def test_figures_show_the_same_numbers():
    made = report()
    figure = made.plot_memory()
    assert figure._repr_png_().startswith(b"\x89PNG")
    axes = figure.axes[0]
    line = made.timeline()
    (peak,) = [t for t in axes.texts if t.get_text().startswith("peak")]
    assert peak.xy[0] == line.peak_step
    assert len(axes.collections) == len(line.by_holder())
    curve, chosen = made.plot_pareto(POINTS).axes[0].get_lines()
    assert list(curve.get_xdata()) == [500, 640, 900]
    assert list(chosen.get_xdata()) == [640]


def test_without_matplotlib_figures_say_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(UsageError, match=r"autop-ac\[viz\]"):
        report().plot_memory()
    assert plots.byte_unit(2048) == (1024, "KiB") and plots.byte_unit(3) == (1, "B")


_ASKED = """
<script>
const find = (css) => document.querySelector(css);
const shown = () => [...document.querySelectorAll("#modules tbody tr")].filter((r) => r.style.display !== "none").length;
const box = find("#memory svg").getBoundingClientRect();
find("#memory svg").dispatchEvent(new PointerEvent("pointermove", {clientX: box.left + box.width / 2, clientY: box.top + 90}));
const before = shown();
find("#modules .toggle").click();
const folded = shown();
const rows = document.querySelectorAll("#mesh .pick");
rows[rows.length - 1].click();
document.title = JSON.stringify({
  tip: find(".tip").style.display, tipText: find(".tip").textContent, before, folded,
  colours: new Set([...document.querySelectorAll(".cell")].map((c) => c.style.background)).size,
  cells: document.querySelectorAll(".cell").length,
  wide: document.documentElement.scrollWidth > window.innerWidth,
  errors: window.failed || null,
  scale: ["#memory svg", "#pareto svg"].map((css) => find(css).getBoundingClientRect().width / find(css).viewBox.baseVal.width),
  reasons: find("#modules td.why:not(:empty)").getBoundingClientRect().right <= window.innerWidth,
});
</script>
"""


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here")
@pytest.mark.parametrize("width", [1200, 420])
def test_in_a_browser_it_draws_and_answers(tmp_path, width):
    path = report(memory_bytes=400).save(tmp_path / "r.html", pareto=POINTS, measured=MEASURED)
    catch = (
        "<script>window.addEventListener('error', (e) => { window.failed = e.message; });</script>"
    )
    text = (
        path.read_text().replace("<head>", f"<head>{catch}").replace("</body>", f"{_ASKED}</body>")
    )
    path.write_text(text)
    command = [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--window-size={width},900",
        f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=3000", "--dump-dom",
        path.as_uri(),
    ]  # fmt: skip
    page = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    title = re.search("<title>(.*?)</title>", page)[1]
    seen = json.loads(title.replace("&amp;", "&").replace("&lt;", "<").replace("&gt;", ">"))
    assert seen["errors"] is None
    assert 'data-ready="yes"' in page
    assert page.count("data-holder=") == len(report().timeline().by_holder())
    assert 'id="peak"' in page and 'id="chosen"' in page and 'id="measured"' in page
    assert "does not fit small" in page and "usable 360 B" in page
    assert "&lt;/script&gt; &amp; &lt;b&gt;" in page, "a note is text"
    assert seen["tip"] == "block" and "layers." in seen["tipText"]
    assert seen["before"] > seen["folded"] == 1
    assert (seen["cells"], seen["colours"]) == (8, 8), "the last row is sharded on both axes"
    assert all(0.95 <= scale <= 1.05 for scale in seen["scale"]), "letters keep their size"
    assert seen["reasons"] and "optimizer state not counted" in page
    assert not seen["wide"], "nothing sticks out to the side"
