"""Compiled C files, which all tests and workers of one execution of pytest share."""

import atexit
import hashlib
import os
import re
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from kit.programs import run_command
from poetmodel.export import board

_INCLUDED = re.compile(r'^[ \t]*#[ \t]*include[ \t]+"([^"]+)"', re.MULTILINE)


class Store:
    """A folder of compiled files.

    A file is written under a temporary name first, so that other workers never read a partial one.
    """

    folder = None
    """The folder; None until `path` creates a temporary one for this process."""

    def path(self, name):
        """Return the path of a file, which need not exist."""
        if self.folder is None:
            own = TemporaryDirectory(prefix="pm_objects_")
            atexit.register(own.cleanup)
            self.folder = Path(own.name)
        return self.folder / name

    def get_or_make(self, name, make):
        """Return the path of a file; if it is missing, call `make` with a path to write it to."""
        path = self.path(name)
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            with TemporaryDirectory(dir=path.parent) as folder:
                make(Path(folder, name))
                Path(folder, name).replace(path)
        return path


STORE = Store()
QUICK_BUILD = "EXTRA=-O0"
"""Makefile variable of builds whose optimization would take longer than a few steps."""


@pytest.fixture(scope="session", autouse=True)
def share_compiled_files(tmp_path_factory, request):
    """Fixture: set the folder of `STORE` to one that all workers share."""
    base = tmp_path_factory.getbasetemp()
    STORE.folder = (base.parent if hasattr(request.config, "workerinput") else base) / "compiled"


def digest(*parts):
    """Return the hash of all inputs of a compilation, for a file name."""
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:32]


def compile_objects(command, sources, includes):
    """Return the objects of C and C++ files, from `STORE` or compiled now.

    `command` is a compiler with its options; `includes` are its folders of headers.
    """
    options = [f"-I{folder}" for folder in includes]
    objects = []
    for source in map(Path, sources):
        text = _read_text(source, includes, set())
        assert ".incbin" not in text, source
        name = f"{digest(*_used_words(command, text), text)}.o"

        def make(path, source=source):
            run_command([*command, *options, "-c", source, "-o", path], path.parent)

        objects.append(STORE.get_or_make(name, make))
    return objects


def link_program(command, sources, includes, program, *options):
    """Compile C files as `compile_objects`, link them with `options`, and return the program."""
    objects = compile_objects(command, sources, includes)
    run_command([*command, *objects, *options, "-lm", "-o", program], program.parent)
    return program


def _used_words(words, text):
    """Return the words of a command without each ``-D`` whose macro is not in the text."""
    return [w for w in words if w[:2] != "-D" or w[2:].partition("=")[0] in text]


def read_flags(folder, target, settings=()):
    """Return the compiler flags of an exported folder's Makefile; empty without a Makefile.

    Executes ``make`` with `settings` as variables, which writes the flags to the build folder.
    """
    flags = folder / "build" / target / "flags"
    command = ["make", "--silent", str(flags.relative_to(folder)), *settings]
    environment = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MFLAGS")}
    board.execute(command, folder, time_limit_s=60.0, environment=environment)
    return flags.read_text(encoding="utf-8").split() if flags.exists() else []


def build(folder, target, *, settings=()):
    """Build an exported folder anew; return its program.

    Copies objects of equal text and flags from `STORE`, and adds new ones to it. Programs of the
    host are not optimized, unless `settings` has an ``EXTRA``.
    """
    if target.startswith("host") and not any(word.startswith("EXTRA=") for word in settings):
        settings = (*settings, QUICK_BUILD)
    objects = folder / "build" / target
    shutil.rmtree(objects, ignore_errors=True)
    flags = read_flags(folder, target, settings)
    if not flags:
        return board.build_program(folder, target, settings=settings)
    names = _store_names(folder, objects, flags)
    for path, name in names.items():
        if STORE.path(name).exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(STORE.path(name), path)
    program = board.build_program(folder, target, settings=settings)
    for path, name in names.items():
        if path.exists():
            STORE.get_or_make(name, lambda copy, path=path: shutil.copyfile(path, copy))
    return program


def _store_names(folder, objects, flags):
    """Return the name in the store by path of the object, from the source's text and flags.

    Sources that include binary files have none. A ``-D`` flag is part of the name if its macro is
    in the text; linker options are not.
    """
    compiling = [word for word in flags if not word.startswith("-Wl,")]
    names = {}
    for source in (
        path for part in ("src", "port", "host") for path in folder.glob(f"{part}/**/*.c")
    ):
        text = _read_text(source, [folder / "include"], set())
        if ".incbin" not in text:
            path = objects / source.relative_to(folder).with_suffix(".o")
            names[path] = f"{digest(*_used_words(compiling, text), text)}.o"
    return names


def _read_text(source, includes, read):
    """Return the text of a file, and of all files that it includes from its folder or `includes`.

    Adds the files to `read`. Omits ``pm_kernels.h``, which only has declarations: otherwise the
    same kernel would be another object in each folder.
    """
    read.add(source)
    text = source.read_text(encoding="utf-8")
    for name in _INCLUDED.findall(text):
        paths = [folder / name for folder in (source.parent, *includes)]
        path = next((path.resolve() for path in paths if path.is_file()), None)
        if path is not None and path not in read and path.name != "pm_kernels.h":
            text += _read_text(path, includes, read)
    return text
