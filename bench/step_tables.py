"""Tables of training steps: compiled by the PyTorch back end, exported as C, of other libraries.

Functions ``tabulate_…`` return the Markdown of a table on a page, ``load_…`` frames or records.
"""

from __future__ import annotations

import statistics
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import pandas as pd

from measured import (
    format_code,
    format_integer,
    format_percent,
    format_seconds,
    format_size,
    format_table,
    is_missing,
    load_frame,
    read_records,
)
from poetmodel.device import Device
from poetmodel.sweeps.measurement import FAILED
from poetmodel.units import format_bytes, parse_size

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from poetmodel.sweeps.measurement import Record

# -- compiled steps --------------------------------------------------------------------------------

COMPILED_KINDS: Final = ("both", "recompute", "paging", "keep-all", "backend", "fused")
"""Kinds of compiled steps; all other kinds are peers."""


def load_training(kind: str) -> pd.DataFrame:
    """Read the runs of a comparison of training methods; return them with ratios and peaks.

    `time` and `processor` are medians, over pairs of steps, of the ratios of wall times and of CPU
    times to those of the reference. `own` is whether the step is compiled, `ran` whether it was
    timed, `within` whether its peak meets the budget.
    """
    runs = load_frame(kind)
    method_parts = runs.method.str.partition("@")
    ratios = [_median_ratios(pairs) for pairs in runs.pairs]
    return runs.assign(
        method=method_parts[0],
        peer=method_parts[2],
        own=method_parts[0].isin(COMPILED_KINDS),
        ran=runs.pairs.map(lambda pairs: isinstance(pairs, list)),
        peak=runs.heap_peak_bytes,
        within=runs.heap_peak_bytes <= runs.budget_bytes,
        time=[ratio[0] for ratio in ratios],
        processor=[ratio[1] for ratio in ratios],
    )


def _median_ratios(pairs: object) -> tuple[float, float]:
    if not isinstance(pairs, list):
        return float("nan"), float("nan")
    wall_ratio, cpu_ratio = (
        statistics.median(pair[column] / pair[column + 2] for pair in pairs) for column in (0, 1)
    )
    return wall_ratio, cpu_ratio


