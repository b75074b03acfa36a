"""Rows of equal blocks as one."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.worked import even_costs
from poetmodel.graph import Graph, operation
from poetmodel.problem import Problem
from poetmodel.report.facts import decision_rows
from poetmodel.report.folding import HEADS, decision_table, fold, tail
from poetmodel.schedule import Schedule


def names(*given):
    """Fold equal things of these names."""
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
    """Where a member of a block is missing, there are two rows.

    What differs in the key stays apart, in the order of first members.
    """
    assert names("l1.0.w", "l1.1.w", "l2.0.w") == ["l1.0-1.w", "l2.0.w"]
    assert names("b0.x", "b0.y", "b1.x") == ["b0-1.x", "b0.y"]
    sizes = {"b0": 4, "b1": 8, "b2": 4}
    assert [each.name for each in fold(sizes, name=str, key=sizes.__getitem__)] == ["b0,2", "b1"]


@given(st.sets(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1))
def test_every_member_is_in_one_fold(points):
    """Folds part the things, keep their order, and each is a whole product of numbers."""
    given = [f"a{x}.b{y}" for x, y in sorted(points)]
    folds = fold(given, name=str, key=lambda _: None)
    assert sorted(one for each in folds for one in each.members) == sorted(given)
    for each in folds:
        assert list(each.members) == sorted(each.members)
        first, second = ({n.split(".")[k] for n in each.members} for k in (0, 1))
        assert len(each.members) == len(first) * len(second)


def table(**options):
    """Return the table of a chain of equal blocks, all of it kept; nothing reads the last."""
    names = ["x", *(f"block{i}.y" for i in range(3))]
    nodes = [operation("x", output_bytes=4)]
    nodes += [operation(b, output_bytes=8, inputs=(a,)) for a, b in pairwise(names)]
    graph = Graph(name="blocks", nodes=tuple(nodes))
    problem = Problem(graph, even_costs(graph), ram=100)
    schedule = Schedule(R=tuple((t, t) for t in range(4)), S_RAM=((1, 0), (2, 1), (3, 2)))
    return decision_table(decision_rows(problem, schedule), **options)


def test_row_of_several_tensors_has_their_sum():
    """The row sorts by the sum, says how it is made up, and holds the rows of the members.

    Without costs there are no columns of costs: heads and cells go together.
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
    ],
)
def test_end_of_a_name_is_a_whole_part(name, end):
    """It begins after a dot or a slash where there is one near."""
    assert name[tail(name) :] == end
