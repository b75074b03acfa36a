"""The presenter: facts as JSON, rows and words."""

from __future__ import annotations

import pytest

from poetmodel.report.presenter import Fact, document, percent, row, rows
from poetmodel.units import format_bytes


def test_a_fact_is_said_once_for_json_and_for_people() -> None:
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


@pytest.mark.parametrize(
    ("ratio", "text"),
    [
        (0.0020337, "0.20337 %"),
        (1.0, "100 %"),
        (0.0, "0 %"),
        (1e-4, "0.01 %"),
        (3e-15, "0 %"),
        (12.345678, "1234.6 %"),
    ],
)
def test_percentages_keep_what_matters(ratio: float, text: str) -> None:
    """Five digits, none of them rounding noise."""
    assert percent(ratio) == text
