"""Tables of training steps: compiled by PyTorch's back end, exported as C, of built-in graphs."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any, Final

import pandas as pd

from measured import (
    bytes_text,
    code,
    figures,
    load,
    missing,
    percent_text,
    records,
    seconds_text,
    whole,
)
from poetmodel.device import Device
from poetmodel.sweeps.measurement import FAILED
from poetmodel.units import format_bytes, parse_size

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from poetmodel.sweeps.measurement import Record

# -- compiled steps --------------------------------------------------------------------------------

OWN: Final = ("both", "recompute", "paging", "keep-all", "backend", "fused")
"""Kinds of compiled steps; all other kinds are peers."""


def training(kind: str) -> pd.DataFrame:
    """Return the runs of a comparison of training methods, with ratios and peaks.

    `time` and `processor` are medians, over pairs, of a run's time relative to the reference's.
    `within` is whether its peak meets the budget.
    """
    runs = load(kind)
    method = runs.method.str.partition("@")
    ratios = [_ratios(pairs) for pairs in runs.pairs]
    return runs.assign(
        method=method[0],
        peer=method[2],
        own=method[0].isin(OWN),
        ran=runs.pairs.map(lambda pairs: isinstance(pairs, list)),
        peak=runs.heap_peak_bytes,
        within=runs.heap_peak_bytes <= runs.budget_bytes,
        time=[ratio[0] for ratio in ratios],
        processor=[ratio[1] for ratio in ratios],
    )


def _ratios(pairs: object) -> tuple[float, float]:
    if not isinstance(pairs, list):
        return float("nan"), float("nan")
    clock, processor = (statistics.median(p[k] / p[k + 2] for p in pairs) for k in (0, 1))
    return clock, processor


def equal_peak(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the fastest compiled step beside the fastest peer, at the peak of each peer."""
    lines = []
    for network, group in runs[runs.ran].groupby("network", sort=False):
        peers = group[~group.own & (group.method != "eager") & group.peak.notna()]
        for peer in peers.itertuples():
            same = int(peer.peak * (1 + peer.slack))
            best = peers[peers.peak <= same].nsmallest(1, "time").iloc[0]
            own = group[group.own & (group.peak <= same)].nsmallest(1, "time")
            line = {"network": network, "peer": peer.method, "share": peer.share}
            line |= {"peak": peer.peak, "peer_time": peer.time, "best": best.method}
            line |= {"best_time": best.time, "own": None, "own_peak": None, "own_time": None}
            if len(own):
                found = own.iloc[0]
                line |= {"own": found.method, "own_peak": found.peak, "own_time": found.time}
            lines.append(line)
    table = pd.DataFrame(lines)
    return table.assign(won=table.own_time <= table.best_time)


def compiled() -> str:
    """Return a row for each network whose compiled step computes gradients."""
    runs = training("training")
    duels = equal_peak(runs)
    lines = []
    for network, group in runs.groupby("network", sort=False):
        own = group[group.own]
        ran, of_network = own[own.ran], duels[duels.network == network]
        ratio = of_network.own_time / of_network.best_time
        lines.append(
            (
                code(str(network)),
                bytes_text(group.keep_all_bytes.median()),
                percent_text(ran.peak.min() / group.keep_all_bytes.median(), 2),
                f"{int(ran.within.sum())} of {len(ran)}",
                f"{int(ran.equal.sum())} of {len(ran)}",
                f"{int(of_network.won.sum())} of {len(of_network)}",
                f"{ratio.median():.2f}",
                f"{ratio.max():.2f}",
            )
        )
    heads = ("network", "keep-all", "least run at", "within budget", "eager's bits",
             "at least as fast", "time over the best peer's", "worst")  # fmt: skip
    return figures(lines, heads)


def kept() -> str:
    """Return times of compiled steps with keep-all budgets, relative to eager steps."""
    runs = load("training")
    lines = []
    for run in runs[runs.method == "keep-all"].to_dict("records"):
        pairs = pd.DataFrame(
            run["pairs"], columns=["time", "processor", "eager_time", "eager_processor"]
        )
        ratios = (pairs[name] / pairs[f"eager_{name}"] for name in ("time", "processor"))
        lines.append(
            (
                code(str(run["network"])),
                seconds_text(pairs.eager_processor.median()),
                *(f"{ratio.median():.2f}" for ratio in ratios),
            )
        )
    return figures(lines, ("network", "eager's step", "time over eager's", "processor time"))


