"""A hand-written step in the place of an exported one: the runtime around it, built and run."""

import ctypes
import shutil
import subprocess
from functools import cache
from pathlib import Path

import numpy as np

from kit.programs import needs
from kit.shared_objects import STORE, build, digest
from poetmodel.export import board
from poetmodel.export.board import Target, run

SOURCES = Path(board.__file__).with_name("c")
TOY = Path(__file__).parents[1] / "export" / "toy"
GENERATED = {"pm_state.c", "pm_state.h", "pm_slices.c", "kernels"}
"""What a toy does without."""
LEARNING_RATE = 0.05
BATCHES = 3


class Toys:
    """Programs of the toy, each built once."""

    def __init__(self, folder):
        self.folder = folder
        self._built = {}

    def sources(self):
        """Return a new folder of what the toy is built from."""
        folder = self.folder / str(len(list(self.folder.iterdir())))
        shutil.copytree(SOURCES, folder, ignore=shutil.ignore_patterns(*GENERATED))
        shutil.copytree(TOY, folder, dirs_exist_ok=True)
        return folder

    def program(self, target, *settings):
        """Return the program for a target, built with some settings."""
        needs(target)
        key = (target, settings)
        if key not in self._built:
            self._built[key] = build(self.sources(), target, settings=settings)
        return self._built[key]

    def run(self, target, settings, folder, *, steps, words=()):
        """Run the toy on its batches, in a folder."""
        return run(
            self.program(target, *settings),
            target,
            folder,
            inputs=batches(target),
            steps=steps,
            learning_rate=LEARNING_RATE,
            words=words,
            time_limit_s=120.0,
        )


@cache
def samples():
    """Return the toy's inputs: five numbers, and a factor."""
    random = np.random.default_rng(7)
    return tuple((random.random(5, np.float32), 1 + k % 2) for k in range(BATCHES))


def batches(target):
    """Return the file of inputs."""
    kind = "<f8" if target is Target.HOST_DOUBLE else "<f4"
    return b"".join(x.astype(kind).tobytes() + np.int32(k).tobytes() for x, k in samples())


def library(folder, *sources, flags=()):
    """Build a library of some C files of the runtime, and load it with variables of its own."""
    needs(Target.HOST)
    paths = (TOY / "include", SOURCES, *(SOURCES / part for part in ("src", "port", "host")))
    options = ["-std=c11", "-O2", "-shared", "-fPIC", *(f"-I{path}" for path in paths), *flags]
    files = [TOY / each if (TOY / each).is_file() else SOURCES / each for each in sources]
    name = f"{Path(sources[0]).stem}{digest(*options, *files)}.so"
    command = ["cc", *options, *files, "-lm", "-o"]
    kept = STORE.keep(name, lambda path: subprocess.run([*command, path], check=True))
    own = folder / f"{len(list(folder.iterdir()))}{name}"
    shutil.copyfile(kept, own)
    return ctypes.CDLL(str(own))
