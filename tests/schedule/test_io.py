"""Schedule files: what is written is read, and what is wrong is named and written nowhere."""

from __future__ import annotations

import json
import os
import stat
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kit.instances import random_schedule, seeded
from kit.strategies import graphs, rich_graphs
from poetmodel.errors import InputError, ScheduleError
from poetmodel.graph import Graph, operation
from poetmodel.schedule import (
    RELATIONS,
    GraphIdentity,
    Schedule,
    check_identity,
    checkpoint_all,
)
from poetmodel.schedule.io import load_document, parse_document
from poetmodel.schedule.relations import STATED, dump

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def graph() -> Graph:
    """Return a chain of three."""
    return Graph(
        name="chain",
        nodes=(
            operation("a", output_bytes=4),
            operation("b", output_bytes=4, inputs=("a",)),
            operation("c", output_bytes=4, inputs=("b",)),
        ),
    )


@pytest.fixture
def bare(graph: Graph) -> dict[str, Any]:
    """Return the document of a file of bare relations."""
    return checkpoint_all(graph).to_dict()


@pytest.fixture
def full(bare: dict[str, Any]) -> dict[str, Any]:
    """Return a document with everything that a solve writes."""
    problem = {
        "ram_budget_bytes": 8, "deadline_s": None, "deadline_counts": "serial", "recompute": True,
        "paging": True, "minimize": "energy", "energy_budget_j": None, "aux_bytes": None,
        "count_parameters": False, "method": "optimal", "formulation": "lazy", "backend": "highs",
        "time_limit_s": 60, "gap": 0.0001,
    }  # fmt: skip
    figures = {key: 0.0 for key in STATED if key != "peak_ram_bytes"}
    return {
        **bare,
        "device": "rpi4b",
        "problem": problem,
        "status": "optimal",
        "violations": [],
        "objective": {"minimize": "energy", "value": 3.0, "bound": 3, "gap": 0},
        **figures,
        "energy_j": 3.0,
        "peak_ram_bytes": 8,
    }


def parse(document: dict[str, Any]) -> Schedule:
    """Return the schedule of a document."""
    return parse_document(json.dumps(document), source="x.json").schedule


# -- round trips -------------------------------------------------------------------------------


def test_saved_schedule_is_loaded(graph: Graph, tmp_path: Path) -> None:
    """`save` and `load` give back relations and identity."""
    path = tmp_path / "chain.schedule.json"
    schedule = checkpoint_all(graph)
    schedule.save(path)
    loaded = Schedule.load(path)
    assert loaded == schedule
    assert loaded.identity == GraphIdentity.of(graph)
    assert Schedule.load(str(path)) == schedule
    assert schedule.to_dict() == schedule.to_dict()


def test_file_is_plain_json_with_the_keys_of_the_format(graph: Graph, tmp_path: Path) -> None:
    """Any JSON reader reads the file; relations are sorted lists of two numbers."""
    path = tmp_path / "chain.schedule.json"
    checkpoint_all(graph).save(path)
    document = json.loads(path.read_text(encoding="utf-8"))
    assert document == {
        "format": "poetmodel-schedule",
        "version": 1,
        "graph": {"name": "chain", "sha256": graph.sha256},
        "nodes": ["a", "b", "c"],
        "tensors": ["a", "b", "c"],
        "R": [[0, 0], [1, 1], [2, 2]],
        "S_RAM": [[1, 0], [2, 1]],
        "S_AUX": [],
        "M_in": [],
        "M_out": [],
    }
    assert len(path.read_text(encoding="utf-8").splitlines()) == len(document)


@given(graph=rich_graphs(), seed=st.integers(min_value=0, max_value=2**32))
@settings(deadline=None)
def test_any_schedule_survives_a_round_trip(graph: Graph, seed: int) -> None:
    """Whatever the names and relations, reading what was written gives the same."""
    plain = random_schedule(seeded(seed), graph)
    relations = {name: getattr(plain, name) for name in RELATIONS}
    schedule = Schedule(**relations, identity=GraphIdentity.of(graph))
    found = parse_document(dump(schedule.to_dict()), source="x").schedule
    assert found == schedule
    assert found.identity == schedule.identity