def equal_stock(runs: pd.DataFrame) -> pd.DataFrame:
    """Return steps with Inductor's kernels at a measured peak of stock, each beside that run."""
    stock = runs[(runs.method == "stock") & runs.ran].set_index(["network", "share"])
    own = runs[(runs.method == "fused") & (runs.peer == "stock") & runs.ran]
    both = own.join(stock[["processor", "peak"]].add_prefix("stock_"), on=["network", "share"])
    return both.assign(ratio=both.processor / both.stock_processor)


def fused() -> str:
    """Return a row for each network that was compiled with Inductor's kernels."""
    runs = training("fused")
    equal = equal_stock(runs)
    lines = []
    for network, group in runs.groupby("network", sort=False):
        own, ratio = group[group.own & group.ran], equal[equal.network == network].ratio
        lines.append(
            (
                code(str(network)),
                bytes_text(group.stock_heap_peak_bytes.median()),
                percent_text((own.peak / own.stock_heap_peak_bytes).min(), 2),
                f"{int(own.within.sum())} of {len(own)}",
                f"{int(own.equal.sum())} of {len(own)}",
                f"{ratio.median():.2f}",
                f"{ratio.max():.2f}",
            )
        )
    heads = ("network", "stock's peak", "least run at", "within budget", "stock's bits",
             "processor over stock's, equal peak", "worst")  # fmt: skip
    return figures(lines, heads)


WAYS: Final = {
    "eager": "eager",
    "checkpoint": "checkpointing of blocks",
    "selective": "selective checkpointing",
    "memory-budget": "`activation_memory_budget`",
    "stock": "`torch.compile`",
}
"""Names of the peers of the back end in tables."""


def beside_peers() -> list[tuple[Any, Any]]:
    """Return the runs of peers on networks of libraries, each with that of the back end if any."""
    runs = training("library")
    key = ["network", "reference", "peer", "share"]
    own = runs[runs.own].assign(share=lambda own: own.share.fillna(1.0)).set_index(key)
    found = []
    for peer in runs[~runs.own & runs.ran].itertuples():
        share = 1.0 if pd.isna(peer.share) else peer.share
        place = (peer.network, peer.reference, peer.method, share)
        found.append((peer, own.loc[place] if place in own.index else None))
    return found


def library(reference: str = "eager") -> str:
    """Return a row for each peer on networks of libraries, and the back end at its peak.

    With PyTorch's kernels, beside eager, or with Inductor's beside stock ``torch.compile``.
    """
    lines = []
    for peer, own in (each for each in beside_peers() if each[0].reference == reference):
        share = "" if pd.isna(peer.share) else f" {peer.share:g}"
        cells = ("-",) * 4
        if own is not None:
            why = "not found in time" if "in time" in str(own.reason) else "refused"
            cells = _library_cells(own) if own.ran else (why, *("-",) * 3)
        way = WAYS[peer.method] + share
        lines.append((code(peer.network), way, *_library_cells(peer), *cells))
    heads = ("network", "way", "peak", "step", "first call", "bits",
             "ours: peak", "step", "first call", "bits")  # fmt: skip
    return figures(lines, heads, words=2)


WRAPPERS: Final = {
    "ddp": "DDP",
    "ddp-whole": "DDP, `optimize_ddp` off",
    "ddp-static": "DDP, `static_graph`",
    "ddp-no-sync": "DDP, `no_sync`",
    "fsdp": "FSDP2 of each block",
    "fsdp-root": "FSDP2 of the model",
    "fsdp-bf16": "FSDP2 of each block, bf16",
    "blocks": "blocks, one process",
}
"""Names of the wrappers of `pytorch.processes` in tables."""


