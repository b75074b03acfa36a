"""Pictures of schedules and plans, and the files that they become."""

import json
import re
import sys
from itertools import pairwise
from xml.etree import ElementTree as ET

import pytest

from kit.pages import read_page
from kit.plans import PAGED, plan, state_step
from kit.worked import even_costs, skip_graph
from poetmodel.device import Costs
from poetmodel.errors import InputError, MissingExtraError
from poetmodel.graph import Graph, operation
from poetmodel.placement import place
from poetmodel.plan import Arena, check_arena, check_plan
from poetmodel.planner import make_plan
from poetmodel.report.bands import plan_timeline
from poetmodel.report.drawing import check_picture, draw_addresses, draw_plan, draw_stages
from poetmodel.report.pictures import Kind, address_map, stage_map
from poetmodel.report.scheme import DARK, INK, PAPER, following_scheme
from poetmodel.report.still import shortened
from poetmodel.schedule import Schedule, checkpoint_all


def described(text, mode="dma"):
    """Describe the picture of a program of `skip_graph`."""
    graph = skip_graph()
    made = plan(text, mode, ram_budget_bytes=13)
    costs = even_costs(graph, page_in=(7.0, 0.5), page_out=(5.0, 0.25))
    return plan_timeline(graph, made, check_plan(graph, costs, made))


def test_picture_of_a_plan():
    """Core with stalls, and bus; RAM during each step and after it; and each copy as a band."""
    picture = described(PAGED)
    lanes = {
        name: [(bar.start, bar.end, bar.kind, bar.name) for bar in bars]
        for name, bars in picture.lanes.items()
    }
    assert lanes == {
        "core": [
            (0, 1, Kind.COMPUTED, "a"),
            (1, 3, Kind.COMPUTED, "b"),
            (3, 6, Kind.STALL, "a"),
            (6, 9, Kind.COMPUTED, "c"),
            (9, 16, Kind.STALL, "a"),
            (16, 20, Kind.COMPUTED, "d"),
        ],
        "bus": [(1, 6, Kind.PAGED_OUT, "a"), (9, 16, Kind.PAGED_IN, "a")],
    }
    names = (picture.curve_name, picture.limit, picture.limit_name, picture.ghost_name)
    assert names == ("RAM [B]", 13, "budget 13 B", "keep-all 15 B")
    held = dict(picture.points)  # the last value at each time
    assert held == {0.0: 4, 1.0: 10, 3.0: 10, 6.0: 11, 9.0: 9, 16.0: 12, 20.0: 3}
    assert [(band.name, band.part, band.kind, band.runs) for band in picture.bands] == [
        ("a", 1, None, ((0, 6, 0, 4),)),
        ("b", 1, None, ((1, 6, 4, 10), (6, 9, 0, 6))),
        ("c", 1, None, ((6, 9, 6, 11), (9, 20, 0, 5))),
        ("a", 1, Kind.PAGED_IN, ((9, 20, 5, 9),)),
        ("d", 1, None, ((16, 20, 9, 12),)),
    ]
    assert (picture.parts, picture.copies) == ((1,), (Kind.PAGED_IN,))
    assert picture.ghost == ((0, 4), (1, 10), (6, 15), (16, 12), (20, 12))
    assert list(described("c0 c1 c2 f1 c3 f0 f2").lanes) == ["core"]


def test_workspace_recomputation_and_blocking_transfers():
    """While b is computed its workspace counts: 4 + 6 + 1 B from 1 s to 3 s.

    A second computation has its own kind; without DMA the bus still has its lane.
    """
    graph = skip_graph(workspace=True)
    made = plan("c0 c1 c2 f1 c3 f0 f2")
    points = plan_timeline(graph, made, check_plan(graph, even_costs(graph), made)).points
    assert points[2:4] == ((1.0, 11), (3.0, 10))
    picture = described("c0 o0 c1 f0 c2 c1 f1 i0 c3 f0 f2", "blocking")
    assert picture.kinds == (Kind.COMPUTED, Kind.RECOMPUTED, Kind.PAGED_IN, Kind.PAGED_OUT)
    assert picture.lanes["bus"][0].start == 1


def test_first_reads_of_state_are_on_the_bus():
    """They take their RAM at once, as page-ins do; the picture ends with the write-back."""
    graph = state_step()
    times = [0.0 if node.is_state else 2.0 for node in graph.nodes]
    costs = Costs.from_arrays(
        graph,
        compute_time_s=times,
        compute_energy_j=times,
        page_in=[(3.0, 1.0)] * 6,
        page_out=[(5.0, 1.0)] * 6,
    )
    made = plan("c1 c3 c0 w1 c2 f0 w3 c4 f2 f3 c5 f4 o5", resident=())
    picture = plan_timeline(graph, made, check_plan(graph, costs, made))
    # w arrives at 3 s, v at 6; x ends at 2, y at 5, g at 8, u at 10.
    assert [(bar.start, bar.end, bar.kind, bar.name) for bar in picture.lanes["bus"]] == [
        (0, 3, Kind.PAGED_IN, "w"),
        (3, 6, Kind.PAGED_IN, "v"),
        (10, 15, Kind.PAGED_OUT, "w+"),
    ]
    assert picture.points[:3] == ((0.0, 8), (0.0, 8), (0.0, 11))
    assert [time for time, _ in picture.points] == sorted(time for time, _ in picture.points)


