"""Catalogues of user-facing messages: one text file beside the tests of a subject.

An entry is the name of a test and, indented below it, the message, for each case if the test
has parameters. A test fails if its message differs, and shows the difference;
``pytest --update-messages`` writes the entries that differ. Entries of tests that are gone fail in
``tests/test_kit.py``.
"""

import difflib
import re
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

_INDENT = "    "
_IS = " => "
"""Separator of the case of a test and its message, if the message is one line."""


def read(path):
    """Return the entries of a catalogue; empty if there is no file."""
    entries = {}
    test = ""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        if line.startswith(_INDENT) or not line:
            lines.append(line.removeprefix(_INDENT))
        elif line.startswith("  "):
            case, is_one_line, text = line[2:].partition(_IS)
            entries[test + case] = lines = [text] if is_one_line else []
        else:
            test, lines = line, entries.setdefault(line, [])
    texts = {name: "\n".join(lines).rstrip("\n") for name, lines in entries.items()}
    # Tests with cases seldom have other messages.
    return {name: text for name, text in texts.items() if text or not name.isidentifier()}


def write(path, entries):
    """Write a catalogue, sorted by tests and cases; create its folder if that is missing."""
    path.parent.mkdir(exist_ok=True)
    lines = []
    tests = {name: re.match(r"\w*", name)[0] for name in entries}
    for name, text in sorted(entries.items(), key=lambda entry: (tests[entry[0]], entry[0])):
        case = name.removeprefix(tests[name])
        if tests[name] not in lines:
            lines += [""] * bool(lines) + [tests[name]]
        if case and text and "\n" not in text and _IS not in case:
            lines.append(f"  {case}{_IS}{text}")
            continue
        lines += [f"  {case}"] * bool(case)
        lines += (f"{_INDENT}{line}" if line else "" for line in text.split("\n"))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


@dataclass(frozen=True, slots=True)
class MessageCatalogue:
    """Compares the messages of a test with its entry."""

    path: Path
    """File of the catalogue."""
    name: str
    """Name of the test."""
    folder: Path
    """Folder whose subfolders are replaced by ``<tmp>``."""
    update: bool
    """Whether entries that differ are written; otherwise their tests fail."""

    @contextmanager
    def raises(self, kind, about=""):
        """Context manager: fail if no exception of `kind` is raised, or its message differs."""
        with pytest.raises(kind) as caught:
            yield
        self(str(caught.value), about)

    def __call__(self, text, about=""):
        """Compare `text` with the entry; `about` names the comparison within the test.

        If they differ, fails, or writes the entry if `update`.
        """
        name = f"{self.name}: {about}" if about else self.name
        text = re.sub(rf"{re.escape(str(self.folder))}/[\w-]+", "<tmp>", text.rstrip("\n"))
        entries = read(self.path)
        stored = entries.get(name)
        if stored == text:
            return
        if not self.update:
            lines = difflib.ndiff((stored or "").split("\n"), text.split("\n"))
            head = f"{self.path}: {name}: pytest --update-messages writes the new text"
            pytest.fail("\n".join((head, *lines)), pytrace=False)
        write(self.path, entries | {name: text})
