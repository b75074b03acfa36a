"""The explorer's page in a real browser, before the real server."""

import json
import re
import signal

import pytest

from kit.browser_pages import PATIENCE_MS
from kit.explorers import WIDE, open_visit, run_explorer
from poetmodel.schedule.document import load_document

pytestmark = pytest.mark.browser

SMALL = ("mlp", "--device", "mkr1000", "--time-limit", "60")
"""A problem that is solved in a moment."""
SLOW = {"model": "resnet8", "device": "nano33ble", "ram": "40%"}
"""A problem whose proof takes minutes; its first schedules come at once."""
MOST_BYTES = 6_000_000
PEAK = """() => { const {data} = document.getElementById('timeline-A');
    const line = data.find((trace) => trace.line && trace.line.shape === 'hv' && !trace.line.dash);
    return Math.max(...line.y); }"""
"""The highest point of the timeline, in the unit of its axis."""
ADDRESS = """(bytes) => { const text = new URLSearchParams(location.search).get('ram');
    return (text.endsWith('KiB') ? 1024 : 1) * parseFloat(text) === bytes; }"""
"""Whether the address has this RAM."""

SAVING = """() => { window.saved = []; const blobs = new Map();
    const {createObjectURL} = URL, {click} = HTMLAnchorElement.prototype;
    URL.createObjectURL = (blob) => {
        const url = createObjectURL(blob); blobs.set(url, blob); return url; };
    HTMLAnchorElement.prototype.click = function () {
        if (this.download) window.saved.push([this.download, blobs.get(this.href).text()]);
        return click.call(this); }; }"""
"""Notes names and texts of the files that the page hands to the browser to save."""


@pytest.fixture(scope="module")
def explorer(tmp_path_factory):
    """Run one explorer for all tests."""
    with run_explorer(tmp_path_factory.mktemp("explore"), *SMALL) as started:
        yield started


@pytest.fixture
def opened(browser, explorer):
    """Open pages that are closed, and were silent, when the test ends."""
    visits = []

    def open_page(how=WIDE, **view):
        visits.append(open_visit(browser, explorer, how, **view))
        return visits[-1]

    yield open_page
    for each in visits:
        each.close()


@pytest.fixture(scope="module")
def shared(browser, explorer):
    """Open one page for the tests that need no new one."""
    found = open_visit(browser, explorer, ram="90%")
    found.wait_until_settled()
    yield found
    found.close()


@pytest.fixture
def page(shared):
    """Return the page with 90 % of RAM and no deadline."""
    shared.type("deadline", "none")
    shared.type("ram", "90%")
    shared.wait_until_settled()
    return shared


def drag(page, *, to, steps=12, meanwhile):
    """Drag the RAM slider to a share of its range."""
    slider = page.page.locator("#ram")
    box = slider.bounding_box()
    thumb, y = 24, box["y"] + box["height"] / 2
    span = box["width"] - thumb
    start = float(slider.input_value()) / 240
    page.page.mouse.move(box["x"] + thumb / 2 + start * span, y)
    page.page.mouse.down()
    for step in range(1, steps + 1):
        share = start + (to - start) * step / steps
        page.page.mouse.move(box["x"] + thumb / 2 + share * span, y)
        meanwhile()
    page.page.mouse.up()


def test_page_is_small(opened):
    """The page has less than 6 MB, with all its scripts."""
    page = opened()
    size = page.page.evaluate(
        "() => fetch('/').then((r) => r.arrayBuffer()).then((b) => b.byteLength)"
    )
    assert size < MOST_BYTES


def test_figures_and_timeline_are_those_of_the_answer(page):
    """The page shows the values of the server's reply, to the last digit."""
    page.type("ram", "75%")
    point = page.json(f"/api/points/{page.wait_until_settled()['point']}")
    assert point["status"] == "optimal"
    assert page.read_number("energy_j") == point["energy_j"]
    assert page.read_number("makespan_s") == point["makespan_s"]
    assert page.read_number("peak_ram_bytes") == point["peak_ram_bytes"]
    assert page.read_number("proof") == point["gap"]
    baseline_j = point["energy_j"] - point["overhead_j"]
    assert page.read_number("overhead") == pytest.approx(
        point["overhead_j"] / baseline_j, rel=1e-12
    )
    line = page.answer()["charts"]["timeline"]
    assert page.page.evaluate(PEAK) * line["scale"] == pytest.approx(point["peak_ram_bytes"])


