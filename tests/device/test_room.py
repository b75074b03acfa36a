"""What a step takes of the RAM of its device."""

from __future__ import annotations

from dataclasses import replace

import pytest

from poetmodel.device import Device
from poetmodel.device.room import DeviceRoom, room_figures
from poetmodel.graph import Graph, operation

GRAPH = Graph(
    name="pair",
    nodes=(operation("a", output_bytes=8), operation("b", output_bytes=4, inputs=("a",))),
)


def room(*, ram: int, peak: int, resident: int) -> DeviceRoom:
    """Return a device's room for a peak beside resident bytes."""
    return DeviceRoom(device="board", ram_bytes=ram, peak_bytes=peak, resident_bytes=resident)


@pytest.mark.parametrize(
    ("ram", "peak", "resident", "fits"),
    [(12, 12, 0, True), (11, 12, 0, False), (20, 12, 8, True), (19, 12, 8, False)],
)
def test_peak_and_resident_bytes_count_together(
    ram: int, peak: int, resident: int, fits: bool
) -> None:
    """A step fits where peak and resident bytes together are at most the RAM, to the byte."""
    found = room(ram=ram, peak=peak, resident=resident)
    assert found.fits is fits
    assert (found.warning() is None) is fits
    assert room_figures(found) == {
        "resident_bytes": resident,
        "device_ram_bytes": ram,
        "fits_device": fits,
    }


@pytest.mark.parametrize(
    ("peak", "resident", "blamed"),
    [
        (20, 0, "the peak alone is too much"),
        (4, 20, "the resident bytes alone are too much"),
        (20, 20, "each alone is too much"),
        (6, 6, "together they are too much"),
    ],
)
def test_warning_names_the_part_that_is_too_much(peak: int, resident: int, blamed: str) -> None:
    """The peak, what is resident, each of them, or only their sum."""
    warning = room(ram=10, peak=peak, resident=resident).warning()
    assert warning is not None
    assert blamed in warning
    assert "device board, which has 10 B of RAM" in warning


def test_graph_and_device_give_the_figures() -> None:
    """Resident bytes are the graph's, RAM is the device's; without a device nothing is said."""
    device = Device.load("paper-m4")
    graph = replace(GRAPH, resident_bytes={"parameters": 5})
    found = DeviceRoom.of(device, graph, 12)
    assert found is not None
    assert (found.device, found.ram_bytes) == ("paper-m4", device.ram_bytes)
    assert (found.peak_bytes, found.resident_bytes) == (12, 5)
    assert DeviceRoom.of(None, graph, 12) is None
    assert set(room_figures(None).values()) == {None}
