import fnmatch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import flex_attention  # noqa: F401  registers its operator

from autop_ac.errors import ConfigError
from autop_ac.policies import (
    ATTENTION,
    COLLECTIVES,
    MATMUL,
    Rule,
    Selector,
    check_name,
    conflicts,
    every,
    module_matches,
    nearest_selector,
    parse_rule,
    parse_rules,
    parse_selector,
    parse_selectors,
    rule_conflicts,
)

aten = torch.ops.aten


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (aten.mm, "aten.mm"),
        (aten.mm.default, "aten.mm.default"),
        ("aten.mm", "aten.mm"),
        ("aten::mm", "aten.mm"),
        ("torch.ops.aten.sum.dim_IntList", "aten.sum.dim_IntList"),
        (MATMUL, "MATMUL"),
        ("ATTENTION", "ATTENTION"),
        (torch.ops.higher_order.flex_attention, "flex_attention"),
        (Selector("aten.mm"), "aten.mm"),
        (" query ", "query"),
        ("mm", "mm"),
    ],
)
def test_forms_of_a_selector(given, text):
    selector = parse_selector(given)
    assert str(selector) == selector.text == text
    assert selector.is_name == (text in ("query", "mm"))
    assert {selector: 1}[parse_selector(text)] == 1


def test_a_packet_is_one_selector_and_repeats_fall_away():
    assert parse_selectors(aten.mm) == (Selector("aten.mm"),)
    assert parse_selectors(["aten.mm", aten.mm, MATMUL]) == (
        Selector("aten.mm"),
        Selector("MATMUL"),
    )
    assert parse_selectors(()) == ()


@pytest.mark.parametrize(
    ("given", "nearest"),
    [("aten.mmm", "aten.mm"), ("aten.gelu.defalt", "aten.gelu.default"), ("MATMULS", "MATMUL"),
     ("ATENTION", "ATTENTION"), ("aten.mm.dflt", "aten.mm"), ("aten::mmm", "aten.mm")],
)  # fmt: skip
def test_an_unknown_name_gives_the_nearest_real_one(given, nearest):
    with pytest.raises(ConfigError, match=f"no operator {given!r}.*nearest one is '[^']*{nearest}"):
        parse_selector(given)


@pytest.mark.parametrize("bad", [3, None, torch.mm, torch.nn.Linear, object()])
def test_what_selects_nothing_is_refused(bad):
    with pytest.raises(ConfigError, match=r"selects no operator: give an operator.*aten\.mm"):
        parse_selector(bad)


def test_matching():
    assert parse_selector(aten.sum).matches("aten.sum.dim_IntList")
    assert not parse_selector(aten.sum.default).matches("aten.sum.dim_IntList")
    assert not parse_selector(aten.mm).matches("aten.mm_out.default")
    assert not parse_selector(aten.mm).matches("mine.mm.default")
    assert parse_selector(torch.ops.higher_order.flex_attention).matches("flex_attention")


def _executes(op, kind):
    return any(parse_selector(kind).matches(text) for text in (str(op), f"{op}.default"))


@pytest.mark.parametrize("op", ["mm", "addmm", "bmm", "baddbmm", "matmul", "linear", "einsum"])
def test_matmul_group(op):
    assert _executes(getattr(aten, op).default if op != "matmul" else aten.matmul.default, MATMUL)
    assert not parse_selector(MATMUL).matches("aten.convolution.default")


def test_attention_group_takes_every_forward_variant_and_no_backward():
    from autop_ac._torch_annotate import operator_names

    names = {n for n in operator_names() if n.startswith("aten._scaled_dot_product_")}
    assert len(names) > 6
    for name in names:
        assert parse_selector(ATTENTION).matches(name) == ("backward" not in name), name
    assert parse_selector(ATTENTION).matches("flex_attention")


