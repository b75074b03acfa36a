"""Catalogues of what people are told: what differs fails or is written, what is gone is noticed."""

import re
from pathlib import Path

import pytest

from kit.messages import Told, read

HERE = Path(__file__).parent


def test_what_differs_fails_with_the_difference_and_is_left(tmp_path):
    """Another text, or none, fails; neither is written."""
    path = tmp_path / "messages" / "some.txt"
    with pytest.raises(pytest.fail.Exception, match=r"\+ error: no file"):
        Told(path, "test_a[1]", tmp_path, update=False)("error: no file\n")
    assert not path.exists()
    Told(path, "test_a[1]", tmp_path, update=True)("error: no file\n")
    before = path.read_text()
    with pytest.raises(pytest.fail.Exception, match=r"(?s)- error: no file.*\+ error: no files"):
        Told(path, "test_a[1]", tmp_path, update=False)("error: no files\n")
    assert path.read_text() == before


def test_what_is_written_is_read_again(tmp_path):
    """Empty lines, indented ones and several texts of one test; folders of a run have one name."""
    path = tmp_path / "messages" / "some.txt"
    text = f"  a\n\n\nwrote {tmp_path}/test_b0/x.json, '{tmp_path}/other'\n"
    Told(path, "test_b", tmp_path, update=True)(text, "later")
    Told(path, "test_b", tmp_path, update=True)("error: é")
    assert read(path) == {
        "test_b": "error: é",
        "test_b: later": "  a\n\n\nwrote <tmp>/x.json, '<tmp>'",
    }
    for changed, about in ((text, "later"), ("error: é", "")):
        Told(path, "test_b", tmp_path, update=False)(changed, about)


@pytest.mark.parametrize("path", sorted(HERE.rglob("messages/*.txt")), ids=lambda path: path.stem)
def test_every_entry_is_of_a_test(path):
    """A test that is gone or renamed leaves nothing behind."""
    code = (path.parents[1] / f"test_{path.stem}.py").read_text(encoding="utf-8")
    tests = set(re.findall(r"^def (test_\w+)\(", code, re.MULTILINE))
    assert {re.match(r"\w*", name)[0] for name in read(path)} <= tests
