"""Parsing and formatting of sizes, times, energies, powers and frequencies.

All other modules use SI: bytes (int), seconds, joules, watts, hertz (float). Only this module
converts texts such as ``256KiB``, ``20ms`` or ``110%`` to numbers.
"""

from __future__ import annotations

import math
import re
from decimal import Decimal
from fractions import Fraction
from numbers import Rational, Real
from typing import TYPE_CHECKING, Final, NamedTuple

from poetmodel.errors import BudgetError, convert_errors, quote

if TYPE_CHECKING:
    from collections.abc import Mapping

ESTIMATES: Final = "energies are estimates, not measured on a board"
"""Note with which energies are displayed, in titles and sentences."""

MAX_BRIEF_CHARACTERS: Final = 150
"""Maximum length of the facts in a text of `brief`, without the name of the class."""

MAX_BYTES: Final = 2**53
"""Maximum size [B]: floats represent all integers up to it exactly."""

_MAX_REAL: Final = 10**30
"""Maximum time, energy, power or frequency, in SI units: far beyond any training step."""

SIZE_UNITS: Final[Mapping[str, int]] = {
    "B": 1,
    **{f"{letter}B": 1000**power for power, letter in enumerate("kMGT", 1)},
    **{f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", 1)},
}
"""Size of each unit [B]."""
TIME_UNITS: Final[Mapping[str, Fraction]] = {
    "us": Fraction(1, 10**6),
    "ms": Fraction(1, 10**3),
    "s": Fraction(1),
    "min": Fraction(60),
    "h": Fraction(3600),
    "ns": Fraction(1, 10**9),
}
"""Length of each unit [s]."""
ENERGY_UNITS: Final[Mapping[str, Fraction]] = {
    "uJ": Fraction(1, 10**6),
    "mJ": Fraction(1, 10**3),
    "J": Fraction(1),
    "kJ": Fraction(1000),
    "mWh": Fraction(36, 10),
    "Wh": Fraction(3600),
    "nJ": Fraction(1, 10**9),
}
"""Energy of each unit [J]."""
POWER_UNITS: Final[Mapping[str, Fraction]] = {
    "uW": Fraction(1, 10**6),
    "mW": Fraction(1, 10**3),
    "W": Fraction(1),
    "kW": Fraction(1000),
}
"""Power of each unit [W]."""
FREQUENCY_UNITS: Final[Mapping[str, Fraction]] = {
    "Hz": Fraction(1),
    "kHz": Fraction(10**3),
    "MHz": Fraction(10**6),
    "GHz": Fraction(10**9),
}
"""Frequency of each unit [Hz]."""
_OTHER_SPELLINGS: Final[Mapping[str, tuple[str, ...]]] = {
    "bytes": ("B",),
    "byte": ("B",),
    **{
        f"{letter.lower()}{ending}": (f"{letter}B", f"{letter.upper()}iB")
        for letter in "kMGT"
        for ending in ("", "b", "bytes", "byte")
    },
    **{f"{letter.lower()}i": (f"{letter}iB",) for letter in "KMGT"},
    "m": ("MB", "MiB", "ms", "min"),
    **dict.fromkeys(("sec", "secs", "second", "seconds"), ("s",)),
    **dict.fromkeys(("mins", "minute", "minutes"), ("min",)),
    **dict.fromkeys(("hr", "hrs", "hour", "hours"), ("h",)),
    **dict.fromkeys(("msec", "msecs", "millisecond", "milliseconds"), ("ms",)),
    **dict.fromkeys(("usec", "usecs", "microsecond", "microseconds", "μs"), ("us",)),
    **dict.fromkeys(("joule", "joules", "ws"), ("J",)),
    **dict.fromkeys(("w", "watthour", "watthours"), ("Wh",)),
    **dict.fromkeys(("watt", "watts"), ("W",)),
    "mw": ("mWh",),
    "\u03bcj": ("uJ",),
}
"""Units that an unknown unit may mean, by the unknown unit in lower case."""

_QUANTITY: Final = re.compile(
    # The numbers of digits are limited, so that parsing is always fast.
    r"\s*(\d{1,40}(?:\.\d{0,40})?|\.\d{1,40})(?:[eE]([+-]?\d{1,3}))?\s*([A-Za-z\u00b5\u03bc]+|%)?\s*",
    re.ASCII,
)
_LONG_S: Final = 7200
"""Minimum of the times that are formatted in hours [s]."""
_MEDIUM_S: Final = 120
"""Minimum of the times that are formatted in minutes [s]."""


class _QuantityKind(NamedTuple):
    """A kind of quantity, such as times."""

    examples: str
    """Valid values, for messages."""
    units: Mapping[str, int] | Mapping[str, Fraction]
    """Value of each unit in bytes, seconds, joules, watts or hertz."""


_SIZE: Final = _QuantityKind("a size such as 1230000, 256KiB, 1.5MB or 50%", SIZE_UNITS)
_TIME: Final = _QuantityKind("a time such as 1.5s, 20ms, 10min, 6h or 110%", TIME_UNITS)
_ENERGY: Final = _QuantityKind("an energy such as 2.5J, 300mJ, 1.2Wh or 105%", ENERGY_UNITS)
_POWER: Final = _QuantityKind("a power such as 2.5W or 20mW", POWER_UNITS)
_FREQUENCY: Final = _QuantityKind("a frequency such as 64MHz", FREQUENCY_UNITS)


def parse_size(value: str | int, *, field: str, base_bytes: int | None = None) -> int:
    """Parse a size as bytes: ``256KiB`` (1024), ``32kB`` (1000), ``50%``, or a number of bytes.

    Rounded down. `field` is the prefix of error messages, `base_bytes` the size of 100 % [B].
    """
    with convert_errors(BudgetError, field):
        size, unit = _split_quantity(value, _SIZE)
        if unit == "%":
            size *= _percentage_base(base_bytes, _SIZE) / 100
        elif unit is not None:
            size *= _unit_factor(unit, str(value), _SIZE)
        elif size.denominator != 1:
            raise BudgetError(
                f"expected {_SIZE.examples}; without a unit {quote(value)} is bytes and must be a "
                f"whole number (for a fraction of the keep-all peak write "
                f"{float(size * 100):g}%)"
            )
        if size > MAX_BYTES:
            raise BudgetError(f"expected at most 2^53 bytes, got {quote(value)}")
        return int(size)


def parse_fraction(value: str | int) -> Fraction | None:
    """Return the fraction of a percentage, 1/2 for ``50%``; None for any other number."""
    number, unit = _split_quantity(value, _SIZE)
    return number / 100 if unit == "%" else None


def parse_time(value: str | float, *, field: str, base_s: float | None = None) -> float:
    """Parse a time as seconds: ``20ms``, ``10min``, ``110%`` of `base_s`, or a number of seconds.

    `field` is the prefix of error messages; the maximum is 1e30 s.
    """
    return _parse_real(value, _TIME, field=field, base=base_s)


def parse_energy(value: str | float, *, field: str, base_j: float | None = None) -> float:
    """Parse an energy as joules: ``300mJ``, ``1.2Wh``, ``105%`` of `base_j`, or a number."""
    return _parse_real(value, _ENERGY, field=field, base=base_j)


def parse_power(value: str | float, *, field: str) -> float:
    """Parse a power as watts: ``20mW``, ``2.5W``, or a number of watts."""
    return _parse_real(value, _POWER, field=field, base=None)


def parse_frequency(value: str | float, *, field: str) -> float:
    """Parse a frequency as hertz: ``64MHz``, ``1.5GHz``, or a number of hertz."""
    return _parse_real(value, _FREQUENCY, field=field, base=None)


def format_bytes(size_bytes: float) -> str:
    """Format a size in binary units: ``1.50 MiB``, below 1 KiB without decimals: ``512 B``."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(size_bytes) >= factor:
            return f"{size_bytes / factor:,.2f} {unit}"
    return f"{size_bytes:,.0f} B"


def format_seconds(time_s: float) -> str:
    """Format a time with up to four significant digits: ``12.3 ms``, ``35.1 min``, ``2 h``."""
    if abs(time_s) >= _LONG_S:
        return f"{time_s / 3600:.3g} h"
    if abs(time_s) >= _MEDIUM_S:
        return f"{time_s / 60:.3g} min"
    return _format_with_prefix(time_s, "s")


def format_joules(energy_j: float) -> str:
    """Format an energy in nJ to J with four significant digits: ``4.56 mJ``."""
    return _format_with_prefix(energy_j, "J")


def _format_with_prefix(value: float, unit: str) -> str:
    for prefix, factor in (("", 1.0), ("m", 1e-3), ("u", 1e-6), ("n", 1e-9)):
        if abs(value) >= factor:
            return f"{value / factor:,.4g} {prefix}{unit}"
    return f"{value / 1e-9:.3g} n{unit}" if value else f"0 {unit}"


def _parse_real(
    value: str | float, kind: _QuantityKind, *, field: str, base: float | None
) -> float:
    """Parse a quantity to SI; a percentage refers to `base`, and is refused if `base` is None."""
    with convert_errors(BudgetError, field):
        number, unit = _split_quantity(value, kind)
        if unit == "%":
            # With one multiplication, 100 % is exactly the base.
            return _to_float(number / 100, value) * float(_percentage_base(base, kind))
        if isinstance(value, str):
            if unit is None:
                raise BudgetError(f"expected {kind.examples}; {quote(value.strip())} has no unit")
            number *= _unit_factor(unit, value, kind)
        return _to_float(number, value)


def _to_float(number: Fraction, value: object) -> float:
    """Convert a number to float; raise `BudgetError` with `value` if it is above `_MAX_REAL`."""
    if number > _MAX_REAL:
        raise BudgetError(f"expected at most 1e30, got {quote(value)}")
    return float(number)


def _split_quantity(value: object, kind: _QuantityKind) -> tuple[Fraction, str | None]:
    """Return (number, unit) of a text or number; the unit may be ``%``, and is None if missing."""
    if isinstance(value, str):
        match = _QUANTITY.fullmatch(value)
        if match is not None:
            mantissa, exponent, unit = match.groups()
            return Fraction(mantissa) * Fraction(10) ** int(exponent or 0), unit
    elif not isinstance(value, bool) and isinstance(value, Real | Decimal):
        number = value if isinstance(value, Rational) else float(value)
        if (isinstance(number, float) and not math.isfinite(number)) or number < 0:
            raise BudgetError(
                f"expected {kind.examples}, finite and not negative, got {quote(value)}"
            )
        return Fraction(number), None
    raise BudgetError(f"expected {kind.examples}, got {quote(value)}")


def _unit_factor(unit: str, value: str, kind: _QuantityKind) -> Fraction:
    """Return the factor of a unit; the error for an unknown unit quotes `value`, the whole text."""
    if unit not in kind.units:
        number = value.strip().removesuffix(unit).strip()
        candidates = [_format_candidate(number, name) for name in _similar_units(unit, kind.units)]
        guess = f"; did you mean {' or '.join(candidates)}?" if candidates else ""
        raise BudgetError(
            f"expected {kind.examples}; {quote(value.strip())} has the unit {quote(unit)}, "
            f"which is none of {', '.join(kind.units)}{guess}"
        )
    return Fraction(kind.units[unit])


def _similar_units(unit: str, units: Mapping[str, object]) -> list[str]:
    """Return the units of `units` that a misspelled unit may mean."""
    lower_case = unit.lower().replace("\u00b5", "\u03bc")
    units_of_same_letters = [name for name in units if name.lower() == lower_case]
    units_of_spelling = [name for name in _OTHER_SPELLINGS.get(lower_case, ()) if name in units]
    return list(dict.fromkeys((*units_of_spelling, *units_of_same_letters)))


def _format_candidate(number: str, unit: str) -> str:
    """Format an amount with its unit and, for sizes except bytes, the unit's factor."""
    if SIZE_UNITS.get(unit, 1) == 1:
        return f"{number}{unit}"
    return f"{number}{unit} ({unit}: {SIZE_UNITS[unit]:,} B)"


def _percentage_base(base: float | None, kind: _QuantityKind) -> Fraction:
    """Return the value of 100 %; raise `BudgetError` if there is none."""
    if base is None:
        other_examples = kind.examples.replace(" or ", ", not ")
        raise BudgetError(f"a percentage has no meaning here; expected {other_examples}")
    return Fraction(base)


def brief(subject: object, *facts: str) -> str:
    """Return a one-line ``repr``, ``Class(fact, fact)``, of at most `MAX_BRIEF_CHARACTERS`."""
    representation = ", ".join(" ".join(fact.split()) for fact in facts if fact)
    if len(representation) > MAX_BRIEF_CHARACTERS:
        representation = representation[: MAX_BRIEF_CHARACTERS - 3] + "..."
    return f"{type(subject).__name__}({representation})"