def test_collectives_group_takes_all_of_c10d_functional():
    import torch.distributed._functional_collectives  # noqa: F401

    from autop_ac._torch_annotate import operator_names

    skip = ("batch_p2p_ops", "isend", "irecv", "_wrap_tensor_autograd", "reduce_scatter_tensor_out")
    for name in operator_names():
        if name.startswith("_c10d_functional.") and not any(s in name for s in skip):
            assert parse_selector(COLLECTIVES).matches(name), name


def test_overlap():
    mm, mm_default, addmm = map(parse_selector, ("aten.mm", "aten.mm.default", "aten.addmm"))
    group = parse_selector(MATMUL)
    assert mm.overlap(mm_default) == mm_default.overlap(mm) == ("aten.mm.default",)
    assert group.overlap(addmm) == ("aten.addmm",)
    assert mm.overlap(addmm) == mm_default.overlap(parse_selector("aten.mm.out")) == ()
    assert mm_default.overlap(mm_default) == ("aten.mm.default",)
    assert conflicts([mm, addmm], [mm_default]) == (
        "save=aten.mm and recompute=aten.mm.default both select aten.mm.default",
    )


def test_nearest_among_what_is_there():
    linear = parse_selector("aten.linear")
    assert nearest_selector(linear, ["aten.addmm.default", "aten.relu.default"]) == (
        "MATMUL covers addmm"
    )
    relu6 = parse_selector("aten.relu6")
    assert "aten.relu" in nearest_selector(relu6, ["aten.addmm.default", "aten.relu.default"])
    assert nearest_selector(relu6, ["mine.other.default"]) == ""


# ---- names and every -------------------------------------------------------------------------


def test_a_word_is_a_name_and_an_operator_has_a_dot():
    mm = parse_selector("mm")
    assert mm.matches("aten.sin.default", ["mm"]) and not mm.matches("aten.mm.default", ["q"])
    assert mm.packets == () and not mm.matches("aten.mm.default")
    assert not parse_selector("aten.mm").matches("aten.sin.default", ["aten.mm"])
    assert mm.overlap(parse_selector("mm")) == ("mm",)
    assert mm.overlap(parse_selector("aten.mm")) == mm.overlap(parse_selector(MATMUL)) == ()


@pytest.mark.parametrize("name", ["q", "mm", "out_proj", "layer-norm", "Q", "_x1"])
def test_names_that_may_be_given(name):
    assert check_name(name) == name


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("aten.mm", "no name of a value: give a word.*an operator has a dot"),
        ("", "no name of a value"),
        ("a b", "no name of a value"),
        ("q/2", "no name of a value"),
        (3, "3 is no name of a value"),
        ("MATMUL", "'MATMUL' is taken by a group of operators; choose another"),
        ("flex_attention", "is taken by a higher-order operator of operators"),
        ("MATMULL", "nearest one is 'MATMUL', which is a group.*choose another"),
    ],
)
def test_names_that_may_not(name, message):
    with pytest.raises(ConfigError, match=message):
        check_name(name)


def test_every():
    second = every(2, aten.mm)
    assert second == parse_selector("aten.mm/2") == parse_selector(" aten::mm / 2 ")
    assert (str(second), second.every) == ("aten.mm/2", 2)
    assert every(1, MATMUL) == parse_selector(MATMUL)
    assert str(every(3, "query")) == "query/3"
    assert second.matches("aten.mm.default")


@pytest.mark.parametrize(
    ("n", "op", "message"),
    [
        (0, aten.mm, r"every\(0, ...\): the first is a whole number from 1 on"),
        (True, aten.mm, r"every\(True"),
        (2.0, aten.mm, r"every\(2.0"),
        (2, "aten.mm/3", "it says already one of 3"),
        (2, "aten.mmm", "nearest one is 'aten.mm'"),
    ],
)
def test_what_every_refuses(n, op, message):
    with pytest.raises(ConfigError, match=message):
        every(n, op)


