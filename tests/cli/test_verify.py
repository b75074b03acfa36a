"""``poetmodel verify``: valid, not valid, or not readable."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kit.commands import (
    BOARD,
    BOARD_FILE,
    CHAIN,
    PROFILE,
    Outcome,
    chain,
    invoke,
    training_step,
    write_graph,
    write_solved,
)
from poetmodel.graph import Graph
from poetmodel.schedule import checkpoint_all

if TYPE_CHECKING:
    from collections.abc import Callable

    from kit.messages import Told


SOLVED = Path("x.schedule.json")
"""The schedule of the chain in 350 B, which pages x out and in."""


@pytest.fixture(autouse=True)
def _solved() -> None:
    """Write it."""
    write_solved(SOLVED.name, "--ram", "350", "--deadline", "200%")


def verify(*options: object, **keys: Any) -> Outcome:
    """Run the command on that file, with keys changed and more options."""
    document = json.loads(SOLVED.read_text())
    for key, value in keys.items():
        document[key] = document[key] | value if isinstance(value, dict) else value
    SOLVED.write_text(json.dumps(document))
    return invoke("verify", SOLVED, "--graph", CHAIN, *options)


def test_solved_schedule_is_valid(told: Told) -> None:
    """What solve writes, verify accepts, with the same figures."""
    outcome = verify("--device", BOARD_FILE, "--json")
    assert outcome.status == 0
    assert outcome.err == ""
    assert outcome.json["valid"] is True
    assert outcome.json["violations"] == []
    assert outcome.json["energy_j"] == pytest.approx(6.004, rel=1e-9)
    assert outcome.json["peak_ram_bytes"] == 304
    assert outcome.json["written_bytes"] == outcome.json["read_bytes"] == 100
    table = verify("--device", BOARD_FILE)
    assert table.status == 0
    told(table.out)


def test_costs_default_to_the_device_in_the_file() -> None:
    """The board that the file names gives the costs where it is found, and that is said."""
    outcome = verify("--json")
    assert outcome.status == 0
    assert outcome.json["energy_j"] == pytest.approx(6.004, rel=1e-9)
    assert str(BOARD_FILE) in outcome.err


def test_without_costs_the_rest_is_checked(told: Told) -> None:
    """With no costs to be found, rules and bytes are judged, and it says what was not."""
    outcome = verify("--json", device="gone.toml")
    assert outcome.status == 0
    told(outcome.err)
    assert outcome.json["energy_j"] is None
    assert outcome.json["time_s"] is None
    assert outcome.json["peak_ram_bytes"] == 304
    tight = verify("--json", problem={"ram_budget_bytes": 303}, peak_ram_bytes=303)
    assert tight.status == 3
    assert len(tight.json["violations"]) == 2


@pytest.mark.parametrize(
    "keys",
    [
        {"R": [[0, 0], [1, 1], [2, 2], [3, 3], [4, 4]]},
        {"M_in": []},
        {"M_out": []},
        {"problem": {"ram_budget_bytes": 303}},
        {"problem": {"aux_bytes": 99}},
        {"problem": {"paging": False}},
        {"problem": {"deadline_s": 6.0}},
        {"problem": {"energy_budget_j": 6.0}},
        {"energy_j": 6.0},
        {"overhead_j": 0.0},
        {"peak_ram_bytes": 305},
        {"transfer_s": 1.0},
        {"bound_j": 7.0},
        {"R": [[0, 0], [1, 1], [2, 2], [3, 3], [4, 4], [5, 5], [9, 0]]},
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_what_is_broken_is_named_and_exits_3(keys: dict[str, Any], told: Told) -> None:
    """Each broken rule, limit and figure is a line in plain words."""
    outcome = verify("--device", BOARD_FILE, **keys)
    assert outcome.status == 3
    told(outcome.verdict)
    found = verify("--device", BOARD_FILE, "--json").json
    assert found["valid"] is False
    for violation in found["violations"]:
        assert violation in outcome.out.splitlines()


def test_recomputation_that_the_problem_forbids_is_named(told: Told) -> None:
    """A schedule that recomputes is not one for a problem that allows none."""
    path = Path("x.schedule.json")
    limits = ("--ram", "350", "--no-paging")
    arguments = ("--device", BOARD_FILE, *limits, "--out", path)
    assert invoke("solve", CHAIN, *arguments).status == 0
    document = json.loads(path.read_text())
    document["problem"]["recompute"] = False
    path.write_text(json.dumps(document))
    outcome = invoke("verify", path, "--graph", CHAIN)
    assert outcome.status == 3
    told(outcome.verdict)


def test_resident_bytes_count_where_the_file_says_so() -> None:
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


def test_measured_costs_are_checked_with_the_profile(told: Told) -> None:
    """Solved with device and profile: the profile makes it valid, estimates alone do not."""
    path = Path("x.schedule.json")
    costs = ("--device", BOARD_FILE, "--profile", PROFILE)
    assert invoke("solve", CHAIN, *costs, "--ram", "350", "--out", path).status == 0
    assert invoke("verify", path, "--graph", CHAIN, *costs).status == 0
    assert invoke("verify", path, "--graph", CHAIN, "--profile", PROFILE).status == 0
    estimated = invoke("verify", path, "--graph", CHAIN)
    assert estimated.status == 3
    told(estimated.err)


def test_idle_power_of_the_device_in_the_file_counts_beside_a_profile() -> None:
    """With --profile alone, the device that the file names still gives the idle power."""
    board = Path("idle.toml")
    board.write_text(BOARD.replace("[compute]", "idle_power_w = 0.5\n[compute]"))
    path = Path("x.schedule.json")
    costs = ("--device", board, "--profile", PROFILE)
    assert invoke("solve", CHAIN, *costs, "--ram", "350", "--out", path).status == 0
    arguments = ("verify", path, "--graph", CHAIN, "--profile", PROFILE)
    assert invoke(*arguments).status == 0
    assert invoke(*arguments, "--json").json["baseline_energy_j"] == pytest.approx(15.0)


def test_schedule_that_was_rejected_is_rejected_again() -> None:
    """A file with violations, from the paper's formulation, is not valid."""
    path = Path("x.schedule.json")
    options = ("--ram", "310", "--formulation", "paper", "--out", path)
    assert invoke("solve", CHAIN, "--device", BOARD_FILE, *options).status == 6
    assert invoke("verify", path, "--graph", CHAIN).status == 3


