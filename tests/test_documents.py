"""Files of every kind: what is none is one plain error that names it, and nothing is lost."""

import json
import os
import re
from functools import partial

import pytest

from kit.plans import PAGED, plan
from kit.worked import even_costs, skip_graph
from poetmodel.device import Costs, Device
from poetmodel.device.io import load_profile, save_profile
from poetmodel.errors import (
    CostError,
    DeviceError,
    GraphError,
    InputError,
    PlanError,
    ScheduleError,
)
from poetmodel.graph.io import load_graph
from poetmodel.plan import Plan
from poetmodel.problem import Problem
from poetmodel.problem.io import load_constraints
from poetmodel.schedule import GraphIdentity, Schedule, checkpoint_all

GRAPH = skip_graph()
COSTS = even_costs(GRAPH)
READERS = {
    "x.graph.json": (load_graph, GraphError),
    "x.schedule.json": (Schedule.load, ScheduleError),
    "x.plan.json": (Plan.load, PlanError),
    "x.toml": (Device.load, DeviceError),
    "rows.toml": (partial(load_constraints, problem=Problem(GRAPH, COSTS, ram=20)), InputError),
    "x.csv": (load_profile, CostError),
}
"""For each kind of file its reader, and the error of that."""
SAVED = {
    "x.graph.json": GRAPH.save,
    "x.schedule.json": checkpoint_all(GRAPH).save,
    "x.plan.json": plan(PAGED, identity=GraphIdentity.of(GRAPH)).save,
    "x.csv": partial(save_profile, Costs(compute={}, pages=None)),
}
"""What is written, by the name of its file."""
NO_JSON = {
    "empty": (b"", "empty file"),
    "blank": (b" \n", "empty file"),
    "text": (b"graph", "not valid JSON"),
    "Python": (b"{'format': 1}", "not valid JSON"),
    "list": (b"[1, 2]", "expected .*object.*, got a list"),
    "number": (b"3", "expected .*object.*, got 3"),
    "null": (b"null", "expected .*object.*, got nothing"),
    "truncated": (b'{"format": "poetmodel-', "truncated"),
    "nested": (b"[" * 200_000, "nested too deeply"),
    "digits": (b'{"version": ' + b"9" * 5000 + b"}", "too many digits"),
    "another kind": (b'{"format": "poetmodel-other", "version": 1}', "format: expected"),
}
NO_TOML = {
    "half a line": (b"name =", "not valid TOML"),
    "repeated key": (b"name = 'a'\nname = 'b'", "not valid TOML"),
    "nested": (b"a = " + b"[" * 100_000, "nested too deeply"),
    "digits": (b"ram_bytes = " + b"9" * 5000, "too many digits"),
}


def refused(name, path, words=""):
    """Read a file, which must fail with the error of its kind: its path, and words behind it."""
    read, kind = READERS[name]
    with pytest.raises(kind) as caught:
        read(path)
    assert all(fault.startswith(str(path)) for fault in caught.value.faults)
    told = [fault.removeprefix(str(path)) for fault in caught.value.faults]
    assert any(re.search(words, fault) for fault in told), told


@pytest.mark.parametrize("name", READERS)
def test_missing_folder_and_binary_are_named(name, tmp_path):
    """A path that leads nowhere, a folder, and bytes that are no text."""
    path = tmp_path / name
    refused(name, path, "no such file|there is no such")
    path.mkdir()
    refused(name, path, "folder")
    path.rmdir()
    for content in (b"\x89PNG\r\n\x1a\n\x00\xff", b"\xff\xfe\x00"):
        path.write_bytes(content)
        refused(name, path, "binary")


@pytest.mark.parametrize("case", NO_JSON)
@pytest.mark.parametrize("name", [name for name in READERS if name.endswith(".json")])
def test_what_is_no_document_is_refused(name, case, tmp_path):
    """Whatever the text, the answer is one sentence."""
    content, words = NO_JSON[case]
    (tmp_path / name).write_bytes(content)
    refused(name, tmp_path / name, words)


@pytest.mark.parametrize("case", NO_TOML)
@pytest.mark.parametrize("name", [name for name in READERS if name.endswith(".toml")])
def test_what_is_no_toml_is_refused(name, case, tmp_path):
    """Syntax errors, half a file and monsters are one fault each."""
    content, words = NO_TOML[case]
    (tmp_path / name).write_bytes(content)
    refused(name, tmp_path / name, words)


@pytest.mark.parametrize("name", [name for name in SAVED if name.endswith(".json")])
def test_every_truncation_is_refused(name, tmp_path):
    """A file that is cut off anywhere is never read as a smaller one."""
    path = tmp_path / name
    SAVED[name](path)
    text = path.read_text(encoding="utf-8").rstrip()
    json.loads(text)
    for length in range(len(text)):
        path.write_text(text[:length], encoding="utf-8")
        refused(name, path)


@pytest.mark.parametrize("name", [name for name in SAVED if name.endswith(".json")])
def test_a_key_that_comes_twice_is_a_fault(name, tmp_path):
    """JSON would silently keep the last."""
    path = tmp_path / name
    SAVED[name](path)
    path.write_text(path.read_text(encoding="utf-8").replace("{", '{"version": 1, ', 1))
    refused(name, path, "version: the key comes twice")


@pytest.mark.parametrize("name", SAVED)
def test_what_cannot_be_written_costs_nothing(name, tmp_path, monkeypatch):
    """A missing folder is named and not made; a full disk leaves the old file, and no draft."""
    with pytest.raises(InputError, match="does not exist"):
        SAVED[name](tmp_path / "none" / name)
    assert list(tmp_path.iterdir()) == []
    path = tmp_path / name
    path.write_bytes(b"old")

    def full_disk(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(InputError, match="No space left"):
        SAVED[name](path)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