@pytest.mark.parametrize("text", ["aten.mm/0", "aten.mm/x", "aten.mm/", "aten.mm/-1", "q/1.5"])
def test_every_in_text_is_a_whole_number(text):
    with pytest.raises(ConfigError, match='behind "/" stands a whole number from 1 on'):
        parse_selector(text)


def test_one_of_many_is_more_specific_than_all():
    assert conflicts([every(2, aten.mm)], [parse_selector("aten.mm")]) == ()
    assert conflicts([every(2, aten.mm)], [every(3, MATMUL)]) == (
        "save=aten.mm/2 and recompute=MATMUL/3 both select aten.mm",
    )
    ranks = [parse_selector(x).rank for x in ("q", "q/2", "aten.mm/2", "aten.mm", "MATMUL")]
    assert ranks == [0, 0, 1, 2, 2]


@pytest.mark.parametrize(
    ("name", "ops", "names", "message"),
    [
        ("quer", ["aten.mm.default"], ["key", "query"], "the nearest name is query"),
        ("mm", ["aten.mm.default"], ["query"], "the operator is written aten.mm"),
        ("matmuls", ["mine.matmul.default"], [], "the nearest operator here is mine.matmul"),
        ("attention", [], [], "the group is written ATTENTION"),
        ("zzz", ["aten.mm.default"], ["query"], ""),
    ],
)
def test_nearest_to_a_name(name, ops, names, message):
    assert nearest_selector(parse_selector(name), ops, names) == message


# ---- rules -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("layers.*.attention::aten.mm=save", Rule("layers.*.attention", aten.mm, "save")),
        ("layers.*=recompute", Rule("layers.*", action="recompute")),
        ("layers.*=checkpoint", Rule("layers.*", action="checkpoint")),
        ("a=prefer_checkpoint", Rule("a", action="checkpoint", prefer=True)),
        ("::MATMUL/2=save", Rule(op=every(2, MATMUL), action="save")),
        (" layers.[0-3] :: query = prefer_save ", Rule("layers.[0-3]", "query", "save", True)),
        ("**::aten::mm=prefer_recompute", Rule("**", "aten.mm", "recompute", prefer=True)),
    ],
)
def test_rules_in_text(text, rule):
    assert parse_rule(text) == rule == parse_rule(rule)
    assert hash(parse_rule(text)) == hash(rule)
    assert parse_rules(text) == parse_rules([text, rule]) == (rule,)


_parts = st.sampled_from(("layers", "*", "**", "3", "a-b", "[0-3]", "w?", "*_proj", "[!a]x"))
_rules = st.builds(
    Rule,
    module=st.lists(_parts, min_size=1, max_size=4).map(".".join),
    op=st.one_of(
        st.none(),
        st.builds(
            Selector,
            st.sampled_from(("aten.mm", "aten.mm.default", "MATMUL", "flex_attention", "q", "mm")),
            st.integers(1, 9),
        ),
    ),
    action=st.sampled_from(("save", "recompute")),
    prefer=st.booleans(),
)


