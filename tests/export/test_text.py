"""Numbers as text in C: exactly rounded, and read back."""

from __future__ import annotations

import ctypes
import math
import struct
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kit.toy_export import library

if TYPE_CHECKING:
    from collections.abc import Callable

FLOATS = st.floats(width=32)


class Text:
    """The functions of pm_text.c for one type of numbers."""

    def __init__(self, loaded: ctypes.CDLL, kind: type, digits: int) -> None:
        self._of_real: Callable[..., bytes] = loaded.pm_text_of_real
        loaded.pm_text_of_real.argtypes = [kind, ctypes.c_char_p]
        loaded.pm_text_of_real.restype = ctypes.c_char_p
        self._read: Callable[..., int] = loaded.pm_real_of_text
        self._kind, self.digits = kind, digits

    def write(self, value: float) -> str:
        """Return a number as C writes it."""
        return self._of_real(value, ctypes.create_string_buffer(32)).decode()

    def read(self, text: str) -> float | None:
        """Return what C reads; None where it refuses."""
        found = self._kind()
        return found.value if self._read(text.encode(), ctypes.byref(found)) else None


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Text:
    """Numbers of the build for a device."""
    return Text(library(tmp_path_factory.mktemp("text"), "host/pm_text.c"), ctypes.c_float, 9)


@pytest.fixture(scope="module")
def double(tmp_path_factory: pytest.TempPathFactory) -> Text:
    """Numbers of the build that checks."""
    flags = ("-DPM_REAL=double",)
    loaded = library(tmp_path_factory.mktemp("text"), "host/pm_text.c", flags=flags)
    return Text(loaded, ctypes.c_double, 17)


def _agrees(text: str, value: float, digits: int) -> bool:
    if math.isnan(value):
        return text in {"nan", "-nan"}
    return text == f"{value:.{digits - 1}e}"


@given(FLOATS)
@example(0.0)
@example(-0.0)
@example(2.0**-149)
@example(3.4028234663852886e38)
@example(float.fromhex("0x1.82db34p-77"))  # rounds up to 1e-23
def test_floats_are_rounded_exactly(single: Text, value: float) -> None:
    """Nine digits of any float are those of Python, and give the float again."""
    text = single.write(value)
    assert _agrees(text, value, 9)
    if not math.isnan(value):
        assert struct.pack("f", float(text)) == struct.pack("f", value)


@given(st.floats())
@example(5e-324)
@example(1.7976931348623157e308)
@example(1e-277)  # rounds up to that
def test_doubles_are_rounded_exactly(double: Text, value: float) -> None:
    """Seventeen digits of any double are those of Python."""
    assert _agrees(double.write(value), value, 17)


@given(st.floats(min_value=1e-20, max_value=1e20), st.booleans())
@example(0.05, False)
@example(1.0, True)
def test_learning_rates_are_read_as_python_does(
    single: Text, double: Text, value: float, negative: bool
) -> None:
    """The text of a number gives that number in double, and its float but for the last bit."""
    value = -value if negative else value
    assert double.read(repr(value)) == value
    assert single.read(repr(value)) == pytest.approx(float(np.float32(value)), rel=2.0**-23)


@pytest.mark.parametrize("text", ["0.1", "0.05", "1e-3", "0.001", "3", ".5", "2.5E+2", "1e-05"])
def test_short_numbers_are_read_exactly(single: Text, text: str) -> None:
    """What people write becomes the float that PyTorch would take."""
    assert single.read(text) == float(np.float32(float(text)))


@pytest.mark.parametrize("text", ["", "-", ".", "1e", "0.1x", "1..2", "nan", "1e999"])
def test_other_text_is_no_number(single: Text, text: str) -> None:
    """Nothing is guessed."""
    assert single.read(text) is None
