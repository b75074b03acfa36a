"""What the page of results says of training methods is what the records say, misses included."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kit.measured_records import training_record as record
from result_pages.rendering import render
from result_pages.training import (
    TrainingRecord,
    duels,
    fused_section,
    savings,
    section,
    sentence,
)

if TYPE_CHECKING:
    from kit.messages import Told

MEBI = 2**20


def peer(method: str, **changes: Any) -> dict[str, Any]:
    """Return the record of a peer."""
    found = record(method, status="ran", **changes)
    for name in ("budget_bytes", "floor_bytes", "keep_all_bytes", "gap", "solve_s"):
        del found[name]
    return found


def without_steps(**changes: Any) -> dict[str, Any]:
    """Return the record of a compiled step that has no plan."""
    steps = ("pairs", "heap_peak_bytes", "equal", "gap", "written_bytes", "eager_heap_peak_bytes")
    return {name: value for name, value in record(**changes).items() if name not in steps}


def runs(*records: dict[str, Any]) -> list[TrainingRecord]:
    """Return records as runs."""
    return [TrainingRecord.of(each) for each in records]


WRONG = {"equal": False, "unequal_gradients": 2, "unequal_buffers": 3}
ABOVE = [[1.03, 1.04, 1.0, 1.0]]
RECORDS: dict[str, tuple[dict[str, Any], ...]] = {
    "kept": (record(share=0.5, written_bytes=3 * MEBI),),
    "a byte above": (record(heap_peak_bytes=20 * MEBI + 1),),
    "without a plan": (
        without_steps(share=0.25, status="infeasible", budget_bytes=5 * MEBI),
        without_steps(share=0.35, status="infeasible"),
        without_steps(share=0.5, status="unknown", reason="unknown: none within 30 s"),
        without_steps(share=0.75, status="failed", reason="ended with -9 | killed\nmore"),
    ),
    "unequal": (record(), record(equal=False), peer("checkpoint", **WRONG)),
    "bytes at the hook's peak": (
        peer("file-hooks", written_bytes=100),
        record("both@file-hooks", written_bytes=60),
        record("both", share=0.75, written_bytes=0),
        without_steps(method="paging@file-hooks", status="infeasible"),
    ),
    "the runner alone": (record("keep-all", pairs=ABOVE),),
    "another budget": (peer("eager"), record("both@memory-budget", share=0.5)),
}


def inside(method: str, share: float | None = None, **changes: Any) -> dict[str, Any]:
    """Return the record of a run inside of ``torch.compile``."""
    found = (record if method.startswith("fused") else peer)(method, share=share, **changes)
    found["stock_heap_peak_bytes"] = found.pop("eager_heap_peak_bytes")
    if method.startswith("fused"):
        own = {"plan_peak_bytes": 20 * MEBI, "recomputed": 7, "first_processor_s": 12.0}
        return own | found
    return {"two_steps_processor_s": 9.1} | found


FUSED: dict[str, tuple[dict[str, Any], ...]] = {
    "stock alone": (inside("stock", heap_peak_bytes=40 * MEBI),),
    "as quick at its peak": (
        inside("stock", share=0.6),
        inside("fused@stock", share=0.6, heap_peak_bytes=19 * MEBI),
    ),
    "slower and larger at its peak": (
        inside("stock", share=0.6, pairs=[[1.0, 1.0, 1.0, 1.0]]),
        inside("fused@stock", share=0.6, heap_peak_bytes=22 * MEBI, pairs=ABOVE, equal=False),
    ),
    "refused": (
        without_steps(
            method="fused", share=0.45, status="infeasible", reason="ram: the least is ram=9"
        ),
    ),
}


@pytest.mark.parametrize("case", FUSED)
def test_section_inside_of_compile_is_what_the_records_say(case: str, told: Told) -> None:
    """Goals that are met or missed, and each run with its setting or its budget."""
    told(fused_section(FUSED[case], "run.jsonl"))


@pytest.mark.parametrize("case", RECORDS)
def test_section_is_what_the_records_say(case: str, told: Told) -> None:
    """Runs with their budgets, goals that are met or missed, and how it was measured."""
    told(section(RECORDS[case], "run.jsonl"))


def test_step_is_the_median_of_the_pairs() -> None:
    """One slow step of three does not count; the processor's time is told beside the clock's."""
    (run,) = runs(record())
    assert (run.time_ratio, run.processor_ratio) == (1.2, 1.1)


def test_duel_is_with_the_best_peer_at_no_larger_peak(told: Told) -> None:
    """A peer is outdone by a quicker one below its peak; so is a compiled step above it."""
    slow = [[2.0, 2.0, 1.0, 1.0]]
    hooks = peer("file-hooks", pairs=slow, heap_peak_bytes=10 * MEBI)
    checkpoint = peer("checkpoint", pairs=[[1.5, 1.5, 1.0, 1.0]], heap_peak_bytes=20 * MEBI)
    selective = peer("selective", pairs=slow, heap_peak_bytes=30 * MEBI)
    own = record(heap_peak_bytes=20 * MEBI, pairs=[[1.4, 1.4, 1.0, 1.0]])
    eager = peer("eager", heap_peak_bytes=MEBI)
    of_hooks, of_checkpoint, of_selective = duels(runs(eager, hooks, checkpoint, selective, own))
    assert of_hooks.own is None
    assert not of_hooks.won
    assert of_checkpoint.won
    assert of_selective.best.method == "checkpoint"
    assert of_selective.won
    told(render("duels", duels=[of_hooks, of_selective]))


def test_slack_is_given_to_both_sides_and_told(told: Told) -> None:
    """A peak that is larger by the slack counts as the same, of a compiled step and of a peer."""
    hooks, checkpoint = peer("file-hooks", heap_peak_bytes=1000), peer("checkpoint")
    checkpoint |= {"heap_peak_bytes": 1010, "pairs": [[1.1, 1.1, 1.0, 1.0]]}
    own = record(heap_peak_bytes=1010, pairs=[[1.05, 1.05, 1.0, 1.0]])
    assert duels(runs(hooks, checkpoint, own))[0].own is None
    for each in (hooks, checkpoint, own):
        each["cell"]["slack"] = 0.01
    of_hooks, _ = duels(runs(hooks, checkpoint, own))
    assert of_hooks.best.method == "checkpoint"
    assert of_hooks.own is not None
    assert of_hooks.won
    told(section((hooks, checkpoint, own), "run.jsonl"))


def test_bytes_are_compared_at_the_peak_of_the_file_hook() -> None:
    """Not at other budgets; a method without a plan there saves nothing."""
    found = runs(*RECORDS["bytes at the hook's peak"])
    assert savings(found, "both") == [0.4]
    assert savings(found, "paging") == [None]


def test_sentence_counts_what_ran(told: Told) -> None:
    """Compiled steps that ran, those within the budget, those equal to eager."""
    larger = record(heap_peak_bytes=21 * MEBI, equal=False)
    told(sentence((record(), larger, record(status="infeasible") | {"pairs": []})))
    assert sentence((peer("eager"),)) == ""
