"""``poetmodel inspect``: the numbers of a graph, for people and as JSON."""

from pathlib import Path

import pytest

from kit.commands import BOARD, CHAIN, chain, invoke, refused, write_graph
from kit.worked import state, update
from poetmodel.cli.options import StateName
from poetmodel.graph import Graph, operation, zoo
from poetmodel.graph.catalogue import model_names
from poetmodel.graph.zoo.state import STATES

KEYS = {
    "name",
    "nodes",
    "edges",
    "parameters",
    "forward_macs",
    "flops",
    "resident_bytes",
    "checkpoint_all_peak_bytes",
    "floor_bytes",
    "floor_node",
}


def test_json_has_the_hand_computed_numbers():
    """Edges are (tensor, reader) pairs, peak 404 B, floor 304 B at g2; the unknown is null."""
    facts = invoke("inspect", CHAIN, "--json").json
    assert set(facts) >= KEYS
    assert {key: facts[key] for key in KEYS} == {
        "name": "chain",
        "nodes": 6,
        "edges": 8,
        "parameters": None,
        "forward_macs": None,
        "flops": 6_000_000,
        "resident_bytes": {},
        "checkpoint_all_peak_bytes": 404,
        "floor_bytes": 304,
        "floor_node": "g2",
    }


def test_inference_peak_stands_beside_the_training_peak(told):
    """The forward pass alone takes h1 + h2 (or x + h1) = 200 B of 404 B; unknown without phases."""
    facts = invoke("inspect", CHAIN, "--json").json
    assert facts["inference_peak_bytes"] == 200
    assert facts["inference_peak_node"] == "h1"
    told(invoke("inspect", CHAIN).out)
    nodes = [entry | {"phase": "forward"} for entry in chain()["nodes"]]
    path = write_graph(Path("g.json"), chain() | {"nodes": nodes})
    facts = invoke("inspect", path, "--json").json
    assert (facts["inference_peak_bytes"], facts["inference_peak_node"]) == (None, None)
    assert "peak of the forward pass alone" not in invoke("inspect", path).out


def test_file_beats_nothing_but_a_shipped_name():
    """An existing file is read whatever its name; a shipped model's name always means the model."""
    assert invoke("inspect", "--graph", CHAIN, "--json") == invoke("inspect", CHAIN, "--json")
    for name in ("mine", "mlp"):
        write_graph(Path(name), chain())
    assert invoke("inspect", "mine", "--json").json["name"] == "chain"
    assert invoke("inspect", "mlp", "--json").json["name"] == "mlp"


def test_names_are_printed_as_they_are(told):
    """Brackets are no markup, letters of any script survive, control characters are spelled out."""
    name = "[bold]été[/]\x1b[31mred\nnew"
    path = write_graph(Path("g.json"), chain() | {"name": name})
    told(invoke("inspect", path).out.splitlines()[0])
    assert invoke("inspect", path, "--json").json["name"] == name
    assert "\x1b" not in invoke("inspect", "\x1b[31m.json").err


@pytest.mark.parametrize("name", model_names())
def test_tables_of_shipped_models_fit_80_columns(name):
    """No line of the table of a shipped model is longer than a plain terminal."""
    outcome = invoke("inspect", name, status=0)
    assert max(map(len, outcome.out.splitlines())) <= 80


STEP = Graph(
    name="step",
    nodes=(
        state("w", 100),
        state("v", 40),
        operation("x", output_bytes=30),
        operation("y", output_bytes=20, inputs=("x", "w", "v")),
        operation("dw", output_bytes=100, inputs=("y",), phase="backward", workspace_bytes=5),
        update("u", "dw", w=100),
    ),
)
"""Keep-all: 140 of state beside `y`, `dw` and 5 of workspace, 265 B; floor 200 B at `u`, or 125 B
at `dw` where state is read on storage."""


@pytest.mark.parametrize(
    ("ram_bytes", "mapped", "keep_all", "lowest"),
    [
        (265, False, True, None),
        (264, False, False, None),
        (199, False, False, False),
        (125, True, False, None),
        (124, True, False, False),
    ],
)
def test_device_shows_whether_a_step_trains_there(ram_bytes, told, *, mapped, keep_all, lowest):
    """Gauges of keep-all and of the floor of its storage; a floor that fits proves nothing."""
    STEP.save(Path("step.graph.json"))
    text = BOARD.replace("ram_bytes = 1_000_000", f"ram_bytes = {ram_bytes}")
    if mapped:
        text = text.replace('"blocking"', '"blocking"\nmemory_mapped = true')
    (Path("board.toml")).write_text(text)
    command = ("inspect", Path("step.graph.json"), "--device", Path("board.toml"))
    facts = invoke(*command, "--json").json
    assert facts["state_bytes"] == 140
    assert facts["floor_bytes"] == (125 if mapped else 200)
    assert facts["floor_node"] == ("dw" if mapped else "u")
    gauges = facts["device_ram"]
    assert [gauges[key]["trains"] for key in ("keep_all", "floor")] == [keep_all, lowest]
    kinds = ("state_bytes", "activation_bytes", "gradient_bytes", "workspace_bytes")
    assert [gauges["keep_all"][kind] for kind in kinds] == [140, 20, 100, 5]
    floor = [0, 20, 100, 5] if mapped else [100, 0, 100, 0]
    assert [gauges["floor"][kind] for kind in kinds] == floor
    told(invoke(*command).lines_from("device RAM"))


def test_resident_bytes_are_in_the_gauges_of_a_device():
    """Parameters that no budget counts take RAM of the device all the same."""
    path = write_graph(Path("g.json"), chain() | {"resident_bytes": {"parameters": 999_900}})
    (Path("board.toml")).write_text(BOARD)
    facts = invoke("inspect", path, "--device", Path("board.toml"), "--json").json
    assert facts["device_ram"]["floor"]["state_bytes"] == 999_900
    assert facts["device_ram"]["floor"]["trains"] is False
    assert facts["device_ram"]["floor"]["missing_bytes"] == 999_900 + 304 - 1_000_000
    assert "device_ram" not in invoke("inspect", path, "--json").json


def test_state_options_make_the_graph_of_the_zoo(told):
    """With its state inside, nothing of a built-in network is resident outside."""
    options = ("--state", "momentum", "--in-place", "--tile", "32KiB", "--train", "last-2")
    facts = invoke("inspect", "resnet8", *options, "--json").json
    graph = zoo.resnet8(state="momentum", in_place=True, tile="32KiB", train="last-2")
    assert (facts["sha256"], facts["resident_bytes"]) == (graph.sha256, {})
    assert list(StateName) == list(STATES)
    told(refused("inspect", "resnet8", "--train", "all"))


def test_minimum_ram_says_what_takes_no_room_of_its_own(told):
    """A replacement and an output in place lie in other tensors; mapped state on storage."""
    pair = {"inputs": ("x", "w"), "in_place": (("dw", "x"),), "workspace_bytes": 1}
    nodes = (operation("x", output_bytes=400, phase="input"), state("w", 400))
    path = Path("step.graph.json")
    for last in (update("u", "x", w=400), operation("dw", output_bytes=400, **pair)):
        Graph(name="step", nodes=(*nodes, last)).save(path)
        told(invoke("inspect", path).lines_from("minimum RAM"), last.name)
    mapped = invoke("inspect", path, "--device", "nano33ble")
    told(mapped.lines_from("minimum RAM"), "mapped")
