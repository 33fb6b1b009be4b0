"""What happens to hosts in each case, and which cases there are."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from tests.support.faults import ForkedAgent, Trainer
from tests.support.host_bench import DEADLINE_S, SILENT, HostBench, HostCase
from tests.support.hosts import DATA, Host, needs_links
from tieredckpt.errors import NoRecoverableCheckpointError, RankError

RANK_STAGES = (
    "save.reserve.before", "save.copy", "save.seal.before", "save.seal.after",
)  # fmt: skip
"""Of any rank."""
LEADER_STAGES = ("save.commit.before", "save.commit.after")
"""Of rank 0."""
AGENT_STAGES = ("agent.seal.before_label", "agent.seal.after_label", "agent.ingest.before_manifest")
"""Of any host but the leader."""
LEADER_AGENT_STAGES = (
    "agent.commit.before_manifest", "agent.commit.after_manifest", "agent.push.before_holders",
    "agent.push.after_holders",
)  # fmt: skip
SAVE_STAGES = (*RANK_STAGES, *LEADER_STAGES, *AGENT_STAGES, *LEADER_AGENT_STAGES)


LINKS = ("link cut", "no carrier", "parted", "slow", "late", "lossy", "stalled", "half-open")
NIGHTLY_SEEDS = 10
GATE = (
    ("save", "host lost", "agent.commit.before_manifest"), ("replication", "host lost", "holder"),
    ("idle", "two hosts lost", "replicas 2"), ("load", "host lost", "donor"),
    ("save", "half-open", "proxy"),
)  # fmt: skip
"""What `make test` runs: hosts lost where a save, its copies and a load are at stake, two of them
lost at once, and the worst link, which is silent.
"""
FULL = (
    ("save", "host lost", "save.copy"), ("idle", "rack lost", "labels"),
    ("idle", "host rebooted", "empty"), ("replication", "agent killed", "holder"),
    ("save", "link cut", "data"), ("replication", "parted", "two hosts"),
    ("replication", "stalled", "proxy"), ("load", "hosts late", "both holders"),
)  # fmt: skip
"""What `make test-all` runs, too. What a link only makes slower is left to the night."""


def kinds() -> list[tuple[str, str, str]]:
    """All (operation, fault, stage)."""
    found = [("save", "host lost", stage) for stage in SAVE_STAGES]
    found += [("first save", "host lost", stage) for stage in ("save.copy", "save.commit.after")]
    found += [
        ("replication", "host lost", "holder"),
        ("replication", "host lost", "at random"),
        ("replication", "host lost", "leader"),
        ("idle", "host lost", "leader"),
        ("idle", "host lost", "other"),
        ("idle", "two hosts lost", "replicas 2"),
        ("idle", "rack lost", "labels"),
        ("idle", "host rebooted", "empty"),
        ("load", "host lost", "donor"),
        ("load", "hosts late", "both holders"),
        ("replication", "agent killed", "holder"),
        ("replication", "agent killed", "owner"),
    ]
    where = {"link cut": "data", "no carrier": "data", "parted": "two hosts"}
    found += [
        (operation, fault, where.get(fault, "proxy"))
        for operation in ("save", "replication")
        for fault in LINKS
    ]
    return found


def chosen() -> tuple[list[HostCase], list[HostCase], list[HostCase]]:
    """What the environment asks for: the cases of `make test`, of `make test-all`, of the night."""
    if text := os.environ.get("HOSTS_CASE"):
        return [HostCase.parse(each) for each in text.split(",")], [], []
    first = int(os.environ.get("HOSTS_SEED", "0"))
    seeds = range(first, first + NIGHTLY_SEEDS)
    gate, full = ([HostCase(*kind, first) for kind in some] for some in (GATE, FULL))
    every = (HostCase(*kind, seed) for seed in seeds for kind in kinds())
    return gate, full, [case for case in every if case not in gate + full]


def run_case(case: HostCase, folder: Path) -> None:
    """Raises AssertionError, with the agents' logs, if the promise is broken."""
    if case.fault in LINKS:
        needs_links()
    bench = HostBench(
        case,
        folder,
        racks=2 if case.stage == "labels" else 0,
        replicas=2 if case.stage == "replicas 2" else 1,
        proxied=case.stage == "proxy",
    )
    with bench:
        action: Callable[[HostBench], None] = {
            "host lost": host_lost,
            "two hosts lost": hosts_lost,
            "rack lost": rack_lost,
            "host rebooted": host_rebooted,
            "hosts late": hosts_late,
            "agent killed": agent_killed,
        }.get(case.fault, link_spoiled)
        action(bench)


