"""``trace``, ``profile`` and ``choose``: from a user's function to files."""

import csv
import json
from pathlib import Path

import pytest

from kit.commands import BOARD_FILE, CHAIN, invoke, invoke_refused
from kit.rotation import mark_seeds_except
from poetmodel.device import Costs, Device
from poetmodel.graph import Graph
from poetmodel.problem import Problem
from poetmodel.schedule.document import load_document

SOURCE = """\
import torch
from torch import nn

print("words of the user")

def step():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    return model, nn.functional.cross_entropy, (torch.randn(2, 4), torch.tensor([0, 2]))

class Branch(nn.Linear):
    def forward(self, x):
        return super().forward(x) if self.weight.sum() > 0 else x

def branch():
    return Branch(4, 4), nn.functional.mse_loss, (torch.randn(2, 4), torch.randn(2, 4))
"""


@pytest.fixture
def user(tmp_path, monkeypatch):
    """Return the folder of a user's file, which is the current one."""
    pytest.importorskip("torch")
    folder = tmp_path / "user"
    folder.mkdir()
    (folder / "user_train.py").write_text(SOURCE)
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.torch
def test_trace_writes_graph_and_profile(user):
    """Both files fit each other, and stdout has one JSON object only."""
    outcome = invoke(
        "trace", "user_train.py:step", "--name", "net", "--out", "g.json",
        "--profile-out", "p.csv", "--repeats", "1", "--json",
    )  # fmt: skip
    assert outcome.status == 0, outcome.err
    graph = Graph.load(user / "g.json")
    assert graph.name == outcome.json["name"] == "net"
    assert graph.sha256 == outcome.json["sha256"]
    assert outcome.json["held_bytes"] == 4
    problem = Problem(graph, Costs.load(user / "p.csv"), ram="50%")
    assert outcome.json["costs"]["compute_time_s"] == pytest.approx(problem.pass_time_s)
    assert "words of the user" in outcome.err
    assert "wrote g.json" in outcome.err
    assert "wrote p.csv" in outcome.err


@pytest.mark.torch
@pytest.mark.parametrize(("name", "moments"), [("momentum", 1), ("adamw", 3)])
def test_trace_with_an_optimizer(user, name, moments):
    """The graph has the state of PyTorch's optimizer, and one update for each parameter."""
    outcome = invoke(
        "trace", "user_train.py:step", "--optimizer", name, "--out", "g.json", "--device", "rpi4b"
    )  # fmt: skip
    assert outcome.status == 0, outcome.err
    graph = Graph.load(user / "g.json")
    assert graph.version == 2
    assert len(graph.state_tensors) == 4 * (1 + moments)
    assert len([node for node in graph.nodes if node.phase == "update"]) == 4
    Costs.load(user / "g.profile.csv").table(graph)


@pytest.mark.torch
def test_trace_writes_the_profile_beside_the_graph(user, told):
    """One option writes both files, and `solve` reads them."""
    outcome = invoke("trace", "user_train.py:step", "--out", "net.graph.json", "--repeats", "1")
    assert outcome.status == 0, outcome.err
    told(outcome.err)
    Costs.load(user / "net.profile.csv").table(Graph.load(user / "net.graph.json"))
    solved = invoke(
        "solve", "--graph", "net.graph.json", "--profile", "net.profile.csv", "--ram", "90%"
    )
    assert solved.status == 0, solved.err


@pytest.mark.torch
def test_trace_shows_tables_and_says_that_nothing_was_written(user, told):
    """Without files there are tables and a warning; unknown optimizers are refused."""
    outcome = invoke("trace", "user_train.py:step", "--device", "rpi4b", status=0)
    assert "0/addmm" in outcome.out
    assert "estimated for device rpi4b" in outcome.out
    told(outcome.err)
    assert "results of a step take 4 B until its end" in " ".join(outcome.out.split())
    assert "reduce --ram by 4 B" in " ".join(outcome.out.split())
    assert sorted(path.name for path in user.glob("*.json")) == []
    told(invoke_refused("trace", "user_train.py:step", "--optimizer", "adadelta"), "optimizer")
    assert not list(user.glob("*.json"))


@pytest.mark.torch
def test_profile_measures_what_trace_wrote(user):
    """The profile has a row for each node of the graph, and states how it was measured."""
    invoke("trace", "user_train.py:step", "--out", "g.json")
    outcome = invoke("profile", "user_train.py:step", "--out", "p.csv", "--repeats", "1")
    assert outcome.status == 0, outcome.err
    assert "at a nominal 1 W" in outcome.out
    Costs.load(user / "p.csv").table(Graph.load(user / "g.json"))


