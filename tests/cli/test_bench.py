"""``poetmodel bench`` on the command line."""

import sys
from pathlib import Path

import pytest

from kit.commands import invoke
from poetmodel import bench
from poetmodel.bench import figures
from poetmodel.bench.figures import FIGURES, Figure, Part
from poetmodel.bench.measurement import failure, measure

SMALL = Figure(
    name="small",
    title="A small figure",
    paper="It says so.",
    parts=(
        Part(
            models=("mlp",),
            devices=("rpi4b",),
            ram=("75%", "100%"),
            quick_ram=("100%",),
            methods=("lru-paging", "checkpoint-all"),
        ),
    ),
    limit_s=5.0,
    quick_limit_s=5.0,
)


def here(runs, folder, **_):
    """Measure runs in this process, and record nothing."""
    folder.mkdir(exist_ok=True)
    return [measure(run.to_dict()) for run in runs]


@pytest.fixture(autouse=True)
def _small_figure(monkeypatch):
    """Let there be a figure that takes no time."""
    known = figures.figure
    monkeypatch.setattr(figures, "figure", lambda name: SMALL if name == "small" else known(name))


@pytest.mark.slow
def test_bench_writes_records_table_and_picture():
    """A quick run, then the whole one: what was done is not done again."""
    pytest.importorskip("matplotlib")
    out = Path("runs") / "small"
    done = invoke("bench", "small", "--quick", "--out", out, status=0)
    assert "2 of 2 runs done, 0 failed" in done.err
    assert "lru-paging" in done.out
    assert "The paper: It says so." in done.out
    first = (out / "cells.jsonl").read_bytes()
    whole = invoke("bench", "small", "--out", out, "--json", status=0)
    assert whole.err == ""
    assert len(whole.json["cells"]) == 4
    assert whole.json["tables"][0]["heads"] == ["method", "75%", "100%"]
    assert whole.json["tables"][0]["rows"][1][1:] == ["-", "0 %"]
    assert whole.json["notes"] == []
    assert [(out / name).exists() for name in ("small.svg", "small.png")] == [True, True]
    assert len((out / "cells.csv").read_text().splitlines()) == 5
    assert (out / "cells.jsonl").read_bytes().startswith(first)


def test_missing_matplotlib_leaves_the_picture_out(tmp_path, monkeypatch):
    """Records and table are there, and a note says what brings the picture."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(bench, "sweep", here)
    done = invoke("bench", "small", "--quick", "--out", tmp_path, status=0)
    assert "no picture is drawn" in done.err
    assert "poetmodel[report]" in done.err
    assert not (tmp_path / "small.svg").exists()
    assert (
        "no picture"
        in invoke("bench", "small", "--quick", "--out", tmp_path, "--json").json["notes"][0]
    )


def test_time_limit_is_passed_on(tmp_path, monkeypatch):
    """The limit of the command line replaces the figure's; a cell without an answer: status 1."""
    monkeypatch.setattr(bench, "sweep", here)
    done = invoke("bench", "small", "--quick", "--time-limit", "2.5", "--out", tmp_path, "--json")
    assert {cell["time_limit_s"] for cell in done.json["cells"]} == {2.5}
    monkeypatch.setattr(
        bench, "sweep", lambda cells, *_, **__: [failure(cell, "it broke") for cell in cells]
    )
    done = invoke("bench", "small", "--quick", "--out", tmp_path, "--quiet", status=1)
    assert "2 of 2 runs failed" in done.err
    assert "it broke" in done.err


def test_help_and_page_name_every_figure(monkeypatch):
    """What can be asked for is in the help."""
    monkeypatch.setenv("COLUMNS", "200")
    text = invoke("bench", "--help").out
    assert [name for name in FIGURES if name not in text] == []


def test_unknown_names_and_limits_are_refused():
    """They end with status 2 before a folder is made."""
    out = Path("x")
    for arguments in (
        ("figure9",),
        ("figure5", "--time-limit", "0"),
        ("figure5", "--time-limit", "nan"),
        ("figure5", "--workers", "0"),
    ):
        assert invoke("bench", *arguments, "--out", out).status == 2
    assert not out.exists()
