"""Reports are built from frozen values: sums, reasons, folding, text, HTML and JSON."""

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard

from autop_ac.folding import fold_paths, ranges
from autop_ac.graph.facts import Facts, Value
from autop_ac.recompute.plan import Decision, Origin, RecomputePlan, Wish
from autop_ac.report.build import make_report
from autop_ac.report.explain import Explained
from autop_ac.report.plan_table import plan_table
from autop_ac.report.rows import ModuleRow
from autop_ac.report.text import duration, size, table_html, table_text
from autop_ac.sharding.plan import Choice, ShardingPlan

HINT = 'ac_region "block" saves [aten.mm]'


def chain(layers, sizes=(100, 40)):
    """``x -> (mm -> relu) * layers``; backward reads every relu, recomputed unless kept."""
    values = [Value(0, "x", "placeholder", "input", role="input", bytes=8, storages=(0,))]
    storage_bytes = [8]

    def add(name, op, side, inputs, nbytes, module=""):
        values.append(
            Value(
                len(values), name, op, side, inputs, bytes=nbytes,
                storages=(len(storage_bytes),), time_s=0.5, module=module,
            )
        )  # fmt: skip
        storage_bytes.append(nbytes)
        return len(values) - 1

    last, reads = 0, []
    for i in range(layers):
        mm = add(f"mm_{i}", "aten.mm.default", "forward", (last,), sizes[0], f"layers.{i}")
        last = add(f"relu_{i}", "aten.relu.default", "forward", (mm,), sizes[1], f"layers.{i}")
        reads.append(last)
    out = add("out", "aten.sum.default", "forward", (last,), 4, "head")
    back = add("back", "aten.add.Tensor", "backward", tuple(reads), 8)
    return Facts(tuple(values), (out,), (back,), tuple(storage_bytes))


def save_matmuls(facts, notes=(), stage_of=None):
    """Keep each mm by a hint, leave the rest to the automatic part."""
    decisions = {}
    for v in facts.forward:
        if v.op == "aten.mm.default":
            aside = (Wish("recompute", Origin.RULE, "rule ::MATMUL=recompute", "run.py:3"),)
            decisions[v.index] = Decision(v.index, "save", Origin.HINT, HINT, aside)
        else:
            reason = f"recomputed with stage {v.index}"
            decisions[v.index] = Decision(v.index, "recompute", Origin.AUTO, reason)
    saved = tuple(i for i, d in decisions.items() if d.action == "save")
    return RecomputePlan(decisions, saved, (), 2048, notes)


def report(layers=4, notes=(), sharding=None):
    facts = chain(layers)
    plan = save_matmuls(facts, notes)
    return make_report(
        facts,
        plan,
        sharding,
        peak_bytes=3 * 1024,
        peak_without_ac_bytes=5 * 1024,
        kept_bytes=100 * layers,
        kept_without_ac_bytes=140 * layers,
    )


PLAN = ShardingPlan(
    mesh_shape=(4, 2),
    axis_names=("dp", "tp"),
    choices={"mm": Choice("mm", (), (), compute_s=1e-3, redistribute_s=5e-4)},
    parameters={
        "layers.0.weight": (Shard(0), Shard(1)),
        "layers.1.weight": (Shard(0), Shard(1)),
        "layers.2.weight": (Replicate(), Shard(1)),
    },
    objective_s=1.5e-3,
    gap=0.001,
    notes=("batch on dp",),
)


def test_equal_layers_are_one_row_though_their_stages_differ():
    row, head = report().rows
    assert (row.module, row.layers) == ("layers.0-3", 4)
    assert (row.saved_bytes, row.recomputed_bytes) == (400, 160), "all four together"
    assert [(r.action, r.origin, r.reason, r.values) for r in row.reasons] == [
        ("save", "hint", HINT, 4),
        ("recompute", "auto", "recomputed with its stage", 4),
    ]
    assert head.module == "head"


def test_rows_sum_to_the_kept_bytes_and_time_counts_what_runs_again():
    made = report(3)
    assert sum(r.saved_bytes for r in made.rows) == made.kept_bytes
    assert made.recompute_s == 3 * 0.5
    assert [v.name for v in made.saved] == ["mm_0", "mm_1", "mm_2"]
    asked = ("rule asks to recompute: rule ::MATMUL=recompute (run.py:3)",)
    assert made.saved[1] == Explained(
        "mm_1", "aten.mm.default", "layers.1", "", (), "", 100, "saved", "hint", HINT, asked, 0.5
    )
    assert made.saved == made.explain("").saved, "the same values, whoever asks"


def test_what_backward_does_not_read_is_neither_saved_nor_recomputed():
    (reason,) = report().rows[-1].reasons
    assert (reason.action, reason.reason) == ("unread", "backward does not read it")
    assert report().rows[-1].recomputed_bytes == 0


