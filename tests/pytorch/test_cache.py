"""The folder of what compiles found: whole files or none, whoever writes at the same time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from poetmodel.torch import cache as cache_module  # noqa: E402
from poetmodel.torch.cache import Cache, default_folder, digest  # noqa: E402

pytestmark = pytest.mark.torch

KEY = digest("a", 1)
CONTENT = {"times_s": [0.1, 1e-9], "name": "é", "none": None}


def written(folder: Path) -> tuple[Cache, Path]:
    """Return a cache that holds one value, and its file."""
    cache = Cache(folder / "made" / "for it")
    cache.write("costs", KEY, CONTENT)
    (path,) = (folder / "made" / "for it").iterdir()
    return cache, path


def test_what_was_written_is_read(tmp_path: Path) -> None:
    """By kind and key; nothing else is there."""
    cache, _ = written(tmp_path)
    assert cache.read("costs", KEY) == CONTENT
    assert cache.read("step", KEY) is None
    assert cache.read("costs", digest("a", 2)) is None
    assert digest("a", 1) != digest("a", "1")


@pytest.mark.parametrize("place", [0, 20, 150, -30, -1])
def test_a_damaged_file_is_not_there(place: int, tmp_path: Path) -> None:
    """Whichever byte is another, or where the end is missing; the next write replaces it."""
    cache, path = written(tmp_path)
    whole = path.read_bytes()
    damaged = bytearray(whole)
    damaged[place] ^= 1
    for content in (bytes(damaged), whole[:place], b"", b"[" * 100_000):
        path.write_bytes(content)
        assert cache.read("costs", KEY) is None
    cache.write("costs", KEY, CONTENT)
    assert cache.read("costs", KEY) == CONTENT


def test_a_file_under_another_key_is_not_taken(tmp_path: Path) -> None:
    """A copy with the name of another key is not that of the key."""
    cache, path = written(tmp_path)
    other = digest("other")
    path.rename(path.with_name(f"costs-{other[:40]}.json"))
    assert cache.read("costs", other) is None


def test_no_folder_keeps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the object: `False` and an empty variable; one that cannot be made is no error."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("POETMODEL_CACHE", "")
    (tmp_path / "file").write_text("")
    for folder in (False, True, tmp_path / "file" / "below"):
        cache = Cache.of(folder)
        cache.write("costs", KEY, CONTENT)
        assert cache.read("costs", KEY) == (None if cache.folder else CONTENT)
        assert Cache.of(folder).read("costs", KEY) is None
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_the_folder_is_that_of_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it is below the user's cache."""
    monkeypatch.setenv("POETMODEL_CACHE", "/some/where")
    assert Cache.of(True).folder == Path("/some/where")
    monkeypatch.delenv("POETMODEL_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert default_folder() == Path("/caches/poetmodel")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_folder() == Path.home() / ".cache" / "poetmodel"


def test_the_oldest_files_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was read lately stays."""
    monkeypatch.setattr(cache_module, "MOST_FILES", 3)
    cache = Cache(tmp_path)
    for number in range(3):
        cache.write("step", digest(number), number)
        os.utime(cache._path("step", digest(number)), (number, number))
    assert cache.read("step", digest(0)) == 0
    cache.write("step", digest(3), 3)
    assert [cache.read("step", digest(number)) for number in range(4)] == [0, None, 2, 3]


def test_files_of_others_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever their names are: the folder may be any of the user's."""
    monkeypatch.setattr(cache_module, "MOST_FILES", 1)
    theirs = [tmp_path / name for name in ("run-1.json", "step-of-mine.json", "a-b.txt")]
    for path in theirs:
        path.write_text("{}")
    cache = Cache(tmp_path)
    for number in range(3):
        cache.write("step", digest(number), number)
    assert all(path.exists() for path in theirs)
    assert len(list(tmp_path.iterdir())) == len(theirs) + 1


def test_processes_share_a_folder(tmp_path: Path) -> None:
    """While several write the same key, a reader finds one of their values, whole."""
    program = (
        "import sys; sys.path[:] = eval(sys.argv[1])\n"
        "from poetmodel.torch.cache import Cache\n"
        "for k in range(40):\n"
        "    Cache.of(sys.argv[2]).write('costs', 'key', [int(sys.argv[3])] * 5000)\n"
    )
    cache = Cache(tmp_path)
    cache.write("costs", "key", [9] * 5000)
    writers = [
        subprocess.Popen([sys.executable, "-c", program, repr(sys.path), str(tmp_path), str(k)])
        for k in range(2)
    ]
    while any(writer.poll() is None for writer in writers):
        found = cache.read("costs", "key")
        assert found in ([0] * 5000, [1] * 5000, [9] * 5000)
    assert [writer.returncode for writer in writers] == [0, 0]
    assert cache.read("costs", "key")[0] in (0, 1)
