"""Schedules as values: order, identity, and the keep-all schedule."""

import gc
import pickle
from dataclasses import FrozenInstanceError, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kit.strategies import graphs
from poetmodel.clock import time_limit
from poetmodel.errors import ScheduleError, TimeLimitError, TooLargeError
from poetmodel.graph import Graph, operation
from poetmodel.schedule import (
    RELATIONS,
    GraphIdentity,
    Schedule,
    checkpoint_all,
    simulate,
)


@pytest.fixture
def skip():
    """Return x, y(x), z(y), w(z, x); x lies on storage."""
    return Graph(
        name="skip",
        nodes=(
            operation("x", output_bytes=8, on_aux=True),
            operation("y", output_bytes=8, inputs=("x",)),
            operation("z", output_bytes=8, inputs=("y",)),
            operation("w", output_bytes=1, inputs=("z", "x")),
        ),
    )


def test_pairs_are_put_in_order():
    """Pairs in any order, from any iterable, twice or as lists, become one sorted tuple."""
    pairs = [[2, 2], (0, 0), (1, 1), (2, 2), (2, 0)]
    schedule = Schedule(R=pairs, S_RAM=iter([(2, 1), (1, 0)]))  # type: ignore[arg-type]
    assert schedule.R == ((0, 0), (1, 1), (2, 0), (2, 2))
    assert schedule.S_RAM == ((1, 0), (2, 1))
    assert (schedule.S_AUX, schedule.M_in, schedule.M_out) == ((), (), ())
    counted = Schedule(R=tuple(zip(np.arange(2), np.arange(2), strict=True)))
    assert all(type(number) is int for pair in counted.R for number in pair)  # as JSON needs it


@pytest.mark.parametrize("pairs", [((0, 0.0),), ((0,),), ((0, 1, 2),), (0, 1), ("ab",), None])
def test_anything_but_pairs_of_whole_numbers_is_refused(pairs):
    """A fraction is never rounded to an index; the error names the relation."""
    with pytest.raises(ScheduleError, match="M_in: expected pairs of whole numbers"):
        Schedule(R=(), M_in=pairs)


def test_schedules_are_values(skip):
    """A schedule for a graph carries its name, hash and the names of nodes and tensors.

    Keep-all has tensor x to stage 3, y to 2, z to 3, w nowhere; x is listed on storage after its
    node. Garbage collections are paused while pairs are made, and stay as they were, on or off.
    Equal relations are equal schedules, whichever graph they name; they hash, and stay.
    """
    identity = checkpoint_all(skip).identity
    assert identity == GraphIdentity.of(skip)
    assert (identity.name, identity.sha256) == ("skip", skip.sha256)
    assert identity.nodes == identity.tensors == ("x", "y", "z", "w")
    schedule = checkpoint_all(skip)
    assert schedule.R == ((0, 0), (1, 1), (2, 2), (3, 3))
    assert schedule.S_RAM == ((1, 0), (2, 0), (2, 1), (3, 0), (3, 2))
    assert schedule.S_AUX == ((1, 0), (2, 0), (3, 0))
    assert (schedule.M_in, schedule.M_out) == ((), ())
    assert checkpoint_all(skip).S_RAM
    assert gc.isenabled()
    gc.disable()
    try:
        assert checkpoint_all(skip).S_RAM
        assert not gc.isenabled()
    finally:
        gc.enable()
    one = checkpoint_all(skip)
    other = replace(one, identity=None)
    assert one == other
    assert hash(one) == hash(other)
    assert one != replace(one, M_out=((0, 0),))
    assert pickle.loads(pickle.dumps(one)) == one  # noqa: S301 - made on the line itself
    with pytest.raises(FrozenInstanceError):
        one.R = ()  # type: ignore[misc]


@given(graph=graphs(on_aux=True), data=st.data())
@settings(deadline=None)
def test_order_of_pairs_means_nothing(graph, data):
    """A schedule is a set of entries: shuffled relations are the same schedule to the simulator."""
    schedule = checkpoint_all(graph)
    shuffled = Schedule(
        **{name: tuple(data.draw(st.permutations(getattr(schedule, name)))) for name in RELATIONS}
    )
    assert shuffled == schedule
    assert simulate(graph, None, shuffled) == simulate(graph, None, schedule)


@given(data=st.data())
@settings(max_examples=50, deadline=None)
def test_of_stages_is_the_schedule_of_the_same_pairs(data):
    """Made from stages or from pairs in any order, a schedule is the same value."""
    pairs = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 9)), unique=True)
    relations = {name: tuple(data.draw(pairs, label=name)) for name in RELATIONS}
    schedule = Schedule(**relations)
    rows = {
        name: [sorted(k for t, k in found if t == stage) for stage in range(7)]
        for name, found in relations.items()
    }
    made = Schedule.of_stages(identity=None, **rows)
    assert made == schedule
    assert made.identity is None


def test_pairs_of_spans_are_those_of_the_schedule():
    """Each stage has the tensors whose spans contain it; spans may touch, overlap or be empty."""
    spans = [(4, 1, 2), (2, 0, 1), (3, 2, 1), (2, 2, 3), (0, 3, 3), (4, 2, 2)]
    schedule = Schedule.of_spans(R=[(1, 1), (0, 0)], kept=spans, identity=None)
    pairs = ((0, 2), (1, 2), (1, 4), (2, 2), (2, 4), (3, 0), (3, 2))
    assert schedule == Schedule(R=((0, 0), (1, 1)), S_RAM=pairs)
    assert pairs == schedule.S_RAM
    assert schedule.kept == ((0, 3, 3), (2, 0, 3), (4, 1, 2))
    assert [i for i in range(6) if schedule.is_kept(1, i)] == [2, 4]


@given(data=st.data())
@settings(max_examples=50, deadline=None)
def test_spans_have_the_pairs_that_were_given(data):
    """Whatever the stages, there or not; the relations of a copy are the same."""
    pairs = data.draw(st.lists(st.tuples(st.integers(-3, 6), st.integers(-2, 9)), unique=True))
    schedule = Schedule(R=(), S_RAM=tuple(pairs), S_AUX=tuple(pairs))
    for same in (schedule, replace(schedule, M_in=()), pickle.loads(pickle.dumps(schedule))):  # noqa: S301
        assert same.S_RAM == same.S_AUX == tuple(sorted(pairs))
        assert same == schedule
        assert hash(same) == hash(schedule)
    for t in range(-4, 8):
        assert [i for i in range(-3, 11) if schedule.is_kept(t, i)] == sorted(
            i for s, i in pairs if s == t
        )


def test_more_pairs_than_memory_holds_are_not_listed(skip, monkeypatch):
    """They are counted before any is made, and nothing but their list needs them.

    Spans and stages are walked within the limit that is open.
    """
    monkeypatch.setattr("poetmodel.schedule.relations.MOST_PAIRS", 3)
    schedule = Schedule.of_spans(R=(), kept=[(0, 1, 3), (1, 5, 2)], identity=None)
    assert schedule.S_RAM == ((1, 0), (2, 0), (3, 0))
    schedule = checkpoint_all(skip)
    assert simulate(skip, None, schedule).valid
    assert "S_RAM 5" in repr(schedule)
    with pytest.raises(TooLargeError, match="5 tensors in one relation"):
        _ = schedule.S_RAM
    schedule = Schedule.of_spans(R=(), kept=[(0, 1, 2)], identity=None)
    with time_limit(-1):
        with pytest.raises(TimeLimitError):
            _ = schedule.S_RAM
        with pytest.raises(TimeLimitError):
            Schedule.of_stages(identity=None, R=[[0]])
