"""Look up methods by name: shipped methods, registered ones, and functions in files."""

from __future__ import annotations

from dataclasses import replace

from poetmodel.baselines.own import find_user_method, registered_names
from poetmodel.baselines.registry import METHODS, Method
from poetmodel.errors import InputError


def method(name: str) -> Method:
    """Return a method by its name, or its variant by ``NAME:VARIANT``.

    User-defined methods are found by their registered name, or as ``FILE.py:FUNCTION``. The file is
    imported, and its folder is appended to ``sys.path``.

    Raises
    ------
    InputError
        If no method or variant has that name, or the file does not exist or lacks the function.
    UserMethodError
        If the file of a user-defined method raises an exception when it is imported.

    Examples
    --------
    >>> method("rotor").recomputes
    True
    >>> method("dtr:local").variant
    'local'
    """
    base_name, colon, variant = name.partition(":")
    entry = METHODS.get(base_name)
    if entry is None:
        user_method = find_user_method(name)
        if user_method is None:
            expected_names = ", ".join((*METHODS, *registered_names()))
            raise InputError(
                f"method {name!r}: expected one of {expected_names}, or FILE.py:FUNCTION"
            )
        return user_method
    if not colon:
        return entry
    if variant not in entry.variants:
        expected_names = (
            ", ".join(f"{base_name}:{variant_name}" for variant_name in entry.variants) or "none"
        )
        raise InputError(
            f"method {name!r}: expected {base_name} or one of its variants ({expected_names})"
        )
    return replace(entry, name=name, variant=variant)