def compare_at_equal_peak(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the fastest peer and the fastest compiled step within the peak RAM of each peer.

    `own` is None if no compiled step has so low a peak. `won` is whether the compiled step is at
    least as fast.
    """
    lines = []
    for network, group in runs[runs.ran].groupby("network", sort=False):
        peers = group[~group.own & (group.method != "eager") & group.peak.notna()]
        for peer in peers.itertuples():
            max_peak = int(peer.peak * (1 + peer.slack))
            best = peers[peers.peak <= max_peak].nsmallest(1, "time").iloc[0]
            compiled = group[group.own & (group.peak <= max_peak)].nsmallest(1, "time")
            line = {"network": network, "peer": peer.method, "share": peer.share}
            line |= {"peak": peer.peak, "peer_time": peer.time, "best": best.method}
            line |= {"best_time": best.time, "own": None, "own_peak": None, "own_time": None}
            if len(compiled):
                fastest = compiled.iloc[0]
                line |= {"own": fastest.method, "own_peak": fastest.peak, "own_time": fastest.time}
            lines.append(line)
    table = pd.DataFrame(lines)
    return table.assign(won=table.own_time <= table.best_time)


def tabulate_compiled() -> str:
    """Return a row for each network of the comparison with PyTorch's kernels."""
    runs = load_training("training")
    duels = compare_at_equal_peak(runs)
    lines = []
    for network, group in runs.groupby("network", sort=False):
        compiled = group[group.own]
        timed, of_network = compiled[compiled.ran], duels[duels.network == network]
        ratio = of_network.own_time / of_network.best_time
        lines.append(
            (
                format_code(str(network)),
                format_size(group.keep_all_bytes.median()),
                format_percent(timed.peak.min() / group.keep_all_bytes.median(), 2),
                f"{int(timed.within.sum())} of {len(timed)}",
                f"{int(timed.equal.sum())} of {len(timed)}",
                f"{int(of_network.won.sum())} of {len(of_network)}",
                f"{ratio.median():.2f}",
                f"{ratio.max():.2f}",
            )
        )
    heads = ("network", "keep-all", "least run at", "within budget", "eager's bits",
             "at least as fast", "time over the best peer's", "worst")  # fmt: skip
    return format_table(lines, heads)


def tabulate_keep_all() -> str:
    """Return the times of compiled steps with keep-all budgets, relative to eager steps."""
    runs = load_frame("training")
    lines = []
    for run in runs[runs.method == "keep-all"].to_dict("records"):
        pairs = pd.DataFrame(
            run["pairs"], columns=["time", "processor", "eager_time", "eager_processor"]
        )
        ratios = (pairs[name] / pairs[f"eager_{name}"] for name in ("time", "processor"))
        lines.append(
            (
                format_code(str(run["network"])),
                format_seconds(pairs.eager_processor.median()),
                *(f"{ratio.median():.2f}" for ratio in ratios),
            )
        )
    return format_table(lines, ("network", "eager's step", "time over eager's", "processor time"))


def compare_with_stock(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the steps with Inductor's kernels at a peak of stock, joined with that run of stock.

    `ratio` is that of their CPU times.
    """
    stock = runs[(runs.method == "stock") & runs.ran].set_index(["network", "share"])
    fused = runs[(runs.method == "fused") & (runs.peer == "stock") & runs.ran]
    joined = fused.join(stock[["processor", "peak"]].add_prefix("stock_"), on=["network", "share"])
    return joined.assign(ratio=joined.processor / joined.stock_processor)


def tabulate_fused() -> str:
    """Return a row for each network of the comparison with Inductor's kernels."""
    runs = load_training("fused")
    equal = compare_with_stock(runs)
    lines = []
    for network, group in runs.groupby("network", sort=False):
        fused, ratio = group[group.own & group.ran], equal[equal.network == network].ratio
        lines.append(
            (
                format_code(str(network)),
                format_size(group.stock_heap_peak_bytes.median()),
                format_percent((fused.peak / fused.stock_heap_peak_bytes).min(), 2),
                f"{int(fused.within.sum())} of {len(fused)}",
                f"{int(fused.equal.sum())} of {len(fused)}",
                f"{ratio.median():.2f}",
                f"{ratio.max():.2f}",
            )
        )
    heads = ("network", "stock's peak", "least run at", "within budget", "stock's bits",
             "processor over stock's, equal peak", "worst")  # fmt: skip
    return format_table(lines, heads)


PEER_NAMES: Final = {
    "eager": "eager",
    "checkpoint": "checkpointing of blocks",
    "selective": "selective checkpointing",
    "memory-budget": "`activation_memory_budget`",
    "stock": "`torch.compile`",
}
"""Names of the peers of the back end in tables."""


def pair_with_peers() -> list[tuple[Any, Any]]:
    """Return (peer, back end) for each run of a peer on a network of a library.

    Both are rows of `load_training`; the back end's is None if it has no run at the peer's peak.
    """
    runs = load_training("library")
    key_columns = ["network", "reference", "peer", "share"]
    compiled = (
        runs[runs.own]
        .assign(share=lambda compiled: compiled.share.fillna(1.0))
        .set_index(key_columns)
    )
    pairs = []
    for peer in runs[~runs.own & runs.ran].itertuples():
        fraction = 1.0 if pd.isna(peer.share) else peer.share
        key_values = (peer.network, peer.reference, peer.method, fraction)
        pairs.append((peer, compiled.loc[key_values] if key_values in compiled.index else None))
    return pairs


SHOWN_MEMORY_BUDGET: Final = 0.5
"""Value of ``activation_memory_budget`` with rows in the tables of networks of libraries."""


def tabulate_library(reference: str = "eager") -> str:
    """Return a row for each peer on networks of libraries, with the back end at the peer's peak.

    The reference is eager for PyTorch's kernels, and stock ``torch.compile`` for Inductor's. Of the
    values of ``activation_memory_budget`` only `SHOWN_MEMORY_BUDGET` has rows.
    """
    lines = []
    for peer, compiled in (pair for pair in pair_with_peers() if pair[0].reference == reference):
        if not pd.isna(peer.share) and peer.share != SHOWN_MEMORY_BUDGET:
            continue
        share_text = "" if pd.isna(peer.share) else f" {peer.share:g}"
        cells = ("-",) * 4
        if compiled is not None:
            refusal = "not found in time" if "in time" in str(compiled.reason) else "refused"
            cells = _format_library_run(compiled) if compiled.ran else (refusal, *("-",) * 3)
        peer_name = PEER_NAMES[peer.method] + share_text
        lines.append((format_code(peer.network), peer_name, *_format_library_run(peer), *cells))
    heads = ("network", "way", "peak", "step", "first call", "bits",
             "ours: peak", "step", "first call", "bits")  # fmt: skip
    return format_table(lines, heads, words=2)


WRAPPER_NAMES: Final = {
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


def tabulate_processes() -> str:
    """Return a row for each wrapper: peak, budget and step time of each method, and equality."""
    lines = []
    for record in read_records("processes"):
        if "ranks" not in record:
            continue
        cell = record["cell"]
        wrapper = WRAPPER_NAMES[cell["way"]]
        if cell["way"].startswith("ddp"):
            wrapper += f", {cell['cap_mb']:g} MB"
        methods = list(zip(*record["ranks"], strict=True))
        is_equal = all(rank.get("equal", True) for ranks in methods for rank in ranks)
        lines.append((wrapper, *map(_format_ranks, methods), "equal" if is_equal else "others"))
    heads = ("wrapper", "eager", "checkpointing of blocks", "ours, 80%", "60%", "45%",
             "that of checkpointing", "bits")  # fmt: skip
    return format_table(lines, heads)


def _format_ranks(ranks: Sequence[Mapping[str, Any]]) -> str:
    """Format peak, budget and step time of a method: the maxima of all processes."""
    budget_bytes = max(rank.get("budget_bytes", 0) for rank in ranks)
    budget = f" of {format_size(budget_bytes)}" if budget_bytes else ""
    if any("refused" in rank for rank in ranks):
        return f"{format_size(budget_bytes)} refused"
    peak = format_size(max(rank["heap_peak_bytes"] for rank in ranks))
    step = max(rank["ratio"] for rank in ranks)
    return f"{peak}{budget}" + (f", {step:.2f}" if ranks[0]["method"] != "eager" else "")


def _format_library_run(run: Any) -> tuple[str, str, str, str]:
    """Format peak, CPU time relative to the reference, CPU time of the first call, and equality."""
    equals_capture = str(getattr(run, "equal_captured", ""))
    bits = "equal" if run.equal else "captured" if equals_capture == "True" else "others"
    first_call = format_seconds(run.first_processor_s)
    return format_size(run.peak), f"{run.processor:.2f}", first_call, bits


def load_training_runs(kind: str) -> pd.DataFrame:
    """Return every run of a comparison of training methods, with the columns of its CSV file."""
    columns = ("network", "method", "peer", "share", "status", "budget_bytes", "peak",
             "within", "time", "processor", "written_bytes", "equal", "solve_s", "gap")  # fmt: skip
    runs = load_training(kind)
    return runs[[name for name in columns if name in runs]]


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
BOARD_BUDGETS: Final = (
    ("nrf52840", "128KiB"), ("nrf52840", None), ("nano33ble", None), ("stm32f746", "128KiB"),
    ("stm32f746", "256KiB"), ("stm32f746", None), ("rp2350", "512KiB"), ("stm32h743", None),
)  # fmt: skip
"""Boards and the usable RAM; None for all of the board's RAM."""
README_NETWORKS: Final = ("ds-cnn", "resnet8", "mobilenetv1-vww", "mobilenetv2-035-96")


def format_network(network: str) -> str:
    """Format the name of a network for tables, with batch or image size."""
    return f"`{network}`{NETWORKS[network]}"


def usable_ram_bytes(board: str, ram: str | None) -> int:
    """Return the usable RAM of a board: `ram`, or all of the board's [B]."""
    return Device.load(board).ram_bytes if ram is None else parse_size(ram, field="ram")


def compute_core_time_s(run: Mapping[str, Any], board: str) -> float:
    """Return the compute time of a recorded step on a board, by the cycles of its core [s].

    Raises ValueError if the device has no cycle model.
    """
    model = Device.load(board).cycle_model
    if model is None:
        raise ValueError(f"{board}: expected a core whose instructions are counted")
    return float(run.get("instructions", 0) / model.instructions_per_s)


def describe_flash_fault(run: Mapping[str, Any]) -> str:
    """Describe the reason why an exported step cannot run from its board's flash; empty if it can.

    Only steps of the part ``board`` are examined.
    """
    board = Device.load(run["board"])
    if run["part"] != "board" or run["status"] != "yes" or board.flash is None:
        return ""
    if run["flash_bytes"] > board.flash.size_bytes:
        used, size = (
            format_bytes(int(value)) for value in (run["flash_bytes"], board.flash.size_bytes)
        )
        return f"program and first weights are {used}, and the flash has {size}"
    is_in_place = board.stores_in_flash and board.is_memory_mapped
    if is_in_place and run["written_bytes"] and not run.get("commits"):
        return "state on flash needs `--commit`, which this record lacks"
    return ""


@cache
def load_exported_steps() -> list[Record]:
    """Read the exported steps; return them with derived fields, sorted by network and board."""
    runs = [
        {**record, **record["cell"], "gap": record.get("gap")} for record in read_records("mcu")
    ]
    for run in runs:
        run["fault"] = describe_flash_fault(run)
        run["trains"] = run["status"] == "yes" and not run["fault"]
        run["limit_bytes"] = usable_ram_bytes(run["board"], run["ram"])
        run["tile"] = run["tried"][-1]["tile"] if run["tried"] else None
        if run["status"] == "yes":
            core_s = compute_core_time_s(run, run["board"])
            run["time_s"] = core_s + run["transfer_s"]
            run["energy_j"] = core_s * run.get("power_w", 0.0) + run["transfer_j"]
    networks, places = list(NETWORKS), dict.fromkeys(BOARD_BUDGETS)
    place_order = [*places]

    def sort_key(run: Record) -> tuple[int, int]:
        board_and_ram = (run["board"], run["ram"])
        return networks.index(run["network"]), place_order.index(
            board_and_ram
        ) if board_and_ram in places else 0

    return sorted(runs, key=sort_key)


def select_part(part: str) -> list[Record]:
    """Return the exported steps of a part: ``board``, ``keep-all`` or ``last layer``."""
    return [run for run in load_exported_steps() if run["part"] == part]


def _index_by_network(part: str = "keep-all") -> dict[str, Record]:
    return {run["network"]: run for run in select_part(part) if run["trains"]}


def find_smallest_steps() -> list[tuple[Record, Record]]:
    """Return each network's step in the smallest RAM that it fits, and its keep-all step.

    Of several boards with that RAM, the one with the lowest energy counts.
    """
    pairs, boards = [], select_part("board")
    for network, kept in _index_by_network().items():
        fitting = [run for run in boards if run["network"] == network and run["trains"]]
        if fitting:
            run = min(fitting, key=lambda run: (run["limit_bytes"], run["energy_j"]))
            pairs.append((run, kept))
    return pairs


def format_verdict(run: Mapping[str, Any] | None) -> str:
    """Format the result of a network on a board: ``yes`` with the tile size, ``no`` or ``open``.

    A dash for None, without a run.
    """
    if run is None or run["status"] == FAILED:
        return "-" if run is None else FAILED
    if run["fault"]:
        return "open" if "commit" in run["fault"] else "no: flash"
    if str(run.get("reason", "")).startswith("flash:"):
        return "no: flash"
    return f"yes, {run['tile']}" if run["trains"] and run["tile"] else str(run["status"])


def tabulate_boards() -> str:
    """Return the result of each network on each board with each usable RAM."""
    runs = {(run["network"], run["board"], run["ram"]): run for run in select_part("board")}
    heads = [
        f"`{board}`, {format_bytes(usable_ram_bytes(board, ram))}" for board, ram in BOARD_BUDGETS
    ]
    lines = [
        (
            format_network(network),
            *(format_verdict(runs.get((network, *place))) for place in BOARD_BUDGETS),
        )
        for network in NETWORKS
        if sum((network, *place) in runs for place in BOARD_BUDGETS) > 1
    ]
    return format_table(lines, ("network", *heads), words=len(heads) + 1)


def tabulate_board_steps() -> str:
    """Return the costs of each network's step in the smallest RAM that it fits."""
    lines = [
        (
            format_network(run["network"]),
            format_code(run["board"]),
            format_bytes(run["limit_bytes"]),
            f"{run['instructions'] / 1e6:.1f} M ({run['instructions'] / kept['instructions']:.2f})",
            format_seconds(run["time_s"]),
            f"{1e3 * run['energy_j']:.4g} mJ",
            format_percent(run["gap"]),
        )
        for run, kept in find_smallest_steps()
    ]
    heads = ("network", "board", "RAM", "instructions", "time", "energy", "gap")
    return format_table(lines, heads, words=2)


def tabulate_readme_boards() -> str:
    """Return the rows of the README's networks on boards: RAM, time and gap."""
    lines = [
        (
            format_network(run["network"]),
            format_code(run["board"]),
            format_bytes(run["limit_bytes"]),
            format_bytes(kept["ram_bytes"]),
            format_seconds(run["time_s"]),
            format_percent(run["gap"]),
        )
        for run, kept in find_smallest_steps()
        if run["network"] in README_NETWORKS
    ]
    heads = ("network", "board", "RAM", "keep-all's RAM", "time", "gap")
    return format_table(lines, heads, words=2)


def tabulate_board_ways() -> str:
    """Return RAM and instructions of keep-all steps and of steps that train only the last layer."""
    lines, runs_by_part = [], (_index_by_network(), _index_by_network("last layer"))
    for network in (name for name in NETWORKS if all(name in runs for runs in runs_by_part)):
        cells = []
        for runs in runs_by_part:
            run = runs[network]
            cells += [format_size(run["ram_bytes"]), f"{run['instructions'] / 1e6:.2f} M"]
        lines.append((format_network(network), *cells))
    heads = ("network", "keep-all: RAM", "instructions", "last layer: RAM", "instructions")
    return format_table(lines, heads)


def describe_refusal(run: Mapping[str, Any]) -> str:
    """Describe the reason why a network does not train on a board; empty if it does."""
    if run["trains"]:
        return ""
    if run["fault"] or run["status"] == FAILED:
        return str(run["fault"] or run["reason"])
    last_attempt = run["tried"][-1]
    if "floor_bytes" not in last_attempt:
        return str(last_attempt["reason"]).removeprefix("proved: ")
    left_bytes = max(0, run["limit_bytes"] - last_attempt["reserved_bytes"])
    return (
        f"inputs, stack and runtime leave {format_bytes(left_bytes)}, and "
        f"`{last_attempt['floor_node']}` ({last_attempt['floor_op']}) alone needs "
        f"{format_bytes(last_attempt['floor_bytes'])}"
    )


def load_board_runs() -> pd.DataFrame:
    """Return every exported step: result and reason, costs, and RAM map."""
    columns = ("part", "network", "board", "limit_bytes", "answer", "because", "instructions",
             "time_s", "energy_j", "read_bytes", "written_bytes", "recomputations",
             "steps_until_worn", "gap", "ram_bytes", "stack_bytes", "stack_limit_bytes",
             "resident_state_bytes", "arena_bytes", "arena_bound_bytes", "input_bytes",
             "runtime_bytes", "flash_bytes", "weight_bytes")  # fmt: skip
    lines = [
        {**run, "answer": format_verdict(run), "because": describe_refusal(run)}
        for run in load_exported_steps()
    ]
    return pd.DataFrame(lines)[list(columns)]


def load_kernels() -> pd.DataFrame:
    """Return the instructions of each node with multiplications, in keep-all steps."""
    nodes = [
        {"network": run["network"], **node, "per_mac": node["instructions"] / node["macs"]}
        for run in _index_by_network().values()
        for node in run.get("nodes", ())
    ]
    return pd.DataFrame(nodes)


def tabulate_aifes() -> str:
    """Return instructions and RAM of AIfES and of keep-all exports of the same networks."""
    lines = []
    for record in read_records("aifes"):
        aifes_result = record["programs"]["aifes"]
        for name, heading in (("aifes", "AIfES"), ("keep_all", "keep-all")):
            result = record["programs"][name]
            lines.append(
                (
                    record["cell"]["network"],
                    heading,
                    format_integer(result["instructions"]),
                    f"{result['instructions'] / record['step_macs']:.1f}",
                    format_percent(result["instructions"] / aifes_result["instructions"]),
                    f"{format_integer(result['ram_bytes'])} B",
                    format_percent(result["ram_bytes"] / aifes_result["ram_bytes"]),
                )
            )
    headings = ("network", "program", "instructions", "a MAC", "of AIfES's", "RAM", "of AIfES's")
    return format_table(lines, headings, words=2)


_LAYER_NAMES: Final = {
    "conv2d": "3 x 3",
    "depthwise": "3 x 3 depthwise",
    "pointwise": "1 x 1",
    "linear": "fully connected",
    "add": "addition",
    "maximum": "max pool",
    "average": "average pool",
}
"""Names of the kinds of layers on pages."""


def load_cmsis_nn_rows() -> list[dict[str, Any]]:
    """Return the instructions of int8 layers by CMSIS-NN and by exported kernels.

    The first row is the sum of the front's layers.
    """
    (record,) = read_records("cmsis-nn")
    rows = [dict(row) for row in record["rows"]]
    front = [row for row in rows if row["of"] == "of the front"]
    columns = ("layers", "terms", "theirs", "ours")
    total = {name: sum(row[name] for row in front) for name in columns}
    return [{"of": "front", "kind": "", **total}, *rows]


def tabulate_cmsis_nn() -> str:
    """Return a row for each group of int8 layers: instructions of CMSIS-NN and exported kernels."""
    lines = []
    for row in load_cmsis_nn_rows():
        label = (
            f"{_LAYER_NAMES[row['kind']]} {row['of']}" if row["kind"] else "front of MobileNetV2"
        )
        per_term = (row["theirs"] / row["terms"], row["ours"] / row["terms"])
        counts = (
            format_integer(row["theirs"]),
            f"{per_term[0]:.2f}",
            format_integer(row["ours"]),
            f"{per_term[1]:.2f}",
        )
        ratio_text = format_percent(row["ours"] / row["theirs"])
        lines.append((label, format_integer(row["layers"]), *counts, ratio_text))
    heads = ("layers", "how many", "CMSIS-NN", "a term", "exported", "a term", "of CMSIS-NN's")
    return format_table(lines, heads)


def tabulate_floors() -> str:
    """Return the smallest budgets of networks [MiB], with returned and with added gradients."""
    lines = []
    for network, pair in load_frame("floors").groupby("network", sort=False):
        cells = [f"{pair.gradient_bytes.max() / 2**20:.2f}"]
        for is_added in (False, True):
            (run,) = pair[pair.is_added == is_added].to_dict("records")
            smallest_text = "-"
            if run["status"] != FAILED:
                ratio = run["budget_bytes"] / run["keep_all_bytes"]
                smallest_text = f"{run['budget_bytes'] / 2**20:.2f} ({format_percent(ratio)})"
            cells += [f"{run['keep_all_bytes'] / 2**20:.2f}", smallest_text]
        lines.append((format_code(str(network)), *cells))
    heads = ("model", "gradients", "keep-all, returned", "smallest", "keep-all, added", "smallest")
    return format_table(lines, heads)


# -- int8 fronts -----------------------------------------------------------------------------------


def read_front_records(part: str) -> list[Record]:
    """Read the records of a part of the study of int8 fronts."""
    return [record for record in read_records("fronts") if record["cell"]["part"] == part]


def tabulate_int8_steps() -> str:
    """Return RAM, flash, instructions and energy of steps with float and with int8 fronts."""
    lines = []
    for record in read_front_records("step"):
        cell, front = record["cell"], record["front_instructions"]
        floor_bytes = record["tiled_floor_bytes"] + record["reserved_bytes"]
        lines.append(
            (
                f"{format_code(cell['network'])}, {cell['size']} x {cell['size']}",
                cell["numbers"],
                format_bytes(floor_bytes),
                format_bytes(record["ram_bytes"]),
                format_bytes(record["flash_bytes"]),
                f"{record['instructions'] / 1e6:.1f} M",
                "-" if front["m4"] is None else f"{front['m4'] / 1e6:.1f} M",
                "-" if front["m3"] is None else f"{front['m3'] / 1e6:.0f} M",
                f"{1e3 * record['power_w'] * compute_core_time_s(record, FRONT_BOARD):.1f} mJ",
            )
        )
    heads = ("network", "front", "floor", "RAM", "flash", "step", "its front", "M3", "energy")
    return format_table(lines, heads, words=2)


def tabulate_int8_agreement() -> str:
    """Return the number of values of int8 layers that differ from PyTorch's for equal operands."""
    lines = []
    for record in read_front_records("agreement"):
        cell, value_count, different_count = record["cell"], record["values"], record["differ"]
        rate = (
            f"1 in {format_integer(value_count // different_count)}" if different_count else "none"
        )
        lines.append(
            (
                f"{format_code(cell['network'])}, {cell['size']} x {cell['size']}",
                str(record["layers"]),
                format_integer(value_count),
                format_integer(different_count),
                rate,
                str(record["most_steps"]),
            )
        )
    heads = ("front", "layers", "values", "differ", "rate", "steps at most")
    return format_table(lines, heads, words=1)


def tabulate_int8_replay() -> str:
    """Return costs of steps on a batch and on a stored sample, after int8 fronts."""
    lines = []
    for record in read_front_records("replay"):
        cell = record["cell"]
        instruction_counts = (record["instructions"], record["stored_instructions"])
        lines.append(
            (
                f"{format_code(cell['network'])}, {cell['size']} x {cell['size']}",
                f"{format_integer(record['image_bytes'])} B",
                f"{format_integer(record['output_bytes'])} B",
                *(f"{count / 1e6:.1f} M" for count in instruction_counts),
                format_bytes(record["ram_bytes"]),
                format_bytes(record["stored_ram_bytes"]),
            )
        )
    heads = ("network", "an image", "a sample", "step", "stored step", "RAM", "its RAM")
    return format_table(lines, heads, words=1)


def tabulate_int8_accuracy() -> str:
    """Return the accuracy of trained last layers after float and int8 fronts."""
    mean_by_way = {
        way: mean
        for record in read_front_records("accuracy")
        for way, mean in record["mean"].items()
    }
    lines = [(way, format_percent(mean)) for way, mean in mean_by_way.items()]
    return format_table(lines, ("trained", "accuracy"), words=1)


def tabulate_int8_training() -> str:
    """Return accuracies of training in float and in int8: means and ranges, by data and steps."""
    keys = ["data", "steps", "batch"]
    all_runs = load_int8_training_runs().sort_values(keys, kind="stable")
    runs_by_key = dict(iter(all_runs.groupby(keys, sort=False)))
    lines = [
        (way, *(_format_accuracy(runs[runs.way == way].accuracy) for runs in runs_by_key.values()))
        for way in dict.fromkeys(all_runs.way)
    ]
    lines.append(
        (
            "nothing",
            *(
                _format_accuracy(runs.drop_duplicates("seed").before)
                for runs in runs_by_key.values()
            ),
        )
    )
    heads = ("trained", *(f"{data}, {steps} x {batch}" for data, steps, batch in runs_by_key))
    return format_table(lines, heads, words=1)


def _format_accuracy(accuracies: pd.Series) -> str:
    """Format mean, minimum and maximum accuracy [%]; a dash if there is none."""
    if accuracies.empty:
        return "-"
    percentages = 100 * accuracies
    return f"{percentages.mean():.1f} ({percentages.min():.0f} to {percentages.max():.0f})"


def load_int8_training_runs() -> pd.DataFrame:
    """Return a row for each network that was trained further in float or int8, with accuracies."""
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
            for record in read_records("int8-training")
            for seed, (before, accuracy) in enumerate(
                zip(record["before"], record["accuracy"], strict=True)
            )
        ]
    )


# -- models of other libraries ---------------------------------------------------------------------


@cache
def load_models() -> pd.DataFrame:
    """Return the tested models of other libraries with their results; do not modify."""
    models = load_frame("coverage")
    models = models[models.status.isin(["works", "as captured", "differs", "refused"])]
    lines = models.line if "line" in models else pd.Series(None, models.index, dtype=object)
    works_after_line = [not is_missing(line) and _is_working(line) for line in lines.tolist()]
    back_end = [
        None if is_missing(result) else result["status"] for result in models.back_end.tolist()
    ]
    return models.assign(
        library=models.name.str.split().str[0],
        works=[_is_working(record) for record in models.to_dict("records")],
        works_after_line=works_after_line,
        line=[
            line["text"] if works else ""
            for line, works in zip(lines.tolist(), works_after_line, strict=True)
        ],
        refused=models.status == "refused",
        back_end_status=back_end,
    )


def _is_working(record: Mapping[str, Any]) -> bool:
    """Return whether bits are those of eager on both batches, and in a smaller budget if any."""
    if record["status"] != "works" or record["other"] != "works":
        return False
    budget = record["budget"]
    return is_missing(budget) or (budget["equal"] and budget["within"])


def tabulate_libraries() -> str:
    """Return the number of tested, working and refused models of each library."""
    lines = [
        (
            str(library),
            str(len(group)),
            str(int(group.works.sum())),
            str(int(group.works_after_line.sum())),
            str(int((group.refused & ~group.works_after_line).sum())),
            str(int((group.back_end_status == "works").sum())),
        )
        for library, group in load_models().groupby("library", sort=False)
    ]
    return format_table(
        lines,
        ("library", "tried", "eager's bits", "after a line", "refused", "with `pmt.backend`"),
    )


def tabulate_trained_steps() -> str:
    """Return a row for each step and budget that fits: energy, gap, tiles and sizes.

    Budgets in which a network does not fit are joined into one row for float and one for int8.
    """
    lines: list[tuple[str, ...]] = []
    frame = load_frame("int8-steps")
    for _, network_runs in frame.groupby("network", sort=False):
        fitting = network_runs[network_runs["status"] == "yes"]
        lines += map(_trained_step_row, fitting.to_dict("records"))
        failing = network_runs[network_runs["status"] != "yes"]
        for _, runs in failing.groupby("weights", sort=False):
            names = [", ".join(dict.fromkeys(runs[key])) for key in ("trained", "weights", "ram")]
            lines.append((format_code(runs["network"].iloc[0]), *names, "no", *("-",) * 5))
    heads = ("network", "trained", "weights", "RAM", "energy", "gap", "tiles", "flash",
             "instructions", "paged")  # fmt: skip
    return format_table(lines, heads, words=4)


def _trained_step_row(run: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the cells of a step that fits."""
    used_bytes = sum(size for name, size in run["flash_map"].items() if name != "free")
    return (
        format_code(run["network"]),
        run["trained"],
        run["weights"],
        run["ram"],
        f"{1e3 * run['energy_j']:.4g} mJ",
        format_percent(run["gap"]),
        "whole" if is_missing(run["tile_bytes"]) else format_size(run["tile_bytes"]),
        format_size(used_bytes),
        f"{run['instructions'] / 1e6:.1f} M",
        format_size(run["read_bytes"] + run["written_bytes"]),
    )
