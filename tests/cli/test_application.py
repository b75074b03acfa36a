"""The application: first steps, help, exit statuses, and streams that go away."""

import json
import os
import re
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec

import pytest
import typer

import poetmodel
from kit.commands import invoke, invoke_refused
from poetmodel.cli import inspect
from poetmodel.cli.application import app
from poetmodel.errors import BackendError, BackendUnavailableError, VerificationError

COMMANDS = (
    "solve", "limits", "choose", "plan", "trace", "profile", "export", "state", "sweep", "merge",
    "report", "explore", "bench", "inspect", "verify", "explain", "diff", "models", "devices",
)  # fmt: skip
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


def start(*arguments, cwd=None, **environment):
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


def python(code):
    """Run Python code in a process of its own."""
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_no_arguments_show_what_to_type_next():
    """Without arguments, the output recommends a command with a shipped model and device."""
    assert [command.name for command in app.registered_commands] == list(COMMANDS)
    outcome = invoke(status=0)
    assert "poetmodel solve mobilenetv2 --device rpi4b --ram 40%" in outcome.out
    assert outcome.err == ""


def test_version_is_the_packages():
    """--version prints the version first, then every solver with its licence, then others."""
    outcome = invoke("--version")
    first, *solvers = outcome.out.splitlines()
    others = [line.split()[0] for line in solvers[3:]]
    solvers = solvers[:3]
    assert (outcome.status, first) == (0, f"poetmodel {poetmodel.__version__}")
    assert [line.split()[0] for line in solvers] == ["highspy", "pyscipopt", "gurobipy"]
    assert solvers[0] == f"highspy {version('highspy')} (licence: MIT)"
    assert others == ["torch", "onnx", "keras"]


COMPLETED = {
    "solve --device nr": ["nrf52840"],
    "solve mlp --device nr": ["nrf52840"],
    "solve mobilenetv2": ["mobilenetv2", "mobilenetv2-035"],
    "inspect --graph file --device mk": ["mkr1000"],
    "export train:step --device imxrt1062-p": ["imxrt1062-psram"],
    "trace train:step --device rpi": ["rpi4b"],
    "sweep mlp resnet5": ["resnet50"],
    "sweep mlp --devices mkr1000,nr": ["mkr1000,nrf52840"],
    "sweep mlp --methods optimal,chen": ["optimal,chen-sqrt", "optimal,chen-greedy"],
    "sweep mlp --devices mkr1000,mk": [],
    "export train:step --optimizer ada": ["adam", "adamw", "adagrad", "adamax"],
    "devices mk": ["mkr1000"],
    "models resnet5": ["resnet50"],
    "solve mlp --device own.toml": [],
}
COMPLETE = """\
import contextlib, io, json, os, sys
from poetmodel.cli.application import app

found = {}
for words in json.loads(sys.argv[1]):
    line = f"poetmodel {words}"
    os.environ |= {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split()) - 1)}
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
        app(prog_name="poetmodel")
    found[words] = out.getvalue().split()
loaded = {"highspy", "pyscipopt", "gurobipy", "pyomo", "torch"} & set(sys.modules)
print(json.dumps([found, sorted(loaded)]))
"""


def test_names_are_completed():
    """Built-in networks, devices, methods and optimizers, without a solver or PyTorch."""
    done = subprocess.run(
        [sys.executable, "-c", COMPLETE, json.dumps([*COMPLETED])],
        env=os.environ | {"_POETMODEL_COMPLETE": "complete_bash"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout) == [COMPLETED, []]
    assert done.stderr == ""


def test_module_runs_as_the_command_does():
    """``python -m poetmodel`` is the command, under its own name."""
    process = start("solve")
    assert process.returncode == 2
    assert process.stdout == ""
    assert process.stderr.startswith("error: missing graph")


HEAVY = "{'pyomo', 'highspy', 'networkx', 'pydantic', 'numpy', 'scipy', 'rich.table'}"


@pytest.mark.parametrize(
    ("script", "heavy"),
    [
        ("import poetmodel.cli.application", HEAVY),
        (
            "from poetmodel.cli import main\nsys.argv = ['poetmodel', '--help']\n"
            "try:\n    main()\nexcept SystemExit:\n    pass",
            HEAVY.replace("rich.table", "torch', 'plotly', 'matplotlib', 'pandas', 'dask"),
        ),
    ],
    ids=["import", "help"],
)
def test_no_heavy_library_is_loaded_early(script, heavy):
    """Importing the commands draws in no table and no large library, and --help no large one."""
    code = f"import sys\n{script}\nprint(sorted({heavy} & set(sys.modules)), file=sys.stderr)"
    process = python(code)
    assert (process.returncode, process.stderr) == (0, "[]\n")
    assert not process.stdout or all(command in process.stdout for command in COMMANDS)


def examples(command):
    """Return the command lines of examples in the help of a command."""
    return re.findall(r"Example: poetmodel (.*\S)", invoke(command, "--help").out)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_gives_an_example_of_its_command(command):
    """Help ends with one example on one line; all commands have ``--quiet`` with the same text."""
    outcome = invoke(command, "--help", status=0)
    assert [line.split()[0] for line in examples(command)] == [command]
    assert ("--json" in outcome.out) == (command not in SERVING)
    text = " ".join(outcome.out.split())
    assert "--quiet" in text
    assert "Print only errors" in text
    assert "bool" not in text.lower()  # nothing stands behind an option that takes no value


def run_example(line):
    """Execute an example, which must succeed and print some output."""
    outcome = invoke(*line.split())
    assert outcome.status == 0, (line, outcome.err)
    assert outcome.out


@pytest.mark.slow
def test_examples_work():
    """Typed one after the other in an empty folder, the examples all succeed."""
    for command in COMMANDS:
        if not all(map(find_spec, NEEDS.get(command, ()))):
            continue
        for line in () if command in {*SERVING, *OF_TRAINED} else examples(command):
            run_example(line + " --time-limit 1" * (command in SLOW))


@pytest.mark.torch
@pytest.mark.parametrize("command", TRAINED)
def test_example_with_a_training_step_works(command, tmp_path, monkeypatch):
    """With a module that returns a training step, its graph or its C is written."""
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "train", raising=False)
    (tmp_path / "train.py").write_text(TRAINING)
    for part in TRAINED[command]:
        for line in examples(part):
            run_example(line)


