"""PyTorch is asked for in words where it is missing or too old."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from importlib.util import find_spec
from pathlib import Path

import pytest

import poetmodel.torch as front
from poetmodel.errors import BackendUnavailableError
from poetmodel.torch import errors

TESTS = Path(__file__).resolve().parents[1]
IMPORTED = re.compile(r'^(?:\w+ = )?pytest\.importorskip\("torch', re.MULTILINE)
"""An import for a whole file."""
MARKED = re.compile(r"^pytestmark = (\[\s*)?pytest\.mark\.torch\b", re.MULTILINE)


def test_missing_torch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without PyTorch the message says how to get it."""

    def missing(_: str) -> str:
        raise PackageNotFoundError

    monkeypatch.setattr(errors, "version", missing)
    with pytest.raises(BackendUnavailableError, match=r"pip install 'poetmodel\[torch\]'"):
        errors.require_torch()


@pytest.mark.parametrize("found", ["2.8.1", "1.13.0+cpu"])
def test_old_torch_is_refused(found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A release that cannot capture is named with the one that is needed."""
    monkeypatch.setattr(errors, "version", lambda _: found)
    with pytest.raises(BackendUnavailableError, match=f"{found[:3]}.* too old.*2.9"):
        errors.require_torch()


@pytest.mark.parametrize("found", ["2.9.0", "2.13.0+cpu", "3.0.0a1"])
def test_new_torch_is_accepted(found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Builds and later releases count as what they are."""
    monkeypatch.setattr(errors, "version", lambda _: found)
    assert errors.require_torch() == found


@pytest.mark.parametrize("found", [None, "1.6.0"])
def test_executorch_is_asked_for_by_its_extra(
    found: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it is missing, or another release, the message says how to get the right one."""

    def installed(_: str) -> str:
        if found is None:
            raise PackageNotFoundError
        return found

    monkeypatch.setattr(errors, "version", installed)
    what = "ExecuTorch is not installed" if found is None else r"ExecuTorch 1\.6\.0 is installed"
    with pytest.raises(
        BackendUnavailableError, match=rf"^{what}, .* pip install 'poetmodel\[executorch\]'$"
    ):
        errors.require_executorch()


@pytest.mark.torch
def test_programs_of_executorch_need_its_extra() -> None:
    """The name is there; without the package using it says how to get it."""
    pytest.importorskip("torch")
    if find_spec("executorch") is not None:
        pytest.skip("ExecuTorch is installed here")
    with pytest.raises(BackendUnavailableError, match=r"poetmodel\[executorch\]"):
        getattr(front, "to_executorch")  # noqa: B009 - a name that is loaded on use


def test_importing_the_front_end_does_not_import_torch() -> None:
    """PyTorch loads with the first name that needs it; errors can be named without it."""
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


def test_a_name_that_needs_torch_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without PyTorch the front end says how to get it, in place of a failing import."""
    import poetmodel.torch as front

    def missing(_: str) -> str:
        raise PackageNotFoundError

    monkeypatch.setattr(errors, "version", missing)
    with pytest.raises(BackendUnavailableError, match=r"pip install 'poetmodel\[torch\]'"):
        front.__getattr__("compile")


def test_unknown_names_are_attribute_errors() -> None:
    """A name that is not there is an ordinary attribute error."""
    import poetmodel.torch as front

    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = front.nothing


def test_modules_of_tests_that_need_torch_say_so() -> None:
    """Where PyTorch is imported for a whole file, all of it carries the marker that runs it."""
    files = [path for path in TESTS.rglob("test_*.py") if IMPORTED.search(path.read_text("utf-8"))]
    assert len(files) > 10
    for path in files:
        assert MARKED.search(path.read_text("utf-8")), path


SKIPPED = """
import pytest

@pytest.mark.torch
def test_marked():
    pytest.skip("could not import 'torch': not here")

def test_unmarked():
    pytest.skip("could not import 'torch': not here")

def test_other():
    pytest.skip("could not import 'scip'")

@pytest.mark.torch
def test_lacking():
    pytest.skip("no arm-none-eabi-gcc and no qemu-system-arm on PATH")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("needed", "programs", "failing"),
    [
        ("", "", ["test_unmarked"]),
        ("1", "", ["test_marked", "test_unmarked"]),
        ("1", "1", ["test_lacking", "test_marked", "test_unmarked"]),
    ],
)
def test_missing_packages_and_programs_are_noticed(
    needed: str, programs: str, failing: list[str], tmp_path: Path
) -> None:
    """A skip fails where the environment installs what is missing; others are written down."""
    skipped = tmp_path / "skipped.txt"
    settings = {"POETMODEL_NEEDS_PROGRAMS": programs, "POETMODEL_SKIPPED": str(skipped)}
    done = pytest_on(tmp_path, SKIPPED, needed, **settings)
    if needed and find_spec("torch") is None:
        assert done.returncode == pytest.ExitCode.USAGE_ERROR
        assert "PyTorch is not installed" in done.stderr
        return
    failed = sorted(re.findall(r"^FAILED \S+::(\w+)", done.stdout, re.MULTILINE))
    assert failed == failing, done.stdout
    written = [line.rpartition("::")[2] for line in skipped.read_text().splitlines()]
    assert written == ([] if programs else ["test_lacking"])


def pytest_on(
    folder: Path, source: str, needed: str, **settings: str
) -> subprocess.CompletedProcess[str]:
    """Run pytest on one file, with the hooks of all tests."""
    file = folder / "test_skipped.py"
    file.write_text(source)
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "conftest", "-m", "", "-rf", str(file)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=TESTS.parent,
        env={**os.environ, "PYTHONPATH": str(TESTS), "POETMODEL_NEEDS_TORCH": needed, **settings},
    )
