"""``poetmodel models``, ``devices``, ``inspect``: available models and their requirements."""

import copy
import json
from dataclasses import replace
from functools import reduce
from operator import getitem
from pathlib import Path

import pytest

from kit.commands import BOARD, CHAIN, chain, invoke, invoke_refused, write_graph
from kit.report_subjects import subject
from kit.worked import make_state_node, make_update_node, skip_problem
from poetmodel.cli.options import StateName
from poetmodel.device import Costs, Device
from poetmodel.device.hardware import device_quantities
from poetmodel.device.io import device_names
from poetmodel.graph import Graph, operation, zoo
from poetmodel.graph.catalogue import describe_model, model_names
from poetmodel.graph.zoo.state import STATES
from poetmodel.report.facts import schedule_facts
from poetmodel.report.table_rows import metric_sections


@pytest.mark.parametrize(("command", "known"), [("models", model_names), ("devices", device_names)])
def test_list_has_every_name_on_a_line_of_its_own(command, known):
    """Each shipped name begins one line, unbroken, so that it can be copied."""
    outcome = invoke(command, status=0)
    firsts = [line.split()[0] for line in outcome.out.splitlines() if line.strip()]
    assert [name for name in firsts if name in known()] == list(known())
    assert max(map(len, outcome.out.splitlines())) <= 80


def test_models_are_a_list_of_objects():
    """Lists as JSON have one object each, with the keys of inspect, or figures of its file."""
    entries = invoke("models", "--json").json
    assert [entry["model"] for entry in entries] == list(model_names())
    inspected = invoke("inspect", "resnet18-cifar", "--json").json
    entry = next(entry for entry in entries if entry["model"] == "resnet18-cifar")
    assert entry.items() >= inspected.items()
    entries = invoke("devices", "--json").json
    assert [entry["key"] for entry in entries] == list(device_names())
    entry = next(entry for entry in entries if entry["key"] == "rpi4b")
    board = Device.load("rpi4b")
    assert entry["ram_bytes"] == board.ram_bytes
    assert entry["compute"]["flops_per_s"] == board.compute.flops_per_s
    assert entry["storage"]["page_in"]["latency_s"] == 5.1e-6
    assert entry["source"]


def test_one_model_is_described():
    """A name selects that model alone; the text has its description and the table of inspect."""
    outcome = invoke("models", "resnet18-cifar")
    assert outcome.out.startswith(describe_model("resnet18-cifar"))
    assert "keep-all" in outcome.out
    entry = invoke("models", "mlp", "--json").json
    assert (entry["model"], entry["description"]) == ("mlp", describe_model("mlp"))
    assert "resnet18" in invoke("models", "resnet").err


@pytest.mark.parametrize("name", device_names())
def test_one_device_shows_where_its_figures_come_from(name):
    """A name selects that device, with its source, in 80 columns."""
    outcome = invoke("devices", name, status=0)
    assert Device.load(name).source.split()[0] in outcome.out
    assert max(map(len, outcome.out.splitlines())) <= 80
    assert invoke("devices", name, "--json").json["key"] == name


def test_implausible_device_is_warned_about(told):
    """The published Cortex-A72 implies 49.9 W against 3 W: one warning; files are shown too."""
    outcome = invoke("devices", "paper-a72", status=0)
    assert len(outcome.err.splitlines()) == 1
    told(outcome.err)
    assert "warning" not in outcome.out
    assert invoke("devices", "rpi4b").err == ""
    path = Path("mine.toml")
    path.write_text(BOARD[: BOARD.index("[storage]")])
    outcome = invoke("devices", path, status=0)
    assert "Test board" in outcome.out
    assert "none" in outcome.out
    assert invoke("devices", path, "--json").json["storage"] is None


WHOLE_BOARD = {
    "name": "board", "ram_bytes": 10_000, "aux_bytes": 10_000, "idle_power_w": 0.1,
    "compute": {
        "flops_per_s": 1e6, "power_w": 1.0, "flops_per_j": 1e6, "bytes_per_s": 1e6,
        "cache_line_bytes": 32, "memory_factor": 1.5,
    },
    "storage": {
        "mode": "dma", "endurance_cycles": 1e4, "erase_block_bytes": 64,
        "page_in": {"latency_s": 0.1, "bytes_per_s": 1e4, "power_w": 1.0},
        "page_out": {"latency_s": 0.1, "bytes_per_s": 1e4, "power_w": 1.0},
    },
    "flash": {
        "size_bytes": 40_000, "write_unit_bytes": 4, "erase_block_bytes": 64, "erase_s": 0.1,
        "write_bytes_per_s": 1e4, "power_w": 1.0, "endurance_cycles": 1e4, "storage_bytes": 20_000,
    },
}  # fmt: skip
"""A device file with each figure that there is."""


