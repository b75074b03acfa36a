"""``poetmodel devices``: the built-in devices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from poetmodel.cli import completion
from poetmodel.cli.failures import print_warnings
from poetmodel.cli.inputs import device_warnings
from poetmodel.cli.options import OutputOptions, argument, command, group
from poetmodel.cli.output import figures, listing, print_json, show
from poetmodel.report.presenter import Fact, count, row
from poetmodel.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator

    from poetmodel.device import Device


@group
class DeviceArgument:
    """Which device to show."""

    name: str | None = argument(
        None,
        "NAME",
        "A built-in device, or a device file, *.toml.",
        autocompletion=completion.devices,
    )


@command("poetmodel devices rpi4b")
def devices(shown: DeviceArgument, output: OutputOptions) -> None:
    """List the built-in devices, or show one."""
    from poetmodel.device.io import device_names, load_device

    if shown.name is None:
        boards = [load_device(key) for key in device_names()]
        if output.json:
            print_json([as_dict(board) for board in boards])
            return
        heads = ("device", "core", "RAM", "computes", "transfers")
        show(listing("Devices", heads, map(_cells, boards), left=2))
        return
    board = load_device(shown.name)
    print_warnings(device_warnings(board))
    if output.json:
        print_json(as_dict(board))
        return
    show(figures(board.name, _facts(board)))
    if board.source:
        show("", "Sources of the figures:", board.source.strip())


def as_dict(board: Device) -> dict[str, Any]:
    """Return a device as plain values with the keys of its file, and its short name as ``key``."""
    from dataclasses import asdict

    fields = asdict(board)
    return {"key": fields.pop("key"), **fields}


def _cells(board: Device) -> tuple[str, ...]:
    storage = board.storage
    return (
        board.key,
        board.core,
        format_bytes(board.ram_bytes),
        f"{count(board.compute.flops_per_s)}FLOP/s",
        "no storage" if storage is None else str(storage.mode),
    )


def _facts(board: Device) -> Iterator[Fact]:
    compute, storage = board.compute, board.storage
    yield row("key", board.key, "the name for --device")
    yield row("core", board.core)
    yield row("RAM", format_bytes(board.ram_bytes))
    yield row("compute rate", f"{count(compute.flops_per_s)}FLOP/s")
    if compute.bytes_per_s is not None:
        yield row("RAM bandwidth", f"{count(compute.bytes_per_s)}B/s")
    if compute.flops_per_j is not None:
        implied_w = compute.flops_per_s / compute.flops_per_j
        yield row("efficiency", f"{count(compute.flops_per_j)}FLOP/J", f"implies {implied_w:.3g} W")
    if compute.power_w is not None:
        yield row("compute power", f"{compute.power_w:.4g} W")
    yield row("idle power", f"{board.idle_power_w:.4g} W")
    if storage is None:
        yield row("storage", "none")
        return
    size = "unlimited" if board.aux_bytes is None else format_bytes(board.aux_bytes)
    mapped = ", memory-mapped" if storage.memory_mapped else ""
    yield row("storage", size, f"transfers: {storage.mode}{mapped}")
    if storage.endurance_cycles is not None:
        block = storage.erase_block_bytes
        blocks = "" if block is None else f"of each erase block of {format_bytes(block)}"
        yield row("endurance", f"{count(storage.endurance_cycles)}writes", blocks)
    for name, way in (("page in", storage.page_in), ("page out", storage.page_out)):
        note = f"after {format_seconds(way.latency_s)}, at {way.power_w:.4g} W"
        yield row(name, f"{count(way.bytes_per_s)}B/s", note)
