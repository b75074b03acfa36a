"""A model file whose functions store a table in several kinds of objects."""

import functools

import torch


def made(size):
    """Return a table."""
    return torch.arange(1.0, size + 1)


bounded = functools.lru_cache(maxsize=4)(made)
unbounded = functools.cache(made)
TABLES = {}
LISTED = []
NAME = None


class Holder:
    """Holds a table for all instances, and one for each."""

    table = None


OBJECT = Holder()


def in_a_dictionary(size):
    """Store the table in a dictionary under its size."""
    if size not in TABLES:
        TABLES[size] = made(size)
    return TABLES[size]


def in_a_tuple(size):
    """Store a tuple of two tables under one key."""
    if "both" not in TABLES:
        TABLES["both"] = (made(size), made(size) + 1)
    return TABLES["both"][1]


def in_a_list(size):
    """Store the table in a list."""
    if not LISTED:
        LISTED.append(made(size))
    return LISTED[0]


def in_a_name(size):
    """Store the table in a global variable."""
    global NAME  # noqa: PLW0603 - it is what some models do
    if NAME is None:
        NAME = made(size)
    return NAME


def in_an_object(size):
    """Store the table in an object that no module refers to."""
    if OBJECT.table is None:
        OBJECT.table = made(size)
    return OBJECT.table


def in_a_class(size):
    """Store the table in a class."""
    if Holder.table is None:
        Holder.table = made(size)
    return Holder.table
