"""``poetmodel report`` on the command line."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kit.commands import BOARD_FILE, CHAIN, Outcome, invoke, write_solved
from kit.pages import read_page
from kit.report_steps import certificate, step_values
from kit.worked import skip_problem
from poetmodel.report.presenter import look_up

if TYPE_CHECKING:
    from kit.messages import Told

pytest.importorskip("jinja2")
pytest.importorskip("plotly")


SCHEDULE = Path("chain.schedule.json")
"""File of a schedule of `chain` that pages one tensor, in 304 B."""


@pytest.fixture(autouse=True)
def _schedule() -> None:
    """Write it."""
    write_solved(SCHEDULE.name, "--ram", "304B", "--no-recompute", "--deadline", "7.5s")


def report(graph: Path | str, out: Path, *arguments: object) -> Outcome:
    """Run the command."""
    return invoke("report", *arguments, "--graph", graph, "--out", out)


def test_page_and_json_agree(told: Told) -> None:
    """``--json`` prints every figure of the page, alone; the file is told on stderr."""
    out = Path("r.html")
    done = report(CHAIN, out, SCHEDULE, "--json")
    assert done.status == 0, done.err
    told(done.err)
    assert (done.json["out"], done.json["size_bytes"]) == (str(out), out.stat().st_size)
    entry = done.json["schedules"][0]
    page = read_page(out.read_text(encoding="utf-8"))
    assert page.values
    for (_, key), value in page.values.items():
        assert look_up(entry, key) == value
    stated = json.loads(SCHEDULE.read_text())
    for key in ("energy_j", "bound_j", "overhead_j", "peak_ram_bytes", "makespan_s", "gap"):
        assert entry[key] == pytest.approx(stated[key])
    assert entry["device"]["name"] == "Test board"
    assert entry["binding"]["node"] == "g2"
    assert entry["versions"]["poetmodel"]


def test_commands_reproduce_the_schedule() -> None:
    """What the page says to type makes the same file again, and judges it."""
    done = report(CHAIN, Path("r.html"), SCHEDULE, "--json")
    first = json.loads(SCHEDULE.read_text())
    SCHEDULE.unlink()
    solve, verify = done.json["schedules"][0]["commands"]
    assert invoke(*shlex.split(solve)[1:], "--quiet").status == 0
    again = json.loads(SCHEDULE.read_text())
    for document in (first, again):
        for key in ("build_s", "solve_s", "history"):
            document.pop(key)
    assert again == first
    assert invoke(*shlex.split(verify)[1:]).status == 0


def test_schedules_stand_side_by_side(told: Told) -> None:
    """Two files, two columns, each with its own figures; the table has the three answers."""
    other = Path("all.schedule.json")
    made = invoke(*("solve", "--graph", CHAIN, "--device", BOARD_FILE, "--quiet", "--out", other))
    assert made.status == 0
    out = Path("r.html")
    done = report(CHAIN, out, SCHEDULE, other)
    assert done.status == 0
    told(done.out)
    page = read_page(out.read_text(encoding="utf-8"))
    assert page.values["A", "peak_ram_bytes"] == 304
    assert page.values["B", "peak_ram_bytes"] == 404
    assert {"map-A", "map-B", "time-A", "time-B"} <= set(page.ids)


def test_compiled_steps_bring_their_graph(told: Told) -> None:
    """What a PyTorch step reported, as JSON, needs no --graph; schedules of it stand beside it."""
    file, out, schedule = Path("step.json"), Path("r.html"), Path("s.json")
    values = step_values(skip_problem(), certificate=certificate(reasons=["the core was busy"]))
    file.write_text(json.dumps(values))
    done = invoke("report", file, "--out", out)
    assert done.status == 0, done.err
    told(done.out)
    told(done.err, "then")
    assert read_page(out.read_text(encoding="utf-8")).values["A", "step.compile_s"] == 1.5
    schedule.write_text(json.dumps(values["result"]))
    both = invoke("report", schedule, file, "--out", out, "--json")
    assert both.status == 0, both.err
    first, second = both.json["schedules"]
    assert first["step"] is None
    assert second["step"]["certificate"]["heap_peak_bytes"] == 90
    assert first["commands"][-1].endswith("--graph skip")


def test_a_step_of_another_graph_is_refused(told: Told) -> None:
    """Status 2, the file is named, and nothing is written."""
    file, out = Path("step.json"), Path("r.html")
    values = step_values(skip_problem())
    file.write_text(json.dumps(values))
    other = report(CHAIN, out, file)
    assert other.status == 2
    told(other.err)
    file.write_text(json.dumps(values | {"budget_bytes": None}))
    broken = invoke("report", file, "--out", out)
    assert broken.status == 2
    told(broken.err, "broken")
    assert not out.exists()


def test_sweep_folder_gives_the_front() -> None:
    """Cells and front come from the folder; the schedule's own point is among them."""
    folder, schedule = Path("sweep"), Path("mlp.schedule.json")
    swept = invoke(
        *("sweep", "mlp", "--devices", "rpi4b", "--ram", "75%,100%", "--out", folder, "--quiet")
    )
    assert swept.status == 0
    made = invoke(
        *("solve", "mlp", "--device", "rpi4b", "--ram", "75%", "--quiet", "--out", schedule)
    )
    assert made.status == 0
    out = Path("r.html")
    done = report("mlp", out, schedule, "--sweep", folder, "--json")
    assert done.status == 0, done.err
    assert len(done.json["sweep"]["cells"]) == 2
    assert done.json["sweep"]["pareto"]
    page = read_page(out.read_text(encoding="utf-8"))
    charts = json.loads(page.scripts["charts"])["charts"]
    assert {chart["type"] for chart in charts} >= {"gauge", "timeline", "map", "front"}
    assert [here["name"] for here in charts[-1]["here"]] == ["A"]


