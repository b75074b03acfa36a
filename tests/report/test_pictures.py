"""Pictures of schedules and plans, and the files that they become."""

import json
import re
from itertools import pairwise

import pytest

from kit.pages import read_page
from kit.plans import plan
from kit.worked import even_costs, skip_graph
from poetmodel.errors import InputError, MissingExtraError
from poetmodel.graph import Graph, operation
from poetmodel.placement import place
from poetmodel.plan import Arena, check_arena, check_plan
from poetmodel.planner import make_plan
from poetmodel.report.drawing import check_picture, draw_addresses, draw_plan, draw_stages
from poetmodel.report.pictures import Kind, address_map
from poetmodel.schedule import checkpoint_all


def test_map_of_addresses():
    """A box for each copy, from its instruction to its free, coloured by how it came there."""
    graph = skip_graph(workspace=True)
    made = plan("c0 o0 c1 c2 f1 w0 c1 f1 f0 i0 w0 c3 f0 f2")
    costs = even_costs(graph, page_in=(7.0, 0.5), page_out=(5.0, 0.25))
    copies = ((0, 0, 0), (2, 1, 8), (3, 2, 16), (6, 1, 24), (9, 0, 0), (11, 3, 8))
    offsets = [(p, "output", i, at) for p, i, at in copies]
    offsets += [(2, "workspace", 1, 4), (6, "workspace", 1, 4)]
    arena = Arena(bytes=30, lower_bound_bytes=16, alignment=1, offsets=tuple(offsets))
    picture = address_map(
        graph, made, check_plan(graph, costs, made), check_arena(graph, made, arena)
    )
    assert picture.title == "skip: 8 copies and workspaces in 30 B, lower bound 16 B"
    assert (picture.time_name, picture.address_name) == ("time [s]", "address [B]")
    assert (picture.end, picture.limit, picture.limit_name) == (19, 30, "arena 30 B")
    # c ends at 6 s; b again from 6 s to 8 s; then a goes, and is back at 15 s.
    assert [
        (box.details.partition(":")[0], box.kind, box.start, box.end, box.low, box.high)
        for box in picture.boxes
    ] == [
        ("a", Kind.COMPUTED, 0, 8, 0, 4),
        ("b", Kind.COMPUTED, 1, 6, 8, 14),
        ("b", Kind.WORKSPACE, 1, 3, 4, 5),
        ("c", Kind.COMPUTED, 3, 19, 16, 21),
        ("b", Kind.RECOMPUTED, 6, 8, 24, 30),
        ("b", Kind.WORKSPACE, 6, 8, 4, 5),
        ("a", Kind.PAGED_IN, 8, 19, 0, 4),
        ("d", Kind.COMPUTED, 15, 19, 8, 11),
    ]
    assert picture.boxes[0].details == "a: computed, 4 B, at 0 to 4, instructions from 0 to 8"


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
    elif which == "map":
        draw_stages(graph, schedule, path)
    else:
        places = check_arena(graph, made, place(graph, made))
        draw_addresses(graph, made, check, places, path)


@pytest.mark.parametrize("which", ["timeline", "map", "addresses"])
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
