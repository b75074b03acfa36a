"""Networks on boards: what is run, and what a record of it holds."""

from __future__ import annotations

import json

import pytest

from kit.programs import needs
from mcu import boards
from mcu.boards import (
    BOARD,
    BOARDS,
    KEEP_ALL,
    LAST_LAYER,
    NO,
    PLACES,
    YES,
    BoardRun,
    measure_board,
    runs,
    smoke_runs,
)
from poetmodel.device import Device
from poetmodel.device.io import device_names
from step_tables import ram_of

KIB = 1024


# -- what is run -----------------------------------------------------------------------------------


def test_every_network_meets_every_board() -> None:
    """No two runs have the same record, and each network has its references."""
    everything = list(runs())
    assert len({run.key for run in everything}) == len(everything)
    met = {(run.network, run.board, run.ram) for run in everything if run.part == BOARD}
    assert met == {(name, *place) for name in boards.ON_BOARDS for place in PLACES}
    for part in (KEEP_ALL, LAST_LAYER):
        assert [run.network for run in everything if run.part == part] == list(boards.ON_BOARDS)


def test_boards_are_shipped_and_say_their_clock() -> None:
    """The clock that times are estimated with is that of the device file."""
    assert set(BOARDS) <= set(device_names())
    assert {board for board, _ in PLACES} == set(BOARDS)
    assert Device.load("nrf52840").clock_hz == 64e6
    assert all(Device.load(board).clock_hz for board in BOARDS)
    assert [ram_of(*place) for place in PLACES[:3]] == [256 * KIB] * 3


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize("run", list(smoke_runs()), ids=lambda run: run.name)
def test_a_record_holds_what_was_measured(run: BoardRun) -> None:
    """Every kind of run at its smallest size: built, run, and its losses those of the host."""
    pytest.importorskip("torch")
    needs(BOARDS[run.board])
    facts = measure_board(run.to_dict())
    json.dumps(facts, allow_nan=False)
    assert facts["cell"] == run.to_dict()
    assert facts["status"] == (NO if run.network == "mobilenetv1-vww" else YES), facts["reason"]
    if facts["status"] == YES:
        assert facts["ram_bytes"] <= facts["ram_limit_bytes"]
        assert facts["stack_bytes"] <= facts["stack_limit_bytes"]
        assert facts["losses"][1] < facts["losses"][0]
