"""Capture the traced graphs under ``bench/traced`` from models of transformers and diffusers.

``python -m pytorch.capture`` in ``bench`` writes ``NAME.graph.json`` and, measured on this host,
``NAME.profile.csv`` for every model; names as arguments choose some of them. Those in
``whole-steps/`` have the updates of AdamW, their state and operators in place. ``--check`` writes
nothing and exits 1 where a graph would differ in anything but its workspace, which depends on the
processor. The files were made with PyTorch 2.13.0, transformers 5.23.0 and diffusers 0.42.1.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from poetmodel.device.io import save_profile
from poetmodel.graph import Graph
from poetmodel.torch.runtime.profiling import limited_threads, measure
from poetmodel.torch.step.trace import trace
from pytorch.models import CAPTURED

if TYPE_CHECKING:
    from collections.abc import Sequence

TRACED: Final = Path(__file__).resolve().parents[1] / "traced"
"""The folder of traced graphs."""
_WHOLE: Final = "whole-steps/"
WHOLE: Final = ("gpt2", "llama", "t5", "vit", "swin")
"""Models that are captured with an optimizer, too: those whose file has less than 500 KB."""
MODELS: Final = (*(f"models/{name}" for name in CAPTURED), *(f"{_WHOLE}{name}" for name in WHOLE))
"""What is captured, by name: where its files lie."""


def bare(graph: Graph) -> Graph:
    """Return a graph without its workspaces, which depend on the processor."""
    return replace(graph, nodes=tuple(replace(node, workspace_bytes=0) for node in graph.nodes))


def main(arguments: Sequence[str] | None = None) -> int:
    """Capture or check; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 on differences")
    parser.add_argument("--folder", type=Path, default=TRACED, help="where the files lie")
    parser.add_argument("--repeats", type=int, default=10, help="measurements per operation")
    options = parser.parse_args(arguments)
    return max(_capture(name, options) for name in options.names or MODELS)


def _capture(name: str, options: Any) -> int:
    torch.manual_seed(0)
    path = options.folder / f"{name}.graph.json"
    with limited_threads(1):
        made = CAPTURED[name.partition("/")[2]]()
        whole = name.startswith(_WHOLE)
        traced = trace(
            made.model,
            made.loss_fn,
            made.inputs,
            name=path.name.removesuffix(".graph.json"),
            measure_workspace=not options.check,
            optimizer=torch.optim.AdamW(made.model.parameters()) if whole else None,
        )
        if options.check:
            same = path.is_file() and bare(Graph.load(path)) == bare(traced.graph)
            sys.stdout.write(f"{'same' if same else 'change'} {name}\n")
            return 0 if same else 1
        path.parent.mkdir(parents=True, exist_ok=True)
        profile = measure(traced, folder=options.folder, repeats=options.repeats)
    traced.graph.save(path)
    save_profile(profile.costs, options.folder / f"{name}.profile.csv")
    sys.stdout.write("\n".join((f"write {name}", *profile.notes)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
