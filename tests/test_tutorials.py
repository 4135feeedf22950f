"""The tutorials run as they stand, warnings being errors; what they claim is asserted in them."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TUTORIALS = sorted((Path(__file__).parent.parent / "tutorials").glob("*.py"))
# of torch itself; the reasons are in pyproject.toml
OF_TORCH = ("`torch.jit.script_method` is deprecated", "`torch.jit.script` is deprecated")
STRICT = [
    "-W",
    "error",
    *(w for text in OF_TORCH for w in ("-W", f"ignore:{text}:DeprecationWarning")),
]
EXECUTE = """
import sys, nbformat
from nbclient import NotebookClient
notebook = nbformat.read(sys.argv[1], as_version=4)
NotebookClient(notebook, kernel_name="python3", timeout=200).execute()
print(*(o.text for c in notebook.cells for o in c.get("outputs", ()) if o.output_type == "stream"))
"""


def ran(*command, **options):
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        capture_output=True, text=True, timeout=300, **options,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda p: p.name)
def test_tutorial_runs(path):
    assert ran(*STRICT, path)


def test_each_begins_with_its_title_and_how_it_is_run():
    assert [path.name[:3] for path in TUTORIALS] == [
        f"{i:02}_" for i in range(1, len(TUTORIALS) + 1)
    ]
    for path in TUTORIALS:
        text = path.read_text()
        assert text.startswith("# %% [markdown]\n# # ")
        assert f"python tutorials/{path.name}" in text


def test_a_tutorial_is_a_notebook_that_runs(tmp_path):
    """The one that starts processes, which can import no notebook: it lies beside the file."""
    (source,) = [path for path in TUTORIALS if "launching" in path.name]
    copy = shutil.copy(source, tmp_path)
    ran("-m", "jupytext", "--to", "ipynb", copy)
    notebook = Path(copy).with_suffix(".ipynb")
    assert "loss" in ran("-c", EXECUTE, notebook, cwd=tmp_path)
