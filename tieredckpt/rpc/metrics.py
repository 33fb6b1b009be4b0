"""An agent's status as metrics in Prometheus's text format.

A pure function of :class:`.messages.Status`: nothing is counted here and nothing is kept between
two calls. ``docs/operate/metrics.md`` explains the metrics and the alarms.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Generic, Literal, NamedTuple, TypeVar

from tieredckpt.rpc.messages import agent as m

if TYPE_CHECKING:
    from prometheus_client import Metric

METRICS_PATH = "/metrics"
TEXT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""The classic text format, which every scraper reads."""

_Of = TypeVar("_Of")
_Kind = Literal["gauge", "counter"]


class _Row(NamedTuple, Generic[_Of]):
    """One family: ``value`` of each object of a kind; None: no sample."""

    name: str
    """Without the ``_total`` of a counter."""
    text: str
    value: Callable[[_Of], float | None]
    kind: _Kind = "gauge"


def _members(namespace: m.NamespaceStatus) -> list[m.PeerState]:
    return [each for each in namespace.peers if each.member]


def _reached(namespace: m.NamespaceStatus) -> list[m.PeerState]:
    return [each for each in _members(namespace) if each.reachable]


_AGENT: tuple[_Row[m.Status], ...] = (
    _Row("uptime_seconds", "Since the agent started.", lambda s: s.health.uptime_s),
    _Row("resident_memory_bytes", "Of the agent's process.", lambda s: s.rss_bytes),
    _Row("tmpfs_size_bytes", "Of the file system below the runtime folder.",
         lambda s: s.shm_total_bytes),
    _Row("tmpfs_free_bytes", "Of it, free.", lambda s: s.shm_free_bytes),
    _Row("namespaces", "Namespaces that the agent knows.", lambda s: len(s.namespaces)),
)  # fmt: skip

_NAMESPACE: tuple[_Row[m.NamespaceStatus], ...] = (
    _Row("memory_capacity_bytes", "What memory.capacity allows; 0: not opened since the start.",
         lambda n: n.capacity_bytes),
    _Row("memory_slot_bytes", "Taken by slot files, free ones included.", lambda n: n.slot_bytes),
    _Row("data_cache_bytes", "Batches in the data cache.", lambda n: n.data_bytes),
    _Row("memory_slots", "Slot files.", lambda n: n.slots),
    _Row("memory_free_slots", "Of them, free.", lambda n: n.free_slots),
    _Row("memory_checkpoints", "Checkpoints in memory.", lambda n: n.checkpoints),
    _Row("memory_newest_step", "Newest step in memory.", lambda n: n.newest_step),
    _Row("sessions", "Trainer processes that have the namespace open.", lambda n: n.sessions),
    _Row("attempt", "Number of the newest attempt (start of training).", lambda n: n.attempt),
    _Row("skipped_saves", "Saves without a checkpoint, as sessions have reported them.",
         lambda n: n.skipped_saves, "counter"),
    _Row("peers", "Other hosts that belong to the job now.", lambda n: len(_members(n))),
    _Row("peers_reachable", "Of them, those that answer.", lambda n: len(_reached(n))),
    _Row("peers_rtt_max_seconds", "Of the reachable hosts of the job, the longest round trip.",
         lambda n: max((p.rtt_s for p in _reached(n) if p.rtt_s is not None), default=None)),
    _Row("peers_speed_min_bytes_per_second",
         "Of the reachable hosts of the job, the slowest one's by the last short probe.",
         lambda n: min(
             (p.bytes_per_s for p in _reached(n) if p.bytes_per_s is not None), default=None)),
)  # fmt: skip

_REPLICATION: tuple[_Row[m.ReplicationStatus], ...] = (
    _Row("replication_copies_wanted", "Copies on other hosts that are wanted.",
         lambda r: r.replicas),
    _Row("replication_copies_possible", "Of them, those that the number of hosts allows.",
         lambda r: r.possible),
    _Row("replication_newest_step", "Newest step of which all possible copies are there.",
         lambda r: r.newest_replicated_step),
    _Row("replication_lag_steps", "Steps that it is behind memory's newest.",
         lambda r: r.lag_steps),
    _Row("replication_active", "1 while a checkpoint is being replicated.",
         lambda r: r.active_save_id is not None),
    _Row("replication_failing", "1 while replication fails; status shows why.",
         lambda r: r.error is not None),
    _Row("replication_pulled_bytes", "Copied from other hosts since the agent started.",
         lambda r: r.pulled_bytes_total, "counter"),
    _Row("replication_pull_seconds", "Time that this took.",
         lambda r: r.pull_seconds_total, "counter"),
    _Row("replication_held_bytes", "Other hosts' segments in this host's memory.",
         lambda r: r.held_bytes),
)  # fmt: skip

