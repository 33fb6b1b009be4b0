"""The configuration's parsers against anything."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from tieredckpt.config.reader import parse_yaml, to_yaml
from tieredckpt.config.schema import TOP_KEYS, load_config
from tieredckpt.config.units import (
    DURATION_S_MAX,
    EVERY_STEPS_MAX,
    SIZE_BYTES_MAX,
    Every,
    format_duration,
    format_rate,
    format_size,
    parse_duration,
    parse_every,
    parse_rate,
    parse_size,
)
from tieredckpt.errors import ConfigError


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


@given(st.integers(1, SIZE_BYTES_MAX))
def test_rates_round_trip(bytes_per_s: int) -> None:
    assert parse_rate(format_rate(bytes_per_s)) == bytes_per_s
    assert parse_rate(format_size(bytes_per_s)) == bytes_per_s


@given(durations)
def test_durations_round_trip(duration_s: float) -> None:
    assert parse_duration(format_duration(duration_s)) == duration_s
    assert parse_duration(duration_s) == duration_s


@given(everies)
def test_schedules_round_trip(every: Every) -> None:
    assert parse_every(str(every)) == every


ports = st.integers(1, 65535)
hosts = (
    st.from_regex(r"[a-z][a-z0-9-]{0,20}(\.[a-z][a-z0-9-]{0,20}){0,2}", fullmatch=True)
    | st.ip_addresses(v=4).map(str)
    | st.ip_addresses(v=6).map("[{}]".format)
)
addresses = st.tuples(hosts, ports).map(lambda pair: f"{pair[0]}:{pair[1]}") | hosts
paths = names.map("/run/".__add__)
networks = st.one_of(
    st.tuples(st.just("interface"), st.from_regex(r"[a-z][a-z0-9]{0,14}", fullmatch=True)),
    st.tuples(st.just("cidr"), st.ip_addresses().map(str)),
)


@st.composite
def host_keys(draw: st.DrawFn) -> dict[str, object]:
    """The sections about other hosts, valid together."""
    secret = draw(
        st.sampled_from([{"token_file": "/run/token"}, {"token_env": "TOKEN"}])
        | st.fixed_dictionaries({"tls": st.fixed_dictionaries(
            {"cert": paths, "key": paths, "ca": paths}
        )})
    )  # fmt: skip
    rail, value = draw(networks)
    return {
        "discovery": draw(
            st.just("torch")
            | addresses.map(lambda name: {"dns": name})
            | st.lists(hosts, min_size=1, max_size=4, unique_by=str.lower).map(
                lambda found: {"static": [f"{each}:{80 + i}" for i, each in enumerate(found)]}
            )
        ),
        "security": secret,
        "network": {
            rail: draw(st.sampled_from([value, [value], None])),
            "port": draw(st.none() | ports),
        },
        "labels": draw(
            st.dictionaries(
                st.from_regex(r"[a-z0-9][a-z0-9._-]{0,20}", fullmatch=True),
                names | st.integers(0, 10**6) | st.none(),
                max_size=8,
            )
        ),
    }


seconds = st.integers(60, 3600).map(lambda s: f"{s} s")
steps_or_time = everies.filter(lambda every: every != Every()).map(str)
keeps = st.fixed_dictionaries(
    {"last": st.integers(1, 1_000_000)},
    optional={
        "every": steps_or_time,
        "max_age": st.integers(1, 10**6),
        "max_bytes": st.integers(1, SIZE_BYTES_MAX),
        "best": st.fixed_dictionaries(
            {"metric": names, "mode": st.sampled_from(["min", "max"])},
            optional={"n": st.integers(1, 100)},
        ),
    },
)
common_keys: dict[str, st.SearchStrategy[object]] = {
    "every": everies.map(str),
    "keep": keeps | st.sampled_from([None, {}, "all"]),
    "on_pressure": st.sampled_from(["drop_oldest_queued", "keep"]),
    "lag_alarm": steps_or_time,
}
shared_keys: dict[str, st.SearchStrategy[object]] = {
    "takeover_after": seconds, "delete_delay": seconds, "sweep_after": seconds,
}  # fmt: skip
object_keys: dict[str, st.SearchStrategy[object]] = {
    "endpoint": names.map("https://".__add__),
    "region": names,
    "anonymous": st.booleans(),
    "path_style": st.booleans(),
    "allow_http": st.booleans(),
    "ca": paths,
    "concurrency": st.integers(1, 128),
    "part_size": st.integers(5 << 20, 1 << 30),
    "bandwidth": st.integers(1 << 20, SIZE_BYTES_MAX),
    "storage_class": names,
    "sse": st.just({"type": "s3"}) | st.fixed_dictionaries({"type": st.just("kms"), "key": names}),
    "timeout": seconds,
    "retry_for": seconds,
}


@st.composite
def tiers(draw: st.DrawFn, name: str, number: int) -> dict[str, object]:
    """One tier, with any keys that its URL may have."""
    scheme = draw(st.sampled_from(["file:///", "s3://bucket-", "gs://bucket-", "sftp://"]))
    is_file = scheme == "file:///"
    scope = draw(st.sampled_from(["host", "shared"])) if is_file else "shared"
    allowed = dict(common_keys)
    if scope == "shared":
        allowed |= shared_keys
    if not is_file:
        allowed |= object_keys
    found = {"name": name, "url": f"{scheme}b{number}/{draw(names)}", "scope": scope}
    return found | draw(st.fixed_dictionaries({}, optional=allowed))


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
            "replicas": draw(st.none() | st.integers(1, 64)),
            "require_replicas": draw(st.none() | st.booleans()),
            "replication_bandwidth": draw(st.none() | st.integers(1 << 20, SIZE_BYTES_MAX)),
        },
        "save": {"ack": draw(st.sampled_from(["memory", "replicated"]))},
        "tiers": [draw(tiers(name, number)) for number, name in enumerate(tier_names)],
        "agent": {
            "runtime_dir": draw(st.none() | names.map("/run/".__add__)),
            "start": draw(st.sampled_from(["auto", "never"])),
            "idle_timeout": draw(st.none() | st.integers(1000, 10**9).map(lambda ms: ms / 1000)),
        },
    } | draw(host_keys())


@given(configurations())
def test_effective_is_the_same_configuration(source: dict[str, object]) -> None:
    config = load_config(source, {})
    effective = config.effective()
    assert load_config(effective, {}) == config
    assert parse_yaml(to_yaml(effective), name="file").tree == effective, (
        "as config check prints it"
    )
    assert config.namespace == source["namespace"]


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
keys = st.sampled_from(
    [*TOP_KEYS, "name", "url", "every", "keep", "last", "wait", "capacity", "start", "timeout",
     "static", "dns", "interface", "cidr", "port", "token_file", "token_env", "tls", "cert", "ack"]
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


printable = st.text().filter(str.isprintable)
numbers = st.from_regex(r"[-+]?[0-9]{0,3}[.:_eE]?[-+]?[0-9]{0,3}", fullmatch=True)
words = st.sampled_from(
    ["null", "~", "TRUE", "no", "on", "y", "=", "<<", "-", "? a", "a: b", "a #b"]
)
plain = st.none() | st.booleans() | st.integers(-(10**18), 10**18) | printable | numbers | words
plain_trees = st.recursive(
    plain, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=10,
)  # fmt: skip


@given(st.dictionaries(names, plain_trees, min_size=1, max_size=4))
def test_what_is_written_is_read_as_the_same(tree: dict[str, object]) -> None:
    assert parse_yaml(to_yaml(tree), name="file").tree == tree


@given(st.dictionaries(variables, yaml_text, max_size=3))
def test_any_environment_is_applied_or_refused(environ: dict[str, str]) -> None:
    source = {"tiers": [{"name": "a", "url": "file:///a"}], "memory": {"wait": 1}}
    assert refusal(lambda: load_config(source, environ)).isprintable()
