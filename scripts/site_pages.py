"""What the site does beside building ``docs/``: a hook of mkdocs, named in ``mkdocs.yml``.

Pages link to files by their place in the repository, so that links work there too. Some of these
files are made pages of the site; links to the rest become plain text.
"""

from __future__ import annotations

import posixpath
import re
from importlib import import_module
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]

PAGES: Final = {
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "README.md": "index.md",
    "bench/protocol.md": "project/protocol.md",
}
"""Files outside ``docs/`` by their place in the repository, and the page that each is."""

SOURCES: Final = {page: source for source, page in PAGES.items() if page != "index.md"}
"""Pages whose text is outside ``docs/``, and where."""

_ROW: Final = re.compile(r"^\|.*$", re.MULTILINE)
_CODE: Final = re.compile(r"`[^`\n]+`")
_LINK: Final = re.compile(r"\[([^\]]*)\]\((?!\w+:|#)([^)\s#]+)(#[^)\s]+)?\)")


def on_config(config: Any) -> Any:
    """Leave out the page for addresses that a server does not know: the site has no server."""
    config.theme.static_templates.discard("404.html")
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages whose text is outside ``docs/``."""
    new = import_module("mkdocs.structure.files").File.generated
    for page, source in SOURCES.items():
        files.append(new(config, page, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Make links and tables that hold in the repository hold in the site."""
    return site_tables(site_links(markdown, page.file.src_uri))


def site_tables(markdown: str) -> str:
    r"""Return a text whose tables have plain bars within code.

    The repository's reader wants ``\|`` there, that of the site shows the backslash.
    """
    return _ROW.sub(
        lambda row: _CODE.sub(lambda code: code[0].replace(r"\|", "|"), row[0]), markdown
    )


def site_links(markdown: str, page: str) -> str:
    """Return the text of a page with links to where the site has their targets.

    Parameters
    ----------
    markdown : str
        The text as it is in the repository.
    page : str
        The page's place in the site.
    """
    source = SOURCES.get(page, f"docs/{page}")

    def moved(link: re.Match[str]) -> str:
        words, target, anchor = link.groups(default="")
        place = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        if place.startswith("docs/"):
            found = place.removeprefix("docs/")
        elif place in PAGES:
            found = PAGES[place]
        else:
            return words
        there = posixpath.relpath(found, posixpath.dirname(page) or ".")
        return f"[{words}]({there}{anchor})"

    return _LINK.sub(moved, markdown)
