"""The code blocks of the pages and the tutorial run, and print the stated output."""

import json
import re
import subprocess
import sys
from base64 import b64decode
from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest

from kit.commands import invoke
from kit.page_examples import parse_blocks, run_page
from make_tutorial import ROOT, TUTORIAL, describe_differences

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
TEXTS = {page.relative_to(DOCS).as_posix(): page.read_text(encoding="utf-8") for page in PAGES}
RUNNING = [
    name for name, text in TEXTS.items() if any(block.is_run for block in parse_blocks(text))
]
SLOW = {"guides/compare.md"}
"""Pages that start processes of their own, again and again."""
COMMAND = re.compile(r"^\s*(?:\$ )?poetmodel [^\[]+$", re.MULTILINE)
"""A line that calls the program; one with brackets only shows what can be given."""
MARK = re.compile(r"not run: \w.{8,}|needs: \w[-\w, ]*|exits with [1-6]|prints")


def marks(name):
    """Return the marks of the test of a page: whether it is slow or needs PyTorch."""
    needed = {package for block in parse_blocks(TEXTS[name]) for package in block.needs}
    found = [pytest.mark.slow] if name in SLOW else []
    if needed & {"onnxscript", "keras"}:  # what libraries say of each other
        found += [pytest.mark.filterwarnings("ignore::FutureWarning")]
        found += [pytest.mark.filterwarnings("ignore::DeprecationWarning")]
    return [*found, pytest.mark.torch] if "torch" in needed else found


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(name, marks=marks(name)) for name in RUNNING])
def test_blocks_run(name, tmp_path, monkeypatch):
    """Each runnable block runs after those before it, and prints the stated output."""
    monkeypatch.chdir(tmp_path)
    missing = run_page(parse_blocks(TEXTS[name]), tmp_path)
    if missing:
        pytest.skip(f"all ran but the blocks that need {', '.join(sorted(missing))}")


@pytest.mark.parametrize("name", TEXTS)
def test_marks_are_known(name):
    """The marks before blocks are valid, and a block that does not run has a reason.

    A command line for readers is in a shell block, not in one of plain text.
    """
    text = TEXTS[name]
    assert len(parse_blocks(text)) == len(re.findall(r"^ *```", text, re.MULTILINE)) / 2
    for block in parse_blocks(text):
        if block.mark and not block.mark.startswith(("begin ", "end ")):
            assert MARK.fullmatch(block.mark), f"{name}, line {block.line}: {block.mark}"
    for block in parse_blocks(TEXTS[name]):
        if block.language not in {"sh", "python"}:
            assert not COMMAND.findall(block.code), f"{name}, line {block.line}"


def test_pages_for_users_have_blocks_that_run():
    """The first page and every guide is tried out, not only read."""
    guides = (name for name in TEXTS if name.startswith(("start-", "guides/")))
    promised = {"index.md", *guides}
    assert promised <= set(RUNNING)


def page(*lines):
    """Return a page of these lines."""
    return "\n".join(lines) + "\n"


FAILING = {
    "an error": page("```python", "1 / 0", "```"),
    "another status": page("```sh", "poetmodel models nothing", "```"),
    "no error where one is told": page("<!-- exits with 3 -->", "```sh", "poetmodel models", "```"),
    "another program": page("```sh", "true", "```"),
    "another output": page(
        "```python", "print(1)", "```", "", "<!-- prints -->", "```text", "2", "```"
    ),
}


@pytest.mark.parametrize("case", FAILING)
def test_a_page_that_is_wrong_fails(case, tmp_path):
    """No block is passed over in silence."""
    (block, *_) = blocks = parse_blocks(FAILING[case])
    assert block.is_run
    with pytest.raises((AssertionError, ZeroDivisionError)):
        run_page(blocks, tmp_path)


