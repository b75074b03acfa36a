"""Shipped files, and reading and writing of files."""

import os
import tempfile
from pathlib import Path

import pytest

from poetmodel import files
from poetmodel.errors import GraphError, InputError


def test_shipped_refuses_other_folders():
    """Only the two kinds can be asked for, whatever folder lies beside them."""
    with pytest.raises(InputError, match="has no tests"):
        files.shipped("tests")


def test_read_text_returns_what_was_written(tmp_path):
    """Text comes back as it was, line ends and all; a byte order mark is dropped."""
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
        ("x" * 300, "cannot be written"),
        ("file/below", "cannot be written"),
    ],
)
def test_write_and_check_refuse_the_same(tmp_path, name, words):
    """What cannot be written is refused by the check beforehand, with the same reason."""
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
    """Text that UTF-8 cannot hold is an error; nothing is written."""
    with pytest.raises(InputError, match="no UTF-8 form"):
        files.write_text(tmp_path / "file", "a\ud800")
    assert list(tmp_path.iterdir()) == []


def test_errors_keep_every_fault_and_their_type():
    """`within` puts a place before every fault and keeps the kind of error."""
    error = GraphError(iter(["one", "two"])).within("g.json")
    assert isinstance(error, GraphError)
    assert isinstance(error, ValueError)
    assert error.faults == ("g.json: one", "g.json: two")
    assert str(error) == "g.json: one; g.json: two"


def test_bytes_are_written_and_read_as_they_are(tmp_path):
    """What is no text goes to a file and comes back, as safely as text does."""
    path = tmp_path / "x.bin"
    files.write_bytes(path, b"\x89\x00\xff")
    assert files.read_bytes(path) == b"\x89\x00\xff"
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.bin"]
    with pytest.raises(InputError, match="at most 2 bytes"):
        files.read_bytes(path, limit_bytes=2)
    with pytest.raises(InputError, match=r"x\.bin: expected UTF-8 text, found a binary file"):
        files.as_text(files.read_bytes(path), source=str(path))