def test_dragging_changes_the_timeline(opened):
    """The timeline follows the slider, which keeps the focus; the last stop is shown in the end."""
    page = opened(model="ds-cnn", device="nano33ble", ram="80%")
    page.wait_until_settled()
    before, seen = page.page.evaluate(PEAK), set()
    drag(page, to=0.55, meanwhile=lambda: seen.add(page.page.locator("#ram-text").input_value()))
    state = page.wait_until_settled()
    point = page.json(f"/api/points/{state['point']}")
    line = page.answer()["charts"]["timeline"]
    assert len(seen) > 5
    assert page.page.evaluate(PEAK) < before
    assert page.page.evaluate(PEAK) * line["scale"] == pytest.approx(point["peak_ram_bytes"])
    assert page.page.evaluate("() => document.activeElement.id") == "ram"
    page.page.wait_for_function(ADDRESS, arg=point["ram_bytes"])


def test_known_point_is_shown_before_any_reply(page):
    """The way back needs no server: figures and charts of a known point are there at once."""
    first = page.wait_until_settled()["answer"]
    energy = page.read_number("energy_j")
    page.type("ram", "70%")
    page.page.wait_for_function(
        "(first) => document.documentElement.dataset.answer !== first", arg=first
    )
    page.wait_until_settled()
    held = []

    def hold(route):
        held.append(route)

    page.page.route("**/api/points", hold)
    page.type("ram", "90%")
    assert page.until(answer=first)["state"] == "done"
    assert page.read_number("energy_j") == energy
    page.page.wait_for_timeout(200)
    assert len(held) == 1
    held[0].continue_()
    page.page.unroute("**/api/points")


def test_reload_in_the_middle_of_a_solve(opened):
    """After a reload, the same point is shown, with its schedule, and its solve continues."""
    page = opened(**{**SLOW, "ram": "45%"})
    before = page.until(state="solving")
    page.page.wait_for_selector("html[data-answer]", state="attached", timeout=PATIENCE_MS)
    seconds = page.json(f"/api/points/{before['point']}")["seconds"]
    page.page.reload()
    after = page.until(state="solving", point=before["point"])
    assert after["point"] == before["point"]
    page.page.wait_for_selector("html[data-answer]", state="attached", timeout=PATIENCE_MS)
    assert page.json(f"/api/points/{before['point']}")["seconds"] >= seconds
    page.type("ram", "100%")
    page.wait_until_settled()


def test_killed_server_loses_nothing(browser, tmp_path):
    """The page reports that it reconnects; then it has all results again."""
    with run_explorer(tmp_path, *SMALL) as explorer:
        page = open_visit(browser, explorer, ram="80%")
        before = page.wait_until_settled()
        energy = page.read_number("energy_j")
        explorer.end(signal.SIGKILL)
        page.until(connection="lost")
        assert page.page.locator("#connection").inner_text() == "Reconnecting …"
        explorer.start()
        page.until(connection="up", state="done", point=before["point"])
        page.page.wait_for_selector("#problem:not([aria-busy])", timeout=PATIENCE_MS)
        assert page.page.locator("#connection").inner_text() == ""
        assert page.read_number("energy_j") == energy
        page.type("ram", "78%")
        page.page.wait_for_function(
            "(old) => document.documentElement.dataset.point !== old", arg=before["point"]
        )
        page.wait_until_settled()
        assert page.json(f"/api/points/{before['point']}")["energy_j"] == energy
        assert {message.partition("net::")[0] for message in page.messages} <= {
            "Failed to load resource: "
        }
        page.page.context.close()


def test_two_browsers_do_not_disturb_each_other(opened):
    """Each page has its own request; both show the other's points."""
    one, other = opened(ram="85%"), opened(ram="72%")
    first, second = one.wait_until_settled()["point"], other.wait_until_settled()["point"]
    assert first != second
    one.type("ram", "72%")
    one.until(point=second)
    assert other.state["point"] == second
    assert one.wait_until_settled()["answer"] == other.wait_until_settled()["answer"]


def test_address_has_the_whole_view(opened):
    """A link leads to the same problem, limits and tensor; the token is not part of it."""
    page = opened(ram="90%")
    page.wait_until_settled()
    page.page.locator("#recompute").uncheck()
    page.type("deadline", "150%")
    page.wait_until_settled()
    page.page.wait_for_function("() => location.search.includes('deadline=')")
    page.page.locator("#timeline-A-alive .stays button").first.click()
    name = page.state["selected"]
    address = page.page.evaluate("() => location.href")
    assert "token" not in address
    there = opened()
    there.page.goto(address)
    there.page.wait_for_selector("html[data-ready]", state="attached", timeout=PATIENCE_MS)
    assert there.wait_until_settled()["point"] == page.wait_until_settled()["point"]
    assert there.state["selected"] == name
    assert not there.page.locator("#recompute").is_checked()
    assert there.page.locator("#deadline-text").input_value() == (
        page.page.locator("#deadline-text").input_value()
    )
    assert there.page.locator("#timeline-A path.rim").get_attribute("d")


