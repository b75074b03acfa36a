"""Study of training in two processes: DDP, FSDP2 and blocks within budgets, by `pytorch.ranks`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from harness import DONE, RecordedRun, Study, make_record
from poetmodel.sweeps.measurement import FAILED

if TYPE_CHECKING:
    from collections.abc import Iterator

    from poetmodel.sweeps.measurement import Record

KIND: Final = "processes"
"""Kind of the records."""
CAPS_MB: Final = {"ddp": (1.0, 25.0), "ddp-whole": (1.0, 25.0), "ddp-static": (1.0,),
                  "ddp-no-sync": (1.0,)}  # fmt: skip
"""Bucket sizes of wrappers with DDP [MB]; ``ddp-whole`` turns ``optimize_ddp`` off."""
WAYS: Final = (*CAPS_MB, "fsdp", "fsdp-root", "fsdp-bf16", "blocks")
"""Wrappers: DDP; FSDP2 of each block, of the model alone, and with bf16; blocks compiled in one
process without a wrapper."""
SHARES: Final = (0.8, 0.6, 0.45)
"""Budgets as fractions of the peak of the same wrapper in eager PyTorch."""
_RANKS: Final = Path(__file__).with_name("ranks.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class WrapperRun(RecordedRun):
    """One wrapper, in which all methods train in sequence."""

    way: str
    """One of `WAYS`."""
    cap_mb: float = 25.0
    """Bucket size of DDP [MB]."""
    shares: tuple[float, ...] = SHARES
    """Budgets as fractions of the peak of eager PyTorch."""
    limit_s: float = 1200.0
    """Limit of the whole run [s]."""

    @property
    def name(self) -> str:
        """Name of the run in records."""
        return f"{self.way} | {self.cap_mb:g} MB" if self.way in CAPS_MB else self.way


def wrapper_runs(
    ways: tuple[str, ...] = WAYS, shares: tuple[float, ...] = SHARES
) -> Iterator[WrapperRun]:
    """Yield one run for each wrapper and bucket size."""
    for way in ways:
        for cap_mb in CAPS_MB.get(way, (25.0,)):
            yield WrapperRun(way=way, cap_mb=cap_mb, shares=shares)


def measure(fields: dict[str, Any], _: Any) -> Record:
    """Start the processes of a run, on a port that the system chooses; return its record.

    The record is of a failure if the processes wrote no result. Raises `subprocess.TimeoutExpired`
    after the limit of the run.
    """
    run = WrapperRun(**fields)
    begin_s = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        result_path = Path(folder) / "found.json"
        process_count = 1 if run.way == "blocks" else 2
        shares = ",".join(map(str, run.shares))
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone",
                   "--nproc-per-node", str(process_count), str(_RANKS)]  # fmt: skip
        completed = subprocess.run(
            [*command, run.way, str(run.cap_mb), shares, str(result_path)],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
            timeout=run.limit_s,
        )
        seconds = time.perf_counter() - begin_s
        if not result_path.exists():
            reason = completed.stderr[-2000:]
            facts: dict[str, Any] = {"status": FAILED, "reason": reason}
        else:
            facts = {"status": DONE, "ranks": json.loads(result_path.read_text(encoding="utf-8"))}
    from torch import __version__

    return make_record(KIND, run.name, cell=fields, seconds=seconds, torch=__version__, **facts)


STUDY: Final = Study(
    name="processes",
    kind=KIND,
    runs=wrapper_runs,
    smoke_runs=lambda: [WrapperRun(way="blocks", shares=(0.6,))],
    measure=measure,
    has_own_process=False,
)