@given(_rules)
def test_a_rule_is_read_back_from_its_text(rule):
    assert parse_rule(str(rule)) == rule
    if rule.op is not None:
        anywhere = Rule("", rule.op, rule.action, rule.prefer)
        assert parse_rule(str(anywhere)) == anywhere


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("layers.*", "rule 'layers.*' has no action: write \"MODULE::OPERATOR=save\""),
        ("layers.*=keep", 'action=\'keep\'; allowed are "save", "recompute" and "checkpoint"'),
        ("layers.*=prefer_keep", "action='keep'; allowed"),
        ("a::MATMUL=checkpoint", 'write "a::MATMUL=save" before "a=checkpoint"'),
        ("=save", 'neither module nor operator is given; "**=save" is everything'),
        ("layers::=save", 'has no operator behind "::"'),
        ("aten.mm=save", 'is an operator: write "::aten.mm=save"'),
        ("MATMUL=save", 'is an operator: write "::MATMUL=save"'),
        ("aten::mm=save", 'is an operator: write "::aten.mm=save"'),
        ("::aten.mmm=save", "the nearest one is 'aten.mm'"),
        ("layers..0=save", "is no glob of a module path"),
        ("layers**=save", "is no glob of a module path"),
        ("layers/0=save", "is no glob of a module path"),
        ("layers.[3-0]=save", "is no glob of a module path: bad character range"),
    ],
)
def test_a_bad_rule_is_named_with_what_to_write(text, message):
    with pytest.raises(ConfigError) as error:
        parse_rule(text)
    assert message in str(error.value) and f"rule {text!r}" in str(error.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"module": 3, "action": "save"}, "module=3 is no text"),
        ({"module": "a", "action": "save", "prefer": 1}, "prefer=1; allowed are True and False"),
        ({"module": "a"}, "action=''"),
    ],
)
def test_a_bad_rule_object(fields, message):
    with pytest.raises(ConfigError, match=message):
        Rule(**fields)
    with pytest.raises(ConfigError, match="3 .int. is no rule: give a Rule, or text"):
        parse_rule(3)


@pytest.mark.parametrize(
    ("glob", "path", "instance"),
    [
        ("layers.*", "layers.0.mlp.up", "layers.0"),
        ("layers.*", "layers", None),
        ("**.mlp", "a.mlp.b.mlp.c", "a.mlp"),
        ("**", "a.b", ""),
        ("*", "", None),
    ],
)
def test_the_module_that_a_checkpoint_is_around(glob, path, instance):
    assert Rule(glob, action="checkpoint").instance(path) == instance


@pytest.mark.parametrize(
    ("glob", "path", "matches"),
    [
        ("", "", True),
        ("", "layers.0", True),
        ("**", "", True),
        ("*", "", False),
        ("*", "layers.0.mlp", True),
        ("layers", "layers.0.mlp", True),
        ("layers", "layers2.0", False),
        ("layers.*", "layers", False),
        ("layers.*", "layers.0", True),
        ("layers.*", "layers.0.attention.q", True),
        ("layers.*.attention", "layers.0.attention.q", True),
        ("layers.*.attention", "layers.0.mlp.attention", False),
        ("layers.**.attention", "layers.0.mlp.attention.q", True),
        ("layers.**.attention", "layers.attention", True),
        ("**.attention", "attention", True),
        ("**.attention", "layers.0.attention2", False),
        ("layers.[0-2]", "layers.1.mlp", True),
        ("layers.[!0-2]", "layers.1.mlp", False),
        ("layers.1", "layers.12", False),
        ("layers.1?", "layers.12", True),
        ("*_proj", "q_proj", True),
        ("layers.*_proj", "layers.0.q_proj", False),
    ],
)
def test_module_globs(glob, path, matches):
    assert module_matches(glob, path) == matches


_words = st.text("ab1_*?", min_size=1, max_size=4).filter(lambda t: "**" not in t)


@given(st.lists(_words, min_size=1, max_size=3), st.lists(st.text("ab1_", min_size=1, max_size=4)))
def test_a_glob_without_double_stars_goes_part_by_part(parts, path):
    naive = len(path) >= len(parts) and all(
        fnmatch.fnmatchcase(have, want) for have, want in zip(path, parts)
    )
    assert module_matches(".".join(parts), ".".join(path)) == naive


def test_contradictory_rules_are_pairs_of_one_selector():
    rules = parse_rules(["::aten.mm=save", "a::aten.mm=recompute", "::aten.mm/2=recompute"])
    assert rule_conflicts(rules) == ()
    assert rule_conflicts(parse_rules(["a=save", "b=save", "a=recompute", "b=prefer_save"])) == (
        '"a=save" and "a=recompute" speak of the same values',
        '"b=save" and "b=prefer_save" speak of the same values',
    )
