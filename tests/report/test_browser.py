"""The page of a report in a real browser: Chromium without a screen."""

import pytest

from kit.browser_pages import DESKTOP, PATIENCE_MS, PHONE, open_report
from kit.report_subjects import subject
from poetmodel.device import Costs, Device
from poetmodel.graph.catalogue import load_model
from poetmodel.problem import Problem
from poetmodel.report.page import write_report
from poetmodel.schedule.machine import Content

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def subjects():
    """Return two schedules of a network, one that recomputes and one that only pages."""
    graph = load_model("mlp")
    costs = Costs.estimate(graph, Device.load("mkr1000"))
    problems = [
        Problem(graph, costs, ram="70%", recompute=recompute) for recompute in (True, False)
    ]
    return [
        subject(problem, label=label, mode=mode)
        for problem, label, mode in zip(problems, "AB", ("blocking", "dma"), strict=True)
    ]


@pytest.fixture(scope="module")
def file(subjects, tmp_path_factory):
    """Return the page of both."""
    out = tmp_path_factory.mktemp("report") / "r.html"
    write_report(out, subjects)
    return out


@pytest.fixture(scope="module")
def report(browser, file):
    """Open the page at the width of a desk; tests leave it as they find it."""
    found = open_report(browser, file, DESKTOP)
    yield found
    assert found.messages == []
    found.page.context.close()


def test_hover_names_node_stage_bytes_and_action(report, subjects):
    """A pointer on a cell of the map shows its content."""
    graph = subjects[0].graph
    k = 3
    report.draw("map-A")
    point = report.page.evaluate(
        """(k) => { const div = document.getElementById('map-A'), box = div.getBoundingClientRect();
        const {xaxis, yaxis} = div._fullLayout;
        return [box.x + xaxis._offset + xaxis.d2p(k), box.y + yaxis._offset + yaxis.d2p(k)]; }""",
        k,
    )
    report.page.mouse.move(point[0] - 3, point[1] - 2)
    report.page.mouse.move(*point)
    label = report.page.locator("#map-A .tip")
    label.wait_for(timeout=PATIENCE_MS)
    name = graph.nodes[k].name
    for words in (name, f"stage {k}", "computed", " KiB" if graph.tensor_bytes[k] > 1023 else " B"):
        assert words in (label.text_content() or "")
        assert words in report.read_readout("map-A")


def test_map_answers_to_keys(report, subjects):
    """Arrows move from cell to cell and announce it; plus zooms in, 0 resets."""
    graph = subjects[0].graph
    report.draw("map-A")
    report.page.locator("#map-A").focus()
    for key in ("Home", "PageUp", "ArrowDown", "ArrowRight"):
        report.page.keyboard.press(key)
    assert report.read_readout("map-A").startswith(f"{graph.nodes[1].name}, stage 1")
    assert "computed" in report.read_readout("map-A")
    span = "() => document.getElementById('map-A').layout.xaxis.range"
    whole = report.page.evaluate(span)
    report.page.keyboard.press("+")
    low, high = report.page.evaluate(span)
    assert high - low == pytest.approx((whole[1] - whole[0]) / 2)
    assert (1 - low) / (high - low) == pytest.approx((1 - whole[0]) / (whole[1] - whole[0]))
    report.page.keyboard.press("0")
    assert report.page.evaluate(span) == pytest.approx(whole)


def test_map_and_selection(report, subjects):
    """A selected tensor's column is highlighted; Enter selects the output of a node."""
    report.draw("map-A")
    page = report.page
    columns = """() => document.getElementById('map-A').layout.shapes
        .filter((shape) => shape.opacity < 1).map((shape) => (shape.x0 + shape.x1) / 2)"""
    page.evaluate("() => page.select(4)")
    assert page.evaluate(columns) == [subjects[0].graph.node_of[4]]
    page.evaluate("() => page.select(null)")
    page.locator("#map-A").focus()
    for key in ("Home", "ArrowRight", "ArrowRight", "Enter"):
        page.keyboard.press(key)
    assert page.evaluate("() => page.selected") == subjects[0].graph.outputs_of[2][0]
    assert page.evaluate(columns) == [2]
    page.keyboard.press("Escape")
    assert page.evaluate(columns) == []


