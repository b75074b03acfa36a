"""Execution of the code blocks of a page: in order, in one folder, with one namespace.

A comment directly before a block marks it:

- ``<!-- not run: REASON -->``: it is not executed;
- ``<!-- needs: NAME, ... -->``: it is executed if all names are importable modules or programs;
- ``<!-- exits with N -->``: its last command ends with this status, not with 0;
- ``<!-- prints -->``: it lists lines that the previous block prints.

A block with ``title="FILE"`` is written to that file, and not executed.
"""

import io
import re
import shlex
import shutil
import subprocess
import textwrap
from contextlib import redirect_stdout
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from kit.commands import invoke

_BLOCK = re.compile(
    r"(?:^ *<!-- (?P<mark>[^>]+) -->\n\s*)?"
    r'^(?P<indent> *)```(?P<language>\w*)(?: title="(?P<title>[^"]+)")?\n'
    r"(?P<code>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)
_EXIT = re.compile(r"exits with (\d)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A code block of a page."""

    language: str
    """Language after the fence."""
    code: str
    """Text of the block, without its indentation."""
    title: str
    """Name of the file with this content, or empty."""
    mark: str
    """The comment directly before the block, or empty."""
    line: int
    """Line number of its fence in the page, from 1."""

    @property
    def is_run(self):
        """Whether the block is Python or shell to execute."""
        code = self.language in {"python", "sh"} and not self.title
        return code and not self.mark.startswith("not run:")

    @property
    def needs(self):
        """Packages and programs without which the block is skipped."""
        if not self.mark.startswith("needs:"):
            return ()
        return tuple(self.mark.removeprefix("needs:").replace(",", " ").split())

    @property
    def status(self):
        """Expected exit status of its last command."""
        found = _EXIT.fullmatch(self.mark)
        return int(found[1]) if found else 0


def parse_blocks(text):
    """Return the code blocks of a page, in the order of the page."""
    return [
        Block(
            language=found["language"],
            code=textwrap.dedent(found["code"]),
            title=found["title"] or "",
            mark=found["mark"] or "",
            line=text.count("\n", 0, found.start("indent")) + 1,
        )
        for found in _BLOCK.finditer(text)
    ]


def run_page(blocks, folder):
    """Execute the blocks of a page in the current folder; return missing packages and programs.

    Writes blocks with a title to `folder`. Skips blocks that need missing packages or programs.
    Raises `AssertionError` if a status or an output differs from the page.
    """
    names = {"__name__": "__main__"}
    missing = set()
    printed = ""
    """Output of the last executed block; None if the block after it was skipped."""
    for block in blocks:
        missing_names = {name for name in block.needs if not _is_available(name)}
        missing |= missing_names
        if missing_names:
            printed = None
            continue
        if block.title:
            path = folder / block.title
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.code, encoding="utf-8")
        elif block.mark == "prints":
            if printed is None:
                continue
            unprinted = [
                line for line in block.code.splitlines() if _join_words(line) not in printed
            ]
            assert not unprinted, f"line {block.line}: not printed: {unprinted}; but: {printed}"
        elif block.is_run and block.language == "python":
            printed = _join_words(_run_python(block, names))
        elif block.is_run:
            printed = _join_words(_run_commands(block))
    return missing


def _run_python(block, names):
    stream = io.StringIO()
    with redirect_stdout(stream):
        exec(compile(block.code, f"line {block.line}", "exec"), names)  # noqa: S102 - our own page
    return stream.getvalue()


def _run_commands(block):
    printed = ""
    lines = [line for line in block.code.replace("\\\n", " ").splitlines() if line.strip()]
    for line in lines:
        program, *arguments = shlex.split(line, comments=True)
        if program in {"make", "cmake", "cc"} or program.startswith(("build/", "./")):
            printed += _run_program(line, program, arguments)
            continue
        assert program == "poetmodel", f"line {block.line}: {line}: mark why it is not run"
        outcome = invoke(*arguments)
        expected_status = block.status if line == lines[-1] else 0
        assert outcome.status == expected_status, f"line {block.line}: {line}: {outcome.err}"
        printed += f"{outcome.out}\n{outcome.err}\n"
    return printed


def _run_program(line, program, arguments):
    words = [w for x in arguments for w in (sorted(Path().glob(x)) if "*" in x else [x])]
    done = subprocess.run(
        [program, *words], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{line}: {done.stderr}"
    return f"{done.stdout}\n{done.stderr}\n"


def _is_available(name):
    return shutil.which(name) is not None or (name.isidentifier() and find_spec(name) is not None)


def _join_words(text):
    """Return a text with single spaces, so that widths of table columns do not matter."""
    return " ".join(text.split())
