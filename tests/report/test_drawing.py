"""Pictures as files: every form, whatever the names, and without the libraries."""

from __future__ import annotations

import sys
from itertools import pairwise
from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

import pytest

from poetmodel.errors import InputError, MissingExtraError
from poetmodel.graph import Graph, operation
from poetmodel.placement import place
from poetmodel.plan import check_arena, check_plan
from poetmodel.planner import make_plan
from poetmodel.report.drawing import check_picture, draw
from poetmodel.report.pictures import address_map, plan_timeline, stage_map
from poetmodel.report.still import shortened
from poetmodel.schedule import checkpoint_all
from worked import even_costs

if TYPE_CHECKING:
    from pathlib import Path

    from poetmodel.report.pictures import AddressMap, Grid, Timeline

ODD_NAMES = ("a<b>&amp;", "$x_1$", "tab\there", "\u4e2d", "%d {0}", "x" * 90)


def chain(names: tuple[str, ...] = ODD_NAMES) -> Graph:
    """Return a chain of nodes of these names."""
    nodes = [operation(names[0], output_bytes=8)]
    nodes += [operation(name, output_bytes=8, inputs=(before,)) for before, name in pairwise(names)]
    return Graph(name="odd <names>", nodes=tuple(nodes))


def pictures(graph: Graph) -> tuple[Timeline, Grid, AddressMap]:
    """Return all pictures of keeping everything."""
    costs = even_costs(graph)
    schedule = checkpoint_all(graph)
    made = make_plan(graph, costs, schedule, mode="dma", ram_budget_bytes=100)
    check, places = check_plan(graph, costs, made), check_arena(graph, made, place(graph, made))
    return (
        plan_timeline(graph, made, check),
        stage_map(graph, schedule),
        address_map(graph, made, check, places),
    )


@pytest.mark.parametrize("which", [0, 1, 2], ids=["timeline", "grid", "addresses"])
@pytest.mark.parametrize("suffix", ["png", "svg", "html"])
def test_every_picture_is_drawn_in_every_form(which: int, suffix: str, tmp_path: Path) -> None:
    """A whole file of its kind, the same each time."""
    library = "plotly" if suffix == "html" else "matplotlib"
    pytest.importorskip(library)
    picture, path = pictures(chain())[which], tmp_path / f"x.{suffix}"
    draw(picture, path)
    content = path.read_bytes()
    if suffix == "png":
        assert content.startswith(b"\x89PNG")
    elif suffix == "svg":
        assert ET.fromstring(content).tag.endswith("svg")  # noqa: S314 - our own
    else:
        text = content.decode()
        assert "</html>" in text
        assert "<script src=" not in text  # needs no network
        assert "a<b>" not in text  # names are text, not tags
        assert r"a&lt;b\u003e&amp;amp;" in text
    draw(picture, path)
    assert path.read_bytes() == content


def test_names_stay_readable_on_large_graphs(tmp_path: Path) -> None:
    """The figure grows, so that each of 150 nodes keeps the room of a line and has its name."""
    pytest.importorskip("matplotlib")
    from poetmodel.report.still import NAME_INCHES

    names = tuple(f"node{k}" for k in range(150))
    _, grid, _ = pictures(chain(names))
    path = tmp_path / "x.svg"
    draw(grid, path)
    root = ET.fromstring(path.read_bytes())  # noqa: S314 - our own
    assert float(root.attrib["width"].removesuffix("pt")) / 72 >= NAME_INCHES * len(names)
    texts = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert all(texts.count(name) == 2 for name in names)  # beside its row, below its column


@pytest.mark.parametrize("name", ["x", "x.jpg", "png", "x.plan.json"])
def test_other_endings_are_refused(name: str) -> None:
    """The message names the endings that there are."""
    with pytest.raises(InputError, match=r"\.png, \.svg, \.html"):
        check_picture(name)


@pytest.mark.parametrize(("suffix", "library"), [("svg", "matplotlib"), ("html", "plotly")])
def test_missing_library_is_told(
    suffix: str, library: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The message says what to install; nothing is written."""
    for name in [name for name in sys.modules if name.split(".")[0] == library]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setattr("poetmodel.report.drawing.find_spec", lambda _: None)
    with pytest.raises(MissingExtraError, match=rf'{library}.*pip install "poetmodel\[report\]"'):
        draw(pictures(chain())[1], tmp_path / f"x.{suffix}")
    assert list(tmp_path.iterdir()) == []


def test_long_names_lose_their_middle() -> None:
    """Both ends tell names of one network apart; what cannot be drawn becomes a question mark."""
    assert shortened("layer4.1.conv2.grad_weight") == "layer4.1.c..rad_weight"
    assert shortened("conv1") == "conv1"
    assert shortened("a\tb\u4e2d") == "a?b?"
