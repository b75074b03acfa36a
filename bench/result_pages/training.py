"""What the page of results says of the comparison of training methods."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any, Final

from blocks import folded, table
from poetmodel.units import format_bytes
from pytorch.runs import KEEP_ALL
from result_pages.records import (
    TrainingRecord,
    circumstances,
    duels,
    made_text,
    percent_text,
    savings,
    seconds_text,
    share_text,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from result_pages.records import Duel

LESS_WRITTEN: Final = 0.4
"""Share of the file hook's bytes that is not to be written."""
OVERHEAD: Final = 0.03
"""Most that a compiled step with room for everything is to take longer than eager."""


def section(records: Sequence[dict[str, Any]], source: str) -> str:
    """Return what the page of results says of the comparison."""
    runs = [TrainingRecord.of(record) for record in records]
    by_network: dict[str, list[TrainingRecord]] = {}
    for run in runs:
        by_network.setdefault(run.network, []).append(run)
    parts = [
        "## Training methods",
        f"From `bench/results/{source}`, one process a run, one thread. {conditions(records)} "
        "`both`, `recompute` and `paging` are steps compiled by `poetmodel.torch`, `keep-all` is "
        "one with room for everything. Budgets are shares of the peak when everything is kept, or "
        "the heap peak of a peer. *Step* is the median over pairs of steps of the time over that "
        "of eager's step beside it, by the clock, *processor* the same in time of the processor. "
        "The heap peak is that of one step, with workspaces, without parameters and gradients. "
        "`memory-budget` is a share of what is saved after the forward pass, not of the peak.",
        goals_table(runs),
        "### At the peaks of others",
        "Each peer against the quickest compiled step whose measured heap peak is no larger. "
        "*Best* is the quickest peer with no larger peak.",
        folded("Peers", duels_table(duels(runs))),
    ]
    for network, of_network in by_network.items():
        rows = folded("Methods and budgets", network_table(of_network))
        parts += [f"### `{network}`", _heading(of_network), rows]
    return "\n\n".join(parts)


def conditions(records: Sequence[dict[str, Any]]) -> str:
    """Return when, where and within which limits runs were made."""
    torch = ", ".join(sorted({record["torch"] for record in records if "torch" in record}))
    limits = sorted({record["cell"]["limit_s"] for record in records})
    pairs = sorted({record["cell"]["pairs"] for record in records})
    seeds = sorted({record["cell"]["seed"] for record in records})
    slack = max(record["cell"]["slack"] for record in records)
    same = f" Peaks that are up to {percent_text(slack)} larger count as the same." if slack else ""
    return (
        f"{circumstances(records, packages=f'torch {torch}, ')}. Limit of the solver "
        f"{_joined(f'{limit:g} s' for limit in limits)}; {_joined(map(str, pairs))} pairs of "
        f"steps; seed {_joined(map(str, seeds))}.{same}"
    )


def _joined(words: Iterable[str]) -> str:
    return " or ".join(words)


# -- goals -----------------------------------------------------------------------------------------


def goals_table(runs: Sequence[TrainingRecord]) -> str:
    """Return how many runs meet each goal."""
    own = [run for run in runs if run.own]
    ran = [run for run in own if run.ran]
    fought = duels(runs)
    keep_all = [run for run in runs if run.kind == KEEP_ALL and run.ran]
    rows = [
        ("a plan, or a proof that there is none", _met([decided(run) for run in own])),
        ("heap peak within the budget", _met([bool(run.within) for run in ran])),
        ("loss, gradients and buffers equal eager's", _met([run.record["equal"] for run in ran])),
        (
            "at a peer's peak, step no slower than the best peer's",
            _met([duel.won for duel in fought]),
        ),
    ]
    rows += [
        (
            f"`{method}` at the file hook's peak writes {_whole(LESS_WRITTEN)} less",
            _met([saved is not None and saved >= LESS_WRITTEN for saved in savings(runs, method)]),
        )
        for method in ("both", "paging")
    ]
    rows += [
        (
            f"`{KEEP_ALL}` at most {_whole(OVERHEAD)} slower than eager, by the {clock}",
            _met([ratio <= 1 + OVERHEAD for ratio in ratios if ratio is not None]),
        )
        for clock, ratios in (
            ("clock", [run.time_ratio for run in keep_all]),
            ("processor", [run.processor_ratio for run in keep_all]),
        )
    ]
    return table(("goal", "runs that meet it"), rows, right=1)


def _met(found: Sequence[bool]) -> str:
    return share_text(sum(found), len(found))


def decided(run: TrainingRecord) -> bool:
    """Return whether a compiled step ran, or was proved not to exist."""
    return run.ran or run.status == "infeasible"


