"""The table of models that can be compiled says what the records say."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kit.measured_records import CIRCUMSTANCES
from pytorch.coverage import AS_CAPTURED, DIFFERS, REFUSED, WORKS
from result_pages.coverage import block, lead

if TYPE_CHECKING:
    from kit.messages import Told


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


APART = {"share": 0.6, "equal": False, "within": True, "written_bytes": 0}
BEYOND = {"share": 0.6, "equal": True, "within": False, "written_bytes": 0}
RECORDS: dict[str, tuple[dict[str, Any], ...]] = {
    "works": (record(),),
    "both doors": (
        record(back_end={"status": WORKS, "share": 0.6, "within": True, "recomputed": 3}),
        record("timm ViT", back_end={"status": REFUSED, "reason": "a sentence"}),
        record("timm Mixer", back_end={"status": DIFFERS, "share": 0.8}),
        record("timm ResNet", back_end={"status": AS_CAPTURED, "share": 0.6}),
        record("timm RegNet", status=REFUSED, reason="why", back_end={"status": WORKS, "share": 1}),
    ),
    "no smaller budget": (record(budget=None),),
    "refused": (record(), record("timm ViT", status=REFUSED, reason="a | b <c> _d_")),
    "not tried": (record(), record("timm ViT", status="failed")),
    **{
        f"differs, {name}": (record(**changes), record("timm ViT"))
        for name, changes in {
            "status": {"status": DIFFERS, "reason": "2 of 3 results differ"},
            "another batch": {"other": DIFFERS},
            "a value": {"other": "the value was True and is False"},
            "bits in a budget": {"budget": APART},
            "beyond a budget": {"budget": BEYOND},
        }.items()
    },
}


@pytest.mark.parametrize("case", RECORDS)
def test_table_is_what_the_records_say(case: str, told: Told) -> None:
    """Only what has eager's bits on any batch and in any budget works."""
    told(lead(list(RECORDS[case])))
    text = block(list(RECORDS[case]), "some.jsonl")
    told(text, "table")
    (row,) = (line for line in text.splitlines() if line.startswith("| transformers"))
    assert row.split(" | ")[2] == str(int(not case.startswith("differs")))
