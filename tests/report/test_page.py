"""The page of a report: whole, safe, and the same figures as its JSON."""

import base64
import gzip
import json
import re
from dataclasses import replace

import pytest

from kit.pages import read_page
from kit.report_subjects import certificate, step_subject, subject
from kit.worked import even_costs, skip_problem
from poetmodel.device import Costs, Device
from poetmodel.errors import MissingExtraError
from poetmodel.graph import Graph, operation
from poetmodel.problem import Problem
from poetmodel.report.page import check_report, report_facts, report_page
from poetmodel.report.presenter import value_at_path
from poetmodel.schedule import Schedule
from poetmodel.units import ESTIMATES

pytest.importorskip("jinja2")
pytest.importorskip("plotly")

HOSTILE = '</script><img src="http://x.example/a" onerror=alert(1)>{{ 7*7 }}'


def test_page_loads_nothing():
    """Links stay on the page, nothing is fetched, and the policy forbids all requests.

    Its plotly, unpacked, is the shipped one of plotly.
    """
    one = subject(skip_problem())
    text = report_page([one])
    assert report_page([one]) == text  # no time and no chance in it
    page = read_page(text)
    assert "PyTorch" not in page.text
    assert page.targets
    outside = [target for target in page.targets if not target.startswith(("#", "data:,"))]
    assert outside == []
    assert {target[1:] for target in page.targets if target[0] == "#"} <= set(page.ids)
    assert page.policy.startswith("default-src 'none';")
    assert "http" not in page.policy
    assert "@import" not in page.scripts["style"]
    assert "url(" not in page.scripts["style"]
    assert not {"link", "img", "iframe", "object"} & set(page.tags) - {"link"}
    assert len(page.ids) == len(set(page.ids))
    from plotly.offline import get_plotlyjs

    page = read_page(report_page([subject(skip_problem())]))
    packed = page.scripts["plotly"]
    assert "<" not in packed
    unpacked = gzip.decompress(base64.b85decode(packed.replace(",", "<")))
    assert unpacked.decode() == get_plotlyjs()


def test_sections_with_energies_say_that_they_are_estimates():
    """It is the first line of each; a page whose problem has no energy has none."""
    asked, timed = skip_problem(), skip_problem(minimize="time")
    said = f'<p class="note">{ESTIMATES.capitalize()}.'
    text = report_page([subject(asked), subject(asked)])
    for section in ("answers", "decisions", "facts"):
        _, _, inside = text.partition(f'<section id="{section}">')
        assert inside.partition('<p class="note">')[2].startswith(said.partition(">")[2])
    assert ESTIMATES.capitalize() not in report_page([subject(timed)])


def test_numbers_are_those_of_the_json():
    """Every figure of the page, for every schedule, is the value in the facts.

    There is a row per tensor and schedule, in the HTML itself.
    """
    both = [
        subject(skip_problem(deadline="150%")),
        subject(skip_problem(recompute=False), label="B", mode="dma"),
    ]
    page = read_page(report_page(both))
    found = json.loads(json.dumps(report_facts(both)))
    assert {label for label, _ in page.values} == {"A", "B"}
    for (label, key), value in page.values.items():
        entry = found["schedules"]["AB".index(label)]
        assert value_at_path(entry, key) == value
    keys = {key for _, key in page.values}
    assert {"energy_j", "bound_j", "gap", "peak_ram_bytes", "makespan_s"} <= keys
    assert page.values["B", "plan.mode"] == "dma"
    one, other = subject(skip_problem()), subject(skip_problem(recompute=False), label="B")
    text = report_page([one, other])
    assert text.count(" data-tensor=") == 8
    assert '<tr class="" data-choice="paged" data-tensor="0"><td>B</td><td class="name"' in text


def test_names_are_only_text():
    """A name with markup, template or script in it has no effect."""
    graph = Graph(
        name=HOSTILE,
        nodes=(
            operation(HOSTILE, output_bytes=4),
            operation("b\x1b[31m", output_bytes=6, inputs=(HOSTILE,)),
        ),
    )
    one = subject(Problem(graph, even_costs(graph), ram=40))
    one = replace(one, file=HOSTILE, notes=(HOSTILE,))
    page = read_page(report_page([one]))
    assert "img" not in page.tags
    assert HOSTILE in page.text
    charts = json.loads(page.scripts["charts"])
    (decisions,) = (chart for chart in charts["charts"] if chart["type"] == "map")
    assert decisions["columns"] == [HOSTILE, "b\\x1b[31m"]
    assert page.tags.count("script") == 3


