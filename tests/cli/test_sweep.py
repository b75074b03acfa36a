"""``poetmodel sweep`` and ``bench`` on the command line."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kit.commands import invoke, refused
from poetmodel import bench
from poetmodel.bench import figures
from poetmodel.bench.figures import FIGURES, Figure, Part
from poetmodel.bench.measurement import failure, measure

ARGUMENTS = ("--devices", "rpi4b", "--ram", "100%,75%", "--methods", "lru-paging,checkpoint-all")


def test_sweep_writes_and_shows_every_cell():
    """Records, a CSV file and a picture; progress on stderr, the table on stdout."""
    pytest.importorskip("matplotlib")
    out = Path("sweep")
    done = invoke("sweep", "mlp", *ARGUMENTS, "--out", out, "--plot", Path("p.svg"))
    assert done.status == 0
    assert "0 of 4 runs done" in done.err
    assert "4 of 4 runs done, 0 failed" in done.err
    assert "Runs" in done.out
    lines = (out / "cells.jsonl").read_text().splitlines()
    assert [json.loads(line)["status"] for line in lines].count("not-applicable") == 1
    assert len((out / "cells.csv").read_text().splitlines()) == 5
    assert (Path("p.svg")).exists()
    again = invoke("sweep", "mlp", *ARGUMENTS, "--out", out, "--json", status=0)
    assert again.err == ""
    assert [row["ram"] for row in again.json["cells"]] == ["75%", "100%"] * 2
    assert (out / "cells.jsonl").read_text().splitlines() == lines


def test_batch_sizes_are_swept():
    """Every batch size has its cells, named in the table, and is a problem of its own."""
    arguments = ("--batch", "1,8", "--devices", "rpi4b", "--ram", "80%", "--methods", "lru-paging")
    done = invoke("sweep", "mlp", *arguments, "--out", Path("sweep"), "--json")
    assert done.status == 0, done.err
    assert [row["model"] for row in done.json["cells"]] == ["mlp, batch 1", "mlp, batch 8"]
    one, eight = (row["ram_budget_bytes"] for row in done.json["cells"])
    assert eight > 7 * one


def test_faults_are_said_before_anything_runs(told):
    """Unknown names, endings and empty lists end with status 2 and leave no folder."""
    out = Path("sweep")
    for arguments in (
        "nope",
        "mlp --backends cplex",
        "mlp --deadline ,",
        "mlp --plot x.txt",
        "mlp --batch 8,x",
        "mlp bert-base --image 20",
    ):
        told(refused("sweep", *arguments.split(), *ARGUMENTS, "--out", out), arguments)
    assert not out.exists()


@pytest.mark.slow
def test_own_constraints_hold_for_every_run():
    """They are part of what identifies a run; a method that breaks one is not applicable."""
    rows, out = Path("rows.toml"), Path("sweep")
    rows.write_text('[[constraint]]\nname = "wear"\nsum = {bytes_written = 1}\nat_most = "1kB"\n')
    command = ("sweep", "mlp", *ARGUMENTS, "--out", out, "--json")
    free = {row["key"]: row for row in invoke(*command).json["cells"]}
    done = invoke(*command, "--constraints", rows, status=0)
    cells = {(row["method"], row["ram"]): row for row in done.json["cells"]}
    assert not free.keys() & {row["key"] for row in cells.values()}
    assert cells["lru-paging", "75%"]["status"] == "not-applicable"
    assert "constraint 'wear'" in cells["lru-paging", "75%"]["reason"]
    assert cells["lru-paging", "100%"]["status"] == "optimal"
    files = [json.loads(path.read_text()) for path in (out / "schedules").iterdir()]
    assert any("constraints" in file["problem"] for file in files)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[[constraint]]\nsum = {byte_written = 1}\nat_most = 1", "did you mean bytes_written?"),
        ("[objective]\nsum = {energy_j = 1}", "objective: a sweep minimizes energy; leave it out"),
    ],
)
def test_faults_of_constraints_are_said_before_anything_runs(text, sentence):
    """With the file that they are in, once for all runs."""
    rows = Path("rows.toml")
    rows.write_text(text)
    command = ("sweep", "mlp", *ARGUMENTS, "--out", Path("sweep"), "--constraints", rows)
    ended = invoke(*command, status=2)
    (line,) = ended.err.splitlines()
    assert line.startswith(f"error: {rows}: ")
    assert line.endswith(sentence)
    assert not (Path("sweep")).exists()


@pytest.mark.slow
@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGINT])
def test_ended_sweep_is_resumed(blow):
    """After a kill or Ctrl-C the finished cells stay as they are and the rest is run.

    No process of the ended sweep lives on: each can write to its stderr, which is read to the end.
    """
    out = Path("sweep")
    arguments = ["sweep", "resnet18-cifar", "--devices", "rpi4b"]
    arguments += ["--ram", "72%,74%,76%,78%,80%,82%,84%"]
    arguments += ["--methods", "swap-advisor,dtr", "--out", str(out)]
    command = [sys.executable, "-m", "poetmodel", *arguments]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL)
    records = out / "cells.jsonl"
    until_s = time.monotonic() + 60
    while time.monotonic() < until_s and process.poll() is None:
        if records.exists() and records.read_bytes().count(b"\n") >= 2:
            break
        time.sleep(0.01)
    process.send_signal(blow)
    _, words = process.communicate(timeout=60)  # ends when all who can write to it have ended
    assert b"Traceback" not in words
    assert b"Warning" not in words  # as of semaphores that are left behind
    assert process.returncode == (130 if blow == signal.SIGINT else -signal.SIGKILL)
    before = records.read_bytes().rpartition(b"\n")[0]
    done = invoke(*arguments, "--json", status=0)
    assert len(done.json["cells"]) == 14
    after = records.read_bytes()
    assert after.startswith(before)
    assert after.count(b"\n") == 14


# -- bench ---------------------------------------------------------------------------------------
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
    done = invoke(
        "bench", "small", "--quick", "--time-limit", "2500ms", "--out", tmp_path, "--json"
    )
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
