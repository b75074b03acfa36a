"""A strict checker of Chrome trace events.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU defines the keys of
each phase of event, and rules for slices on one track and for flows.
"""

import math
from collections import defaultdict
from typing import Any

Event = dict[str, Any]

_ALWAYS = {"name", "ph", "pid", "tid"}
_KEYS = {
    "M": ({"args"}, set[str]()),
    "X": ({"ts", "dur", "cat"}, {"args"}),
    "C": ({"ts", "args"}, set[str]()),
    "i": ({"ts", "s"}, {"cat", "args"}),
    "s": ({"ts", "id", "cat"}, {"args"}),
    "f": ({"ts", "id", "cat"}, {"args", "bp"}),
}
"""For each phase, the further keys that it must have, and those that it may have."""
_METADATA = {
    "process_name": {"name": str},
    "thread_name": {"name": str},
    "thread_sort_index": {"sort_index": int},
}


def check_trace(document):
    """Assert that a document consists of valid trace events; return the events."""
    assert set(document) == {"traceEvents", "displayTimeUnit", "otherData"}
    assert document["displayTimeUnit"] in {"ms", "ns"}
    assert isinstance(document["otherData"], dict)
    events = document["traceEvents"]
    for event in events:
        _check_event(event)
    timed = [event["ts"] for event in events if event["ph"] != "M"]
    assert timed == sorted(timed)
    _check_names(events)
    _check_slices(events)
    _check_flows(events)
    return list(events)


def to_nanoseconds(time_us):
    """Convert a time of the format [us] to whole nanoseconds, as readers do.

    Asserts that the time is exact.
    """
    whole = round(time_us * 1000)
    assert math.isclose(time_us, whole / 1000, rel_tol=1e-15)
    return whole


def _check_event(event):
    assert event.keys() >= _ALWAYS
    needed, allowed = _KEYS[event["ph"]]
    rest = event.keys() - _ALWAYS
    assert needed <= rest <= needed | allowed, event
    assert isinstance(event["name"], str)
    assert event["name"]
    assert all(type(event[key]) is int for key in ("pid", "tid"))
    for key in {"ts", "dur"} & event.keys():
        assert type(event[key]) in {int, float}
        assert math.isfinite(event[key])
        assert event[key] >= 0
        to_nanoseconds(event[key])
    if event["ph"] == "C":
        assert event["args"]
        assert all(type(value) is int and value >= 0 for value in event["args"].values())
    if event["ph"] == "i":
        assert event["s"] in {"g", "p", "t"}
    if event["ph"] == "M":
        kinds = _METADATA[event["name"]]
        assert {key: type(value) for key, value in event["args"].items()} == kinds


def _check_names(events):
    """Assert that every process, and every track with slices, has exactly one name."""
    named = [(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"]
    assert len(named) == len(set(named))
    assert {(e["pid"], e["tid"]) for e in events if e["ph"] == "X"} <= set(named)
    processes = [e["pid"] for e in events if e["name"] == "process_name"]
    assert len(processes) == len(set(processes))
    assert {e["pid"] for e in events} == set(processes)


def _check_slices(events):
    """Assert that slices of one track do not overlap, not even nested as the format permits."""
    ends = {}
    for event in events:
        if event["ph"] != "X":
            continue
        track = event["pid"], event["tid"]
        begin = to_nanoseconds(event["ts"])
        assert begin >= ends.get(track, 0), event
        ends[track] = begin + to_nanoseconds(event["dur"])


def _check_flows(events):
    """Assert that each flow begins once and then ends once, both at a slice of its track."""
    flows = defaultdict(list)
    for event in events:
        if event["ph"] in "sf":
            flows[event["id"]].append(event)
    for begin, end in flows.values():
        assert (begin["ph"], end["ph"], end["bp"]) == ("s", "f", "e")
        assert (begin["name"], begin["cat"]) == (end["name"], end["cat"])
        for one in (begin, end):
            assert any(
                to_nanoseconds(e["ts"])
                <= to_nanoseconds(one["ts"])
                <= to_nanoseconds(e["ts"]) + to_nanoseconds(e["dur"])
                for e in events
                if e["ph"] == "X" and (e["pid"], e["tid"]) == (one["pid"], one["tid"])
            )
