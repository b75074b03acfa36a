"""Pages list what a version keeps stable, answer questions, and the README is true."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import typer.main

import poetmodel
import poetmodel.torch
from poetmodel.cli.application import app
from poetmodel.cli.failures import ExitStatus

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "reference" / "promises.md").read_text(encoding="utf-8")
SOURCES = ROOT / "src" / "poetmodel"
FUNCTION = re.compile(
    r"^(?:int|void|uint32_t|pm_real|const void \*) ?(pm_\w+)\([^;{]*\);", re.MULTILINE
)
"""The declaration of a function in a header of exported C."""
FILES = {
    "poetmodel-graph": "graph/io.py",
    "poetmodel-schedule": "schedule/identity.py",
    "poetmodel-plan": "plan/versions.py",
    "poetmodel-step": "lowered/io.py",
    "poetmodel-export": "export/manifest.py",
}
"""The module that states the newest version of each format."""


def listed(heading):
    """Return the names in code of the paragraph that begins with a heading."""
    (paragraph,) = [part for part in PAGE.split("\n\n") if part.startswith(f"**{heading}**")]
    return re.findall(r"`([^`]+)`", paragraph.split("**:", 1)[1])


@pytest.mark.parametrize("module", [poetmodel, poetmodel.torch], ids=lambda module: module.__name__)
def test_names_are_those_of_the_module(module):
    """Each public name of Python is on the page, in the order of ``__all__``."""
    assert listed(f"`{module.__name__}`") == sorted(module.__all__)  # type: ignore[attr-defined]


def test_functions_of_c_are_those_of_the_headers():
    """Each function that exported headers declare is on the page."""
    headers = ("c/generated/include/pm.h", "c/pm_driver.h")
    texts = [(SOURCES / header).read_text(encoding="utf-8") for header in headers]
    declared = {name for text in texts for name in FUNCTION.findall(text)}
    assert len(declared) > 10
    assert {name for name in listed("Exported C") if name.startswith("pm_")} == declared


def test_every_option_on_the_reference_exists():
    """The reference of the command line, which the page refers to, names no option of its own."""
    known = {
        name for command in COMMANDS.values() for option in command.params for name in option.opts
    }
    known |= {"--help", "--version", "--install-completion"}
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", CLI)) <= known


def test_formats_are_those_that_are_written():
    """Each format of a file is on the page, up to the newest version that is written."""
    rows = dict(re.findall(r"^\| `(poetmodel-[\w-]+)` \| ([\d, ]+) \|$", PAGE, re.MULTILINE))
    assert set(rows) == set(FILES)
    for name, file in FILES.items():
        text = (SOURCES / file).read_text(encoding="utf-8")
        stated = re.findall(r'^VERSION\w*: Final = (.+)$|"version": (\d+)', text, re.MULTILINE)
        versions = {int(digit) for pair in stated for digit in re.findall(r"\d+", "".join(pair))}
        assert max(int(version) for version in rows[name].split(",")) == max(versions), name


# -- the reference of the command line -------------------------------------------------------------
CLI = (ROOT / "docs" / "reference" / "cli.md").read_text(encoding="utf-8")
COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]
STAGED = {ExitStatus.FAILURE, ExitStatus.INTERRUPTED, ExitStatus.CLOSED_PIPE}
"""ExitStatuses that speak of the program or the shell, not of the result."""


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_option_is_on_the_page(command):
    """Each command has a row; each option is named, in its own spelling."""
    assert f"`poetmodel {command}" in CLI
    names = [
        name
        for option in COMMANDS[command].params
        for name in option.opts
        if name.startswith("--") and name != "--help"
    ]
    assert names
    assert [name for name in names if not re.search(rf"{name}(?![\w-])", CLI)] == []


@pytest.mark.parametrize("status", sorted(set(ExitStatus) - STAGED))
def test_exit_status_is_on_the_page(status):
    """Each exit status has a row."""
    assert f"\n| {status.value} |" in CLI


# -- questions -----------------------------------------------------------------------------------
QUESTIONS = """
How do I leave RAM for the rest of my firmware?
  start-embedded.md: Leave 128 KiB for the rest of your firmware
Does the budget of an export include stack, inputs and runtime?
  guides/export.md: for 64 KiB of RAM: state, tensors, inputs, stack and runtime together
What remains after a power cut in the middle of a step?
  guides/export.md: after a power cut at any moment one is complete
What does `--commit` cost?
  concepts/stages.md: they count in the baseline, the time, the energy, the bytes written and the
  wear
How long does my flash last?
  reference/formats.md: the number of training steps until the storage is worn
Can I train with int8 weights?
  guides/quantized.md: With `train`, int8 weights are trained too
My watchdog fires during a step. What now?
  guides/build-systems.md: run it in several calls with `vTaskDelay(1)` between
