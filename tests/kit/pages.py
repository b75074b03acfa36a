"""Parser of the HTML of pages, without a browser."""

import json
from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import Any

LOADING = {"src", "href", "srcset", "data", "poster", "action", "formaction", "background"}
"""Attributes that make a browser load a resource, or leave the page."""


@dataclass
class Page(HTMLParser):
    """Contents of a page, collected while `feed` parses its text."""

    ids: list[str] = field(default_factory=list)
    """All ids, in the order of the page."""
    targets: list[str] = field(default_factory=list)
    """Values of the attributes `LOADING`."""
    policy: str = ""
    """The content security policy; empty if there is none."""
    values: dict[tuple[str, str], Any] = field(default_factory=dict)
    """Metrics by schedule and key, from ``data-value``."""
    tags: list[str] = field(default_factory=list)
    """All start tags."""
    text: str = ""
    """All text outside scripts and styles."""
    scripts: dict[str, str] = field(default_factory=dict)
    """Content of scripts and styles by id, or by tag if they have none."""
    _inside: str = ""
    """Key in `scripts` of the current script or style; empty outside of them."""

    def __post_init__(self):
        super().__init__(convert_charrefs=True)

    def handle_starttag(self, tag, attrs):
        """Record a start tag and its attributes."""
        found = {key: value or "" for key, value in attrs}
        self.tags.append(tag)
        if "id" in found:
            self.ids.append(found["id"])
        self.targets += [value for key, value in found.items() if key in LOADING]
        if found.get("http-equiv") == "Content-Security-Policy":
            self.policy = found["content"]
        if "data-key" in found:
            key = found["data-schedule"], found["data-key"]
            self.values[key] = json.loads(found["data-value"])
        if tag in ("script", "style"):
            self._inside = found.get("id", tag)

    def handle_endtag(self, tag):
        """End a script or style."""
        if tag in ("script", "style"):
            self._inside = ""

    def handle_data(self, data):
        """Append to `text`, or to the content of the current script or style."""
        if self._inside:
            self.scripts[self._inside] = self.scripts.get(self._inside, "") + data
        else:
            self.text += data


def read_page(text):
    """Return the contents of a page from its text."""
    page = Page()
    page.feed(text)
    page.close()
    return page