# --- hosts ----------------------------------------------------------------------------------------


def victim_of(bench: HostBench) -> tuple[Host, Trainer | ForkedAgent]:
    """The host of a stage, and the process that reaches it."""
    stage, hosts = bench.case.stage, bench.job.hosts
    if stage in LEADER_STAGES or stage in LEADER_AGENT_STAGES:
        host = hosts[0]
    elif stage in AGENT_STAGES:
        host = bench.chance.choice(hosts[1:])
    else:
        host = bench.chance.choice(hosts)
    if stage.startswith("agent."):
        assert host.agent is not None
        return host, host.agent
    return host, bench.job.on(host)


def host_lost(bench: HostBench) -> None:
    """One host, at a stage of a save, of replication, of a load, or when all is quiet."""
    operation = bench.case.operation
    if operation == "load":
        donor_lost(bench)
        return
    if operation == "replication":
        bench.bandwidth = "4MiB/s"
    bench.prepare(0 if operation == "first save" else None)
    if operation == "idle":
        hosts = bench.job.hosts
        leader = bench.case.stage == "leader"
        bench.lose(hosts[0] if leader else bench.chance.choice(hosts[1:]))
    elif operation == "replication":
        lost_while_replicating(bench)
    else:
        host, process = victim_of(bench)
        pid = bench.hold(process, bench.case.stage)
        step = bench.begin_save()
        bench.wait_stopped(pid)
        bench.ledger.add(step, bench.job.seed, None)
        bench.lose(host)
    loaded = bench.restart()
    if not isinstance(loaded, BaseException):
        bench.go_on()


def _who_stops(bench: HostBench) -> Host:
    """A holder stops where it copies the next save, perhaps before that is answered: then not the
    one that the first rank commits with.
    """
    hosts = bench.job.hosts
    return bench.chance.choice(hosts[1:] if bench.case.stage == "holder" else hosts)


def lost_while_replicating(bench: HostBench) -> None:
    hosts = bench.job.hosts
    stage = bench.case.stage
    host = hosts[0] if stage == "leader" else _who_stops(bench)
    if stage == "holder":
        assert host.agent is not None
        pid = bench.hold(host.agent, "agent.replica.block")
        bench.save()
        bench.wait_stopped(pid)
    else:
        for _ in range(bench.chance.randrange(1, 3)):
            bench.save()
        time.sleep(bench.chance.uniform(0, 1.0))  # the moment is the case
    bench.lose(host)


def donor_lost(bench: HostBench) -> None:
    """A host that only has copies and is no member dies while the others read from it."""
    bench.prepare()
    bench.job.end()
    donor = bench.cluster.hosts.pop()
    bench.start(bench.cluster.hosts)
    reader = bench.chance.choice(bench.job.trainers)
    pid = bench.hold(reader, "load.read.before")
    bench.job.start("load", seeds=bench.ledger.seeds())
    bench.wait_stopped(pid)
    donor.kill(silent=bench.chance.random() < SILENT)
    bench.note(f"{donor.name} is lost")
    bench.let_go(pid)
    found = bench.job.outcomes(DEADLINE_S)
    for each in found:
        assert getattr(each, "wrong", None) == [], f"{each!r}: {bench}"
        assert each.step == bench.step, f"{each!r}: {bench}"
    bench.go_on()


def hosts_lost(bench: HostBench) -> None:
    """Any two of four at once, with two replicas."""
    bench.prepare()
    bench.lose(*bench.chance.sample(bench.job.hosts, 2))
    bench.restart()
    bench.go_on()


def rack_lost(bench: HostBench) -> None:
    """All hosts of one of two racks."""
    bench.prepare()
    rack = bench.chance.choice(("r1", "r2"))
    bench.lose(*(host for host in bench.job.hosts if host.labels["rack"] == rack))
    bench.restart("replaced")
    bench.go_on()


def host_rebooted(bench: HostBench) -> None:
    """Its name is the same, its memory is empty: copies that it had count no more."""
    bench.prepare()
    host, other = bench.chance.sample(bench.job.hosts, 2)
    bench.lose(host)
    bench.lost.clear()
    host.boot()
    loaded = bench.restart("same")
    bench.repaired(loaded.step)
    bench.lose(other)
    bench.restart("replaced")
    bench.go_on()