def sentence(records: Sequence[dict[str, Any]]) -> str:
    """Return how compiled steps fared, in one sentence and a space; "" without records."""
    runs = [TrainingRecord.of(record) for record in records]
    ran = [run for run in runs if run.own and run.ran]
    if not ran:
        return ""
    fought = duels(runs)
    networks = len({run.network for run in ran})
    return (
        f"Of {len(ran)} compiled PyTorch steps of {networks} networks, "
        f"{sum(bool(run.within) for run in ran)} kept their budget and "
        f"{sum(run.record['equal'] for run in ran)} had exactly eager's results; compared "
        f"with {len(fought)} runs of other methods that save memory, within the same peak, the "
        f"compiled step was no slower {sum(duel.won for duel in fought)} times "
        f"({made_text([run.record for run in runs])}). "
    )


def duels_table(fought: Sequence[Duel]) -> str:
    """Return a line for each peer."""
    rows = []
    for duel in fought:
        own = duel.own
        rows.append(
            (
                f"`{duel.peer.network}`",
                _label(duel.peer),
                bytes_text(duel.peer.peak_bytes),
                ratio_text(duel.peer.time_ratio),
                "itself" if duel.best is duel.peer else _label(duel.best),
                ratio_text(duel.best.time_ratio),
                "none" if own is None else _label(own),
                "-" if own is None else bytes_text(own.peak_bytes),
                "-" if own is None else ratio_text(own.time_ratio),
                "yes" if duel.won else "no",
            )
        )
    heads = ("network", "peer", "peak", "step", "best", "step", "compiled", "peak", "step")
    return table((*heads, "no slower"), rows, right=2)


# -- networks --------------------------------------------------------------------------------------


def _heading(runs: Sequence[TrainingRecord]) -> str:
    """Return the peaks that budgets are relative to."""
    facts = {}
    for words, name in (
        ("eager's heap peak", "eager_heap_peak_bytes"),
        ("keeping everything", "keep_all_bytes"),
    ):
        found = [run.record[name] for run in runs if name in run.record]
        if found:
            facts[words] = format_bytes(round(statistics.median(found)))
    floors = [run.record["floor_bytes"] for run in runs if "floor_bytes" in run.record]
    if floors:
        facts["least floor"] = format_bytes(min(floors))
    return f"{', '.join(f'{words} {size}' for words, size in facts.items())}."


def network_table(runs: Sequence[TrainingRecord]) -> str:
    """Return a line for each method and budget."""
    rows = [
        (
            f"`{run.kind}`",
            budget_text(run),
            bytes_text(run.peak_bytes),
            {None: "-", True: "yes", False: "**no**"}[run.within],
            ratio_text(run.time_ratio),
            ratio_text(run.processor_ratio),
            bytes_text(run.written_bytes),
            _equal(run),
            seconds_text(run.record.get("solve_s")),
            percent_text(run.record.get("gap")),
            status_text(run),
        )
        for run in runs
    ]
    heads = ("method", "budget", "heap peak", "within", "step", "processor", "written", "equal")
    return table((*heads, "solve", "gap", "status"), rows, right=1)


def _label(run: TrainingRecord) -> str:
    share = "" if run.share is None else f" {_whole(run.share)}"
    return f"`{run.kind}`" + ("" if run.peer is None else f" at `{run.peer}`") + share


def budget_text(run: TrainingRecord) -> str:
    """Return the budget of a run, and where it comes from."""
    size = "" if run.budget_bytes is None else format_bytes(run.budget_bytes)
    share = "" if run.share is None else _whole(run.share)
    source = share if run.peer is None else f"`{run.peer}` {share}".rstrip()
    return ", ".join(filter(None, (source, size))) or "-"


def _whole(ratio: float) -> str:
    return f"{100 * ratio:.0f} %"


def bytes_text(value: int | None) -> str:
    """Return a size, or a dash."""
    return "-" if value is None else format_bytes(value)


def ratio_text(value: float | None) -> str:
    """Return a ratio with three decimals, or a dash."""
    return "-" if value is None else f"{value:.3f}"


def _equal(run: TrainingRecord) -> str:
    if not run.ran:
        return "-"
    if run.record["equal"]:
        return "yes"
    counts = {
        "gradients": run.record["unequal_gradients"],
        "buffers": run.record["unequal_buffers"],
    }
    told = [f"{count} {name}" for name, count in counts.items() if count]
    return f"**no**: {' and '.join(told) or 'the loss'}"


def status_text(run: TrainingRecord) -> str:
    """Return how a run ended, with the reason where it ended without a step."""
    if run.ran:
        return run.status
    if run.status == "infeasible" and "floor_bytes" in run.record:
        floor = run.record["floor_bytes"]
        if run.budget_bytes is not None and run.budget_bytes < floor:
            return f"infeasible: the minimum RAM is {format_bytes(floor)}"
        return "infeasible, proved"
    reason = str(run.record.get("reason", "")).splitlines() or [""]
    told = reason[0].replace("|", "/")
    if run.status == "unknown":
        return "**no plan found in time**"
    return f"**{run.status}**: {told}" if told else f"**{run.status}**"
