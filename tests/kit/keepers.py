"""The file of a model whose functions keep a table."""

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
    """Holds a table for all its instances, and one for itself."""

    table = None


OBJECT = Holder()


def in_a_dictionary(size):
    """Keep the table under its size."""
    if size not in TABLES:
        TABLES[size] = made(size)
    return TABLES[size]


def in_a_tuple(size):
    """Keep two tables under one key."""
    if "both" not in TABLES:
        TABLES["both"] = (made(size), made(size) + 1)
    return TABLES["both"][1]


def in_a_list(size):
    """Keep the table in a list."""
    if not LISTED:
        LISTED.append(made(size))
    return LISTED[0]


def in_a_name(size):
    """Keep the table under a name of the file."""
    global NAME  # noqa: PLW0603 - it is what some models do
    if NAME is None:
        NAME = made(size)
    return NAME


def in_an_object(size):
    """Keep the table in an object that no module reaches."""
    if OBJECT.table is None:
        OBJECT.table = made(size)
    return OBJECT.table


def in_a_class(size):
    """Keep the table in a class."""
    if Holder.table is None:
        Holder.table = made(size)
    return Holder.table
