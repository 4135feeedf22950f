"""Settings as plain values, in files and on command lines, are the settings that they stand for."""

import argparse
import json
import typing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autop_ac import ACConfig, ConfigError
from autop_ac.config import OPTIMIZER_COPIES
from autop_ac.policies import MATMUL, Rule, every

_SIZES = st.sampled_from([4096, "512 MiB", "1.5 GB"])
_SAVES = st.lists(st.sampled_from(["aten.mm", "aten.bmm/2", "query"]), unique=True, max_size=3)
_RULES = st.lists(
    st.sampled_from(["layers.*=recompute", "::ATTENTION/2=save", "layers.[0-3]::q=prefer_save"]),
    unique=True,
    max_size=3,
)


@st.composite
def settings(draw):
    limit = draw(
        st.one_of(
            st.builds(lambda s: {"stage_size": s}, st.one_of(st.none(), st.just("auto"), _SIZES)),
            st.builds(
                lambda b: {"memory_budget": b},
                st.one_of(st.none(), st.just("device"), _SIZES, st.sampled_from([0.25, 1.0])),
            ),
        )
    )
    return {
        **limit,
        "enable": draw(st.booleans()),
        "optimizer": draw(st.sampled_from([None, *OPTIMIZER_COPIES])),
        "save": draw(_SAVES),
        "rules": draw(_RULES),
    }


def flags(settings):
    """The settings as a command line."""
    line = []
    for name, value in settings.items():
        if name == "enable":
            line.append("--enable" if value else "--no-enable")
        elif isinstance(value, list):
            line += [word for x in value for word in (f"--{name.removesuffix('s')}", x)]
        else:
            line += [f"--{name.replace('_', '-')}", "none" if value is None else str(value)]
    return line


def parsed(line, base=None, prefix=""):
    parser = argparse.ArgumentParser()
    ACConfig.add_arguments(parser, prefix)
    return ACConfig.from_args(parser.parse_args(line), prefix, base)


@given(settings())
def test_a_dict_a_line_of_flags_and_json_give_the_same_settings(drawn):
    made = ACConfig(**drawn)
    assert ACConfig.from_dict(made.to_dict()) == made
    assert ACConfig.from_dict(json.loads(json.dumps(made.to_dict()))) == made
    assert parsed(flags(drawn)) == made


@given(settings(), settings())
def test_flags_go_before_a_file_and_the_rest_of_it_stays(first, second):
    base = ACConfig(**first)
    got = parsed(flags(second), base)
    assert got.enable == second["enable"] and got.optimizer == second["optimizer"]
    assert got.save == (ACConfig(**second).save if second["save"] else base.save)
    assert parsed([], base) == base
    if "stage_size" in second:
        assert got.stage_bytes == ACConfig(**second).stage_bytes and got.budget is None
    elif second["memory_budget"] is not None:
        assert got.budget == ACConfig(**second).budget


def test_selectors_and_rules_of_any_form_become_text():
    made = ACConfig(save=[every(2, MATMUL), "query"], rules=Rule("layers.*", None, "recompute"))
    assert made.to_dict() == {
        "enable": True, "stage_size": "auto", "memory_budget": None, "save": ["MATMUL/2", "query"],
        "recompute": [], "rules": ["layers.*=recompute"], "optimizer": None,
    }  # fmt: skip


def test_a_toml_file_has_the_same_names(tmp_path):
    path = tmp_path / "ac.toml"
    path.write_text(
        'stage_size = "none"\nrules = ["layers.*::aten.mm=save"]\noptimizer = "adamw"\n'
    )
    expected = ACConfig(stage_size=None, rules=["layers.*::aten.mm=save"], optimizer="adamw")
    assert ACConfig.from_toml(path) == expected
    path.write_text("memory_budget = 0.5\nenable = true\n")
    assert ACConfig.from_toml(str(path)) == ACConfig(memory_budget=0.5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stagesize = 1", "no setting .* 'stagesize'; did you mean stage_size"),
        ("[ac]\nsave = []", "no setting .* 'ac'"),
        ('stage_size = "8 G"', "stage_size='8 G' is not a size"),
        ("stage_size = ", "cannot be read as TOML"),
        ('rules = ["layers.*"]', "has no action"),
    ],
)
def test_what_is_wrong_in_a_file_is_told_with_its_path(tmp_path, text, message):
    path = tmp_path / "ac.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        ACConfig.from_toml(path)
    assert str(caught.value).startswith(f"{path}: ")


def test_a_file_that_is_not_there_is_told(tmp_path):
    with pytest.raises(ConfigError, match="nowhere.toml: there is no such file"):
        ACConfig.from_toml("nowhere.toml")
    with pytest.raises(ConfigError, match="no/ac.toml: there is no such file, and no folder no"):
        ACConfig.from_toml("no/ac.toml")
    (tmp_path / "ac.toml").write_text("stage_size = ")
    with pytest.raises(ConfigError, match="did you mean .*/ac.toml"):
        ACConfig.from_toml(tmp_path / "ax.toml")
    with pytest.raises(ConfigError, match="ac.toml: cannot be read as TOML"):
        ACConfig.from_toml(tmp_path / "ac.toml")


def test_words_of_a_command_line_are_read_as_numbers_where_they_are():
    assert parsed(["--stage-size", "4096"]).stage_bytes == 4096
    assert parsed(["--memory-budget", "0.5"]).budget == 0.5
    assert parsed(["--save", "aten.mm,aten.bmm", "--save", "q"]) == ACConfig(
        save=["aten.mm", "aten.bmm", "q"]
    )
    with pytest.raises(ConfigError, match="memory_budget=1.5"):
        parsed(["--memory-budget", "1.5"])
    with pytest.raises(SystemExit):
        parsed(["--optimizer", "adamv"])


def test_a_prefix_keeps_the_flags_apart_from_a_programs_own():
    parser = argparse.ArgumentParser()
    parser.add_argument("--save", help="where to")
    ACConfig.add_arguments(parser, "ac-")
    args = parser.parse_args(["--save", "here", "--ac-save", "aten.mm", "--no-ac-enable"])
    assert args.save == "here"
    assert ACConfig.from_args(args, "ac-") == ACConfig(enable=False, save="aten.mm")


def test_numbers_stand_before_text_in_the_types():
    """tyro takes the first of a union that a word can be read as."""
    hints = typing.get_type_hints(ACConfig)
    assert typing.get_args(hints["memory_budget"]) == (int, float, type(None), str)
    assert typing.get_args(hints["stage_size"]) == (int, type(None), str)