def test_broken_schedule_says_so():
    """The verifier's words are on the page; there is no plan to draw."""
    broken = Schedule(R=((0, 0), (1, 1), (2, 2), (3, 3), (9, 9)), S_RAM=((1, 0), (2, 1)))
    one = subject(skip_problem(), broken)
    page = read_page(report_page([one]))
    for violation in one.verdict.violations:
        assert violation in page.text
    assert "Rejected" in page.text
    assert "no plan of a schedule that the verifier rejects" in page.text
    assert page.values["A", "valid"] is False


def test_gauge_shows_what_takes_the_ram_of_the_device():
    """With a device there is a bar of its RAM, and words for each part and the rest."""
    whole = skip_problem()
    graph = replace(whole.graph, resident_bytes={"parameters": 4096, "gradients": 1024})
    for ram_bytes, words in ((8192, "free: it trains there"), (4096, "it does not train there")):
        device = replace(Device.load("stm32f746"), ram_bytes=ram_bytes)
        problem = replace(whole, graph=graph, costs=Costs.estimate(graph, device), ram=None)
        one = subject(problem)
        page = read_page(report_page([one]))
        assert words in page.text
        assert "state 4.00 KiB" in page.text
        assert "gradients 1.00 KiB" in page.text
        assert "gauge" in page.ids
        assert page.values["A", "device_ram.gradient_bytes"] == 1024
    assert "gauge" not in read_page(report_page([subject(whole)])).ids


def test_gauge_of_a_rejected_schedule_is_absent_from_the_text():
    """Its text has neither free bytes nor a verdict, though another schedule has its gauge."""
    whole = skip_problem()
    device = Device.load("stm32f746")
    good = subject(replace(whole, costs=Costs.estimate(whole.graph, device), ram=None))
    broken = subject(good.problem, replace(good.schedule, R=good.schedule.R[1:]), label="B")
    text = read_page(report_page([good, broken])).text
    assert text.count("free: it trains there") == 1
    assert re.findall(r"\b([AB]): [^:]* (?:free|missing)", text) == ["A"]


def test_missing_extra_is_told(monkeypatch):
    """The error names the missing package and its extra."""
    monkeypatch.setattr(
        "poetmodel.report.drawing.find_spec", lambda name: None if name == "jinja2" else name
    )
    with pytest.raises(MissingExtraError, match=r'needs jinja2, .*"poetmodel\[report\]"'):
        check_report("r.html")


# -- a compiled PyTorch step -----------------------------------------------------------------------
def test_the_section_shows_what_was_measured():
    """Its answers are first, its tables below the timeline; values are those of the facts."""
    one = step_subject(skip_problem())
    page = read_page(report_page([one]))
    order = ["step", "answers", "ram", "measured", "map"]
    assert [name for name in page.ids if name in order] == order
    entry = json.loads(json.dumps(report_facts([one])))["schedules"][0]
    shown = {key for _, key in page.values if key.startswith("step.")}
    assert {
        "step.certificate.heap_peak_bytes",
        "step.certificate.eager_time_s",
        "step.plan.written_bytes",
        "step.reserved_bytes",
    } <= shown
    for (_, key), value in page.values.items():
        assert value_at_path(entry, key) == value
    for words in (
        "Are the results those of eager PyTorch?",
        "energies: a nominal 1 W",
        "step = poetmodel.torch.compile(model, loss_fn, inputs, ram='50%')",
        "compiled with torch 2.13.0+cpu",
        "6 B of the step's RAM are reserved",
    ):
        assert words in page.text
    assert "poetmodel solve" not in page.text


def test_differences_are_listed_and_a_missing_certificate_is_told():
    """Twenty of them, and the number of the rest; a name is only text.

    Without a certificate, the page states how to get one.
    """
    differences = [
        {"name": f"gradient of <b>{k}</b>", "largest": None, "text": "by up to nan", "op": "0/mm"}
        for k in range(23)
    ]
    told = certificate(equal=False, differences=differences)
    page = read_page(report_page([step_subject(skip_problem(), certificate=told)]))
    assert "gradient of <b>0</b> (by up to nan, from 0/mm)" in page.text
    assert "gradient of <b>19</b>" in page.text
    assert "gradient of <b>20</b>" not in page.text
    assert "and 3 more" in page.text
    assert "23 of 9 results differ" in page.text
    one = step_subject(skip_problem(), certificate=None)
    page = read_page(report_page([one]))
    assert "Not verified" in page.text
    assert "call step.verify(x, y)" in page.text
    assert ("A", "step.plan.peak_bytes") in page.values
    assert ("A", "step.certificate.heap_peak_bytes") not in page.values
