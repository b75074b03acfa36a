"""Pictures of schedules and plans, and the files that they become."""

import json
import re
from itertools import pairwise

import pytest

from kit.pages import read_page
from kit.worked import even_costs
from poetmodel.errors import InputError, MissingExtraError
from poetmodel.graph import Graph, operation
from poetmodel.plan import check_plan
from poetmodel.planner import make_plan
from poetmodel.report.drawing import check_picture, draw_plan, draw_stages
from poetmodel.schedule import checkpoint_all

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


@pytest.mark.parametrize("name", ["x", "x.svg", "html", "x.plan.json"])
def test_other_endings_are_refused(name):
    """The message names the ending that there is."""
    with pytest.raises(InputError, match=r"ends in \.html"):
        check_picture(name)


def test_missing_library_is_told(monkeypatch, tmp_path):
    """The message says what to install; nothing is written."""
    monkeypatch.setattr("poetmodel.report.drawing.find_spec", lambda _: None)
    with pytest.raises(MissingExtraError, match=r'plotly.*pip install "poetmodel\[report\]"'):
        draw("map", chain(), tmp_path / "x.html")
    assert list(tmp_path.iterdir()) == []
