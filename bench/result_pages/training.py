"""What the page of results says of the comparison of training methods, whole steps included."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from poetmodel.units import format_bytes
from pytorch.runs import FILE_HOOKS, FUSED, KEEP_ALL, STOCK, TrainingRun, fused_runs
from result_pages.rendering import render

if TYPE_CHECKING:
    from collections.abc import Sequence

LESS_WRITTEN: Final = 0.4
"""Share of the file hook's bytes that is not to be written."""
OVERHEAD: Final = 0.03
"""Most that a compiled step with room for everything is to take longer than eager."""
NOISE: Final = 0.03
"""By how much the processor time of a step may be larger and count as the same, as a share."""
PREDICTION: Final = 0.05
"""How far a peak may be from what was predicted, as a share of it."""
WHOLE_STEPS_CHART: Final = "results-whole-steps.svg"
"""Name of the chart of whole steps."""


# -- records ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRecord(TrainingRun):
    """A training run, and what came of it."""

    record: dict[str, Any]
    """The line."""

    @classmethod
    def of(cls, record: dict[str, Any]) -> TrainingRecord:
        """Read a record."""
        return cls(**record["cell"], record=record)

    @property
    def status(self) -> str:
        """How it ended."""
        return str(self.record["status"])

    @property
    def ran(self) -> bool:
        """Whether steps were run."""
        return "pairs" in self.record

    @property
    def decided(self) -> bool:
        """Whether a compiled step ran, or was proved not to exist."""
        return self.ran or self.status == "infeasible"

    @property
    def peak_bytes(self) -> int | None:
        """Heap peak of a step; of whole steps the peak of the process [B]."""
        return self.record.get("heap_peak_bytes" if self.optimizer is None else "peak_bytes")

    @property
    def budget_bytes(self) -> int | None:
        """What a compiled step was to keep [B]."""
        return self.record.get("budget_bytes")

    @property
    def within(self) -> bool | None:
        """Whether the peak kept the budget; None where there is no peak or no budget.

        That of a process, which has whole pages, may be larger by the slack.
        """
        if self.peak_bytes is None or self.budget_bytes is None:
            return None
        slack = 0.0 if self.optimizer is None else self.slack
        return self.peak_bytes <= int(self.budget_bytes * (1 + slack))

    @property
    def written_bytes(self) -> int | None:
        """What a step wrote [B]."""
        return self.record.get("written_bytes")

    @property
    def time_ratio(self) -> float | None:
        """Median over the pairs of its time over that of eager beside it, by the clock."""
        return self._ratio(0)

    @property
    def processor_ratio(self) -> float | None:
        """The same, in time of the processor."""
        return self._ratio(1)

    @property
    def first_processor_s(self) -> float | None:
        """Processor time of the first call [s]: of peers what two steps take beyond one more."""
        if not self.ran or "first_processor_s" in self.record:
            return self.record.get("first_processor_s")
        step_s = statistics.median(pair[1] for pair in self.record["pairs"])
        return float(self.record["two_steps_processor_s"] - step_s)

    @property
    def label(self) -> str:
        """Its method, with the peer and the share that its budget comes from."""
        peer = "" if self.peer is None else f" at `{self.peer}`"
        return f"`{self.kind}`{peer}{self._share_text}"

    @property
    def _share_text(self) -> str:
        return "" if self.share is None else f" {100 * self.share:.0f} %"

    @property
    def budget_text(self) -> str:
        """Its budget, and where that comes from."""
        size = "" if self.budget_bytes is None else format_bytes(self.budget_bytes)
        peer = "" if self.peer is None else f"`{self.peer}`"
        return ", ".join(filter(None, (f"{peer}{self._share_text}".strip(), size))) or "-"

    @property
    def status_text(self) -> str:
        """How it ended, with the reason where it ended without a step."""
        if self.ran:
            return self.status
        if self.status == "infeasible" and "floor_bytes" in self.record:
            floor = self.record["floor_bytes"]
            if self.budget_bytes is not None and self.budget_bytes < floor:
                return f"infeasible: the minimum RAM is {format_bytes(floor)}"
            return "infeasible, proved"
        if self.status == "unknown":
            return "**no plan found in time**"
        reason = (str(self.record.get("reason", "")).splitlines() or [""])[0].replace("|", "/")
        return f"**{self.status}**: {reason}" if reason else f"**{self.status}**"

    def _ratio(self, place: int) -> float | None:
        if not self.ran:
            return None
        ratios = [pair[place] / pair[place + 2] for pair in self.record["pairs"]]
        return float(statistics.median(ratios))


