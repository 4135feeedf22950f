"""The all-gather contract on hand-built facts: what is on a parameter's chain and what ends it."""

from hypothesis import given

from autop_ac.graph.facts import Facts, Value
from autop_ac.recompute.collectives import parameter_chains
from tests.strategies import facts


class Graph:
    """Builds facts value by value; names are given, inputs are names."""

    def __init__(self):
        self.values = []
        self.at = {}

    def add(self, name, op="aten.op.default", inputs=(), side="forward", **more):
        index = len(self.values)
        self.at[name] = index
        self.values.append(Value(index, name, op, side, tuple(self.at[i] for i in inputs), **more))
        return name

    def parameter(self, name):
        return self.add(name, "placeholder", side="input", role="parameter", parameter=name)

    def gather(self, name, source, collective="all_gather_into_tensor", **more):
        op = f"_c10d_functional.{collective}.default"
        self.add(f"{name}_start", op, [source], collective=collective, **more)
        return self.add(name, "_c10d_functional.wait_tensor.default", [f"{name}_start"])

    def chain(self):
        made = Facts(tuple(self.values), (), (), ())
        return {self.values[i].name for i in parameter_chains(made)}


def test_cast_gather_wait_and_views_after_it_are_the_chain_and_the_matmul_ends_it():
    g = Graph()
    g.parameter("w")
    g.add("x", "placeholder", side="input", role="input")
    g.add("cast", "aten._to_copy.default", ["w"])
    g.gather("full", "cast")
    g.add("t", "aten.t.default", ["full"])
    g.add("mm", "aten.mm.default", ["x", "t"])
    g.add("relu", "aten.relu.default", ["mm"])
    assert g.chain() == {"cast", "full_start", "full", "t"}


def test_split_getitem_cat_of_one_parameter_stays_on_the_chain():
    g = Graph()
    g.parameter("w")
    g.gather("full", "w")
    g.add("split", "aten.split.Tensor", ["full"])
    g.add("a", "getitem", ["split"])
    g.add("b", "getitem", ["split"])
    g.add("cat", "aten.cat.default", ["a", "b"])
    g.add("slice", "aten.slice.Tensor", ["cat"])
    assert g.chain() == {"full_start", "full", "split", "a", "b", "cat", "slice"}


def test_cat_of_two_parameters_meets_a_second_input():
    g = Graph()
    for p in ("u", "w"):
        g.parameter(p)
        g.gather(f"{p}_full", p)
    g.add("cat", "aten.cat.default", ["u_full", "w_full"])
    assert "cat" not in g.chain() and "u_full" in g.chain()


def test_two_gathers_of_a_two_dimensional_mesh_and_several_users():
    g = Graph()
    g.parameter("w")
    g.gather("once", "w")
    g.gather("twice", "once")
    g.add("t", "aten.t.default", ["twice"])
    g.add("other", "aten.view.default", ["twice"])
    assert g.chain() == {"once_start", "once", "twice_start", "twice", "t", "other"}


def test_a_parameter_never_gathered_and_a_branch_off_the_gather_are_free():
    g = Graph()
    g.parameter("w")
    g.parameter("v")
    g.add("v_t", "aten.t.default", ["v"])
    g.add("cast", "aten._to_copy.default", ["w"])
    g.add("branch", "aten.sin.default", ["cast"])
    g.gather("full", "cast")
    assert g.chain() == {"cast", "full_start", "full"}


def test_a_gather_of_an_activation_is_no_parameter_gather():
    g = Graph()
    g.add("x", "placeholder", side="input", role="input")
    g.gather("full", "x")
    assert g.chain() == set()


def test_other_redistributions_count_only_when_stamped_with_a_parameter():
    g = Graph()
    g.parameter("w")
    g.gather("plain", "w", collective="all_to_all_single")
    assert g.chain() == set()
    g.gather("stamped", "w", collective="all_to_all_single", parameter="w")
    assert g.chain() == {"stamped_start", "stamped"}


def test_symbolic_sizes_are_no_second_input_and_random_values_end_a_chain():
    g = Graph()
    g.parameter("w")
    g.add("s", "placeholder", side="input", role="input", is_tensor=False)
    g.gather("full", "w")
    g.add("view", "aten.view.default", ["full", "s"])
    g.add("drop", "aten.native_dropout.default", ["view"], random=True)
    g.add("after", "aten.relu.default", ["drop"])
    assert g.chain() == {"full_start", "full", "view"}


@given(facts())
def test_a_chain_is_forward_deterministic_and_depends_on_parameters_alone(made):
    for i in parameter_chains(made):
        value = made.values[i]
        assert value.side == "forward" and not value.random and not value.effectful
        above, work = set(), [i]
        while work:
            j = work.pop()
            above.add(j)
            work.extend(k for k in made.values[j].inputs if made.values[k].is_tensor)
        assert {made.values[j].role for j in above} <= {"parameter", ""}
