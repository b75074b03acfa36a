"""The whole page of three schedules in Chromium: proof, gauge, paper."""

import json

import pytest

from kit.browser_pages import DESKTOP, PHONE, open_report
from kit.pages import read_page
from kit.report_subjects import subject
from poetmodel.device import Costs, Device
from poetmodel.graph.catalogue import load_model
from poetmodel.problem import Problem
from poetmodel.report.page import write_report

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def subjects():
    """Return three schedules of a network, each with a budget of its own."""
    graph = load_model("mlp")
    costs = Costs.estimate(graph, Device.load("nano33ble"))
    return [
        subject(Problem(graph, costs, ram=ram), label=label)
        for ram, label in (("70%", "A"), ("80%", "B"), ("100%", "C"))
    ]


@pytest.fixture(scope="module")
def file(subjects, tmp_path_factory):
    """Return the page of all."""
    out = tmp_path_factory.mktemp("whole") / "r.html"
    write_report(out, subjects)
    return out


@pytest.fixture(scope="module")
def charts(file):
    """Return the drawings of the page, by id."""
    found = read_page(file.read_text(encoding="utf-8")).scripts["charts"]
    return {chart["id"]: chart for chart in json.loads(found)["charts"]}


@pytest.fixture(scope="module")
def report(browser, file):
    """Open the page at the width of a desk; tests leave it as they find it."""
    found = open_report(browser, file, DESKTOP)
    yield found
    assert found.messages == []
    found.page.context.close()


def digits(value):
    """Return a number as in the charts: four digits, or three of a small one."""
    return f"{value:.2e}" if 0 < abs(value) < 1e-3 else f"{float(f'{value:.4g}'):g}"


def test_gauge_is_to_scale(report, charts):
    """Parts are as long as their bytes; a row for each schedule, and keep-all."""
    report.draw("gauge")
    gauge = charts["gauge"]
    rows = [*gauge["rows"], *gauge["keep_all"]]
    lines = report.page.locator("#gauge .gauge-line")
    assert lines.count() == len(rows) == 4
    script = """() => [...document.querySelectorAll('#gauge .gauge-line')].map((line) =>
        [line.querySelector('u').getBoundingClientRect().width,
         [...line.querySelectorAll('.gauge-bar > i')].map((i) => i.getBoundingClientRect().width)]
        )"""
    for row, (room, parts) in zip(rows, report.page.evaluate(script), strict=True):
        scale = room / row["ram"]
        cut = report.page.locator("#gauge .gauge-bar").first.bounding_box()
        if sum(parts) < cut["width"] - 2:  # what is beyond the axis is cut
            expected = [part * scale for part in row["parts"] if part]
            assert parts == pytest.approx(expected, abs=1.5)
    assert "it does not train there" in lines.first.inner_text()


def test_sections_begin_with_charts(report):
    """Answers, then charts, then tables of figures, which are folded."""
    ids = report.page.evaluate(
        "() => [...document.querySelectorAll('main > section')].map((s) => s.id)"
    )
    order = [
        "answers",
        "ram",
        "device",
        "map",
        "decisions",
        "facts",
    ]
    assert [name for name in ids if name in order] == order
    assert report.page.locator("#facts details").count() == 2
    assert not report.page.locator("#facts table").first.is_visible()


def test_three_columns_stay_in_their_box(browser, file):
    """On a phone a wide table scrolls within its box, and the names of its rows stay in sight."""
    report = open_report(browser, file, PHONE)
    page = report.page
    page.locator("#facts details").first.evaluate("(one) => { one.open = true; }")
    box = page.get_by_role("region", name="Memory")
    assert box.evaluate("(one) => one.scrollWidth > one.clientWidth")
    box.evaluate("(one) => { one.scrollLeft = 150; }")
    left = """(one) => one.querySelector('tbody th').getBoundingClientRect().x
        - one.getBoundingClientRect().x"""
    assert box.evaluate(left) == pytest.approx(0.0, abs=1.0)
    assert page.evaluate("() => document.documentElement.scrollWidth") <= 390
    page.context.close()


def test_folded_tables_are_open_on_paper(browser, file):
    """Heads of tables can repeat there, and afterwards all is folded as before."""
    report = open_report(browser, file, DESKTOP)
    page = report.page
    page.evaluate("() => window.dispatchEvent(new Event('beforeprint'))")
    page.emulate_media(media="print")
    assert page.locator("#facts table").first.is_visible()
    controls = """() => [...document.querySelectorAll('thead button')].map(
        (button) => getComputedStyle(button).display)"""
    assert set(page.evaluate(controls)) == {"contents"}
    page.evaluate("() => window.dispatchEvent(new Event('afterprint'))")
    page.emulate_media(media="screen")
    assert not page.locator("#facts table").first.is_visible()
    page.context.close()
