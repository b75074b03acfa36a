"""Methods by their names: those of this package, registered ones, and functions in files."""

from __future__ import annotations

from dataclasses import replace

from poetmodel.baselines.own import own_method, own_names
from poetmodel.baselines.registry import METHODS, Method
from poetmodel.errors import InputError


def method(name: str) -> Method:
    """Return a method by its name, with a variant after a colon where it has any.

    Methods of one's own are found, too: registered ones, and ``FILE.py:FUNCTION``.

    Raises
    ------
    InputError
        If there is none of that name.
    OwnMethodError
        If the file of a method of one's own raises an exception when it is imported.

    Examples
    --------
    >>> method("rotor").recomputes
    True
    >>> method("dtr:local").variant
    'local'
    """
    plain, colon, variant = name.partition(":")
    entry = METHODS.get(plain)
    if entry is None:
        own = own_method(name)
        if own is None:
            known = ", ".join((*METHODS, *own_names()))
            raise InputError(f"method {name!r}: expected one of {known}, or FILE.py:FUNCTION")
        return own
    if not colon:
        return entry
    if variant not in entry.variants:
        known = ", ".join(f"{plain}:{known}" for known in entry.variants) or "none"
        raise InputError(f"method {name!r}: expected {plain} or one of its variants ({known})")
    return replace(entry, name=name, variant=variant)
