"""Instructions and plans as values."""

from __future__ import annotations

import pytest

from kit.plans import PAGED, plan
from poetmodel.device import StorageMode
from poetmodel.plan import Instruction, Op, Plan


def test_plain_values_become_instructions() -> None:
    """Pairs of a word and a number, and a mode by its name, are enough."""
    made = Plan(program=(("compute", 0), ["free", 1]), mode="dma")  # type: ignore[arg-type]
    assert made.program == (Instruction(Op.COMPUTE, 0), Instruction(Op.FREE, 1))
    assert made.mode is StorageMode.DMA


@pytest.mark.parametrize("words", [{"program": (("run", 0),)}, {"mode": "slow"}])
def test_unknown_words_are_refused(words: dict[str, object]) -> None:
    """There are five operations and two modes."""
    with pytest.raises(ValueError, match="is not a valid"):
        Plan(**{"program": (), "mode": "dma", **words})  # type: ignore[arg-type]


def test_plans_are_equal_by_what_they_do() -> None:
    """Program, mode, budget and device count."""
    assert plan(PAGED) == plan(PAGED)
    assert plan(PAGED) != plan(PAGED, "blocking")
    assert plan(PAGED) != plan(PAGED, ram_budget_bytes=12)
