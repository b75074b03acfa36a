"""The site: it builds without a warning, and opens from a folder without a network."""

import io
import json
import os
import re
import subprocess
import sys
from base64 import b64decode
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from kit.browser_pages import PATIENCE_MS
from site_pages import PAGES, convert_links, convert_notebook, convert_tables

ROOT = Path(__file__).resolve().parents[2]
LOADING = {
    "audio": ("src",),
    "iframe": ("src",),
    "img": ("src", "srcset"),
    "link": ("href",),
    "object": ("data",),
    "script": ("src",),
    "source": ("src", "srcset"),
    "video": ("src", "poster"),
}
"""Attributes whose target a browser loads, by element."""
FETCHED = re.compile(r"""(?:url\(|@import)\s*["']?(?:https?:)?//""")


class Loads(HTMLParser):
    """Collects the loaded files and the anchors of a page."""

    def __init__(self, text):
        super().__init__()
        self.targets = []
        self.anchors = set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        """Look at one element."""
        values = {name: value for name, value in attrs if value is not None}
        self.anchors |= {values["id"]} if "id" in values else set()
        self.targets += [values[name] for name in LOADING.get(tag, ()) if name in values]


WITHOUT_REFERENCE = f"""\
INHERIT: {ROOT}/mkdocs.yml
docs_dir: {ROOT}/docs
hooks: [{ROOT}/scripts/site_pages.py]
exclude_docs: reference/
plugins: [search, offline]
watch: []
"""
"""The site without what is read out of the code, which takes most of the time."""


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Return a function that builds the site once, whole or without its reference."""
    pytest.importorskip("mkdocs")
    pytest.importorskip("mkdocstrings")

    @cache
    def build(whole):
        folder = tmp_path_factory.mktemp("site")
        part = tmp_path_factory.mktemp("part") / "mkdocs.yml"
        part.write_text(WITHOUT_REFERENCE)
        given = ("--strict",) if whole else ("--config-file", str(part))
        proxies = dict.fromkeys(("http_proxy", "https_proxy", "all_proxy"), "http://127.0.0.1:9")
        done = subprocess.run(
            [sys.executable, "-m", "mkdocs", "build", *given, "--site-dir", str(folder)],
            capture_output=True,
            text=True,
            check=False,
            cwd=ROOT,
            env=os.environ | proxies | {"NO_MKDOCS_2_WARNING": "1"},
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return folder

    return build


@pytest.fixture(
    scope="module",
    params=[False, pytest.param(True, marks=pytest.mark.slow)],
    ids=["without reference", "whole"],
)
def site(built, request):
    """Return the folder of the built site."""
    return built(request.param)


@pytest.fixture(scope="module")
def whole(built):
    """Return the folder of the whole site."""
    return built(True)


def pages_of(site):
    """Return the content of each page of the site."""
    found = {page: Loads(page.read_text(encoding="utf-8")) for page in site.rglob("*.html")}
    sources = {page.relative_to(ROOT / "docs") for page in ROOT.glob("docs/**/*.md")}
    whole = (site / "reference").exists()
    assert len(found) > len([page for page in sources if whole or page.parts[0] != "reference"])
    return found


def test_pages_and_styles_load_what_the_site_has(site):
    """All scripts, styles, fonts and pictures are in the site itself."""
    sheets = list(site.rglob("*.css"))
    assert sheets
    for path in (*sheets, *site.rglob("*.html")):
        assert not FETCHED.search(path.read_text(encoding="utf-8")), path
    for page, loads in pages_of(site).items():
        assert loads.targets
        for target in map(urlsplit, loads.targets):
            assert not target.netloc, (page, target)
            there = page.parent / unquote(target.path)
            left_out = there.parent.name == "reference" and not there.parent.exists()
            assert target.scheme or left_out or there.exists(), (page.relative_to(site), target)


def test_code_is_from_fences(site):
    """Text that is indented too far becomes code: each block of code is a fence of its page."""
    fence = re.compile(r"^ *(```+)[^`\n]*\n.*?^ *\1 *$", re.DOTALL | re.MULTILINE)
    found = {}
    for page in ROOT.glob("docs/**/*.md"):
        name = page.relative_to(ROOT / "docs").with_suffix(".html")
        if name.parts[0] != "reference":
            n_blocks = (site / name).read_text(encoding="utf-8").count('class="highlight"')
            found[str(name)] = n_blocks - len(fence.findall(page.read_text(encoding="utf-8")))
    assert {name: n for name, n in found.items() if n} == {}


@pytest.mark.slow
def test_public_names_are_in_the_reference(whole):
    """Every name of the package and of its parts for users has its docstring in the reference."""
    import poetmodel as pm
    from poetmodel import baselines, plan, planner, sweeps

    anchors = set()
    for page in (whole / "reference").glob("*.html"):
        anchors |= Loads(page.read_text(encoding="utf-8")).anchors
    ends = {anchor.rpartition(".")[2] for anchor in anchors if anchor.startswith("poetmodel.")}
    for package in (pm, plan, planner, baselines, sweeps):
        missing = set(package.__all__) - ends - {"__version__", "zoo"}
        assert missing == set(), package.__name__


def test_search_knows_the_pages(site):
    """The index of the search is part of the site and has every guide."""
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    places = {entry["location"].partition("#")[0] for entry in index["docs"]}
    for page in ROOT.glob("docs/guides/*.md"):
        assert f"guides/{page.stem}.html" in places


@pytest.mark.parametrize(
    ("page", "text", "expected"),
    [
        ("results/solving.md", "[p](../../bench/protocol.md#a)", "[p](../project/protocol.md#a)"),
        ("guides/model.md", "[f](../index.md)", "[f](../index.md)"),
        ("guides/model.md", "[c](../../CONTRIBUTING.md)", "[c](../project/contributing.md)"),
        ("project/contributing.md", "[f](docs/index.md#a-b)", "[f](../index.md#a-b)"),
        ("project/contributing.md", "[p](bench/protocol.md)", "[p](protocol.md)"),
        ("project/protocol.md", "[x](cases.py)", "x"),
        ("index.md", "[w](https://example.org/a.md)", "[w](https://example.org/a.md)"),
        ("index.md", "[here](#part)", "[here](#part)"),
        ("start-research.md", "[t](tutorial.ipynb#a)", "[t](tutorial.md#a)"),
        ("tutorial.md", "[f](index.md)", "[f](index.md)"),
    ],
)
def test_links_of_the_repository_become_links_of_the_site(page, text, expected):
    """A link leads to its target in the site; one to a file that the site lacks becomes text."""
    assert convert_links(text, page) == expected


def test_notebooks_become_pages_with_what_their_cells_print():
    """Text stays, code and outputs become blocks, a picture is part of the page."""
    cells = [
        {"cell_type": "markdown", "source": ["# Title\n", "\n", "Words."]},
        {
            "cell_type": "code",
            "source": ["print(1)"],
            "outputs": [
                {"output_type": "stream", "name": "stdout", "text": ["1\n"]},
                {"output_type": "execute_result", "data": {"image/svg+xml": ["<svg></svg>"]}},
            ],
        },
    ]
    text, _, picture = convert_notebook({"cells": cells}, "a.ipynb").partition("![")
    assert text == (
        '# Title\n\nWords.\n\n<a href="a.ipynb" download>This page as a notebook</a>\n\n'
        "```python\nprint(1)\n```\n\n```text\n1\n```\n\n"
    )
    coded = re.fullmatch(r"Picture of the cell\]\(data:image/svg\+xml;base64,(.+)\)\n", picture)
    drawn = b64decode(coded[1]).decode()
    assert drawn.startswith("<svg>")
    assert "prefers-color-scheme:dark" in drawn


def test_bars_in_code_are_plain_in_tables_only():
    """A bar in code in a table needs no backslash in the site; other text is unchanged."""
    text = "| `a\\|b` | c\\|d |\n`e\\|f`\n"
    assert convert_tables(text) == "| `a|b` | c\\|d |\n`e\\|f`\n"


@pytest.mark.slow
def test_docstrings_come_out_as_the_signature_has_them(whole):
    """Choices in braces do not hide the default, and no literal block leaves its colons."""
    text = (whole / "reference" / "library.html").read_text(encoding="utf-8")
    (row,) = re.findall(
        r"<tr[^>]*>(?:(?!</tr>).)*?<code>deadline_counts</code>.*?</tr>", text, re.S
    )[:1]
    assert "<code>None</code>" in row
    for page in (whole / "reference").glob("*.html"):
        assert "::</p>" not in page.read_text(encoding="utf-8"), page


def test_pages_from_outside_docs_exist():
    """All files that the site copies from the rest of the repository exist."""
    assert [source for source in PAGES if not (ROOT / source).is_file()] == []


# -- in a browser ----------------------------------------------------------------------------------
def faults_of(page):
    """Return a list that collects a page's errors, and its requests to other hosts."""
    found, left = [], "net::ERR_ABORTED"  # of a page that was left
    page.on("console", lambda said: found.extend([said.text] * (said.type == "error")))
    page.on("pageerror", lambda error: found.append(str(error)))
    page.on("requestfailed", lambda asked: found.extend([asked.url] * (asked.failure != left)))
    page.on("request", lambda asked: found.extend(re.findall(r"^(?:https?|wss?):.*", asked.url)))
    return found


