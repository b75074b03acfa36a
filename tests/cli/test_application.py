"""The application: first steps, help, exit statuses, and streams that go away."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest
import typer

import poetmodel
from kit.commands import invoke
from poetmodel.cli import inspect
from poetmodel.cli.application import app
from poetmodel.errors import BackendError, BackendUnavailableError, VerificationError

if TYPE_CHECKING:
    from pathlib import Path

    from kit.messages import Told

COMMANDS = (
    "solve",
    "limits",
    "choose",
    "plan",
    "trace",
    "profile",
    "export",
    "state",
    "sweep",
    "report",
    "explore",
    "bench",
    "inspect",
    "verify",
    "explain",
    "diff",
    "models",
    "devices",
    "doctor",
)
SLOW = ("bench",)
"""Commands whose example takes long."""
SERVING = ("explore",)
"""Commands that serve until they are stopped, and print an address, not a result."""
TRAINED = {"trace": ("trace",), "export": ("export", "state"), "choose": ("choose",)}
"""Commands whose example takes a module with a training step, and those that read what it wrote."""
OF_TRAINED = {command for commands in TRAINED.values() for command in commands}
NEEDS = {"trace": ("torch",), "report": ("jinja2", "plotly"), "bench": ("matplotlib",)}
"""Optional packages without which an example does not run."""
TRAINING = """\
import torch


def step():
    model = torch.nn.Linear(4, 2)
    return model, torch.nn.functional.mse_loss, (torch.ones(3, 4), torch.zeros(3, 2))
"""
"""What the example of ``trace`` reads."""


def start(
    *arguments: object, cwd: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run ``python -m poetmodel`` in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "poetmodel", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=cwd,
        env={**os.environ, **environment},
    )


def test_no_arguments_show_what_to_type_next() -> None:
    """A first run says which command to try, and that command names a shipped model and device."""
    outcome = invoke()
    assert outcome.status == 0
    assert "poetmodel solve mobilenetv2 --device rpi4b --ram 40%" in outcome.out
    assert outcome.err == ""


def test_version_is_the_packages() -> None:
    """--version prints the version first, then that of every solver, or that it is missing."""
    outcome = invoke("--version")
    first, *solvers = outcome.out.splitlines()
    assert (outcome.status, first) == (0, f"poetmodel {poetmodel.__version__}")
    assert [line.split()[0] for line in solvers] == ["highspy", "pyscipopt", "gurobipy"]
    assert solvers[0] == f"highspy {version('highspy')}"


def test_module_runs_as_the_command_does() -> None:
    """``python -m poetmodel`` is the command, under its own name."""
    process = start("solve")
    assert process.returncode == 2
    assert process.stdout == ""
    assert process.stderr.startswith("error: missing graph")


def test_commands_load_no_table_before_they_print_one() -> None:
    """Importing the commands draws in neither tables nor any other heavy library."""
    script = (
        "import sys\nimport poetmodel.cli.application\n"
        "heavy = {'rich.table', 'pyomo', 'highspy', 'pydantic', 'numpy', 'scipy', 'networkx'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    process = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert process.stdout == "[]\n"


def test_help_imports_no_solver_and_no_parser_library() -> None:
    """--help needs none of the heavy libraries, so it is quick."""
    script = (
        "import sys\nfrom poetmodel.cli import main\nsys.argv = ['poetmodel', '--help']\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "heavy = {'pyomo', 'highspy', 'networkx', 'pydantic', 'numpy', 'scipy', 'torch',\n"
        "         'plotly', 'matplotlib', 'pandas', 'dask'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)"
    )
    process = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert process.stderr == "[]\n"
    assert all(command in process.stdout for command in COMMANDS)


def examples(command: str) -> list[str]:
    """Return the command lines that the help of a command gives as examples."""
    return re.findall(r"Example: poetmodel (.*\S)", invoke(command, "--help").out)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_gives_an_example_of_its_command(command: str) -> None:
    """The help of every command ends with one example, on one line, of that command."""
    outcome = invoke(command, "--help")
    assert outcome.status == 0
    assert [line.split()[0] for line in examples(command)] == [command]
    assert ("--json" in outcome.out) == (command not in SERVING)


def run_example(line: str) -> None:
    """Type an example, which must succeed and say something."""
    outcome = invoke(*line.split())
    assert outcome.status == 0, (line, outcome.err)
    assert outcome.out


def is_equipped(command: str) -> bool:
    """Return whether the optional packages of a command are there."""
    return all(find_spec(package) is not None for package in NEEDS.get(command, ()))


@pytest.mark.slow
def test_examples_work() -> None:
    """Typed one after the other in an empty folder, the examples all succeed."""
    for command in COMMANDS:
        if command not in {*SLOW, *SERVING, *OF_TRAINED} and is_equipped(command):
            for line in examples(command):
                run_example(line)


@pytest.mark.torch
@pytest.mark.parametrize("command", TRAINED)
def test_example_with_a_training_step_works(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a module that returns a training step, its graph or its C is written."""
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "train.py").write_text(TRAINING)
    for part in TRAINED[command]:
        for line in examples(part):
            run_example(line)


@pytest.mark.slow
def test_long_examples_work() -> None:
    """Those that take long succeed, too."""
    for command in filter(is_equipped, SLOW):
        for line in examples(command):
            run_example(line)


