"""What the page of results says of the cost of a step is what the records say."""

from __future__ import annotations

from typing import Any

from kit.measured_records import CIRCUMSTANCES
from result_pages.step_costs import convolutions_table, section, steps_table


def step(heap: str = "default", **changes: Any) -> dict[str, Any]:
    """Return the record of three steps that took 1, 2 and 4 % more than eager's."""
    pairs = [[1.01, 10, 1.0, 20], [1.02, 11, 1.0, 21], [1.04, 3000, 1.0, 22]]
    return {
        "kind": "step-cost",
        "name": f"vgg16-b8 | {heap}",
        "cell": {"network": "vgg16-b8", "heap": heap, "pairs": 3},
        "torch": "2.9.0+cpu",
        **CIRCUMSTANCES,
        "new": pairs,
        "added": pairs,
        **changes,
    }


def convolutions(**changes: Any) -> dict[str, Any]:
    """Return the record of a network whose least budget parts halve."""
    return {
        "kind": "convolutions",
        "name": "vgg16-b8 | convolutions",
        "cell": {"network": "vgg16-b8", "heap": "convolutions", "pairs": 3},
        "torch": "2.9.0+cpu",
        **CIRCUMSTANCES,
        "keep_all_bytes": 100 * 2**20,
        "least_bytes": 60 * 2**20,
        "least_in_parts_bytes": 30 * 2**20,
        "divided": 7,
        "unequal": 1,
        "whole_s": 0.5,
        "parts_s": 0.4,
        "trials_s": 2.0,
        **changes,
    }


def test_medians_of_pairs_are_shown() -> None:
    """Of the ratios, and of page faults, which one step in three may have many of."""
    row = steps_table([step()]).splitlines()[-1]
    assert row.count("1.020") == 2
    assert "| 11 | 21 |" in row
    assert "3,000" not in row


def test_shares_and_equal_convolutions_are_shown() -> None:
    """A convolution with other bits would be seen."""
    row = convolutions_table([convolutions()]).splitlines()[-1]
    assert "| 60 % | 30 % | 7 | 6 |" in row
    assert "0.5 s -> 0.4 s" in row


def test_networks_without_divided_convolutions_have_no_times() -> None:
    """There is nothing to compare."""
    row = convolutions_table([convolutions(divided=0, unequal=0, whole_s=0.0, parts_s=0.0)])
    assert row.endswith("| 0 | 0 |  |  |")


def test_the_section_has_both_tables() -> None:
    """Each with its own records."""
    found = section([step(), convolutions()], "2026-01-01-step-costs.jsonl")
    assert found.count("`vgg16-b8`") == 2
    assert "3 pairs of steps" in found
