"""``poetmodel inspect``: the numbers of a graph, for people and as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kit.commands import BOARD, chain, invoke, node, write_graph
from kit.worked import state, update
from poetmodel.cli.options import StateName
from poetmodel.graph import Graph, operation, zoo
from poetmodel.graph.catalogue import model_names
from poetmodel.graph.zoo.state import STATES

if TYPE_CHECKING:
    from pathlib import Path

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


def test_json_has_the_hand_computed_numbers(chain_file: Path) -> None:
    """Edges are (tensor, reader) pairs, peak 404 B, floor 304 B at g2; the unknown is null."""
    facts = invoke("inspect", chain_file, "--json").json
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


def test_inference_peak_stands_beside_the_training_peak(chain_file: Path, tmp_path: Path) -> None:
    """The forward pass alone takes h1 + h2 (or x + h1) = 200 B of 404 B; unknown without phases."""
    facts = invoke("inspect", chain_file, "--json").json
    assert facts["inference_peak_bytes"] == 200
    assert facts["inference_peak_node"] == "h1"
    out = " ".join(invoke("inspect", chain_file).out.split())
    words = "peak of the forward pass alone, at h1; training takes 2.02 times as much"
    assert f"inference 200 B {words}" in out
    nodes = [entry | {"phase": "forward"} for entry in chain()["nodes"]]
    path = write_graph(tmp_path / "g.json", chain() | {"nodes": nodes})
    facts = invoke("inspect", path, "--json").json
    assert (facts["inference_peak_bytes"], facts["inference_peak_node"]) == (None, None)
    assert "inference unknown" in " ".join(invoke("inspect", path).out.split())


def test_option_and_argument_read_the_same_file(chain_file: Path) -> None:
    """A graph file may be given as --graph or as the argument."""
    assert invoke("inspect", "--graph", chain_file, "--json") == invoke(
        "inspect", chain_file, "--json"
    )


def test_file_beats_nothing_but_a_shipped_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An existing file is read whatever its name; a shipped model's name always means the model."""
    monkeypatch.chdir(tmp_path)
    for name in ("mine", "mlp"):
        write_graph(tmp_path / name, chain())
    assert invoke("inspect", "mine", "--json").json["name"] == "chain"
    assert invoke("inspect", "mlp", "--json").json["name"] == "mlp"


def test_table_shows_what_json_says(chain_file: Path) -> None:
    """The table has peak, floor, the floor's tensors, phases and the largest tensors."""
    outcome = invoke("inspect", chain_file)
    assert outcome.status == 0
    assert outcome.err == ""
    for text in ("404 B", "304 B", "needed by", "g2", "backward", "Largest tensors", "8 edges"):
        assert text in outcome.out


@pytest.mark.parametrize("name", model_names())
def test_tables_of_shipped_models_fit_80_columns(name: str) -> None:
    """No line of the table of a shipped model is longer than a plain terminal."""
    outcome = invoke("inspect", name)
    assert outcome.status == 0
    assert max(map(len, outcome.out.splitlines())) <= 80


def test_graph_without_tensors_is_shown(tmp_path: Path) -> None:
    """A node that makes nothing is a graph too: one node, no bytes."""
    lonely = {key: value for key, value in node("x").items() if key != "output_bytes"}
    document = chain() | {"nodes": [lonely | {"outputs": []}]}
    path = write_graph(tmp_path / "g.json", document)
    assert invoke("inspect", path).status == 0
    assert invoke("inspect", path, "--json").json["checkpoint_all_peak_bytes"] == 0


def test_names_are_printed_as_they_are(tmp_path: Path) -> None:
    """Brackets in names are no markup, and letters of any script survive."""
    document = chain() | {"name": "[bold]été[/]"}
    path = write_graph(tmp_path / "g.json", document)
    assert "[bold]été[/]" in invoke("inspect", path).out
    assert invoke("inspect", path, "--json").json["name"] == "[bold]été[/]"


