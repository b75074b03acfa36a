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
