"""The page that says which models of other libraries can be compiled."""

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
    def model(self) -> str:
        """Its name there."""
        return str(self["name"].split(maxsplit=1)[1])

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
    def status_text(self) -> str:
        """How it fares, where it is not refused."""
        if self.works:
            return "works"
        if self["status"] == DIFFERS:
            return escaped(self["reason"])
        if self["other"] != WORKS:
            return f"another batch: {escaped(self.record['other'])}"
        return "differs in the smaller budget"

    @property
    def back_end(self) -> str:
        """How it fares with the back end of ``torch.compile``."""
        told = self.record.get("back_end")
        if told is None:
            return "-"
        if told["status"] == REFUSED:
            return escaped(told["reason"])
        if told["status"] == DIFFERS:
            return "differs"
        return f"{told['share']:.0%}" + (", as captured" if told["status"] == AS_CAPTURED else "")

    @property
    def reads(self) -> str:
        """Where it reads values of inputs."""
        places = (read["place"].partition(" ")[0] for read in self["read"])
        names = dict.fromkeys(place.removeprefix(f"{self.library}/") for place in places)
        return "<br>".join(f"`{name}`" for name in names)


def escaped(text: str) -> str:
    """Return text of others as it may stand in a table."""
    for mark in "\\|*_<[`":
        text = text.replace(mark, f"\\{mark}")
    return text


def page(records: Sequence[dict[str, Any]], source: str) -> str:
    """Return the page."""
    kept = [record for record in records if record["status"] in (WORKS, DIFFERS, REFUSED)]
    tried = [ModelRecord(record) for record in kept]
    libraries = dict.fromkeys(model.library for model in tried if not model.refused)
    text = render(
        "pytorch-models",
        source=source,
        lead=lead(kept),
        records=kept,
        models={
            library: [m for m in tried if m.library == library and not m.refused]
            for library in libraries
        },
        refused=[model for model in tried if model.refused],
        escaped=escaped,
    )
    return f"{text}\n"


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