@pytest.mark.browser
def test_pages_open_from_a_folder_without_a_complaint(whole, browser):
    """No page opened as a file has an error, a failed request or one that leaves the folder."""
    page = browser.new_page()
    faults = faults_of(page)
    for path in pages_of(whole):
        page.goto(path.as_uri(), timeout=PATIENCE_MS)
        assert faults == [], path.relative_to(whole)
    page.close()


@pytest.mark.browser
def test_search_finds_pages_from_a_folder(whole, browser):
    """The search finds a word, and the result leads to its page."""
    page = browser.new_page()
    faults = faults_of(page)
    page.goto((whole / "index.html").as_uri())
    page.locator("input.md-search__input").click()
    page.keyboard.type("deadline")
    page.locator('.md-search-result__item a[href*="h=deadline"]').first.click(timeout=PATIENCE_MS)
    page.wait_for_url(lambda url: "h=deadline" in url, timeout=PATIENCE_MS)
    assert "deadline" in page.locator("article").inner_text().lower()
    assert faults == []
    page.close()


@pytest.mark.browser
def test_charts_are_dark_where_the_page_is(whole, browser):
    """A chart has the paper of its page, and the site's own switch changes both."""
    page = browser.new_page(color_scheme="light", viewport={"width": 1440, "height": 900})
    page.goto((whole / "results" / "solving.html").as_uri())
    chart = page.locator('article img[src$=".svg"]').first

    def paper():
        return decoded(chart.screenshot())

    assert paper() == (255, 255, 255)
    page.locator("label[for='__palette_1']:visible").click()
    page.wait_for_function("getComputedStyle(document.body).colorScheme === 'dark'")
    assert paper() == (0x1E, 0x21, 0x29)
    page.close()


def decoded(picture):
    """Return the colour of a picture near its corner."""
    image = pytest.importorskip("PIL.Image").open(io.BytesIO(picture))
    return tuple(image.convert("RGB").getpixel((3, 3)))