def test_timeline_answers_to_keys(report, subjects):
    """The first instruction is the first computation."""
    report.draw("time-B")
    report.page.locator("#time-B").focus()
    report.page.keyboard.press("ArrowRight")
    first = subjects[1].graph.nodes[0].name
    assert f"instruction 0: compute {first}" in report.read_readout("time-B")
    report.page.keyboard.press("End")
    end = len(subjects[1].planned.plan.program) - 1
    assert f"instruction {end}: free" in report.read_readout("time-B")


def test_addresses_are_named(report, subjects):
    """Keys go from copy to copy; each box has its words, which hovering shows."""
    places = subjects[0].planned.arena_check
    report.draw("addresses-A")
    report.page.locator("#addresses-A").focus()
    report.page.keyboard.press("ArrowRight")
    first = subjects[0].graph.tensors[places.rectangles[0].index].name
    assert report.read_readout("addresses-A").startswith(f"{first}: computed, ")
    shown = (
        "() => document.getElementById('addresses-A').data"
        ".filter((trace) => trace.type === 'bar').reduce((sum, trace) => sum + trace.x.length, 0)"
    )
    assert report.page.evaluate(shown) == sum(one.bytes > 0 for one in places.rectangles)


def test_copies_of_a_selected_tensor_are_outlined(report, subjects):
    """In the map of addresses, each from its begin to its end."""
    places = subjects[0].planned.arena_check
    report.draw("addresses-A")
    chosen = next(one.index for one in places.rectangles if one.content == Content.OUTPUT)
    outlined = "() => (document.getElementById('addresses-A').layout.shapes || []).length"
    report.page.keyboard.press("Escape")
    before = report.page.evaluate(outlined)
    report.page.evaluate("(tensor) => page.select(tensor)", chosen)
    copies = [
        one for one in places.rectangles if (one.content, one.index) == (Content.OUTPUT, chosen)
    ]
    report.page.wait_for_function(f"() => ({outlined})() === {before + len(copies)}")
    report.page.keyboard.press("Escape")
    report.page.wait_for_function(f"() => ({outlined})() === {before}")


def test_stalls_are_seen(report, subjects):
    """The hatched bars of a stall are filled in the colour of the legend."""
    assert (subjects[1].planned.check.stall_s or 0.0) > 0
    report.draw("time-B")
    fills = """() => [...document.querySelectorAll('#time-B pattern rect')].map(
        (rect) => getComputedStyle(rect).fill)"""
    assert "rgb(213, 94, 0)" in report.page.evaluate(fills)


def test_decisions_filter_and_sort(report, subjects):
    """Words and a choice narrow the table; a head sorts it, and once more the other way."""
    page, tensors = report.page, subjects[0].graph.tensors
    total = 2 * len(tensors)
    whole = page.locator("#count").inner_text()
    assert whole.startswith(f"{total} of {total} tensors in ")
    page.locator("#choice").select_option("paged")
    shown = page.locator("#decision-table tbody tr:visible")
    paged = shown.count()
    assert 0 < paged < total
    assert page.locator("#count").inner_text() == f"{paged} of {total} tensors in {paged} rows"
    page.locator("#choice").select_option("")
    page.locator("#filter").fill(tensors[0].name)
    assert shown.count() >= 2
    assert all(tensors[0].name in text for text in shown.all_text_contents())
    page.locator("#filter").fill("")
    assert page.locator("#count").inner_text() == whole
    head = page.locator("#decision-table th", has_text="size")
    head.get_by_role("button").click()
    sizes = """() => [...document.querySelectorAll('#decision-table tr[aria-level="1"]')].map(
        (row) => Number(row.cells[3].dataset.v))"""
    found = page.evaluate(sizes)
    assert found == sorted(found, reverse=True)
    assert head.get_attribute("aria-sort") == "descending"
    head.get_by_role("button").press("Enter")
    assert page.evaluate(sizes) == sorted(found)


