"""Pictures as files: every form, whatever the names, and without the libraries."""

import json
import re
import sys
from itertools import pairwise
from xml.etree import ElementTree as ET

import pytest

from kit.pages import read_page
from kit.worked import even_costs
from poetmodel.errors import InputError, MissingExtraError
from poetmodel.graph import Graph, operation
from poetmodel.placement import place
from poetmodel.plan import check_arena, check_plan
from poetmodel.planner import make_plan
from poetmodel.report.drawing import check_picture, draw_addresses, draw_plan, draw_stages
from poetmodel.report.still import shortened
from poetmodel.schedule import checkpoint_all

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
