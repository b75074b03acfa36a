"""Sizes, times and energies as people write them."""

from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from poetmodel.errors import BudgetError, quote
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
def test_parse_size_reads_every_form(text, size_bytes):
    """Each form of a size is its number of bytes, rounded down."""
    parsed = parse_size(text, field="--ram")
    assert parsed == size_bytes
    assert type(parsed) is int


def test_parse_size_takes_percent_of_the_whole():
    """A percentage is of a whole, exactly, rounded down; 2^53 bytes are the most."""
    assert parse_size("50%", field="--ram", base_bytes=1001) == 500
    assert parse_size("100 %", field="--ram", base_bytes=2**53 - 1) == 2**53 - 1
    assert parse_size("33.3%", field="--ram", base_bytes=1000) == 333
    with pytest.raises(BudgetError, match="--aux: a percentage has no meaning here"):
        parse_size("50%", field="--aux")
    assert parse_size(MAX_BYTES, field="--ram") == 2**53
    with pytest.raises(BudgetError, match=r"at most 2\^53 bytes"):
        parse_size(str(2**53 + 1), field="--ram")


@pytest.mark.parametrize(
    "value",
    [
        *("", "40 %%", "-1", "0.5", ".", "1..2", "1 parsec", "1e30", "nan", "inf", "1_000", "٣"),
        *(-1, 0.5, float("nan"), float("inf"), 1e30, 10**400, True, None, 1 + 0j, [1]),
    ],
)
def test_parse_size_refuses_what_is_no_size(value):
    """Other texts are an error that names the field and the accepted values."""
    with pytest.raises(BudgetError, match=r"^--ram: expected .*") as caught:
        parse_size(value, field="--ram", base_bytes=100)
    assert len(str(caught.value)) < 300
    assert ("write 50%" in str(caught.value)) == (value in ("0.5", 0.5))


@pytest.mark.parametrize("digits", [50, 5000])
def test_parse_refuses_endless_digits(digits):
    """A number of thousands of digits is refused at once, in a short message."""
    for parse in (parse_size, parse_time, parse_energy):
        with pytest.raises(BudgetError) as caught:
            parse("9" * digits + "s", field="--x")
        assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("parse", "amounts"),
    [
        (parse_time, {"1.5s": 1.5, "20ms": 0.02, "3us": 3e-6, "10min": 600.0, "6h": 21600.0, 2: 2}),
        (
            parse_energy,
            {"2.5J": 2.5, "300mJ": 0.3, "1Wh": 3600.0, "5mWh": 18.0, Decimal("0.5"): 0.5},
        ),
        (parse_power, {"20mW": 0.02, "2.5W": 2.5, "1kW": 1000.0, "5 uW": 5e-6, 2.5: 2.5}),
        (parse_frequency, {"64MHz": 64e6, "1.5GHz": 1.5e9, "32kHz": 32e3, "8Hz": 8.0, 64e6: 64e6}),
    ],
)
def test_every_unit_is_read(parse, amounts):
    """Each unit is its number of basic ones; a number without a unit has these."""
    assert {text: parse(text, field="--x") for text in amounts} == amounts


@given(st.floats(min_value=1e-9, max_value=1e9))
def test_parse_time_of_100_percent_is_the_whole(whole_s):
    """100 % is the same float as the whole, so a deadline of one pass admits one pass."""
    assert parse_time("100%", field="--deadline", base_s=whole_s) == whole_s


@pytest.mark.parametrize("value", ["5", "-1s", "1e999s", "5 parsecs", "5 S", 1e31, -1.0, "nan s"])
def test_parse_time_refuses_what_is_no_time(value):
    """Without a unit, negative, endless, or in an unknown unit: an error that names the field."""
    with pytest.raises(BudgetError, match=r"^--deadline: expected"):
        parse_time(value, field="--deadline")


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
        (parse_power, "20mw", ["20mW"]),
        (parse_power, "2 watts", ["2W"]),
        (parse_frequency, "64mhz", ["64MHz"]),
    ],
)
def test_other_spellings_of_units_are_understood(parse, text, meant):
    """The error suggests the probable meaning, and each suggestion is valid."""
    with pytest.raises(BudgetError) as caught:
        parse(text, field="--x")
    guess = str(caught.value).partition("did you mean ")[2].removesuffix("?")
    found = [part.split(" (")[0] for part in guess.split(" or ")]
    assert found == meant
    assert all(parse(example, field="--x") >= 0 for example in found)


def test_amounts_are_shown_in_a_fitting_unit():
    """Sizes in the largest binary unit that leaves at least 1, times and energies in few digits."""
    sizes = {0: "0 B", 1023: "1,023 B", 1536: "1.50 KiB", 3 * 2**20: "3.00 MiB"}
    sizes[2**41] = "2,048.00 GiB"
    assert {size: format_bytes(size) for size in sizes} == sizes
    assert format_seconds(0.0123) == "12.3 ms"
    assert format_seconds(90) == "90 s"
    assert format_seconds(600) == "10 min"
    assert format_seconds(7200) == "2 h"
    assert format_seconds(0) == "0 s"
    assert format_joules(0.00456) == "4.56 mJ"
    assert format_joules(2e-6) == "2 uJ"
    assert format_joules(-3.19e-7) == "-319 nJ"
    assert format_seconds(1e-12) == "0.001 ns"


def test_brief_is_one_line():
    """A ``repr`` names the class and omits empty fields."""
    assert brief(1, "small", "", "whole") == "int(small, whole)"


def test_shown_is_short_and_in_plain_words():
    """A value in an error message fits in a line."""
    values = ["x" * 1000, 10**5000, -(10**30), {"a": 1}, [1] * 1000, None, True, 1.5, float("nan")]
    words = [quote(value) for value in values]
    assert all(len(word) <= 60 for word in words)
    assert words[3:] == ["an object", "a list", "nothing", "true", "1.5", "nan"]
    assert words[1] == "a whole number of about 5000 digits"
    assert words[0].endswith("...'")