def processes() -> str:
    """Return a row for each wrapper: peaks, budgets and steps of each method, and bits."""
    lines = []
    for found in records("processes"):
        if "ranks" not in found:
            continue
        cell = found["cell"]
        way = WRAPPERS[cell["way"]]
        if cell["way"].startswith("ddp"):
            way += f", {cell['cap_mb']:g} MB"
        methods = list(zip(*found["ranks"], strict=True))
        equal = all(own.get("equal", True) for ranks in methods for own in ranks)
        lines.append((way, *map(_rank_cell, methods), "equal" if equal else "others"))
    heads = ("wrapper", "eager", "checkpointing of blocks", "ours, 80%", "60%", "45%",
             "that of checkpointing", "bits")  # fmt: skip
    return figures(lines, heads)


def _rank_cell(ranks: Sequence[Mapping[str, Any]]) -> str:
    """Return peak, budget and step of a method: the highest of all processes."""
    budget_bytes = max(own.get("budget_bytes", 0) for own in ranks)
    budget = f" of {bytes_text(budget_bytes)}" if budget_bytes else ""
    if any("refused" in own for own in ranks):
        return f"{bytes_text(budget_bytes)} refused"
    peak = bytes_text(max(own["heap_peak_bytes"] for own in ranks))
    step = max(own["ratio"] for own in ranks)
    return f"{peak}{budget}" + (f", {step:.2f}" if ranks[0]["method"] != "eager" else "")


def _library_cells(run: Any) -> tuple[str, str, str, str]:
    """Return peak, processor time of a step over the reference's, that of a first call, bits."""
    like = str(getattr(run, "equal_captured", ""))
    bits = "equal" if run.equal else "captured" if like == "True" else "others"
    first = seconds_text(run.first_processor_s)
    return bytes_text(run.peak), f"{run.processor:.2f}", first, bits


def training_runs(kind: str) -> pd.DataFrame:
    """Return every run of a comparison of training methods."""
    names = ("network", "method", "peer", "share", "status", "budget_bytes", "peak",
             "within", "time", "processor", "written_bytes", "equal", "solve_s", "gap")  # fmt: skip
    runs = training(kind)
    return runs[[name for name in names if name in runs]]


# -- exported C ------------------------------------------------------------------------------------

FRONT_BOARD: Final = "nrf52840"
"""The board of steps with an int8 front."""
NETWORKS: Final = {
    "ds-cnn": "",
    "autoencoder": ", batch 2",
    "resnet8": "",
    "mobilenetv1-vww": ", 96 x 96",
    "mobilenetv1-vww-bytes": "",
    "mobilenetv2-035": ", 48 x 48",
    "mobilenetv2-035-96": "",
    "mobilenetv2-035-128": "",
    "resnet8-thin": "",
    "lenet": "",
    "bert-block": "",
}
"""Exported networks in table order, with additions to their names."""
PLACES: Final = (
    ("nrf52840", "128KiB"), ("nrf52840", None), ("nano33ble", None), ("stm32f746", "128KiB"),
    ("stm32f746", "256KiB"), ("stm32f746", None), ("rp2350", "512KiB"), ("stm32h743", None),
)  # fmt: skip
"""Boards and the usable RAM; None for all of the board's RAM."""
README_NETWORKS: Final = ("ds-cnn", "resnet8", "mobilenetv1-vww", "mobilenetv2-035-96")


def named(network: str) -> str:
    """Return the name of a network in tables."""
    return f"`{network}`{NETWORKS[network]}"


def ram_of(board: str, ram: str | None) -> int:
    """Return the usable RAM of a board: `ram`, or all of the board's [B]."""
    return Device.load(board).ram_bytes if ram is None else parse_size(ram, field="ram")


def core_time_s(run: Mapping[str, Any], board: str) -> float:
    """Return the compute time of a recorded step on a board, by the cycles of its core [s]."""
    model = Device.load(board).cycle_model
    if model is None:
        raise ValueError(f"{board}: expected a core whose instructions are counted")
    return float(run.get("instructions", 0) / model.instructions_per_s)


