"""The exceptions of poetmodel, with one root class, and formatting of their messages.

Messages have the form *subject: expected value, actual value, remedy*.
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
"""Exit status after Ctrl-C without a result."""
SOLVER_THREAD: Final = "poetmodel-solve"
"""Name of the threads that run solvers; the command line does not wait for them at its exit."""
_SHOWN_CHARACTERS: Final = 60
"""Maximum length of a value in a message."""
_SHOWN_INTEGER: Final = 10**20
"""Integers of at least this absolute value are described by their number of digits."""


def quote(value: object) -> str:
    """Format a value for an error message: at most 60 characters, containers only by JSON type.

    Integers above 20 digits are described by their number of digits.

    Examples
    --------
    >>> quote(True), quote(None), quote({"a": 1}), quote("x")
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


def join_names(names: Iterable[str], *, max_names: int = 5) -> str:
    """Join the names; if there are two or more beyond `max_names`, replace these by their number.

    Examples
    --------
    >>> join_names(["a", "b"]), join_names("abcdefgh", max_names=3)
    ('a, b', 'a, b, c and 5 more')
    """
    all_names = list(names)
    n_omitted = len(all_names) - max_names
    # "and 1 more" is no shorter than a name.
    if n_omitted <= 1:
        return ", ".join(all_names)
    return f"{', '.join(all_names[:max_names])} and {n_omitted:,} more"


def suggest_names(word: str, names: Iterable[str], *, max_names: int = 1) -> str:
    """Return a question that suggests the names most similar to `word`; "" if none is similar."""
    matches = get_close_matches(word, tuple(names), n=max_names)
    return f"did you mean {' or '.join(matches)}?" if matches else ""


class PoetModelError(Exception):
    """Root of all errors that poetmodel raises deliberately."""


class InputError(PoetModelError, ValueError):
    """An input of the user is invalid.

    Parameters
    ----------
    faults : str or iterable of str
        Messages of all errors found; all are reported together.
    """

    def __init__(self, faults: str | Iterable[str]) -> None:
        self.faults: tuple[str, ...] = (faults,) if isinstance(faults, str) else tuple(faults)
        """Messages of all errors found, in the order of the input."""
        super().__init__("; ".join(self.faults))

    def with_prefix(self, prefix: str) -> InputError:
        """Return a new error of the same class with `prefix` before every message.

        `prefix` is a file name, for example; if it is empty, the messages stay unchanged.
        """
        return type(self)(f"{prefix}: {fault}" if prefix else fault for fault in self.faults)


@contextmanager
def convert_errors(error: type[InputError], prefix: str = "") -> Iterator[None]:
    """Context manager: convert input errors to class `error`, `prefix` before each message."""
    try:
        yield
    except InputError as raised:
        raise error(raised.with_prefix(prefix).faults) from None


class GraphError(InputError):
    """A training graph violates an invariant or cannot be read."""


class DeviceError(InputError):
    """A device description violates an invariant or cannot be read."""


class CostError(InputError):
    """Costs or a profile are malformed, or do not match the graph."""


class BudgetError(InputError):
    """A limit (RAM, time, energy, storage) is invalid or too small."""


class FlashError(BudgetError):
    """An export does not fit the flash of its device."""


class ScheduleError(InputError):
    """A schedule file is malformed or belongs to another graph."""


class PlanError(InputError):
    """A plan file is malformed, corrupt, or belongs to another graph; or there is no plan."""


class MissingExtraError(InputError, ImportError):
    """An operation requires an optional dependency that is not installed.

    For back ends, PyTorch and ExecuTorch, see `BackendUnavailableError`.
    """


class ModelError(InputError):
    """A model cannot be built, or contains an element that linear solvers do not accept."""


def check_docstrings() -> None:
    """Raise `ModelError` if the interpreter strips docstrings: then Pyomo cannot be imported."""
    if sys.flags.optimize > 1:
        raise ModelError(
            "Python strips docstrings here (-OO or PYTHONOPTIMIZE=2), and Pyomo cannot be imported "
            "without them: start Python with -O or without"
        )


class BackendError(PoetModelError, RuntimeError):
    """A solver failed unexpectedly."""


class BackendUnavailableError(BackendError):
    """A back end, PyTorch or ExecuTorch is missing, or its release is not supported.

    The subclass `LicenceError` is for licences of back ends.
    """


class LicenceError(BackendUnavailableError):
    """The licence of a back end is missing or refuses the model."""


class UnknownOptionError(BackendError):
    """A solver has no such option, or refuses its value."""


class NoScheduleError(PoetModelError):
    """A schedule was required, but the solve found none.

    Parameters
    ----------
    result : SolveResult
        The result without a schedule: termination and bound.
    """

    def __init__(self, result: Any) -> None:
        self.result = result
        """The result of the solve."""
        super().__init__(result.summary())


class MethodNotApplicableError(PoetModelError):
    """A method does not apply to this graph, or its schedule violates a limit.

    Parameters
    ----------
    message : str
        The reason.
    result : SolveResult, optional
        The result without a schedule; always set by `poetmodel.baselines.run`.
    """

    def __init__(self, message: str, result: Any = None) -> None:
        self.result = result
        """The result without a schedule; None if it was not passed."""
        super().__init__(message)


class UserMethodError(PoetModelError):
    """A user-defined method raised an exception, or its schedule is invalid.

    Parameters
    ----------
    message : str
        One sentence about the error, with file and line if the method raised.
    refused : bool, optional
        Whether the method returned a schedule that the verifier refused.
    """

    def __init__(self, message: str, *, refused: bool = False) -> None:
        self.refused = refused
        """Whether the method returned a schedule that the verifier refused."""
        super().__init__(message)


class TimeLimitError(PoetModelError):
    """A computation did not finish within its time limit."""


class TooLargeError(PoetModelError):
    """A schedule or a model would exceed the maximum number of entries in memory."""


class WorkersLostError(PoetModelError, RuntimeError):
    """The workers of a sweep cannot execute more runs, or a worker of the explorer did not start.

    Recorded runs of a sweep are retained.
    """


class VerificationError(PoetModelError):
    """A schedule, plan or arena that poetmodel made violates a rule or a limit.

    Parameters
    ----------
    violations : iterable of str
        A message for every violation.
    """

    def __init__(self, violations: Iterable[str]) -> None:
        self.violations: tuple[str, ...] = tuple(violations)
        """A message for every violation."""
        super().__init__("the result is not valid: " + "; ".join(self.violations))
