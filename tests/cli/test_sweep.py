"""``poetmodel sweep`` and ``bench`` on the command line."""

import json
import signal
import subprocess
import sys
import time
import zlib
from pathlib import Path
from types import SimpleNamespace

import pytest

import poetmodel as pm
from kit.commands import invoke, invoke_refused
from poetmodel import sweeps
from poetmodel.cli import instances
from poetmodel.sweeps import figures
from poetmodel.sweeps.figures import FIGURES, Figure, FigureGrid
from poetmodel.sweeps.instances import BestResults, Instance
from poetmodel.sweeps.measurement import failure_record, measure_run

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
        told(invoke_refused("sweep", *arguments.split(), *ARGUMENTS, "--out", out), arguments)
    assert not out.exists()


@pytest.mark.slow
def test_own_constraints_hold_for_every_run():
    """User-defined constraints identify a run; a method that breaks one does not apply."""
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
    """After a kill or Ctrl-C, completed cells stay as they are, and the rest is run.

    No process of the ended sweep survives: each can write to its stderr, which is read to the
    end.
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


@pytest.mark.slow
def test_sweeps_of_one_folder_share_the_work():
    """Two at the same time: each cell is solved once, and both end with all of them."""
    arguments = ["sweep", "mlp", "resnet18-cifar", "--devices", "rpi4b", "--quiet", "--json"]
    arguments += ["--ram", "75%,80%,85%,90%", "--methods", "swap-advisor,dtr", "--cold"]
    command = [sys.executable, "-m", "poetmodel", *arguments, "--out", str(Path("sweep"))]
    both = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    ended = [process.communicate() for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert [errors for _, errors in ended] == ["", ""]  # no semaphores are left, either
    first, second = (json.loads(output)["cells"] for output, _ in ended)
    assert first == second
    lines = (Path("sweep") / "cells.jsonl").read_text().splitlines()
    keys = [json.loads(line)["key"] for line in lines]
    assert len(keys) == len(set(keys)) == len(first) == 16


# -- bench ---------------------------------------------------------------------------------------
SMALL = Figure(
    name="small",
    title="A small figure",
    paper="It says so.",
    grids=(
        FigureGrid(
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
    """Measure runs in this process, without records."""
    folder.mkdir(exist_ok=True)
    return [measure_run(run.to_dict()) for run in runs]


@pytest.fixture(autouse=True)
def _small_figure(monkeypatch):
    """Register a figure whose runs take no time."""
    known = figures.find_figure
    monkeypatch.setattr(
        figures, "find_figure", lambda name: SMALL if name == "small" else known(name)
    )


@pytest.mark.slow
def test_bench_writes_records_table_and_picture():
    """A quick run, then the whole one, without repetitions."""
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
    """Records and table are written, and a note states how to install matplotlib."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(sweeps, "sweep", here)
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
    monkeypatch.setattr(sweeps, "sweep", here)
    done = invoke(
        "bench", "small", "--quick", "--time-limit", "2500ms", "--out", tmp_path, "--json"
    )
    assert {cell["time_limit_s"] for cell in done.json["cells"]} == {2.5}
    monkeypatch.setattr(
        sweeps,
        "sweep",
        lambda cells, *_, **__: [failure_record(cell, "it broke") for cell in cells],
    )
    done = invoke("bench", "small", "--quick", "--out", tmp_path, "--quiet", status=1)
    assert "2 of 2 runs failed" in done.err
    assert "it broke" in done.err


def test_help_and_page_name_every_figure(monkeypatch):
    """The help lists the available studies."""
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


# -- the instance library --------------------------------------------------------------------------
@pytest.mark.slow
def test_library_of_all_problems_is_written_and_checked():
    """Every problem has files and results that agree; a schedule of our own is as good as known.

    Packed, the library is small enough to be published; MPS files are of ten graphs or more.
    """
    done = invoke("bench", "instances", "library", "--json", status=0)
    lines = {line["name"]: line for line in done.json["instances"]}
    assert len(lines) == len(done.json["instances"]) > 700
    files = [path for path in Path("library").rglob("*") if path.is_file()]
    assert sum(len(zlib.compress(path.read_bytes(), 1)) for path in files) < 100_000_000
    assert len({line["graph"] for line in lines.values() if line["mps"]}) >= 10
    for line in lines.values():
        best = line["best"]
        assert all(Path("library", line[key]).is_file() for key in ("graph", "costs"))
        assert line["problem"]["ram_budget_bytes"] >= line["min_ram_bytes"]
        assert line["nodes"] >= 60 or line["mps"] is not None
        if best["overhead"] is not None:
            assert best["commit"]
            assert not best["infeasible"]
            assert best["bound"] <= best["overhead"] * (1 + 1e-9)
    name = "resnet18-cifar-nrf52840-80"
    budget, device = ("--ram", "80%"), ("--device", "nrf52840")
    out = Path("solutions") / f"{name}.schedule.json"
    out.parent.mkdir()
    invoke("solve", "resnet18-cifar", *device, *budget, "--out", out, status=0)
    (found,) = invoke("bench", "check", "library", "solutions", "--json", status=0).json[
        "solutions"
    ]
    assert (found["name"], found["finding"]) == (name, "equal")


