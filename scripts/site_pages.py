"""What the site does beside building ``docs/``: a hook of mkdocs, named in ``mkdocs.yml``.

Pages link to files by their place in the repository, so that links work there too. Some of these
files are made pages of the site; links to the rest become plain text. Notebooks become pages with
what their cells print, and the reference gets the components of all formulations.
"""

from __future__ import annotations

import json
import posixpath
import re
from base64 import b64encode
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from make_docs import components
from scheme import following_scheme

ROOT: Final = Path(__file__).resolve().parents[1]

PAGES: Final = {
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "README.md": "index.md",
    "bench/protocol.md": "project/protocol.md",
    "docs/tutorial.ipynb": "tutorial.md",
}
"""Files that are no page of ``docs/``, by their place in the repository, and the page of each."""

SOURCES: Final = {page: source for source, page in PAGES.items() if page != "index.md"}
"""Pages whose text is elsewhere, and where."""

COMPONENTS: Final = "<!-- components of all formulations -->"
"""Where the site has what `make_docs` says of each component."""

_ROW: Final = re.compile(r"^\|.*$", re.MULTILINE)
_CODE: Final = re.compile(r"`[^`\n]+`")
_LINK: Final = re.compile(r"\[([^\]]*)\]\((?!\w+:|#)([^)\s#]+)(#[^)\s]+)?\)")


def on_config(config: Any) -> Any:
    """Leave out the page for addresses that a server does not know: the site has no server."""
    config.theme.static_templates.discard("404.html")
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages whose text is elsewhere."""
    new = import_module("mkdocs.structure.files").File.generated
    for page, source in SOURCES.items():
        path = ROOT / source
        if path.suffix == ".ipynb":
            text = notebook_page(json.loads(path.read_text(encoding="utf-8")), path.name)
            files.append(new(config, page, content=text))
        else:
            files.append(new(config, page, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Make links and tables that hold in the repository hold in the site; add the components."""
    text = site_tables(site_links(markdown, page.file.src_uri))
    if COMPONENTS in text:
        text = text.replace(COMPONENTS, components())
    return text


def notebook_page(notebook: dict[str, Any], name: str) -> str:
    """Return a notebook as Markdown: its cells, and below each what it prints or draws.

    Pictures are part of the page, and follow its colour scheme.
    """
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(_code_fence("python", source))
        for output in cell["outputs"]:
            drawn = "".join(output.get("data", {}).get("image/svg+xml", ()))
            if drawn:
                coded = b64encode(following_scheme(drawn).encode()).decode("ascii")
                parts.append(f"![What the cell draws](data:image/svg+xml;base64,{coded})")
            else:
                printed = output.get("text") or output["data"]["text/plain"]
                parts.append(_code_fence("text", "".join(printed)))
    title, *rest = parts
    download = f'<a href="{name}" download>This page as a notebook</a>'
    return "\n\n".join([title, download, *rest]) + "\n"


def _code_fence(language: str, text: str) -> str:
    return f"```{language}\n{text.rstrip()}\n```"


def site_tables(markdown: str) -> str:
    r"""Return a text whose tables have plain bars within code.

    GitHub needs ``\|`` there; the site would show the backslash.
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
        if place in PAGES:
            found = PAGES[place]
        elif place.startswith("docs/"):
            found = place.removeprefix("docs/")
        else:
            return words
        there = posixpath.relpath(found, posixpath.dirname(page) or ".")
        return f"[{words}]({there}{anchor})"

    return _LINK.sub(moved, markdown)
