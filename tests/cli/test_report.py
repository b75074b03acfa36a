"""``poetmodel report`` on the command line."""

import json
from pathlib import Path

import pytest

from kit.commands import BOARD_FILE, CHAIN, invoke, write_solved
from kit.pages import read_page
from poetmodel.report.presenter import value_at_path

pytest.importorskip("jinja2")
pytest.importorskip("plotly")


SCHEDULE = Path("chain.schedule.json")
"""File of a schedule of `chain` that pages one tensor, in 304 B."""


@pytest.fixture(autouse=True)
def _schedule():
    """Write it."""
    write_solved(SCHEDULE.name, "--ram", "304B", "--no-recompute", "--deadline", "7.5s")


def report(graph, out, *arguments, **due):
    """Run the command."""
    return invoke("report", *arguments, "--graph", graph, "--out", out, **due)


def test_page_and_json_agree(told):
    """``--json`` prints each number of the page, and only these; stderr names the file."""
    out = Path("r.html")
    done = report(CHAIN, out, SCHEDULE, "--json", status=0)
    told(done.err)
    assert (done.json["out"], done.json["size_bytes"]) == (str(out), out.stat().st_size)
    entry = done.json["schedules"][0]
    page = read_page(out.read_text(encoding="utf-8"))
    assert page.values
    for (_, key), value in page.values.items():
        assert value_at_path(entry, key) == value
    stated = json.loads(SCHEDULE.read_text())
    for key in ("energy_j", "bound_j", "overhead_j", "peak_ram_bytes", "makespan_s", "gap"):
        assert entry[key] == pytest.approx(stated[key])
    assert entry["device"]["name"] == "Test board"
    assert entry["binding"]["node"] == "g2"
    assert entry["versions"]["poetmodel"]
    SCHEDULE.write_text(json.dumps(stated | {"S_RAM": []}))
    rejected = report(CHAIN, out, SCHEDULE, "--json")
    assert (rejected.status, rejected.json["schedules"][0]["valid"]) == (0, False)
    assert "Rejected" in read_page(out.read_text(encoding="utf-8")).text


def test_schedules_stand_side_by_side():
    """Two files, two columns, each with its own figures; the table has the three answers."""
    other = Path("all.schedule.json")
    made = invoke(*("solve", "--graph", CHAIN, "--device", BOARD_FILE, "--quiet", "--out", other))
    assert made.status == 0
    out = Path("r.html")
    done = report(CHAIN, out, SCHEDULE, other, status=0)
    assert [f"{letter}: What does it cost?" in done.out for letter in "ABC"] == [True, True, False]
    page = read_page(out.read_text(encoding="utf-8"))
    assert page.values["A", "peak_ram_bytes"] == 304
    assert page.values["B", "peak_ram_bytes"] == 404
    assert {"map-A", "map-B", "time-A", "time-B"} <= set(page.ids)


def test_bad_input_is_told(told):
    """No graph, another graph, an input as output: status 2, and nothing is written."""
    out = Path("r.html")
    told(invoke("report", SCHEDULE, "--out", out).err)
    told(report("mlp", out, SCHEDULE, status=2).err, "other")
    page = Path("schedule.html")
    page.write_bytes(SCHEDULE.read_bytes())
    assert report(CHAIN, page, page).status == 2
    assert report(CHAIN, out, *[SCHEDULE] * 9).status == 2
    picture = Path("r.pdf")
    told(report(CHAIN, picture, SCHEDULE, status=2).err, "suffix")
    assert not out.exists()
    assert not picture.exists()


def test_missing_extra_ends_with_a_sentence(monkeypatch, told):
    """Status 2, and the name of the extra."""
    monkeypatch.setattr("poetmodel.report.drawing.find_spec", lambda _: None)
    told(report(CHAIN, Path("r.html"), SCHEDULE, status=2).err)


@pytest.mark.slow
def test_large_network_stays_small():
    """The page of bert-base, 507 nodes with all tensors kept, is far below 6 MB."""
    schedule, out = Path("bert.schedule.json"), Path("bert.html")
    made = invoke(
        *("solve", "bert-base", "--device", "rpi4b", "--method", "checkpoint-all", "--quiet"),
        *("--out", schedule),
    )
    assert made.status == 0, made.err
    done = report("bert-base", out, schedule, "--json", status=0)
    assert done.json["graph"]["nodes"] == 507
    assert done.json["size_bytes"] < 4_000_000
