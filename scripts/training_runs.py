"""Records of the comparison of training methods: what can be read off them."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

OWN: Final = ("keep-all", "both", "recompute", "paging")
"""Compiled steps; all other methods are peers."""
RUNNER: Final = "keep-all"
"""The compiled step with room for everything."""
FILE_HOOKS: Final = "file-hooks"
"""The peer that writes what it saves to a file."""


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """One record of a cell."""

    record: dict[str, Any]
    """The line."""

    @property
    def network(self) -> str:
        """What was trained."""
        return str(self.record["cell"]["network"])

    @property
    def method(self) -> str:
        """How it was trained, without where its budget came from."""
        return str(self.record["cell"]["method"]).partition("@")[0]

    @property
    def peer(self) -> str | None:
        """The peer at whose peak it ran; None if there is none."""
        return str(self.record["cell"]["method"]).partition("@")[2] or None

    @property
    def slack(self) -> float:
        """What counts as the same peak, as a share of it."""
        return float(self.record["cell"]["slack"])

    @property
    def own(self) -> bool:
        """Whether it is a compiled step."""
        return self.method in OWN

    @property
    def share(self) -> float | None:
        """Its budget as a share of keeping everything."""
        share = self.record["cell"]["share"]
        return None if share is None else float(share)

    @property
    def status(self) -> str:
        """How it ended."""
        return str(self.record["status"])

    @property
    def ran(self) -> bool:
        """Whether steps were run."""
        return "pairs" in self.record

    @property
    def peak_bytes(self) -> int | None:
        """Heap peak of a step [B]."""
        return self.record.get("heap_peak_bytes")

    @property
    def budget_bytes(self) -> int | None:
        """What a compiled step was to keep [B]."""
        return self.record.get("budget_bytes")

    @property
    def within(self) -> bool | None:
        """Whether the heap peak kept the budget; None where there is no peak or no budget."""
        if self.peak_bytes is None or self.budget_bytes is None:
            return None
        return self.peak_bytes <= self.budget_bytes

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

    def _ratio(self, place: int) -> float | None:
        if not self.ran:
            return None
        ratios = [pair[place] / pair[place + 2] for pair in self.record["pairs"]]
        return float(statistics.median(ratios))


def quickest(runs: Sequence[TrainingRun], peak_bytes: int) -> TrainingRun | None:
    """Return the run with the least time ratio among those whose peak is no larger."""
    able = [run for run in runs if run.peak_bytes is not None and run.peak_bytes <= peak_bytes]
    return min(able, key=lambda run: run.time_ratio or 0.0, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Duel:
    """A compiled step against what PyTorch offers, at the peak of one of the peers."""

    peer: TrainingRun
    """Whose peak it is."""
    best: TrainingRun
    """The quickest peer with no larger peak."""
    own: TrainingRun | None
    """The quickest compiled step with no larger peak; None if there is none."""

    @property
    def won(self) -> bool:
        """Whether the compiled step takes no longer."""
        if self.own is None or self.own.time_ratio is None or self.best.time_ratio is None:
            return False
        return self.own.time_ratio <= self.best.time_ratio


def duels(runs: Sequence[TrainingRun]) -> list[Duel]:
    """Return a duel for each peer of each network that ran, eager left out."""
    found = []
    for peer in runs:
        if peer.own or peer.method == "eager" or peer.peak_bytes is None:
            continue
        of_network = [run for run in runs if run.network == peer.network and run.ran]
        peers = [run for run in of_network if not run.own and run.method != "eager"]
        own = [run for run in of_network if run.own]
        same = int(peer.peak_bytes * (1 + peer.slack))
        best = quickest(peers, same) or peer
        found.append(Duel(peer=peer, best=best, own=quickest(own, same)))
    return found


def savings(runs: Sequence[TrainingRun], method: str) -> list[float | None]:
    """Return for each network which share of the file hook's bytes a method does not write.

    At the peak of the file hook; None where the method has no plan there.
    """
    found: list[float | None] = []
    for hooks in runs:
        if hooks.method != FILE_HOOKS or not hooks.written_bytes:
            continue
        own = [
            run.written_bytes
            for run in runs
            if run.network == hooks.network and run.method == method and run.peer == FILE_HOOKS
        ]
        written = own[0] if own else None
        found.append(None if written is None else 1 - written / hooks.written_bytes)
    return found
