"""Reads the HTML of a report without a browser."""

import json
from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import Any

LOADING = {"src", "href", "srcset", "data", "poster", "action", "formaction", "background"}
"""Attributes that make a browser load or leave."""


@dataclass
class Page(HTMLParser):
    """What a test wants to know of a page."""

    ids: list[str] = field(default_factory=list)
    """All ids."""
    targets: list[str] = field(default_factory=list)
    """Whatever an attribute of `LOADING` names."""
    policy: str = ""
    """The content security policy."""
    values: dict[tuple[str, str], Any] = field(default_factory=dict)
    """Figures by schedule and key."""
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
        """Take down what a tag says."""
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
        """Leave scripts and styles."""
        if tag in ("script", "style"):
            self._inside = ""

    def handle_data(self, data):
        """Take down text."""
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
