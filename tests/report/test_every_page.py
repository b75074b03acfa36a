"""Every page in Chromium: quiet, no wider than its screen, accessible, dark or light, on paper."""

from functools import cache

import pytest

from kit.browser_pages import DESKTOP, PATIENCE_MS, PHONE, Report
from kit.report_subjects import step_subject, subject, training_problem
from kit.worked import skip_problem
from poetmodel.device import Costs, Device
from poetmodel.graph.catalogue import load_model
from poetmodel.problem import Problem
from poetmodel.report.drawing import draw_plan
from poetmodel.report.page import write_report

pytestmark = pytest.mark.browser
WIDER = """() => [...document.querySelectorAll('table, td, th, .chart, pre')].filter((one) => {
    const box = one.getBoundingClientRect();
    return box.width && box.right > document.documentElement.clientWidth + 1;
  }).map((one) => `${one.tagName} ${one.className} ${one.textContent.slice(0, 40)}`)"""
"""What is wider than a sheet of paper."""
IN_SIGHT = {
    "schedules": [".answers"],
    "step": ["#step .answers"],
    "explorer": ["#timeline-A", "#ram"],
}
"""What is within the first screen of a page."""


def write(kind, path):
    """Write the page of a kind: of several schedules, a compiled step, state, or a plan alone."""
    if kind == "schedules":
        graph = load_model("mlp")
        costs = Costs.estimate(graph, Device.load("nano33ble"))
        budgets = (("70%", "A"), ("80%", "B"), ("100%", "C"))
        found = [subject(Problem(graph, costs, ram=ram), label=name) for ram, name in budgets]
        write_report(path, found)
    elif kind == "step":
        write_report(path, [step_subject(skip_problem())])
    elif kind == "state":
        write_report(path, [subject(training_problem(900), mode="dma")])
    else:
        one = subject(training_problem(900))
        draw_plan(one.graph, one.planned.plan, one.planned.check, path)
    return path.as_uri()


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """Return a function that makes the page of a kind once and returns its address."""
    servers = []

    @cache
    def made(kind):
        folder = tmp_path_factory.mktemp(kind)
        if kind != "explorer":
            return write(kind, folder / "page.html")
        pytest.importorskip("fastapi")
        from kit.explorers import run_explorer

        servers.append(run_explorer(folder, "mlp", "--device", "mkr1000", "--time-limit", "60"))
        return servers[-1].__enter__().url

    yield made
    for server in servers:
        server.__exit__(None, None, None)


@pytest.mark.parametrize(
    ("screen", "scheme"),
    [
        (PHONE, "dark"),
        (DESKTOP, "light"),
        pytest.param(PHONE, "light", marks=pytest.mark.seeds),
        pytest.param(DESKTOP, "dark", marks=pytest.mark.seeds),
    ],
    ids=["phone-dark", "desk-light", "phone-light", "desk-dark"],
)
@pytest.mark.parametrize("kind", ["schedules", "step", "state", "plan", "explorer"])
def test_nobody_is_left_out(browser, address, kind, screen, scheme):
    """No message, no request elsewhere, no content wider than the screen, no finding of axe.

    All parts are drawn and unfolded. On paper, no text is clipped, and folded tables are open.
    """
    how = {**screen, "color_scheme": scheme, "bypass_csp": True}
    there = address(kind)
    report = Report.open(browser, how, there)
    page = report.page
    if kind == "explorer":
        page.wait_for_selector(
            "html[data-state=done][data-answer]", state="attached", timeout=PATIENCE_MS
        )
    for name in IN_SIGHT.get(kind, ()):
        box = page.locator(name).first.bounding_box()
        assert 0 <= box["y"] < screen["viewport"]["height"] - 40
        assert kind == "explorer" or box["y"] + box["height"] <= screen["viewport"]["height"]
    for chart in page.locator(".chart[id]").all():
        report.draw(chart.get_attribute("id"))
    page.evaluate(
        "() => document.querySelectorAll('details').forEach((one) => { one.open = true; })"
    )
    assert report.messages == []
    own = "http://127.0.0.1" if kind == "explorer" else there
    assert [url for url in report.requests if not url.startswith((own, "blob:"))] == []
    width = page.evaluate("() => document.documentElement.scrollWidth")
    assert width <= screen["viewport"]["width"]
    if kind != "explorer":
        assert page.evaluate("() => document.documentElement.dataset.theme") == scheme
    if kind == "step":
        table = page.get_by_role("region", name="Measured, planned, and eager PyTorch")
        assert table.evaluate("(region) => region.scrollWidth <= region.clientWidth")
    report.assert_accessible()
    page.evaluate("() => window.dispatchEvent(new Event('beforeprint'))")
    page.emulate_media(media="print")
    page.set_viewport_size({"width": 700, "height": 1000})
    assert kind == "explorer" or page.evaluate(WIDER) == []
    page.context.close()