def test_document_holds_everything_that_was_stated(full: dict[str, Any]) -> None:
    """Problem, device, status and figures of a file are read, and the schedule with them."""
    document = parse_document(json.dumps(full), source="x.json")
    assert document.device == "rpi4b"
    assert document.status == "optimal"
    assert document.problem is not None
    assert document.problem.ram_budget_bytes == 8
    assert document.problem.formulation == "lazy"
    assert document.stated["energy_j"] == 3.0
    assert document.stated["peak_ram_bytes"] == 8
    assert set(document.stated) == set(STATED)


def test_bare_relations_need_no_problem(bare: dict[str, Any]) -> None:
    """A file of relations alone is a schedule file; what it does not state is None."""
    document = parse_document(json.dumps(bare), source="x.json")
    assert (document.device, document.problem, document.status) == (None, None, None)
    assert set(document.stated.values()) == {None}


def test_relations_may_come_in_any_order(bare: dict[str, Any]) -> None:
    """Somebody else's program need not sort the pairs."""
    bare["R"] = [[2, 2], [0, 0], [1, 1]]
    assert parse(bare).R == ((0, 0), (1, 1), (2, 2))


def test_schedule_without_a_graph_is_not_saved(tmp_path: Path) -> None:
    """A file must say which graph it belongs to; the error says how."""
    path = tmp_path / "x.schedule.json"
    with pytest.raises(ScheduleError, match="GraphIdentity"):
        Schedule(R=((0, 0),)).save(path)
    assert list(tmp_path.iterdir()) == []


# -- bad files ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"format": "poetmodel-graph"}, "format: "),
        ({"version": 2}, "version: expected 1, got 2"),
        ({"version": True}, "version: expected 1, got true"),
        ({"version": 1.0}, "version: expected 1, got 1.0"),
        ({"version": "1"}, "version: "),
        ({"version": None}, "version: "),
        ({"colour": "red"}, "colour: unknown key"),
        ({"graph": {"name": "chain"}}, "graph.sha256: missing"),
        ({"graph": {"name": "chain", "sha256": "abc"}}, "graph.sha256: "),
        ({"graph": None}, "graph: "),
        ({"nodes": "abc"}, "nodes: "),
        ({"tensors": ["a", "b", 3]}, "tensors[2]: "),
        ({"R": None}, "R: the file holds no schedule"),
        ({"R": [[0, 0], [1]]}, "R[1]: "),
        ({"R": [[0, 0, 0]]}, "R[0]: "),
        ({"R": [[0, 0.0]]}, "R[0][1]: "),
        ({"R": [[0, True]]}, "R[0][1]: "),
        ({"R": [[0, "0"]]}, "R[0][1]: "),
        ({"R": [[-1, 0]]}, "R[0][0]: "),
        ({"R": {"0": [0]}}, "R: "),
        ({"S_RAM": None}, "S_RAM: missing"),
        ({"M_in": 5}, "M_in: "),
        ({"energy_j": float("nan")}, "energy_j: "),
        ({"energy_j": float("inf")}, "energy_j: "),
        ({"energy_j": "3"}, "energy_j: "),
        ({"gap": -float("inf")}, "gap: "),
        ({"peak_ram_bytes": 1.5}, "peak_ram_bytes: "),
        ({"peak_ram_bytes": -1}, "peak_ram_bytes: "),
        ({"status": "perfect"}, "status: "),
        ({"violations": "none"}, "violations: "),
        (
            {"objective": {"minimize": "joy", "value": 1, "bound": 1, "gap": 0}},
            "objective.minimize",
        ),
        ({"objective": {"minimize": "ram", "bound": 1, "gap": 0}}, "objective.value: missing"),
        (
            {"history": [[0.1, None, 2.0], [0.2, 3.0]]},
            "history[1]: expected [seconds, value, bound]",
        ),
        ({"history": [[None, 3.0, 2.0]]}, "history[0]: expected [seconds, value, bound]"),
        ({"history": [[0.1, "3", 2.0]]}, "history[0]: expected [seconds, value, bound]"),
    ],
)
def test_each_fault_is_named(full: dict[str, Any], change: dict[str, Any], fault: str) -> None:
    """A wrong value is refused with the file and the key."""
    with pytest.raises(ScheduleError) as raised:
        parse({**full, **change})
    assert len(raised.value.faults) == 1
    assert raised.value.faults[0].startswith(f"x.json: {fault}")


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"ram_budget_bytes": 0}, "problem.ram_budget_bytes: "),
        ({"ram_budget_bytes": None}, "problem.ram_budget_bytes: "),
        ({"deadline_s": float("nan")}, "problem.deadline_s: "),
        ({"deadline_counts": "never"}, "problem.deadline_counts: "),
        ({"recompute": 1}, "problem.recompute: "),
        ({"aux_bytes": -5}, "problem.aux_bytes: "),
        ({"budget": 5}, "problem.budget: unknown key"),
    ],
)
def test_faults_of_the_problem_are_named(
    full: dict[str, Any], change: dict[str, Any], fault: str
) -> None:
    """The stated problem is checked like the rest."""
    full["problem"] = {**full["problem"], **change}
    with pytest.raises(ScheduleError) as raised:
        parse(full)
    assert len(raised.value.faults) == 1
    assert raised.value.faults[0].startswith(f"x.json: {fault}")


