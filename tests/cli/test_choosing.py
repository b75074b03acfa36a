"""``poetmodel choose``: the set, its proof, its files, and what it says of wrong input."""

import json
from pathlib import Path

import pytest

from kit.commands import invoke, refused
from poetmodel.schedule.io import load_document

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
    """Files and JSON agree, the verifier accepts the schedule, and export takes the step."""
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
    least = int(done.err.split("needs is ")[1].split(" B")[0].replace(",", ""))
    assert invoke(*choose("--ram", f"{least - 1}B", *NORMS)).status == 3
    assert invoke(*choose("--ram", f"{least}B", *NORMS)).status == 0


@pytest.mark.torch
@pytest.mark.parametrize("what", WRONG)
def test_wrong_files_of_scores_are_one_sentence(what, told):
    """What is wrong, where, and what is expected."""
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
    told(refused(*choose("--ram", "8KiB", *arguments)))