def test_blocks_share_names_files_and_what_is_printed(tmp_path, monkeypatch):
    """A block finds the names and files of those before it; titles and reasons are not run."""
    monkeypatch.chdir(tmp_path)
    text = page(
        '```toml title="a.toml"',
        "x = 1",
        "```",
        "<!-- not run: it would take too long -->",
        "```sh",
        "rm everything",
        "```",
        "```python",
        "from pathlib import Path",
        "text = Path('a.toml').read_text()",
        "```",
        "```python",
        "print(text)",
        "```",
        "<!-- prints -->",
        "```text",
        "x   =  1",
        "```",
        "<!-- exits with 2 -->",
        "```sh",
        "poetmodel models  # all of them",
        "poetmodel models \\",
        "    nothing",
        "```",
    )
    blocks = parse_blocks(text)
    assert [block.line for block in blocks] == [1, 5, 8, 12, 16, 20]
    assert run_page(blocks, tmp_path) == set()


def test_blocks_that_need_a_missing_package_are_told(tmp_path):
    """Such a block is omitted, the others run, and the caller is informed."""
    blocks = parse_blocks(
        page("<!-- needs: nowhere_to_be_found -->", "```python", "1 / 0", "```")
        + page("```python", "open('ran.txt', 'w').close()", "```").replace("ran", f"{tmp_path}/ran")
    )
    assert run_page(blocks, tmp_path) == {"nowhere_to_be_found"}
    assert (tmp_path / "ran.txt").exists()


# -- the tutorial --------------------------------------------------------------------------------
STORED = json.loads(TUTORIAL.read_text(encoding="utf-8"))
CODE = [cell for cell in STORED["cells"] if cell["cell_type"] == "code"]


@pytest.mark.slow
def test_it_runs_and_its_outputs_are_current():
    """All cells succeed, and print the outputs in the file."""
    for package in ("IPython", "nbformat", "matplotlib"):
        pytest.importorskip(package)
    command = [sys.executable, str(ROOT / "scripts" / "make_tutorial.py"), "--check"]
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout


def test_its_claims_are_asserted_and_its_outputs_are_stored():
    """Every part has an assertion; cells were run in order; there is a picture, and no error."""
    source = "".join("".join(cell["source"]) for cell in CODE)
    assert source.count("assert ") > 10
    assert [cell["execution_count"] for cell in CODE] == list(range(1, len(CODE) + 1))
    outputs = [output for cell in CODE for output in cell["outputs"]]
    assert any("image/svg+xml" in output.get("data", {}) for output in outputs)
    assert {output["output_type"] for output in outputs} <= {"stream", "execute_result"}
    assert {output.get("name", "stdout") for output in outputs} == {"stdout"}


def test_what_differs_is_told():
    """Another text, and a picture that is missing; not the numbers within a picture."""
    other = deepcopy(STORED)
    printed, pictured = (
        next(cell for cell in other["cells"] if key in str(cell.get("outputs")))
        for key in ("'text'", "image/svg+xml")
    )
    printed["outputs"][0]["text"] = ["something else\n"]
    pictured["outputs"][0]["data"]["image/svg+xml"] = ["<svg/>"]
    (found,) = describe_differences(STORED, other)
    assert "something else" in found
    pictured["outputs"] = []
    assert len(describe_differences(STORED, other)) == 2


@pytest.mark.torch
def test_its_step_is_what_pytorch_gives(tmp_path):
    """The file of the step that it exports is captured from the network that the script has.

    All but the releases of PyTorch and poetmodel that did it, which files name, and the last bits
    of the initial weights, which depend on the instructions that a processor has.
    """
    pytest.importorskip("torch")
    out = tmp_path / "digits.step.json"
    done = invoke(
        *("export", f"{ROOT / 'scripts' / 'make_tutorial.py'}:digits", "--optimizer", "sgd"),
        *("--target", "step", "--name", "digits", "--out", out),
    )
    assert done.status == 0, done.err
    made, stored = (
        json.loads(file.read_text(encoding="utf-8"))
        for file in (out, TUTORIAL.parent / "digits.step.json")
    )
    assert set(made.pop("versions")) == set(stored.pop("versions")) == {"torch"}
    for step in (made, stored):
        step.pop("written_by", None)
    weights = [step.pop("values") for step in (made, stored)]
    assert made == stored
    assert weights[0].keys() == weights[1].keys()
    for name, text in weights[0].items():
        values, kept = (np.frombuffer(b64decode(t), "<f4") for t in (text, weights[1][name]))
        np.testing.assert_allclose(values, kept, rtol=0, atol=1e-7)
