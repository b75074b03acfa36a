"""What the page on boards says of AIfES beside exported steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kit.measured_records import aifes_record as record
from kit.measured_records import board_record
from result_pages.aifes import section
from result_pages.boards import page

if TYPE_CHECKING:
    from kit.messages import Told


def test_section_is_what_the_records_say(told: Told) -> None:
    """Each program beside AIfES's; a star where the least RAM is not proved."""
    other = record(network="lenet", loss_difference=3e-6, step_macs=20_000)
    least = other["programs"]["least_ram"] | {"solved": "feasible", "gap": 0.25}
    theirs = other["programs"]["aifes"] | {"instructions": 150_000, "ram_bytes": 5 * 1024}
    other["programs"] |= {"least_ram": least, "aifes": theirs}
    told(section([record(), other], "x-aifes.jsonl"))


def test_page_has_the_section_before_what_others_publish() -> None:
    """It is part of the page where there is a record of it, and not where there is none."""
    text = page([board_record()], "run.jsonl", section([record()], "x-aifes.jsonl"))
    headings = [line for line in text.splitlines() if line.startswith("## ")]
    assert headings[-2:] == ["## Beside AIfES", "## What others publish"]
    assert "AIfES takes" not in page([board_record()], "run.jsonl", section([], ""))