def test_missing_keys_are_named_together(bare: dict[str, Any]) -> None:
    """All faults of a file come in one error."""
    del bare["graph"], bare["nodes"]
    bare["version"] = 3
    with pytest.raises(ScheduleError) as raised:
        parse(bare)
    assert sorted(fault.split(" ")[1] for fault in raised.value.faults) == [
        "graph:", "nodes:", "version:",
    ]  # fmt: skip


def test_many_faults_are_counted(bare: dict[str, Any]) -> None:
    """A file that is wrong a thousand times does not fill the screen."""
    bare["R"] = [[0, -1]] * 1000
    with pytest.raises(ScheduleError) as raised:
        parse(bare)
    assert len(raised.value.faults) == 21
    assert raised.value.faults[-1] == "x.json: and 980 faults more"


def test_another_kind_of_file_is_named_first(tmp_path: Path) -> None:
    """Of all that is wrong with a graph file of many nodes, its format says the most."""
    path = tmp_path / "chain.graph.json"
    Graph(name="many", nodes=tuple(operation(f"n{k}", output_bytes=1) for k in range(30))).save(
        path
    )
    with pytest.raises(ScheduleError) as raised:
        load_document(path)
    wanted = "format: expected 'poetmodel-schedule', got 'poetmodel-graph'"
    assert raised.value.faults[0] == f"{path}: {wanted}"


@pytest.mark.parametrize("status", ["infeasible", "unknown"])
def test_file_without_a_schedule_says_so(full: dict[str, Any], status: str) -> None:
    """Where nothing was found there are no relations, and nothing to load."""
    document = {key: value for key, value in full.items() if key not in RELATIONS}
    document["status"] = status
    with pytest.raises(ScheduleError, match=rf"x\.json: R: .*no schedule \(status {status}\)"):
        parse(document)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "empty file"),
        ("  \n", "empty file"),
        ("{", "truncated"),
        ('{"format": "poetmodel-sch', "truncated"),
        ("not json", "not valid JSON"),
        ("[1, 2]", "document: "),
        ("null", "document: "),
        ('"text"', "document: "),
        ("[" * 100_000, "nested too deeply"),
        ('{"version": ' + "9" * 5000 + "}", "too many digits"),
        ('{"version": 1, "version": 1}', "version: the key comes twice"),
        ('{"graph": {"name": "a", "name": "b"}}', "name: the key comes twice"),
    ],
)
def test_texts_that_are_no_document_are_refused(text: str, fault: str) -> None:
    """Whatever the text, the answer is one sentence that names the file."""
    with pytest.raises(ScheduleError, match=fault) as raised:
        parse_document(text, source="x.json")
    assert all(sentence.startswith("x.json: ") for sentence in raised.value.faults)


