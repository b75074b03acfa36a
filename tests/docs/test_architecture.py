"""The page of the architecture names only existing files and definitions."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "architecture.md"
CHANGES = tomllib.loads((ROOT / "docs" / "changes.toml").read_text(encoding="utf-8"))["change"]
FOLDERS = (
    "src/poetmodel",
    ".",
    "src/poetmodel/export",
    "src/poetmodel/lowered",
    "docs",
    "src/poetmodel/c/kernels",
)
"""Folders that paths of the page start from."""
GENERATED = {"pm_kernels.h"}
REFERENCE = re.compile(r"`((?:[\w.-]+/)+[\w.-]*|[\w-]+\.(?:py|h))(?:: ([^`]*))?`")


def missing(path, names):
    """Return the path, or the names in its file, that do not exist."""
    found = [ROOT / folder / path for folder in FOLDERS if (ROOT / folder / path).exists()]
    if not found:
        return [] if path in GENERATED else [path]
    if not found[0].is_file():
        return []
    text = found[0].read_text(encoding="utf-8")
    words = [word for word in re.split(r"[.\s,]+", names) if re.fullmatch(r"\w+", word)]
    return [f"{path}: {word}" for word in words if not re.search(rf"\b{word}\b", text)]


def test_files_and_names_of_the_page_exist():
    """Each `file: name` of the page is a file of the package or of the repository with it."""
    references = REFERENCE.findall(PAGE.read_text(encoding="utf-8"))
    assert len(references) > 100
    assert [fault for path, names in references for fault in missing(path, names)] == []


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change["name"])
def test_files_of_a_change_exist(change):
    """They hold the names, and its recipe is a heading of the page."""
    places = (place.partition(": ") for place in change["places"])
    assert [fault for path, _, names in places for fault in missing(path, names)] == []
    headings = re.findall(r"^### (.*)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    anchors = {heading.lower().replace(" ", "-") for heading in headings}
    assert change.get("recipe") in {None, *anchors}