@pytest.mark.torch
@pytest.mark.parametrize(
    ("options", "power_w", "source"),
    [
        pytest.param(("--power", "2.5"), 2.5, "at 2.5 W, as stated", marks=pytest.mark.slow),
        (("--power", "20mW"), 0.02, "at 0.02 W, as stated"),
        (("--power-from", "rpi4b"), None, "the power of device rpi4b"),
        pytest.param((), 1.0, "at a nominal 1 W", marks=pytest.mark.slow),
    ],
)
def test_measured_energies_are_at_a_power(user, options, power_w, source):
    """That of a device, or a number of watts; by ``trace`` and ``profile`` alike."""
    if power_w is None:
        power_w = Device.load("rpi4b").compute.power_w
    written = ("--out", "g.json", "--profile-out", "t.csv")
    traced = invoke("trace", "user_train.py:step", *written, "--repeats", "1", *options, status=0)
    profiled = ("--out", "p.csv", "--repeats", "1", *options)
    outcome = invoke("profile", "user_train.py:step", *profiled, status=0)
    assert source in traced.out
    assert source in outcome.out
    for name in ("t.csv", "p.csv"):
        costs = list(Costs.load(user / name).compute.values())
        assert [cost.energy_j for cost in costs] == pytest.approx(
            [power_w * cost.time_s for cost in costs]
        )


def test_what_is_written_is_no_other_file_of_the_command():
    """A profile may not overwrite the graph, or the file of its device."""
    before = BOARD_FILE.read_text()
    twice = ("--out", "x.json", "--profile-out", Path.cwd() / "x.json")
    device = ("--device", BOARD_FILE, "--profile-out", BOARD_FILE)
    for files, said in ((twice, "--out already names this file"), (device, "is an input file")):
        outcome = invoke("trace", "nowhere:step", *files, status=2)
        assert said in outcome.err
    assert invoke("profile", CHAIN, "--device", BOARD_FILE, "--out", BOARD_FILE).status == 2
    assert BOARD_FILE.read_text() == before


@pytest.mark.torch
@pytest.mark.usefixtures("user")
def test_a_module_that_cannot_be_captured_is_no_traceback():
    """The error names reason, line and remedy; nothing is written."""
    outcome = invoke("trace", "user_train.py:branch", "--out", "g.json", status=2)
    assert outcome.out == ""
    last = outcome.err.splitlines()[-1]
    assert last.startswith("error: Branch: Python at ")
    assert "user_train.py:13 (return super().forward(x) if self.weight.sum() > 0 else x)" in last
    assert "torch.where" in last


def test_profile_estimates_any_graph_for_a_device():
    """With --device a graph is costed without running it, and without PyTorch."""
    out = Path("mlp.csv")
    outcome = invoke("profile", "mlp", "--device", "rpi4b", "--out", out, "--json", status=0)
    with out.open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    total = sum(float(row["compute_time_s"]) for row in rows if row["compute_time_s"])
    assert outcome.json["compute_time_s"] == pytest.approx(total)
    assert outcome.json["graph"]["name"] == "mlp"


@pytest.mark.parametrize(
    "arguments",
    [
        ("profile", "mlp"),
        ("trace", "m:f", "--out", "/nowhere/g.json"),
        ("trace", "m:f", "--out", "g.txt"),
        ("trace", "m:f", "--repeats", "0"),
        ("trace", "m:f", "--device", "rpi5b"),
        ("trace", "m:f", "--power-from", "rpi5b"),
        ("trace", "m:f", "--power", "0"),
        ("trace", "m:f", "--power", "20mA"),
        ("trace", "m:f", "--power", "2", "--power-from", "rpi4b"),
        ("trace", "m:f", "--device", "rpi4b", "--power", "2"),
        ("profile", "m:f", "--target", "qemu", "--power-from", "rpi4b"),
    ],
)
def test_bad_choices_are_refused_before_anything_runs(arguments, told):
    """Wrong combinations and files that cannot be written are found first."""
    told(invoke_refused(*arguments))


# -- choose --------------------------------------------------------------------------------------
NETWORK = """
import torch
from torch import nn

def step():
    torch.manual_seed(0)
    layers = (nn.Conv2d(1, 4, 3, 2, 1), nn.ReLU(), nn.Conv2d(4, 8, 3, 2, 1), nn.ReLU())
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(128, 16), nn.ReLU(), nn.Linear(16, 4))
    return model, nn.functional.cross_entropy, (torch.ones(1, 1, 16, 16), torch.tensor([3]))

def batch():
    torch.manual_seed(1)
    return torch.randn(3, 1, 16, 16), torch.tensor([0, 1, 2])

def wrong():
    return 3
"""
LAYERS = ("0", "2", "5", "7")
BOARD = ("--device", "nrf52840", "--no-paging", "--time-limit", "30")
WRONG = {
    "missing": "name,score\n0,1\n2,1\n5,1\n",
    "unknown": "name,score\n0,1\n2,1\n5,1\n7,1\n9,1\n",
    "negative": "name,score\n0,1\n2,1\n5,1\n7,-2\n",
    "twice": "name,score\n0,1\n2,1\n2,3\n5,1\n7,1\n",
    "no number": "name,score\n0,1\n2,1\n5,1\n7,much\n",
    "columns": "layer,score\n0,1\n2,1\n5,1\n7,1\n",
    "cells": "name,score\n0,1\n2,1\n5,1\n7\n",
    "empty": "",
    "zeros": "name,score\n0,0\n2,0\n5,0\n7,0\n",
    "nan": "name,score\n0,1\n2,1\n5,1\n7,nan\n",
    "infinite": "name,score\n0,1\n2,1\n5,1\n7,inf\n",
    "infinite sum": "name,score\n0,1e308\n2,1e308\n5,1\n7,1\n",
}
"""Files of scores with a fault each."""
NORMS = ("--scores", "gradient-norm")


