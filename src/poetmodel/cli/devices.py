"""``poetmodel devices``: the built-in devices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from poetmodel.cli import completion, options
from poetmodel.cli.failures import print_warnings
from poetmodel.cli.output import count, figures, listing, print_json, show
from poetmodel.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator

    from poetmodel.device import Device, Transfer

EPILOG: Final = "Example: poetmodel devices rpi4b"

NameArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="NAME",
        autocompletion=completion.one(completion.devices),
        help="A built-in device, or a device file, *.toml.",
        show_default=False,
    ),
]


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("devices", epilog=EPILOG)(devices)


def devices(
    name: NameArgument = None,
    *,
    json: options.JsonOption = False,
    quiet: options.QuietOption = False,  # noqa: ARG001 - acts while it is parsed
) -> None:
    """List the built-in devices, or show one."""
    if name is not None:
        _show_one(name, json=json)
        return
    from poetmodel.device.io import device_names, load_device

    boards = [load_device(key) for key in device_names()]
    if json:
        print_json([as_dict(board) for board in boards])
        return
    heads = ("device", "core", "RAM", "computes", "transfers")
    show(listing("Devices", heads, (_row(board) for board in boards), left=2))


def _show_one(name: str, *, json: bool) -> None:
    from poetmodel.device.io import load_device

    board = load_device(name)
    print_warnings(options.device_warnings(board))
    if json:
        print_json(as_dict(board))
    else:
        show(figures(board.name, _figures(board)))
        if board.source:
            show("", "Sources of the figures:", board.source.strip())


def as_dict(board: Device) -> dict[str, Any]:
    """Return a device as plain values with the keys of its file, and its short name as ``key``."""
    from dataclasses import asdict

    fields = asdict(board)
    return {"key": fields.pop("key"), **fields}


def _row(board: Device) -> tuple[str, ...]:
    storage = board.storage
    return (
        board.key,
        board.core,
        format_bytes(board.ram_bytes),
        f"{count(board.compute.flops_per_s)}FLOP/s",
        "no storage" if storage is None else str(storage.mode),
    )


def _storage_size(board: Device) -> str:
    if board.storage is None:
        return "none"
    return "unlimited" if board.aux_bytes is None else format_bytes(board.aux_bytes)


def _figures(board: Device) -> Iterator[tuple[str, str, str]]:
    compute, storage = board.compute, board.storage
    yield "key", board.key, "the name for --device"
    yield "core", board.core, ""
    yield "RAM", format_bytes(board.ram_bytes), ""
    yield "compute rate", f"{count(compute.flops_per_s)}FLOP/s", ""
    if compute.bytes_per_s is not None:
        yield "RAM bandwidth", f"{count(compute.bytes_per_s)}B/s", ""
    if compute.flops_per_j is not None:
        implied_w = compute.flops_per_s / compute.flops_per_j
        yield "efficiency", f"{count(compute.flops_per_j)}FLOP/J", f"implies {implied_w:.3g} W"
    if compute.power_w is not None:
        yield "compute power", f"{compute.power_w:.4g} W", ""
    yield "idle power", f"{board.idle_power_w:.4g} W", ""
    yield "storage", _storage_size(board), "" if storage is None else f"transfers: {storage.mode}"
    if storage is not None:
        yield "page in", *_transfer(storage.page_in)
        yield "page out", *_transfer(storage.page_out)


def _transfer(way: Transfer) -> tuple[str, str]:
    return (
        f"{count(way.bytes_per_s)}B/s",
        f"after {format_seconds(way.latency_s)}, at {way.power_w:.4g} W",
    )
