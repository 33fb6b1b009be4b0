"""The scenarios, by subject. Importing this package enters all of them into the list."""

from tieredckpt.testing.dcp.scenarios import (
    asynchronous,
    calls,
    deaths,
    failures,
    groups,
    parallel,
    sharding,
    values,
)

__all__ = [
    "asynchronous",
    "calls",
    "deaths",
    "failures",
    "groups",
    "parallel",
    "sharding",
    "values",
]
