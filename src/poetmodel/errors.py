"""The exceptions of poetmodel, one tree with one root.

Every message is written for people: *subject: what was expected, what came, what to do*.
"""

from __future__ import annotations

import math
import sys
from contextlib import contextmanager
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

INTERRUPTED: Final = 130
"""Exit status of Ctrl-C before there is a result."""
_SHOWN_CHARACTERS: Final = 60
_SHOWN_INTEGER: Final = 10**20


def shown(value: object) -> str:
    """Return a value as an error message shows it: short, and in the words of files.

    Examples
    --------
    >>> shown(True), shown(None), shown({"a": 1}), shown("x")
    ('true', 'nothing', 'an object', "'x'")
    """
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list | tuple):
        return "a list"
    if isinstance(value, int) and abs(value) >= _SHOWN_INTEGER:
        return f"a whole number of about {round(value.bit_length() * math.log10(2))} digits"
    text = repr(value)
    if len(text) > _SHOWN_CHARACTERS:
        text = f"{text[: _SHOWN_CHARACTERS - 4]}...{text[-1]}"
    return text


def listed(names: Iterable[str], *, most: int = 5) -> str:
    """Return the first few of some names, and how many more there are.

    Examples
    --------
    >>> listed(["a", "b"]), listed("abcdefgh", most=3)
    ('a, b', 'a, b, c and 5 more')
    """
    known = list(names)
    more = len(known) - most
    # One name takes no more room than "and 1 more".
    if more <= 1:
        return ", ".join(known)
    return f"{', '.join(known[:most])} and {more:,} more"


def did_you_mean(typed: str, names: Iterable[str], *, most: int = 1) -> str:
    """Return a question with the names that are most like one that nobody knows; empty without."""
    close = get_close_matches(typed, tuple(names), n=most)
    return f"did you mean {' or '.join(close)}?" if close else ""


class PoetModelError(Exception):
    """Root of all errors that poetmodel raises on purpose."""


class InputError(PoetModelError, ValueError):
    """Something that the user gave is not acceptable.

    Parameters
    ----------
    faults : str or iterable of str
        Every fault found, each a sentence; all of them are reported at once.
    """

    def __init__(self, faults: str | Iterable[str]) -> None:
        self.faults: tuple[str, ...] = (faults,) if isinstance(faults, str) else tuple(faults)
        """Every fault found, in the order of the input."""
        super().__init__("; ".join(self.faults))

    def within(self, where: str) -> InputError:
        """Return the same error with where it is (a file name, say) before every fault."""
        return type(self)(f"{where}: {fault}" if where else fault for fault in self.faults)


@contextmanager
def raised_as(error: type[InputError], where: str = "") -> Iterator[None]:
    """Raise input errors from inside as another class, with where it is before every fault."""
    try:
        yield
    except InputError as raised:
        raise error(raised.within(where).faults) from None


class GraphError(InputError):
    """A training graph breaks an invariant or cannot be read."""


class DeviceError(InputError):
    """A device description breaks an invariant or cannot be read."""


class CostError(InputError):
    """A profile is malformed or does not fit the graph."""


class BudgetError(InputError):
    """A limit (RAM, time, energy, storage) is not usable."""


class FlashError(BudgetError):
    """Export that does not fit the flash of its device."""


class ScheduleError(InputError):
    """A schedule file is malformed or belongs to another graph."""


class PlanError(InputError):
    """A plan file is malformed, damaged, or belongs to another graph; or no plan can be made."""


class MissingExtraError(InputError):
    """Something was asked for that needs an optional part of poetmodel, which is not installed."""


class ModelError(InputError):
    """A model holds something that cannot be handed to a linear solver."""


def check_docstrings() -> None:
    """Raise where the interpreter strips docstrings, without which Pyomo cannot be imported."""
    if sys.flags.optimize > 1:
        raise ModelError(
            "Python strips docstrings here (-OO or PYTHONOPTIMIZE=2), and Pyomo cannot be imported "
            "without them: start Python with -O or without"
        )


class BackendError(PoetModelError, RuntimeError):
    """A solver failed in a way that it should not."""


class BackendUnavailableError(BackendError):
    """A back end is not installed, or its licence refuses the model."""


class LicenceError(BackendUnavailableError):
    """The licence of a back end refuses the model, or any."""


class UnknownOptionError(BackendError):
    """A solver does not know an option, or refuses its value."""


class NoScheduleError(PoetModelError):
    """A schedule was requested, but the solve ended without one.

    Parameters
    ----------
    result : SolveResult
        What the solve did find: why it stopped, and its bound.
    """

    def __init__(self, result: Any) -> None:
        self.result = result
        """Findings of the solve."""
        super().__init__(result.summary())


class MethodNotApplicableError(PoetModelError):
    """A method cannot treat this graph, or the schedule that it makes breaks a limit.

    Parameters
    ----------
    message : str
        Why, in words.
    result : SolveResult, optional
        The result without a schedule that says so; what `poetmodel.baselines.run` raises has one.
    """

    def __init__(self, message: str, result: Any = None) -> None:
        self.result = result
        """The result without a schedule."""
        super().__init__(message)


class OwnMethodError(PoetModelError):
    """A method of the user's own raised an exception, or its schedule is refused.

    Parameters
    ----------
    message : str
        What it did, in one sentence, with its file and line where it raised something.
    refused : bool, optional
        Whether it returned a schedule, which the verifier does not accept.
    """

    def __init__(self, message: str, *, refused: bool = False) -> None:
        self.refused = refused
        """Whether it returned a schedule, which the verifier does not accept."""
        super().__init__(message)


class TimeLimitError(PoetModelError):
    """A computation was not done when its time limit had passed."""


class TooLargeError(PoetModelError):
    """A schedule or a model would have more entries than memory is meant to hold."""


class WorkersLostError(PoetModelError, RuntimeError):
    """The workers of a sweep cannot take runs any more; what was recorded stays."""


class VerificationError(PoetModelError):
    """The verifier rejected a schedule that a solver called feasible.

    Parameters
    ----------
    violations : iterable of str
        Every rule that the schedule breaks, in words.
    """

    def __init__(self, violations: Iterable[str]) -> None:
        self.violations: tuple[str, ...] = tuple(violations)
        """Every rule that the schedule breaks."""
        super().__init__("the schedule is not valid: " + "; ".join(self.violations))
