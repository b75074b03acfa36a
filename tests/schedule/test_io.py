"""Schedule files: written ones are read, faults are named, and invalid ones are not written."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kit.instances import make_rng, random_schedule
from kit.strategies import graphs, rich_graphs
from poetmodel.errors import ScheduleError
from poetmodel.graph import Graph, operation
from poetmodel.schedule import RELATIONS, GraphIdentity, Schedule, checkpoint_all
from poetmodel.schedule.document import load_document
from poetmodel.schedule.metrics import Display, metrics_at
from poetmodel.schedule.relations import format_document

STATED = [metric.key for metric in metrics_at(Display.FILE)]


@pytest.fixture
def graph():
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
def bare(graph):
    """Return the document of a file of bare relations."""
    return checkpoint_all(graph).to_dict()


@pytest.fixture
def full(bare):
    """Return a document with everything that a solve writes."""
    problem = {
        "ram_budget_bytes": 8, "deadline_s": None, "deadline_counts": "serial", "recompute": True,
        "paging": True, "minimize": "energy", "energy_budget_j": None, "aux_bytes": None,
        "count_parameters": False, "method": "optimal", "formulation": "lazy", "backend": "highs",
        "time_limit_s": 60, "gap": 0.0001,
    }  # fmt: skip
    figures = {key: 0.0 for key in STATED if not key.endswith("bytes")}
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


def parse(document):
    """Return the schedule of a document."""
    return load_document("x.json", json.dumps(document).encode()).schedule


# -- round trips -------------------------------------------------------------------------------
def test_saved_schedule_is_loaded(graph, tmp_path):
    """`save` and `load` return relations and identity, for any kind of path.

    Any JSON reader reads the file; relations are sorted lists of two numbers. A file must name
    its graph.
    """
    path = tmp_path / "chain.schedule.json"
    schedule = checkpoint_all(graph)
    schedule.save(path)
    loaded = Schedule.load(str(path))
    assert loaded == schedule
    assert loaded.identity == GraphIdentity.from_graph(graph)
    path = tmp_path / "chain.schedule.json"
    checkpoint_all(graph).save(path)
    document = json.loads(path.read_text(encoding="utf-8"))
    assert document == {
        "format": "poetmodel-schedule",
        "version": 1,
        "written_by": "poetmodel 0.1.0",
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
    with pytest.raises(ScheduleError, match="GraphIdentity"):
        Schedule(R=((0, 0),)).save(tmp_path / "none")
    assert list(tmp_path.iterdir()) == [path]


@given(graph=rich_graphs(), seed=st.integers(min_value=0, max_value=2**32))
@settings(deadline=None)
def test_any_schedule_survives_a_round_trip(graph, seed):
    """For any names and relations, the read schedule equals the written one."""
    plain = random_schedule(make_rng(seed), graph)
    relations = {name: getattr(plain, name) for name in RELATIONS}
    schedule = Schedule(**relations, identity=GraphIdentity.from_graph(graph))
    found = load_document("x", format_document(schedule.to_dict()).encode()).schedule
    assert found == schedule
    assert found.identity == schedule.identity


def test_document_holds_everything_that_was_stated(full):
    """Problem, device, status and figures of a file are read, and the schedule with them."""
    bare = {
        key: full[key] for key in ("format", "version", "graph", "nodes", "tensors", *RELATIONS)
    }
    document = load_document("x.json", json.dumps(bare).encode())
    assert (document.device, document.problem, document.status) == (None, None, None)
    assert set(document.stated_metrics.values()) == {None}
    document = load_document("x.json", json.dumps(full).encode())
    assert (document.device, document.status) == ("rpi4b", "optimal")
    assert (document.problem.ram_budget_bytes, document.problem.formulation) == (8, "lazy")
    assert (document.stated_metrics["energy_j"], document.stated_metrics["peak_ram_bytes"]) == (
        3.0,
        8,
    )
    assert set(document.stated_metrics) == set(STATED)


# -- bad files ---------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"format": "poetmodel-graph"}, "format: "),
        ({"version": 2}, "version: expected 1, got 2"),
        ({"version": 1.0}, "version: expected 1, got 1.0"),
        ({"written_by": 7}, "written_by: expected a valid string"),
        ({"costs": {"sha256": "0"}}, "costs.sha256: "),
        ({"graph": {"name": "chain"}}, "graph.sha256: missing"),
        ({"graph": {"name": "chain", "sha256": "abc"}}, "graph.sha256: "),
        ({"graph": None}, "graph: "),
        ({"nodes": "abc"}, "nodes: "),
        ({"tensors": ["a", "b", 3]}, "tensors[2]: "),
        ({"R": None}, "R: the file contains no schedule"),
        ({"R": [[0, 0], [1]]}, "R[1]: "),
        ({"R": [[0, 0.0]]}, "R[0][1]: "),
        ({"R": [[0, True]]}, "R[0][1]: "),
        ({"R": [[-1, 0]]}, "R[0][0]: "),
        ({"R": {"0": [0]}}, "R: "),
        ({"S_RAM": None}, "S_RAM: missing"),
        ({"M_in": 5}, "M_in: "),
        ({"energy_j": float("nan")}, "energy_j: "),
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
            {"history": [[0.1, 4.0, 2.0], [0.2, 3.0]]},
            "history[1]: expected [seconds, value, bound]",
        ),
        ({"history": [[None, 3.0, 2.0]]}, "history[0]: expected [seconds, value, bound]"),
        ({"history": [[0.1, "3", 2.0]]}, "history[0]: expected [seconds, value, bound]"),
        ({"problem": {"ram_budget_bytes": 0}}, "problem.ram_budget_bytes: "),
        ({"problem": {"ram_budget_bytes": None}}, "problem.ram_budget_bytes: "),
        ({"problem": {"deadline_s": float("nan")}}, "problem.deadline_s: "),
        ({"problem": {"deadline_counts": "never"}}, "problem.deadline_counts: "),
        ({"problem": {"recompute": 1}}, "problem.recompute: "),
        ({"problem": {"aux_bytes": -5}}, "problem.aux_bytes: "),
        ({"problem": {"budget": 5}}, "problem.budget: unknown key"),
    ],
)
def test_each_fault_is_named(full, change, fault):
    """A wrong value is refused with the file and the key."""
    if "problem" in change:
        change = {"problem": full["problem"] | change["problem"]}
    with pytest.raises(ScheduleError) as raised:
        parse({**full, **change})
    assert len(raised.value.faults) == 1
    assert raised.value.faults[0].startswith(f"x.json: {fault}")


def test_unknown_keys_of_a_file_are_noted(bare, graph, tmp_path, caplog):
    """At the top level they are ignored with a note, which names them and the writer."""
    path = tmp_path / "later.schedule.json"
    path.write_text(json.dumps(bare | {"colour": 1, "written_by": "poetmodel 0.3.0"}))
    note = "unknown key 'colour' ignored: the file was written by poetmodel 0.3.0, this is poet"
    assert [text[: len(note)] for text in load_document(path).notes] == [note]
    assert caplog.text == ""
    assert Schedule.load(path) == checkpoint_all(graph)
    assert f"{path}: {note}" in caplog.text
    assert load_document("x", json.dumps(bare).encode()).notes == ()


def test_later_versions_and_unknown_inner_keys_name_the_writer(full):
    """A file of a later format is one error; so is a key that may change the meaning of others."""
    writer = "the file was written by poetmodel 0.3.0, this is poetmodel"
    for change, fault in (
        ({"version": 2, "R": 5}, "x.json: version: expected 1, got 2: "),
        ({"problem": full["problem"] | {"budget": 5}}, "x.json: problem.budget: unknown key; "),
        ({"graph": full["graph"] | {"budget": 5}}, "x.json: graph.budget: unknown key; "),
    ):
        with pytest.raises(ScheduleError) as raised:
            parse(full | {"written_by": "poetmodel 0.3.0"} | change)
        (found,) = raised.value.faults
        assert found.startswith(fault)
        assert writer in found
    with pytest.raises(ScheduleError, match="the file does not say which version wrote it"):
        parse({key: full[key] for key in full if key != "written_by"} | {"version": 2})


def test_many_faults_are_counted(bare):
    """Of a thousand faults, only a few are printed.

    An index beyond the graph is a violation, not a crash. A NaN is an error of the program,
    before any file.
    """
    bare["R"] = [[0, -1]] * 1000
    with pytest.raises(ScheduleError) as raised:
        parse(bare)
    assert len(raised.value.faults) == 21
    assert raised.value.faults[-1] == "x.json: and 980 more errors"
    bare |= {"R": [[0, 0]], "M_out": [[10**30, 10**30]]}
    assert parse(bare).M_out == ((10**30, 10**30),)
    with pytest.raises(ValueError, match="JSON"):
        format_document({**bare, "energy_j": float("nan")})


def test_another_kind_of_file_is_named_first(tmp_path):
    """For a graph file with many nodes, the only error is its format."""
    path = tmp_path / "chain.graph.json"
    Graph(name="many", nodes=tuple(operation(f"n{k}", output_bytes=1) for k in range(30))).save(
        path
    )
    with pytest.raises(ScheduleError) as raised:
        load_document(path)
    wanted = "format: expected 'poetmodel-schedule', got 'poetmodel-graph'"
    assert raised.value.faults[0] == f"{path}: {wanted}"


@pytest.mark.parametrize("status", ["infeasible", "unknown"])
def test_file_without_a_schedule_says_so(full, status):
    """Without a schedule, the file has no relations, and cannot be loaded."""
    document = {key: value for key, value in full.items() if key not in RELATIONS}
    document["status"] = status
    with pytest.raises(ScheduleError, match=rf"x\.json: R: .*no schedule \(status {status}\)"):
        parse(document)


# -- writing -----------------------------------------------------------------------------------
@given(graph=graphs(on_aux=True, max_nodes=4), data=st.data())
@settings(deadline=None)
def test_no_damage_to_a_file_ends_in_a_crash(graph, data):
    """A file with a character replaced is read or refused with an error of its own."""
    text = format_document(checkpoint_all(graph).to_dict())
    place = data.draw(st.integers(min_value=0, max_value=len(text) - 1))
    damaged = text[:place] + data.draw(st.characters(codec="utf-8")) + text[place + 1 :]
    try:
        load_document("x.json", damaged.encode())
    except ScheduleError as error:
        assert all(fault.startswith("x.json: ") for fault in error.faults)  # noqa: PT017
