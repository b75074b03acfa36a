"""What one point tells another, and what it keeps of its solve."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poetmodel.explore.points import Point, known_bound, neighbour, point_id


def point(ram_bytes=100, deadline_s=None, **known):
    """Return a point of one problem."""
    name = point_id("problem", ram_bytes, deadline_s)
    return Point(id=name, problem="problem", ram_bytes=ram_bytes, deadline_s=deadline_s, **known)


def found(value, *, needs_bytes=50, time_s=1.0):
    """Return what a worker says of a schedule."""
    return {
        "value": value,
        "energy_j": 10 + value,
        "overhead_j": value,
        "peak_ram_bytes": needs_bytes,
        "needs_bytes": needs_bytes,
        "makespan_s": time_s,
        "time_s": time_s,
    }


def solved(ram_bytes, value, *, needs_bytes, time_s=1.0):
    """Return a point with a schedule."""
    made = point(ram_bytes)
    made.take(found(value, needs_bytes=needs_bytes, time_s=time_s), b"schedule")
    return made


limits = st.tuples(
    st.integers(1, 100), st.one_of(st.none(), st.floats(0.1, 9)), st.floats(0, 5), st.floats(0, 5)
)


@given(
    at=limits,
    others=st.lists(st.tuples(limits, st.integers(1, 100), st.floats(0.1, 9)), max_size=8),
)
def test_neighbour_keeps_the_limits_and_is_the_best(at, others):
    """No schedule that needs more RAM or time is lent, and no better one is passed over."""
    here = point(at[0], at[1])
    known = [
        point(ram, deadline, value=value, bound=bound, needs_bytes=needs, time_s=time_s)
        for (ram, deadline, value, bound), needs, time_s in others
    ]
    fitting = [
        one.value
        for one in known
        if one.needs_bytes <= here.ram_bytes
        and one.time_s <= (math.inf if here.deadline_s is None else here.deadline_s)
    ]
    near = neighbour(here, known)
    assert (None if near is None else near.value) == min(fitting, default=None)
    within = neighbour(here, known, overlaps=True)
    assert within is None or within.ram_bytes <= here.ram_bytes


@pytest.mark.parametrize(
    ("ram_bytes", "deadline_s", "holds"),
    [(100, None, True), (120, None, True), (80, None, False), (120, 5.0, False)],
)
def test_bound_holds_only_where_less_is_allowed(ram_bytes, deadline_s, holds):
    """One that was proved with less RAM, or for a deadline, says nothing."""
    proved = point(ram_bytes, deadline_s, bound=3.0)
    assert known_bound(point(100), [proved]) == (3.0 if holds else 0.0)
    assert known_bound(point(100, 4.0), [proved]) == (3.0 if ram_bytes >= 100 else 0.0)


def test_revision_grows_and_its_picture_has_a_name():
    """Another schedule, or another proof of the same, is drawn anew."""
    made = solved(100, 2.0, needs_bytes=90)
    first = made.revision, made.digest
    made.state, made.status = "done", "optimal"
    made.revise()
    assert made.revision == first[0] + 1
    assert made.digest != first[1]
