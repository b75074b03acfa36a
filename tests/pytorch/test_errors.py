"""Errors for missing PyTorch, and for a missing function of a user."""

import logging
import re
import subprocess
import sys
import warnings
from contextlib import suppress
from importlib import import_module
from importlib.metadata import PackageNotFoundError
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace

import pytest

import poetmodel.torch as front
from poetmodel.errors import BackendUnavailableError, InputError, MissingExtraError
from poetmodel.torch import errors, target
from poetmodel.torch.target import is_target, load_step, needs_capture

TESTS = Path(__file__).resolve().parents[1]
IMPORTED = re.compile(r'^(?:\w+ = )?pytest\.importorskip\("torch', re.MULTILINE)
"""An import for a whole file."""
MARKED = re.compile(r"^pytestmark = (\[\s*)?pytest\.mark\.torch\b", re.MULTILINE)


@pytest.mark.parametrize(
    ("door", "found", "words"),
    [
        (errors.require_torch, None, r"pip install 'poetmodel\[torch\]'"),
        (lambda: front.__getattr__("compile"), None, r"pip install 'poetmodel\[torch\]'"),
        *((errors.require_torch, v, f"{v[:3]}.* too old.*2.9") for v in ("2.8.1", "1.13.0+cpu")),
        (errors.require_executorch, None, r"^ExecuTorch is not installed, .*\[executorch\]'$"),
        (errors.require_executorch, "1.6.0", r"^ExecuTorch 1\.6\.0 is .*\[executorch\]'$"),
    ],
)
def test_missing_and_old_packages_are_named(door, found, words, monkeypatch):
    """The message states how to install the right version; later builds are accepted."""

    def installed(_):
        if found is None:
            raise PackageNotFoundError
        return found

    monkeypatch.setattr(errors, "version", installed)
    with pytest.raises(BackendUnavailableError, match=words):
        door()
    for newer in ("2.9.0", "2.13.0+cpu", "3.0.0a1"):
        monkeypatch.setattr(errors, "version", lambda _, newer=newer: newer)
        assert errors.require_torch() == newer


def import_a_name():
    """Import a name that no release has."""
    from torch.fx import gone_name  # noqa: F401


@pytest.mark.torch
@pytest.mark.parametrize(
    ("imports", "words"),
    [
        (lambda: attrgetter("fx.gone_name")(import_module("torch")), "no attribute 'gone_name'"),
        (import_a_name, r"cannot import name 'gone_name' from 'torch\.fx'"),
        (lambda: import_module("torch.gone_name"), r"No module named 'torch\.gone_name'"),
    ],
)
def test_a_name_that_a_release_of_pytorch_has_moved_is_named(imports, words, monkeypatch):
    """In one sentence with a remedy."""
    pytest.importorskip("torch")
    monkeypatch.setattr(front, "import_module", lambda _: imports())
    sentence = rf"^PyTorch 2\..* has moved a name that .*{words}\); install an older .*\Z"
    with pytest.raises(BackendUnavailableError, match=sentence):
        front.__getattr__("trace")


@pytest.mark.torch
@pytest.mark.parametrize(
    ("module", "package"), [("huggingface", "transformers"), ("lightning", "lightning")]
)
def test_modules_for_other_libraries_name_what_they_need(module, package, monkeypatch):
    """Their import states how to install the library; it is an `ImportError` as for any module."""
    pytest.importorskip("torch")
    monkeypatch.delitem(sys.modules, f"poetmodel.torch.{module}", raising=False)
    for name in [name for name in sys.modules if name.startswith(f"{package}.")]:
        monkeypatch.delitem(sys.modules, name)  # another test may have loaded it
    monkeypatch.setitem(sys.modules, package, None)
    words = f"^poetmodel.torch.{module} needs the package {package}, .*pip install"
    for kind in (MissingExtraError, ImportError):
        with pytest.raises(kind, match=words):
            import_module(f"poetmodel.torch.{module}")