def test_rejected_schedule_is_reported() -> None:
    """A schedule that cannot run has a page that says why."""
    document = json.loads(SCHEDULE.read_text())
    SCHEDULE.write_text(json.dumps(document | {"S_RAM": []}))
    out = Path("r.html")
    done = report(CHAIN, out, SCHEDULE, "--json")
    assert done.status == 0
    assert done.json["schedules"][0]["valid"] is False
    assert "Rejected" in read_page(out.read_text(encoding="utf-8")).text


def test_file_without_problem_or_device(told: Told) -> None:
    """Bare relations are shown with their peak; what is unknown is said."""
    document = json.loads(SCHEDULE.read_text())
    bare = {key: document[key] for key in document if key not in ("problem", "device", "objective")}
    SCHEDULE.write_text(json.dumps(bare))
    done = report(CHAIN, Path("r.html"), SCHEDULE, "--json")
    assert done.status == 0, done.err
    entry = done.json["schedules"][0]
    assert (entry["peak_ram_bytes"], entry["energy_j"], entry["budget_bytes"]) == (304, None, None)
    told(done.err)


def test_bad_input_is_told(told: Told) -> None:
    """No graph, another graph, no sweep, an input as target: status 2, and nothing is written."""
    out = Path("r.html")
    told(invoke("report", SCHEDULE, "--out", out).err)
    other = report("mlp", out, SCHEDULE)
    assert other.status == 2
    told(other.err, "other")
    missing = report(CHAIN, out, SCHEDULE, "--sweep", Path("none"))
    assert missing.status == 2
    told(missing.err, "missing")
    assert report(CHAIN, SCHEDULE, SCHEDULE).status == 2
    assert report(CHAIN, out, *[SCHEDULE] * 9).status == 2
    assert report(CHAIN, out, Path("none.json")).status == 2
    assert not out.exists()
    assert not (Path("none")).exists()


def test_missing_extra_ends_with_a_sentence(monkeypatch: pytest.MonkeyPatch, told: Told) -> None:
    """Status 2, and the name of the extra."""
    monkeypatch.setattr("poetmodel.report.drawing.find_spec", lambda _: None)
    done = report(CHAIN, Path("r.html"), SCHEDULE)
    assert done.status == 2
    told(done.err)


@pytest.mark.slow
def test_large_network_stays_small() -> None:
    """The page of bert-base, 507 nodes with all tensors kept, is far below 6 MB."""
    schedule, out = Path("bert.schedule.json"), Path("bert.html")
    made = invoke(
        *("solve", "bert-base", "--device", "rpi4b", "--method", "checkpoint-all", "--quiet"),
        *("--out", schedule),
    )
    assert made.status == 0, made.err
    done = report("bert-base", out, schedule, "--json")
    assert done.status == 0, done.err
    assert done.json["graph"]["nodes"] == 507
    assert done.json["size_bytes"] < 4_000_000
