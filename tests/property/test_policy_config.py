"""The configuration's parsers against anything."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from tieredckpt.errors import ConfigError
from tieredckpt.policy.config import TOP_KEYS, load_config
from tieredckpt.policy.config_source import parse_yaml
from tieredckpt.policy.units import (
    DURATION_S_MAX,
    EVERY_STEPS_MAX,
    SIZE_BYTES_MAX,
    Every,
    format_duration,
    format_size,
    parse_duration,
    parse_every,
    parse_size,
)


def refusal(load: Callable[[], object]) -> str:
    """The text of the ConfigError that ``load`` raises, "" if it raises nothing."""
    try:
        load()
    except ConfigError as error:
        return str(error)
    return ""


durations = st.integers(1, int(DURATION_S_MAX * 1000)).map(lambda ms: ms / 1000)
everies = st.one_of(
    st.just(Every()),
    st.integers(1, EVERY_STEPS_MAX).map(lambda n: Every(steps=n)),
    durations.map(lambda s: Every(seconds=s)),
)
names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", fullmatch=True)


@given(st.integers(1, SIZE_BYTES_MAX))
def test_sizes_round_trip(size_bytes: int) -> None:
    assert parse_size(format_size(size_bytes)) == size_bytes


@given(durations)
def test_durations_round_trip(duration_s: float) -> None:
    assert parse_duration(format_duration(duration_s)) == duration_s
    assert parse_duration(duration_s) == duration_s


@given(everies)
def test_schedules_round_trip(every: Every) -> None:
    assert parse_every(str(every)) == every


@st.composite
def configurations(draw: st.DrawFn) -> dict[str, object]:
    tier_names = draw(
        st.lists(names.map("t".__add__).map(lambda n: n[:128]), max_size=4, unique=True)
    )
    return {
        "namespace": draw(st.none() | names),
        "memory": {
            "capacity": draw(st.none() | st.integers(2 << 20, SIZE_BYTES_MAX)),
            "keep": {"last": draw(st.integers(1, 100))},
            "wait": draw(st.integers(0, 3_600_000).map(lambda ms: f"{ms} ms")),
        },
        "tiers": [
            {
                "name": name,
                "url": f"file:///{number}/{draw(names)}",
                "scope": draw(st.sampled_from(["host", "shared"])),
                "every": str(draw(everies)),
                "keep": {"last": draw(st.integers(1, 1_000_000))},
            }
            for number, name in enumerate(tier_names)
        ],
        "agent": {
            "runtime_dir": draw(st.none() | names.map("/run/".__add__)),
            "start": draw(st.sampled_from(["auto", "never"])),
            "idle_timeout": draw(st.none() | st.integers(1000, 10**9).map(lambda ms: ms / 1000)),
        },
    }


@given(configurations())
def test_effective_is_the_same_configuration(source: dict[str, object]) -> None:
    config = load_config(source, {})
    assert load_config(config.effective(), {}) == config
    assert config.namespace == source["namespace"]


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
keys = st.sampled_from(
    [*TOP_KEYS, "name", "url", "every", "keep", "last", "wait", "capacity", "start", "timeout"]
) | st.text(max_size=5)  # fmt: skip
trees = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=4)
)


@given(st.dictionaries(keys, trees, max_size=4))
def test_any_dict_is_a_configuration_or_refused(source: dict[str, object]) -> None:
    assert refusal(lambda: load_config(source, {})).isprintable()


yaml_text = st.text(alphabet=st.sampled_from(list("ab1.:-[]{},&*!|>?#%@`'\"~<= \n\t\x00\xa0é")))


@given(yaml_text | st.text())
def test_any_text_is_yaml_or_refused(text: str) -> None:
    assert "\n" not in refusal(lambda: parse_yaml(text, name="file"))


variables = st.lists(
    st.sampled_from(["MEMORY", "TIERS", "0", "KEEP", "LAST", "NAMESPACE", "X", ""]),
    min_size=1,
    max_size=4,
).map(lambda parts: "TIEREDCKPT_" + "__".join(parts))


@given(st.dictionaries(variables, yaml_text, max_size=3))
def test_any_environment_is_applied_or_refused(environ: dict[str, str]) -> None:
    source = {"tiers": [{"name": "a", "url": "file:///a"}], "memory": {"wait": 1}}
    assert refusal(lambda: load_config(source, environ)).isprintable()
