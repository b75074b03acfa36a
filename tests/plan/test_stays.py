"""What is in RAM when: stays by hand, and their sum against the simulator of plans."""

from dataclasses import replace
from itertools import accumulate

import pytest

from kit.instances import seeded
from kit.plans import HELD, STORED, plan, random_plan, random_state_plan, state_step
from kit.plans import PAGED as PAGED_SKIP
from kit.rotation import parts
from kit.worked import skip_graph
from poetmodel.errors import PlanError
from poetmodel.plan import check_plan
from poetmodel.plan.stays import stays
from poetmodel.schedule import GraphIdentity
from poetmodel.schedule.machine import BEFORE, Content, Origin, Stay

X, W, Y, V, G, NEW = range(6)


def ram_in_use(intervals, instructions):
    """Return for each instruction what is in RAM during it, and after it [B]."""
    change = [0] * (2 * instructions + 2)  # during and after each instruction, and the end
    for stay in intervals:
        change[2 * max(stay.begin, 0)] += stay.bytes
        change[min(2 * stay.end + 1, 2 * instructions)] -= stay.bytes - stay.given_bytes
        if stay.given_at is not None:
            change[2 * stay.given_at] -= stay.given_bytes
    levels = list(accumulate(change))
    return tuple(zip(levels[0 : 2 * instructions : 2], levels[1::2], strict=False))


def check_sum(graph, made):
    """Compare the sum of all stays with the plan checker's RAM, during and after everything."""
    check = check_plan(graph, None, made)
    assert check.violations == ()
    found = stays(graph, made)
    assert ram_in_use(found, len(made.program)) == tuple(
        (moment.high_bytes, moment.ram_bytes) for moment in check.moments
    )
    return found


def short(found):
    """Return tensor, origin, begin and end of each copy."""
    return [(s.index, s.origin, s.begin, s.end) for s in found if s.content == Content.OUTPUT]


def test_copies_of_a_plan_that_pages():
    """Tensor a is there twice, and between the two on storage; b has a workspace."""
    found = check_sum(skip_graph(workspace=True), plan(PAGED_SKIP))
    assert short(found) == [
        (0, Origin.COMPUTED, 0, 4),
        (1, Origin.COMPUTED, 2, 6),
        (2, Origin.COMPUTED, 5, 11),
        (0, Origin.PAGED_IN, 7, 10),
        (3, Origin.COMPUTED, 9, 12),
    ]
    first, _, workspace, *_, again, _ = found
    assert (first.reads, first.paged_out, again.reads, again.paged_out) == ((2,), True, (9,), False)
    assert workspace == Stay(
        content=Content.WORKSPACE, index=1, origin=Origin.COMPUTED, bytes=1, begin=2, end=2
    )


def test_outputs_in_place_and_replacements_take_no_byte_twice():
    """Of x, 10 B, y takes 6 B; w+ lies where w lay, until it is paged out and freed."""
    found = check_sum(state_step(), plan(STORED, "blocking", resident=()))
    by_begin = {(s.index, s.begin): s for s in found}
    assert (by_begin[X, 0].given_at, by_begin[X, 0].given_bytes, by_begin[X, 0].end) == (2, 6, 3)
    again = by_begin[W, 5]
    assert (again.origin, again.replaced_by, again.paged_out, again.end) == (
        Origin.PAGED_IN,
        NEW,
        True,
        13,
    )
    assert not any(s.index == NEW for s in found)


def test_resident_state_is_there_from_before_to_after():
    """It has no instruction of its own; what is memory-mapped is not in RAM at all.

    Of a plan of another graph the numbers would mean something else.
    """
    found = check_sum(state_step(), plan(HELD, "blocking", resident=(W, V)))
    assert [(s.index, s.origin, s.begin, s.end) for s in found[:2]] == [
        (W, Origin.RESIDENT, BEFORE, 9),
        (V, Origin.RESIDENT, BEFORE, 9),
    ]
    mapped = plan(f"{HELD} o5 f5", "blocking", resident=(), memory_mapped=True)
    assert {s.index for s in check_sum(state_step(), mapped)} == {X, Y, G}
    other = replace(plan(PAGED_SKIP), identity=GraphIdentity.of(state_step()))
    with pytest.raises(PlanError, match="sha256"):
        stays(skip_graph(), other)


@pytest.mark.parametrize("mode", ["blocking", "dma"])
@pytest.mark.parametrize("with_state", [False, True], ids=["no state", "state"])
@parts(3)
def test_the_sum_is_the_ram_of_the_plan_checker(part, mode, *, with_state):
    """During and after every instruction of random plans, some memory-mapped, some in place."""
    shared = mapped = again = 0
    for seed in part.of(range(120)):
        rng = seeded(f"stays/{mode}/{with_state}/{seed}")
        graph, _, made = random_state_plan(rng, mode) if with_state else random_plan(rng, mode)
        found = check_sum(graph, made)
        shared += any(s.given_bytes for s in found)
        mapped += made.memory_mapped
        again += any(s.origin == Origin.RECOMPUTED for s in found)
    assert again > part.share(10)
    assert not with_state or min(shared, mapped) > part.share(10)
