"""The words about a compiled step: verified or not, equal or not, within its budget or not."""

from __future__ import annotations

from typing import Any

from poetmodel.report.step_wording import REMEDY, measured_rows, step_answers, step_figures
from poetmodel.report.wording import look_up
from report_steps import certificate, step_values
from worked import skip_problem


def answers(**changes: Any) -> list[tuple[str, str, str]]:
    """Return word, text and mood of the answers about a step with such a certificate."""
    values = step_values(skip_problem(), certificate=certificate(**changes))
    return [(answer.word, answer.text, answer.mood) for answer in step_answers(values)]


def test_a_good_step() -> None:
    """Equal, kept, and the times side by side."""
    same, kept, fast = answers()
    assert same == (
        "Equal",
        "all 9 results (loss, gradients, buffers) and the random generator, bit by bit",
        "good",
    )
    assert kept[0] == "Kept"
    assert kept[1].startswith("heap peak 90 B of ")
    assert kept[1].endswith("; that is 50 % of eager PyTorch's 180 B")
    assert fast[0] == "250 ms"
    assert fast[1].startswith(
        "eager PyTorch 125 ms; least of several steps each, 1 thread; planned "
    )


def test_differences_and_excess_are_told() -> None:
    """Neither is called good."""
    one = {"name": "loss", "largest": 0.5, "told": "by up to 0.5", "op": "loss/nll"}
    same, kept, _ = answers(equal=False, differences=[one], random_equal=False, within_budget=False)
    assert same == (
        "Different",
        "1 of 9 results differ, listed below; the random generator ends in another state",
        "bad",
    )
    assert (kept[0], kept[2]) == ("Exceeded", "bad")
    (same, *_) = answers(equal=False, random_equal=False)
    assert same[1] == "0 of 9 results differ; the random generator ends in another state"


def test_a_plan_for_another_device_is_called_so() -> None:
    """Its time is not that of the host where the step was measured."""
    values = step_values(skip_problem())
    values["plan"]["device"] = "Small Board"
    text = step_answers(values)[2].text
    assert text.startswith("eager PyTorch 125 ms; ")
    assert text.endswith(" on Small Board, not on the host where the step ran")
    del values["plan"]["device"]
    assert " on " not in step_answers(values)[2].text


def test_a_step_that_was_not_verified_says_how() -> None:
    """Nothing is claimed; the plan's figures are given as such."""
    values = step_values(skip_problem(), certificate=None)
    same, kept, fast = step_answers(values)
    assert (same.word, same.text, same.mood) == ("Not verified", REMEDY, "warn")
    assert "step.verify(" in REMEDY
    assert kept.word == fast.word == "Not measured"
    assert kept.text.startswith("the plan needs ")
    assert fast.text.startswith("planned ")
    for _, (measured, _, eager) in measured_rows(values):
        assert measured is None
        assert eager is None


def test_rows_carry_the_values_of_the_step() -> None:
    """Each cell has its key and the value there; nothing is shown twice in another unit."""
    values = step_values(skip_problem())
    rows = dict(measured_rows(values))
    assert list(rows) == ["heap peak", "of it tensors", "paged out", "paged in", "time of a step"]
    cells = [cell for row in rows.values() for cell in row if cell is not None]
    assert len(cells) == 11
    for key, value, _ in cells:
        assert look_up({"step": values}, key) == value
    assert rows["of it tensors"] == (
        ("step.certificate.storage_peak_bytes", 70, "70 B"),
        None,
        None,
    )


def test_figures_name_what_was_left_to_the_solver() -> None:
    """Coarsening, reserve, recomputations, solve and costs of compiling are there."""
    parts = dict(step_figures([{"step": step_values(skip_problem()), "status": "optimal"}]))
    texts = {row.key: row.cells[0][1] for rows in parts.values() for row in rows}
    assert texts["step.reserved_bytes"] == "6 B"
    assert texts["step.graph.threshold_bytes"] == "4 B"
    assert texts["step.graph.scheduled_tensors"] == "4"
    assert texts["step.compile_s"] == "1.5 s"
    assert texts["status"] == "optimal"
    assert "gap" not in texts