@pytest.mark.parametrize(
    ("arguments", "fragments"),
    [
        (["sovle"], ("'sovle'", "poetmodel --help")),
        (["solve", "mlp", "extra"], ("extra", "poetmodel solve --help")),
        (["solve", "--colour"], ("--colour",)),
        (["solve", "mlp", "--ram"], ("--ram",)),
        (["verify"], ("SCHEDULE",)),
    ],
)
def test_usage_errors_are_one_sentence(arguments, fragments):
    """Wrong usage exits with 2, and one line names the fault and the way to the help."""
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
def test_failures_have_their_exit_status(error, status, monkeypatch, told):
    """Each kind of failure ends with its status and its message on stderr, without traceback."""

    def fail(*_):
        raise error

    monkeypatch.setattr(inspect, "graph_values", fail)
    told(invoke_refused("inspect", "mlp", "--json", status=status))


def test_programming_errors_are_not_hidden(monkeypatch):
    """Unexpected exceptions are not caught."""

    def fail(*_):
        msg = "a bug"
        raise ZeroDivisionError(msg)

    monkeypatch.setattr(inspect, "graph_values", fail)
    with pytest.raises(ZeroDivisionError):
        invoke("inspect", "mlp", "--json")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")  # noqa: PTH110
def test_full_disk_behind_stdout_is_told():
    """A full disk behind stdout is reported, and the command fails."""
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
def test_plain_terminal_gets_plain_output():
    """In a pipe, or with NO_COLOR, there are no colours; in ASCII, no character breaks."""
    for environment in ({"NO_COLOR": "1", "FORCE_COLOR": ""}, {"PYTHONIOENCODING": "ascii"}):
        for command in ("models", "devices"):
            process = start(command, **environment)
            assert process.returncode == 0, process.stderr
            assert "\x1b" not in process.stdout
            assert max(map(len, process.stdout.splitlines())) <= 80


@pytest.mark.slow
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_offered(shell):
    """The shell can complete commands and options."""
    process = start(
        _POETMODEL_COMPLETE=f"complete_{shell}",
        COMP_WORDS="poetmodel exp",
        COMP_CWORD="1",
        _TYPER_COMPLETE_ARGS="poetmodel exp",
        _TYPER_COMPLETE_FISH_ACTION="get-args",
    )
    assert "explain" in process.stdout
    assert "inspect" not in process.stdout


@pytest.mark.parametrize(
    "raised",
    ["KeyboardInterrupt", "RuntimeError('of __set_name__') from KeyboardInterrupt()"],
    ids=["as it is", "while a class is made"],
)
def test_ctrl_c_while_the_application_loads_is_no_traceback(raised):
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
    process = python(script)
    assert (process.returncode, process.stdout, process.stderr) == (130, "", "")


def test_a_solver_that_is_left_behind_does_not_keep_the_program():
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
        "        run_interruptibly(solve, threading.Event(), max_s=0.1)\n"
        "    except TimeLimitError:\n"
        "        print('answer', flush=True)\n"
        "    sys.exit(4)\n"
        "application.app = app\n"
        "main()\n"
    )
    ended = python(code)
    assert (ended.returncode, ended.stdout) == (4, "answer\n")
