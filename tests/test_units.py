"""Sizes, times and energies as people write them."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from poetmodel.errors import BudgetError, shown
from poetmodel.units import (
    MAX_BYTES,
    brief,
    format_bytes,
    format_joules,
    format_seconds,
    parse_energy,
    parse_frequency,
    parse_power,
    parse_size,
    parse_time,
)

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("1230000", 1_230_000),
        ("1230000B", 1_230_000),
        (" 256 KiB ", 262_144),
        ("2MiB", 2_097_152),
        ("32kB", 32_000),
        ("1.5MB", 1_500_000),
        ("1GiB", 1_073_741_824),
        ("1.5B", 1),
        ("1e6", 1_000_000),
        ("0", 0),
        (7, 7),
        (7.0, 7),
        (np.int64(7), 7),
        (Fraction(8, 2), 4),
    ],
)
def test_parse_size_reads_every_form(text: str, size_bytes: int) -> None:
    """Each form of a size is the number of bytes it says, rounded down."""
    parsed = parse_size(text, field="--ram")
    assert parsed == size_bytes
    assert type(parsed) is int


def test_parse_size_takes_percent_of_the_whole() -> None:
    """A percentage is of the whole, exactly, rounded down; 100 % is the whole."""
    assert parse_size("50%", field="--ram", whole_bytes=1001) == 500
    assert parse_size("100 %", field="--ram", whole_bytes=2**53 - 1) == 2**53 - 1
    assert parse_size("33.3%", field="--ram", whole_bytes=1000) == 333


@pytest.mark.parametrize(
    "value",
    ["", "40 %%", "-1", "0.5", ".", "1..2", "1 parsec", "1e30", "nan", "inf", "1_000", "٣"],
)
def test_parse_size_refuses_what_is_no_size(value: str) -> None:
    """Anything else is an error that names the field and what would be accepted."""
    with pytest.raises(BudgetError, match=r"^--ram: expected .*") as caught:
        parse_size(value, field="--ram", whole_bytes=100)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    "value", [-1, 0.5, float("nan"), float("inf"), 1e30, 10**400, True, None, 1 + 0j, [1]]
)
def test_parse_size_refuses_numbers_that_are_no_size(value: object) -> None:
    """Negative, fractional, infinite and huge numbers are errors, and so is what is no number."""
    with pytest.raises(BudgetError, match="--ram: expected"):
        parse_size(value, field="--ram")  # type: ignore[arg-type]


def test_parse_size_suggests_percent_for_a_fraction() -> None:
    """Who writes 0.4 for 40 % is told so."""
    with pytest.raises(BudgetError, match=r"write 40%"):
        parse_size("0.4", field="--ram", whole_bytes=100)
    with pytest.raises(BudgetError, match=r"write 40%"):
        parse_size(0.4, field="--ram", whole_bytes=100)  # type: ignore[arg-type]


def test_parse_size_needs_a_whole_for_percent() -> None:
    """A percentage of nothing in particular is refused."""
    with pytest.raises(BudgetError, match="--aux: a percentage has no meaning here"):
        parse_size("50%", field="--aux")


def test_parse_size_has_a_largest_size() -> None:
    """2^53 bytes are accepted, one more is not."""
    assert parse_size(MAX_BYTES, field="--ram") == 2**53
    with pytest.raises(BudgetError, match=r"at most 2\^53 bytes"):
        parse_size(str(2**53 + 1), field="--ram")


@pytest.mark.parametrize("digits", [50, 5000])
def test_parse_refuses_endless_digits(digits: int) -> None:
    """A number of thousands of digits is refused at once, in a short message."""
    for parse in (parse_size, parse_time, parse_energy):
        with pytest.raises(BudgetError) as caught:
            parse("9" * digits + "s", field="--x")
        assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("text", "time_s"),
    [("1.5s", 1.5), ("20ms", 0.02), ("3us", 3e-6), ("10min", 600.0), ("6h", 21600.0), (2, 2.0)],
)
def test_parse_time_reads_every_unit(text: str | float, time_s: float) -> None:
    """Each unit of time is the number of seconds it says; a bare number is seconds."""
    assert parse_time(text, field="--deadline") == time_s


@pytest.mark.parametrize(
    ("text", "energy_j"),
    [("2.5J", 2.5), ("300mJ", 0.3), ("1Wh", 3600.0), ("5mWh", 18.0), (Decimal("0.5"), 0.5)],
)
def test_parse_energy_reads_every_unit(text: str | float, energy_j: float) -> None:
    """Each unit of energy is the number of joules it says; a bare number is joules."""
    assert parse_energy(text, field="--energy-budget") == energy_j


def test_parse_frequency_and_power_read_every_unit() -> None:
    """Each unit is the number of hertz or watts it says; a bare number is these."""
    hertz = {"64MHz": 64e6, "1.5GHz": 1.5e9, "32kHz": 32e3, "8Hz": 8.0, 64e6: 64e6}
    assert {text: parse_frequency(text, field="--clock") for text in hertz} == hertz
    watts = {"20mW": 0.02, "0.02W": 0.02, "50uW": 5e-5, 0.02: 0.02}
    assert {text: parse_power(text, field="--power") for text in watts} == watts
    with pytest.raises(BudgetError, match=r"did you mean 64MHz\?"):
        parse_frequency("64mhz", field="--clock")


@given(st.floats(min_value=1e-9, max_value=1e9))
def test_parse_time_of_100_percent_is_the_whole(whole_s: float) -> None:
    """100 % is the same float as the whole, so a deadline of one pass admits one pass."""
    assert parse_time("100%", field="--deadline", whole_s=whole_s) == whole_s


@pytest.mark.parametrize("value", ["5", "-1s", "1e999s", "5 parsecs", "5 S", 1e31, -1.0, "nan s"])
def test_parse_time_refuses_what_is_no_time(value: str | float) -> None:
    """Without a unit, negative, endless, or in an unknown unit: an error that names the field."""
    with pytest.raises(BudgetError, match=r"^--deadline: expected"):
        parse_time(value, field="--deadline")


def test_parse_time_lists_the_units() -> None:
    """An unknown unit is answered with the known ones."""
    with pytest.raises(BudgetError, match="'weeks', which is none of us, ms, s, min, h"):
        parse_time("2 weeks", field="--deadline")


@pytest.mark.parametrize(
    ("parse", "text", "meant"),
    [
        *((parse_size, f"600{unit}", ["600kB", "600KiB"]) for unit in ("KB", "kb", "K", "k", "Kb")),
        *((parse_size, f"1.5 {unit}", ["1.5MB", "1.5MiB"]) for unit in ("mb", "Mb", "M", "m")),
        *((parse_size, f"2{unit}", ["2GB", "2GiB"]) for unit in ("gb", "Gb", "G", "g")),
        *((parse_size, f"2{unit}", ["2KiB"]) for unit in ("kib", "Kib", "KIB", "kiB", "Ki")),
        (parse_size, "2mib", ["2MiB"]),
        (parse_size, "7b", ["7B"]),
        (parse_size, "7bytes", ["7B"]),
        (parse_time, "5MS", ["5ms"]),
        (parse_time, "5S", ["5s"]),
        (parse_time, "5 sec", ["5s"]),
        (parse_time, "5m", ["5ms", "5min"]),
        (parse_time, "5Min", ["5min"]),
        (parse_time, "5hours", ["5h"]),
        (parse_time, "5\u00b5s", ["5us"]),
        (parse_energy, "5j", ["5J"]),
        (parse_energy, "5wh", ["5Wh"]),
        (parse_energy, "5MWH", ["5mWh"]),
        (parse_energy, "5mj", ["5mJ"]),
        (parse_energy, "5W", ["5Wh"]),
    ],
)
def test_other_spellings_of_units_are_understood(
    parse: Callable[..., float], text: str, meant: list[str]
) -> None:
    """What was probably meant is asked, and each guess can be read; nothing else is guessed."""
    with pytest.raises(BudgetError) as caught:
        parse(text, field="--x")
    guess = str(caught.value).partition("did you mean ")[2].removesuffix("?")
    found = [part.split(" (")[0] for part in guess.split(" or ")]
    assert found == meant
    assert all(parse(example, field="--x") >= 0 for example in found)


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1,023 B"),
        (1536, "1.50 KiB"),
        (3 * 2**20, "3.00 MiB"),
        (2**41, "2,048.00 GiB"),
    ],
)
def test_format_bytes_uses_binary_units(size_bytes: int, text: str) -> None:
    """Sizes are shown in the largest binary unit that leaves at least 1."""
    assert format_bytes(size_bytes) == text


def test_format_times_and_energies_have_a_fitting_unit() -> None:
    """Times and energies are shown with few digits in a unit that fits."""
    assert format_seconds(0.0123) == "12.3 ms"
    assert format_seconds(90) == "90 s"
    assert format_seconds(600) == "10 min"
    assert format_seconds(7200) == "2 h"
    assert format_seconds(0) == "0 s"
    assert format_joules(0.00456) == "4.56 mJ"
    assert format_joules(2e-6) == "2 uJ"
    assert format_joules(-3.19e-7) == "-319 nJ"
    assert format_seconds(1e-12) == "0.001 ns"


def test_brief_is_one_line() -> None:
    """What a ``repr`` says names the class and leaves out what is empty."""
    assert brief(1, "small", "", "whole") == "int(small, whole)"


def test_shown_is_short_and_in_plain_words() -> None:
    """What an error message says it got fits in a line, whatever it was."""
    values = ["x" * 1000, 10**5000, -(10**30), {"a": 1}, [1] * 1000, None, True, 1.5, float("nan")]
    words = [shown(value) for value in values]
    assert all(len(word) <= 60 for word in words)
    assert words[3:] == ["an object", "a list", "nothing", "true", "1.5", "nan"]
    assert words[1] == "a whole number of about 5000 digits"
    assert words[0].endswith("...'")