def fault_of_flash(run: Mapping[str, Any]) -> str:
    """Return why an exported step cannot run from the flash of its board; empty if it can."""
    board = Device.load(run["board"])
    if run["part"] != "board" or run["status"] != "yes" or board.flash is None:
        return ""
    if run["flash_bytes"] > board.flash.size_bytes:
        taken, size = (format_bytes(int(b)) for b in (run["flash_bytes"], board.flash.size_bytes))
        return f"program and first weights are {taken}, and the flash has {size}"
    is_in_place = board.stores_in_flash and board.is_memory_mapped
    if is_in_place and run["written_bytes"] and not run.get("commits"):
        return "state on flash needs `--commit`, which this record lacks"
    return ""


def exported() -> list[Record]:
    """Return the exported steps with derived columns, by network and board."""
    runs = [{**record, **record["cell"], "gap": record.get("gap")} for record in records("mcu")]
    for run in runs:
        run["fault"] = fault_of_flash(run)
        run["trains"] = run["status"] == "yes" and not run["fault"]
        run["limit_bytes"] = ram_of(run["board"], run["ram"])
        run["tile"] = run["tried"][-1]["tile"] if run["tried"] else None
        if run["status"] == "yes":
            core_s = core_time_s(run, run["board"])
            run["time_s"] = core_s + run["transfer_s"]
            run["energy_j"] = core_s * run.get("power_w", 0.0) + run["transfer_j"]
    networks, places = list(NETWORKS), dict.fromkeys(PLACES)
    order = [*places]

    def place(run: Record) -> tuple[int, int]:
        where = (run["board"], run["ram"])
        return networks.index(run["network"]), order.index(where) if where in places else 0

    return sorted(runs, key=place)


def of_part(part: str) -> list[Record]:
    """Return the exported steps of a part: on boards, keep-all, or last layer only."""
    return [run for run in exported() if run["part"] == part]


def _keep_all(part: str = "keep-all") -> dict[str, Record]:
    return {run["network"]: run for run in of_part(part) if run["trains"]}


def smallest() -> list[tuple[Record, Record]]:
    """Return each network's step in the smallest RAM that it fits, and its keep-all step."""
    pairs, boards = [], of_part("board")
    for network, kept in _keep_all().items():
        able = [run for run in boards if run["network"] == network and run["trains"]]
        if able:
            run = min(able, key=lambda run: (run["limit_bytes"], run["energy_j"]))
            pairs.append((run, kept))
    return pairs


def verdict(run: Mapping[str, Any] | None) -> str:
    """Format whether a network trains on a board, with its tile size if it has tiles."""
    if run is None or run["status"] == FAILED:
        return "-" if run is None else FAILED
    if run["fault"]:
        return "open" if "commit" in run["fault"] else "no: flash"
    return f"yes, {run['tile']}" if run["trains"] and run["tile"] else str(run["status"])


def boards() -> str:
    """Return whether each network trains on each board with each usable RAM."""
    runs = {(run["network"], run["board"], run["ram"]): run for run in of_part("board")}
    heads = [f"`{board}`, {format_bytes(ram_of(board, ram))}" for board, ram in PLACES]
    lines = [
        (named(network), *(verdict(runs.get((network, *place))) for place in PLACES))
        for network in NETWORKS
        if sum((network, *place) in runs for place in PLACES) > 1
    ]
    return figures(lines, ("network", *heads), words=len(heads) + 1)


def board_steps() -> str:
    """Return the costs of each network's step in the smallest RAM that it fits."""
    lines = [
        (
            named(run["network"]),
            code(run["board"]),
            format_bytes(run["limit_bytes"]),
            f"{run['instructions'] / 1e6:.1f} M ({run['instructions'] / kept['instructions']:.2f})",
            seconds_text(run["time_s"]),
            f"{1e3 * run['energy_j']:.4g} mJ",
            percent_text(run["gap"]),
        )
        for run, kept in smallest()
    ]
    heads = ("network", "board", "RAM", "instructions", "time", "energy", "gap")
    return figures(lines, heads, words=2)


def boards_readme() -> str:
    """Return the README's rows of steps on boards."""
    lines = [
        (
            named(run["network"]),
            code(run["board"]),
            format_bytes(run["limit_bytes"]),
            format_bytes(kept["ram_bytes"]),
            seconds_text(run["time_s"]),
            percent_text(run["gap"]),
        )
        for run, kept in smallest()
        if run["network"] in README_NETWORKS
    ]
    heads = ("network", "board", "RAM", "keep-all's RAM", "time", "gap")
    return figures(lines, heads, words=2)


