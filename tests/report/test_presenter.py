"""The presenter: facts as JSON, rows and words."""

import pytest

from poetmodel.problem import Constraint
from poetmodel.report.presenter import (
    Fact,
    constraint_facts,
    constraint_rows,
    count,
    document,
    escaped,
    fine_joules,
    look_up,
    percent,
    plural,
    row,
    rows,
    share,
    whole_bytes,
)
from poetmodel.schedule import ConstraintValue
from poetmodel.units import format_bytes


def test_a_fact_is_said_once_for_json_and_for_people():
    """JSON has the values of keys; people read what has a name and is known."""
    facts = [
        Fact("ram_bytes", 2048, "RAM", format_bytes, "of the device"),
        Fact("energy_j", None, "energy"),
        Fact("sha256", "abc"),
        row("made by", "hand"),
    ]
    assert document(facts) == {"ram_bytes": 2048, "energy_j": None, "sha256": "abc"}
    assert [(fact.name, fact.text, fact.note) for fact in rows(facts)] == [
        ("RAM", "2.00 KiB", "of the device"),
        ("made by", "hand", ""),
    ]


def constraint(name, value, key="page_ins:a", **limits):
    """Return the value of a constraint on one total."""
    row = Constraint(name=name, terms={key: 1}, **limits)
    return ConstraintValue(row=row, value=value, slack=0)


def test_constraints_are_told_with_value_and_limits():
    """In the unit of the sum; at a limit, beyond it, or an equality.

    Of many, people read of the first few and JSON has all. Those of several schedules stand beside
    each other by their names, each with its own limit, empty where a schedule has none.
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
    names = [fact.name for fact in rows(facts) if fact.name]
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
    assert look_up(said, lines[1][0].key) == 1


@pytest.mark.parametrize(
    ("said", "text"),
    [
        (percent(0.0020337), "0.20337 %"),
        (percent(1.0), "100 %"),
        (percent(3e-15), "0 %"),
        (percent(12.345678), "1234.6 %"),
        (escaped("a\x1b[31m b"), r"a\x1b[31m b"),
        (count(11689512), "11.69 M"),
        (count(512), "512 "),
        (count(None), "unknown"),
        (share(0.0033294), "0.3329 %"),
        (share(0), "0 %"),
        (share(1), "100 %"),
        (plural(1, "tensor"), "1 tensor"),
        (plural(12, "tensor"), "12 tensors"),
        (whole_bytes(1536), "1,536 B (1.50 KiB)"),
        (whole_bytes(12), "12 B"),
        (fine_joules(5.0317041), "5.031704 J"),
        (fine_joules(0.0167), "16.7 mJ"),
        (fine_joules(0.0), "0 J"),
    ],
)
def test_words_for_people(said, text):
    """Counts, shares, sizes and energies have as many digits as people need."""
    assert said == text
