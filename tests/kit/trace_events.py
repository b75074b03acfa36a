"""A strict reader of Chrome trace events, after the description of the format.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU names the keys that
each phase of event has, and says what must hold of slices on one track and of flows.
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
"""The keys that each phase needs beside those that all have, and those it may have."""
_METADATA = {
    "process_name": {"name": str},
    "thread_name": {"name": str},
    "thread_sort_index": {"sort_index": int},
}


def check_trace(document):
    """Raise `AssertionError` unless a document is one of trace events; return its events."""
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


def nanoseconds(time_us):
    """Return a time of the format, in microseconds, as the nanoseconds that readers keep."""
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
        nanoseconds(event[key])
    if event["ph"] == "C":
        assert event["args"]
        assert all(type(value) is int and value >= 0 for value in event["args"].values())
    if event["ph"] == "i":
        assert event["s"] in {"g", "p", "t"}
    if event["ph"] == "M":
        kinds = _METADATA[event["name"]]
        assert {key: type(value) for key, value in event["args"].items()} == kinds


def _check_names(events):
    """Every process and every track with slices has one name."""
    named = [(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"]
    assert len(named) == len(set(named))
    assert {(e["pid"], e["tid"]) for e in events if e["ph"] == "X"} <= set(named)
    processes = [e["pid"] for e in events if e["name"] == "process_name"]
    assert len(processes) == len(set(processes))
    assert {e["pid"] for e in events} == set(processes)


def _check_slices(events):
    """Slices of one track do not overlap: here none is inside of another."""
    ends = {}
    for event in events:
        if event["ph"] != "X":
            continue
        track = event["pid"], event["tid"]
        begin = nanoseconds(event["ts"])
        assert begin >= ends.get(track, 0), event
        ends[track] = begin + nanoseconds(event["dur"])


def _check_flows(events):
    """Each flow begins once and then ends once, both where a slice is on that track."""
    flows = defaultdict(list)
    for event in events:
        if event["ph"] in "sf":
            flows[event["id"]].append(event)
    for begin, end in flows.values():
        assert (begin["ph"], end["ph"], end["bp"]) == ("s", "f", "e")
        assert (begin["name"], begin["cat"]) == (end["name"], end["cat"])
        for one in (begin, end):
            assert any(
                nanoseconds(e["ts"])
                <= nanoseconds(one["ts"])
                <= nanoseconds(e["ts"]) + nanoseconds(e["dur"])
                for e in events
                if e["ph"] == "X" and (e["pid"], e["tid"]) == (one["pid"], one["tid"])
            )