How do I put the arena into PSRAM?
  guides/build-systems.md: For an arena in PSRAM define `GESTURE_ARENA_EXTERN`
How do I train the last layers alone?
  guides/export.md: Frozen parameters (`requires_grad=False`) become constants in flash
Were the energies measured on boards?
  concepts/deviations.md: No board was measured for this project

What happens to a smaller last batch?
  guides/pytorch.md: the same bytes apply to all later shapes, such as a smaller last batch
Is the budget kept outside of the step, in evaluation or `optimizer.step()`?
  guides/pytorch.md: Eager PyTorch outside of the step has no budget
Do recomputing and paging change my results?
  guides/pytorch.md: Recomputing and paging change no bit
Does it run on a GPU?
  guides/pytorch.md: no plan was run on a graphics card
Can I train on several processes or machines?
  guides/pytorch.md: `DistributedDataParallel` and FSDP are refused
Where do I put autocast?
  guides/pytorch-limits.md: Autocast belongs inside the model or the loss
Does a recomputed dropout draw the same mask?
  guides/pytorch.md: dropout keeps its mask
How do I go on after the process was killed?
  guides/pytorch.md: One complete state exists at every moment, and the next process loads it
My model branches on an activation. Is it captured?
  guides/pytorch-limits.md: values of **parameters, activations, random numbers** | refused, with
  the line
How do I save the minutes of the first compile?
  guides/pytorch.md: stores tensors, workspaces, costs and schedules

How do I add a linear constraint on the bytes written?
  guides/constraints.md: problem.subject_to(wear=lambda v: v.bytes_written <= 100_000)
What is the gap relative to?
  concepts/stages.md: So the gap is relative to the overhead
Why should I believe that a schedule is optimal?
  concepts/stages.md: the bound holds for any choice of rows
How do I run my own method under the same simulator?
  guides/compare.md: A method is a function from a [`Problem`]
How do I compare methods fairly?
  guides/compare.md: Compare at the same *simulated peak RAM*, not at the same budget
Can I hand the program to another solver?
  guides/elsewhere.md: You can write it as an LP or MPS file
Can I run the same solve twice and get the same schedule?
  concepts/deviations.md: on one thread that ends with a proof is reproducible
Will a later version read my schedules?
  reference/promises.md: every later release reads these versions
How do I run a sweep under Slurm, and resume it?
  guides/compare.md: the same command resumes the sweep
How do I cite the version that I used?
  guides/elsewhere.md: names the version, the authors and the licence
"""
"""A part for embedded programmers, for PyTorch and for research: page and phrase of each answer."""
PARTS = [
    re.findall(r"^(\S.*)\n  ([\w/-]+\.md): (.*(?:\n  .*)*)", part, re.MULTILINE)
    for part in QUESTIONS.split("\n\n")
]


def plain(text):
    """Return a text with single spaces, as it reads."""
    return re.sub(r"\s+", " ", text)


@pytest.mark.parametrize(
    ("page", "words"),
    [pytest.param(page, words, id=asked) for part in PARTS for asked, page, words in part],
)
def test_question_has_its_answer(page, words):
    """The page that the navigation offers for a question has the words that answer it."""
    assert f" {page}\n" in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert plain(words) in plain((ROOT / "docs" / page).read_text(encoding="utf-8"))


def test_each_kind_of_reader_asks_ten_questions():
    """No question is repeated, and none is dropped."""
    assert [len(part) for part in PARTS] == [10, 10, 10]
    assert len({asked for part in PARTS for asked, _, _ in part}) == 30


# -- the README ----------------------------------------------------------------------------------
README = (ROOT / "README.md").read_text(encoding="utf-8")
LONGEST = 12
"""Lines that the library example may have."""


def code_block(language, words):
    """Return the only code block of a language that has some words in it."""
    blocks = re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)
    (block,) = (block for block in blocks if words in block)
    return block


def test_library_example_runs_and_its_constraint_is_kept(capsys, tmp_path, monkeypatch):
    """The example proves an optimum under its own constraint, which costs more than without."""
    import poetmodel as pm

    monkeypatch.chdir(tmp_path)
    example = code_block("python", "import poetmodel as pm")
    lines = [line for line in example.splitlines() if line.strip()]
    assert len(lines) <= LONGEST
    names = {}
    exec(compile(example, "README.md", "exec"), names)  # noqa: S102 - our own page
    said = capsys.readouterr().out
    assert said.startswith("optimal: energy ")
    assert "is recomputed in stage" in said
    result = names["result"]
    assert isinstance(result, pm.SolveResult)
    assert result.simulation.written_bytes <= 100_000
    free = pm.solve(replace(result.problem, constraints=()))
    assert free.simulation.written_bytes > 100_000
    assert result.overhead_j > free.overhead_j


@pytest.mark.torch
def test_pytorch_example_trains_with_bits_of_eager(capsys):
    """The loop of the page trains a model; its parameters are those of the loop without it."""
    torch = pytest.importorskip("torch")

    def trained(source):
        torch.manual_seed(0)
        layers = [layer for _ in range(4) for layer in (torch.nn.Linear(32, 32), torch.nn.ReLU())]
        model = torch.nn.Sequential(*layers)
        names = {
            "torch": torch,
            "loss_of_batch": lambda batch: model(batch).square().mean(),
            "loader": [torch.randn(512, 32) for _ in range(3)],
            "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        }
        exec(compile(source, "README.md", "exec"), names)  # noqa: S102 - our own page
        return [parameter.detach().clone() for parameter in model.parameters()]

    example = code_block("python", "pmt.backend")
    eager = re.sub(r"torch\.compile\((\w+),.*\)", r"\1", example)
    assert eager != example
    assert all(torch.equal(a, b) for a, b in zip(trained(example), trained(eager), strict=True))
    assert capsys.readouterr().out == ""


def test_first_command_is_understood():
    """The README's first command names a model, a device and options that exist."""
    from poetmodel.cli.inputs import read_costs
    from poetmodel.cli.options import CostOptions
    from poetmodel.graph.catalogue import read_model_or_file
    from poetmodel.problem import Problem

    command = re.search(
        r"poetmodel solve (\S+) --device (\S+) --ram (\S+)", code_block("sh", "solve mobilenetv2")
    )
    graph = read_model_or_file(command[1])
    costs = read_costs(graph, CostOptions(device=command[2]))
    problem = Problem(graph, costs, ram=command[3])
    assert problem.ram_budget_bytes > 0


