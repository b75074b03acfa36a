"""Compare ways to train inside a budget: heap peak, step time, bytes written, equality with eager.

``PYTHONPATH=bench python -m pytorch.compare --out bench/results/$(date +%F)-training.jsonl`` runs
every cell in a process of its own, with one thread, and writes a JSON line for each; ``--network``,
``--method`` and ``--share`` (each may be given several times) choose some of them.
"""

from __future__ import annotations

import argparse
import copy
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

import torch

from poetmodel.torch.peaks import heap_peak_bytes
from pytorch.networks import NETWORKS
from pytorch.peers import BUDGETED, METHODS, Method, eager, make

if TYPE_CHECKING:
    from collections.abc import Iterator

SHARES: Final = (0.75, 0.5, 0.35, 0.25)
"""Budgets as shares of the peak of keeping everything."""
REPEATS: Final = 7
"""Steps that are timed, in turn with those of eager."""


def main() -> int:
    """Run the cells that were asked for."""
    options = _options()
    if options.cell:
        network, method, share = options.cell
        _write(None, measured(network, method, float(share), options))
        return 0
    for network, method, share in _cells(options):
        words = [sys.executable, "-m", "pytorch.compare", "--cell", network, method, str(share)]
        words += ["--storage", options.storage, "--time-limit", str(options.time_limit)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        lines = done.stdout.splitlines()
        record = {"network": network, "method": method, "share": share}
        if done.returncode or not lines:
            record["failed"] = (done.stderr.strip().splitlines() or ["no output"])[-1]
        else:
            record = json.loads(lines[-1])
        _write(options.out, record)
    return 0


def measured(network: str, name: str, share: float, options: Any) -> dict[str, Any]:
    """Run one method on one network; return what was found.

    Notes
    -----
    Results are those of the second step after the same first one, so that buffers have a history.
    The peak is measured with gradients that are there already, and that compiled steps add to at
    once, as the other methods do.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    training = NETWORKS[network]()
    model, loss_fn, inputs = training
    twin = copy.deepcopy(model)
    reference = eager((twin, loss_fn, inputs))
    method = make(name, training, options.storage, share, options.time_limit)
    torch.manual_seed(1)
    expected = _results(twin, reference, inputs)
    torch.manual_seed(1)
    found = _results(model, method, inputs)
    unequal = [key for key in expected if not torch.equal(expected[key], found[key])]
    for parameter in (*model.parameters(), *twin.parameters()):
        parameter.grad = torch.zeros_like(parameter)
    before = method.written_bytes()
    peaks = {
        "heap_peak_bytes": heap_peak_bytes(lambda: method.run(*inputs)),
        "eager_heap_peak_bytes": heap_peak_bytes(lambda: reference.run(*inputs)),
    }
    written = method.written_bytes() - before
    times = [(_seconds(method, inputs), _seconds(reference, inputs)) for _ in range(REPEATS)]
    return {
        "network": network,
        "method": name,
        "share": share if name in BUDGETED else None,
        "torch": torch.__version__,
        **peaks,
        "written_bytes": written,
        "step_s": min(own for own, _ in times),
        "step_median_s": median(own for own, _ in times),
        "eager_step_s": min(its for _, its in times),
        "eager_step_median_s": median(its for _, its in times),
        "unequal_gradients": sum(key.startswith("gradient") for key in unequal),
        "unequal_buffers": sum(key.startswith("buffer") for key in unequal),
        "equal": not unequal,
        **method.details,
    }


def _results(model: torch.nn.Module, method: Method, inputs: Any) -> dict[str, torch.Tensor]:
    """Run two steps; return copies of what the second one leaves."""
    method.run(*inputs)
    model.zero_grad()
    found = {"loss": method.run(*inputs)}
    for name, parameter in model.named_parameters():
        found[f"gradient of {name}"] = parameter.grad.clone()
    for name, buffer in model.named_buffers():
        found[f"buffer {name}"] = buffer.clone()
    return found


def _seconds(method: Method, inputs: Any) -> float:
    begin = perf_counter()
    method.run(*inputs)
    return perf_counter() - begin


def _cells(options: Any) -> Iterator[tuple[str, str, float]]:
    for network in options.network or NETWORKS:
        for method in options.method or METHODS:
            shares = options.share or SHARES
            for share in shares if method in BUDGETED else (1.0,):
                yield network, method, share


def _write(path: str | None, record: dict[str, Any]) -> None:
    line = json.dumps(record, sort_keys=True)
    if path is None:
        sys.stdout.write(f"{line}\n")
        return
    with Path(path).open("a", encoding="utf-8") as file:
        file.write(f"{line}\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--network", action="append", choices=tuple(NETWORKS))
    parser.add_argument("--method", action="append", choices=METHODS)
    parser.add_argument("--share", action="append", type=float)
    parser.add_argument("--storage", default=tempfile.gettempdir(), help="folder for pages")
    parser.add_argument("--time-limit", type=float, default=60.0, help="of the solver [s]")
    parser.add_argument("--out", help="file to which lines are added; default: stdout")
    parser.add_argument("--cell", nargs=3, metavar=("NETWORK", "METHOD", "SHARE"))
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
