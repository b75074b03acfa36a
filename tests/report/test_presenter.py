"""The presenter: facts as JSON, rows and words."""

from __future__ import annotations

import pytest

from poetmodel.report.presenter import (
    Fact,
    count,
    document,
    escaped,
    fine_joules,
    percent,
    plural,
    row,
    rows,
    share,
    whole_bytes,
)
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


@pytest.mark.parametrize(
    ("said", "text"),
    [
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
def test_words_for_people(said: str, text: str) -> None:
    """Counts, shares, sizes and energies have as many digits as people need."""
    assert said == text