def test_colours_can_be_changed(report):
    """The button switches the page and its charts to dark, and names its next effect."""
    report.draw("time-A")
    button = report.page.locator("#theme")
    assert button.get_attribute("aria-label") == "Change to dark colours"
    button.click()
    assert report.page.evaluate("() => document.documentElement.dataset.theme") == "dark"
    ground = "() => document.getElementById('time-A').layout.paper_bgcolor"
    assert report.page.evaluate(ground) == "#12171c"
    assert button.get_attribute("aria-label") == "Change to light colours"
    button.click()
    assert report.page.evaluate(ground) == "#ffffff"


def test_paper_gets_everything(report):
    """Printing draws every chart, in light colours, and the whole table."""
    report.page.locator("#theme").click()
    report.page.pdf()
    report.page.evaluate("() => window.dispatchEvent(new Event('beforeprint'))")
    for chart in ("time-A", "addresses-B", "map-A", "map-B"):
        selector = f"#{chart}[data-ready]"
        report.page.wait_for_selector(selector, state="attached", timeout=PATIENCE_MS)
    ground = "() => document.getElementById('map-B').layout.paper_bgcolor"
    assert report.page.evaluate(ground) == "#ffffff"
    width = "() => document.getElementById('map-B')._fullLayout.width"
    assert report.page.evaluate(width) == 680
    report.page.emulate_media(media="print")
    assert not report.page.locator("nav").is_visible()
    style = "() => getComputedStyle(document.querySelector('.wide')).maxHeight"
    assert report.page.evaluate(style) == "none"
    report.page.emulate_media(media="screen")
    report.page.evaluate("() => window.dispatchEvent(new Event('afterprint'))")
    assert report.page.locator("nav").is_visible()
    report.page.wait_for_function(f"() => ({ground})() === '#12171c'")
    report.page.locator("#theme").click()


def test_selection_is_lit_in_the_table(report, subjects):
    """A row is lit in all schedules, and part of the address; Escape ends it."""
    page, graph = report.page, subjects[0].graph
    i = graph.tensor_index["relu1"]
    page.locator(f'#decision-table tr[data-tensor="{i}"]').first.click()
    assert page.evaluate("() => location.hash") == "#tensor=relu1"
    page.evaluate("() => page.select(0)")
    lit = page.locator("#decision-table tr.lit")
    assert lit.count() == 2
    assert all(graph.tensors[0].name in text for text in lit.all_inner_texts())
    page.keyboard.press("Escape")
    assert lit.count() == 0


def test_selected_tensor_opens_its_fold(report, subjects):
    """Equal tensors are one row, closed at first; a tensor that is selected elsewhere opens it."""
    page, graph = report.page, subjects[0].graph
    member = page.locator("#decision-table tr.member").first
    assert not member.is_visible()
    page.evaluate("(i) => page.select(i)", int(member.get_attribute("data-tensor") or 0))
    assert member.is_visible()
    assert "lit" in (member.get_attribute("class") or "")
    page.keyboard.press("Escape")
    fold = page.locator("#decision-table tr.fold").first
    fold.focus()
    page.keyboard.press("ArrowLeft")
    assert not member.is_visible()
    page.keyboard.press("Enter")
    assert fold.get_attribute("aria-expanded") == "true"
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    assert page.evaluate("() => page.selected") == int(member.get_attribute("data-tensor") or 0)
    page.keyboard.press("Escape")
    assert graph.tensors


@pytest.mark.parametrize("how", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_name_of_a_decision_is_always_seen(browser, file, how):
    """On a desk the table needs no sideways scrolling; on a phone the names stay."""
    report = open_report(browser, file, how)
    box = report.page.locator(".wide")
    box.scroll_into_view_if_needed()
    if how is DESKTOP:
        assert box.evaluate("(box) => box.scrollWidth <= box.clientWidth")
    box.evaluate("(box) => { box.scrollLeft = 400; }")
    name = report.page.locator("#decision-table tbody td.name").first.bounding_box()
    outer = box.bounding_box()
    assert name["x"] >= outer["x"] - 1
    report.page.context.close()


def test_selection_stays_readable(report):
    """With a tensor highlighted in table and map, axe has no findings."""
    report.draw("map-A")
    report.page.evaluate("() => page.select(2)")
    report.assert_accessible()
    report.page.evaluate("() => page.select(null)")
