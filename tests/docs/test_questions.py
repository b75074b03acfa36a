"""Thirty questions of users, each with the page that answers it and the words that do."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
QUESTIONS = """
How do I leave RAM for the rest of my firmware?
  start-embedded.md: Leave 128 KiB for the rest of your firmware
Does the budget of an export include stack, inputs and runtime?
  guides/export.md: for 64 KiB of RAM: state, tensors, inputs, stack and runtime together
What is left after a power cut in the middle of a step?
  guides/export.md: a power cut at any moment leaves one whole
What does `--commit` cost?
  concepts/stages.md: they count in the baseline, the time, the energy, the bytes written and the
  wear
How long does my flash last?
  reference/formats.md: results state after how many training steps the storage is worn
Can I train with int8 weights?
  concepts/deviations.md: there is no int8, and files of quantized networks are refused
My watchdog fires during a step. What now?
  guides/build-systems.md: run it in slices with `vTaskDelay(1)` between
How do I put the arena into PSRAM?
  guides/build-systems.md: For an arena in PSRAM define `GESTURE_ARENA_EXTERN`
How do I train the last layers alone?
  guides/export.md: Frozen parameters (`requires_grad=False`) become constants in flash
Were the energies measured on boards?
  concepts/deviations.md: No board was measured for this project

What happens to a smaller last batch?
  guides/pytorch.md: the same bytes for all that come after, such as a smaller last batch
Is the budget kept outside of the step, in evaluation or `optimizer.step()`?
  guides/pytorch.md: Outside of the step, as in evaluation, eager PyTorch has no budget
Do recomputing and paging change my results?
  guides/pytorch.md: Recomputing and paging change no bit
Does it run on a GPU?
  guides/pytorch.md: no plan was run on a graphics card
Can I train on several processes or machines?
  guides/pytorch.md: `DistributedDataParallel` and FSDP are refused
Where do I put autocast?
  guides/pytorch-limits.md: Autocast belongs inside the model or the loss
Does a recomputed dropout draw the same mask?
  guides/pytorch.md: dropout keeps its mask
How do I go on after the process was killed?
  guides/pytorch.md: One whole state exists at every moment, and the next process loads it
My model branches on an activation. Is it captured?
  guides/pytorch-limits.md: values of **parameters, activations, random numbers** | refused, with
  the line
How do I save the minutes of the first compile?
  guides/pytorch.md: keeps tensors, workspaces, costs, schedules and the check against eager

How do I add a linear constraint on the bytes written?
  guides/constraints.md: problem.subject_to(wear=lambda v: v.bytes_written <= 100_000)
What is the gap relative to?
  concepts/stages.md: So the gap is relative to the overhead
Why should I believe that a schedule is optimal?
  concepts/stages.md: the bound holds for any choice of rows
How do I run my own method under the same simulator?
  guides/compare.md: A method is a function from a [`Problem`]
How do I compare methods fairly?
  guides/compare.md: Compare at the same *simulated peak RAM*, not at the same budget
Can I hand the program to another solver?
  guides/elsewhere.md: You can write it as an LP or MPS file
Can I run the same solve twice and get the same schedule?
  concepts/deviations.md: on one thread, is reproducible
Will a later version read my schedules?
  reference/promises.md: every later release reads these versions
How do I run a sweep under Slurm, and resume it?
  guides/compare.md: the same command resumes the sweep
How do I cite the version that I used?
  guides/elsewhere.md: names the version, the authors and the licence
"""
"""A part for embedded programmers, for PyTorch and for research: page and phrase of each answer."""
PARTS = [
    re.findall(r"^(\S.*)\n  ([\w/-]+\.md): (.*(?:\n  .*)*)", part, re.MULTILINE)
    for part in QUESTIONS.split("\n\n")
]


def plain(text):
    """Return a text with single spaces, as it reads."""
    return re.sub(r"\s+", " ", text)


@pytest.mark.parametrize(
    ("page", "words"),
    [pytest.param(page, words, id=asked) for part in PARTS for asked, page, words in part],
)
def test_question_has_its_answer(page, words):
    """The page that the navigation offers for a question has the words that answer it."""
    assert f" {page}\n" in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert plain(words) in plain((ROOT / "docs" / page).read_text(encoding="utf-8"))


def test_each_kind_of_reader_asks_ten_questions():
    """No question is asked twice, and none is dropped."""
    assert [len(part) for part in PARTS] == [10, 10, 10]
    assert len({asked for part in PARTS for asked, _, _ in part}) == 30
