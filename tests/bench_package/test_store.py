"""The folder of a sweep: nothing that was finished is lost, nothing torn stays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from poetmodel.bench import Store
from poetmodel.errors import InputError

if TYPE_CHECKING:
    from pathlib import Path


def _record(key: str, status: str = "optimal", **more: Any) -> dict[str, Any]:
    return {"key": key, "status": status, **more}


def test_records_and_schedules_are_kept(tmp_path: Path) -> None:
    """A record is found again, its schedule in a file of its own."""
    store = Store(tmp_path / "sweep")
    assert (store.records(), store.schedule("a")) == ([], None)
    store.add(_record("a", schedule={"R": [[0, 0]]}))
    store.add(_record("b", schedule=None))
    again = Store(tmp_path / "sweep")
    assert again.records() == [_record("a"), _record("b")]
    assert again.schedule("a") == {"R": [[0, 0]]}
    assert again.schedule("b") is None


def test_failed_cells_are_not_finished(tmp_path: Path) -> None:
    """They are run again; the record of a later run takes the place of the earlier one."""
    store = Store(tmp_path)
    store.add(_record("a", "failed"))
    assert store.finished() == {}
    store.add(_record("a", "infeasible"))
    assert list(store.finished()) == ["a"]
    assert len(store.records()) == 1


@pytest.mark.parametrize("cut", [1, 5, 20])
def test_torn_last_line_is_taken_away(tmp_path: Path, cut: int) -> None:
    """What a killed sweep wrote half is gone, and the next record stands on a line of its own."""
    store = Store(tmp_path)
    store.add(_record("a"))
    whole = store.path.read_bytes()
    store.add(_record("b"))
    torn = store.path.read_bytes()[: len(whole) + cut]
    store.path.write_bytes(torn)
    again = Store(tmp_path)
    assert again.path.read_bytes() == whole
    again.add(_record("c"))
    assert list(again.finished()) == ["a", "c"]


def test_line_without_its_end_is_kept(tmp_path: Path) -> None:
    """Only the end of line was lost: the record counts."""
    store = Store(tmp_path)
    store.add(_record("a"))
    store.path.write_bytes(store.path.read_bytes()[:-1])
    again = Store(tmp_path)
    again.add(_record("b"))
    assert list(again.finished()) == ["a", "b"]


def test_only_a_torn_line(tmp_path: Path) -> None:
    """A file that holds nothing whole is empty afterwards, letters cut in two included."""
    store = Store(tmp_path)
    store.path.write_bytes('{"key": "é'.encode()[:-1])
    assert Store(tmp_path).records() == []
    assert store.path.read_bytes() == b""


def test_folder_that_cannot_be_made(tmp_path: Path) -> None:
    """A file in its place is said, not overwritten."""
    (tmp_path / "taken").write_text("x")
    with pytest.raises(InputError, match="cannot be made"):
        Store(tmp_path / "taken")