def board_ways() -> str:
    """Return RAM and instructions of keep-all steps and of steps that train only the last layer."""
    lines, ways = [], (_keep_all(), _keep_all("last layer"))
    for network in (name for name in NETWORKS if all(name in runs for runs in ways)):
        cells = []
        for runs in ways:
            run = runs[network]
            cells += [bytes_text(run["ram_bytes"]), f"{run['instructions'] / 1e6:.2f} M"]
        lines.append((named(network), *cells))
    heads = ("network", "keep-all: RAM", "instructions", "last layer: RAM", "instructions")
    return figures(lines, heads)


def refusal(run: Mapping[str, Any]) -> str:
    """Return why a network does not train on a board; empty if it does."""
    if run["trains"]:
        return ""
    if run["fault"] or run["status"] == FAILED:
        return str(run["fault"] or run["reason"])
    last = run["tried"][-1]
    if "floor_bytes" not in last:
        return str(last["reason"]).removeprefix("proved: ")
    left_bytes = max(0, run["limit_bytes"] - last["reserved_bytes"])
    return (
        f"inputs, stack and runtime leave {format_bytes(left_bytes)}, and "
        f"`{last['floor_node']}` ({last['floor_op']}) alone needs "
        f"{format_bytes(last['floor_bytes'])}"
    )


def board_runs() -> pd.DataFrame:
    """Return every exported step: its verdict and reason, costs, and RAM map."""
    names = ("part", "network", "board", "limit_bytes", "answer", "because", "instructions",
             "time_s", "energy_j", "read_bytes", "written_bytes", "recomputations",
             "steps_until_worn", "gap", "ram_bytes", "stack_bytes", "stack_limit_bytes",
             "resident_state_bytes", "arena_bytes", "arena_bound_bytes", "input_bytes",
             "runtime_bytes", "flash_bytes", "weight_bytes")  # fmt: skip
    lines = [{**run, "answer": verdict(run), "because": refusal(run)} for run in exported()]
    return pd.DataFrame(lines)[list(names)]


def kernels() -> pd.DataFrame:
    """Return the instructions of each node with multiplications, in keep-all steps."""
    nodes = [
        {"network": run["network"], **node, "per_mac": node["instructions"] / node["macs"]}
        for run in _keep_all().values()
        for node in run.get("nodes", ())
    ]
    return pd.DataFrame(nodes)


def aifes() -> str:
    """Return AIfES beside exported steps of the same networks."""
    lines = []
    for record in records("aifes"):
        theirs = record["programs"]["aifes"]
        for name, heading in (("aifes", "AIfES"), ("keep_all", "keep-all")):
            found = record["programs"][name]
            lines.append(
                (
                    record["cell"]["network"],
                    heading,
                    whole(found["instructions"]),
                    f"{found['instructions'] / record['step_macs']:.1f}",
                    percent_text(found["instructions"] / theirs["instructions"]),
                    f"{whole(found['ram_bytes'])} B",
                    percent_text(found["ram_bytes"] / theirs["ram_bytes"]),
                )
            )
    table = ("network", "program", "instructions", "a MAC", "of AIfES's", "RAM", "of AIfES's")
    return figures(lines, table, words=2)


_LAYERS: Final = {
    "conv2d": "3 x 3",
    "depthwise": "3 x 3 depthwise",
    "pointwise": "1 x 1",
    "linear": "fully connected",
    "add": "addition",
    "maximum": "max pool",
    "average": "average pool",
}
"""Names of the kinds of layers on pages."""


def cmsis_nn_rows() -> list[dict[str, Any]]:
    """Return instructions of int8 layers by CMSIS-NN and by exported kernels, with a sum."""
    (record,) = records("cmsis-nn")
    rows = [dict(row) for row in record["rows"]]
    front = [row for row in rows if row["of"] == "of the front"]
    numbers = ("layers", "terms", "theirs", "ours")
    total = {name: sum(row[name] for row in front) for name in numbers}
    return [{"of": "front", "kind": "", **total}, *rows]


