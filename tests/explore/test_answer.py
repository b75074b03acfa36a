"""Answers of points: merged, lent to neighbouring points, and stored."""

import json
import math
import sqlite3
from contextlib import closing
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poetmodel.explore.answer import Answer, Found, OpenProblem, Point, Proof, make_point_id
from poetmodel.explore.settings import ExplorerSettings
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


def solved(ram_bytes, value, *, needs_bytes, time_s=1.0, bound=0.0, packed=b"schedule", proof=None):
    """Return a point with a schedule."""
    made = point(ram_bytes)
    metrics = found(value, needs_bytes=needs_bytes, time_s=time_s)
    made.take(Answer(found=Found(metrics=metrics, packed=packed), bound=bound, proof=proof))
    return made


founds = st.builds(
    Found,
    metrics=st.builds(found, st.integers(1, 3), needs_bytes=st.integers(1, 2)),
    is_own=st.booleans(),
    lender=st.none() | st.tuples(st.sampled_from("ab"), st.sampled_from("ab")),
    lender_bytes=st.none() | st.integers(1, 2),
)
proofs = st.builds(
    Proof,
    status=st.sampled_from(["optimal", "feasible", "infeasible", "unknown"]),
    reason=st.sampled_from(["", "stopped"]),
    solve_s=st.sampled_from([0.0, 1.0]),
    versions=st.sampled_from([{}, {"highs": "1"}]),
)
answers = st.builds(
    Answer, found=st.none() | founds, bound=st.floats(0, 4), proof=st.none() | proofs
)


@given(first=answers, second=answers, third=answers)
def test_answers_merge_in_any_order(first, second, third):
    """Commutative, associative and idempotent: no order of servers or reports loses anything."""
    first, second, third = (one.merge(Answer()) for one in (first, second, third))  # valid bounds
    both = first.merge(second)
    assert first.merge(first) == first
    assert both == second.merge(first) == both.merge(first)
    assert both.merge(third) == first.merge(second.merge(third))


@given(first=answers, second=answers)
def test_better_schedule_bound_and_proof_stay(first, second):
    """Whoever of the two had which."""
    both = first.merge(second)
    values = [one.found.value for one in (first, second) if one.found is not None]
    assert (both.found and both.found.value) == min(values, default=None)
    assert both.bound == min([max(first.bound, second.bound), *values])
    assert both.is_proved == (first.is_proved or second.is_proved)
    assert (both.proof is None) == (first.proof is second.proof is None)


def open_problem(*points, counts="serial"):
    """Return a problem with these points."""
    facts = {"deadline": {"counts": counts}}
    settings = ExplorerSettings(model="mlp", device="mkr1000")
    return OpenProblem("problem", settings, facts, {one.id: one for one in points})


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
    known = []
    for index, ((ram, deadline, value, bound), needs, time_s) in enumerate(others):
        one = solved(ram, value, needs_bytes=needs, time_s=time_s, bound=min(bound, value))
        known.append(replace(one, id=str(index), deadline_s=deadline))
    fitting = [
        one.answer.found.value
        for one in known
        if one.answer.found.metrics["needs_bytes"] <= here.ram_bytes
        and one.answer.found.metrics["time_s"]
        <= (math.inf if here.deadline_s is None else here.deadline_s)
    ]
    lent = open_problem(*known).borrow(here).found
    assert (None if lent is None else lent.value) == min(fitting, default=None)
    within = open_problem(*known, counts="overlap").borrow(here).found
    assert within is None or within.lender_bytes <= here.ram_bytes


@pytest.mark.parametrize(
    ("ram_bytes", "deadline_s", "holds"),
    [(100, None, True), (120, None, True), (80, None, False), (120, 5.0, False)],
)
def test_bound_holds_only_where_less_is_allowed(ram_bytes, deadline_s, holds):
    """Not with more RAM or more time."""
    proved = point(ram_bytes, deadline_s)
    proved.take(Answer(bound=3.0))
    problem = open_problem(proved)
    assert problem.borrow(point(100)).bound == (3.0 if holds else 0.0)
    assert problem.borrow(point(100, 4.0)).bound == (3.0 if ram_bytes >= 100 else 0.0)


