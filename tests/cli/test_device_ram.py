"""Every command that has a schedule holds it against the RAM of the device, too."""

import json
import re
from pathlib import Path

import pytest

from kit.commands import BOARD, BOARD_FILE, CHAIN, PROFILE, chain, invoke, write_graph

WARNING = "warning: the step does not fit device"


SCHEDULE = Path("chain.schedule.json")
"""File of a schedule with a peak above the RAM of the board."""


@pytest.fixture(autouse=True)
def _small_board():
    """Write a board with 300 B of RAM, and the schedule."""
    BOARD_FILE.write_text(BOARD.replace("ram_bytes = 1_000_000", "ram_bytes = 300"))
    assert solve("--out", SCHEDULE).status == 0


def solve(*arguments, graph=CHAIN, **due):
    """Solve the chain on the small board."""
    given = ("--graph", graph, "--device", BOARD_FILE, "--ram", 350)
    return invoke("solve", *given, *arguments, **due)


def test_solve_warns_of_a_peak_above_the_boards_ram(told):
    """The table and stderr warn of a peak above the RAM; the exit status stays 0."""
    outcome = solve(status=0)
    assert "does not fit" in outcome.out
    assert WARNING in outcome.err
    told(outcome.err)
    assert solve("--profile", PROFILE).err.count(WARNING) == 1


def test_state_in_the_graph_is_a_remedy():
    """Where parameters and gradients are too much, with the least RAM that is then enough."""
    given = ("solve", "resnet8", "--device", "esp32s3", "--time-limit", "20", "--gap", "1")
    outcome = invoke(*given, "--ram", "384KiB")
    assert WARNING in outcome.err
    hint = re.search(r"hint: with (--state .*) parameters .* least ([\d.]+) KiB of", outcome.err)
    assert hint is not None
    enough = invoke(*given, *hint[1].split(), "--ram", f"{hint[2]}KiB", status=0)
    assert "hint" not in enough.err


def test_resident_bytes_count_beside_the_peak():
    """A peak that fits does not, with the parameters that stay in RAM beside it."""
    BOARD_FILE.write_text(BOARD)
    roomy = solve()
    assert WARNING not in roomy.err
    assert "does not fit" not in roomy.out
    assert solve("--json").json["fits_device"] is True
    graph = write_graph(
        Path("heavy.graph.json"), chain() | {"resident_bytes": {"parameters": 999_900}}
    )
    document = solve("--json", graph=graph).json
    assert document["fits_device"] is False
    assert (document["resident_bytes"], document["device_ram_bytes"]) == (999_900, 1_000_000)
    assert document["peak_ram_bytes"] <= 1_000_000


def test_file_states_the_figures_and_is_read_again():
    """The schedule file holds them, verify accepts it, and finds a false claim."""
    document = json.loads(SCHEDULE.read_text())
    assert document["device_ram_bytes"] == 300
    assert document["fits_device"] is False
    answer = invoke("verify", SCHEDULE, "--graph", CHAIN, status=0)
    assert WARNING in answer.err
    SCHEDULE.write_text(json.dumps(document | {"fits_device": True}))
    answer = invoke("verify", SCHEDULE, "--graph", CHAIN, status=3)
    assert "fits_device" in answer.out


@pytest.mark.parametrize("command", ["verify", "explain", "plan", "report", "diff"])
def test_commands_on_a_schedule_file_warn(command):
    """Commands on a schedule file warn that the board is too small: table, stderr and JSON."""
    page = Path("page.html")
    more = {"diff": [SCHEDULE], "report": ["--out", page]}.get(command, [])
    arguments = (command, SCHEDULE, *more, "--graph", CHAIN)
    outcome = invoke(*arguments, status=0)
    assert WARNING in outcome.err
    assert "does not fit" in outcome.out.lower() or "NO" in outcome.out
    if command != "plan":  # whose JSON is the plan file
        assert '"fits_device": false' in invoke(*arguments, "--json").out
    if command == "report":
        assert "Does not fit" in page.read_text()
        assert ">Fits<" not in page.read_text()


def test_limits_warn_where_the_least_ram_is_too_much():
    """The smallest RAM of all is held against the board."""
    BOARD_FILE.write_text(BOARD.replace("ram_bytes = 1_000_000", "ram_bytes = 50"))
    outcome = invoke("limits", "--graph", CHAIN, "--device", BOARD_FILE, "--ram", 350, status=0)
    assert WARNING in outcome.err
    assert "does not fit the device" in " ".join(outcome.out.split())


def test_sweep_names_the_cells_that_do_not_fit(told):
    """A sweep counts them, and its rows hold the figures."""
    outcome = invoke(
        "sweep",
        CHAIN,
        *("--devices", BOARD_FILE, "--ram", "100%"),
        *("--methods", "checkpoint-all", "--out", Path("sweep")),
    )
    assert outcome.status == 0
    told(outcome.err)
    heads, row = (Path("sweep") / "cells.csv").read_text().splitlines()
    assert dict(zip(heads.split(","), row.split(","), strict=True))["fits_device"] == "False"


def test_gauge_says_what_takes_the_ram_and_whether_the_step_trains():
    """The parts of the gauge sum to the peak, and false numbers are violations.

    Table and JSON state the free RAM.
    """
    document = solve("--json").json
    found = document["device_ram"]
    kinds = ("state_bytes", "activation_bytes", "gradient_bytes", "workspace_bytes")
    assert sum(found[kind] for kind in kinds) == document["peak_ram_bytes"]
    assert found["missing_bytes"] == document["peak_ram_bytes"] - 300 > 0
    assert (found["free_bytes"], found["trains"]) == (0, False)
    assert f"{found['missing_bytes']} B missing" in solve().out
    for key in found:
        false = not found[key] if key == "trains" else found[key] + 1
        changed = document | {"device_ram": found | {key: false}}
        SCHEDULE.write_text(json.dumps(changed))
        answer = invoke("verify", SCHEDULE, "--graph", CHAIN, "--json", status=3)
        assert f"device_ram.{key}: the file says" in answer.json["violations"][0]
    BOARD_FILE.write_text(BOARD)
    found = solve("--json").json["device_ram"]
    assert found["trains"] is True
    assert found["free_bytes"] == 1_000_000 - document["peak_ram_bytes"]


def test_wear_is_told_where_the_board_states_its_endurance():
    """The steps until the storage is worn: its size times its cycles over the bytes of a step."""
    plain = solve("--no-recompute", status=0)
    assert "storage worn" not in plain.out
    assert "steps_until_worn" not in solve("--json").json
    lasting = BOARD.replace('"blocking"', '"blocking"\nendurance_cycles = 10')
    lasting = lasting.replace("aux_bytes = 1_000_000", "aux_bytes = 500")
    BOARD_FILE.write_text(lasting)
    out = SCHEDULE
    found = solve("--no-recompute", "--json", "--out", out).json
    assert found["written_bytes"] > 0
    assert found["steps_until_worn"] == 500 * 10 / found["written_bytes"]
    assert "storage worn" in solve("--no-recompute").out
    answer = invoke("verify", out, "--graph", CHAIN, "--json", status=0)
    assert answer.json["steps_until_worn"] == found["steps_until_worn"]
    out.write_text(json.dumps(found | {"steps_until_worn": 1.0}))
    assert invoke("verify", out, "--graph", CHAIN).status == 3
