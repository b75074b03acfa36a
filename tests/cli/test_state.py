"""The command line with a graph of version 2."""

from pathlib import Path

import pytest

from kit.commands import BOARD_FILE, invoke, training_step, write_graph
from kit.worked import make_state_node, make_update_node
from poetmodel.graph import Graph, operation
from poetmodel.schedule import GraphIdentity, Schedule


@pytest.fixture
def step():
    """Return y = f(x, w) in place of x, and w+ = u(w, y)."""
    return Graph(
        name="step",
        nodes=(
            operation("x", output_bytes=1000),
            make_state_node("w", 800),
            operation("y", output_bytes=600, inputs=("x", "w"), in_place={"y": "x"}),
            make_update_node("u", "y", w=800),
        ),
    )


@pytest.fixture
def path(step):
    """Return its file."""
    file = Path("step.graph.json")
    step.save(file)
    return file


# -- what commands say of a schedule with state in both homes ----------------------------------
@pytest.fixture
def solved():
    """Return a maker of the schedule of a training step in so much RAM, and its graph file."""

    def solve(ram):
        graph = write_graph(Path("train.graph.json"), training_step())
        file = Path(f"{ram}.schedule.json")
        arguments = ("--device", BOARD_FILE, "--ram", ram, "--out", file)
        assert invoke("solve", "--graph", graph, *arguments).status == 0
        return file, graph

    return solve


def words(text):
    """Return a text with single spaces."""
    return " ".join(text.split())


def test_solve_and_verify_say_where_state_is(solved):
    """Bytes of state in RAM and on storage, and transfers of state per step."""
    file, graph = solved(900)
    outcome = invoke("solve", "--graph", graph, "--device", BOARD_FILE, "--ram", 900)
    out = words(outcome.out)
    assert "resident state 300 B 1 of 2 tensors in RAM throughout" in out
    assert "state on storage 200 B 1 tensor: 400 B read, 200 B written back a step" in out
    verified = invoke("verify", file, "--graph", graph)
    assert "state on storage 200 B 1 tensor: 400 B read" in words(verified.out)
    assert invoke("verify", file, "--graph", graph, "--json").json["state"] == {
        "tensors": 2,
        "resident": 1,
        "resident_bytes": 300,
        "on_storage_bytes": 200,
        "read_bytes": 400,
        "written_back_bytes": 200,
    }


def test_explain_prices_homes_and_tells_what_is_in_place(solved, told):
    """State on storage costs its reads, the first one too, and its write-back."""
    file, graph = solved(900)
    found = invoke("explain", file, "--graph", graph, "--json").json
    tensors = {entry["tensor"]: entry for entry in found["tensors"]}
    assert tensors["w2"]["fate"] == "resident"
    assert (tensors["w1"]["fate"], tensors["w1"]["paged_in"]) == ("on storage", [1, 12])
    assert tensors["w1"]["paged_out"] == [12]
    assert tensors["w1"]["energy_j"] == pytest.approx(3 * (0.001 + 200 / 100000))
    assert (tensors["w1+"]["fate"], tensors["w1+"]["energy_j"]) == ("replacement", 0)
    assert found["in_place"] == {"uses": 2, "possible": 2, "saved_at_peak_bytes": 0}
    for tensor in ((), ("w1",), ("w1+",), ("r",)):
        told(invoke("explain", file, *tensor, "--graph", graph).out, "".join(tensor))


def test_diff_names_the_homes_that_differ(solved, told):
    """Less RAM moves w1 to storage; replacements are no differences of their own."""
    less, graph = solved(700)
    more, _ = solved(900)
    found = invoke("diff", more, less, "--graph", graph, "--json").json
    homes = {
        entry["tensor"]: (entry["a"]["fate"], entry["b"]["fate"]) for entry in found["changed"]
    }
    assert homes["w2"] == ("resident", "on storage")
    assert not {"w1+", "w2+", "w1"} & set(homes)
    first, second = (entry["state"] for entry in found["schedules"])
    assert (first["resident_bytes"], second["resident_bytes"]) == (300, 0)
    told(invoke("diff", more, less, "--graph", graph).out.partition("time ")[2])


def test_least_ram_is_that_in_which_the_network_trains(solved):
    """The minimum has no resident state; without paging, all of it; other limits are printed."""
    _, graph = solved(1140)
    board = ("--graph", graph, "--device", BOARD_FILE)
    out = words(invoke("solve", *board, "--minimize", "ram").out)
    assert "minimized ram 600 B the least RAM in which this network trains at all" in out
    out = words(invoke("solve", *board, "--minimize", "ram", "--no-paging").out)
    assert "minimized ram 940 B the least RAM in which this network trains within" in out
    found = invoke("limits", *board, "--json").json
    assert found["floor_bytes"] == 600
    least = {name: limit["value"] for name, limit in found["ram"].items()}
    assert least == {"keep_all": 1140, "recompute": 940, "page": 600, "both": 600}
    assert invoke("limits", *board, "--no-paging", "--json").json["floor_bytes"] == 940


def test_plan_tells_what_is_read_and_written_back(step, path, told):
    """State on storage is a row of the table, and named where it moves in the listing."""
    file, made = Path("step.schedule.json"), Path("step.plan.json")
    Schedule(
        R=tuple((t, t) for t in range(4)),
        S_RAM=((1, 0), (2, 0), (2, 1), (3, 1), (3, 2)),
        S_AUX=((2, 1), (3, 1)),
        M_out=((3, 3),),
        identity=GraphIdentity.from_graph(step),
    ).save(file)
    given = (file, "--graph", path, "--device", "mkr1000")
    outcome = invoke("plan", *given, "--out", made, status=0)
    told(outcome.out)
    told(invoke("plan", *given, "--format", "text").out, "text")
    assert invoke("verify", made, "--graph", path, "--device", "mkr1000").status == 0


def test_too_little_ram_is_explained(solved, told):
    """The output recommends RAM, paging or storage; and that a gradient could be divided."""
    _, graph = solved(1140)
    board = ("solve", "--graph", graph, "--device", BOARD_FILE)
    told(invoke(*board, "--ram", 599, status=3).err)
    told(invoke(*board, "--ram", 900, "--no-paging", status=3).err, "resident")
    told(invoke(*board, "--ram", 700, "--aux", 100, status=3).err, "small")
