"""Pages: links, generated blocks, complete tables, length of tables and first pages."""

import re
from pathlib import Path

import pytest

import poetmodel
from blocks import replace_block
from make_docs import (
    FORMULATIONS,
    FORMULATIONS_PAGE,
    convert_docstring,
    fill_formulations_page,
    format_components,
    main,
)
from poetmodel.backends.registry import backend_names
from poetmodel.graph.catalogue import model_names
from poetmodel.model import FORMULATIONS as BY_NAME
from poetmodel.model import Formulation
from poetmodel.schedule import RELATIONS

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("bench/*.md")])
LINK = re.compile(r"\]\((?!https?:)([^)\s#]*)(?:#([^)\s]+))?\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def anchors(page):
    """Return the names under which the headings of a page can be linked."""
    headings = HEADING.findall(page.read_text(encoding="utf-8"))
    words = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {word.strip().replace(" ", "-") for word in words}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    """Every relative link names a file that exists, and a heading in it."""
    for target, anchor in LINK.findall(page.read_text(encoding="utf-8")):
        found = page if not target else page.parent / target
        assert found.exists(), f"{page.name} links to {target}"
        if anchor:
            assert anchor in anchors(found), f"{page.name} links to {target}#{anchor}"


def test_generated_parts_are_current():
    """Generated parts equal their sources."""
    assert main(["--check"]) == 0


def test_pages_and_project_name_what_is_shipped():
    """Relations are in the notation, version and models in the changelog, back ends are extras.

    The citation has this version; the models are those of the zoo.
    """
    text = (ROOT / "docs" / "concepts" / "glossary.md").read_text(encoding="utf-8")
    for name in RELATIONS:
        assert f"| `{name}[t," in text
    assert f"## {poetmodel.__version__} " in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {poetmodel.__version__}\n" in citation
    for paper in ("POET: Training Neural Networks", "Checkmate: Breaking the Memory Wall"):
        assert f'title: "{paper}' in citation
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    missing = [name for name in model_names() if "/" not in name and f"`{name}`" not in text]
    assert missing == []
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for name in backend_names()[1:]:
        assert re.search(rf"^{name} = \[", project, re.MULTILINE)


# -- generated blocks ------------------------------------------------------------------------------
def test_block_is_replaced_and_nothing_else():
    """The text around a block is unchanged; a second run changes nothing."""
    text = "a\n<!-- begin x -->\nold\n<!-- end x -->\nb\n"
    once = replace_block(text, "x", "new \\1")
    assert once == "a\n<!-- begin x -->\n\nnew \\1\n\n<!-- end x -->\nb\n"
    assert replace_block(once, "x", "new \\1") == once


@pytest.mark.parametrize(
    "text", ["", "<!-- begin x -->\n", "<!-- begin x -->\n<!-- end x -->\n" * 2]
)
def test_missing_or_repeated_block_is_an_error(text):
    """A page that lost a mark is not silently left as it is."""
    with pytest.raises(ValueError, match="expected one block"):
        replace_block(text, "x", "new")


def test_literal_blocks_become_code():
    """A docstring's inequality is set as code, with or without words before its colons."""
    statement = """Say it.

    For all::

        a <= b

            deeper
    ::

        c
    """
    assert convert_docstring(statement) == (
        "Say it.\n\nFor all:\n\n```text\na <= b\n\n    deeper\n```\n```text\nc\n```"
    )


def test_every_component_is_on_the_page_and_in_the_reference():
    """All components that users can combine by name are listed, and stated in the reference."""
    named = {part for part in BY_NAME.values() if isinstance(part, Formulation)}
    assert named <= set(FORMULATIONS)
    text, reference = (
        fill_formulations_page(FORMULATIONS_PAGE.read_text(encoding="utf-8")),
        format_components(),
    )
    for formulation in FORMULATIONS:
        for component in formulation.components:
            assert re.search(rf"^- `{formulation.name}`:.* `{component.name}`", text, re.MULTILINE)
            assert component.source in reference
            assert convert_docstring(component.statement) in reference


# -- sizes -----------------------------------------------------------------------------------------
WORDS = {"README.md": 1_400, "CHANGELOG.md": 600}
"""Maximum words of a page outside ``docs/``, as `wc` counts them."""
DOCS = sorted(ROOT.glob("docs/**/*.md"))
ROWS = 25
"""Maximum rows of a table; a longer table is a CSV file."""
FENCE = re.compile(r"^ *```.*?^ *```", re.DOTALL | re.MULTILINE)
TABLE = re.compile(r"^\|.*\n^\|[ :|-]+\n((?:^\|.*\n?)*)", re.MULTILINE)


def test_first_pages_are_short():
    """README and CHANGELOG stay short enough to be read to their end, lists of old names apart."""
    for name, max_words in WORDS.items():
        text = (ROOT / name).read_text(encoding="utf-8").partition("\n### Renamed and removed")[0]
        assert len(text.split()) <= max_words, name


def test_scripts_make_no_prose():
    """Benchmarks and scripts make no prose from templates."""
    assert [*ROOT.glob("bench/**/*.j2"), *ROOT.glob("scripts/**/*.j2")] == []


@pytest.mark.parametrize("page", DOCS, ids=lambda page: str(page.relative_to(ROOT)))
def test_tables_are_short(page):
    """No table is longer than a screen."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    long = [rows.splitlines()[0] for rows in TABLE.findall(text) if rows.count("\n|") >= ROWS]
    assert long == []
