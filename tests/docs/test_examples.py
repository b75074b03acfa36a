"""The code blocks of the pages run, and print what the pages say."""

import re
from pathlib import Path

import pytest

from kit.page_examples import blocks_of, run_page

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
TEXTS = {page.relative_to(DOCS).as_posix(): page.read_text(encoding="utf-8") for page in PAGES}
RUNNING = [name for name, text in TEXTS.items() if any(block.is_run for block in blocks_of(text))]
SLOW = {"guides/compare.md"}
"""Pages that start processes of their own, again and again."""
COMMAND = re.compile(r"^\s*(?:\$ )?poetmodel [^\[]+$", re.MULTILINE)
"""A line that calls the program; one with brackets only shows what can be given."""
MARK = re.compile(r"not run: \w.{8,}|needs: \w[-\w, ]*|exits with [1-6]|prints")


def marks(name):
    """Return the marks of the test of a page: whether it is slow or needs PyTorch."""
    needed = {package for block in blocks_of(TEXTS[name]) for package in block.needs}
    found = [pytest.mark.slow] if name in SLOW else []
    if needed & {"onnxscript", "keras"}:  # what libraries say of each other
        found += [pytest.mark.filterwarnings("ignore::FutureWarning")]
        found += [pytest.mark.filterwarnings("ignore::DeprecationWarning")]
    return [*found, pytest.mark.torch] if "torch" in needed else found


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=marks(name)) for name in RUNNING],
)
def test_blocks_run(name, tmp_path, monkeypatch):
    """Every block that can run does, after those before it, and prints what the page says."""
    monkeypatch.chdir(tmp_path)
    missing = run_page(blocks_of(TEXTS[name]), tmp_path)
    if missing:
        pytest.skip(f"all ran but the blocks that need {', '.join(sorted(missing))}")


@pytest.mark.parametrize("name", TEXTS)
def test_marks_are_known(name):
    """What stands before a block is understood, and a block that is not run says why.

    A command line that a reader would copy is in a shell block, not in one of plain text.
    """
    text = TEXTS[name]
    assert len(blocks_of(text)) == len(re.findall(r"^ *```", text, re.MULTILINE)) / 2
    for block in blocks_of(text):
        if block.mark and not block.mark.startswith(("begin ", "end ")):
            assert MARK.fullmatch(block.mark), f"{name}, line {block.line}: {block.mark}"
    for block in blocks_of(TEXTS[name]):
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
    (block, *_) = blocks = blocks_of(FAILING[case])
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
    blocks = blocks_of(text)
    assert [block.line for block in blocks] == [1, 5, 8, 12, 16, 20]
    assert run_page(blocks, tmp_path) == set()


def test_blocks_that_need_a_missing_package_are_told(tmp_path):
    """Such a block is left out, the others run, and the caller hears of it."""
    blocks = blocks_of(
        page("<!-- needs: nowhere_to_be_found -->", "```python", "1 / 0", "```")
        + page("```python", "open('ran.txt', 'w').close()", "```").replace("ran", f"{tmp_path}/ran")
    )
    assert run_page(blocks, tmp_path) == {"nowhere_to_be_found"}
    assert (tmp_path / "ran.txt").exists()
