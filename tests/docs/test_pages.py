"""The pages: links lead somewhere, generated parts are current, tables are complete."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import poetmodel
from poetmodel.backends.registry import backend_names
from poetmodel.graph.catalogue import model_names
from poetmodel.schedule import RELATIONS

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("bench/*.md")])
LINK = re.compile(r"\]\((?!https?:)([^)\s#]*)(?:#([^)\s]+))?\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """Return the names under which the headings of a page can be linked."""
    headings = HEADING.findall(page.read_text(encoding="utf-8"))
    words = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {word.strip().replace(" ", "-") for word in words}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    """Every relative link names a file that exists, and a heading in it."""
    for target, anchor in LINK.findall(page.read_text(encoding="utf-8")):
        found = page if not target else page.parent / target
        assert found.exists(), f"{page.name} links to {target}"
        if anchor:
            assert anchor in anchors(found), f"{page.name} links to {target}#{anchor}"


@pytest.mark.parametrize("script", ["make_docs.py", "make_pages.py"])
def test_generated_parts_are_current(script: str) -> None:
    """Nobody edited a generated part, or changed what it is generated from and forgot it."""
    command = [sys.executable, str(ROOT / "scripts" / script), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_notation_has_every_relation() -> None:
    """Each relation of the paper has its row."""
    text = (ROOT / "docs" / "concepts" / "glossary.md").read_text(encoding="utf-8")
    for name in RELATIONS:
        assert f"| `{name}[t," in text


def test_changelog_and_citation_have_this_version() -> None:
    """A release is in the changelog, and is what one cites."""
    assert f"## {poetmodel.__version__} " in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {poetmodel.__version__}\n" in citation
    for paper in ("POET: Training Neural Networks", "Checkmate: Breaking the Memory Wall"):
        assert f'title: "{paper}' in citation


def test_changelog_names_what_is_shipped() -> None:
    """Every model of the zoo is mentioned by its name."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    missing = [name for name in model_names() if "/" not in name and f"`{name}`" not in text]
    assert missing == []


def test_every_back_end_is_installable_by_name() -> None:
    """Each optional back end has an extra of its name."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for name in backend_names()[1:]:
        assert re.search(rf"^{name} = \[", project, re.MULTILINE)
