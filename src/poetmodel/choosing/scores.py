"""Files of scores: the importance of each layer for the choice of layers to train."""

from __future__ import annotations

import csv
import io
from typing import TYPE_CHECKING

from poetmodel.errors import InputError, convert_errors, quote
from poetmodel.files import read_text

if TYPE_CHECKING:
    from pathlib import Path


def load_scores(path: Path) -> dict[str, float]:
    """Read scores, finite or not, by name from a CSV with the columns ``name`` and ``score``."""
    reader = csv.reader(io.StringIO(read_text(path), newline=""), strict=True)
    with convert_errors(InputError, str(path)):
        try:
            lines = [line for line in reader if line]
        except csv.Error as error:
            raise InputError(f"is no CSV file: {error}") from error
        header, *score_lines = lines or [[]]
        if [column.strip() for column in header] != ["name", "score"]:
            raise InputError("expected the columns name,score in the first line")
        scores: dict[str, float] = {}
        for score_line in score_lines:
            if len(score_line) != len(header):
                raise InputError(f"expected a name and a score, got {','.join(score_line)!r}")
            name, text = (field.strip() for field in score_line)
            if name in scores:
                raise InputError(f"{quote(name)} occurs twice; give each layer one score")
            try:
                scores[name] = float(text)
            except ValueError:
                raise InputError(
                    f"score of {quote(name)}: expected a number of 0 or more, got {text!r}"
                ) from None
    return scores
