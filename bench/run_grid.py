"""Run the grid: one fresh process and one JSON line a cell; can be stopped and resumed at any time.

``python bench/run_grid.py --workers 2 --out bench/results/$(date +%F)-grid.jsonl`` runs everything
in a mixed order that is the same each time, so that a run that is cut short is a fair sample.
"""

from __future__ import annotations

import argparse
import multiprocessing
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from grid import GOALS, Cell, cells, in_running_order
from measure import measure, warm
from records import Recorder
from resuming import FAILED, end_line, read_records, still_to_do

if TYPE_CHECKING:
    from collections.abc import Sequence
    from multiprocessing.connection import Connection

KIND: Final = "cell"
"""Kind of the records."""
GRACE_S: Final = 120.0
"""How long after its limit a cell may take until its process is ended [s]."""
WIDE: Final = 0.01
"""Gap above which ``--again`` solves a cell again."""
_TICK_S: Final = 0.5
_PRELOADED: Final = (
    "pyomo.environ",
    "highspy",
    "scipy.sparse",
    "networkx",
    "poetmodel.backends.highs",
    "poetmodel.solver",
    "poetmodel.device",
)


def _in_process(cell: Cell, threads: int, out: Connection) -> None:
    """Measure a cell in a process of its own, and send the facts."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process itself
    warm()
    out.send(measure(cell, threads=threads))
    out.close()


@dataclass(slots=True)
class Runner:
    """Measures cells, each in a process of its own, and records them as they end."""

    recorder: Recorder
    threads: int = 1
    workers: int = 1
    total: int = 0
    stop: threading.Event = field(default_factory=threading.Event)
    """Set to end the run: cells that are under way are dropped."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    done: int = 0

    def run(self, chosen: Sequence[Cell]) -> None:
        """Measure cells, in their order, `workers` at a time."""
        self.total = len(chosen)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(_PRELOADED))
        with ThreadPoolExecutor(self.workers) as pool:
            futures = [pool.submit(self._one, context, cell) for cell in chosen]
            try:
                for future in futures:
                    future.result()
            finally:
                self.stop.set()

    def _one(self, context: Any, cell: Cell) -> None:
        if self.stop.is_set():
            return
        facts = self._measured(context, cell)
        if facts is None:
            return
        with self.lock:
            self.done += 1
            seconds = facts.pop("seconds")
            self.recorder.write(KIND, cell.name, seconds=seconds, workers=self.workers, **facts)
            gap = facts.get("gap")
            shown = facts["status"] if gap is None else f"{facts['status']}, gap {gap:.3%}"
            sys.stderr.write(f"{self.done}/{self.total} {cell.name}: {seconds:.2f} s, {shown}\n")

    def _measured(self, context: Any, cell: Cell) -> dict[str, Any] | None:
        """Return the facts of a cell; None where the run was stopped first."""
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(
            target=_in_process, args=(cell, self.threads, sender), daemon=True
        )
        begun = time.monotonic()
        process.start()
        sender.close()
        facts = None
        try:
            while not receiver.poll(_TICK_S):
                late = time.monotonic() - begun > cell.limit_s + GRACE_S
                if late or self.stop.is_set():
                    process.kill()
                    break
            facts = receiver.recv()
        except EOFError:
            pass
        finally:
            receiver.close()
            process.join()
        if self.stop.is_set():
            return None
        if facts is not None:
            return dict(facts)
        seconds = time.monotonic() - begun
        reason = f"the process ended with {process.exitcode} after {seconds:.0f} s"
        return {"cell": cell.to_dict(), "seconds": seconds, "status": FAILED, "reason": reason}


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="file of records, *-grid.jsonl")
    parser.add_argument("--goal", type=int, action="append", choices=GOALS, help="default: all")
    parser.add_argument("--only", default="", help="cells whose name contains this")
    parser.add_argument(
        "--again", type=Path, help="record whose cells above 1 %%, or without a verdict, are run"
    )
    parser.add_argument("--workers", type=int, default=1, help="cells at a time")
    parser.add_argument("--threads", type=int, default=1, help="threads of each solve")
    parser.add_argument("--limit", type=float, help="seconds of every cell; default: its own")
    parser.add_argument("--sample", type=int, help="only the first cells of the mixed order")
    parser.add_argument("--resume", action="store_true", help="go on with a file that exists")
    options = parser.parse_args(arguments)
    if options.out.exists() and not options.resume:
        parser.error(f"--out: {options.out} exists; --resume goes on with it")
    return options


def is_left(record: dict[str, Any]) -> bool:
    """Return whether a cell, solved as by default, ended with a gap above `WIDE` or with nothing.

    Nothing is neither a schedule nor a proof that there is none.
    """
    gap = record.get("gap")
    open_ = record["status"] == "unknown" if gap is None else gap > WIDE
    return bool(record["cell"]["method"] == "default" and open_)


def chosen_cells(options: argparse.Namespace) -> tuple[Cell, ...]:
    """Return the cells that the options ask for, in running order."""
    chosen = in_running_order(cells(options.goal or GOALS))
    if options.again is not None:
        left = {record["name"] for record in read_records(options.again) if is_left(record)}
        chosen = tuple(cell for cell in chosen if cell.name in left)
    chosen = tuple(cell for cell in chosen if options.only in cell.name)[: options.sample]
    if options.limit is not None:
        chosen = tuple(replace(cell, limit_s=options.limit) for cell in chosen)
    return chosen


def main(arguments: Sequence[str] | None = None) -> int:
    """Run cells; return the exit status: 130 where the run was stopped."""
    options = _options(arguments)
    chosen = chosen_cells(options)
    if options.out.exists():
        chosen = still_to_do(chosen, read_records(options.out))
        end_line(options.out)
    warm()  # fails here, before anything is recorded, where nothing can be solved at all
    runner = Runner(Recorder(options.out), threads=options.threads, workers=options.workers)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        runner.run(chosen)
    except KeyboardInterrupt:
        sys.stderr.write("stopped; --resume goes on\n")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
