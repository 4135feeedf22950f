"""What README quotes is what the library says; what it links is there."""

import ast
import re
from pathlib import Path

import torch

import autop_ac

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def messages():
    """All text of the library, what is filled in as three dots."""
    found = []
    for path in (ROOT / "autop_ac").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = (getattr(part, "value", "") for part in node.values)
                found.append("".join(p if isinstance(p, str) else "..." for p in parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def test_messages_of_the_troubleshooting_table_are_raised():
    table = README[README.index("## Troubleshooting") : README.index("## Limits")]
    symptoms = [row.split(" | ")[0] for row in table.splitlines() if row.startswith("| ")]
    said = messages()
    quoted = [q for row in symptoms for q in re.findall('"(.+)"', row)]
    assert len(quoted) > 20
    for quote in quoted:
        assert any(all(part in text for part in quote.split("...")) for text in said), quote
    for row in symptoms:
        for name in re.findall("`([A-Z][A-Za-z]+Error)`", row):
            assert issubclass(getattr(autop_ac, name), autop_ac.AutopACError)


def test_links_are_there():
    heads = [
        h.lower().replace(",", "").replace(" ", "-") for h in re.findall("^#+ (.+)", README, re.M)
    ]
    for target in re.findall(r"\]\(([^)]+)\)", README):
        if target.startswith("#"):
            assert target[1:] in heads, target
        elif "://" not in target:
            assert (ROOT / target).exists(), target
    tutorials = {p.name for p in (ROOT / "tutorials").glob("*.py")}
    assert tutorials == set(re.findall(r"\]\(tutorials/(.+\.py)\)", README))
    picture = ROOT / "tutorials" / "pictures" / "report.png"
    assert picture.stat().st_size < 150_000


def test_settings_of_the_table_are_those_of_the_library():
    table = README[README.index("## Settings of AC") : README.index("Sizes are text with a unit")]
    rows = "".join(row.split(" | ")[0] for row in table.splitlines() if row.startswith("| `"))
    named = set(re.findall(r"`(\w+)=", rows))
    assert named == set(autop_ac.ACConfig().to_dict())


class Model(torch.nn.Module):
    """What a reader of README has, with paths as they are named there."""

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.mlp = torch.nn.Sequential(
                torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 16)
            )

        def forward(self, x):
            return x + self.mlp(x)

    def __init__(self):
        super().__init__()
        self.tokens = torch.nn.Embedding(128, 16)
        self.layers = torch.nn.ModuleList(self.Layer() for _ in range(2))

    def forward(self, tokens):
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return x


def test_the_lines_that_ask_whether_it_fits_run_and_a_rule_changes_the_answer(capsys):
    code = README.split("Will it fit?")[1].split("```python\n")[1].split("```")[0]
    names = {**vars(autop_ac), "torch": torch, "Model": Model}
    exec(code, names)
    before, after = capsys.readouterr().out.split(
        "Estimate on each of 8 devices (H100, 80.00 GiB)"
    )[1:]
    assert "fits" in before and "optimizer state" in before
    assert before != after
