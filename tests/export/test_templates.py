"""The marks of templates: words, and blocks with a condition."""

import pytest

from poetmodel.export.templates import fill_template


def test_words_become_their_values():
    """A number, a text and a flag are written, and a value that has a mark in it is left alone."""
    words = {"SIZE": 4, "FLAG": True, "NAME": "@SIZE@"}
    assert fill_template("@SIZE@u @FLAG@ @NAME@", words) == "4u 1 @SIZE@"


@pytest.mark.parametrize(("count", "text"), [(2, "a\n  2 b\nd\n"), (0, "a\nc\nd\n")])
def test_blocks_of_lines_leave_no_empty_line(count, text):
    """The line of a mark is removed, whether its block stays or not."""
    template = "a\n@IF N@\n  @N@ b\n@END N@\n@UNLESS N@\nc\n@END N@\nd\n"
    assert fill_template(template, {"N": count}) == text


def test_blocks_may_lie_in_a_line_and_in_each_other():
    """Marks inside of a removed block are not read; those of a block that stays are."""
    template = "x@IF A@ a@IF B@ b@END B@@END A@;\n@UNLESS A@\n@C@\n@END A@\n"
    assert fill_template(template, {"A": True, "B": ""}) == "x a;\n"
    assert fill_template(template, {"A": True, "B": "1"}) == "x a b;\n"


def test_unknown_words_are_refused():
    """A template with an unknown placeholder is refused."""
    with pytest.raises(KeyError, match="SIZE"):
        fill_template("@SIZE@", {})
    with pytest.raises(KeyError, match="SIZE"):
        fill_template("@IF SIZE@x@END SIZE@", {})
