"""``poetmodel models``, ``devices`` and ``doctor``: what comes along, and what is installed."""

import copy
import json
from dataclasses import replace
from functools import reduce
from operator import getitem
from pathlib import Path

import pytest

from kit.commands import BOARD, invoke
from kit.report_subjects import subject
from kit.worked import skip_problem
from poetmodel.backends import registry
from poetmodel.cli import doctor as module
from poetmodel.device import Costs
from poetmodel.device.hardware import device_figures
from poetmodel.device.io import device_names, load_device
from poetmodel.errors import BackendError, BackendUnavailableError, LicenceError
from poetmodel.graph.catalogue import describe_model, model_names
from poetmodel.report.facts import facts
from poetmodel.report.figures import figures as report_figures


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
    board = load_device("rpi4b")
    assert entry["ram_bytes"] == board.ram_bytes
    assert entry["compute"]["flops_per_s"] == board.compute.flops_per_s
    assert entry["storage"]["page_in"]["latency_s"] == 5.1e-6
    assert entry["source"]


def test_one_model_is_described():
    """A name gives that model alone; for people its description and the table of inspect."""
    outcome = invoke("models", "resnet18-cifar")
    assert outcome.out.startswith(describe_model("resnet18-cifar"))
    assert "keep-all" in outcome.out
    entry = invoke("models", "mlp", "--json").json
    assert (entry["model"], entry["description"]) == ("mlp", describe_model("mlp"))
    assert "resnet18" in invoke("models", "resnet").err


@pytest.mark.parametrize("name", device_names())
def test_one_device_shows_where_its_figures_come_from(name):
    """A name gives that device, with its source, in 80 columns."""
    outcome = invoke("devices", name, status=0)
    assert load_device(name).source.split()[0] in outcome.out
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


def test_every_back_end_and_extra_is_listed(monkeypatch):
    """Each has a state; HiGHS, which comes along, solves a model; a wrong value is no success."""
    document = invoke("doctor", "--json").json
    assert document["works"] is True
    assert [found["name"] for found in document["backends"]] == ["highs", "scip", "gurobi"]
    assert document["backends"][0]["state"] == "works"
    assert [found["name"] for found in document["extras"]] == list(module.EXTRAS)
    states = {found["state"] for found in (*document["backends"], *document["extras"])}
    assert states <= {"works", "installed", "missing", "broken"}
    monkeypatch.setattr(registry, "_least", lambda *_: 2.0)
    assert invoke("doctor", "--json").json["backends"][0]["state"] == "broken"


def test_table_fits_and_says_how_to_install(monkeypatch):
    """A missing package comes with the command that installs its extra."""
    monkeypatch.setattr(module, "installed", lambda _: None)
    outcome = invoke("doctor")
    assert (outcome.status, outcome.err) == (0, "")
    assert max(map(len, outcome.out.splitlines())) <= 80
    for extra in {extra for extra, _ in module.EXTRAS.values()}:
        assert f"poetmodel[{extra}]" in " ".join(outcome.out.split())


@pytest.mark.parametrize(
    ("error", "state"),
    [(BackendUnavailableError("not here"), "missing"), (BackendError("no good"), "broken")],
)
def test_what_does_not_work_is_said(error, state, monkeypatch):
    """A back end that is missing or fails says so; without the default one the status is 5."""
    from poetmodel.backends.highs import Highs

    def fail(*_, **__):
        raise error

    monkeypatch.setattr(Highs, "versions" if state == "missing" else "solve", fail)
    outcome = invoke("doctor", "--json", status=5)
    found = outcome.json["backends"][0]
    assert (found["state"], found["remark"]) == (state, str(error))
    assert outcome.json["works"] is False


def test_licence_that_refuses_large_models_is_named(monkeypatch):
    """A small model works and a larger one is refused: the licence is limited."""
    real = registry._least

    def limited(name, columns, rows):
        if columns >= registry.LICENCE_SIZE:
            msg = "too large"
            raise LicenceError(msg)
        return real(name, columns, rows)

    monkeypatch.setattr(registry, "_least", limited)
    found = invoke("doctor", "--json").json["backends"][0]
    assert (found["state"], found["remark"]) == ("works", "the licence is limited to small models")


WHOLE_BOARD = {
    "name": "board", "ram_bytes": 10_000, "aux_bytes": 10_000, "idle_power_w": 0.1,
    "compute": {
        "flops_per_s": 1e6, "power_w": 1.0, "flops_per_j": 1e6, "bytes_per_s": 1e6,
        "cache_line_bytes": 32,
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


@pytest.mark.parametrize("path", [path for path, _ in device_figures()])
def test_every_figure_of_a_device_is_read_checked_and_shown(path, tmp_path):
    """In files, faults, doubts, ``devices`` as a table and as JSON, and in reports."""
    known = dict(device_figures())[path]
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
    if known.usual is not None and known.unit != "B":
        assert f"{named} is 1e+30 {known.unit}" in told(1e30).err
    told(value)
    board = load_device(str(tmp_path / "board.toml"))
    one = subject(skip_problem())
    one = replace(one, costs=Costs.estimate(one.graph, board))
    rows = {row[0].key: row[0] for _, part in report_figures([facts(one)]) for row in part}
    assert (rows[f"device.{path}"].name, rows[f"device.{path}"].value) == (known.name, value)
