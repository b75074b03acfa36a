"""Files of all kinds: invalid ones are an error that names them, and no data is lost."""

import json
import os
import re
import tempfile
from functools import partial
from pathlib import Path

import pytest

from kit.plans import PAGED, parse_plan
from kit.worked import even_costs, skip_graph
from poetmodel import files
from poetmodel.device import Costs, Device
from poetmodel.errors import (
    CostError,
    DeviceError,
    GraphError,
    InputError,
    PlanError,
    ScheduleError,
)
from poetmodel.graph import Graph
from poetmodel.plan import Plan
from poetmodel.problem import Problem
from poetmodel.problem.io import load_constraints
from poetmodel.schedule import GraphIdentity, Schedule, checkpoint_all


def test_read_text_returns_what_was_written(tmp_path):
    """Text is read back unchanged, with line ends; a byte order mark is dropped."""
    path = tmp_path / "file"
    files.write_text(path, "grün\r\n\n\u2028x")
    assert files.read_text(path) == "grün\r\n\n\u2028x"
    path.write_bytes(b"\xef\xbb\xbfx")
    assert files.read_text(str(path)) == "x"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("missing", "no such file"),
        ("", "found a folder"),
        ("a\0b", "no file can have this name"),
        ("a" * 60 + "\0", "no file can have this name"),
        ("a" * 60 + "\ud800", "no file can have this name"),
        ("x" * 300, "cannot be read"),
    ],
)
def test_read_text_says_why_it_cannot(tmp_path, name, words):
    """A missing file, a folder and an impossible name are plain errors that name the path."""
    with pytest.raises(InputError, match=words):
        files.read_text(tmp_path / name)


def test_read_text_refuses_binary_and_huge_files(tmp_path):
    """Bytes that are no UTF-8 and files over the limit are errors."""
    path = tmp_path / "file"
    path.write_bytes(b"PK\x03\x04\xff")
    with pytest.raises(InputError, match=r"binary file \(byte 4\)"):
        files.read_text(path)
    with pytest.raises(InputError, match="at most 4 bytes"):
        files.read_text(path, limit_bytes=4)
    with pytest.raises(InputError, match="at most 100 bytes"):
        files.read_text("/dev/zero", limit_bytes=100)


def test_write_text_interrupted_leaves_nothing_behind(tmp_path, monkeypatch):
    """Ctrl-C during a write leaves the folder as it was."""

    def interrupt(_descriptor):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        files.write_text(tmp_path / "file", "new")
    assert list(tmp_path.iterdir()) == []


def test_names_of_the_longest_length_are_written(tmp_path):
    """255 bytes, which a temporary name with all of it would exceed."""
    file = tmp_path / ("a" * 251 + ".txt")
    files.write_text(file, "x")
    assert file.read_text() == "x"


def test_write_text_leaves_what_a_path_is(tmp_path):
    """A file gets the rights of any new one; a link stays a link, and a device a device."""
    (tmp_path / "ordinary").write_text("x")
    files.write_text(tmp_path / "ours", "x")
    assert (tmp_path / "ours").stat().st_mode == (tmp_path / "ordinary").stat().st_mode
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("old")
    link.symlink_to(target)
    files.write_text(link, "new")
    assert link.is_symlink()
    assert target.read_text() == "new"
    files.write_text("/dev/null", "x")
    files.check_writable("/dev/null")
    assert not Path("/dev/null").is_file()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("none/file", "folder .* does not exist"),
        ("", "found a folder"),
        ("a\0b", "no file can have this name"),
        ("a" * 60 + "\0", "no file can have this name"),
        ("a" * 60 + "\ud800", "no file can have this name"),
        ("x" * 300, "cannot be written"),
        ("file/below", "cannot be written"),
    ],
)
def test_write_and_check_refuse_the_same(tmp_path, name, words):
    """The check beforehand refuses unwritable files with the same reason."""
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match=words):
        files.check_writable(tmp_path / name)
    with pytest.raises(InputError, match=words):
        files.write_text(tmp_path / name, "text")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_read_only_folder_is_refused(tmp_path, monkeypatch):
    """A folder without write permission is an error that names it."""

    def deny(**_options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(tempfile, "mkstemp", deny)  # as root no folder is read-only
    with pytest.raises(InputError, match=r"the folder .* cannot be written \(Permission denied\)"):
        files.check_writable(tmp_path / "file")


def test_write_text_refuses_half_a_character(tmp_path):
    """Text that UTF-8 cannot encode is an error; nothing is written."""
    with pytest.raises(InputError, match="cannot be encoded"):
        files.write_text(tmp_path / "file", "a\ud800")
    assert list(tmp_path.iterdir()) == []


def test_errors_keep_every_fault_and_their_type():
    """`within` puts a place before every fault and keeps the kind of error."""
    error = GraphError(iter(["one", "two"])).with_prefix("g.json")
    assert isinstance(error, GraphError)
    assert isinstance(error, ValueError)
    assert error.faults == ("g.json: one", "g.json: two")
    assert str(error) == "g.json: one; g.json: two"


def test_bytes_are_written_and_read_as_they_are(tmp_path):
    """Bytes are written and read back, as safely as text."""
    path = tmp_path / "x.bin"
    files.write_bytes(path, b"\x89\x00\xff")
    assert files.read_bytes(path) == b"\x89\x00\xff"
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.bin"]
    with pytest.raises(InputError, match="at most 2 bytes"):
        files.read_bytes(path, limit_bytes=2)
    with pytest.raises(
        InputError, match=r"x\.bin: expected UTF-8 text, got another encoding or a binary file"
    ):
        files.read_text(path, files.read_bytes(path))


# -- documents -----------------------------------------------------------------------------------
GRAPH = skip_graph()
COSTS = even_costs(GRAPH)
READERS = {
    "x.graph.json": (Graph.load, GraphError),
    "x.schedule.json": (Schedule.load, ScheduleError),
    "x.plan.json": (Plan.load, PlanError),
    "x.toml": (Device.load, DeviceError),
    "rows.toml": (partial(load_constraints, problem=Problem(GRAPH, COSTS, ram=20)), InputError),
    "x.csv": (Costs.load, CostError),
}
"""For each kind of file its reader, and the error of that."""
SAVED = {
    "x.graph.json": GRAPH.save,
    "x.schedule.json": checkpoint_all(GRAPH).save,
    "x.plan.json": parse_plan(PAGED, identity=GraphIdentity.from_graph(GRAPH)).save,
    "x.csv": Costs(compute={}, pages=None).save,
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
    "nested": (b"[" * 200_000, "not valid JSON"),
    "digits": (b'{"version": ' + b"9" * 5000 + b"}", "not valid JSON"),
    "another kind": (b'{"format": "poetmodel-other", "version": 1}', "format: expected"),
}
NO_TOML = {
    "half a line": (b"name =", "not valid TOML"),
    "repeated key": (b"name = 'a'\nname = 'b'", "not valid TOML"),
    "nested": (b"a = " + b"[" * 100_000, "not valid TOML"),
    "digits": (b"ram_bytes = " + b"9" * 5000, "not valid TOML"),
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