def in_toml(values, table=""):
    """Return a table of a file, and those in it after it."""
    plain = {key: value for key, value in values.items() if not isinstance(value, dict)}
    lines = [f"[{table}]"] if table else []
    lines += [f"{key} = {json.dumps(value)}" for key, value in plain.items()]
    inner = (f"{table}.{key}".lstrip(".") for key in values if key not in plain)
    tables = [value for value in values.values() if isinstance(value, dict)]
    return "\n".join([*lines, *map(in_toml, tables, inner)])


@pytest.mark.parametrize("path", [path for path, _ in device_quantities()])
def test_every_figure_of_a_device_is_read_checked_and_shown(path, tmp_path):
    """In files, faults, doubts, ``devices`` as a table and as JSON, and in reports."""
    known = dict(device_quantities())[path]
    *tables, key = path.split(".")

    def told(value, *options):
        values = copy.deepcopy(WHOLE_BOARD)
        part = reduce(getitem, tables, values)
        part[key] = value
        (tmp_path / "board.toml").write_text(in_toml(values))
        return invoke("devices", tmp_path / "board.toml", *options)

    value = reduce(getitem, (*tables, key), WHOLE_BOARD)
    assert reduce(getitem, (*tables, key), told(value, "--json").json) == value
    assert known.name in told(value).out
    named = f"[{'.'.join(tables)}] {key}" if tables else key
    refused = told(-1)
    assert (refused.status, f"{named}: expected" in refused.err) == (2, True)
    if known.typical_range is not None and known.unit != "B":
        assert f"{named} is 1e+30 {known.unit}" in told(1e30).err
    told(value)
    board = Device.load(str(tmp_path / "board.toml"))
    one = subject(skip_problem())
    one = replace(one, costs=Costs.estimate(one.graph, board))
    rows = {
        row[0].key: row[0] for _, part in metric_sections([schedule_facts(one)]) for row in part
    }
    assert (rows[f"device.{path}"].name, rows[f"device.{path}"].value) == (known.name, value)


# -- inspect -------------------------------------------------------------------------------------
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
    """The forward pass needs h1 + h2 (or x + h1) = 200 B of 404 B; unknown without phases."""
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
        make_state_node("w", 100),
        make_state_node("v", 40),
        operation("x", output_bytes=30),
        operation("y", output_bytes=20, inputs=("x", "w", "v")),
        operation("dw", output_bytes=100, inputs=("y",), phase="backward", workspace_bytes=5),
        make_update_node("u", "dw", w=100),
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
    """Gauges of keep-all and of the minimum RAM; a minimum that fits proves nothing."""
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
    """Parameters that no budget counts use RAM of the device all the same."""
    path = write_graph(Path("g.json"), chain() | {"resident_bytes": {"parameters": 999_900}})
    (Path("board.toml")).write_text(BOARD)
    facts = invoke("inspect", path, "--device", Path("board.toml"), "--json").json
    assert facts["device_ram"]["floor"]["state_bytes"] == 999_900
    assert facts["device_ram"]["floor"]["trains"] is False
    assert facts["device_ram"]["floor"]["missing_bytes"] == 999_900 + 304 - 1_000_000
    assert "device_ram" not in invoke("inspect", path, "--json").json


def test_state_options_make_the_graph_of_the_zoo(told):
    """With state in the graph, a built-in network has no resident bytes."""
    options = ("--state", "momentum", "--in-place", "--tile", "32KiB", "--train", "last-2")
    facts = invoke("inspect", "resnet8", *options, "--json").json
    graph = zoo.resnet8(state="momentum", in_place=True, tile="32KiB", train="last-2")
    assert (facts["sha256"], facts["resident_bytes"]) == (graph.sha256, {})
    assert list(StateName) == list(STATES)
    told(invoke_refused("inspect", "resnet8", "--train", "all"))


def test_minimum_ram_says_what_takes_no_room_of_its_own(told):
    """A replacement and an output in place lie in other tensors; mapped state on storage."""
    pair = {"inputs": ("x", "w"), "in_place": (("dw", "x"),), "workspace_bytes": 1}
    nodes = (operation("x", output_bytes=400, phase="input"), make_state_node("w", 400))
    path = Path("step.graph.json")
    for last in (make_update_node("u", "x", w=400), operation("dw", output_bytes=400, **pair)):
        Graph(name="step", nodes=(*nodes, last)).save(path)
        told(invoke("inspect", path).lines_from("minimum RAM"), last.name)
    mapped = invoke("inspect", path, "--device", "nano33ble")
    told(mapped.lines_from("minimum RAM"), "mapped")