def test_names_cannot_steer_the_terminal(tmp_path: Path) -> None:
    """Control characters in names are spelled out, in tables and in errors."""
    document = chain() | {"name": "a\x1b[31mred\nnew"}
    path = write_graph(tmp_path / "g.json", document)
    outcome = invoke("inspect", path)
    assert "a\\x1b[31mred\\nnew" in outcome.out
    assert "\x1b" not in outcome.out
    assert invoke("inspect", path, "--json").json["name"] == document["name"]
    assert "\x1b" not in invoke("inspect", "\x1b[31m.json").err


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
    ("ram_bytes", "mapped", "keep_all", "lowest", "told"),
    [
        (265, False, True, None, "keep-all trains there"),
        (264, False, False, None, "keep-all does not fit, a schedule may"),
        (199, False, False, False, "no schedule trains there"),
        (125, True, False, None, "keep-all does not fit, a schedule may"),
        (124, True, False, False, "no schedule trains there"),
    ],
)
def test_device_shows_whether_a_step_trains_there(
    tmp_path: Path, ram_bytes: int, *, mapped: bool, keep_all: bool, lowest: bool | None, told: str
) -> None:
    """Gauges of keep-all and of the floor of its storage; a floor that fits proves nothing."""
    STEP.save(tmp_path / "step.graph.json")
    text = BOARD.replace("ram_bytes = 1_000_000", f"ram_bytes = {ram_bytes}")
    if mapped:
        text = text.replace('"blocking"', '"blocking"\nmemory_mapped = true')
    (tmp_path / "board.toml").write_text(text)
    command = ("inspect", tmp_path / "step.graph.json", "--device", tmp_path / "board.toml")
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
    assert told in " ".join(invoke(*command).out.split())


def test_resident_bytes_are_in_the_gauges_of_a_device(tmp_path: Path) -> None:
    """Parameters that no budget counts take RAM of the device all the same."""
    path = write_graph(tmp_path / "g.json", chain() | {"resident_bytes": {"parameters": 999_900}})
    (tmp_path / "board.toml").write_text(BOARD)
    facts = invoke("inspect", path, "--device", tmp_path / "board.toml", "--json").json
    assert facts["device_ram"]["floor"]["state_bytes"] == 999_900
    assert facts["device_ram"]["floor"]["trains"] is False
    assert facts["device_ram"]["floor"]["missing_bytes"] == 999_900 + 304 - 1_000_000
    assert "device_ram" not in invoke("inspect", path, "--json").json


def test_state_options_make_the_graph_of_the_zoo() -> None:
    """With its state inside, nothing of a built-in network is resident outside."""
    options = ("--state", "momentum", "--in-place", "--tile", "32KiB", "--train", "last-2")
    facts = invoke("inspect", "resnet8", *options, "--json").json
    graph = zoo.resnet8(state="momentum", in_place=True, tile="32KiB", train="last-2")
    assert (facts["sha256"], facts["resident_bytes"]) == (graph.sha256, {})
    refused = invoke("inspect", "resnet8", "--train", "all")
    assert refused.status == 2
    assert "--train: 'all' is for a step with state in its graph" in refused.err


def test_state_option_knows_the_states_of_the_zoo() -> None:
    """What ``--state`` accepts is what the networks do."""
    assert list(StateName) == list(STATES)


def test_minimum_ram_says_what_takes_no_room_of_its_own(tmp_path: Path) -> None:
    """A replacement and an output in place lie in other tensors; mapped state on storage."""
    pair = {"inputs": ("x", "w"), "in_place": (("dw", "x"),), "workspace_bytes": 1}
    nodes = (
        operation("x", output_bytes=400, phase="input"),
        state("w", 400),
    )
    path = tmp_path / "step.graph.json"
    for last, told in (
        (update("u", "x", w=400), "w+, in the memory of w"),
        (operation("dw", output_bytes=400, **pair), "dw, in the memory of x"),
    ):
        Graph(name="step", nodes=(*nodes, last)).save(path)
        words = " ".join(invoke("inspect", path).out.split())
        assert "minimum RAM 800 B" in words or "minimum RAM 801 B" in words
        assert f"reads 400 B x reads 400 B w writes 400 B {told}" in words
    mapped = " ".join(invoke("inspect", path, "--device", "nano33ble").out.split())
    assert "reads 400 B w, read where it lies" in mapped
