"""Generated blocks: only they change, and docstrings become Markdown."""

from __future__ import annotations

import re

import pytest

from blocks import replace_block
from make_docs import FORMULATIONS, PAGE, components, markdown, page
from poetmodel.model import FORMULATIONS as BY_NAME
from poetmodel.model import Formulation


def test_block_is_replaced_and_nothing_else() -> None:
    """Text around a block stays; a second run changes nothing."""
    text = "a\n<!-- begin x -->\nold\n<!-- end x -->\nb\n"
    once = replace_block(text, "x", "new \\1")
    assert once == "a\n<!-- begin x -->\n\nnew \\1\n\n<!-- end x -->\nb\n"
    assert replace_block(once, "x", "new \\1") == once


@pytest.mark.parametrize(
    "text", ["", "<!-- begin x -->\n", "<!-- begin x -->\n<!-- end x -->\n" * 2]
)
def test_missing_or_repeated_block_is_an_error(text: str) -> None:
    """A page that lost a mark is not silently left as it is."""
    with pytest.raises(ValueError, match="expected one block"):
        replace_block(text, "x", "new")


def test_literal_blocks_become_code() -> None:
    """A docstring's inequality is set as code, with or without words before its colons."""
    statement = """Say it.

    For all::

        a <= b

            deeper
    ::

        c
    """
    assert markdown(statement) == (
        "Say it.\n\nFor all:\n\n```text\na <= b\n\n    deeper\n```\n```text\nc\n```"
    )


def test_every_component_is_on_the_page_and_in_the_reference() -> None:
    """The components of what users can build by name are listed, and stated in the reference."""
    named = {part for part in BY_NAME.values() if isinstance(part, Formulation)}
    assert named <= set(FORMULATIONS)
    text, reference = page(PAGE.read_text(encoding="utf-8")), components()
    for formulation in FORMULATIONS:
        for component in formulation.components:
            assert re.search(rf"^- `{formulation.name}`:.* `{component.name}`", text, re.MULTILINE)
            assert component.source in reference
            assert markdown(component.statement) in reference