_TIER: tuple[_Row[m.TierStatus], ...] = (
    _Row("tier_available", "0 while the tier cannot be used; status shows why.",
         lambda t: t.available),
    _Row("tier_alarm", "1 while the tier is behind by lag_alarm or more.", lambda t: t.alarm),
    _Row("tier_memory_full", "1 while there is no space for checkpoints that wait for the tier.",
         lambda t: t.memory_full),
    _Row("tier_lag_steps", "Steps that the newest one here is behind memory's newest.",
         lambda t: t.lag_steps),
    _Row("tier_lag_seconds", "The same in seconds of saving.", lambda t: t.lag_s),
    _Row("tier_lag_bytes", "This host's part of what waits or is being copied.",
         lambda t: t.lag_bytes),
    _Row("tier_newest_step", "Newest step in the tier.", lambda t: t.newest_step),
    _Row("tier_checkpoints", "Checkpoints in the tier.", lambda t: t.checkpoints),
    _Row("tier_stored_bytes", "Segments of these checkpoints, all hosts' in a shared tier.",
         lambda t: t.stored_bytes),
    _Row("tier_queue_length", "Checkpoints that wait to be copied.", lambda t: t.queued),
    _Row("tier_awaited_checkpoints", "Checkpoints that wait for other hosts' parts.",
         lambda t: t.awaited),
    _Row("tier_active", "1 while a checkpoint is being copied.",
         lambda t: t.active_save_id is not None),
    _Row("tier_deleting", "1 while retention deletes.", lambda t: t.retaining),
    _Row("tier_quarantined_copies", "Copies of segments here that were found damaged.",
         lambda t: t.quarantined),
    _Row("tier_dropped_checkpoints",
         "Shed, or deleted from memory before their turn, since the agent started.",
         lambda t: t.dropped_total, "counter"),
    _Row("tier_spilled_bytes", "Copied to the tier since the agent started.",
         lambda t: t.spilled_bytes_total, "counter"),
    _Row("tier_spill_seconds", "Time that this took.",
         lambda t: t.spill_seconds_total, "counter"),
)  # fmt: skip

PREFIX = "tieredckpt_"
_ID = re.compile(r"[0-9a-f]{32}")
_ERROR_CHARS_MAX = 200


def _families(
    rows: Iterable[_Row[_Of]], names: Sequence[str], things: Sequence[tuple[tuple[str, ...], _Of]]
) -> Iterator[Metric]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    for row in rows:
        make = CounterMetricFamily if row.kind == "counter" else GaugeMetricFamily
        family = make(PREFIX + row.name, row.text, labels=names)
        for labels, thing in things:
            if (value := row.value(thing)) is not None:
                family.add_metric([_text(each) for each in labels], float(value))
        if family.samples:
            yield family


def _text(label: str) -> str:
    """The label as valid UTF-8: a path with other bytes must not fail all metrics."""
    return label.encode("utf-8", "backslashreplace").decode("utf-8")


def _info(name: str, text: str, labels: Sequence[dict[str, str]]) -> Metric:
    from prometheus_client.core import InfoMetricFamily

    family = InfoMetricFamily(PREFIX + name, text, labels=())
    for each in labels:
        family.add_metric((), {key: _text(value) for key, value in each.items()})
    return family


def families(status: m.Status | None) -> Iterator[Metric]:
    """All metrics of ``status``; None: no agent answers, and ``tieredckpt_up`` is 0."""
    from prometheus_client.core import GaugeMetricFamily

    yield GaugeMetricFamily(PREFIX + "up", "1: the agent answers.", float(status is not None))
    if status is None:
        return
    health = status.health
    yield _info(
        "build", "The running agent's version.",
        [{"version": health.version, "api": str(health.api)}],
    )  # fmt: skip
    yield _info(
        "agent", "Which agent this is, and what its memory outlives.",
        [{
            "host": health.host_id, "pid": str(health.pid), "survives": status.survives,
            "runtime_dir": status.runtime_dir,
        }],
    )  # fmt: skip
    yield from _families(_AGENT, (), [((), status)])
    spaces = status.namespaces
    yield from _families(_NAMESPACE, ("namespace",), [((n.name,), n) for n in spaces])
    replicated = [((n.name,), n.replication) for n in spaces if n.replication is not None]
    yield from _families(_REPLICATION, ("namespace",), replicated)
    tiers = [((n.name, t.name), t) for n in spaces for t in n.tiers]
    if tiers:
        yield _info(
            "tier", "Whether a tier is this host's or shared by all.",
            [{"namespace": n, "tier": t.name, "scope": t.scope} for (n, _), t in tiers],
        )  # fmt: skip
    errors = [
        {"namespace": n, "tier": t.name, "error": _ID.sub("*", t.error)[:_ERROR_CHARS_MAX]}
        for (n, _), t in tiers
        if t.error is not None
    ]
    if errors:
        yield _info("tier_error", "Why a tier cannot be used now.", errors)
    yield from _families(_TIER, ("namespace", "tier"), tiers)


def exposition(status: m.Status | None) -> bytes:
    """All metrics of ``status`` in the text format (:data:`TEXT_TYPE`)."""
    # Imported at the first scrape: agents start without it.
    from prometheus_client import generate_latest
    from prometheus_client.registry import Collector, CollectorRegistry

    class Once(Collector):
        def collect(self) -> Iterator[Metric]:
            return families(status)

    registry = CollectorRegistry(auto_describe=False)  # of its own: the global one is not used
    registry.register(Once())
    return generate_latest(registry)