def test_bare_relations_are_judged_by_the_rules_alone(told: Told) -> None:
    """A file without a problem has no limits; its rules are checked, and it says so."""
    path = Path("bare.schedule.json")
    checkpoint_all(Graph.load(CHAIN)).save(path)
    outcome = invoke("verify", path, "--graph", CHAIN, "--json")
    assert outcome.status == 0
    assert outcome.json["peak_ram_bytes"] == 404
    told(outcome.err)


def test_shipped_model_may_be_named_as_the_graph() -> None:
    """--graph takes the name of a shipped model too."""
    path = Path("mlp.schedule.json")
    assert invoke("solve", "mlp", "--device", "mkr1000", "--out", path).status == 0
    assert invoke("verify", path, "--graph", "mlp").status == 0


def test_another_graph_exits_2(told: Told) -> None:
    """A schedule of another graph is refused: both graphs are named, by name and sha256."""
    other = write_graph(Path("other.json"), chain() | {"name": "other"})
    outcome = invoke("verify", SOLVED, "--graph", other)
    assert (outcome.status, outcome.out) == (2, "")
    assert SOLVED.name in outcome.err
    told(outcome.err)


@pytest.mark.parametrize(
    "keys",
    [
        {"format": "poetmodel-graph"},
        {"version": 2},
        {"R": None},
        {"R": [[0, -1]]},
        {"R": [[0, 0.5]]},
        {"R": "all"},
        {"problem": {"ram_budget_bytes": -1}},
        {"problem": {"deadline_counts": "moon"}},
        {"problem": {"colour": "red"}},
        {"status": "splendid"},
        {"energy_j": float("nan")},
        {"energy_j": "much"},
        {"graph": {"sha256": "0"}},
        {"nodes": ["x"]},
        {"nodes": ["x", "h1", "h2", "loss", "G2", "g1"]},
        {"tensors": ["x", "h1", "h2", "loss", "g1", "g2"]},
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_malformed_file_exits_2_and_names_the_field(keys: dict[str, Any], told: Told) -> None:
    """A schedule file that breaks its format is refused with its name and the field."""
    outcome = verify(**keys)
    assert (outcome.status, outcome.out) == (2, "")
    told(outcome.err)


@pytest.mark.parametrize(
    "content", [b"", b"\x00\xff", b'{"format": "poetmodel-sch', b"[" * 100_000]
)
def test_file_that_is_none_exits_2(content: bytes, told: Told) -> None:
    """An empty, binary, truncated or absurd file is refused by name."""
    path = Path("bad.schedule.json")
    path.write_bytes(content)
    outcome = invoke("verify", path, "--graph", CHAIN)
    assert (outcome.status, outcome.out) == (2, "")
    told(outcome.err)


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--graph", "nowhere.json"),
        ("--graph", "mpl"),
        ("--graph", "mlp", "--device", "rpi5b"),
        ("--graph", "mlp", "--profile", "nowhere.csv"),
    ],
)
def test_missing_inputs_exit_2(options: tuple[str, ...], told: Told) -> None:
    """Without the graph, or with files that do not exist, verify says what is missing."""
    path = Path("bare.schedule.json")
    checkpoint_all(Graph.load(write_graph(Path("g.json"), chain()))).save(path)
    if "mlp" in options:
        assert invoke("solve", "mlp", "--device", "mkr1000", "--out", path).status == 0
    outcome = invoke("verify", path, *options)
    assert (outcome.status, outcome.out) == (2, "")
    told(outcome.err)


