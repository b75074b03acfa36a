"""Record ``docs/explore.webp``: the RAM slider of ``poetmodel explore``, from its real page.

``python scripts/make_animation.py`` starts the explorer, moves its slider stop by stop, waits at
each until the answer is drawn, and takes a screenshot. The animation is a time lapse: solves that
take seconds are frames of a fifth of one. Beside it, ``docs/explore.png`` stands still, for readers
who want no motion. It needs the extra ``explore``, playwright, Chromium and Pillow, and minutes.
"""

from __future__ import annotations

import argparse
import io
import re
import shutil
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from PIL.Image import Image
    from playwright.sync_api import Page, ViewportSize

ROOT: Final = Path(__file__).resolve().parents[1]
ANIMATION: Final = ROOT / "docs" / "explore.webp"
STILL: Final = ROOT / "docs" / "explore.png"
COMMAND: Final = (
    "mobilenetv2", "--device", "rpi4b", "--ram", "100%", "--gap", "0.05", "--no-browser"
)  # fmt: skip
SIZE: Final[ViewportSize] = {"width": 1200, "height": 960}
"""What is shown of the page [px]."""
STEP: Final = 12
"""Positions of the slider between stops."""
MOVING_MS, LOOKING_MS = 500, 2200
"""How long a frame stands while the slider moves, and where it stops to be looked at [ms]."""
CALM_MS: Final = 700
"""What the charts take to change [ms]."""
PATIENCE_MS: Final = 120_000
"""How long an answer may take [ms]."""
POLLING_MS: Final = 200
"""How often the page is asked whether it is there [ms]."""
QUALITY: Final = 55
SETTLED: Final = """async () => {
  const said = document.documentElement.dataset;
  if (said.state === "below") return true;
  const faint = document.querySelector("#answer[data-stale=yes]");
  if (said.state !== "done" || said.provisional || !said.point || faint) return false;
  const point = await (await fetch(`/api/points/${said.point}`)).json();
  return said.answer === `${point.id}:${point.revision}`;
}"""
"""Whether the charts are those of the last schedule of a finished answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """A picture, and how long it stands."""

    picture: Image
    shown_ms: int


@contextmanager
def explorer() -> Iterator[str]:
    """Run the explorer with a store of its own; give the address of its page."""
    with tempfile.TemporaryDirectory() as folder:
        store = ("--store", str(Path(folder, "store.sqlite")))
        command = [sys.executable, "-m", "poetmodel", "explore", *COMMAND, *store]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)  # noqa: S603
        try:
            said = iter(server.stdout or ())
            yield next(found[0] for line in said if (found := re.search(r"http\S+", line)))
        finally:
            server.terminate()
            server.wait()


def settle(page: Page) -> None:
    """Wait until the page shows a finished answer to where the slider stands."""
    for _ in range(PATIENCE_MS // POLLING_MS):
        if page.evaluate(SETTLED):
            return
        page.wait_for_timeout(POLLING_MS)
    message = f"no answer within {PATIENCE_MS / 1000:g} s"
    raise TimeoutError(message)


def frames(page: Page) -> list[Frame]:
    """Return the frames: down to the minimum, below it, and back."""
    from PIL import Image

    taken: dict[int, Image.Image] = {}

    def stop(place: int) -> Image.Image:
        if place not in taken:
            page.locator("#ram").fill(str(place))
            page.wait_for_timeout(CALM_MS)
            settle(page)
            page.wait_for_timeout(CALM_MS)
            taken[place] = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
        return taken[place]

    settle(page)
    start = int(page.locator("#ram").input_value())
    page.locator("#ram-ticks").get_by_role("button", name="minimum").click()
    least = int(page.locator("#ram").input_value())
    down = [*range(start, least, -STEP), least]
    below = max(0, least - 2 * STEP)
    found = [Frame(picture=stop(start), shown_ms=LOOKING_MS)]
    found += [Frame(picture=stop(place), shown_ms=MOVING_MS) for place in down[1:-1]]
    found += [Frame(picture=stop(place), shown_ms=LOOKING_MS) for place in (least, below, least)]
    found += [Frame(picture=stop(place), shown_ms=MOVING_MS // 2) for place in down[-2:0:-2]]
    return found


def save(found: Sequence[Frame], still: Image) -> None:
    """Write animation and still."""
    first, *rest = (frame.picture for frame in found)
    options: dict[str, Any] = {"quality": QUALITY, "method": 4}
    shown_ms = [frame.shown_ms for frame in found]
    first.save(ANIMATION, save_all=True, append_images=rest, duration=shown_ms, loop=0, **options)
    still.quantize(128).save(STILL, optimize=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Record; return the exit status."""
    argparse.ArgumentParser(description=__doc__).parse_args(arguments)
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    with explorer() as address, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport=SIZE, color_scheme="light")
        page.goto(address)
        page.locator("#problem summary").click()
        found = frames(page)
        browser.close()
    save(found, found[len(found) // 3].picture)
    seconds = sum(frame.shown_ms for frame in found) / 1000
    size = ANIMATION.stat().st_size / 2**20
    sys.stdout.write(f"wrote {ANIMATION}: {len(found)} frames, {seconds:.1f} s, {size:.2f} MiB\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
