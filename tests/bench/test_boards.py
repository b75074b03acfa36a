"""Networks on boards: what is run, and what the page says of its records."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from kit.measured_records import board_record as record
from kit.programs import needs
from mcu import boards
from mcu.boards import (
    BOARD,
    BOARDS,
    KEEP_ALL,
    LAST_LAYER,
    NO,
    OPEN,
    PLACES,
    YES,
    BoardRun,
    measure_board,
    runs,
    smoke_runs,
)
from mcu.others import NOT_STATED, OTHERS
from poetmodel.bench.measurement import FAILED
from poetmodel.device import Device
from poetmodel.device.io import device_names
from result_pages.boards import page, ram_of

if TYPE_CHECKING:
    from kit.messages import Told

KIB = 1024


def refused(answer: str = NO, **facts: Any) -> dict[str, Any]:
    """Return what a record has in place of a deployment."""
    return {"status": answer, "tried": [{"tile": "8KiB", "answer": answer, "reason": ""} | facts]}


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
    assert [ram_of(place) for place in PLACES[:3]] == [256 * KIB] * 3


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize("run", list(smoke_runs()), ids=lambda run: run.name)
def test_a_record_holds_what_the_page_says(run: BoardRun) -> None:
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
        assert facts.get("commit", False) is (run.ram == "64KiB")
    assert page([facts], "run.jsonl")


# -- the page --------------------------------------------------------------------------------------


FLOOR = {"floor_node": "fc", "floor_op": "mm", "floor_bytes": 300 * KIB}
TILED = [
    {"tile": None, "answer": NO, "reason": ""},
    {"tile": "32KiB", "answer": YES, "reason": ""},
]
RECORDS: dict[str, tuple[dict[str, Any], ...]] = {
    "goals": (
        record(),
        record(board="nano33ble", **refused()),
        record(network="resnet8", **refused()),
        record(network="mobilenetv1-vww", board="rp2350", ram="512KiB"),
    ),
    "beside keep-all": (record(), record(KEEP_ALL, instructions=32_000_000)),
    "two states": (record(), record(board="nano33ble", state_sha256="b"), record(KEEP_ALL)),
    "refusals": (
        record(**refused(**FLOOR, reserved_bytes=6 * KIB)),
        record(board="nano33ble", **refused(OPEN, reason="no schedule was found")),
        record(board="stm32f746", status=FAILED, reason="make failed", tried=[]),
    ),
    "tiles": (record(tried=TILED),),
    "kernels": (
        record(KEEP_ALL),
        record(KEEP_ALL, network="lenet", nodes=[], not_counted="QEMU: stopped"),
    ),
}


@pytest.mark.parametrize("case", RECORDS)
def test_page_is_what_the_records_say(case: str, told: Told) -> None:
    """Goals met, missed or met in part; estimates and maps; why not; kernels against the goal.

    A step of `record` takes a second of the core and half a second of transfers.
    """
    told(page(RECORDS[case], "run.jsonl"))


def test_others_have_sources() -> None:
    """Each has an address, and says so where it has no figure."""
    text = page([record()], "run.jsonl")
    for each in OTHERS:
        assert each.url.startswith("https://")
        assert f"[{each.name}]({each.url})" in text
    assert NOT_STATED in text