def test_a_saved_view_counts_at_the_module_that_allocates_it_and_once():
    values = (
        Value(0, "x", "placeholder", "input", role="input", bytes=8, storages=(0,)),
        Value(1, "mm", "aten.mm.default", "forward", (0,), bytes=64, storages=(1,), module="a"),
        Value(2, "t", "aten.t.default", "forward", (1,), storages=(1,), follows=1, module="b"),
        Value(3, "xt", "aten.t.default", "forward", (0,), storages=(0,)),
        Value(4, "g", "aten.add.Tensor", "backward", (1, 2, 3), bytes=8, storages=(2,)),
    )
    facts = Facts(values, (1,), (4,), (8, 64, 8))
    kept = {i: Decision(i, "save", Origin.DEFAULT, "kept") for i in (1, 2, 3)}
    plan = RecomputePlan(kept, (1, 2, 3), ())
    sizes = dict.fromkeys(
        ("peak_bytes", "peak_without_ac_bytes", "kept_bytes", "kept_without_ac_bytes"), 64
    )
    rows = {r.module: r for r in make_report(facts, plan, **sizes).rows}
    assert (rows["a"].saved_bytes, rows["b"].saved_bytes) == (64, 0)
    assert rows[""].saved_bytes == 0, "a view of an input is alive anyway"
    assert [r.values for r in rows["a"].reasons] == [1], "the view counts with its base"


def test_hints_that_were_set_aside_keep_their_source_and_who_decided():
    (aside,) = report().set_aside
    assert (aside.module, aside.asked, aside.source) == ("layers.0-3", "recompute", "run.py:3")
    assert aside.values == ("mm_0", "mm_1", "mm_2", "mm_3")
    assert aside.decided_by == f"hint: {HINT}"


@pytest.mark.parametrize(
    ("decided", "asked", "told"),
    [
        ('enters ac_region "a"', 'ac_region "a" recomputes the rest', False),
        ('enters ac_region "a"', 'ac_region "b" recomputes the rest', True),
        ('rule "a.*=checkpoint" keeps what enters', 'rule "a.*=checkpoint"', False),
        ('rule "a.*=checkpoint" keeps what enters', 'rule "a.*=recompute"', True),
        ('ac_region "a" saves MATMUL', 'ac_region "a" recomputes the rest', True),
    ],
)
def test_what_one_hint_keeps_between_two_of_its_layers_is_not_set_aside(decided, asked, told):
    facts = chain(2)
    aside = (Wish("recompute", Origin.HINT, asked),)
    decisions = {
        v.index: Decision(v.index, "save", Origin.HINT, decided, aside) for v in facts.forward
    }
    sizes = dict.fromkeys(
        ("peak_bytes", "peak_without_ac_bytes", "kept_bytes", "kept_without_ac_bytes"), 1
    )
    made = make_report(facts, RecomputePlan(decisions, (2, 4), ()), **sizes)
    assert bool(made.set_aside) == told
    assert made.explain("relu_0").values[0].set_aside, "which is told where it is asked for"


def test_the_text_is_plain_and_says_everything():
    text = str(report(notes=("3 mm kept, 9 addmm are not",), sharding=PLAN))
    assert text.isascii() and max(map(len, text.splitlines())) <= 80
    flat = " ".join(text.split())
    for part in (
        "stages of 2.00 KiB", "400 B", "560 B", "3.00 KiB", "5.00 KiB", "layers.0-3",
        "on each of 8 devices", "predicted step", "recomputation in it", "note: 3 mm kept, 9 addmm are not", "note: batch on dp",
        "run.py:3", "on 4 values of layers.0-3 such as mm_0",
    ):  # fmt: skip
        assert part in flat, part
    assert str(report()) == str(report())


def test_long_names_are_broken_behind_dots_and_tables_stay_within_80_columns():
    name = "model.language_model.decoder.layers.0-31.self_attention.query_key_value"
    whole = "a_module_whose_name_is_one_word_of_more_letters_than_there_is_room"
    rows = (ModuleRow(name, 32, 10, 2**40, ()), ModuleRow(whole, 1, 5, 5, ()))
    text = str(dataclasses.replace(report(), rows=rows))
    table = table_text(("", "bytes", "share"), [(name, "1.00 MiB", "1%"), ("b", "2 B", "")], (1, 2))
    for shown in (text, table):
        assert max(map(len, shown.splitlines())) <= 80
        words = shown.split()
        assert "self_attention.query_key_value" in words
        assert "model.language_model.decoder.layers.0-31." in words
    assert "1.00 TiB" in text and "\n" + whole + "\n" in text