def quickest(runs: Sequence[TrainingRecord], peak_bytes: int) -> TrainingRecord | None:
    """Return the run with the least time ratio among those whose peak is no larger."""
    able = [run for run in runs if run.peak_bytes is not None and run.peak_bytes <= peak_bytes]
    return min(able, key=lambda run: run.time_ratio or 0.0, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Duel:
    """A compiled step against what PyTorch offers, at the peak of one of the peers."""

    peer: TrainingRecord
    """Whose peak it is."""
    best: TrainingRecord
    """The quickest peer with no larger peak."""
    own: TrainingRecord | None
    """The quickest compiled step with no larger peak; None if there is none."""

    @property
    def won(self) -> bool:
        """Whether the compiled step takes no longer."""
        if self.own is None or self.own.time_ratio is None or self.best.time_ratio is None:
            return False
        return self.own.time_ratio <= self.best.time_ratio


def duels(runs: Sequence[TrainingRecord]) -> list[Duel]:
    """Return a duel for each peer of each network that ran, eager left out."""
    found = []
    for peer in runs:
        if peer.own or peer.kind == "eager" or peer.peak_bytes is None:
            continue
        what = (peer.network, peer.optimizer)
        of_network = [run for run in runs if (run.network, run.optimizer) == what and run.ran]
        peers = [run for run in of_network if not run.own and run.kind != "eager"]
        own = [run for run in of_network if run.own]
        same = int(peer.peak_bytes * (1 + peer.slack))
        best = quickest(peers, same) or peer
        found.append(Duel(peer=peer, best=best, own=quickest(own, same)))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class EqualPeak:
    """A step of the back end with Inductor's kernels, beside stock at the setting of that peak."""

    own: TrainingRecord
    stock: TrainingRecord

    @property
    def ratio(self) -> float:
        """Processor time of its step over that of stock's."""
        return (self.own.processor_ratio or 0.0) / (self.stock.processor_ratio or 1.0)

    @property
    def no_slower(self) -> bool:
        """Whether its step takes no more of the processor."""
        return self.ratio <= 1 + NOISE

    @property
    def no_larger(self) -> bool:
        """Whether its peak is no larger."""
        return (self.own.peak_bytes or 0) <= (self.stock.peak_bytes or 0)


def equal_peaks(runs: Sequence[TrainingRecord]) -> list[EqualPeak]:
    """Return the steps at a measured peak of stock that ran, each beside stock."""
    stock = {(run.network, run.share): run for run in runs if run.method == STOCK and run.ran}
    return [
        EqualPeak(own=run, stock=stock[run.network, run.share])
        for run in runs
        if run.kind == FUSED and run.peer == STOCK and run.ran
    ]


def savings(runs: Sequence[TrainingRecord], method: str) -> list[float | None]:
    """Return for each network which share of the file hook's bytes a method does not write.

    At the peak of the file hook; None where the method has no plan there.
    """
    found: list[float | None] = []
    for hooks in runs:
        if hooks.kind != FILE_HOOKS or not hooks.written_bytes:
            continue
        own = [
            run.written_bytes
            for run in runs
            if run.network == hooks.network and run.kind == method and run.peer == FILE_HOOKS
        ]
        written = own[0] if own else None
        found.append(None if written is None else 1 - written / hooks.written_bytes)
    return found


# -- sections --------------------------------------------------------------------------------------


def section(records: Sequence[dict[str, Any]], source: str) -> str:
    """Return what the page of results says of the comparison."""
    context = _context(records)
    runs, compiled = context["runs"], context["compiled"]
    keep_all = [run for run in compiled if run.kind == KEEP_ALL and run.ran]
    return render(
        "training",
        source=source,
        less={
            method: [saved is not None and saved >= LESS_WRITTEN for saved in savings(runs, method)]
            for method in ("both", "paging")
        },
        slower={
            clock: [ratio <= 1 + OVERHEAD for ratio in ratios if ratio is not None]
            for clock, ratios in (
                ("clock", [run.time_ratio for run in keep_all]),
                ("processor", [run.processor_ratio for run in keep_all]),
            )
        },
        keep_all=KEEP_ALL,
        less_written=LESS_WRITTEN,
        overhead=OVERHEAD,
        **context,
    )


def whole_section(records: Sequence[dict[str, Any]], source: str) -> str:
    """Return what the page of results says of whole steps: updates and all state in the budget."""
    return render(
        "whole-steps",
        source=source,
        chart=WHOLE_STEPS_CHART,
        keep_all=KEEP_ALL,
        **_context(records),
    )


def fused_section(records: Sequence[dict[str, Any]], source: str) -> str:
    """Return what the page of results says of steps inside of ``torch.compile``."""
    order = {run.name: k for k, run in enumerate(fused_runs())}
    context = _context(sorted(records, key=lambda record: order.get(record["name"], len(order))))
    errors = (run.record["plan_peak_bytes"] / (run.peak_bytes or 1) for run in context["ran"])
    return render(
        "fused",
        source=source,
        equals=equal_peaks(context["runs"]),
        predicted=[abs(error - 1) <= PREDICTION for error in errors],
        noise=NOISE,
        prediction=PREDICTION,
        **context,
    )


def lora_section(records: Sequence[dict[str, Any]], source: str) -> str:
    """Return what the page of results says of a model that is larger than its process."""
    by_role = {record["role"]: record for record in records}
    return render("lora", source=source, records=records, run=by_role.__getitem__)


def _context(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what both sections are made from."""
    runs = [TrainingRecord.of(record) for record in records]
    compiled = [run for run in runs if run.own]
    groups: dict[tuple[str, str], list[TrainingRecord]] = {}
    for run in runs:
        groups.setdefault((run.network, run.optimizer or ""), []).append(run)
    return {
        "records": records,
        "runs": runs,
        "compiled": compiled,
        "ran": [run for run in compiled if run.ran],
        "duels": duels(runs),
        "groups": groups,
    }


def sentence(records: Sequence[dict[str, Any]]) -> str:
    """Return how compiled steps fared, in one sentence and a space; "" without records."""
    context = _context(records)
    return f"{render('training-sentence', **context)} " if context["ran"] else ""
