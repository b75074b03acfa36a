"""The map of the architecture."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_place_on_the_map_exists() -> None:
    """Each file and folder that the map names is there: whoever follows it finds the place."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    part = page.split("## Where to change what")[1].split("## Recipes")[0]
    rows = [line for line in part.splitlines() if line.startswith("| ")]
    places = [place for row in rows[1:] for place in re.findall(r"`([^` ]*[/.][^` ]*)`", row)]
    assert len(places) > 40
    lost = [
        place
        for place in places
        if not any(any(base.glob(place)) for base in (ROOT / "src" / "poetmodel", ROOT))
    ]
    assert not lost


def test_every_name_on_the_page_is_in_its_file() -> None:
    """Where the page says ``file: name``, the file defines that class, function or constant."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    names = re.findall(r"`([\w/]+\.py): ([\w.]+)`", page)
    assert len(names) > 20
    for file, name in names:
        bases = (ROOT / "src" / "poetmodel" / file, ROOT / file)
        source = next(path for path in bases if path.is_file()).read_text(encoding="utf-8")
        for part in name.split("."):
            defined = rf"^ *(class|def) {part}\b|^{part}\b.*="
            assert re.search(defined, source, re.MULTILINE), f"{file}: {name}"
