"""The folder of a sweep: nothing that was finished is lost, nothing torn stays."""

import errno
import os

import pytest

from poetmodel.bench import Store
from poetmodel.errors import InputError


def _record(key, status="optimal", **more):
    return {"key": key, "status": status, "cell": {}, "result": None, **more}


def test_records_and_schedules_are_kept(tmp_path):
    """A record is found again, its schedule in a file of its own."""
    store = Store(tmp_path / "sweep")
    assert (store.records(), store.schedule("a")) == ([], None)
    store.add(_record("a", schedule={"R": [[0, 0]]}))
    store.add(_record("b", schedule=None))
    again = Store(tmp_path / "sweep")
    assert again.records() == [_record("a"), _record("b")]
    assert again.schedule("a") == {"R": [[0, 0]]}
    assert again.schedule("b") is None


def test_failed_runs_are_not_finished(tmp_path):
    """They are run again; the record of a later run takes the place of the earlier one."""
    store = Store(tmp_path)
    store.add(_record("a", "failed"))
    assert store.finished() == {}
    store.add(_record("a", "infeasible"))
    assert list(store.finished()) == ["a"]
    assert len(store.records()) == 1


@pytest.mark.parametrize("cut", [1, 5, 20])
def test_torn_last_line_is_taken_away(tmp_path, cut):
    """What a killed sweep wrote half is gone, and the next record stands on a line of its own."""
    store = Store(tmp_path)
    store.add(_record("a"))
    whole = store.path.read_bytes()
    store.add(_record("b"))
    torn = store.path.read_bytes()[: len(whole) + cut]
    store.path.write_bytes(torn)
    again = Store(tmp_path)
    assert list(again.finished()) == ["a"]
    again.add(_record("c"))
    assert list(again.finished()) == ["a", "c"]
    assert again.path.read_bytes().startswith(whole + b'{"key": "c"')


def test_line_without_its_end_is_kept(tmp_path):
    """Only the end of line was lost: the record counts."""
    store = Store(tmp_path)
    store.add(_record("a"))
    store.path.write_bytes(store.path.read_bytes()[:-1])
    again = Store(tmp_path)
    again.add(_record("b"))
    assert list(again.finished()) == ["a", "b"]


def test_only_a_torn_line(tmp_path):
    """A file that holds nothing whole has the next record alone, letters cut in two included."""
    store = Store(tmp_path)
    store.path.write_bytes('{"key": "é'.encode()[:-1])
    assert Store(tmp_path).records() == []
    store.add(_record("a"))
    assert store.path.read_bytes().startswith(b'{"key": "a"')


def test_folder_that_cannot_be_made(tmp_path):
    """A file in its place is said, not overwritten."""
    (tmp_path / "taken").write_text("x")
    with pytest.raises(InputError, match="cannot be made"):
        Store(tmp_path / "taken")


@pytest.mark.parametrize(
    "line", [b"nonsense", b"[1]", b"\xff\xfe", b'{"key": "a"}', b"[" * 100_000, b"null", b""]
)
def test_lines_without_a_record_are_passed_over(tmp_path, line):
    """A damaged line costs its own record alone, wherever it stands."""
    store = Store(tmp_path)
    store.add(_record("a"))
    store.path.write_bytes(line + b"\n" + store.path.read_bytes() + line + b"\n")
    store.add(_record("b"))
    assert list(Store(tmp_path).finished()) == ["a", "b"]


def test_record_of_a_killed_neighbour_does_not_swallow_the_next(tmp_path):
    """What another sweep wrote half, while this one runs, is ended before a record is added."""
    store = Store(tmp_path)
    store.add(_record("a"))
    with store.path.open("ab") as stream:
        stream.write(b'{"key": "torn')
    store.add(_record("b"))
    assert list(store.finished()) == list(Store(tmp_path).finished()) == ["a", "b"]


def test_record_that_cannot_be_written_whole_leaves_the_file(tmp_path, monkeypatch, told):
    """On a full disk the sweep ends with a sentence, and the file holds what it held."""
    store = Store(tmp_path)
    store.add(_record("a"))
    before = store.path.read_bytes()

    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr("poetmodel.bench.store.os.fsync", full)
        with told.raises(InputError):
            store.add(_record("b"))
    assert store.path.read_bytes() == before
    store.add(_record("b"))
    assert list(Store(tmp_path).finished()) == ["a", "b"]


def test_damaged_schedule_file_is_none(tmp_path):
    """A start that cannot be read is no start."""
    store = Store(tmp_path)
    store.add(_record("a", schedule={"R": []}))
    path = tmp_path / "schedules" / "a.schedule.json"
    for content in (b'{"R": [', b"\xff", b"[]"):
        path.write_bytes(content)
        assert store.schedule("a") is None


def test_records_of_other_sweeps_are_seen(tmp_path):
    """Each of two sweeps in a folder sees what the other has written."""
    one, other = Store(tmp_path), Store(tmp_path)
    assert one.record("a") is None
    other.add(_record("a", "failed"))
    assert one.record("a") == _record("a", "failed")
    one.add(_record("a"))
    assert other.record("a") == _record("a")
    one.path.write_bytes(b"")
    assert other.record("a") is None
