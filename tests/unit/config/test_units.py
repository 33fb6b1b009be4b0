"""Sizes, durations and schedules as people write them."""

from __future__ import annotations

import pytest

from tieredckpt.config.units import (
    Every,
    approximate_size,
    format_duration,
    format_size,
    one_of,
    parse_duration,
    parse_every,
    parse_size,
    show,
)


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("64GiB", 64 << 30),
        (" 64 GiB ", 64 << 30),
        ("1.5GiB", 3 << 29),
        ("64GB", 64 * 10**9),
        ("1kB", 1000),
        ("1KB", 1000),
        ("4096", 4096),
        (8192, 8192),
        ("4096 B", 4096),
        (1024.0, 1024),
        ("1EiB", 1 << 60),
        ("1152921504606846975B", (1 << 60) - 1),
        ("0.000000001 EB", 10**9),
    ],
)
def test_size(text: object, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("64G", '"64G" is not a size: there is no unit "G"; did you mean "GiB" or "GB"?'),
        ("64Gi", '"64Gi" is not a size: there is no unit "Gi"; did you mean "GiB"?'),
        ("64gb", '"64gb" is not a size: there is no unit "gb"; did you mean "GB"?'),
        (
            "64 parsecs",
            '"64 parsecs" is not a size: there is no unit "parsecs"; write a number and a unit, '
            'as in "64GiB" (1024^3), "64GB" (1000^3) or "512MiB"',
        ),
        ("2EiB", '"2EiB" is out of range; allowed are 1B to 1EiB'),
        (-1, "-1 is out of range (without a unit it is bytes); allowed are 1B to 1EiB"),
    ],
)
def test_size_messages(value: object, message: str) -> None:
    with pytest.raises(ValueError) as refused:
        parse_size(value)
    assert str(refused.value) == message


@pytest.mark.parametrize(
    "value",
    [True, None, [], {}, "", "GiB", "-3GiB", "1e9", "0x10", "1_000", "1,5GiB", "9" * 19, 0.5,
     float("nan"), float("inf"), 1e300, "\u0661GiB", "½GiB", b"1GiB"],
)  # fmt: skip
def test_not_a_size(value: object) -> None:
    with pytest.raises(ValueError):
        parse_size(value)


@pytest.mark.parametrize(
    ("text", "duration_s"),
    [("500 ms", 0.5), ("30s", 30.0), ("10 min", 600.0), ("1.5 h", 5400.0), ("2 days", 172800.0),
     (3, 3.0), (0.25, 0.25), ("0.0001 s", 0.0), ("0", 0.0)],
)  # fmt: skip
def test_duration(text: object, duration_s: float) -> None:
    assert parse_duration(text) == duration_s


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("10 m", '"10 m" is not a duration: there is no unit "m"; write "min" for minutes'),
        (-1, "-1 is out of range; allowed are 0 s to 366 d"),
        (
            "soon",
            '"soon" is not a duration; write a number and a unit, as in "500 ms", "30 s", '
            '"10 min", "2 h" or "1 d"',
        ),
    ],
)
def test_duration_messages(value: object, message: str) -> None:
    with pytest.raises(ValueError) as refused:
        parse_duration(value)
    assert str(refused.value) == message


@pytest.mark.parametrize(
    ("text", "every", "written"),
    [
        ("10 steps", Every(steps=10), "10 steps"),
        ("1 step", Every(steps=1), "1 step"),
        ("100steps", Every(steps=100), "100 steps"),
        ("30 min", Every(seconds=1800.0), "30 min"),
        ("0.5 h", Every(seconds=1800.0), "30 min"),
        ("save", Every(), "save"),
        ("Save", Every(), "save"),
    ],
)
def test_every(text: str, every: Every, written: str) -> None:
    assert parse_every(text) == every
    assert str(every) == written


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("10 stepz", '"10 stepz" is not a schedule; write "10 steps", "30 min" or "save"'),
        (10, '10 is not a schedule: 10 of what? Write "10 steps" or "10 min"'),
        ("10", '"10" is not a schedule: 10 of what? Write "10 steps" or "10 min"'),
        (
            "10 m",
            '"10 m" is not a schedule; write "10 steps", "30 min" or "save" ("min" for minutes)',
        ),
        (
            "0 steps",
            '"0 steps" is out of range; allowed are integer numbers of steps, 1 to 1000000000000',
        ),
        ("0 s", '"0 s" is out of range; write "save" for every save'),
        ([], 'a list is not a schedule; write "10 steps", "30 min" or "save"'),
    ],
)
def test_every_messages(value: object, message: str) -> None:
    with pytest.raises(ValueError) as refused:
        parse_every(value)
    assert str(refused.value) == message


def test_formats() -> None:
    assert [format_size(n) for n in (1, 1023, 1024, 3 << 29, 64 << 30, 0)] == [
        "1B", "1023B", "1KiB", "1536MiB", "64GiB", "0B",
    ]  # fmt: skip
    assert [format_duration(s) for s in (0.0, 0.25, 1.0, 90.0, 5400.0, 86400.0)] == [
        "0 s", "250 ms", "1 s", "90 s", "90 min", "1 d",
    ]  # fmt: skip
    assert [approximate_size(n) for n in (5, 1 << 20, 1342177280)] == ["5 B", "1 MiB", "1.25 GiB"]


def test_show_is_short_and_on_one_line() -> None:
    assert show("a\nb\x00") == '"a\\nb\\x00"'
    assert len(show("x" * 10**6)) < 80
    assert show(10**5000) == "a value of type int"
    assert show(None) == "nothing"
    assert show(object()) == "a value of type object"
    assert one_of(["a"]) == '"a"'
    assert one_of("abc") == '"a", "b" or "c"'