def test_revision_grows_and_its_picture_has_a_name():
    """Another schedule, or the end of a solve, is drawn anew; a bound alone is not."""
    made = solved(100, 2.0, needs_bytes=90)
    first = made.revision, made.digest
    assert not made.take(Answer(bound=1.0))
    assert (made.revision, made.digest) == first
    made.finish(Proof(status="optimal"))
    assert made.revision == first[0] + 1
    assert made.digest != first[1]


def test_bound_of_neighbours_closes_a_point():
    """A borrowed schedule that a bound proves optimal is the point's own."""
    lent = solved(100, 2.0, needs_bytes=90, bound=1.9).lend(point(95), overlaps=False)
    assert lent.found.lender_bytes == 100
    assert (lent.status, lent.is_owned) == ("feasible", False)
    bounded = lent.merge(Answer(bound=1.99))
    assert bounded.close(0.001) == bounded
    closed = bounded.close(0.01)
    assert (closed.status, closed.is_owned, closed.proof.termination) == (
        *("optimal", True, "proved"),
    )


@pytest.fixture
def store(tmp_path):
    """Return an empty store."""
    made = PointStore(tmp_path / "folder" / "store.sqlite")
    yield made
    made.close()


def test_point_comes_back_as_it_was(store):
    """With its schedule."""
    made = solved(100, 2.0, needs_bytes=90, packed=b"packed")
    store.call_and_wait(store.save, made)
    back = store.call_and_wait(store.load_point, made.id)
    assert back == replace(made, state="cancelled")
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
    assert read.answer.found.metrics == found(2.0, needs_bytes=90)
    older = {key: value for key, value in RECORD.items() if key != "makespan_s"}
    assert Point.from_record(older).answer.found.metrics["makespan_s"] is None


def test_better_point_is_never_overwritten(store):
    """Not by a worse schedule, a worse bound or an earlier state of another server."""
    proof = Proof(status="optimal")
    best = solved(100, 2.0, needs_bytes=90, bound=2.0, packed=b"best", proof=proof)
    best.state = "done"
    store.call_and_wait(store.save, best)
    worse = solved(100, 3.0, needs_bytes=90, packed=b"other")
    weaker = solved(100, 2.0, needs_bytes=90, bound=1.0)
    earlier = replace(best, state="solving", answer=replace(best.answer, proof=None))
    for other in (worse, weaker, earlier, point(100)):
        store.call_and_wait(store.save, other)
    back = store.call_and_wait(store.load_point, best.id)
    assert (back.answer, back.state) == (best.answer, "done")
    assert store.call_and_wait(store.load_schedule, best.id) == b"best"
    better = solved(100, 1.5, needs_bytes=90, packed=b"better")
    store.call_and_wait(store.save, better)
    assert store.call_and_wait(store.load_schedule, best.id) == b"better"


def test_bound_of_another_server_stays_in_the_store(store):
    """A better schedule with a worse bound replaces it, and its drawing is made again."""
    bounded = solved(100, 3.0, needs_bytes=90, bound=1.8, packed=b"bounded")
    store.call_and_wait(store.save, bounded)
    better = solved(100, 2.0, needs_bytes=90, bound=0.5, packed=b"better")
    store.call_and_wait(store.save, better)
    back = store.call_and_wait(store.load_point, better.id)
    assert (back.answer.found.value, back.answer.bound) == (2.0, 1.8)
    assert back.digest not in (better.digest, bounded.digest)
    assert store.call_and_wait(store.load_schedule, better.id) == b"better"
    bounded.take(Answer(bound=1.9))
    store.call_and_wait(store.save, bounded)
    back = store.call_and_wait(store.load_point, better.id)
    assert (back.answer.found.value, back.answer.bound) == (2.0, 1.9)
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
