"""Compiled C objects of a test run, shared by its tests and workers."""

import atexit
import hashlib
import os
import re
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from poetmodel.export import board

_INCLUDED = re.compile(r'^[ \t]*#[ \t]*include[ \t]+"([^"]+)"', re.MULTILINE)


class Store:
    """A folder of compiled files; each is written under a temporary name first."""

    folder = None
    """The folder of the test run; by default a temporary one of the process."""

    def path(self, name):
        """Return the path of a file, whether it exists or not."""
        if self.folder is None:
            own = TemporaryDirectory(prefix="pm_objects_")
            atexit.register(own.cleanup)
            self.folder = Path(own.name)
        return self.folder / name

    def keep(self, name, make):
        """Return the path of a file; create the file with `make` if it is missing."""
        path = self.path(name)
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            with TemporaryDirectory(dir=path.parent) as folder:
                make(Path(folder, name))
                Path(folder, name).replace(path)
        return path


STORE = Store()


@pytest.fixture(scope="session", autouse=True)
def share_compiled_files(tmp_path_factory, request):
    """Fixture: share compiled files among all workers of a test run."""
    base = tmp_path_factory.getbasetemp()
    STORE.folder = (base.parent if hasattr(request.config, "workerinput") else base) / "compiled"


def digest(*parts):
    """Return a file name from the hash of all inputs of a compilation."""
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:32]


def flags_of(folder, target, settings=()):
    """Return the compiler flags of an exported folder's Makefile; none without Makefile."""
    flags = folder / "build" / target / "flags"
    command = ["make", "--silent", str(flags.relative_to(folder)), *settings]
    environment = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MFLAGS")}
    board.execute(command, folder, time_limit_s=60.0, environment=environment)
    return flags.read_text(encoding="utf-8").split() if flags.exists() else []


def build(folder, target, *, settings=()):
    """Build an exported folder; reuse stored objects of equal text and flags."""
    objects = folder / "build" / target
    shutil.rmtree(objects, ignore_errors=True)
    flags = flags_of(folder, target, settings)
    if not flags:
        return board.build_program(folder, target, settings=settings)
    names = _names(folder, objects, flags)
    for path, name in names.items():
        if STORE.path(name).exists():
            path.parent.mkdir(exist_ok=True)
            shutil.copyfile(STORE.path(name), path)
    program = board.build_program(folder, target, settings=settings)
    for path, name in names.items():
        if path.exists():
            STORE.keep(name, lambda copy, path=path: shutil.copyfile(path, copy))
    return program


def _names(folder, objects, flags):
    """Return the name in the store for each object that depends on text alone.

    A macro counts where a text has its name; linker options do not count.
    """
    compiling = [word for word in flags if not word.startswith("-Wl,")]
    names = {}
    for source in (
        path for part in ("src", "port", "host") for path in folder.glob(f"{part}/**/*.c")
    ):
        text = _text(source, folder, set())
        if ".incbin" not in text:
            own = [w for w in compiling if w[:2] != "-D" or w[2:].partition("=")[0] in text]
            path = objects / source.relative_to(folder).with_suffix(".o")
            names[path] = f"{digest(*own, text)}.o"
    return names


def _text(source, folder, read):
    """Return the text of a file, and of all files of its folder that it includes.

    The header of kernels only declares: kernels of several folders are the same objects.
    """
    read.add(source)
    text = source.read_text(encoding="utf-8")
    for name in _INCLUDED.findall(text):
        paths = (source.parent / name, folder / "include" / name)
        path = next((path.resolve() for path in paths if path.is_file()), None)
        if path is not None and path not in read and path.name != "pm_kernels.h":
            text += _text(path, folder, read)
    return text
