"""The kit: shares of seeds that rotate, and catalogues of messages."""

import re
from pathlib import Path

import pytest

from kit.messages import MessageCatalogue, read
from kit.rotation import (
    KEPT,
    SHARES,
    add_kept_tests,
    parametrize_parts,
    read_kept_tests,
    select_share,
    select_tests,
)

NAMES = [f"a.py::test_{letter}[{number}]" for letter in "abc" for number in range(40)]


def test_each_case_has_its_turn_once():
    """The shares are disjoint, all about as large, and together are all."""
    shares = [select_tests(NAMES, share) for share in range(SHARES)]
    assert sorted(name for share in shares for name in share) == sorted(NAMES)
    assert {len(share) for share in shares} <= set(range(3, 7))
    assert select_tests(NAMES, None) == set(NAMES)


def test_each_instance_is_in_one_part():
    """The first part is quick, the others alternate, and together they have all instances."""
    given = parametrize_parts(3).args[1]
    of = [list(value.values[0].select(range(10))) for value in given]
    assert of == [[0, 3, 6, 9], [1, 4, 7], [2, 5, 8]]
    assert [[mark.name for mark in value.marks] for value in given] == [[], ["seeds"], ["seeds"]]
    assert given[0].values[0].divide(10) == 3


def test_what_failed_once_runs_always(tmp_path):
    """It is added once, and no matter whose turn it is."""
    file = tmp_path / "kept.txt"
    assert add_kept_tests([NAMES[3], NAMES[40]], file) == [NAMES[3], NAMES[40]]
    assert add_kept_tests([NAMES[3]], file) == []
    for share in range(SHARES):
        taken = select_tests(NAMES, share, read_kept_tests(file))
        assert taken == select_tests(NAMES, share) | {NAMES[3], NAMES[40]}


def test_a_share_can_be_asked_for(monkeypatch):
    """By its number, or all of them; else the commit or the day decides."""
    for asked, share in (("3", 3), (f"{SHARES}", 0), ("all", None)):
        monkeypatch.setenv("POETMODEL_SEEDS", asked)
        assert select_share() == share
    monkeypatch.delenv("POETMODEL_SEEDS")
    assert select_share() in range(SHARES)
    monkeypatch.setenv("PATH", "")
    assert select_share() in range(SHARES)


def test_kept_tests_exist():
    """One that was renamed would no longer run."""
    for name in read_kept_tests():
        file, _, function = name.partition("[")[0].rpartition("::")
        assert f"def {function}(" in (KEPT.parents[1] / file).read_text(encoding="utf-8"), name


# -- messages ------------------------------------------------------------------------------------
HERE = Path(__file__).parent


def test_what_differs_fails_with_the_difference_and_is_left(tmp_path):
    """Another text, or none, fails; neither is written."""
    path = tmp_path / "messages" / "some.txt"
    with pytest.raises(pytest.fail.Exception, match=r"\+ error: no file"):
        MessageCatalogue(path, "test_a[1]", tmp_path, update=False)("error: no file\n")
    assert not path.exists()
    MessageCatalogue(path, "test_a[1]", tmp_path, update=True)("error: no file\n")
    before = path.read_text()
    with pytest.raises(pytest.fail.Exception, match=r"(?s)- error: no file.*\+ error: no files"):
        MessageCatalogue(path, "test_a[1]", tmp_path, update=False)("error: no files\n")
    assert path.read_text() == before


def test_what_is_written_is_read_again(tmp_path):
    """Empty lines, indented ones and several texts of one test; folders of a run have one name."""
    path = tmp_path / "messages" / "some.txt"
    text = f"  a\n\n\nwrote {tmp_path}/test_b0/x.json, '{tmp_path}/other'\n"
    MessageCatalogue(path, "test_b", tmp_path, update=True)(text, "later")
    MessageCatalogue(path, "test_b", tmp_path, update=True)("error: é")
    assert read(path) == {
        "test_b": "error: é",
        "test_b: later": "  a\n\n\nwrote <tmp>/x.json, '<tmp>'",
    }
    for changed, about in ((text, "later"), ("error: é", "")):
        MessageCatalogue(path, "test_b", tmp_path, update=False)(changed, about)


@pytest.mark.parametrize("path", sorted(HERE.rglob("messages/*.txt")), ids=lambda path: path.stem)
def test_every_entry_is_of_a_test(path):
    """A removed or renamed test has no entry."""
    code = (path.parents[1] / f"test_{path.stem}.py").read_text(encoding="utf-8")
    tests = set(re.findall(r"^def (test_\w+)\(", code, re.MULTILINE))
    assert {re.match(r"\w*", name)[0] for name in read(path)} <= tests