@pytest.mark.torch
@pytest.mark.skipif(find_spec("executorch") is not None, reason="ExecuTorch is installed here")
def test_programs_of_executorch_need_its_extra():
    """The name exists; without the package, its use states how to install it."""
    pytest.importorskip("torch")
    with pytest.raises(BackendUnavailableError, match=r"poetmodel\[executorch\]"):
        getattr(front, "to_executorch")  # noqa: B009 - a name that is loaded on use


def test_importing_the_front_end_does_not_import_torch():
    """PyTorch loads with the first name that needs it; errors can be named without it."""
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = front.nothing
    script = (
        "import sys, poetmodel.torch as front\n"
        "assert set(front.__all__) <= set(dir(front))\n"
        "front.CaptureError, front.PageError\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "False\n"


@pytest.mark.parametrize(
    ("level", "shown"),
    [(logging.NOTSET, ["error"]), (logging.DEBUG, ["error"]), (logging.CRITICAL, [])],
)
def test_suppressed_warnings_leave_a_stricter_level(level, shown, caplog):
    """Warnings are suppressed, also as messages; warnings that the user suppressed stay hidden."""
    logging.disable(level)
    try:
        with warnings.catch_warnings(record=True) as caught, errors.suppress_warnings():
            warnings.warn("a warning", stacklevel=1)
            logging.getLogger("any").warning("warning")
            logging.getLogger("any").error("error")
        assert logging.root.manager.disable == level
    finally:
        logging.disable(logging.NOTSET)
    assert caught == []
    assert [record.message for record in caplog.records] == shown


@pytest.mark.torch
def test_every_name_of_the_front_end_is_there():
    """A name whose module was renamed would only fail on access."""
    for name in front.__all__:
        with suppress(BackendUnavailableError):  # those of ExecuTorch, where it is missing
            assert getattr(front, name) is not None


def test_modules_of_tests_that_need_torch_say_so(request):
    """Where PyTorch is imported for a whole file, all of it carries the marker that runs it."""
    files = [path for path in TESTS.rglob("test_*.py") if IMPORTED.search(path.read_text("utf-8"))]
    assert len(files) > 4
    for path in files:
        assert MARKED.search(path.read_text("utf-8")), path
    for item in {item.path: item for item in request.session.items}.values():
        imports = TESTS in item.path.parents and "\nimport torch\n" in item.path.read_text("utf-8")
        assert not imports or item.get_closest_marker("torch"), item.path


LACKS = {
    "marked": ("torch", "could not import 'torch': not here"),
    "unmarked": (None, "could not import 'torch': not here"),
    "other": (None, "could not import 'scip'"),
    "lacking": ("torch", "no arm-none-eabi-gcc and no qemu-system-arm on PATH"),
}
"""Tests that are skipped: their marker, and why."""


@pytest.mark.parametrize(
    ("needs_torch", "needs_programs", "failing"),
    [(False, False, "unmarked"), (True, False, "marked unmarked"),
     (True, True, "marked unmarked lacking")],
)  # fmt: skip
def test_missing_packages_and_programs_are_noticed(
    needs_torch, needs_programs, failing, request, monkeypatch, tmp_path
):
    """A skip fails if the environment installs the package; others are recorded."""
    hooks = request.config.pluginmanager.get_plugin(str(TESTS / "conftest.py"))
    monkeypatch.setattr(hooks, "NEEDS_TORCH", needs_torch)
    monkeypatch.setattr(hooks, "NEEDS_PROGRAMS", needs_programs)
    monkeypatch.setattr(hooks, "SKIPPED", tmp_path / "skipped.txt")
    told = {"failed": [], "skipped": []}
    for name, (mark, why) in LACKS.items():
        report = SimpleNamespace(skipped=True, outcome="skipped", longrepr=why, nodeid=name)
        hook = hooks.pytest_runtest_makereport(
            SimpleNamespace(get_closest_marker={"torch": mark}.get)
        )
        next(hook)
        with pytest.raises(StopIteration):
            hook.send(report)
        told[report.outcome].append(report)
    assert [report.nodeid for report in told["failed"]] == failing.split()
    hooks.pytest_terminal_summary(SimpleNamespace(stats={"skipped": told["skipped"]}))
    written = (tmp_path / "skipped.txt").read_text().split()
    assert written == ([] if needs_programs else ["lacking"])
    monkeypatch.setattr(hooks, "find_spec", lambda _: None)
    if needs_torch:
        with pytest.raises(pytest.UsageError, match="PyTorch is not installed"):
            hooks.pytest_configure(request.config)


# -- finding a user's function ---------------------------------------------------------------------
SOURCE = """\
import math
step = lambda: ("model", None, ["x"])
pair = lambda: (1, 2)
no_tuple = lambda: ("model", None, "x")
no_loss = lambda: ("model", 3, ("x",))
number = 3

def leaves():
    raise SystemExit(3)

def broken():
    return math.sqrt(-1)
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    """Return a user's file; the current folder is its own, and PyTorch is not needed."""
    path = tmp_path / "user_step.py"
    path.write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(target, "require_torch", lambda: "2.13.0")
    monkeypatch.delitem(sys.modules, "user_step", raising=False)
    return path


@pytest.mark.parametrize("head", ["user_step", "user_step.py", "{folder}/user_step.py"])
def test_function_is_found(head, file):
    """A module of the current folder, a file, and a file elsewhere are found."""
    path = list(sys.path)
    found = load_step(f"{head.format(folder=file.parent)}:step")
    assert found == ("model", None, ("x",))
    assert sys.path == path


@pytest.mark.parametrize(
    "text",
    [
        *("user_step", "user_step:", ":step", "user_step:nothing", "user_step:number"),
        *("nowhere:step", "nowhere.inner:step", "nowhere.py:step", "user_step:pair"),
        *("user_step:no_tuple", "user_step:no_loss", "user_step:leaves", "user_step:broken"),
    ],
)
@pytest.mark.usefixtures("file")
def test_what_is_wrong_is_said(text, told):
    """Every way to get a target wrong has its sentence."""
    with told.raises(InputError):
        load_step(text)


@pytest.mark.parametrize("content", ["import no_such_module\n", "def step(:\n"])
def test_a_file_that_cannot_be_read_is_said(content, file, told):
    """An error while the user's file is read is no traceback."""
    file.write_text(content)
    with told.raises(InputError):
        load_step("user_step.py:step")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("import no_such_module\n", "No module named 'no_such_module'"),
        ("raise ValueError('no such setting')\n", "no such setting"),
        ("raise ModuleNotFoundError('no such plugin')\n", "no such plugin"),
    ],
)
def test_a_package_that_cannot_be_imported_is_said(file, monkeypatch, source, words):
    """The line is that of the package which contains the module, and the module is not missing."""
    package = file.parent / "user_package"
    package.mkdir()
    (package / "__init__.py").write_text(source)
    (package / "train.py").write_text(SOURCE)
    monkeypatch.delitem(sys.modules, "user_package", raising=False)
    with pytest.raises(InputError, match=rf"__init__\.py:1 .*{words}"):
        load_step("user_package.train:step")


@pytest.mark.parametrize("name", [".train", "..train", "no-name", "sys.path", "no_such.train"])
def test_modules_that_cannot_exist_are_missing(name):
    """Whatever the import system raises for such a name."""
    with pytest.raises(InputError, match="there is no module"):
        load_step(f"{name}:step")


def test_targets_are_told_from_files():
    """Graph files and built-in models are no targets."""
    assert is_target("package.module:step")
    assert is_target("folder/file.py:step")
    assert not is_target("net.graph.json")
    assert not is_target("paper/vgg16")
    assert not is_target("a:b.json")
    assert needs_capture("train.py"), "the function was forgotten"
    assert not needs_capture("net.step.json")
