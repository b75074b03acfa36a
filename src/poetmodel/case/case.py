"""`Case`, and the commands that reproduce it."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from poetmodel.case.spelling import EXPORTED_LIMITS, stated_options
from poetmodel.graph.catalogue import DEFAULT_SHAPE, InputShape
from poetmodel.problem import Limits
from poetmodel.solver.request import SearchOptions

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, kw_only=True)
class Case:
    """A graph, a device, limits and options of a search, as a command line states them."""

    source: str
    """A built-in network, a graph file or a step file."""
    shape: InputShape = DEFAULT_SHAPE
    """Input sizes and variant of the graph."""
    device: str | None = None
    profile: str | None = None
    limits: Limits = field(default_factory=Limits)
    constraint_files: tuple[str, ...] = ()
    """Files of user-defined constraints and objectives."""
    search: SearchOptions = field(default_factory=SearchOptions)

    @property
    def is_exportable(self) -> bool:
        """Whether ``poetmodel export`` solves the same problem in the same way."""
        stated = (*stated_options(self.limits), *stated_options(self.search))
        return (
            not self.constraint_files
            and self.search.backend == SearchOptions().backend
            and all(
                row.field in (*EXPORTED_LIMITS, "ram") or row.is_always_stated for row, _ in stated
            )
        )

    def command(self, name: str, *, out: str, options: Mapping[str, str] | None = None) -> str:
        """Return the shell command that solves or exports the case; `options` replace its own."""
        return shlex.join(["poetmodel", name, *self._arguments(name, out, options or {})])

    def _arguments(self, name: str, out: str, options: Mapping[str, str]) -> list[str]:
        stated = (*stated_options(self.limits), *stated_options(self.search))
        if name == "export":
            stated = tuple(entry for entry in stated if entry[0].option != "--backend")
        groups = [
            self.shape.options,
            *((option, value) for option, value in self._sources() if value is not None),
            *(arguments for _, arguments in stated),
            *(("--constraints", file) for file in self.constraint_files),
        ]
        own = [group for group in groups if group and group[0] not in options]
        return [
            self.source,
            *(argument for group in own for argument in group),
            *(word for pair in options.items() for word in pair),
            *("--out", out),
        ]

    def _sources(self) -> tuple[tuple[str, str | None], ...]:
        return ("--device", self.device), ("--profile", self.profile)