@pytest.fixture(autouse=True)
def _network():
    Path("net.py").write_text(NETWORK)


def write_scores(**scores):
    """Write a file of scores: 1 for each layer, but for these."""
    lines = [f"{layer},{scores.get(f'l{layer}', 1.0)}" for layer in LAYERS]
    Path("scores.csv").write_text("name,score\n" + "\n".join(lines) + "\n")
    return "scores.csv"


def choose(*arguments):
    """Return the command for the network on the board."""
    return ("choose", "net.py:step", *BOARD, *arguments)


@pytest.mark.torch
def test_set_schedule_and_step_are_written_and_verified():
    """Files and JSON agree, the verifier accepts the schedule, and export reads the step."""
    files = ("--out", "net.schedule.json", "--step", "net.step.json")
    done = invoke(*choose("--ram", "8KiB", "--scores", write_scores(l7=2.0), *files, "--json"))
    assert done.status == 0, done.err
    found = done.json["choice"]
    assert found["status"] == "optimal"
    assert found["score"] == found["bound"] == sum(found["scores"][k] for k in found["layers"])
    assert found["gap"] == 0
    assert 0 < len(found["layers"]) < len(LAYERS)
    assert found["parameters"] == [f"{k}.{p}" for k in found["layers"] for p in ("weight", "bias")]
    written = json.loads(Path("net.schedule.json").read_text())
    assert written == {key: value for key, value in done.json.items() if key in written}
    assert load_document(Path("net.schedule.json")).schedule.resident
    invoke("verify", "net.schedule.json", "--graph", "net.step.json", status=0)
    more = ("--device", "nrf52840", "--ram", "64KiB", "--no-paging", "--out", "firmware")
    assert invoke("export", "net.step.json", *more).status == 0
    states = invoke("state", "firmware", "--json").json
    trained = {state["name"] for state in states if state["home"] == "ram"}
    assert trained == set(found["parameters"])


@pytest.mark.torch
def test_table_names_what_is_trained_and_what_is_frozen():
    """People see the set, its score, the bound and the gap above the figures of the schedule."""
    told = invoke(*choose("--ram", "100%", *NORMS)).out
    rows = {line.split("  ")[0].strip(): line for line in told.splitlines()}
    assert {"choice", "score", "proven bound", "gap", "trained", "frozen", "peak RAM"} <= set(rows)
    assert rows["trained"].split() == ["trained", "4", "layers", "0,", "2,", "5,", "7"]


@pytest.mark.torch
def test_batch_of_gives_the_gradient():
    """Scores are norms of the gradient on the batch of a function, else on the step's own."""
    whole = choose("--ram", "100%", *NORMS, "--json")
    own, other = invoke(*whole), invoke(*whole, "--batch-of", "net.py:batch")
    assert own.json["choice"]["scores"].keys() == other.json["choice"]["scores"].keys()
    assert own.json["choice"]["scores"] != other.json["choice"]["scores"]


@pytest.mark.torch
def test_nothing_can_be_trained(told):
    """Proven infeasible: status 3, and one sentence with the least RAM that a layer needs."""
    done = invoke(*choose("--ram", "512B", *NORMS, "--out", "no.schedule.json"), status=3)
    told(done.err)
    assert not Path("no.schedule.json").exists()
    least = int(done.err.split("one layer is ")[1].split(" B")[0].replace(",", ""))
    assert invoke(*choose("--ram", f"{least - 1}B", *NORMS)).status == 3
    assert invoke(*choose("--ram", f"{least}B", *NORMS)).status == 0


@pytest.mark.torch
@pytest.mark.parametrize(
    "what", mark_seeds_except(WRONG, {"missing", "twice", "no number", "columns", "zeros"}, WRONG)
)
def test_wrong_files_of_scores_are_one_sentence(what, told):
    """The error states the fault, its place, and the expected values."""
    Path("wrong.csv").write_text(WRONG[what])
    done = invoke(*choose("--ram", "8KiB", "--scores", "wrong.csv"), status=2)
    assert done.out == ""
    told(done.err)


@pytest.mark.torch
@pytest.mark.parametrize(
    "arguments",
    [
        ("--scores", "no.csv"),
        ("--scores", "net.csv", "--batch-of", "net.py:batch"),
        (*NORMS, "--batch-of", "net.py:wrong"),
        (*NORMS, "--batch-of", "batch"),
        (*NORMS, "--out", "no/where.schedule.json"),
    ],
)
def test_wrong_options_are_one_sentence(arguments, told):
    """Files that are not there, and options that do not go together."""
    told(invoke_refused(*choose("--ram", "8KiB", *arguments)))