def hosts_late(bench: HostBench) -> None:
    """All who have some segment are down when the job starts elsewhere: a load that does not wait
    for them names them, and one that waits finds it.
    """
    bench.prepare()
    owner, holders = bench.job.trainers[0].placed(bench.step)[0]
    bench.job.end()
    down = [host for host in bench.cluster.hosts if host.name in {owner, *holders}]
    for host in down:
        host.stop_agent()
    rest = [host for host in bench.cluster.hosts if host not in down]
    members = [*rest, *(bench.cluster.add() for _ in down)]
    bench.start(members, wait_s=0.0)
    bench.job.start("load", seeds=bench.ledger.seeds())
    found = bench.job.outcomes(DEADLINE_S)
    for each in found:
        assert isinstance(each, NoRecoverableCheckpointError | RankError), f"{found}: {bench}"
    assert any(host.name in str(each) for host in down for each in found), f"{found}: {bench}"
    bench.job.end()
    bench.start(members, wait_s=DEADLINE_S)
    step = bench.step
    timer = threading.Timer(2.0, down[-1].start_agent)  # while the load waits, or before it
    timer.start()
    try:
        loaded = bench.load()
    finally:
        timer.join()
    assert loaded.step == step, f"{loaded}: {bench}"
    bench.save(replicated=True)


def agent_killed(bench: HostBench) -> None:
    """In the middle of a transfer, on one of its sides; the transfer is finished all the same."""
    bench.bandwidth = "8MiB/s"
    bench.prepare()
    host = _who_stops(bench)
    assert host.agent is not None
    if bench.case.stage == "holder":
        pid = bench.hold(host.agent, "agent.replica.block")
        step = bench.save()
        bench.wait_stopped(pid)
    else:
        step = bench.save()
        time.sleep(bench.chance.uniform(0, 0.3))  # the moment is the case
    host.start_agent()
    bench.note(f"agent of {host.name} starts again")
    bench.replicate(step)
    bench.lose(bench.chance.choice(bench.job.hosts))
    bench.restart()
    bench.go_on()


# --- links ----------------------------------------------------------------------------------------


def link_spoiled(bench: HostBench) -> None:
    """The agents' network fails for a while, the job's own does not: no save fails for that."""
    if bench.case.operation == "replication":
        bench.bandwidth = "8MiB/s"
    bench.prepare()
    host, other = bench.job.hosts[-1], bench.chance.choice(bench.job.hosts[:-1])
    if bench.case.stage != "proxy":
        host = bench.chance.choice([each for each in bench.job.hosts if each is not other])
    if bench.case.operation == "save":
        spoil(bench, host, other)
        step = bench.save()
    else:
        step = bench.save()
        spoil(bench, host, other)
        time.sleep(bench.chance.uniform(0, 0.5))  # how long it lasts is the case
    if bench.chance.random() < 0.5:
        step = bench.save()
    if bench.case.fault != "slow":
        heal(bench, host, other)
    bench.replicate(step)
    if bench.case.fault == "slow":
        heal(bench, host, other)
    bench.lose(bench.chance.choice(bench.job.hosts))
    bench.restart()
    bench.go_on()


def spoil(bench: HostBench, host: Host, other: Host) -> None:
    proxy, fault = bench.proxy, bench.case.fault
    bench.note(f"{fault}: {host.name}")
    if fault in ("link cut", "no carrier"):
        host.cut(DATA, noticed=fault == "no carrier")
    elif fault == "parted":
        host.part(other)
    else:
        assert proxy is not None
        if fault == "slow":
            proxy.bytes_per_s = 2e6
        elif fault == "late":
            proxy.latency_s = bench.chance.uniform(0.02, 0.2)
        elif fault == "lossy":
            proxy.cut_after_bytes = (1000, 2_000_000)
            proxy.cut()
        elif fault == "stalled":
            proxy.stall()
        else:
            proxy.half_open()
            proxy.refusing = True


def heal(bench: HostBench, host: Host, other: Host) -> None:
    if bench.proxy is not None:
        bench.proxy.heal()
    elif bench.case.fault == "parted":
        host.part(other, parted=False)
    else:
        host.heal(DATA)
    bench.note("healed")
