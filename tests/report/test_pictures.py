"""Pictures of schedules and plans, and the files that they become."""

import json
import re
from itertools import pairwise

import pytest

from kit.pages import read_page
from kit.worked import even_costs, skip_problem
from poetmodel.device import Costs
from poetmodel.errors import InputError, MissingExtraError
from poetmodel.graph import Graph, checkpoint_all_peak_bytes, operation
from poetmodel.plan import check_plan
from poetmodel.planner import make_plan
from poetmodel.report.drawing import check_picture, draw_plan, draw_stages
from poetmodel.report.still import stack_bands
from poetmodel.report.timeline import plan_chart
from poetmodel.schedule import checkpoint_all
from poetmodel.solver import solve

# -- files ---------------------------------------------------------------------------------------
ODD_NAMES = ("a<b>&amp;", "\u00fc\U0001f600", "$x_1$", "tab\there", "\u4e2d", "%d {0}", "x" * 90)


def chain(names=ODD_NAMES):
    """Return a chain of nodes of these names."""
    nodes = [operation(names[0], output_bytes=8)]
    nodes += [operation(name, output_bytes=8, inputs=(before,)) for before, name in pairwise(names)]
    return Graph(name="odd <names>", nodes=tuple(nodes))


def draw(which, graph, path):
    """Draw a picture of keeping everything."""
    costs = even_costs(graph)
    schedule = checkpoint_all(graph)
    made = make_plan(graph, costs, schedule, mode="dma", ram_budget_bytes=100)
    check = check_plan(graph, costs, made)
    if which == "timeline":
        draw_plan(graph, made, check, path)
    else:
        draw_stages(graph, schedule, path)


@pytest.mark.parametrize("which", ["timeline", "map"])
def test_every_picture_is_a_page(which, tmp_path):
    """With title and language, small, and of the chart that a report has; names are text."""
    pytest.importorskip("plotly")
    pytest.importorskip("jinja2")
    path = tmp_path / "x.html"
    draw(which, chain(), path)
    text = path.read_text(encoding="utf-8")
    page = read_page(text)
    assert '<html lang="en">' in text
    assert re.search("<title>odd &lt;names&gt;[^<]+</title>", text)
    assert 'name="viewport"' in text
    assert page.policy.startswith("default-src 'none';")
    assert "a<b>" not in text
    (chart,) = json.loads(page.scripts["charts"])["charts"]
    assert (chart["type"], chart["id"]) == (which, "picture")
    assert "picture" in page.ids
    assert len(text) < 2_000_000
    draw(which, chain(), path)
    assert path.read_text(encoding="utf-8") == text


@pytest.mark.parametrize(
    ("form", "begin", "which"),
    [
        ("svg", b"<?xml", "timeline"),
        ("png", b"\x89PNG", "map"),
        ("pdf", b"%PDF", "timeline"),
        pytest.param("svg", b"<?xml", "map", marks=pytest.mark.slow),
        pytest.param("png", b"\x89PNG", "timeline", marks=pytest.mark.slow),
        pytest.param("pdf", b"%PDF", "map", marks=pytest.mark.slow),
    ],
)
def test_still_pictures_are_files_of_their_form(which, form, begin, tmp_path):
    """Names of any characters can be drawn, and the same picture is the same bytes."""
    pytest.importorskip("matplotlib")
    path = tmp_path / f"x.{form}"
    draw(which, chain(), path)
    content = path.read_bytes()
    assert content.startswith(begin)
    draw(which, chain(), path)
    assert path.read_bytes() == content


def test_still_timeline_shows_budget_and_keep_all(tmp_path):
    """Its text names both, core and bus, and tensors in RAM; the stack is as high as the peak."""
    pytest.importorskip("matplotlib")
    problem = skip_problem(ram=12, recompute=False)
    schedule = solve(problem).require_schedule()
    made = make_plan(problem.graph, problem.costs, schedule, mode="dma", ram_budget_bytes=12)
    check = check_plan(problem.graph, problem.costs, made)
    draw_plan(problem.graph, made, check, tmp_path / "x.svg")
    text = (tmp_path / "x.svg").read_text(encoding="utf-8")
    kept = checkpoint_all_peak_bytes(problem.graph)
    for words in ("core", "bus", "computed", "budget: 12 B", f"keep-all: {kept} B"):
        assert words in text
    chart = plan_chart(problem.graph, made, check)
    tops = [top for _, runs in stack_bands(problem.graph, chart) for *_, top in runs]
    assert max(tops) * chart["scale"] == check.peak_ram_bytes


def test_still_timeline_needs_times(tmp_path):
    """With costs of 0 only a page can be drawn, over the instructions."""
    graph = chain()
    costs = Costs.from_arrays(graph, compute_time_s=[0] * 7, compute_energy_j=[0] * 7)
    made = make_plan(graph, costs, checkpoint_all(graph), mode="blocking")
    check = check_plan(graph, costs, made)
    with pytest.raises(InputError, match="takes no time"):
        draw_plan(graph, made, check, tmp_path / "plan.png")
    draw_plan(graph, made, check, tmp_path / "plan.html")
    assert [path.name for path in tmp_path.iterdir()] == ["plan.html"]


@pytest.mark.slow
def test_large_maps_name_some_nodes(tmp_path):
    """A map of 1,000 nodes is drawn; names do not lie on each other."""
    pytest.importorskip("matplotlib")
    draw("map", chain([f"node-{k}" for k in range(1000)]), tmp_path / "x.svg")
    text = (tmp_path / "x.svg").read_text(encoding="utf-8")
    assert "node-996" in text
    assert "node-999" not in text


@pytest.mark.parametrize("name", ["x", "x.jpg", "html", "x.plan.json"])
def test_other_endings_are_refused(name):
    """The message names the suffixes that can be drawn."""
    with pytest.raises(InputError, match=r"ends in \.html, \.png, \.svg, \.pdf"):
        check_picture(name)


def test_missing_library_is_told(monkeypatch, tmp_path):
    """The message states the package to install; nothing is written."""
    monkeypatch.setattr("poetmodel.report.drawing.find_spec", lambda _: None)
    with pytest.raises(MissingExtraError, match=r'plotly.*pip install "poetmodel\[report\]"'):
        draw("map", chain(), tmp_path / "x.html")
    assert list(tmp_path.iterdir()) == []