# -- state -------------------------------------------------------------------------------------


@pytest.fixture
def verify_step() -> Callable[..., Outcome]:
    """Return the command on a training step with w1 in RAM and w2 on storage, with keys changed.

    Tensors are x w1 h r w2 y g2 dw2 dr w2+ g1 dw1 w1+; u2 replaces w2 in stage 9.
    """
    path = write_graph(Path("step.graph.json"), training_step())
    graph = Graph.load(path)
    document = checkpoint_all(graph).to_dict()
    document["resident"] = [1]
    document["S_RAM"] += [[t, 4] for t in range(5, 10)]
    document["S_AUX"] += [[t, 4] for t in range(5, 10)]
    document["M_out"] = [[9, 9]]

    def run(*options: object, **keys: Any) -> Outcome:
        file = Path("step.schedule.json")
        file.write_text(json.dumps(document | keys))
        return invoke("verify", file, "--graph", path, "--device", BOARD_FILE, *options)

    run.document = document  # type: ignore[attr-defined]
    return run


def test_step_with_state_in_both_homes_is_valid(verify_step: Callable[..., Outcome]) -> None:
    """First read and write-back of w2 are its only transfers; its home takes storage."""
    found = verify_step("--json").json
    assert found["valid"] is True
    assert (found["read_bytes"], found["written_bytes"], found["aux_used_bytes"]) == (300,) * 3
    assert found["transfer_s"] == pytest.approx(2 * (0.001 + 300 / 100000))
    assert found["peak_ram_bytes"] == 1140


@pytest.mark.parametrize(
    "change",
    [
        {"resident": []},
        {"resident": [1, 4]},
        {"resident": [0, 1]},
        {"resident": [1, 9]},
        {"resident": [1, 77]},
        {"M_out": []},
        {"M_out": [[9, 9], [5, 4]]},
        {"M_out": [[9, 9], [10, 9]]},
        {"M_out": [[9, 9], [12, 12]]},
        {"+S_RAM": [[5, 1]]},
        {"+S_RAM": [[10, 4]]},
        {"+S_RAM": [[10, 9]]},
        {"-S_RAM": [[7, 4], [8, 4]]},
        {"M_in": [[2, 1]]},
        {"M_in": [[7, 4]]},
        {"M_in": [[11, 4]]},
        {"+S_AUX": [[11, 4]]},
        {"+R": [[10, 8]]},
        {"+R": [[10, 9]]},
        {"+R": [[6, 4]]},
    ],
    ids=json.dumps,
)
def test_what_state_does_not_allow_is_named_and_exits_3(
    change: dict[str, Any], verify_step: Callable[..., Outcome], told: Told
) -> None:
    """Each rule of state, broken by entries that are changed, added or left out."""
    document = verify_step.document  # type: ignore[attr-defined]
    keys = {}
    for key, pairs in change.items():
        name = key.lstrip("+-")
        given = document[name]
        keys[name] = pairs if name == key else [*given, *pairs]
        if key.startswith("-"):
            keys[name] = [pair for pair in given if pair not in pairs]
    outcome = verify_step(**keys)
    assert outcome.status == 3, outcome.out
    told(outcome.verdict)


def test_state_on_memory_mapped_storage_is_read_where_it_lies(
    verify_step: Callable[..., Outcome], told: Told
) -> None:
    """It is in no relation of RAM, takes none, and costs its write-back alone."""
    BOARD_FILE.write_text(
        BOARD_FILE.read_text().replace(
            'mode = "blocking"', 'mode = "blocking"\nmemory_mapped = true'
        )
    )
    document = verify_step.document  # type: ignore[attr-defined]
    listed = verify_step()
    assert listed.status == 3
    told(listed.verdict)
    kept = [[t, i] for t, i in document["S_RAM"] if i != 4]
    read = verify_step(S_RAM=kept, M_in=[[8, 4]])
    assert read.status == 3
    told(read.verdict, "read")
    good = verify_step(S_RAM=kept)
    assert good.status == 0
    told(good.out, "good")
    found = verify_step("--json", S_RAM=kept).json
    assert (found["read_bytes"], found["written_bytes"], found["peak_ram_bytes"]) == (0, 300, 840)


@pytest.mark.parametrize("entry", [["w2"], [[1, 2]], [-1], [1.5], "w2", None])
def test_list_of_resident_state_that_is_none_exits_2(
    entry: object, verify_step: Callable[..., Outcome], told: Told
) -> None:
    """Positions of tensors are expected."""
    outcome = verify_step(resident=entry)
    assert outcome.status == 2
    told(outcome.err)