@pytest.mark.slow
def test_first_command_proves_what_the_page_says(tmp_path):
    """The README's first command proves an optimum, with the figures of the page."""
    from poetmodel.graph import checkpoint_all_peak_bytes
    from poetmodel.graph.catalogue import load_model

    command = re.search(r"poetmodel (solve .*)", code_block("sh", "solve mobilenetv2"))
    arguments = [*command[1].split(), "--json", "--out", str(tmp_path / "made.schedule.json")]
    done = subprocess.run(
        [sys.executable, "-m", "poetmodel", *arguments], capture_output=True, text=True, check=True
    )
    printed = json.loads(done.stdout)
    assert json.loads((tmp_path / "made.schedule.json").read_text()) == printed
    assert printed["status"] == "optimal"
    assert printed["gap"] <= 1e-4
    assert printed["violations"] == []
    assert printed["peak_ram_bytes"] <= printed["problem"]["ram_budget_bytes"]
    assert printed["baseline_energy_j"] < printed["bound_j"] <= printed["energy_j"]
    graph = load_model(printed["graph"]["name"])
    said = re.search(
        r"take\s+([\d.]+) MiB instead of the ([\d.]+) MiB .* for an estimated ([\d.]+) % more",
        README,
    )
    # Schedules of equal energy have other peaks, and which of them is found depends on the solver.
    assert float(said[1]) == pytest.approx(printed["peak_ram_bytes"] / 2**20, abs=0.2)
    assert float(said[2]) == round(checkpoint_all_peak_bytes(graph) / 2**20, 1)
    overhead = 100 * printed["overhead_j"] / printed["baseline_energy_j"]
    assert float(said[3]) == pytest.approx(overhead, abs=0.015)


@pytest.mark.parametrize("words", ["poetmodel solve mobilenetv2", "tox p"])
def test_commands_are_one_line_each(words):
    """Each of the two commands is enough by itself: one line that begins with its environment."""
    (line,) = code_block("sh", words).strip().splitlines()
    assert line.startswith("python3 -m venv .venv")


def test_ci_calls_the_readme_command():
    """The commands for a clean clone are literally those of the README."""
    command = code_block("sh", "tox p").strip()
    assert command in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


@pytest.mark.slow
def test_whole_training_step_takes_what_the_page_says():
    """The command with state proves its gap within the budget, with the figures of the page."""
    from poetmodel.graph import checkpoint_all_peak_bytes
    from poetmodel.graph.zoo import resnet8

    command = re.search(r"poetmodel (solve resnet8 .*)", code_block("sh", "solve resnet8"))
    done = subprocess.run(
        [sys.executable, "-m", "poetmodel", *command[1].split(), "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    printed = json.loads(done.stdout)
    assert printed["status"] == "optimal"
    said = re.search(r"in (\d+) KiB .* for ([\d.]+) % more .* takes (\d+) KiB", README)
    assert printed["peak_ram_bytes"] <= int(said[1]) * 2**10 < printed["device_ram"]["ram_bytes"]
    graph = resnet8(state="sgd", in_place=True, tile="32KiB")
    assert int(said[3]) == round(checkpoint_all_peak_bytes(graph) / 2**10)
    assert float(said[2]) == round(100 * printed["overhead_j"] / printed["baseline_energy_j"], 1)
