"""Bounds and schedules of neighbouring points, and merged records of a store."""

import json
import math
import sqlite3
from contextlib import closing
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poetmodel.explore.points import (
    Point,
    best_neighbour,
    inherited_bound,
    make_point_id,
    merge_records,
)
from poetmodel.explore.store import PointStore


def point(ram_bytes=100, deadline_s=None, **known):
    """Return a point of one problem."""
    name = make_point_id("problem", ram_bytes, deadline_s)
    return Point(id=name, problem="problem", ram_bytes=ram_bytes, deadline_s=deadline_s, **known)


def found(value, *, needs_bytes=50, time_s=1.0):
    """Return a worker's report of a schedule."""
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
    made.set_schedule(found(value, needs_bytes=needs_bytes, time_s=time_s), b"schedule")
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
    near = best_neighbour(here, known)
    assert (None if near is None else near.value) == min(fitting, default=None)
    within = best_neighbour(here, known, overlaps=True)
    assert within is None or within.ram_bytes <= here.ram_bytes


@pytest.mark.parametrize(
    ("ram_bytes", "deadline_s", "holds"),
    [(100, None, True), (120, None, True), (80, None, False), (120, 5.0, False)],
)
def test_bound_holds_only_where_less_is_allowed(ram_bytes, deadline_s, holds):
    """A bound holds for points with at most the RAM and the deadline, not for others."""
    proved = point(ram_bytes, deadline_s, bound=3.0)
    assert inherited_bound(point(100), [proved]) == (3.0 if holds else 0.0)
    assert inherited_bound(point(100, 4.0), [proved]) == (3.0 if ram_bytes >= 100 else 0.0)


def test_revision_grows_and_its_picture_has_a_name():
    """Another schedule, or another proof of the same, is drawn anew."""
    made = solved(100, 2.0, needs_bytes=90)
    first = made.revision, made.digest
    made.state, made.status = "done", "optimal"
    made.begin_revision(b"schedule")
    assert made.revision == first[0] + 1
    assert made.digest != first[1]


@pytest.fixture
def store(tmp_path):
    """Return an empty store."""
    made = PointStore(tmp_path / "folder" / "store.sqlite")
    yield made
    made.close()


def test_point_comes_back_as_it_was(store):
    """With its schedule."""
    made = solved(100, 2.0, needs_bytes=90)
    store.call_and_wait(store.save, made, b"packed")
    back = store.call_and_wait(store.load_point, made.id)
    assert back == made
    assert store.call_and_wait(store.load_schedule, made.id) == b"packed"
    assert store.call_and_wait(store.load_points, "problem") == [back]
    assert store.call_and_wait(store.load_points, "other") == []


RECORD = {
    "id": "1c27d2dbf19a9ba0b5f7",
    "problem": "problem",
    "ram_bytes": 100,
    "deadline_s": None,
    "state": "done",
    "status": "optimal",
    "reason": "",
    "provisional": False,
    "neighbour_bytes": None,
    "lender": ["other", "digest"],
    "value": 2.0,
    "bound": 2.0,
    "energy_j": 12.0,
    "overhead_j": 2.0,
    "peak_ram_bytes": 90,
    "needs_bytes": 90,
    "makespan_s": 1.0,
    "time_s": 1.0,
    "seconds": 0.5,
    "revision": 3,
    "digest": "0123456789abcdef",
    "proof": {"termination": "proved", "build_s": 0.1, "versions": {}, "solve_s": 0.4},
}
"""A record of a point, as earlier stores have it."""


def test_records_of_earlier_stores_stay_as_they_are():
    """Each key is read and written again; a metric that a record lacks is unknown."""
    read = Point.from_record(RECORD)
    assert json.loads(json.dumps(read.to_record())) == RECORD
    assert read.schedule_metrics == found(2.0, needs_bytes=90)
    older = {key: value for key, value in RECORD.items() if key != "makespan_s"}
    assert Point.from_record(older).metrics["makespan_s"] is None


