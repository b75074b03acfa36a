"""Hooks of mkdocs that adapt pages of the repository to the site, named in ``mkdocs.yml``.

Pages link to files by their paths in the repository, so that links work there too. The files in
`PAGES` become pages of the site; links to other files outside ``docs/`` become text. Notebooks are
converted with the output of their cells, and the reference gets the components of formulations.
"""

from __future__ import annotations

import json
import posixpath
import re
from base64 import b64encode
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from make_docs import format_components
from scheme import add_dark_colours

ROOT: Final = Path(__file__).resolve().parents[1]

PAGES: Final = {
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "README.md": "index.md",
    "bench/protocol.md": "project/protocol.md",
    "docs/tutorial.ipynb": "tutorial.md",
}
"""Targets of links to files that are not Markdown in ``docs/``: page by path in the repository."""

SOURCES: Final = {page: source for source, page in PAGES.items() if page != "index.md"}
"""Source of each page that is added to those of ``docs/``; ``docs/index.md`` is there already."""

COMPONENTS: Final = "<!-- components of all formulations -->"
"""Mark in a page that the site replaces by the text of `make_docs.format_components`."""

_ROW: Final = re.compile(r"^\|.*$", re.MULTILINE)
_CODE: Final = re.compile(r"`[^`\n]+`")
_LINK: Final = re.compile(r"\[([^\]]*)\]\((?!\w+:|#)([^)\s#]+)(#[^)\s]+)?\)")


def on_config(config: Any) -> Any:
    """Remove mkdocs' page for unknown addresses; return the same configuration.

    Only servers show this page, and the site is read without one.
    """
    config.theme.static_templates.discard("404.html")
    return config


def on_files(files: Any, config: Any) -> Any:
    """Append the pages of `SOURCES` to the files of the site; return the same collection."""
    create_file = import_module("mkdocs.structure.files").File.generated
    for page, source in SOURCES.items():
        path = ROOT / source
        if path.suffix == ".ipynb":
            text = convert_notebook(json.loads(path.read_text(encoding="utf-8")), path.name)
            files.append(create_file(config, page, content=text))
        else:
            files.append(create_file(config, page, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return the Markdown of a page with links, tables and the mark `COMPONENTS` replaced."""
    text = convert_tables(convert_links(markdown, page.file.src_uri))
    if COMPONENTS in text:
        text = text.replace(COMPONENTS, format_components())
    return text


def convert_notebook(notebook: dict[str, Any], name: str) -> str:
    """Return a notebook as Markdown: its cells, each followed by its text output and pictures.

    A link to the notebook file `name` follows the first cell, which is the title. Pictures are
    embedded in the page and follow its colour scheme.
    """
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(_code_fence("python", source))
        for output in cell["outputs"]:
            svg = "".join(output.get("data", {}).get("image/svg+xml", ()))
            if svg:
                encoded = b64encode(add_dark_colours(svg).encode()).decode("ascii")
                parts.append(f"![Picture of the cell](data:image/svg+xml;base64,{encoded})")
            else:
                text = output.get("text") or output["data"]["text/plain"]
                parts.append(_code_fence("text", "".join(text)))
    title, *rest = parts
    download = f'<a href="{name}" download>This page as a notebook</a>'
    return "\n\n".join([title, download, *rest]) + "\n"


def _code_fence(language: str, text: str) -> str:
    return f"```{language}\n{text.rstrip()}\n```"


def convert_tables(markdown: str) -> str:
    r"""Return a page with ``|`` in place of ``\|`` in inline code of tables.

    GitHub needs the backslash; the site would show it.
    """
    return _ROW.sub(
        lambda row: _CODE.sub(lambda code: code[0].replace(r"\|", "|"), row[0]), markdown
    )


def convert_links(markdown: str, page: str) -> str:
    """Return a page with its relative links rewritten for the site.

    Links to files that are not in the site become plain text. Links to addresses and to sections of
    the same page stay.

    Parameters
    ----------
    markdown : str
        The page's text in the repository.
    page : str
        The page's path in the site.
    """
    source = SOURCES.get(page, f"docs/{page}")

    def rewrite_link(link: re.Match[str]) -> str:
        label, target, anchor = link.groups(default="")
        target_path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        if target_path in PAGES:
            target_page = PAGES[target_path]
        elif target_path.startswith("docs/"):
            target_page = target_path.removeprefix("docs/")
        else:
            return label
        relative_path = posixpath.relpath(target_page, posixpath.dirname(page) or ".")
        return f"[{label}]({relative_path}{anchor})"

    return _LINK.sub(rewrite_link, markdown)
