import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention  # noqa: F401  registers its operator

from autop_ac.errors import ConfigError
from autop_ac.policies import (
    ATTENTION,
    COLLECTIVES,
    MATMUL,
    Selector,
    conflicts,
    nearest_selector,
    parse_selector,
    parse_selectors,
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
    ],
)
def test_forms_of_a_selector(given, text):
    selector = parse_selector(given)
    assert str(selector) == selector.text == text
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
    [("aten.mmm", "aten.mm"), ("matmul", "aten.matmul"), ("aten.gelu.defalt", "aten.gelu.default"),
     ("matmull", "mat"), ("MATMULS", "MATMUL"), ("aten.mm.dflt", "aten.mm")],
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
