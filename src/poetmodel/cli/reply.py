"""The answer of a command, which is printed in one place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import typer

from poetmodel.cli.failures import (
    ExitStatus,
    print_device_ram_warnings,
    print_errors,
    print_warnings,
)
from poetmodel.cli.output import print_json, print_text, print_written, show

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from rich.console import RenderableType

    from poetmodel.device.ram import DeviceRam

    Document = dict[str, Any] | list[dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The answer of a command in the order of printing, which consumes lazy iterables."""

    document: Document | Callable[[], Document] | None = None
    """The answer as JSON with ``--json``, or a function that returns it; None without one."""
    text: Iterable[str | RenderableType] = ()
    """The answer otherwise: lines, tables and pictures."""
    device_rams: Iterable[DeviceRam | None] = ()
    """Uses of a device's RAM; those that exceed it are warned of."""
    warnings: Iterable[str] = ()
    written: Iterable[Path] = ()
    """Files that were written."""
    hints: Iterable[str] = ()
    errors: Iterable[str] = ()
    """Reasons for a status other than success."""
    error_hints: Iterable[str] = ()
    status: ExitStatus = ExitStatus.SUCCESS

    def print(self, *, json: bool) -> None:
        """Print the reply; raise `typer.Exit` with its status unless this is a success."""
        if json:
            document = self.document() if callable(self.document) else self.document
            if document is not None:
                print_json(document)
        else:
            for item in self.text:
                print_text(item) if isinstance(item, str) else show(item)
        print_device_ram_warnings(*self.device_rams)
        print_warnings(self.warnings)
        for path in self.written:
            print_written(path)
        print_warnings(self.hints, kind="hint")
        print_errors(self.errors)
        print_warnings(self.error_hints, kind="hint")
        if self.status != ExitStatus.SUCCESS:
            raise typer.Exit(self.status)
