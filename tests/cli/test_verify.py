"""``poetmodel verify``: valid, not valid, or not readable."""

import json
from pathlib import Path

import pytest

from kit.commands import (
    BOARD,
    BOARD_FILE,
    CHAIN,
    PROFILE,
    chain,
    invoke,
    refused,
    write_graph,
    write_solved,
)
from poetmodel.graph import Graph
from poetmodel.schedule import checkpoint_all

SOLVED = Path("x.schedule.json")
"""The schedule of the chain in 350 B, which pages x out and in."""


@pytest.fixture(autouse=True)
def _solved():
    """Write it."""
    write_solved(SOLVED.name, "--ram", "350", "--deadline", "200%")


def verify(*options, status=None, **keys):
    """Run the command on that file, with keys changed and more options."""
    document = json.loads(SOLVED.read_text())
    for key, value in keys.items():
        document[key] = document[key] | value if isinstance(value, dict) else value
    SOLVED.write_text(json.dumps(document))
    return invoke("verify", SOLVED, "--graph", CHAIN, *options, status=status)


def test_solved_schedule_is_valid(told):
    """What solve writes, verify accepts, with the same figures, by default of the device named."""
    outcome = verify("--device", BOARD_FILE, "--json", status=0)
    assert outcome.err == ""
    assert outcome.json["valid"] is True
    assert outcome.json["violations"] == []
    assert outcome.json["energy_j"] == pytest.approx(6.004, rel=1e-9)
    assert outcome.json["peak_ram_bytes"] == 304
    assert outcome.json["written_bytes"] == outcome.json["read_bytes"] == 100
    table = verify("--device", BOARD_FILE, status=0)
    told(table.out)
    outcome = verify("--json", status=0)
    assert outcome.json["energy_j"] == pytest.approx(6.004, rel=1e-9)
    assert str(BOARD_FILE) in outcome.err


def test_without_costs_the_rest_is_checked(told):
    """With no costs to be found, rules and bytes are judged, and it says what was not."""
    outcome = verify("--json", device="gone.toml", status=0)
    told(outcome.err)
    assert outcome.json["energy_j"] is None
    assert outcome.json["time_s"] is None
    assert outcome.json["peak_ram_bytes"] == 304
    tight = verify("--json", problem={"ram_budget_bytes": 303}, peak_ram_bytes=303, status=3)
    assert len(tight.json["violations"]) == 2


@pytest.mark.parametrize(
    "keys",
    [{"M_in": []}, {"problem": {"ram_budget_bytes": 303}}, {"energy_j": 6.0}, {"bound_j": 7.0}],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_what_is_broken_is_named_and_exits_3(keys, told):
    """Each broken rule, limit and figure is a line in plain words."""
    outcome = verify("--device", BOARD_FILE, **keys, status=3)
    told(outcome.verdict)
    found = verify("--device", BOARD_FILE, "--json").json
    assert found["valid"] is False
    for violation in found["violations"]:
        assert violation in outcome.out.splitlines()


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        (("--ram", "304"), None),
        (("--ram", "303"), "peak RAM 304 B"),
        (("--deadline", "100%"), "is above the deadline"),
        (("--energy-budget", "6J"), "energy 6.004 J is above the budget"),
        (("--aux", "99"), "storage used 100 B is above the limit of 99 B"),
        (("--no-paging",), "the problem allows no paging"),
    ],
)
def test_given_limits_replace_those_of_the_file(limits, words):
    """What breaks them is named; where nothing does, a solve that finds nothing is wrong."""
    options = ("--device", BOARD_FILE, *limits)
    # Under limits of its own the file is no answer, nor are its bound and its gap.
    keys = {"problem": {"ram_budget_bytes": 1, "deadline_s": 0.1}, "objective": {"bound": 99.0}}
    found = verify(*options, **keys, status=3 if words else 0)
    assert (words or "Please report this bug") in found.out
    assert "the limits of the file were not checked" in found.err
    assert verify("--device", BOARD_FILE).status == 3


def test_resident_bytes_count_where_the_file_says_so():
    """A file solved with --count-parameters is judged with them."""
    document = chain() | {"resident_bytes": {"parameters": 1000}}
    graph = write_graph(Path("g.json"), document)
    path = Path("x.schedule.json")
    arguments = ("--device", BOARD_FILE, "--ram", "1350", "--count-parameters", "--out", path)
    assert invoke("solve", graph, *arguments).status == 0
    assert invoke("verify", path, "--graph", graph).status == 0
    changed = json.loads(path.read_text())
    changed["problem"]["ram_budget_bytes"] = 1303
    path.write_text(json.dumps(changed))
    assert invoke("verify", path, "--graph", graph).status == 3


def test_measured_costs_are_checked_with_the_profile(told):
    """A profile makes it valid, estimates alone do not; the device still gives the idle power."""
    path = Path("x.schedule.json")
    costs = ("--device", BOARD_FILE, "--profile", PROFILE)
    assert invoke("solve", CHAIN, *costs, "--ram", "350", "--out", path).status == 0
    assert invoke("verify", path, "--graph", CHAIN, *costs).status == 0
    assert invoke("verify", path, "--graph", CHAIN, "--profile", PROFILE).status == 0
    told(invoke("verify", path, "--graph", CHAIN, status=3).err)
    board = Path("idle.toml")
    board.write_text(BOARD.replace("[compute]", "idle_power_w = 0.5\n[compute]"))
    costs = ("--device", board, "--profile", PROFILE)
    assert invoke("solve", CHAIN, *costs, "--ram", "350", "--out", path).status == 0
    arguments = ("verify", path, "--graph", CHAIN, "--profile", PROFILE)
    assert invoke(*arguments).status == 0
    assert invoke(*arguments, "--json").json["baseline_energy_j"] == pytest.approx(15.0)


def test_bare_relations_are_judged_by_the_rules_alone(told):
    """A file without a problem has no limits, which is said; one of another graph is refused."""
    path = Path("bare.schedule.json")
    checkpoint_all(Graph.load(CHAIN)).save(path)
    outcome = invoke("verify", path, "--graph", CHAIN, "--json", status=0)
    assert outcome.json["peak_ram_bytes"] == 404
    told(outcome.err)
    other = write_graph(Path("other.json"), chain() | {"name": "other"})
    outcome = invoke("verify", SOLVED, "--graph", other)
    assert (outcome.status, outcome.out) == (2, "")
    assert SOLVED.name in outcome.err
    told(outcome.err, "another graph")


@pytest.mark.parametrize(
    "keys",
    [{"R": [[0, -1]]}, {"nodes": ["x"]}],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_malformed_file_exits_2_and_names_the_field(keys, told):
    """A schedule file that breaks its format is refused with its name and the field."""
    outcome = verify(**keys, status=2)
    assert outcome.out == ""
    told(outcome.err)


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--graph", "nowhere.json"),
        ("--graph", "mpl"),
        ("--graph", "mlp", "--profile", "nowhere.csv"),
    ],
)
def test_missing_inputs_exit_2(options, told):
    """Without the graph, or with files that do not exist, verify says what is missing."""
    path = Path("bare.schedule.json")
    checkpoint_all(Graph.load(write_graph(Path("g.json"), chain()))).save(path)
    if "mlp" in options:
        assert invoke("solve", "mlp", "--device", "mkr1000", "--out", path).status == 0
    told(refused("verify", path, *options))