def test_html_is_a_table_with_everything_escaped():
    page = report(notes=("a < b",))._repr_html_()
    assert page.count("<tr>") == 1 + 1, "what holds nothing has no row"
    assert "a &lt; b" in page and "ac_region &quot;block&quot;" in page
    assert table_html(("<b>",), [("<i>\nx",)]).count("<br>") == 1


def test_the_dict_survives_json():
    plain = report(sharding=PLAN).to_dict()
    assert json.loads(json.dumps(plain)) == plain
    assert plain["rows"][0]["reasons"][0]["origin"] == "hint"
    assert plain["step_s"] == plain["estimate"]["time"]["compute_s"] + plain["recompute_s"]


def test_a_report_is_a_frozen_value():
    assert report() == report()
    with pytest.raises(AttributeError):
        report().kept_bytes = 0


def test_equal_layers_are_explained_in_one_line_though_their_stages_differ():
    answer = report().explain("layers.*")
    text = " ".join(str(answer).split())
    assert [v.name for v in answer.saved] == [f"mm_{i}" for i in range(4)]
    assert "4 x mm_0: aten.mm.default" in text and "layers.0-3" in text
    assert "4 x relu_0" in text and "auto: recomputed with its stage" in text
    assert "set aside: rule asks to recompute: rule ::MATMUL=recompute (run.py:3)" in text
    assert answer.recompute_s == 4 * 0.5 and answer.recomputed_bytes == 4 * 40
    assert "with stage 2" in str(report().explain("layers.0"))


def test_a_plan_table_folds_layers_and_names_axes():
    text = plan_table(PLAN)
    assert "mesh dp=4 x tp=2" in text
    flat = " ".join(text.split())
    assert "step by the search, nothing recomputed: 1.50 ms: computation 1.00 ms" in flat
    assert "0.10%" in text and "note: batch on dp" in text
    folded = [line.split() for line in text.splitlines() if "layers" in line]
    assert folded[0] == ["|", "layers.0-1.weight", "|", "2", "|", "S(0)", "|", "S(1)", "|"]
    assert folded[1][1:6] == ["layers.2.weight", "|", "1", "|", "R"]


def test_numbers_are_folded_at_every_place_of_the_path():
    paths = ["a.0.b.0", "a.0.b.1", "a.1.b.0", "a.1.b.1", "a.2.b.0"]
    folded = fold_paths([(p, "same") for p in paths])
    assert [p for p, _ in folded] == ["a.0-1.b.0-1", "a.2.b.0"]
    assert fold_paths([("a.0", 1), ("a.1", 2)]) == [("a.0", (0,)), ("a.1", (1,))]
    assert fold_paths([("", 1), ("0", 1)]) == [("", (0,)), ("0", (1,))]
    assert fold_paths([]) == []
    twice = [("a.0", 1), ("a.1", 1), ("a.0", 1), ("b.c", 1), ("b.c", 1)]
    assert fold_paths(twice) == [("a.0-1", (0, 1, 2)), ("b.c", (3, 4))]


@given(st.lists(st.integers(0, 30), min_size=1))
def test_ranges_say_the_numbers_and_no_others(numbers):
    said = set()
    for part in ranges(numbers).split(","):
        low, _, high = part.partition("-")
        said |= set(range(int(low), int(high or low) + 1))
    assert said == set(numbers)


@given(
    st.lists(
        st.tuples(
            st.lists(st.sampled_from(["a", "b", "0", "1", "2"]), max_size=4).map(".".join),
            st.integers(0, 1),
        ),
        unique=True,
    )
)
def test_folding_keeps_every_row_once_and_mixes_no_keys(rows):
    folded = fold_paths(rows)
    members = [i for _, group in folded for i in group]
    assert sorted(members) == list(range(len(rows)))
    for _, group in folded:
        assert len({rows[i][1] for i in group}) == 1
    assert len({(path, rows[group[0]][1]) for path, group in folded}) == len(folded)


def test_sizes_and_durations_read_well():
    assert [size(n) for n in (0, 1023, 1024, 3 << 19, 5 << 30, 1 << 40)] == [
        "0 B", "1023 B", "1.00 KiB", "1.50 MiB", "5.00 GiB", "1.00 TiB",
    ]  # fmt: skip
    assert [duration(s) for s in (2.0, 0.0015, 2e-6)] == ["2.00 s", "1.50 ms", "2.00 us"]


def test_what_looks_like_markup_is_text():
    text = table_text(("[b]h",), [("saves [aten.mm] [bold]",)], right=())
    assert "saves [aten.mm] [bold]" in text and "[b]h" in text


def test_long_paths_are_not_cut_off():
    path = ".".join(["a_module_with_a_long_name"] * 8)
    text = table_text(("module", "bytes"), [(path, "1 B")], right=(1,))
    assert path in text.replace("|", "").replace(" ", "").replace("\n", "").replace("1B", "")