def test_what_is_typed_outlives_a_new_problem(opened):
    """A field with focus keeps its text while its limits change."""
    page = opened(ram="90%")
    page.wait_until_settled()
    held = []
    page.page.route("**/api/problems", lambda route: held.append(route))  # noqa: PLW0108 - no builtin may listen
    page.page.locator("#recompute").uncheck()
    page.page.locator("#deadline-text").fill("150%")
    with page.page.expect_response("**/api/points"):
        held[0].continue_()
    assert page.page.locator("#deadline-text").input_value() == "150%"
    page.page.locator("#deadline-text").press("Enter")
    page.page.wait_for_function("() => location.search.includes('deadline=')")


def test_below_the_minimum_the_page_says_why(page):
    """Below the minimum, the page lists the tensors of one step, and offers a larger RAM."""
    page.page.locator("#ram").focus()
    page.page.keyboard.press("Home")
    page.until(state="below")
    panel = page.page.locator("#why")
    assert panel.locator("h2").inner_text() == "Why not less?"
    assert panel.locator("li").count() > 1
    old = page.page.locator("#old")
    assert old.inner_text().startswith("The charts below are of ")
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    found = axe.run(page.page)
    assert found.violations_count == 0, found.generate_report()
    assert page.page.locator("#energy_j").get_attribute("data-value") is None
    panel.get_by_role("button", name="Go to").click()
    point = page.json(f"/api/points/{page.wait_until_settled()['point']}")
    assert point["peak_ram_bytes"] == point["ram_bytes"]
    assert not panel.is_visible()
    assert not old.is_visible()


def test_step_that_does_not_fit_is_planned_whole_by_a_click(opened):
    """Parameters and gradients beside the schedule exceed the device; in the graph they fit."""
    page = opened(model="ds-cnn", device="nano33ble", ram="30%")
    page.wait_until_settled()
    warning = page.page.locator("#warning")
    assert warning.is_visible()
    warning.get_by_role("button", name="Plan the whole step (sgd, in place)").click()
    page.page.wait_for_function("() => location.search.includes('state=sgd')")
    assert "in_place=1" in page.page.url
    assert page.page.locator("#in_place").is_checked()
    page.wait_until_settled()
    assert warning.is_hidden()


def test_placeholders_are_shown_whole(page):
    """None is wider than its field minus the steppers."""
    widths = page.page.evaluate(
        """() => Array.from(document.querySelectorAll('.choices input[placeholder]'), (field) => {
            const pen = document.createElement('canvas').getContext('2d');
            const style = getComputedStyle(field);
            pen.font = style.font;
            const inset = parseFloat(style.paddingLeft) + parseFloat(style.paddingRight);
            const steppers = field.type === 'number' ? 18 : 0;
            const room = field.clientWidth - inset - steppers;
            return [pen.measureText(field.placeholder).width, room, field.placeholder];
        })"""
    )
    assert any(room > 0 for _, room, _ in widths)
    assert all(text <= room for text, room, _ in widths if room > 0), widths


def test_impossible_deadline_has_a_reason(page):
    """A deadline below a single pass is refused with its reason; without it all is well again."""
    page.type("deadline", "50%")
    page.until(status="infeasible")
    assert "single pass" in page.page.locator("#why-text").inner_text()
    page.page.get_by_role("button", name="Without a deadline").click()
    page.wait_until_settled()
    assert page.page.locator("#deadline-text").input_value() == "none"


def test_fields_take_sizes_and_shares(page):
    """Sizes and percentages are valid; other text is marked as an error, without a request."""
    before = page.wait_until_settled()["point"]
    field = page.page.locator("#ram-text")
    for wrong in ("lots", "1e400", "0"):
        page.type("ram", wrong)
        assert field.get_attribute("aria-invalid") == "true"
        assert "256KiB" in page.page.locator("#ram-error").inner_text()
        assert page.state["point"] == before
    page.type("ram", "5kib")
    page.page.wait_for_function("() => location.search.includes('ram=5KiB')")
    assert field.get_attribute("aria-invalid") is None
    assert page.json(f"/api/points/{page.wait_until_settled()['point']}")["ram_bytes"] == 5 * 1024
    assert "5 KiB" in (page.page.locator("#ram").get_attribute("aria-valuetext") or "")


