"""Thirty questions of users, each with the page that answers it and the words that do."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


class Answer(NamedTuple):
    """Where a question is answered."""

    question: str
    page: str
    words: str
    """A phrase of the answer, with single spaces."""


EMBEDDED = (
    Answer(
        "How do I leave RAM for the rest of my firmware?",
        "start-embedded.md",
        "Leave 128 KiB for the rest of your firmware",
    ),
    Answer(
        "Does the budget of an export include stack, inputs and runtime?",
        "guides/export.md",
        "for 64 KiB of RAM: state, tensors, inputs, stack and runtime together",
    ),
    Answer(
        "What is left after a power cut in the middle of a step?",
        "guides/export.md",
        "a power cut at any moment leaves one whole",
    ),
    Answer(
        "What does `--commit` cost?",
        "concepts/stages.md",
        "they count in the baseline, the time, the energy, the bytes written and the wear",
    ),
    Answer(
        "How long does my flash last?",
        "reference/formats.md",
        "results state after how many training steps the storage is worn",
    ),
    Answer(
        "Can I train with int8 weights?",
        "concepts/deviations.md",
        "there is no int8, and files of quantized networks are refused",
    ),
    Answer(
        "My watchdog fires during a step. What now?",
        "guides/build-systems.md",
        "run it in slices with `vTaskDelay(1)` between",
    ),
    Answer(
        "How do I put the arena into PSRAM?",
        "guides/build-systems.md",
        "For an arena in PSRAM define `GESTURE_ARENA_EXTERN`",
    ),
    Answer(
        "How do I train the last layers alone?",
        "guides/export.md",
        "Frozen parameters (`requires_grad=False`) become constants in flash",
    ),
    Answer(
        "Were the energies measured on boards?",
        "concepts/deviations.md",
        "No board was measured for this project",
    ),
)
PYTORCH = (
    Answer(
        "What happens to a smaller last batch?",
        "guides/pytorch.md",
        "may be refused for a smaller last batch: give bytes, or use `drop_last=True`",
    ),
    Answer(
        "Is the budget kept outside of the step, in evaluation or `optimizer.step()`?",
        "guides/pytorch.md",
        "Outside of the step, as in evaluation, eager PyTorch has no budget",
    ),
    Answer(
        "Do recomputing and paging change my results?",
        "guides/pytorch.md",
        "Recomputing and paging change no bit",
    ),
    Answer(
        "Does it run on a GPU?",
        "guides/pytorch.md",
        "no plan was run on a graphics card",
    ),
    Answer(
        "Can I train on several processes or machines?",
        "guides/pytorch.md",
        "`DistributedDataParallel` and FSDP are refused",
    ),
    Answer(
        "Where do I put autocast?",
        "guides/pytorch-limits.md",
        "Autocast belongs inside the model or the loss",
    ),
    Answer(
        "Does a recomputed dropout draw the same mask?",
        "guides/pytorch.md",
        "dropout keeps its mask",
    ),
    Answer(
        "How do I go on after the process was killed?",
        "guides/pytorch.md",
        "One whole state exists at every moment, and the next process loads it",
    ),
    Answer(
        "My model branches on an activation. Is it captured?",
        "guides/pytorch-limits.md",
        "values of **parameters, activations, random numbers** | refused, with the line",
    ),
    Answer(
        "How do I save the minutes of the first compile?",
        "guides/pytorch.md",
        "keeps tensors, workspaces, costs, schedules and the check against eager",
    ),
)
RESEARCH = (
    Answer(
        "How do I add a linear constraint on the bytes written?",
        "guides/constraints.md",
        "problem.subject_to(wear=lambda v: v.bytes_written <= 100_000)",
    ),
    Answer(
        "What is the gap relative to?",
        "concepts/stages.md",
        "So the gap is relative to the overhead",
    ),
    Answer(
        "Why should I believe that a schedule is optimal?",
        "concepts/stages.md",
        "the bound holds for any choice of rows",
    ),
    Answer(
        "How do I run my own method under the same simulator?",
        "guides/compare.md",
        "A method is a function from a [`Problem`]",
    ),
    Answer(
        "How do I compare methods fairly?",
        "guides/compare.md",
        "Compare at the same *simulated peak RAM*, not at the same budget",
    ),
    Answer(
        "Can I hand the program to another solver?",
        "guides/elsewhere.md",
        "You can write it as an LP or MPS file",
    ),
    Answer(
        "Can I run the same solve twice and get the same schedule?",
        "concepts/deviations.md",
        "on one thread, is reproducible",
    ),
    Answer(
        "Will a later version read my schedules?",
        "reference/promises.md",
        "every later release reads these versions",
    ),
    Answer(
        "How do I run a sweep under Slurm, and resume it?",
        "guides/compare.md",
        "the same command resumes the sweep",
    ),
    Answer(
        "How do I cite the version that I used?",
        "guides/elsewhere.md",
        "names the version, the authors and the licence",
    ),
)


def plain(text: str) -> str:
    """Return a text with single spaces, as it reads."""
    return re.sub(r"\s+", " ", text)


@pytest.mark.parametrize(
    "answer", [*EMBEDDED, *PYTORCH, *RESEARCH], ids=lambda answer: answer.question
)
def test_question_has_its_answer(answer: Answer) -> None:
    """The page that the navigation offers for a question has the words that answer it."""
    assert f" {answer.page}\n" in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert answer.words in plain((DOCS / answer.page).read_text(encoding="utf-8"))


def test_each_kind_of_reader_asks_ten_questions() -> None:
    """No question is asked twice, and none is dropped."""
    assert [len(EMBEDDED), len(PYTORCH), len(RESEARCH)] == [10, 10, 10]
    assert len({answer.question for answer in (*EMBEDDED, *PYTORCH, *RESEARCH)}) == 30
