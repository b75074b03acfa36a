"""Words of code and pages: no phrase without an object, no private name without a noun."""

import re
from pathlib import Path

import pytest

import sample_functions

ROOT = Path(__file__).resolve().parents[2]
CODE = ("src", "bench", "scripts", "tests/kit")
PHRASES = re.compile(r"\b(so many|so much|nobody|told|as far as it)\b", re.IGNORECASE)
PRIVATE = re.compile(r"^ *(?:async )?def (_\w+)", re.MULTILINE)
NUMBERS = "one two three four five six seven eight nine ten first second third once twice"
PREPOSITIONS = (
    "above after ahead along alone apart as aside at away back before below beside between both by "
    "down for from in into of off on out over per than then to together under until up via with "
    "within without"
)
IRREGULAR = (
    "begun bought broken brought built caught chosen cut done drawn driven found given gone gotten "
    "heard held hidden kept known laid led left lent lost made meant met paid put run said seen "
    "sent set shown spent split taken thought told understood won worn written"
)
NOUNS = {
    *("binding", "building", "embedding", "encoding", "feed", "heading", "listing", "mapping"),
    *("meaning", "need", "padding", "pooling", "rounding", "scaling", "seed", "setting"),
    *("sibling", "spacing", "string", "tiling", "timing", "training", "warning"),
}
"""Nouns that end like participles."""
EMPTY = frozenset(f"{NUMBERS} {PREPOSITIONS} {IRREGULAR}".split())


def has_object(name):
    """Return whether a name has a word that is no participle, number or preposition."""
    words = [word for word in name.split("_") if word]
    return not words or any(
        word in NOUNS or (word not in EMPTY and not word.endswith(("ed", "ing"))) for word in words
    )


def texts():
    """Yield the path of each source file, template and page that we write."""
    for folder in CODE:
        for suffix in (".py", ".c", ".h", ".html", ".js"):
            paths = (ROOT / folder).rglob(f"*{suffix}")
            yield from sorted(path for path in paths if path.name != "sample_functions.py")
    yield from sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("bench/*.md")])


def test_texts_use_no_vague_phrases():
    """No vague phrases: amounts have numbers or names."""
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in texts()
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1)
        if PHRASES.search(line)
    ]
    assert found == []


def test_private_functions_are_named_by_verb_and_object():
    """No private function is named by participles, numbers or prepositions alone."""
    found = [
        f"{path.relative_to(ROOT)}: {name}"
        for folder in CODE
        for path in sorted((ROOT / folder).rglob("*.py"))
        for name in PRIVATE.findall(path.read_text("utf-8"))
        if not has_object(name)
    ]
    assert found == []


@pytest.mark.parametrize(
    ("name", "named"),
    [("_two", False), ("_handed_on", False), ("_of", False), ("_merged", False),
     ("_merge_rows", True), ("_padding", True), ("__init__", True), ("_of_step", True)],
)  # fmt: skip
def test_names_without_a_noun_are_noticed(name, named):
    """Numbers, prepositions and participles are no nouns; similar nouns are."""
    assert has_object(name) == named


def test_docstrings_name_their_objects():
    """Few docstrings of the package use a pronoun for an object that has a name."""
    counts = sample_functions.count_vague_words()
    assert counts.pop("what", 0) <= 60
    assert counts.total() <= 60
