"""Compare ways to train inside a budget: heap peak, step time, bytes written, equality with eager.

``python -m pytorch.compare --out results/$(date +%F)-training.jsonl`` in ``bench`` does every run
in a process of its own, with one thread, and writes a JSON line for each; ``--network``,
``--method`` and ``--share`` (each may be given several times) choose some of them.
``--optimizer`` (adamw, momentum) compares whole steps, updates included, by the memory of the
process: ``--out results/$(date +%F)-whole-step.jsonl``. ``--fused`` compares what can be had inside
of ``torch.compile`` with Inductor's kernels: ``--out results/$(date +%F)-fused.jsonl``.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from harness import FreshProcesses, parsed, record, recorded, run_all
from poetmodel.bench.measurement import FAILED
from pytorch.runs import (
    FUSED,
    FUSED_NETWORKS,
    LIMIT_S,
    METHODS,
    NETWORKS,
    OPTIMIZERS,
    PAIRS,
    SHARES,
    STOCK,
    WHOLE_METHODS,
    WHOLE_NETWORKS,
    WHOLE_SHARES,
    TrainingRun,
    fused_runs,
    training_runs,
    whole_step_runs,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from poetmodel.bench.measurement import Record
    from poetmodel.bench.store import RecordFile

KIND: Final = "training"
"""Kind of the records."""
GRACE_S: Final = 300.0
"""How long a run may take beside its solve, until its process is ended [s]."""
_PRELOADED: Final = ("torch", "poetmodel.torch.compilation", "pyomo.environ", "highspy")
_THREADS: Final = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def measure(fields: dict[str, Any], ram_bytes: int | None, *, folder: str) -> Record:
    """Do a run and return its record.

    Parameters
    ----------
    fields : dict
        The run, as `TrainingRun.to_dict` gives it.
    ram_bytes : int, optional
        The budget of compiled steps at the peak of a peer; without one such a run has failed [B].
    folder : str
        Where pages lie.
    """
    run = TrainingRun(**fields)
    facts: dict[str, Any]
    if ram_bytes is None and (run.peer is not None or run.method == FUSED):
        reason = f"{run.peer or STOCK} has no peak on record"
        facts = {"seconds": 0.0, "status": FAILED, "reason": reason}
    else:
        if run.optimizer is None:
            from pytorch.measurement import measured
        else:
            from pytorch.whole_steps import measured

        facts = measured(run, folder=folder, ram_bytes=ram_bytes)
    return record(KIND, run.name, cell=fields, **facts)


def budget_bytes(run: TrainingRun, store: RecordFile) -> int | None:
    """Return the measured peak of the peer that a run is compared with, and its slack if any [B].

    None where it has no peer, or the peer has no peak on record.
    """
    measure = "heap_peak_bytes" if run.optimizer is None else "peak_bytes"
    peaks = {
        (cell["network"], cell["method"], cell["share"], cell.get("optimizer")): each.get(measure)
        for each in store.records()
        for cell in (each["cell"],)
    }
    wanted = (run.network, run.peer, run.share, run.optimizer)
    if run.method == FUSED:
        peak = peaks.get((run.network, STOCK, None, None))
        return None if peak is None else int(peak * (run.share or 1.0))
    peak = None if run.peer is None else peaks.get(wanted)
    if peak is None:
        return None
    return int(peak * (1 + run.slack)) if run.optimizer is None else int(peak)


def main(arguments: Sequence[str] | None = None) -> int:
    """Do the runs that were asked for; return the exit status: 130 where they were stopped."""
    options = _options(arguments)
    os.environ |= dict.fromkeys(_THREADS, "1")
    settings = {"limit_s": options.time_limit, "pairs": options.pairs, "slack": options.slack}
    if options.fused:
        runs = fused_runs(options.network or FUSED_NETWORKS, **settings)
    elif options.optimizer:
        runs = whole_step_runs(
            options.network or WHOLE_NETWORKS, options.method or WHOLE_METHODS,
            options.share or WHOLE_SHARES, options.optimizer, **settings,
        )  # fmt: skip
    else:
        runs = training_runs(
            options.network or NETWORKS, options.method or METHODS, options.share or SHARES,
            **settings,
        )  # fmt: skip
    store = recorded(options.out)
    return run_all(
        tuple(runs),
        store,
        partial(measure, folder=options.storage),
        FreshProcesses(1, preloaded=_PRELOADED, grace_s=GRACE_S),
        kind=KIND,
        start_of=lambda run: budget_bytes(run, store),
    )


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    networks, methods = (tuple(dict.fromkeys(names)) for names in (
        (*NETWORKS, *WHOLE_NETWORKS, *FUSED_NETWORKS), (*METHODS, *WHOLE_METHODS),
    ))  # fmt: skip
    parser.add_argument("--network", action="append", choices=networks, help="default: all")
    parser.add_argument("--method", action="append", choices=methods, help="default: all")
    parser.add_argument("--share", action="append", type=float, help="default: 0.75 to 0.25")
    parser.add_argument("--optimizer", action="append", choices=OPTIMIZERS, help="whole steps")
    parser.add_argument("--fused", action="store_true", help="inside of torch.compile")
    parser.add_argument("--storage", default=tempfile.gettempdir(), help="folder for pages")
    parser.add_argument("--time-limit", type=float, default=LIMIT_S, help="of the solver [s]")
    parser.add_argument("--pairs", type=int, default=PAIRS, help="steps that are timed")
    parser.add_argument("--slack", type=float, default=0.0, help="over a peer's peak, as a share")
    return parsed(parser, "training.jsonl", arguments)


if __name__ == "__main__":
    sys.exit(main())
