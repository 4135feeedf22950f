import dataclasses
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autop_ac.config import ACConfig, CompileConfig, parse_bytes
from autop_ac.errors import ConfigError, HintError
from autop_ac.policies import MATMUL, Rule, Selector, every

aten = torch.ops.aten


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("512 MiB", 512 * 2**20),
        ("1.5 GB", 1_500_000_000),
        ("64kib", 65536),
        ("2 TiB", 2 * 2**40),
        ("100 B", 100),
        ("0.1 B", 1),
        ("1.0000000001 KB", 1001),
        (4096, 4096),
        (2**70, 2**70),
    ],
)
def test_sizes_are_exact_and_rounded_up(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "bad",
    [True, 0, -1, 1.0, 0.5, float("nan"), float("inf"), "8 GB GB", "8 G", "1024", "", "auto ",
     "-1 GB", "0 GB", "inf GB", "nan MiB", "1e3 MB", b"1 GB", [1], torch.tensor(1.5)],
)  # fmt: skip
def test_what_is_no_size_is_refused_with_value_range_and_off(bad):
    with pytest.raises(ConfigError, match="stage_size=None for off") as error:
        ACConfig(stage_size=bad)
    assert repr(bad) in str(error.value)
    assert "512 MiB" in str(error.value)
    assert isinstance(error.value, ValueError)


@pytest.mark.parametrize("unit", ["G", "g", "Gi"])
def test_a_unit_without_its_byte_is_told_of(unit):
    for name in ("stage_size", "memory_budget"):
        near = f'{name}=\'40{unit}\'.*did you mean "40 GiB" or "40 GB"'
        with pytest.raises(ConfigError, match=near):
            ACConfig(**{name: f"40{unit}"})


@given(st.integers(1, 10**6), st.sampled_from(["KB", "MiB", "GB", "TiB", "PB", "EiB"]))
def test_a_decimal_point_never_rounds_down(thousandths, unit):
    size = parse_bytes(f"{thousandths / 1000:.3f} {unit}")
    exact = Fraction(thousandths, 1000) * parse_bytes(f"1 {unit}")
    assert exact <= size < exact + 1


def test_defaults_and_the_forms_of_stage_size():
    assert ACConfig() == ACConfig(enable=True, stage_size="auto", save=(), recompute=())
    assert ACConfig().stage_bytes is None
    assert ACConfig(stage_size=None).stage_bytes is None
    assert ACConfig(stage_size="1 KiB").stage_bytes == 1024
    assert hash(ACConfig(save=aten.mm)) == hash(ACConfig(save=["aten.mm"]))


def test_frozen_and_replaceable():
    config = ACConfig(save=MATMUL)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.enable = False
    assert dataclasses.replace(config, stage_size=7).stage_bytes == 7
    assert dataclasses.replace(config, stage_size=7).save == (Selector("MATMUL"),)


@pytest.mark.parametrize(
    ("given", "budget"),
    [
        ("40 GiB", 40 * 2**30),
        ("1.0000000001 KB", 1000),
        (7, 7),
        (0.1, Fraction(0.1)),
        (1.0, 1),
        ("device", "device"),
        (None, None),
    ],
)
def test_budgets_are_exact_and_rounded_down(given, budget):
    assert ACConfig(memory_budget=given).budget == budget


@pytest.mark.parametrize(
    "bad",
    [True, 0, -1, 0.0, -0.5, 1.5, float("nan"), float("inf"), "8 GB GB", "0.1 B", "Device", [1]],
)
def test_what_is_no_budget_is_refused_with_value_range_and_off(bad):
    with pytest.raises(ConfigError, match="say memory_budget=None for off") as error:
        ACConfig(memory_budget=bad)
    assert repr(bad) in str(error.value)
    assert "at most 1" in str(error.value)


@pytest.mark.parametrize("stage_size", [None, "1 MiB", 7])
def test_a_budget_replaces_stages(stage_size):
    with pytest.raises(ConfigError, match="a budget replaces stages.*memory_budget=None"):
        ACConfig(memory_budget="1 GiB", stage_size=stage_size)
    assert ACConfig(memory_budget="1 GiB", stage_size="auto").budget == 2**30


def test_optimizers_are_known_by_name():
    assert ACConfig(optimizer="adamw").optimizer == "adamw"
    with pytest.raises(ConfigError, match="optimizer='Adam'.*adamw.*None counts"):
        ACConfig(optimizer="Adam")
    for wrong, near in (("adamv", "adam"), ("AdamW", "adamw"), ("SGD", "sgd")):
        with pytest.raises(ConfigError, match=f"did you mean {near}"):
            ACConfig(optimizer=wrong)


@pytest.mark.parametrize("bad", [1, 0, "yes", None])
def test_enable_is_a_bool(bad):
    with pytest.raises(ConfigError, match=f"enable={bad!r}.*False is off"):
        ACConfig(enable=bad)


def test_an_unknown_operator_in_a_rule_names_the_field():
    with pytest.raises(ConfigError, match="recompute: there is no operator 'aten.mmm'.*aten.mm"):
        ACConfig(recompute="aten.mmm")


def test_contradictory_rules():
    with pytest.raises(ConfigError, match="save=MATMUL and recompute=aten.mm both select aten.mm"):
        ACConfig(save=[MATMUL], recompute=[aten.mm])
    with pytest.raises(HintError):
        ACConfig(save=[aten.mm.default], recompute=[aten.mm])
    ACConfig(save=[aten.mm.default], recompute=[aten.mm.out, aten.addmm])


def test_rules():
    config = ACConfig(rules=["layers.*=recompute", Rule(op=every(2, aten.mm), action="save")])
    assert config == ACConfig(rules=("layers.*=recompute", "::aten.mm/2=save"))
    assert [str(r) for r in config.rules] == ["layers.*=recompute", "::aten.mm/2=save"]
    assert ACConfig(rules="layers.*=save").rules == (Rule("layers.*", action="save"),)
    assert ACConfig().rules == ()
    mixed = ACConfig(save=[MATMUL, every(2, aten.sin), "q"], recompute=["aten.sin"], rules="a=save")
    assert [str(r) for r in mixed.rules_in_order] == [
        "a=save", "::q=save", "::aten.sin/2=save", "::MATMUL=save", "::aten.sin=recompute",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rules": "layers.*"}, "rules: rule 'layers.*' has no action"),
        ({"rules": [3]}, "rules: 3 .int. is no rule"),
        ({"rules": ["a=save", "a=recompute"]}, '"a=save" and "a=recompute" speak of the same'),
        ({"rules": ["::aten.mm=save"], "recompute": [aten.mm]}, '"::aten.mm=recompute" speak of'),
        ({"save": "q", "recompute": "q"}, "save=q and recompute=q both select q"),
    ],
)
def test_bad_rules(settings, message):
    with pytest.raises(ConfigError, match=message) as error:
        ACConfig(**settings)
    assert isinstance(error.value, HintError) == ("speak of" in message or "both" in message)


def test_compile_config():
    assert CompileConfig("eager").backend == "eager"
    with pytest.raises(ConfigError, match="backend='tvm'.*eager.*inductor"):
        CompileConfig("tvm")
    with pytest.raises(ConfigError, match=r"did you mean inductor\?"):
        CompileConfig("indutcor")
