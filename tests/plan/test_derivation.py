"""What follows from computations and transfers: waits and frees."""

from __future__ import annotations

import pytest

from instances import random_graph, random_schedule, seeded
from poetmodel.device import StorageMode
from poetmodel.plan import Instruction, Op
from poetmodel.plan.derivation import explicit_steps, with_waits_and_frees
from poetmodel.planner.sequence import moves_of
from worked import skip_graph

SHORT = {
    "c": Op.COMPUTE,
    "in": Op.PAGE_IN,
    "out": Op.PAGE_OUT,
    "wait": Op.WAIT,
    "free": Op.FREE,
}


def program(text: str) -> tuple[Instruction, ...]:
    """Read ``c0 out0 wait0 ...``."""
    words = text.split()
    return tuple(
        Instruction(
            SHORT[word.rstrip("0123456789")], int(word.lstrip("abcdefghijklmnopqrstuvwxyz"))
        )
        for word in words
    )


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        pytest.param(
            "c0 c1 c2 c3", "c0 c1 c2 free1 c3 free0 free2 free3", id="frees follow last uses"
        ),
        pytest.param(
            "c0 out0 c1 c2 in0 c3",
            "c0 out0 c1 wait0 free0 c2 free1 in0 wait0 c3 free0 free2 free3",
            id="a page-out is waited for at the last use",
        ),
        pytest.param(
            "c0 out0 c1 c2 wait0 in0 c3",
            "c0 out0 c1 c2 free1 wait0 free0 in0 wait0 c3 free0 free2 free3",
            id="or at the wait given",
        ),
        pytest.param(
            "c0 c1 c0 c2 c3",
            "c0 c1 free0 c0 c2 free1 c3 free0 free2 free3",
            id="the old copy goes before it is made again",
        ),
        pytest.param(
            "c0 out0 out0 c1 c2 c3",
            "c0 out0 wait0 out0 c1 c2 free1 c3 wait0 free0 free2 free3",
            id="a second page-out waits for the first",
        ),
        pytest.param(
            "c0 out0 c1 in0 in0 c2 c3",
            "c0 out0 c1 wait0 free0 in0 wait0 free0 in0 c2 free1 wait0 c3 free0 free2 free3",
            id="what nothing reads goes at once",
        ),
        pytest.param(
            "c0 out0 c1 c2 in0 out2 c3",
            "c0 out0 c1 wait0 free0 c2 free1 in0 wait0 out2 c3 free0 wait2 free2 free3",
            id="later transfers follow the wait",
        ),
    ],
)
def test_programs_are_completed_by_the_rules(steps: str, expected: str) -> None:
    """Waits and frees of a DMA program come where the docstring says."""
    found = with_waits_and_frees(skip_graph(), program(steps), StorageMode.DMA)
    assert found == program(expected)


def test_blocking_programs_have_no_waits() -> None:
    """Where transfers hold the core, waits are left out and frees stay."""
    found = with_waits_and_frees(
        skip_graph(), program("c0 out0 c1 c2 wait0 in0 c3"), StorageMode.BLOCKING
    )
    assert found == program("c0 out0 c1 free0 c2 free1 in0 c3 free0 free2 free3")


@pytest.mark.parametrize("mode", list(StorageMode))
def test_a_completed_program_comes_apart_again(mode: StorageMode) -> None:
    """Taking a program apart and completing it again gives the same program."""
    for number in range(60):
        rng = seeded(f"derivation/{number}")
        graph = random_graph(rng, (3, 7))
        whole = with_waits_and_frees(graph, moves_of(graph, random_schedule(rng, graph)), mode)
        steps = explicit_steps(graph, whole, mode)
        assert steps is not None
        assert not any(op == Op.FREE for op, _ in steps)
        assert with_waits_and_frees(graph, steps, mode) == whole


def test_explicit_steps_keep_the_waits_that_do_not_follow() -> None:
    """A wait later than the last use stays; one right after it is derived."""
    graph = skip_graph()
    late = program("c0 out0 c1 c2 wait0 in0 c3")
    early = program("c0 out0 c1 wait0 c2 in0 c3")
    for steps, bare in ((late, late), (early, program("c0 out0 c1 c2 in0 c3"))):
        whole = with_waits_and_frees(graph, steps, StorageMode.DMA)
        assert explicit_steps(graph, whole, StorageMode.DMA) == bare


def test_programs_that_free_elsewhere_do_not_come_apart() -> None:
    """A tensor kept longer than it is used cannot be told from the steps."""
    wasteful = program("c0 c1 c2 c3 free1 free0 free2 free3")
    assert explicit_steps(skip_graph(), wasteful, StorageMode.DMA) is None
