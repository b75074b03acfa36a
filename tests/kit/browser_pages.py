"""Pages in a real browser, headless Chromium, and the options of its contexts."""

import shutil
from dataclasses import dataclass, field

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
DESKTOP = {"viewport": {"width": 1280, "height": 800}, "color_scheme": "light"}
PHONE = {
    "viewport": {"width": 390, "height": 844},
    "color_scheme": "dark",
    "has_touch": True,
    "is_mobile": True,
}
PATIENCE_MS = 120_000
"""Timeout of every wait for a page [ms], long enough for a busy machine."""


@dataclass(slots=True)
class OpenPage:
    """A page with its console messages and requests."""

    page: object
    messages: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    @classmethod
    def open(cls, browser, how, *addresses):
        """Open addresses one after the other in a new page, and wait until the last one is ready.

        `how` are options of the browser context. A page is ready when plotly is unpacked.
        """
        opened = cls(browser.new_context(**how).new_page())
        page = opened.page
        page.on("console", lambda message: opened.messages.append(message.text))
        page.on("pageerror", lambda error: opened.messages.append(str(error)))
        page.on("request", lambda request: opened.requests.append(request.url))
        for address in addresses:
            page.goto(address, timeout=PATIENCE_MS)
        page.wait_for_selector("html[data-ready]", state="attached", timeout=PATIENCE_MS)
        return opened


@dataclass(slots=True)
class Report(OpenPage):
    """The page of a report."""

    def draw(self, chart):
        """Scroll to a chart and wait until it is drawn."""
        self.page.locator(f"#{chart}").scroll_into_view_if_needed()
        self.page.wait_for_selector(f"#{chart}[data-ready]", timeout=PATIENCE_MS)

    def assert_quiet_and_fits(self, how, *files):
        """Assert that the page logged no message, and requested exactly `files`.

        Also assert that it fits the width of the window, in the color scheme of the options `how`.
        """
        assert self.messages == []
        assert self.requests == [file.as_uri() for file in files]
        width = self.page.evaluate("() => document.documentElement.scrollWidth")
        assert width <= how["viewport"]["width"]
        theme = self.page.evaluate("() => document.documentElement.dataset.theme")
        assert theme == how["color_scheme"]

    def assert_accessible(self):
        """Assert that axe finds no accessibility error on the page."""
        axe = pytest.importorskip("axe_playwright_python.sync_playwright")
        violations = axe.Axe().run(self.page).response["violations"]
        assert [(one["id"], [node["html"] for node in one["nodes"]]) for one in violations] == []

    def read_readout(self, chart):
        """Return the text of the readout above a chart."""
        return self.page.locator(f"#{chart}-readout").inner_text()


def open_report(browser, file, how):
    """Open a report file in a new page with the context options `how`."""
    return Report.open(browser, how, file.as_uri())
