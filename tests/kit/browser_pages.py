"""Pages in a real browser: Chromium without a screen."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Self

    from playwright.sync_api import Browser, Page

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
DESKTOP: dict[str, Any] = {"viewport": {"width": 1280, "height": 800}, "color_scheme": "light"}
PHONE: dict[str, Any] = {
    "viewport": {"width": 390, "height": 844},
    "color_scheme": "dark",
    "has_touch": True,
    "is_mobile": True,
}
PATIENCE_MS = 120_000
"""How long a page may take on a busy machine; no promise of speed."""


@dataclass(slots=True)
class OpenPage:
    """A page, and all that it said and asked for."""

    page: Page
    messages: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    @classmethod
    def at(cls, browser: Browser, how: dict[str, Any], *addresses: str) -> Self:
        """Open one address after the other, and wait until plotly is unpacked."""
        found = cls(browser.new_context(**how).new_page())
        page = found.page
        page.on("console", lambda message: found.messages.append(message.text))
        page.on("pageerror", lambda error: found.messages.append(str(error)))
        page.on("request", lambda request: found.requests.append(request.url))
        for address in addresses:
            page.goto(address, timeout=PATIENCE_MS)
        page.wait_for_selector("html[data-ready]", state="attached", timeout=PATIENCE_MS)
        return found


@dataclass(slots=True)
class Report(OpenPage):
    """The page of a report."""

    def draw(self, chart: str) -> None:
        """Scroll to a chart and wait until it is drawn."""
        self.page.locator(f"#{chart}").scroll_into_view_if_needed()
        self.page.wait_for_selector(f"#{chart}[data-ready]", timeout=PATIENCE_MS)

    def readout(self, chart: str) -> str:
        """Return what is read out above a chart."""
        return self.page.locator(f"#{chart}-readout").inner_text()


def opened(browser: Browser, file: Path, how: dict[str, Any]) -> Report:
    """Open a report."""
    return Report.at(browser, how, file.as_uri())
