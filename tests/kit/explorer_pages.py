"""The explorer's page in a browser."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode, urlsplit

from kit.browser_pages import PATIENCE_MS, OpenPage

if TYPE_CHECKING:
    from playwright.sync_api import Browser

    from kit.explorers import Explorer

WIDE: dict[str, Any] = {"viewport": {"width": 1440, "height": 900}}


@dataclass(slots=True)
class Visit(OpenPage):
    """The page of an explorer."""

    @property
    def state(self) -> dict[str, str]:
        """What the page says of itself: the point, its state, and which answer is drawn."""
        found: dict[str, str] = self.page.evaluate("() => ({...document.documentElement.dataset})")
        return found

    def until(self, **wanted: str) -> dict[str, str]:
        """Wait until the page is in a state, and return it."""
        marks = "".join(f'[data-{key}="{value}"]' for key, value in wanted.items())
        self.page.wait_for_selector(f"html{marks}", state="attached", timeout=PATIENCE_MS)
        return self.state

    def settled(self) -> dict[str, str]:
        """Wait until the answer of what is wished is complete and drawn."""
        self.page.wait_for_function(
            """() => { const {state, point, answer} = document.documentElement.dataset;
            return state === 'done' && point && answer && answer.startsWith(point + ':'); }""",
            timeout=PATIENCE_MS,
        )
        return self.state

    def type(self, limit: str, text: str) -> None:
        """Type a limit into its field."""
        self.page.locator(f"#{limit}-text").fill(text)
        self.page.locator(f"#{limit}-text").press("Enter")

    def json(self, path: str) -> Any:
        """Ask the server for something as the page does."""
        return self.page.evaluate("(path) => fetch(path).then((reply) => reply.json())", path)

    def answer(self) -> Any:
        """Return the answer that is drawn, as the server has it."""
        point, _, revision = self.state["answer"].partition(":")
        return self.json(f"/api/points/{point}/answer?revision={revision}")

    def figure(self, name: str) -> float:
        """Return a figure of the page."""
        return float(self.page.locator(f"#{name}").get_attribute("data-value") or "nan")

    def close(self) -> None:
        """Close the page; nothing was loaded from elsewhere, and the console stayed silent."""
        hosts = {urlsplit(url).hostname for url in self.requests if not url.startswith("blob:")}
        self.page.context.close()
        assert hosts == {"127.0.0.1"}
        assert self.messages == []


def visit(browser: Browser, explorer: Explorer, how: dict[str, Any] = WIDE, **view: str) -> Visit:
    """Open the explorer's page, perhaps at a certain view."""
    there = [f"http://127.0.0.1:{explorer.port}/?{urlencode(view)}"] if view else []
    return Visit.at(browser, how, explorer.url, *there)
