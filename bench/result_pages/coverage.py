"""What `docs/guides/pytorch-limits.md` says of models of other libraries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytorch.coverage import AS_CAPTURED, DIFFERS, REFUSED, WORKS
from result_pages.records import Line
from result_pages.rendering import render

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class ModelRecord(Line):
    """The record of a model that was tried."""

    @property
    def library(self) -> str:
        """Whose model it is."""
        return str(self["name"].split(maxsplit=1)[0])

    @property
    def refused(self) -> bool:
        """Whether it is refused in a sentence."""
        return bool(self["status"] == REFUSED)

    @property
    def works(self) -> bool:
        """Whether all bits were equal wherever it ran."""
        budget = self.record.get("budget")
        smaller = budget is None or (budget["equal"] and budget["within"])
        return bool(self["status"] == self.record.get("other") == WORKS and smaller)

    @property
    def in_back_end(self) -> bool:
        """Whether it has eager's bits with the back end of ``torch.compile``."""
        told = self.record.get("back_end")
        return told is not None and told["status"] == WORKS


def block(records: Sequence[dict[str, Any]], source: str) -> str:
    """Return a row for each library: how many of its models were tried, work and are refused."""
    kept = [record for record in records if record["status"] in (WORKS, DIFFERS, REFUSED)]
    tried = [ModelRecord(record) for record in kept]
    libraries = dict.fromkeys(model.library for model in tried)
    return render(
        "models",
        source=source,
        lead=lead(kept),
        records=kept,
        models={library: [m for m in tried if m.library == library] for library in libraries},
    )


def lead(records: Sequence[dict[str, Any]]) -> str:
    """Return in a sentence how many models work."""
    tried = [ModelRecord(record) for record in records]
    works, refused = sum(m.works for m in tried), sum(m.refused for m in tried)
    apart = len(tried) - works - refused
    ends = [m.record["back_end"]["status"] for m in tried if m.record.get("back_end")]
    return (
        f"Of {len(tried)} models tried, {works} train as in eager PyTorch, bit for bit; "
        f"{refused} are refused in a sentence"
        + (f", and {apart} differ." if apart else ".")
        + (f" With `pmt.backend`, {ends.count(WORKS)} do." if ends else "")
        + (
            f" In {ends.count(AS_CAPTURED)} more PyTorch captures a program whose bits are not "
            "eager's, and the step has those."
            if AS_CAPTURED in ends
            else ""
        )
    )