@pytest.mark.parametrize(
    ("arguments", "fragments"),
    [
        (["sovle"], ("'sovle'", "poetmodel --help")),
        (["solve", "mlp", "extra"], ("extra", "poetmodel solve --help")),
        (["solve", "--colour"], ("--colour",)),
        (["verify"], ("SCHEDULE",)),
    ],
)
def test_usage_errors_are_one_sentence(arguments: list[str], fragments: tuple[str, ...]) -> None:
    """Wrong usage exits 2 with one line that names what is wrong and where help is."""
    outcome = invoke(*arguments)
    assert (outcome.status, outcome.out) == (2, "")
    assert len(outcome.err.splitlines()) == 1
    assert outcome.err.startswith("error: ")
    for fragment in fragments:
        assert fragment in outcome.err


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (BackendUnavailableError("scip is not installed"), 5),
        (BackendError("the solver broke down"), 1),
        (VerificationError(["R[1,0]: no"]), 1),
        (PermissionError(13, "Permission denied", "secret.json"), 2),
        (KeyboardInterrupt(), 130),
        (typer.Abort(), 130),
    ],
)
def test_failures_have_their_exit_status(
    error: BaseException, status: int, monkeypatch: pytest.MonkeyPatch, told: Told
) -> None:
    """Each kind of failure ends with its status and its message on stderr, without traceback."""

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(inspect, "as_dict", fail)
    outcome = invoke("inspect", "mlp", "--json")
    assert (outcome.status, outcome.out) == (status, "")
    told(outcome.err)


def test_programming_errors_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that nobody raised on purpose comes through, to be reported."""

    def fail(*_: object) -> None:
        msg = "a bug"
        raise ZeroDivisionError(msg)

    monkeypatch.setattr(inspect, "as_dict", fail)
    with pytest.raises(ZeroDivisionError):
        invoke("inspect", "mlp", "--json")


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [("models", "--json"), ("models",), ()])
def test_reader_that_goes_away_is_no_error(arguments: tuple[str, ...]) -> None:
    """When whoever reads stdout leaves, the command ends without a word."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        process = subprocess.run(
            [sys.executable, "-m", "poetmodel", *arguments],
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    finally:
        os.close(writer)
    assert process.stderr == ""
    assert process.returncode in (1, 141)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")  # noqa: PTH110
def test_full_disk_behind_stdout_is_told() -> None:
    """When stdout takes no more, the command says so and fails."""
    with open("/dev/full", "w") as full:  # noqa: PTH123
        process = subprocess.run(
            [sys.executable, "-m", "poetmodel", "models"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    assert process.returncode == 2
    assert process.stderr == "error: No space left on device\n"


@pytest.mark.slow
def test_plain_terminal_gets_plain_output() -> None:
    """In a pipe, or with NO_COLOR, there are no colours; in ASCII, no character breaks."""
    for environment in ({"NO_COLOR": "1", "FORCE_COLOR": ""}, {"PYTHONIOENCODING": "ascii"}):
        for command in ("models", "doctor"):
            process = start(command, **environment)
            assert process.returncode == 0, process.stderr
            assert "\x1b" not in process.stdout
            assert max(map(len, process.stdout.splitlines())) <= 80


@pytest.mark.slow
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_offered(shell: str) -> None:
    """The shell can complete commands and options."""
    process = start(
        _POETMODEL_COMPLETE=f"complete_{shell}",
        COMP_WORDS="poetmodel do",
        COMP_CWORD="1",
        _TYPER_COMPLETE_ARGS="poetmodel do",
        _TYPER_COMPLETE_FISH_ACTION="get-args",
    )
    assert "doctor" in process.stdout
    assert "inspect" not in process.stdout


def test_application_can_be_embedded() -> None:
    """The application is an ordinary typer application with exactly these commands."""
    names = [command.name for command in app.registered_commands]
    assert names == list(COMMANDS)


@pytest.mark.parametrize(
    "raised",
    ["KeyboardInterrupt", "RuntimeError('of __set_name__') from KeyboardInterrupt()"],
    ids=["as it is", "while a class is made"],
)
def test_ctrl_c_while_the_application_loads_is_no_traceback(raised: str) -> None:
    """Interrupted before anything is done, the command ends with status 130 and no word."""
    script = (
        "import sys\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'typer':\n"
        f"            raise {raised}\n"
        "sys.meta_path.insert(0, Interrupt())\n"
        "from poetmodel.cli import main\n"
        "main()"
    )
    process = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert (process.returncode, process.stdout, process.stderr) == (130, "", "")


def test_a_solver_that_is_left_behind_does_not_keep_the_program() -> None:
    """The program ends with the status of its command, not with the solver."""
    code = (
        "import sys, threading, time\n"
        "from poetmodel.backends.worker import run_interruptibly\n"
        "from poetmodel.cli import application\n"
        "from poetmodel.cli.entry import main\n"
        "from poetmodel.errors import TimeLimitError\n"
        "def solve():\n"
        "    time.sleep(20)\n"
        "    print('late', flush=True)\n"
        "def app(**_):\n"
        "    try:\n"
        "        run_interruptibly(solve, threading.Event(), most_s=0.1)\n"
        "    except TimeLimitError:\n"
        "        print('answer', flush=True)\n"
        "    sys.exit(4)\n"
        "application.app = app\n"
        "main()\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (ended.returncode, ended.stdout) == (4, "answer\n")
