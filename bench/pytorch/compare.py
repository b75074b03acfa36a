"""Compare ways to train inside a budget: heap peak, step time, bytes written, equality with eager.

``python -m pytorch.compare --out bench/results/$(date +%F)-training.jsonl`` in ``bench`` runs every
cell in a process of its own, with one thread, and writes a JSON line for each; ``--network``,
``--method`` and ``--share`` (each may be given several times) choose some of them.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pytorch.cells import LIMIT_S, METHODS, NETWORKS, PAIRS, SHARES, Cell, cells
from records import Recorder
from resuming import FAILED, end_line, read_records, still_to_do

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.connection import Connection

KIND: Final = "training"
"""Kind of the records."""
GRACE_S: Final = 300.0
"""How long a cell may take beside its solve, until its process is ended [s]."""
_PRELOADED: Final = ("torch", "poetmodel.torch.compilation", "pyomo.environ", "highspy")
_THREADS: Final = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def _in_process(cell: Cell, folder: str, ram_bytes: int | None, out: Connection) -> None:
    """Measure a cell in a process of its own, and send the facts."""
    from pytorch.measurement import measure

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process itself
    out.send(measure(cell, folder=folder, ram_bytes=ram_bytes))
    out.close()


def measured(cell: Cell, folder: str, ram_bytes: int | None) -> dict[str, Any]:
    """Return the facts of a cell that a process of its own has measured."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_PRELOADED))
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(
        target=_in_process, args=(cell, folder, ram_bytes, sender), daemon=True
    )
    begun = time.monotonic()
    process.start()
    sender.close()
    try:
        if receiver.poll(cell.limit_s + GRACE_S):
            return dict(receiver.recv())
    except EOFError:
        pass
    finally:
        process.kill()
        process.join()
        receiver.close()
    seconds = time.monotonic() - begun
    reason = f"the process ended with {process.exitcode} after {seconds:.0f} s"
    return {"cell": cell.to_dict(), "seconds": seconds, "status": FAILED, "reason": reason}


def run(
    chosen: Sequence[Cell],
    records: Sequence[dict[str, Any]],
    write: Callable[..., None],
    *,
    measure: Callable[[Cell, int | None], dict[str, Any]],
) -> None:
    """Measure cells in their order.

    Parameters
    ----------
    chosen : sequence of Cell
        Those to measure.
    records : sequence of dict
        What was measured before; the peaks of peers are taken from here, too.
    write : callable
        Takes the name of a cell, and facts as keywords.
    measure : callable
        Returns the facts of a cell, given a budget or None.
    """
    peaks = {_place(record["cell"]): record.get("heap_peak_bytes") for record in records}
    for number, cell in enumerate(chosen, 1):
        peak = None if cell.peer is None else peaks.get((cell.network, cell.peer, cell.share))
        if cell.peer is not None and peak is None:
            reason = f"{cell.peer} has no peak on record"
            facts = {"cell": cell.to_dict(), "seconds": 0.0, "status": FAILED, "reason": reason}
        else:
            facts = measure(cell, None if peak is None else int(peak * (1 + cell.slack)))
        peaks[_place(cell.to_dict())] = facts.get("heap_peak_bytes")
        sys.stderr.write(
            f"{number}/{len(chosen)} {cell.name}: {facts['seconds']:.1f} s, {facts['status']}\n"
        )
        write(cell.name, **facts)


def _place(cell: dict[str, Any]) -> tuple[str, str, float | None]:
    """Return what tells a cell of one comparison from the others."""
    return cell["network"], cell["method"], cell["share"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cells that were asked for; return the exit status: 130 where the run was stopped."""
    options = _options(arguments)
    os.environ |= dict.fromkeys(_THREADS, "1")
    chosen = tuple(
        cells(
            options.network or NETWORKS, options.method or METHODS, options.share or SHARES,
            limit_s=options.time_limit, pairs=options.pairs, slack=options.slack,
        )
    )  # fmt: skip
    records = []
    if options.out.exists():
        records = read_records(options.out)
        chosen = still_to_do(chosen, records)
        end_line(options.out)
    recorder = Recorder(options.out)

    def write(name: str, **facts: Any) -> None:
        recorder.write(KIND, name, **facts)

    def measure(cell: Cell, ram_bytes: int | None) -> dict[str, Any]:
        return measured(cell, options.storage, ram_bytes)

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        run(chosen, records, write, measure=measure)
    except KeyboardInterrupt:
        sys.stderr.write("stopped; --resume goes on\n")
        return 130
    return 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="file of records, *-training.jsonl")
    parser.add_argument("--network", action="append", choices=NETWORKS, help="default: all")
    parser.add_argument("--method", action="append", choices=METHODS, help="default: all")
    parser.add_argument("--share", action="append", type=float, help="default: 0.75 to 0.25")
    parser.add_argument("--storage", default=tempfile.gettempdir(), help="folder for pages")
    parser.add_argument("--time-limit", type=float, default=LIMIT_S, help="of the solver [s]")
    parser.add_argument("--pairs", type=int, default=PAIRS, help="steps that are timed")
    parser.add_argument("--slack", type=float, default=0.0, help="over a peer's peak, as a share")
    parser.add_argument("--resume", action="store_true", help="go on with a file that exists")
    options = parser.parse_args(arguments)
    if options.out.exists() and not options.resume:
        parser.error(f"--out: {options.out} exists; --resume goes on with it")
    return options


if __name__ == "__main__":
    sys.exit(main())
