"""The page that says which models of other libraries can be compiled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from blocks import table
from pytorch.coverage import DIFFERS, REFUSED, WORKS
from result_pages.records import circumstances

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_HEADS: Final = ("model", "", "operations", "of inputs it reads", "budget")
_WORDS: Final = (
    "*Works*: loss, gradients, buffers and the state of the random generator of a compiled step "
    "equal eager PyTorch's bit by bit, on the batch that it was compiled for and on another one, "
    "whose masks differ. Models are small, with random weights, in training mode with dropout. "
    "Texts come with an attention mask and labels, `use_cache` is at its default, and the loss is "
    "the model's own if not said otherwise. *Operations* are those of the captured graph of "
    "forward and backward pass. What a model [reads of inputs](pytorch.md#what-is-not) is guarded: "
    "computed again before each step. *Budget* is the smaller of 60 % and 80 % of the peak of "
    "keep-all that a schedule keeps, with paging and recomputation; bits are equal there too."
)
_REFUSED: Final = (
    "Each of these is refused when it is compiled, with this sentence. Most of the models above "
    "are the same ones without what is refused."
)
_HINTS: Final = """\
- **Wav2Vec2 and its family**: SpecAugment draws its masks with NumPy, and layerdrop leaves layers
  out by a random number. Set `apply_spec_augment=False` and `layerdrop=0.0`, and mask the sound
  before the step.
- **Mixtures of experts**: the ways of transformers to run them that keep shapes (`grouped_mm`, the
  default, and `batched_mm`) are captured. The loop over experts (`experts_implementation="eager"`)
  runs those that activations choose.
- **Detectors**: losses that match boxes outside of PyTorch (SciPy) read activations. Give the model
  a loss of your own that stays in PyTorch, with the match as an input: found before the step, by a
  forward pass under `torch.no_grad()`."""


def page(records: Sequence[dict[str, Any]], source: str) -> str:
    """Return the page."""
    there = [each for each in records if each["status"] in (WORKS, DIFFERS, REFUSED)]
    works = [each for each in there if each["status"] != REFUSED]
    refused = [each for each in there if each["status"] == REFUSED]
    versions = sorted({each["library_version"] for each in there})
    parts = [
        "# Models that can be compiled",
        lead(there),
        _WORDS,
        f"Generated from `bench/results/{source}` by `scripts/make_results.py`; "
        f"`python -m pytorch.coverage` in `bench` tries all again. {circumstances(there)}, "
        f"torch {there[0]['torch']}, {', '.join(versions)}.",
    ]
    for library, found in _by_library(works):
        rows = [_row(each) for each in found]
        parts += [f"## {library}", table(_HEADS, rows)]
    if refused:
        rows = [[each["name"], _cell(each["reason"])] for each in refused]
        parts += ["## Refused", _REFUSED, table(("model", "because"), rows), _HINTS]
    return "\n\n".join(parts) + "\n"


def lead(records: Sequence[dict[str, Any]]) -> str:
    """Return in a sentence how many models work."""
    works = sum(map(_is_equal, records))
    refused = sum(each["status"] == REFUSED for each in records)
    apart = len(records) - works - refused
    return (
        f"Of {len(records)} models tried, {works} train as in eager PyTorch, bit by bit; "
        f"{refused} are refused in a sentence" + (f", and {apart} differ." if apart else ".")
    )


def _is_equal(found: dict[str, Any]) -> bool:
    """Return whether all bits of a model were equal wherever it ran."""
    budget = found.get("budget")
    smaller = budget is None or (budget["equal"] and budget["within"])
    return bool(found["status"] == found.get("other") == WORKS and smaller)


def _by_library(
    records: Sequence[dict[str, Any]],
) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    libraries = dict.fromkeys(each["name"].split(maxsplit=1)[0] for each in records)
    for library in libraries:
        yield library, [each for each in records if each["name"].startswith(f"{library} ")]


def _row(found: dict[str, Any]) -> list[str]:
    """Return the row of a model that is compiled."""
    if _is_equal(found):
        status = "works"
    elif found["status"] == DIFFERS:
        status = _cell(found["reason"])
    elif found["other"] != WORKS:
        status = f"another batch: {_cell(found['other'])}"
    else:
        status = "differs in the smaller budget"
    library = found["name"].split(maxsplit=1)[0]
    places = (read["place"].partition(" ")[0] for read in found["read"])
    reads = dict.fromkeys(place.removeprefix(f"{library}/") for place in places)
    budget = found["budget"]
    return [
        found["name"].split(maxsplit=1)[1],
        status,
        f"{found['nodes']:,}",
        "<br>".join(f"`{place}`" for place in reads),
        "neither" if budget is None else f"{budget['share']:.0%}",
    ]


def _cell(text: str) -> str:
    """Return text of others as it may stand in a table."""
    for mark in "\\|*_<[`":
        text = text.replace(mark, f"\\{mark}")
    return text