def test_cells_tell_what_happens():
    """Computed, recomputed, paged in, kept; page-outs are marked; several tensors share a cell."""
    graph = skip_graph(mask=True)  # tensors 2 and 3 are both of node c
    schedule = Schedule(
        R=((0, 0), (1, 1), (2, 2), (2, 1), (3, 3)),
        S_RAM=((1, 0), (2, 0), (3, 2), (3, 3)),
        S_AUX=((1, 0), (2, 0), (3, 0)),
        M_in=((3, 0),),
        M_out=((0, 0), (2, 3)),
    )
    grid = stage_map(graph, schedule)
    assert grid.rows == grid.columns == ("a", "b", "c", "d")
    cells = {(cell.row, cell.column): (cell.kind, cell.mark) for cell in grid.cells}
    assert cells == {
        (0, 0): (Kind.COMPUTED, Kind.PAGED_OUT),
        (1, 0): (Kind.KEPT, None),
        (1, 1): (Kind.COMPUTED, None),
        (2, 0): (Kind.KEPT, None),
        (2, 1): (Kind.RECOMPUTED, None),
        (2, 2): (Kind.COMPUTED, Kind.PAGED_OUT),
        (3, 0): (Kind.PAGED_IN, None),
        (3, 2): (Kind.KEPT, None),
        (3, 3): (Kind.COMPUTED, None),
    }
    assert grid.kinds == (Kind.COMPUTED, Kind.RECOMPUTED, Kind.KEPT, Kind.PAGED_IN)
    assert grid.marks == (Kind.PAGED_OUT,)
    assert grid.title == "skip: 1 recomputation, 2 page-outs, 1 page-in"


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
        (box.name, box.kind, box.start, box.end, box.low, box.high) for box in picture.boxes
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
    assert picture.kinds == (Kind.COMPUTED, Kind.RECOMPUTED, Kind.PAGED_IN, Kind.WORKSPACE)


# -- colours of dark pages -------------------------------------------------------------------------
LIGHT = """<?xml version="1.0"?>
<svg xmlns="http://www.w3.org/2000/svg" width="10">
 <rect style="fill: #ffffff; stroke: #b0b0b0"/><text>a</text>
</svg>"""


def _luminance(colour):
    parts = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_colours_of_dark_pages_are_rules_of_the_picture():
    """Paper and lines that occur have their dark colours, text is light; what it was stays.

    Ink has a contrast of more than 7 to the paper, as accessibility guides want at best.
    """
    text = following_scheme(LIGHT)
    style = re.search(r"<style>@media \(prefers-color-scheme:dark\)(.*)</style>", text)
    assert f'[style*="fill: #ffffff"]{{fill:{PAPER}!important}}' in style[1]
    assert f'[style*="stroke: #b0b0b0"]{{stroke:{DARK["#b0b0b0"]}!important}}' in style[1]
    assert f"text{{fill:{INK}}}" in style[1]
    assert "#0072b2" not in style[1]
    assert text.replace(f"\n {style[0]}", "") == LIGHT
    assert (_luminance(INK) + 0.05) / (_luminance(PAPER) + 0.05) > 7


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
@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_every_picture_is_drawn_in_every_form(which, suffix, tmp_path):
    """A whole file of its kind, the same each time."""
    pytest.importorskip("matplotlib")
    path = tmp_path / f"x.{suffix}"
    draw(which, chain(), path)
    content = path.read_bytes()
    if suffix == "png":
        assert content.startswith(b"\x89PNG")
    else:
        assert ET.fromstring(content).tag.endswith("svg")  # noqa: S314 - our own
    draw(which, chain(), path)
    assert path.read_bytes() == content


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


@pytest.mark.parametrize("which", ["timeline", "map", "addresses"])
def test_stills_of_large_graphs_fit_a_screen(which, tmp_path):
    """Of 150 nodes as of 6: no side above 2,000 pixels, and names no smaller."""
    pytest.importorskip("matplotlib")
    from poetmodel.report.still import FONT

    path = tmp_path / "x.svg"
    draw(which, chain(tuple(f"node{k}" for k in range(150))), path)
    root = ET.fromstring(path.read_bytes())  # noqa: S314 - our own
    for side in ("width", "height"):
        assert float(root.attrib[side].removesuffix("pt")) / 72 * 150 < 2000
    texts = list(root.iter("{http://www.w3.org/2000/svg}text"))
    styles = " ".join(text.attrib["style"] for text in texts)
    sizes = re.findall(r"font-size: ([\d.]+)px", styles)
    assert len(sizes) == len(texts)
    assert min(map(float, sizes)) >= FONT
    if which == "map":  # each name that is shown has the room of a line
        shown = [text.text for text in texts if (text.text or "").startswith("node")]
        assert 30 < len(set(shown)) < 150


@pytest.mark.parametrize("name", ["x", "x.jpg", "png", "x.plan.json"])
def test_other_endings_are_refused(name):
    """The message names the endings that there are."""
    with pytest.raises(InputError, match=r"\.png, \.svg, \.html"):
        check_picture(name)


@pytest.mark.parametrize(("suffix", "library"), [("svg", "matplotlib"), ("html", "plotly")])
def test_missing_library_is_told(suffix, library, monkeypatch, tmp_path):
    """The message says what to install; nothing is written."""
    for name in [name for name in sys.modules if name.split(".")[0] == library]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setattr("poetmodel.report.drawing.find_spec", lambda _: None)
    with pytest.raises(MissingExtraError, match=rf'{library}.*pip install "poetmodel\[report\]"'):
        draw("map", chain(), tmp_path / f"x.{suffix}")
    assert list(tmp_path.iterdir()) == []


def test_long_names_lose_their_middle():
    """Both ends tell names of one network apart; what cannot be drawn becomes a question mark."""
    assert shortened("layer4.1.conv2.grad_weight") == "layer4.1.c..rad_weight"
    assert shortened("conv1") == "conv1"
    assert shortened("a\tb\u4e2d") == "a?b?"
    assert shortened("\u00fcn\u00ef\u2192\u03b8") == "\u00fcn\u00ef\u2192\u03b8"
