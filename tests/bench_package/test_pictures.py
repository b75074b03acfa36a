"""Pictures of figures: what is drawn where, and that the same rows give the same file."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.figure_rows import row, without
from poetmodel.bench.pictures import TICKS, digest, draw, panels, round_ticks
from poetmodel.graph.catalogue import load_model
from poetmodel.report.pictures import Kind, Map, Panel, stage_map
from poetmodel.schedule import checkpoint_all


def test_overheads_are_lines_along_the_budgets():
    """One panel per model, device and deadline; points ascend, what has no schedule is left out."""
    found = [row(ram="70%"), row(ram="50%", overhead_j=2.0), without("unknown", "dtr")]
    first, second = panels("figure3", [*found, row(deadline="110%")])
    assert first.lines == (("optimal", ((50.0, 2.0), (70.0, 1.0))), ("dtr", ()))
    assert second.title == "m, d\ndeadline 110%"


def test_peaks_and_times():
    """Table 3 shows peak RAM against time."""
    (panel,) = panels("table3", [row("pofo", peak_ram_bytes=2048, makespan_s=0.5)])
    assert panel.lines == (("pofo", ((2.0, 500.0),)),)


def test_solved_cells_are_counted_along_the_time():
    """Only closed gaps count, of the model where that is another problem."""
    compact = {"formulation": "compact", "backend": "highs"}
    found = [
        row(**compact, seconds=3.0),
        row(**compact, seconds=1.0),
        row(**compact, seconds=9.0, gap=0.5),
        row(formulation="paper", backend="highs", model_gap=0.5),
    ]
    (panel,) = panels("solvers", found)
    assert panel.lines == (("compact, highs", ((1.0, 1.0), (3.0, 2.0))), ("paper, highs", ()))


@pytest.mark.slow
def test_maps_show_the_schedule_of_each_cell(tmp_path):
    """A map for each schedule, with cells as the relations have them; without one there is none."""
    graph = load_model("paper/linear")
    plain = checkpoint_all(graph)
    again = replace(plain, R=tuple(sorted((*plain.R, (26, 0)))))
    documents = {"a": plain.to_dict(), "b": again.to_dict()}
    found = [
        row(model="paper/linear", device=device, ram="50%", key=key)
        for device, key in (("paper-m0", "a"), ("paper-m4", "b"), ("jetson-tx2", "none"))
    ]
    first, second = panels("figure2", found, documents.get)
    assert isinstance(first, Map)
    assert isinstance(second, Map)
    assert first.title == "paper/linear, paper-m0, 50%\n0 recomputations, 0 page-outs, 0 page-ins"
    assert first.grid == stage_map(graph, plain)
    kinds = {(cell.row, cell.column): cell.kind for cell in second.grid.cells}
    assert (kinds[26, 0], kinds[26, 26]) == (Kind.RECOMPUTED, Kind.COMPUTED)
    assert digest([first]) != digest([second])
    pytest.importorskip("matplotlib")
    one, two = tmp_path / "one.svg", tmp_path / "two.svg"
    for path in (one, two):
        draw(path, [first, second])
    assert one.read_bytes() == two.read_bytes()
    assert f"data {digest([first, second])}".encode() in one.read_bytes()
    assert b"recomputed" in one.read_bytes()


def _panel(scale, *heights):
    points = tuple((float(k), height) for k, height in enumerate(heights, start=1))
    lines = (("optimal", points), ("dtr", points), ("none", ()))
    return Panel(title=scale, x_name="x", y_name="y", lines=lines, scale=scale)


def test_picture_is_reproducible_and_says_what_it_shows(tmp_path):
    """Zero overheads, empty lines and panels can be drawn; the file bears the digest."""
    pytest.importorskip("matplotlib")
    shown = [
        _panel("overhead", 0.0, 0.5),
        _panel("overhead"),
        _panel("time", 1.0, 2.0),
    ]
    one, two, three = (tmp_path / name for name in ("one.svg", "two.svg", "three.png"))
    for path in (one, two, three):
        draw(path, shown)
    assert one.read_bytes() == two.read_bytes()
    assert b"no schedule" in one.read_bytes()
    for path in (one, three):
        assert f"data {digest(shown)}".encode() in path.read_bytes()
    assert digest(shown) != digest(shown[:1])


def test_axes_of_overheads_are_in_percent(tmp_path):
    """Small overheads are written out, with their unit, and no powers of ten are left."""
    pytest.importorskip("matplotlib")
    path = tmp_path / "one.svg"
    draw(path, [_panel("overhead", 0.06, 0.45)])
    text = path.read_text()
    assert ">0.1 %<" in text
    assert "mathdefault" not in text


@given(st.floats(1e-9, 1e9), st.floats(1, 1e6))
def test_ticks_are_few_round_and_cover_what_is_shown(least, ratio):
    """Ticks ascend, are at most `TICKS`, have one digit, and leave little outside."""
    ticks = round_ticks(least, least * ratio)
    assert 1 <= len(ticks) <= TICKS
    assert ticks == sorted(set(ticks))
    assert all(f"{tick:.0e}" == f"{tick:.9e}".replace(".000000000", "") for tick in ticks)
    assert ticks[0] <= least * (1 + 1e-9)