@pytest.fixture
def _small_library(monkeypatch):
    """Let the library have one problem: a single pass in all RAM."""
    graph = pm.zoo.mlp()
    costs = pm.Costs.estimate(graph, pm.Device.load("rpi4b"))
    problem = pm.Problem(graph, costs, ram="75%")
    best = BestResults(overhead=1e-9, method="optimal", commit="abc", bound=1e-9)
    instance = Instance(name="mlp-75", kind="zoo", problem=problem, best=best)
    registry = SimpleNamespace(instances=lambda: [instance], MOCCASIN="Left out: some.")
    monkeypatch.setattr(instances, "_import_registry", lambda: registry)


@pytest.mark.usefixtures("_small_library")
def test_instances_and_solutions_are_tables(told):
    """The written tables by kind; each solution beside the best one; status 3 if one is invalid."""
    out = Path("solutions")
    out.mkdir()
    written = invoke("bench", "instances", "library", status=0)
    schedule = out / "mlp-75.schedule.json"
    invoke("solve", "mlp", "--device", "rpi4b", "--ram", "75%", "--out", schedule, status=0)
    checked = invoke("bench", "check", "library", out, status=0)
    schedule.unlink()
    count = len(pm.zoo.mlp().nodes)
    (out / "mlp-75.order.json").write_text(json.dumps(list(range(count))))
    refused_one = invoke("bench", "check", "library", out, status=3)
    told(written.out, "instances")
    told(checked.out, "check")
    told(refused_one.err, "not valid")


def test_folders_of_bench_are_counted(told):
    """Each name has its own number of folders, and --mps belongs to one of them."""
    for arguments in (
        ("instances",),
        ("check", "one"),
        ("figure2", "one"),
        ("figure2", "--mps", "a"),
        ("figure9",),
    ):
        told(invoke_refused("bench", *arguments), " ".join(arguments))


def test_library_needs_a_checkout(monkeypatch, told):
    """An installed package has no records: the message states where they are."""
    monkeypatch.setattr(instances, "files", lambda _: "/nowhere/site-packages/poetmodel")
    told(invoke_refused("bench", "instances", "library"))


def test_pareto_front_is_rows_and_a_figure():
    """The front is shown, in JSON, in a CSV file, and drawn."""
    pytest.importorskip("matplotlib")
    done = invoke("sweep", "mlp", *ARGUMENTS, "--out", "out", "--pareto", status=0)
    assert "Pareto front" in done.out
    front = invoke("sweep", "mlp", *ARGUMENTS, "--out", "out", "--pareto", "--json").json["pareto"]
    assert front
    assert all(isinstance(row["proven"], bool) for row in front)
    assert (Path("out") / "pareto.csv").read_text().count("\n") == len(front) + 1
    assert (Path("out") / "pareto.svg").exists()
    merged = invoke("merge", "out", "--out", "all", "--pareto", "--json", status=0).json["pareto"]
    assert merged == front


# -- parts of a sweep ------------------------------------------------------------------------------
def test_shards_in_folders_of_their_own_are_merged():
    """Every run is in one of the shards; merged, they are the table of the whole sweep."""
    whole = invoke("sweep", "mlp", *ARGUMENTS, "--out", "whole", "--json", status=0).json["cells"]
    for index in (1, 2):
        invoke("sweep", "mlp", *ARGUMENTS, "--shard", f"{index}/2", "--out", f"{index}", status=0)
    merged = invoke("merge", "1", "2", "--out", "all", "--json", status=0).json["cells"]
    names = ("model", "device", "ram", "method", "status", "energy_j")
    rows = [
        sorted(tuple(row[name] for name in names) for row in table) for table in (whole, merged)
    ]
    assert rows[0] == rows[1]
    assert Path("all/cells.csv").exists()
    again = invoke("merge", "1", "2", "--out", "all", "--json", status=0).json["cells"]
    assert again == merged


def test_wrong_shard_or_folder_is_named():
    """A shard that is none, and a folder without a sweep, are refused before anything is made."""
    for shard in ("0/2", "3/2", "2", "a/b"):
        refused = invoke("sweep", "mlp", *ARGUMENTS, "--shard", shard, "--out", "out")
        assert (refused.status, refused.err.count("\n")) == (2, 1)
        assert "--shard" in refused.err
    refused = invoke("merge", "nowhere", "--out", "out")
    assert (refused.status, "nowhere" in refused.err) == (2, True)
    assert not Path("out").exists()
