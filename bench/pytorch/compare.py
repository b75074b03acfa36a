"""Comparison of methods to train within a budget: peak, step time, bytes written, equal bits.

Three studies: compiled steps with PyTorch's kernels, the back end with Inductor's kernels, and
both on networks of libraries.
"""

from __future__ import annotations

import os
import tempfile
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from harness import Study, make_record
from poetmodel.sweeps.measurement import FAILED
from pytorch.runs import FUSED as FUSED_METHOD
from pytorch.runs import STOCK, TrainingRun, make_fused_runs, make_library_runs, make_training_runs

if TYPE_CHECKING:
    from collections.abc import Mapping

    from poetmodel.sweeps.measurement import Record
    from poetmodel.sweeps.store import RecordFile

KIND: Final = "training"
"""Kind of the records."""
_THREADS: Final = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def measure(fields: dict[str, Any], start: tuple[int | None, str]) -> Record:
    """Execute a run; return its record.

    Parameters
    ----------
    fields : dict
        The run, as `TrainingRun.to_dict` returns it.
    start : tuple
        The budget of compiled steps at the peak of a peer [B], and the folder of pages. A run at a
        peer's peak is recorded as failed if the budget is None.
    """
    run, (ram_bytes, folder) = TrainingRun(**fields), start
    if ram_bytes is None and (run.peer is not None or run.method == FUSED_METHOD):
        reason = f"{run.peer or STOCK} has no peak on record"
        return make_record(KIND, run.name, cell=fields, seconds=0.0, status=FAILED, reason=reason)
    from pytorch.measurement import measure_method

    return make_record(
        KIND, run.name, cell=fields, **measure_method(run, folder=folder, ram_bytes=ram_bytes)
    )


def compute_budget_bytes(run: TrainingRun, store: RecordFile) -> int | None:
    """Return a run's budget from the recorded peak of its peer: a fraction, or with slack [B].

    None if the run has no peer, or the store has no peak of the peer.
    """
    peaks = {
        (cell["network"], cell["method"], cell["share"]): record.get("heap_peak_bytes")
        for record in store.records()
        for cell in (record["cell"],)
    }
    if run.method == FUSED_METHOD:
        peak = peaks.get((run.network, STOCK, None))
        return None if peak is None else int(peak * (run.share or 1.0))
    peak = None if run.peer is None else peaks.get((run.network, run.peer, run.share))
    return None if peak is None else int(peak * (1 + run.slack))


def _make_start(
    run: TrainingRun, store: RecordFile, settings: Mapping[str, Any]
) -> tuple[int | None, str]:
    os.environ |= dict.fromkeys(_THREADS, "1")
    return compute_budget_bytes(run, store), str(settings["storage"])


_make_study = partial(
    Study,
    kind=KIND,
    measure=measure,
    start_of=_make_start,
    settings={"storage": tempfile.gettempdir()},
    preloaded=("torch", "poetmodel.torch.compilation", "pyomo.environ", "highspy"),
    grace_s=300.0,
)
_SMALL: Final[dict[str, Any]] = {"limit_s": 2.0, "pairs": 1}
TRAINING: Final = _make_study(
    name="training",
    runs=make_training_runs,
    smoke_runs=partial(
        make_training_runs, ("unet-b8",), ("file-hooks", "both@file-hooks"), (0.75,), **_SMALL
    ),
)
FUSED: Final = _make_study(
    name="fused",
    runs=make_fused_runs,
    smoke_runs=lambda: [TrainingRun(network="mlp8-b16", method=STOCK, reference=STOCK, **_SMALL)],
)
LIBRARY: Final = _make_study(
    name="library",
    runs=make_library_runs,
    smoke_runs=lambda: [
        TrainingRun(network="unet/1", method=method, fresh=True, **_SMALL)
        for method in ("checkpoint", "backend@checkpoint")
    ],
)