def test_every_truncation_is_refused(full: dict[str, Any]) -> None:
    """A file cut off anywhere is never read as a smaller schedule."""
    text = dump(full).rstrip()
    for length in range(len(text)):
        with pytest.raises(ScheduleError):
            parse_document(text[:length], source="x.json")


def test_huge_indices_are_read_and_left_to_the_simulator(bare: dict[str, Any]) -> None:
    """An index beyond every graph is a violation, not a crash."""
    bare["M_out"] = [[10**30, 10**30]]
    assert parse(bare).M_out == ((10**30, 10**30),)


def test_binary_missing_and_folder_are_refused(tmp_path: Path) -> None:
    """What is no text file at all is a fault of the schedule file, named by its path."""
    binary = tmp_path / "binary.json"
    binary.write_bytes(b"\x89PNG\r\n\x1a\n\x00\xff")
    for path, fault in (
        (binary, "binary"),
        (tmp_path / "missing.json", "no such file"),
        (tmp_path, "folder"),
    ):
        with pytest.raises(ScheduleError, match=fault) as raised:
            load_document(path)
        assert str(path) in str(raised.value)


def test_schedule_of_another_graph_is_told_by_its_hash(graph: Graph, tmp_path: Path) -> None:
    """A file keeps whose schedule it is; the same names with other sizes are another graph."""
    path = tmp_path / "chain.schedule.json"
    checkpoint_all(graph).save(path)
    loaded = Schedule.load(path)
    check_identity(graph, loaded)
    nodes = (operation("a", output_bytes=5), *graph.nodes[1:])
    with pytest.raises(ScheduleError, match="made for graph 'chain'"):
        check_identity(Graph(name="chain", nodes=nodes), loaded)


# -- writing -----------------------------------------------------------------------------------


def test_not_a_number_is_never_written(bare: dict[str, Any]) -> None:
    """All numbers of a file are finite: a NaN is an error of the program, before any file."""
    with pytest.raises(ValueError, match="JSON"):
        dump({**bare, "energy_j": float("nan")})


def test_file_is_replaced_in_one_step(
    graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write that fails on its way leaves the old file as it was, and no draft beside it."""
    path = tmp_path / "chain.schedule.json"
    checkpoint_all(graph).save(path)
    before = path.read_bytes()

    def full_disk(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(InputError, match="No space left"):
        Schedule(R=((0, 0),), identity=GraphIdentity.of(graph)).save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_file_is_readable_as_others_are(graph: Graph, tmp_path: Path) -> None:
    """The file gets the rights of any new file, not those of a temporary one."""
    path = tmp_path / "chain.schedule.json"
    checkpoint_all(graph).save(path)
    plain = tmp_path / "plain"
    plain.write_text("", encoding="utf-8")
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)


def test_missing_folder_is_named(graph: Graph, tmp_path: Path) -> None:
    """A file in a folder that does not exist is an input error, and makes no folder."""
    with pytest.raises(InputError, match="does not exist"):
        checkpoint_all(graph).save(tmp_path / "no" / "x.schedule.json")
    assert list(tmp_path.iterdir()) == []


@given(graph=graphs(on_aux=True, max_nodes=4), data=st.data())
@settings(deadline=None)
def test_no_damage_to_a_file_ends_in_a_crash(graph: Graph, data: st.DataObject) -> None:
    """A file with a character replaced is read or refused with an error of its own."""
    text = dump(checkpoint_all(graph).to_dict())
    place = data.draw(st.integers(min_value=0, max_value=len(text) - 1))
    damaged = text[:place] + data.draw(st.characters(codec="utf-8")) + text[place + 1 :]
    try:
        parse_document(damaged, source="x.json")
    except ScheduleError as error:
        assert all(fault.startswith("x.json: ") for fault in error.faults)  # noqa: PT017