def test_better_point_is_never_overwritten(store):
    """Not by a worse schedule, a worse bound or an earlier state of another server."""
    best = solved(100, 2.0, needs_bytes=90)
    best.state, best.status, best.bound = "done", "optimal", 2.0
    store.call_and_wait(store.save, best, b"best")
    worse = solved(100, 3.0, needs_bytes=90)
    weaker = replace(best, bound=1.0, status="feasible")
    earlier = replace(best, state="solving")
    without = point(100)
    for other in (worse, weaker, earlier, without):
        store.call_and_wait(store.save, other, b"other")
    back = store.call_and_wait(store.load_point, best.id)
    assert (back.value, back.bound, back.state) == (2.0, 2.0, "done")
    assert store.call_and_wait(store.load_schedule, best.id) == b"best"
    better = solved(100, 1.5, needs_bytes=90)
    store.call_and_wait(store.save, better, b"better")
    assert store.call_and_wait(store.load_schedule, best.id) == b"better"


@given(
    first=st.tuples(st.floats(1, 5), st.floats(0, 1)),
    second=st.tuples(st.floats(1, 5), st.floats(0, 1)),
    carried=st.booleans(),
)
def test_two_servers_lose_nothing_of_a_point(first, second, carried):
    """The better schedule and the better bound stay, whoever of them had which."""
    one, other = (solved(100, value, needs_bytes=90) for value, _ in (first, second))
    one.bound, other.bound = first[1], second[1]
    both, is_new = merge_records(one, other, has_second_schedule=carried)
    assert both.value == (min(first[0], second[0]) if carried else first[0])
    assert both.bound == max(first[1], second[1])
    assert is_new <= (both.value == second[0])


def test_bound_of_another_server_stays_in_the_store(store):
    """A better schedule with a worse bound replaces it, and its drawing is made again."""
    bounded = solved(100, 3.0, needs_bytes=90)
    bounded.bound = 1.8
    store.call_and_wait(store.save, bounded, b"bounded")
    better = solved(100, 2.0, needs_bytes=90)
    better.bound = 0.5
    store.call_and_wait(store.save, better, b"better")
    back = store.call_and_wait(store.load_point, better.id)
    assert (back.value, back.bound) == (2.0, 1.8)
    assert back.digest not in (better.digest, bounded.digest)
    assert store.call_and_wait(store.load_schedule, better.id) == b"better"
    store.call_and_wait(store.save, replace(bounded, bound=1.9), None)
    back = store.call_and_wait(store.load_point, better.id)
    assert (back.value, back.bound) == (2.0, 1.9)
    assert store.call_and_wait(store.load_schedule, better.id) == b"better"


def test_token_stays_and_is_for_its_owner_alone(store):
    """The address of a server that is started again is the same."""
    token = store.call_and_wait(store.load_token)
    assert len(token) >= 24
    assert store.call_and_wait(store.load_token) == token
    assert store.path.stat().st_mode & 0o077 == 0


def test_file_that_is_no_store_is_refused(tmp_path):
    """The sentence names it."""
    path = tmp_path / "notes.sqlite"
    path.write_text("these are my notes, and long enough to be no database " * 20)
    with pytest.raises(ValueError, match=r"--store .*notes\.sqlite: expected a store"):
        PointStore(path)


@pytest.mark.parametrize(
    ("statements", "words"),
    [
        ("CREATE TABLE photos (name TEXT)", "this database is no store of the explorer"),
        (
            "CREATE TABLE points (id TEXT); CREATE TABLE answers (id TEXT); CREATE TABLE meta "
            "(key TEXT PRIMARY KEY, value TEXT); INSERT INTO meta VALUES ('format', '99')",
            r"another version of poetmodel \(format 99",
        ),
    ],
)
def test_database_of_others_is_left_alone(tmp_path, statements, words):
    """It is refused before anything is written into it."""
    path = tmp_path / "theirs.sqlite"
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(statements)
    before = path.read_bytes()
    with pytest.raises(ValueError, match=words):
        PointStore(path)
    assert path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == [path.name]
