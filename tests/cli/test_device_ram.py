"""Every command that has a schedule holds it against the RAM of the device, too."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kit.commands import BOARD, Outcome, chain, invoke, profile_rows, write_csv, write_graph

if TYPE_CHECKING:
    from kit.messages import Told

WARNING = "warning: the step does not fit device"
FIGURES = ("resident_bytes", "device_ram_bytes", "fits_device")


@pytest.fixture
def files() -> dict[str, Path]:
    """Return a graph, a board with 300 B of RAM, costs, and a schedule with a peak above that."""
    found = {
        "graph": write_graph(Path("chain.graph.json"), chain()),
        "board": Path("board.toml"),
        "profile": write_csv(Path("chain.csv"), profile_rows()),
        "schedule": Path("chain.schedule.json"),
    }
    found["board"].write_text(BOARD.replace("ram_bytes = 1_000_000", "ram_bytes = 300"))
    assert solve(found, "--out", found["schedule"]).status == 0
    return found


def solve(files: dict[str, Path], *arguments: object, ram: str = "350") -> Outcome:
    """Solve the chain on the small board."""
    return invoke(
        "solve", "--graph", files["graph"], "--device", files["board"], "--ram", ram, *arguments
    )


def test_solve_warns_of_a_peak_above_the_boards_ram(files: dict[str, Path], told: Told) -> None:
    """The table and stderr say it, and the exit status stays that of a schedule that was found."""
    outcome = solve(files)
    assert outcome.status == 0
    assert "does not fit" in outcome.out
    assert WARNING in outcome.err
    told(outcome.err)
    assert solve(files, "--profile", files["profile"]).err.count(WARNING) == 1


def test_state_in_the_graph_is_a_remedy() -> None:
    """Where parameters and gradients are too much, with the least RAM that is then enough."""
    given = ("solve", "resnet8", "--device", "esp32s3", "--time-limit", "20", "--gap", "1")
    outcome = invoke(*given, "--ram", "384KiB")
    assert WARNING in outcome.err
    hint = re.search(r"hint: with (--state .*) parameters .* least ([\d.]+) KiB of", outcome.err)
    assert hint is not None
    enough = invoke(*given, *hint[1].split(), "--ram", f"{hint[2]}KiB")
    assert enough.status == 0
    assert "hint" not in enough.err


def test_resident_bytes_count_beside_the_peak(files: dict[str, Path]) -> None:
    """A peak that fits does not, with the parameters that stay in RAM beside it."""
    graph = Path("heavy.graph.json")
    write_graph(graph, chain() | {"resident_bytes": {"parameters": 999_900}})
    files["board"].write_text(BOARD)
    document = solve(files | {"graph": graph}, "--json").json
    assert document["fits_device"] is False
    assert [document[key] for key in FIGURES[:2]] == [999_900, 1_000_000]
    assert document["peak_ram_bytes"] <= 1_000_000


def test_a_schedule_that_fits_gives_no_warning(files: dict[str, Path]) -> None:
    """On a board with room for all of it the table says so, and stderr is silent."""
    files["board"].write_text(BOARD)
    outcome = solve(files)
    assert WARNING not in outcome.err
    assert "does not fit" not in outcome.out
    assert solve(files, "--json").json["fits_device"] is True


def test_file_states_the_figures_and_is_read_again(files: dict[str, Path]) -> None:
    """The schedule file holds them, verify accepts it, and finds a false claim."""
    document = json.loads(files["schedule"].read_text())
    assert document["device_ram_bytes"] == 300
    assert document["fits_device"] is False
    answer = invoke("verify", files["schedule"], "--graph", files["graph"])
    assert answer.status == 0
    assert WARNING in answer.err
    files["schedule"].write_text(json.dumps(document | {"fits_device": True}))
    answer = invoke("verify", files["schedule"], "--graph", files["graph"])
    assert answer.status == 3
    assert "fits_device" in answer.out


@pytest.mark.parametrize("command", ["verify", "explain", "plan", "report", "diff"])
def test_commands_on_a_schedule_file_warn(files: dict[str, Path], command: str) -> None:
    """Each says that the board is too small: in its table, on stderr and in JSON."""
    page = files["graph"].with_name("page.html")
    more = {"diff": [files["schedule"]], "report": ["--out", page]}.get(command, [])
    arguments = (command, files["schedule"], *more, "--graph", files["graph"])
    outcome = invoke(*arguments)
    assert outcome.status == 0
    assert WARNING in outcome.err
    assert "does not fit" in outcome.out.lower() or "NO" in outcome.out
    if command != "plan":  # whose JSON is the plan file
        assert '"fits_device": false' in invoke(*arguments, "--json").out
    if command == "report":
        assert "Does not fit" in page.read_text()
        assert ">Fits<" not in page.read_text()


def test_limits_warn_where_the_least_ram_is_too_much(files: dict[str, Path]) -> None:
    """The smallest RAM of all is held against the board."""
    files["board"].write_text(BOARD.replace("ram_bytes = 1_000_000", "ram_bytes = 50"))
    outcome = invoke("limits", "--graph", files["graph"], "--device", files["board"], "--ram", 350)
    assert outcome.status == 0
    assert WARNING in outcome.err
    assert "does not fit the device" in " ".join(outcome.out.split())


def test_sweep_names_the_cells_that_do_not_fit(files: dict[str, Path], told: Told) -> None:
    """A sweep counts them, and its rows hold the figures."""
    outcome = invoke(
        "sweep",
        files["graph"],
        *("--devices", files["board"], "--ram", "100%"),
        *("--methods", "checkpoint-all", "--out", Path("sweep")),
    )
    assert outcome.status == 0
    told(outcome.err)
    heads, row = (Path("sweep") / "cells.csv").read_text().splitlines()
    assert dict(zip(heads.split(","), row.split(","), strict=True))["fits_device"] == "False"


def test_gauge_says_what_takes_the_ram_and_whether_the_step_trains(files: dict[str, Path]) -> None:
    """The kinds add up to the peak and the resident bytes, and table and JSON say what is left."""
    document = solve(files, "--json").json
    found = document["device_ram"]
    kinds = ("state_bytes", "activation_bytes", "gradient_bytes", "workspace_bytes")
    assert sum(found[kind] for kind in kinds) == document["peak_ram_bytes"]
    assert found["missing_bytes"] == document["peak_ram_bytes"] - 300 > 0
    assert (found["free_bytes"], found["trains"]) == (0, False)
    assert f"{found['missing_bytes']} B missing" in solve(files).out
    files["board"].write_text(BOARD)
    found = solve(files, "--json").json["device_ram"]
    assert found["trains"] is True
    assert found["free_bytes"] == 1_000_000 - document["peak_ram_bytes"]


def test_a_false_gauge_is_found(files: dict[str, Path]) -> None:
    """The verifier holds every figure of the gauge against the simulation."""
    document = json.loads(files["schedule"].read_text())
    gauge = document["device_ram"]
    for key in gauge:
        false = not gauge[key] if key == "trains" else gauge[key] + 1
        changed = document | {"device_ram": gauge | {key: false}}
        files["schedule"].write_text(json.dumps(changed))
        answer = invoke("verify", files["schedule"], "--graph", files["graph"], "--json")
        assert answer.status == 3
        assert f"device_ram.{key}: the file says" in answer.json["violations"][0]


def test_wear_is_told_where_the_board_states_its_endurance(files: dict[str, Path]) -> None:
    """The steps until the storage is worn: its size times its cycles over what a step writes."""
    plain = solve(files, "--no-recompute")
    assert plain.status == 0
    assert "storage worn" not in plain.out
    assert "steps_until_worn" not in solve(files, "--json").json
    lasting = BOARD.replace('"blocking"', '"blocking"\nendurance_cycles = 10')
    lasting = lasting.replace("aux_bytes = 1_000_000", "aux_bytes = 500")
    files["board"].write_text(lasting)
    out = files["schedule"]
    found = solve(files, "--no-recompute", "--json", "--out", out).json
    assert found["written_bytes"] > 0
    assert found["steps_until_worn"] == 500 * 10 / found["written_bytes"]
    assert "storage worn" in solve(files, "--no-recompute").out
    answer = invoke("verify", out, "--graph", files["graph"], "--json")
    assert answer.status == 0
    assert answer.json["steps_until_worn"] == found["steps_until_worn"]
    out.write_text(json.dumps(found | {"steps_until_worn": 1.0}))
    assert invoke("verify", out, "--graph", files["graph"]).status == 3
