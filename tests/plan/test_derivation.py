"""What follows from computations and transfers: waits and frees."""

from __future__ import annotations

import pytest

from kit.instances import random_graph, random_schedule, seeded
from kit.plans import plan
from kit.worked import skip_graph
from poetmodel.device import StorageMode
from poetmodel.plan import Op
from poetmodel.plan.derivation import explicit_steps, with_waits_and_frees
from poetmodel.planner.sequence import moves_of
from poetmodel.schedule.homes import Homes

SKIP = Homes.of(skip_graph())


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        pytest.param("c0 c1 c2 c3", "c0 c1 c2 f1 c3 f0 f2 f3", id="frees follow last uses"),
        pytest.param(
            "c0 o0 c1 c2 i0 c3",
            "c0 o0 c1 w0 f0 c2 f1 i0 w0 c3 f0 f2 f3",
            id="a page-out is waited for at the last use",
        ),
        pytest.param(
            "c0 o0 c1 c2 w0 i0 c3",
            "c0 o0 c1 c2 f1 w0 f0 i0 w0 c3 f0 f2 f3",
            id="or at the wait given",
        ),
        pytest.param(
            "c0 c1 c0 c2 c3",
            "c0 c1 f0 c0 c2 f1 c3 f0 f2 f3",
            id="the old copy goes before it is made again",
        ),
        pytest.param(
            "c0 o0 o0 c1 c2 c3",
            "c0 o0 w0 o0 c1 c2 f1 c3 w0 f0 f2 f3",
            id="a second page-out waits for the first",
        ),
        pytest.param(
            "c0 o0 c1 i0 i0 c2 c3",
            "c0 o0 c1 w0 f0 i0 w0 f0 i0 c2 f1 w0 c3 f0 f2 f3",
            id="what nothing reads goes at once",
        ),
        pytest.param(
            "c0 o0 c1 c2 i0 o2 c3",
            "c0 o0 c1 w0 f0 c2 f1 i0 w0 o2 c3 f0 w2 f2 f3",
            id="later transfers follow the wait",
        ),
    ],
)
def test_programs_are_completed_by_the_rules(steps: str, expected: str) -> None:
    """Waits and frees of a DMA program come where the docstring says."""
    found = with_waits_and_frees(SKIP, plan(steps).program, StorageMode.DMA)
    assert found == plan(expected).program


def test_blocking_programs_have_no_waits() -> None:
    """Where transfers hold the core, waits are left out and frees stay."""
    found = with_waits_and_frees(SKIP, plan("c0 o0 c1 c2 w0 i0 c3").program, StorageMode.BLOCKING)
    assert found == plan("c0 o0 c1 f0 c2 f1 i0 c3 f0 f2 f3").program


@pytest.mark.parametrize("mode", list(StorageMode))
def test_a_completed_program_comes_apart_again(mode: StorageMode) -> None:
    """Taking a program apart and completing it again gives the same program."""
    for number in range(60):
        rng = seeded(f"derivation/{number}")
        graph = random_graph(rng, (3, 7))
        homes = Homes.of(graph)
        whole = with_waits_and_frees(homes, moves_of(homes, random_schedule(rng, graph)), mode)
        steps = explicit_steps(homes, whole, mode)
        assert steps is not None
        assert not any(op == Op.FREE for op, _ in steps)
        assert with_waits_and_frees(homes, steps, mode) == whole


def test_explicit_steps_keep_the_waits_that_do_not_follow() -> None:
    """A wait later than the last use stays; one right after it is derived."""
    late = plan("c0 o0 c1 c2 w0 i0 c3").program
    early = plan("c0 o0 c1 w0 c2 i0 c3").program
    for steps, bare in ((late, late), (early, plan("c0 o0 c1 c2 i0 c3").program)):
        whole = with_waits_and_frees(SKIP, steps, StorageMode.DMA)
        assert explicit_steps(SKIP, whole, StorageMode.DMA) == bare


def test_programs_that_free_elsewhere_do_not_come_apart() -> None:
    """A tensor kept longer than it is used cannot be told from the steps."""
    wasteful = plan("c0 c1 c2 c3 f1 f0 f2 f3").program
    assert explicit_steps(SKIP, wasteful, StorageMode.DMA) is None
