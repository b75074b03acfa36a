"""Graphs rewritten in the order of their plans, and what is told of these."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Final

from poetmodel.errors import InputError
from poetmodel.files import write_text
from poetmodel.torch.cache import digest, host_key
from poetmodel.torch.dynamo.costs import Profiles
from poetmodel.torch.dynamo.joint_rewriting import JointRewriter
from poetmodel.torch.dynamo.pages import SlotFile
from poetmodel.torch.dynamo.planning import (
    MEASURED,
    BackendOptions,
    GraphPlan,
    PlanRecord,
    plan,
    write_page,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import fx

    from poetmodel.torch.dynamo.joint_graph import JointGraph

FORMAT: Final = "poetmodel-backend"
VERSION: Final = 1

_LOG: Final = logging.getLogger(__name__)


class GraphPlanner:
    """Plans one graph after another within the same budget, and knows what became of each.

    Parameters
    ----------
    wanted : BackendOptions
        Budget and options.
    storage : str or Path, optional
        Folder for pages.
    is_generated : callable, optional
        Whether a compiler writes the kernel of a node; by default all are PyTorch's.
    is_predicted : bool
        Whether nothing is run, and all tensors have the sizes that PyTorch predicts.
    """

    def __init__(
        self,
        wanted: BackendOptions,
        storage: str | Path | None = None,
        *,
        is_generated: Callable[[fx.Node], bool] | None = None,
        is_predicted: bool = False,
    ) -> None:
        self._is_predicted = is_predicted
        self._planned: list[GraphPlan] = []
        self._wanted = wanted
        self._profiles = Profiles(
            wanted.cache, timed=wanted.costs == MEASURED, is_generated=is_generated
        )
        self._file = None if storage is None else SlotFile(storage)

    @property
    def key(self) -> str:
        """Common dependencies of all plans beside their graphs."""
        wanted = self._wanted
        stated = [str(wanted.ram), str(wanted.device), wanted.time_limit, wanted.gap]
        return digest(host_key(), *stated)

    @property
    def plans(self) -> list[PlanRecord]:
        """One record for each graph, in the order of capture."""
        return [planned.record for planned in self._planned]

    def summary(self) -> str:
        """Return a line about each graph: peak, budget, what is recomputed and paged, overhead."""
        return "\n".join(map(str, self.plans))

    def report(self, path: str | Path) -> None:
        """Write what is known of the graphs.

        Parameters
        ----------
        path : str or Path
            ``*.json``: the records of all graphs; ``*.html``: a page about the schedule of the
            graph with the highest peak, which needs ``poetmodel[report]``.

        Raises
        ------
        InputError
            If nothing was compiled yet, or the file cannot be written.
        MissingExtraError
            If a page is requested, and a library that draws it is not installed.
        """
        if not self._planned:
            raise InputError(f"{path}: nothing to report; run the compiled function once before")
        kind = Path(path).suffix
        if kind == ".json":
            records = [record.to_dict() for record in self.plans]
            values = {"format": FORMAT, "version": VERSION, "plans": records}
            write_text(path, json.dumps(values, allow_nan=False, ensure_ascii=False) + "\n")
        elif kind == ".html":
            largest = max(self._planned, key=lambda planned: planned.record.predicted_peak_bytes)
            write_page(path, largest)
        else:
            raise InputError(f"{path}: expected a file *.html, a page, or *.json, the records")

    def rewritten(
        self, joint: JointGraph, *, reserved_bytes: int = 0
    ) -> tuple[fx.Graph, list[fx.Node]]:
        """Return a graph in the order of its plan, and what its forward pass saves.

        What is reserved of the budget is for what the plan does not know.

        Raises
        ------
        BudgetError
            If the budget is too small: says the least that is known to do.
        """
        name = f"graph {len(self._planned)}"
        profiles = (
            [operation.profile for operation in joint.operations]
            if self._is_predicted
            else self._profiles.of(joint)
        )
        planned = plan(
            joint,
            profiles,
            self._wanted,
            name=name,
            reserved_bytes=reserved_bytes,
            is_predicted=self._is_predicted,
        )
        self._planned.append(planned)
        _LOG.info("%s", planned.record)
        rewriter = JointRewriter(joint, -1 if self._file is None else self._file.number)
        new = rewriter.rewrite(planned.plan.program)
        return new, list(rewriter.saved)