def test_another_model_in_the_middle_of_a_drag(opened):
    """Charts of the old network make room in silence, and the new one's answer is seen."""
    there = opened(model="ds-cnn", device="nrf52840")
    there.wait_until_settled()
    there.page.locator("#ram").focus()
    for _ in range(30):
        there.page.keyboard.press("ArrowLeft")
    there.page.locator("#model").select_option("mlp")
    there.page.wait_for_function(
        """() => { const { data, layout } = document.getElementById('points-A');
        return document.title.startsWith('mlp') && data && data[1].y.length === 1
          && layout.yaxis.range[0] < data[1].y[0] && data[1].y[0] < layout.yaxis.range[1]; }""",
        timeout=PATIENCE_MS,
    )


def test_point_of_the_chart_leads_there(page):
    """A key or a click on a point of the Pareto chart sets its limits."""
    page.type("ram", "88%")
    first = page.wait_until_settled()["point"]
    page.type("ram", "76%")
    page.page.wait_for_function(
        "(old) => document.documentElement.dataset.point !== old", arg=first
    )
    page.wait_until_settled()
    chart = page.page.locator("#points-A")
    chart.scroll_into_view_if_needed()
    page.page.wait_for_selector("#points-A[data-ready]", timeout=PATIENCE_MS)
    chart.focus()
    chart.press("Home")
    assert page.page.locator("#points-A-readout").inner_text()
    chart.press("Enter")
    page.wait_until_settled()
    shown = page.json(f"/api/points/{page.state['point']}")
    needs = page.page.evaluate("() => Math.min(...document.getElementById('points-A').data[1].x)")
    assert shown["needs_bytes"] == needs


def test_everything_can_be_taken_away(page):
    """Schedule, plan and report are files; the command is on the page."""
    point = page.json(f"/api/points/{page.wait_until_settled()['point']}")
    page.page.evaluate(SAVING)
    files = {}
    for kind in ("schedule", "plan", "report"):
        with page.page.expect_response(re.compile(f"/export/{kind}$"), timeout=PATIENCE_MS) as got:
            page.page.locator(f"[data-export={kind}]").click()
        assert got.value.ok
        files[kind] = page.page.request.get(got.value.url).text()
        assert 'filename="mlp' in got.value.headers["content-disposition"]
        page.page.wait_for_function("() => window.saved.length", timeout=PATIENCE_MS)
        name, text = page.page.evaluate("() => Promise.all(window.saved.pop())")
        assert name.startswith("mlp")
        assert text == files[kind]
    document = load_document("download", files["schedule"].encode())
    assert document.stated_metrics["energy_j"] == point["energy_j"]
    assert json.loads(files["plan"])
    assert files["report"].startswith("<!DOCTYPE html>")
    command = page.page.locator("#command").inner_text()
    assert f"--ram {point['ram_bytes']}" in command
    page.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.page.locator("#copy").click()
    page.page.wait_for_function("() => document.getElementById('copy').textContent === 'Copied'")
    assert page.page.evaluate("() => navigator.clipboard.readText()") == command


def test_command_is_there_again_on_the_way_back(page):
    """Without a schedule there is none; back at the drawn point, it can be copied again."""
    page.type("ram", "88%")
    page.wait_until_settled()
    command = page.page.locator("#command")
    text = command.inner_text()
    assert text.startswith("poetmodel ")
    page.page.locator("#ram").focus()
    page.page.keyboard.press("Home")
    page.until(state="below")
    assert command.inner_text() == ""
    page.type("ram", "88%")
    page.wait_until_settled()
    assert command.inner_text() == text
    assert page.page.locator("#copy").is_enabled()


def test_refused_choice_is_said_and_the_old_view_stays(page):
    """A choice that has no graph is refused in a sentence beside the controls."""
    before = page.wait_until_settled()["point"]
    page.page.locator("#sequence").fill("7")
    page.page.locator("#sequence").press("Enter")
    page.page.wait_for_selector("#problem-error:not(:empty)", timeout=PATIENCE_MS)
    assert page.state["point"] == before
    page.page.locator("#sequence").fill("")
    page.page.locator("#sequence").press("Enter")
    page.wait_until_settled()
    noted = [text for text in page.messages if "status of 409" in text or "status of 422" in text]
    assert len(noted) == 1  # by the browser itself, of the request that was refused
    page.messages.remove(noted[0])