def cmsis_nn() -> str:
    """Return CMSIS-NN beside the kernels of int8 layers."""
    lines = []
    for row in cmsis_nn_rows():
        what = f"{_LAYERS[row['kind']]} {row['of']}" if row["kind"] else "front of MobileNetV2"
        each = (row["theirs"] / row["terms"], row["ours"] / row["terms"])
        counts = (whole(row["theirs"]), f"{each[0]:.2f}", whole(row["ours"]), f"{each[1]:.2f}")
        share = percent_text(row["ours"] / row["theirs"])
        lines.append((what, whole(row["layers"]), *counts, share))
    heads = ("layers", "how many", "CMSIS-NN", "a term", "exported", "a term", "of CMSIS-NN's")
    return figures(lines, heads)


def floors() -> str:
    """Return the smallest budgets of networks [MiB], with returned and with added gradients."""
    lines = []
    for network, pair in load("floors").groupby("network", sort=False):
        cells = [f"{pair.gradient_bytes.max() / 2**20:.2f}"]
        for is_added in (False, True):
            (run,) = pair[pair.is_added == is_added].to_dict("records")
            least = "-"
            if run["status"] != FAILED:
                ratio = run["budget_bytes"] / run["keep_all_bytes"]
                least = f"{run['budget_bytes'] / 2**20:.2f} ({percent_text(ratio)})"
            cells += [f"{run['keep_all_bytes'] / 2**20:.2f}", least]
        lines.append((code(str(network)), *cells))
    heads = ("model", "gradients", "keep-all, returned", "smallest", "keep-all, added", "smallest")
    return figures(lines, heads)


# -- int8 fronts -----------------------------------------------------------------------------------


def front_runs(part: str) -> list[Record]:
    """Return the records of a part of the study of int8 fronts, in its order."""
    return [record for record in records("fronts") if record["cell"]["part"] == part]


def int8_steps() -> str:
    """Return RAM, flash, instructions and energy of steps with a float and with an int8 front."""
    lines = []
    for record in front_runs("step"):
        cell, front = record["cell"], record["front_instructions"]
        least = record["tiled_floor_bytes"] + record["reserved_bytes"]
        lines.append(
            (
                f"{code(cell['network'])}, {cell['size']} x {cell['size']}",
                cell["numbers"],
                format_bytes(least),
                format_bytes(record["ram_bytes"]),
                format_bytes(record["flash_bytes"]),
                f"{record['instructions'] / 1e6:.1f} M",
                "-" if front["m4"] is None else f"{front['m4'] / 1e6:.1f} M",
                "-" if front["m3"] is None else f"{front['m3'] / 1e6:.0f} M",
                f"{1e3 * record['power_w'] * core_time_s(record, FRONT_BOARD):.1f} mJ",
            )
        )
    heads = ("network", "front", "floor", "RAM", "flash", "step", "its front", "M3", "energy")
    return figures(lines, heads, words=2)


def int8_agreement() -> str:
    """Return how many values of int8 layers differ from PyTorch's for equal operands."""
    lines = []
    for record in front_runs("agreement"):
        cell, values, differ = record["cell"], record["values"], record["differ"]
        rate = f"1 in {whole(values // differ)}" if differ else "none"
        lines.append(
            (
                f"{code(cell['network'])}, {cell['size']} x {cell['size']}",
                str(record["layers"]),
                whole(values),
                whole(differ),
                rate,
                str(record["most_steps"]),
            )
        )
    heads = ("front", "layers", "values", "differ", "rate", "steps at most")
    return figures(lines, heads, words=1)


def int8_replay() -> str:
    """Return costs of steps on a batch and on a stored sample, after int8 fronts."""
    lines = []
    for record in front_runs("replay"):
        cell = record["cell"]
        both = (record["instructions"], record["stored_instructions"])
        lines.append(
            (
                f"{code(cell['network'])}, {cell['size']} x {cell['size']}",
                f"{whole(record['image_bytes'])} B",
                f"{whole(record['output_bytes'])} B",
                *(f"{count / 1e6:.1f} M" for count in both),
                format_bytes(record["ram_bytes"]),
                format_bytes(record["stored_ram_bytes"]),
            )
        )
    heads = ("network", "an image", "a sample", "step", "stored step", "RAM", "its RAM")
    return figures(lines, heads, words=1)


