"""The page on models that can be compiled says what the records say."""

from __future__ import annotations

from typing import Any

from kit.measured_records import CIRCUMSTANCES
from pytorch.coverage import DIFFERS, REFUSED, WORKS
from result_pages.coverage import lead, page


def record(name: str = "transformers BERT", **changes: Any) -> dict[str, Any]:
    """Return the record of a model that works, with some fields changed."""
    found: dict[str, Any] = {
        "kind": "coverage",
        "name": name,
        **CIRCUMSTANCES,
        "torch": "2.13.0",
        "library_version": f"{name.split(maxsplit=1)[0]} 1.0",
        "status": WORKS,
        "reason": "",
        "nodes": 1234,
        "read": [{"what": "value that is read", "place": "masks.py:3 (if mask.all():)"}],
        "other": WORKS,
        "budget": {"share": 0.6, "equal": True, "within": True, "written_bytes": 0},
    }
    return {**found, **changes}


def row(*records: dict[str, Any]) -> str:
    """Return the line of the first of some records."""
    name = records[0]["name"].split(maxsplit=1)[1]
    lines = page(list(records), "some.jsonl").splitlines()
    (found,) = (line for line in lines if line.startswith("|") and name in line)
    return found


def test_a_model_that_works_is_shown_with_what_it_reads() -> None:
    """Operations, the line that reads, and the budget."""
    assert row(record()) == "| BERT | works | 1,234 | `masks.py:3` | 60% |"


def test_a_model_without_a_smaller_budget_says_so() -> None:
    """Where no schedule was found, none is claimed."""
    assert row(record(budget=None)).endswith("| neither |")


def test_what_differs_is_not_said_to_work() -> None:
    """Bits that differ, on any batch and in any budget, count as that."""
    apart = {"share": 0.6, "equal": False, "within": True, "written_bytes": 0}
    beyond = {"share": 0.6, "equal": True, "within": False, "written_bytes": 0}
    for changes in (
        {"status": DIFFERS, "reason": "2 of 3 results differ"},
        {"other": DIFFERS},
        {"other": "the value was True and is False"},
        {"budget": apart},
        {"budget": beyond},
    ):
        found = record(**changes)
        assert "works" not in row(found)
        assert lead([found, record()]).startswith("Of 2 models tried, 1 train")
        assert lead([found, record()]).endswith("and 1 differ.")


def test_what_is_refused_is_shown_with_the_sentence() -> None:
    """Also where a sentence has signs that tables know."""
    text = page(
        [record(), record("timm ViT", status=REFUSED, reason="a | b <c> _d_")], "some.jsonl"
    )
    assert "| timm ViT | a \\| b \\<c> \\_d\\_ |" in text
    assert "2 models tried, 1 train as in eager PyTorch, bit by bit; 1 are refused" in text


def test_models_that_could_not_be_tried_are_left_out() -> None:
    """A library that is not installed says nothing of its models."""
    assert "timm" not in page([record(), record("timm ViT", status="failed")], "some.jsonl")
