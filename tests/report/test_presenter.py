"""The presenter: facts as JSON, rows and words; rows of equal blocks as one."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.worked import even_costs
from poetmodel.graph import Graph, operation
from poetmodel.problem import Constraint, Problem
from poetmodel.report.facts import decision_rows
from poetmodel.report.folding import HEADS, decision_table, fold, tail_start
from poetmodel.report.presenter import (
    Fact,
    constraint_facts,
    constraint_rows,
    escape_controls,
    format_count,
    format_exact_bytes,
    format_items,
    format_percent,
    format_precise_joules,
    format_ratio,
    listed_facts,
    text_fact,
    to_json_object,
    value_at_path,
)
from poetmodel.schedule import ConstraintValue, Schedule
from poetmodel.units import format_bytes


def test_a_fact_is_said_once_for_json_and_for_people():
    """JSON has the values of keys; tables have those with a name that are known."""
    facts = [
        Fact("ram_bytes", 2048, "RAM", format_bytes, "of the device"),
        Fact("energy_j", None, "energy"),
        Fact("sha256", "abc"),
        text_fact("made by", "hand"),
    ]
    assert to_json_object(facts) == {"ram_bytes": 2048, "energy_j": None, "sha256": "abc"}
    assert [(fact.name, fact.text, fact.note) for fact in listed_facts(facts)] == [
        ("RAM", "2.00 KiB", "of the device"),
        ("made by", "hand", ""),
    ]


def constraint(name, value, key="page_ins:a", **limits):
    """Return the value of a constraint on one total."""
    row = Constraint(name=name, terms={key: 1}, **limits)
    return ConstraintValue(row=row, value=value, tolerance=0)


def test_constraints_are_told_with_value_and_limits():
    """In the unit of the sum; at a limit, beyond it, or an equality.

    Of many, tables have the first few and JSON all. Those of several schedules are in one row
    by name, each with its own limit, empty if a schedule has none.
    """
    found = [
        constraint("wear", 3136, "bytes_written", upper=4000),
        constraint("late", 2.5, "compute_s", upper=2.5),
        constraint("same", 2, lower=2, upper=2),
        constraint("few", 3, upper=2),
        constraint("some", 3, lower=1, upper=7),
        constraint("thrift", 0.25, "energy_j", lower=0.5),
    ]
    first, *facts = constraint_facts(found)
    assert [row["name"] for row in first.value] == [one.row.name for one in found]
    assert [(fact.name, fact.text, fact.note, fact.alarm) for fact in facts] == [
        ("wear", "3,136 B (3.06 KiB)", "at most 4,000 B (3.91 KiB)", False),
        ("late", "2.5 s", "at its limit: at most 2.5 s", False),
        ("same", "2", "exactly 2", False),
        ("few", "3", "above its limit: at most 2", True),
        ("some", "3", "at least 1 and at most 7", False),
        ("thrift", "250 mJ", "below its limit: at least 500 mJ", True),
    ]
    assert list(constraint_facts([])) == []
    many = [constraint(f"each[{place}]", place % 10, upper=9) for place in range(100)]
    facts = list(constraint_facts(many))
    assert len(facts[0].value) == 100
    names = [fact.name for fact in listed_facts(facts) if fact.name]
    assert names[:10] == [f"each[{place}]" for place in range(9, 100, 10)]
    assert (facts[-1].text, facts[-1].note) == (
        f"and {100 - len(names)} constraints more",
        "10 of all are at a limit",
    )
    one = [constraint("wear", 3, upper=4), constraint("few", 1, upper=2)]
    other = [constraint("few", 3, upper=3)]
    lines = list(constraint_rows([one, other]))
    assert [[fact.text for fact in line] for line in lines] == [
        ["3; at most 4", ""],
        ["1; at most 2", "3; at its limit: at most 3"],
    ]
    said = {"constraints": [value.to_dict() for value in one]}
    assert value_at_path(said, lines[1][0].key) == 1


@pytest.mark.parametrize(
    ("said", "text"),
    [
        (format_percent(0.0020337), "0.20337 %"),
        (format_percent(1.0), "100 %"),
        (format_percent(3e-15), "0 %"),
        (format_percent(12.345678), "1234.6 %"),
        (escape_controls("a\x1b[31m b"), r"a\x1b[31m b"),
        (format_count(11689512), "11.69 M"),
        (format_count(512), "512 "),
        (format_count(None), "unknown"),
        (format_ratio(0.0033294), "0.3329 %"),
        (format_ratio(0), "0 %"),
        (format_ratio(1), "100 %"),
        (format_items(1, "tensor"), "1 tensor"),
        (format_items(12, "tensor"), "12 tensors"),
        (format_exact_bytes(1536), "1,536 B (1.50 KiB)"),
        (format_exact_bytes(12), "12 B"),
        (format_precise_joules(5.0317041), "5.031704 J"),
        (format_precise_joules(0.0167), "16.7 mJ"),
        (format_precise_joules(0.0), "0 J"),
    ],
)
def test_words_for_people(said, text):
    """Counts, shares, sizes and energies have as many digits as people need."""
    assert said == text


# -- folding -------------------------------------------------------------------------------------
def names(*given):
    """Fold equal items with these names."""
    return [each.name for each in fold(given, name=str, key=lambda _: None)]


@pytest.mark.parametrize(
    ("members", "name"),
    [
        (("block0.x", "block1.x", "block2.x"), "block0-2.x"),
        (("block0.x", "block2.x", "block3.x", "block4.x"), "block0,2-4.x"),
        (("l1.0.w", "l1.1.w", "l2.0.w", "l2.1.w"), "l1-2.0-1.w"),
        (("block9.x", "block10.x"), "block9-10.x"),
        (("0/mul", "3/mul"), "0,3/mul"),
        (("alone7",), "alone7"),
        (("a01", "a02"), "a01,02"),
    ],
)
def test_names_of_folds_have_ranges(members, name):
    """Numbers become ranges and lists, in the order of numbers."""
    assert names(*members) == [name]


def test_fold_stands_for_its_members_alone():
    """If a member of a block is missing, there are two rows.

    Items with other keys stay separate, in the order of first members.
    """
    assert names("l1.0.w", "l1.1.w", "l2.0.w") == ["l1.0-1.w", "l2.0.w"]
    assert names("b0.x", "b0.y", "b1.x") == ["b0-1.x", "b0.y"]
    sizes = {"b0": 4, "b1": 8, "b2": 4}
    assert [each.name for each in fold(sizes, name=str, key=sizes.__getitem__)] == ["b0,2", "b1"]


@given(st.sets(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1))
def test_every_member_is_in_one_fold(points):
    """Folds partition the items, keep their order, and each is a whole product of numbers."""
    given = [f"a{x}.b{y}" for x, y in sorted(points)]
    folds = fold(given, name=str, key=lambda _: None)
    assert sorted(one for each in folds for one in each.members) == sorted(given)
    for each in folds:
        assert list(each.members) == sorted(each.members)
        first, second = ({n.split(".")[k] for n in each.members} for k in (0, 1))
        assert len(each.members) == len(first) * len(second)


def table(**options):
    """Return the table of a chain of equal blocks, all of it kept; the last is not read."""
    names = ["x", *(f"block{i}.y" for i in range(3))]
    nodes = [operation("x", output_bytes=4)]
    nodes += [operation(b, output_bytes=8, inputs=(a,)) for a, b in pairwise(names)]
    graph = Graph(name="blocks", nodes=tuple(nodes))
    problem = Problem(graph, even_costs(graph), ram=100)
    schedule = Schedule(R=tuple((t, t) for t in range(4)), S_RAM=((1, 0), (2, 1), (3, 2)))
    return decision_table(decision_rows(problem, schedule), **options)


def test_row_of_several_tensors_has_their_sum():
    """The row sorts by the sum, states its terms, and contains the rows of the members.

    Without costs, there are no columns of costs: heads and cells go together.
    """
    rows = table()["rows"]
    assert [row["name"] for row in rows] == ["x", "block0-1.y", "block2.y"]
    one, several, _ = rows
    assert (one["tensor"], one["members"]) == (0, [])
    assert several["tensor"] is None
    assert (several["choice"], several["cells"][0]) == ("kept", (16, "2 x 8 B"))
    assert several["cells"][HEADS.index("stages")] == (1, "1-3")
    assert [(each["name"], each["tensor"]) for each in several["members"]] == [
        ("block0.y", 1),
        ("block1.y", 2),
    ]
    for costs in ((), ("time",)):
        found = table(costs=costs)
        assert set(HEADS) - set(found["heads"]) == {"energy", "time"} - set(costs)
        assert {len(row["cells"]) for row in found["rows"]} == {len(found["heads"])}


@pytest.mark.parametrize(
    ("name", "end"),
    [
        ("fc1", "fc1"),
        ("encoder.layer.0.attention.query", "query"),
        ("a.b.norm.mean", "a.b.norm.mean"),
        ("a_very_long_name_without_any_part", "ithout_any_part"[-14:]),
        ("a_very_long_name_that_ends.", "ame_that_ends."),
    ],
)
def test_end_of_a_name_is_a_whole_part(name, end):
    """It begins after a dot or a slash where there is one near."""
    assert name[tail_start(name) :] == end
