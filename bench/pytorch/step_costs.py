"""Measure what a compiled step costs that keeps everything, and what convolutions in parts change.

``python -m pytorch.step_costs --out results/$(date +%F)-step-costs.jsonl`` in ``bench`` writes two
JSON lines per network for steps beside eager's, with glibc's heap as it is and with one that keeps
what it has, and one for its convolutions. ``--network`` (may be given several times) chooses some.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import resource
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any, Final

from harness import latest, parsed, record
from pytorch.runs import NETWORKS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

HEAPS: Final[dict[str, dict[str, str]]] = {
    "default": {},
    "kept": {"MALLOC_TRIM_THRESHOLD_": "1000000000000", "MALLOC_MMAP_THRESHOLD_": "33554432"},
}
"""Settings of glibc's heap: as it is, and so that it gives no memory back."""
PAIRS: Final = 25
"""Steps that are timed, each beside one of eager, which comes first and second in turn."""
SHARE: Final = 0.2
"""Convolutions are divided for this budget, as a share of keeping everything."""
_ONE: Final = "import sys; from pytorch.step_costs import tell; tell(*sys.argv[1:])"
_THREADS: Final = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def beside_eager(network: str, pairs: int) -> dict[str, Any]:
    """Return what steps that keep everything take, and eager's.

    Returns
    -------
    dict
        ``new`` with gradients that are new, ``added`` with gradients that are added to: of each
        pair time of the processor and page faults of the step, and both of eager's.
    """
    import torch

    from poetmodel import torch as pmt
    from pytorch.networks import NETWORKS as MADE

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, loss_fn, inputs = MADE[network]()
    twin = copy.deepcopy(model)
    step = pmt.compile(model, loss_fn, inputs, ram="100%", device="rpi4b", cache=False)

    def eager(x: Any, y: Any) -> None:
        loss_fn(twin(x), y).backward()

    found: dict[str, Any] = {"torch": str(torch.__version__)}
    for mode in ("new", "added"):
        rows = []
        for place in range(pairs + 2):
            if mode == "new":
                model.zero_grad()
                twin.zero_grad()
            works: list[Callable[..., Any]] = [step, eager]
            taken = {id(work): _taken(work, inputs) for work in works[:: 1 - 2 * (place % 2)]}
            rows.append([*taken[id(step)], *taken[id(eager)]])
        found[mode] = rows[2:]
    return found


def _taken(work: Callable[..., Any], inputs: Sequence[Any]) -> tuple[float, int]:
    """Return the time of the processor [s] and the page faults that something takes."""
    faults, begin = _faults(), time.thread_time()
    work(*inputs)
    return round(time.thread_time() - begin, 6), _faults() - faults


def _faults() -> int:
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt


def convolutions(network: str, pairs: int) -> dict[str, Any]:
    """Return the least budget with whole convolutions and with parts, and what both take."""
    import torch

    from poetmodel import torch as pmt
    from poetmodel.torch.capturing.replay import KERNEL, call, replay
    from poetmodel.torch.runtime.convolutions import divided_units, in_parts
    from poetmodel.torch.step.trace import keep_all_bytes, least_bytes
    from pytorch.networks import NETWORKS as MADE

    torch.set_num_threads(1)
    torch.manual_seed(0)
    traced = pmt.trace(*MADE[network]())
    whole_bytes = keep_all_bytes(traced)
    begin = time.perf_counter()
    found = divided_units(traced, budget_bytes=int(SHARE * whole_bytes))
    trials_s = time.perf_counter() - begin
    parts = in_parts(traced, found)
    divided = {traced.parts.units[each.unit].node for each in found}
    sums = {"whole": 0.0, "parts": 0.0}
    unequal = 0

    def execute(node: Any, arguments: Any, keywords: Any) -> Any:
        nonlocal unequal
        if node not in divided:
            return call(node, arguments, keywords)
        works = {"whole": node.target, "parts": node.meta[KERNEL]}
        values = {}
        for name, work in works.items():
            times = []
            for _ in range(pairs // 5):
                begin = time.thread_time()
                values[name] = work(*arguments, **keywords)
                times.append(time.thread_time() - begin)
            sums[name] += min(times)
        both = [v if isinstance(v, tuple) else (v,) for v in values.values()]
        unequal += any(
            one is not None and not torch.equal(one, other)
            for one, other in zip(*both, strict=True)
        )
        return values["whole"]

    replay(traced.joint, execute)
    return {
        "torch": str(torch.__version__),
        "keep_all_bytes": whole_bytes,
        "least_bytes": least_bytes(traced),
        "least_in_parts_bytes": least_bytes(parts),
        "divided": len(found),
        "unequal": unequal,
        "whole_s": sums["whole"],
        "parts_s": sums["parts"],
        "trials_s": trials_s,
    }


def tell(network: str, name: str, pairs: str) -> None:
    """Write what one measurement gives to standard output, as JSON."""
    work = convolutions if name == "convolutions" else beside_eager
    sys.stdout.write(json.dumps(work(network, int(pairs))))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what was asked for, each in a process of its own; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--network", action="append", choices=NETWORKS, help="default: all")
    parser.add_argument("--pairs", type=int, default=PAIRS, help="steps that are timed")
    options = parsed(parser, "step-costs.jsonl", arguments)
    os.environ |= dict.fromkeys(_THREADS, "1")
    store = latest(options.out)
    for network in options.network or NETWORKS:
        for name, heap in {**HEAPS, "convolutions": {}}.items():
            cell = {"network": network, "heap": name, "pairs": options.pairs}
            told = subprocess.run(  # glibc reads the settings of its heap as it starts
                [sys.executable, "-c", _ONE, network, name, str(options.pairs)],
                env=os.environ | heap,
                stdout=subprocess.PIPE,
                check=True,
            ).stdout
            kind = "convolutions" if name == "convolutions" else "step-cost"
            store.add(record(kind, f"{network} | {name}", cell=cell, **json.loads(told)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
