"""What the page of results says of the cost of a step is what the records say."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kit.measured_records import CIRCUMSTANCES
from result_pages.step_costs import section

if TYPE_CHECKING:
    from kit.messages import Told


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


@pytest.mark.parametrize(
    "records",
    [
        (step(), convolutions()),
        (convolutions(divided=0, unequal=0, whole_s=0.0, parts_s=0.0),),
    ],
    ids=["both tables", "nothing divided"],
)
def test_section_is_what_the_records_say(records: tuple[dict[str, Any], ...], told: Told) -> None:
    """Medians of ratios and of page faults; convolutions with other bits."""
    told(section(records, "2026-01-01-step-costs.jsonl"))
