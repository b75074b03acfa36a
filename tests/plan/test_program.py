"""Programs: instructions as values, and the waits and frees that follow from the others."""

import pytest

from kit.plans import PAGED, plan
from kit.worked import skip_graph
from poetmodel.device import StorageMode
from poetmodel.plan import Instruction, Op, Plan
from poetmodel.plan.derivation import with_waits_and_frees
from poetmodel.schedule.homes import Homes

SKIP = Homes.of(skip_graph())


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ("c0 c1 c2 c3", "c0 c1 c2 f1 c3 f0 f2 f3"),  # frees follow last uses
        # A page-out is waited for at the last use, or at the wait given.
        ("c0 o0 c1 c2 i0 c3", "c0 o0 c1 w0 f0 c2 f1 i0 w0 c3 f0 f2 f3"),
        ("c0 o0 c1 c2 w0 i0 c3", "c0 o0 c1 c2 f1 w0 f0 i0 w0 c3 f0 f2 f3"),
        ("c0 c1 c0 c2 c3", "c0 c1 f0 c0 c2 f1 c3 f0 f2 f3"),  # an old copy goes before a new one
        # A second page-out waits for the first.
        ("c0 o0 o0 c1 c2 c3", "c0 o0 w0 o0 c1 c2 f1 c3 w0 f0 f2 f3"),
        # What nothing reads goes at once.
        ("c0 o0 c1 i0 i0 c2 c3", "c0 o0 c1 w0 f0 i0 w0 f0 i0 c2 f1 w0 c3 f0 f2 f3"),
        # Later transfers follow the wait.
        ("c0 o0 c1 c2 i0 o2 c3", "c0 o0 c1 w0 f0 c2 f1 i0 w0 o2 c3 f0 w2 f2 f3"),
    ],
)
def test_programs_are_completed_by_the_rules(steps, expected):
    """Waits and frees of a DMA program come where the docstring says."""
    found = with_waits_and_frees(SKIP, plan(steps).program, StorageMode.DMA)
    assert found == plan(expected).program


def test_blocking_programs_have_no_waits():
    """Where transfers hold the core, waits are left out and frees stay."""
    found = with_waits_and_frees(SKIP, plan("c0 o0 c1 c2 w0 i0 c3").program, StorageMode.BLOCKING)
    assert found == plan("c0 o0 c1 f0 c2 f1 i0 c3 f0 f2 f3").program


def test_plain_values_become_instructions():
    """Pairs of a word and a number, and a mode by its name, are enough; others are refused.

    Plans are equal by what they do: program, mode, budget and device count.
    """
    made = Plan(program=(("compute", 0), ["free", 1]), mode="dma")
    assert made.program == (Instruction(Op.COMPUTE, 0), Instruction(Op.FREE, 1))
    assert made.mode is StorageMode.DMA
    for words in ({"program": (("run", 0),)}, {"mode": "slow"}):
        with pytest.raises(ValueError, match="is not a valid"):
            Plan(**{"program": (), "mode": "dma", **words})

    assert plan(PAGED) == plan(PAGED)
    assert plan(PAGED) != plan(PAGED, "blocking")
    assert plan(PAGED) != plan(PAGED, ram_budget_bytes=12)
