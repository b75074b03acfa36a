"""The timeline in a browser: pointing, pinning and selecting show the values."""

import json
from typing import Any

import pytest

from kit.browser_pages import DESKTOP, PATIENCE_MS, PHONE, Report, open_report
from kit.pages import read_page
from kit.report_subjects import subject, training_problem
from poetmodel.device import Costs, Device
from poetmodel.graph.catalogue import load_model
from poetmodel.plan import check_plan
from poetmodel.planner import make_plan
from poetmodel.problem import Problem
from poetmodel.report.page import write_report
from poetmodel.report.timeline import plan_chart
from poetmodel.schedule import checkpoint_all

pytestmark = pytest.mark.browser

Values = dict[str, Any]
AREA = """() => { const div = document.getElementById('time-A'), box = div.getBoundingClientRect();
    const {xaxis, yaxis} = div._fullLayout;
    return {left: box.x + xaxis._offset, top: box.y + yaxis._offset, width: xaxis._length,
            height: yaxis._length, end: xaxis.range[1], most: yaxis.range[1]}; }"""
SHOWN = """() => { const panel = document.getElementById('time-A-alive');
    return {bytes: Number(panel.dataset.bytes), level: Number(panel.dataset.level),
            pinned: panel.classList.contains('pinned'),
            stays: [...panel.querySelectorAll('.stays li')].map((item) =>
                [item.dataset.what === undefined ? null : Number(item.dataset.what),
                 Number(item.dataset.bytes)])}; }"""


@pytest.fixture(scope="module", params=["paged", "state"])
def one(request):
    """Return a schedule that pages, and one with state in RAM and on storage."""
    if request.param == "state":
        return subject(training_problem(900), mode="dma")
    graph = load_model("mlp")
    return subject(Problem(graph, Costs.estimate(graph, Device.load("mkr1000")), ram="70%"))


@pytest.fixture(scope="module")
def file(one, tmp_path_factory):
    """Return its report."""
    out = tmp_path_factory.mktemp("timeline") / "r.html"
    write_report(out, [one])
    return out


@pytest.fixture(scope="module")
def values(file):
    """Return the values of the timeline in the page."""
    charts = json.loads(read_page(file.read_text(encoding="utf-8")).scripts["charts"])["charts"]
    return next(chart for chart in charts if chart["type"] == "timeline")


@pytest.fixture(scope="module")
def drawn(browser, file):
    """Open the page with its timeline."""
    found = open_report(browser, file, DESKTOP)
    found.draw("time-A")
    found.page.wait_for_function("() => document.getElementById('time-A-alive').dataset.level")
    yield found
    found.page.context.close()


@pytest.fixture
def report(drawn):
    """Return the page without pins and selections."""
    drawn.page.keyboard.press("Escape")
    yield drawn
    assert drawn.messages == []


def level_at(values, x):
    """Return which RAM is in use at a time: 2 p during instruction p, 2 p + 1 after it."""
    n, issued = len(values["ops"]), values["issued"]
    done = {p: end for p, _, end in values["work"] if values["ops"][p] in "ca"}
    starts = [at for p in range(n) for at in (issued[p], done.get(p, issued[p]))] + [issued[n]]
    return max(k for k in range(2 * n) if starts[k + 1] > starts[k] and (starts[k] <= x or k == 0))


def alive(values, level):
    """Return the bytes of tensors in RAM at a time, by tensor."""
    found = {}
    p, after = divmod(level, 2)
    for what, size, begin, end, _, _, overwritten_at, given, *_ in values["stays"]:
        held = size - (given if 0 <= overwritten_at <= p else 0)
        if begin <= p and (p < end if after else p <= end) and held:
            found[what] = found.get(what, 0) + held
    return found


def point(report, share, height=0.3):
    """Point at a share of the width and height of the stack; return the area."""
    area = report.page.evaluate(AREA)
    x = area["left"] + share * area["width"]
    report.page.mouse.move(x, area["top"] + height * area["height"])
    report.page.evaluate("() => new Promise((done) => requestAnimationFrame(() => done()))")
    return area


def test_it_answers_everywhere_with_the_values(report, values):
    """At 40 places over the width: total and every tensor are those of the JSON."""
    seen = set()
    for k in range(40):
        share = (k + 0.5) / 40
        area = point(report, share, height=k / 40)
        shown = report.page.evaluate(SHOWN)
        level = level_at(values, share * area["end"])
        assert shown["level"] == level, share
        p, after = divmod(level, 2)
        assert shown["bytes"] == values["after" if after else "during"][p]
        assert dict(shown["stays"]) == alive(values, level)
        assert sum(size for _, size in shown["stays"]) == shown["bytes"]
        assert f"instruction {p}: " in report.read_readout("time-A")
        seen.add(level)
    assert len(seen) > 3


def test_a_click_pins(report):
    """A pinned item stays while the pointer moves; a click there or Escape unpins it."""
    page = report.page
    for end in ("click", "Escape"):
        area = point(report, 0.25)
        page.mouse.click(area["left"] + 0.25 * area["width"], area["top"] + 2)
        pinned = page.evaluate(SHOWN)
        assert pinned["pinned"]
        point(report, 0.75)
        assert page.evaluate(SHOWN) == pinned
        if end == "click":
            page.mouse.click(area["left"] + 0.25 * area["width"], area["top"] + 2)
        else:
            page.keyboard.press("Escape")
        assert not page.evaluate(SHOWN)["pinned"]
        point(report, 0.75)
        assert page.evaluate(SHOWN)["level"] != pinned["level"]


def rim(report):
    """Return the outline of the highlighted item, empty without one."""
    return report.page.evaluate(
        "() => document.querySelector('#time-A .rim')?.getAttribute('d') || ''"
    )