def int8_accuracy() -> str:
    """Return the accuracy of trained last layers after float and int8 fronts."""
    found = {way: mean for record in front_runs("accuracy") for way, mean in record["mean"].items()}
    lines = [(way, percent_text(mean)) for way, mean in found.items()]
    return figures(lines, ("trained", "accuracy"), words=1)


def int8_training() -> str:
    """Return accuracies of training in float and in int8: means and ranges, by data and steps."""
    kinds = ["data", "steps", "batch"]
    found = int8_training_runs().sort_values(kinds, kind="stable")
    columns = dict(iter(found.groupby(kinds, sort=False)))
    lines = [
        (way, *(_seeds(runs[runs.way == way].accuracy) for runs in columns.values()))
        for way in dict.fromkeys(found.way)
    ]
    lines.append(
        ("nothing", *(_seeds(runs.drop_duplicates("seed").before) for runs in columns.values()))
    )
    heads = ("trained", *(f"{data}, {steps} x {batch}" for data, steps, batch in columns))
    return figures(lines, heads, words=1)


def _seeds(accuracy: pd.Series) -> str:
    """Format mean, minimum and maximum accuracy [%]; a dash if there is none."""
    if accuracy.empty:
        return "-"
    shown = 100 * accuracy
    return f"{shown.mean():.1f} ({shown.min():.0f} to {shown.max():.0f})"


def int8_training_runs() -> pd.DataFrame:
    """Return each network trained further in float or int8, with learning rate and accuracy."""
    return pd.DataFrame(
        [
            {
                "data": record["cell"]["data"],
                "batch": record["cell"]["batch"],
                "way": record["cell"]["way"],
                "steps": record["cell"]["steps"],
                "rate": record["rate"],
                "seed": seed,
                "before": before,
                "accuracy": accuracy,
            }
            for record in records("int8-training")
            for seed, (before, accuracy) in enumerate(
                zip(record["before"], record["accuracy"], strict=True)
            )
        ]
    )


# -- models of other libraries ---------------------------------------------------------------------


def models() -> pd.DataFrame:
    """Return the tested models of other libraries with their results."""
    found = load("coverage")
    found = found[found.status.isin(["works", "differs", "refused"])]
    fits = [
        missing(entry) or (entry["equal"] and entry["within"]) for entry in found.budget.tolist()
    ]
    back_end = [None if missing(entry) else entry["status"] for entry in found.back_end.tolist()]
    return found.assign(
        library=found.name.str.split().str[0],
        works=(found.status == "works") & (found.other == "works") & pd.Series(fits, found.index),
        refused=found.status == "refused",
        back_end_status=back_end,
    )


def libraries() -> str:
    """Return the number of tested, working and refused models of each library."""
    lines = [
        (
            str(library),
            str(len(group)),
            str(int(group.works.sum())),
            str(int(group.refused.sum())),
            str(int((group.back_end_status == "works").sum())),
        )
        for library, group in models().groupby("library", sort=False)
    ]
    return figures(lines, ("library", "tried", "eager's bits", "refused", "with `pmt.backend`"))


def trained_steps() -> str:
    """Return whether each step fits in each budget, with its energy, gap, tiles and sizes."""
    lines = []
    for run in load("int8-steps").to_dict("records"):
        cells = (str(run["status"]), *("-",) * 5)
        if run["status"] == "yes":
            used_bytes = sum(size for name, size in run["flash_map"].items() if name != "free")
            cells = (
                f"{1e3 * run['energy_j']:.4g} mJ",
                percent_text(run["gap"]),
                "whole" if missing(run["tile_bytes"]) else bytes_text(run["tile_bytes"]),
                bytes_text(used_bytes),
                f"{run['instructions'] / 1e6:.1f} M",
                bytes_text(run["read_bytes"] + run["written_bytes"]),
            )
        lines.append((code(run["network"]), run["trained"], run["weights"], run["ram"], *cells))
    heads = ("network", "trained", "weights", "RAM", "energy", "gap", "tiles", "flash",
             "instructions", "paged")  # fmt: skip
    return figures(lines, heads, words=4)
