"""The explorer's page in a browser."""

from dataclasses import dataclass
from urllib.parse import urlencode, urlsplit

from kit.browser_pages import PATIENCE_MS, OpenPage

WIDE = {"viewport": {"width": 1440, "height": 900}}


@dataclass(slots=True)
class Visit(OpenPage):
    """The page of an explorer."""

    @property
    def state(self):
        """What the page says of itself: the point, its state, and which answer is drawn."""
        return self.page.evaluate("() => ({...document.documentElement.dataset})")

    def until(self, **wanted):
        """Wait until the page is in a state, and return it."""
        marks = "".join(f'[data-{key}="{value}"]' for key, value in wanted.items())
        self.page.wait_for_selector(f"html{marks}", state="attached", timeout=PATIENCE_MS)
        return self.state

    def settled(self):
        """Wait until the answer of what is wished is complete and drawn."""
        self.page.wait_for_function(
            """() => { const {state, point, answer} = document.documentElement.dataset;
            return state === 'done' && point && answer && answer.startsWith(point + ':'); }""",
            timeout=PATIENCE_MS,
        )
        return self.state

    def type(self, limit, text):
        """Type a limit into its field."""
        self.page.locator(f"#{limit}-text").fill(text)
        self.page.locator(f"#{limit}-text").press("Enter")

    def json(self, path):
        """Ask the server for something as the page does."""
        return self.page.evaluate("(path) => fetch(path).then((reply) => reply.json())", path)

    def answer(self):
        """Return the answer that is drawn, as the server has it."""
        point, _, revision = self.state["answer"].partition(":")
        return self.json(f"/api/points/{point}/answer?revision={revision}")

    def figure(self, name):
        """Return a figure of the page."""
        return float(self.page.locator(f"#{name}").get_attribute("data-value") or "nan")

    def close(self):
        """Close the page; nothing was loaded from elsewhere, and the console stayed silent."""
        hosts = {urlsplit(url).hostname for url in self.requests if not url.startswith("blob:")}
        self.page.context.close()
        assert hosts == {"127.0.0.1"}
        assert self.messages == []


def visit(browser, explorer, how=WIDE, **view):
    """Open the explorer's page, perhaps at a certain view."""
    there = [f"http://127.0.0.1:{explorer.port}/?{urlencode(view)}"] if view else []
    return Visit.at(browser, how, explorer.url, *there)