def test_a_click_on_a_band_selects_its_tensor(report, values, one):
    """It is lit here, marked in the list and part of the address, until Escape."""
    page = report.page
    area = point(report, 0.3)
    scale, part = values["scale"], 0.02
    level = level_at(values, 0.3 * area["end"])
    y = area["top"] + (1 - part) * area["height"]
    page.mouse.click(area["left"] + 0.3 * area["width"], y)
    name = page.evaluate("() => document.documentElement.dataset.selected")
    chosen = one.graph.tensor_index[name]
    assert chosen in alive(values, level)
    assert alive(values, level)[chosen] >= 1
    assert part * area["most"] * scale < sum(alive(values, level).values())
    assert page.evaluate("() => location.hash") == f"#tensor={name}"
    assert rim(report)
    assert page.locator('#time-A-alive [aria-pressed="true"] b').first.inner_text() == name
    page.keyboard.press("Escape")
    assert page.evaluate("() => location.hash") == ""
    assert not rim(report)
    assert page.locator('#time-A-alive [aria-pressed="true"]').count() == 0


def test_the_address_selects_a_tensor(browser, file, one):
    """Each copy of it is outlined and listed."""
    report = Report(browser.new_context(**DESKTOP).new_page())
    chosen = max(range(len(one.graph.tensors)), key=one.graph.tensor_bytes.__getitem__)
    name = one.graph.tensors[chosen].name
    report.page.goto(f"{file.as_uri()}#tensor={name}", timeout=PATIENCE_MS)
    report.draw("time-A")
    report.page.wait_for_selector("#time-A .rim", state="attached", timeout=PATIENCE_MS)
    assert rim(report)
    assert report.page.locator("#time-A-alive .chosen b").inner_text() == name
    assert report.page.locator("#time-A-alive .chosen li").count() >= 1
    report.page.context.close()


def test_every_tensor_in_ram_can_be_lit(report, values, one):
    """Also with a small band; the panel lists each copy of it."""
    timed = [stay for stay in values["stays"] if stay[0] >= 0]
    for what in {stay[0] for stay in timed}:
        report.page.evaluate("(what) => page.select(what)", what)
        copies = [stay for stay in timed if what in (stay[0], stay[8])]
        told = report.page.locator("#time-A-alive .chosen li:not(.away)")
        assert told.count() == len(copies), one.graph.tensors[what].name
        tall = max(stay[1] for stay in copies) > 0.01 * max(values["during"])
        assert rim(report) or not tall
    report.page.evaluate("() => page.select(null)")


def test_keys_go_through_program_and_bands(report, values):
    """Right and left by instruction, up and down by band; Enter pins."""
    page = report.page
    page.locator("#time-A").focus()
    for p in range(len(values["ops"])):
        page.keyboard.press("ArrowRight")
        shown = page.evaluate(SHOWN)
        assert (shown["level"], shown["bytes"]) == (2 * p, values["during"][p])
    page.keyboard.press("Home")
    assert page.evaluate(SHOWN)["level"] == 0
    page.keyboard.press("ArrowUp")
    assert page.evaluate("() => page.selected") in alive(values, 0)
    page.keyboard.press("Enter")
    assert page.evaluate(SHOWN)["pinned"]
    page.keyboard.press("Escape")
    assert not page.evaluate(SHOWN)["pinned"]
    assert page.evaluate("() => page.selected") is None


def test_instructions_can_have_one_width(report, values):
    """Then the axis counts them, and pointing still shows the RAM during each."""
    n = len(values["ops"])
    report.page.get_by_role("button", name="Show by instruction").click()
    report.page.wait_for_function(
        f"() => document.getElementById('time-A')._fullLayout.xaxis.range[1] === {n}"
    )
    for p in range(0, n, 3):
        point(report, (p + 0.5) / n)
        shown = report.page.evaluate(SHOWN)
        assert (shown["level"], shown["bytes"]) == (2 * p, values["during"][p])
    report.page.get_by_role("button", name="Show by time").click()


def test_other_values_keep_the_place(report, values, one):
    """The chart of another plan of the graph stays at the node where it was pinned."""
    costs = one.problem.costs
    made = make_plan(one.graph, costs, checkpoint_all(one.graph), mode="blocking")
    other = plan_chart(one.graph, made, check_plan(one.graph, costs, made))
    p = values["ops"].rindex("c")
    report.page.locator("#time-A").focus()
    report.page.keyboard.press("Home")
    for _ in range(p):
        report.page.keyboard.press("ArrowRight")
    report.page.keyboard.press("Enter")
    report.page.evaluate("(other) => page.replace('time-A', other)", other)
    shown = report.page.evaluate(SHOWN)
    at = shown["level"] // 2
    assert (other["ops"][at], other["of"][at]) == ("c", values["of"][p])
    assert shown["pinned"]
    assert shown["bytes"] == other["during"][at]
    report.page.keyboard.press("Escape")
    report.page.evaluate("(values) => page.replace('time-A', values)", values)


def test_a_finger_pins(browser, file, values):
    """On a phone, a tap shows and pins the item, below the chart."""
    report = open_report(browser, file, PHONE)
    report.draw("time-A")
    area = report.page.evaluate(AREA)
    report.page.touchscreen.tap(
        area["left"] + 0.6 * area["width"], area["top"] + 0.9 * area["height"]
    )
    shown = report.page.evaluate(SHOWN)
    assert shown["pinned"]
    assert shown["level"] == level_at(values, 0.6 * area["end"])
    report.assert_quiet_and_fits(PHONE, file)
    report.page.context.close()
