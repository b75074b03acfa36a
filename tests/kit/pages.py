"""Parser of the HTML of reports, without a browser."""

import json
from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import Any

LOADING = {"src", "href", "srcset", "data", "poster", "action", "formaction", "background"}
"""Attributes that make a browser load or leave."""


@dataclass
class Page(HTMLParser):
    """Contents of a page for tests."""

    ids: list[str] = field(default_factory=list)
    """All ids."""
    targets: list[str] = field(default_factory=list)
    """Values of the attributes `LOADING`."""
    policy: str = ""
    """The content security policy."""
    values: dict[tuple[str, str], Any] = field(default_factory=dict)
    """Metrics by schedule and key."""
    tags: list[str] = field(default_factory=list)
    """All start tags."""
    text: str = ""
    """All text outside scripts and styles."""
    scripts: dict[str, str] = field(default_factory=dict)
    """Content of scripts with an id."""
    _inside: str = ""

    def __post_init__(self):
        super().__init__(convert_charrefs=True)

    def handle_starttag(self, tag, attrs):
        """Record the attributes of a tag."""
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
        """Record text, or the content of a script."""
        if self._inside:
            self.scripts[self._inside] = self.scripts.get(self._inside, "") + data
        else:
            self.text += data


def read_page(text):
    """Parse a page."""
    page = Page()
    page.feed(text)
    page.close()
    return page
