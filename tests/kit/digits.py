"""The step of the tutorial, which needs no PyTorch, and batches for it."""

from functools import cache
from pathlib import Path

import numpy as np

from kit.shared_objects import build
from poetmodel.export.board import Target, run
from poetmodel.export.exporting import export_step
from poetmodel.export.io import load_step

STEP = Path(__file__).parents[2] / "docs" / "digits.step.json"


def exporter(tmp_path_factory, plans):
    """Return what exports the step to a folder by the name of a plan, once each."""

    @cache
    def folder(name):
        path = tmp_path_factory.mktemp(name)
        export_step(load_step(STEP), path, gap=0.5, **plans[name])
        return path

    return folder


def digit_batches(count, *, seed):
    """Return random batches as its exported program reads them: pictures, then labels."""
    random = np.random.default_rng(seed)
    return b"".join(
        random.normal(size=576).astype("<f4").tobytes()
        + random.integers(0, 4, 4).astype("<i4").tobytes()
        for _ in range(count)
    )


def ran(folder, target=Target.HOST, *, settings=(), inputs, steps, rate=0.1, words=()):
    """Build an exported folder and train some steps; return what the program left."""
    program = build(folder, target, settings=settings)
    given = {"inputs": inputs, "steps": steps, "learning_rate": rate, "words": words}
    return run(program, target, folder, **given).require_success()


def state_after(step, folder, inputs, steps, options=None, settings=(), rate=0.05):
    """Return the state after steps of an exported step, by default one that keeps all in RAM."""
    export_step(step, folder, gap=0.5, **options or {"ram": "100%", "paging": False})
    return ran(folder, settings=settings, inputs=inputs, steps=steps, rate=rate).state
