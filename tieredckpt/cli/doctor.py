"""``tieredckpt doctor``: checks of the machine, the configuration, each tier, and the agent.

Each check has a state and, unless it is "ok", a fix. Nothing of a live job is changed: the
agent is asked for its status, and each tier is tried with two objects that are deleted again.
"""

from __future__ import annotations

import os
import resource
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import click
import msgspec

from tieredckpt.agent.tiers.place import TierPlace
from tieredckpt.cli.config import problems, tmpfs_of
from tieredckpt.cli.output import one_line, print_json, size
from tieredckpt.cli.sources import Place, moved_tiers, namespace_options
from tieredckpt.config.schema import Config
from tieredckpt.config.tiers import TierSpec
from tieredckpt.errors import ConfigError, TieredCkptError, TierUnavailableError
from tieredckpt.recovery.folders import ReadOnlyClient, in_daemon
from tieredckpt.recovery.other_hosts import OtherHosts
from tieredckpt.rpc.messages.agent import API_VERSION, NamespaceStatus, Status
from tieredckpt.rpc.messages.base import package_version
from tieredckpt.storage.backends.file import FileTier, folder_of_url
from tieredckpt.storage.backends.probe import FOLDERS, Probed, probe
from tieredckpt.storage.base import Scope, Tier
from tieredckpt.storage.file_io import set_direct
from tieredckpt.storage.headroom import headroom_of
from tieredckpt.storage.object.errors import NO_ANSWER

RETRY_S = 10.0
"""How long a failing store is retried here; the agent retries for ``retry_for``."""
TIER_S = 120.0
"""A tier that takes longer is reported as not answering: some clients have no deadline."""
FILES_MIN = 4096
"""Open files: a slot, a segment that is read and a connection take one each."""
SKEW_WARN_S, SKEW_MAX_S = 5.0, 900.0
"""S3 refuses signatures of a clock that is off by more than 15 minutes."""
APART_WARN_S = 1.0
"""Between two hosts. People compare their times; decisions do not (ARCHITECTURE, invariant 7)."""
HOSTS_AT_ONCE = 32
OPEN, CLOCK = "open", "clock"
PORT = "open its port to this host"
REPAIR = "repair the tier's folder or store, or correct its url in the configuration"

State = Literal["ok", "warn", "fail"]
COLOURS: Mapping[State, str] = {"ok": "green", "warn": "yellow", "fail": "red"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One check. ``fix`` is what to do; "" if it is ok."""

    check: str
    state: State
    found: str
    fix: str = ""


@click.command()
@namespace_options
def doctor(place: Place) -> None:
    """Check the machine, the configuration, every tier and the agent. Exit code 1 if one fails.

    Each tier is opened as the agent would, with this shell's credentials, and tried with two
    objects of 8 KiB that are deleted again. A job that runs is not disturbed.

    \b
    Examples:
      tieredckpt doctor
      tieredckpt doctor --config tieredckpt.yaml --json
    """
    findings = list(examine(place))
    failed = any(each.state == "fail" for each in findings)
    if place.as_json:
        print_json(ok=not failed, checks=[asdict(each) for each in findings])
    else:
        for each in findings:
            click.secho(f"{each.state:<5}", fg=COLOURS[each.state], nl=False)
            click.echo(f"{each.check}: {each.found}")
            if each.fix:
                click.echo(f"     fix: {each.fix}")
    click.get_current_context().exit(int(failed))


def examine(place: Place) -> Iterator[Finding]:
    """All checks, those that explain others first."""
    config, health, status = place.config or Config(), None, None
    try:
        with place.agent() as client:
            health = client.health()
            status = client.status() if health.api == API_VERSION else None
        same = health.api == API_VERSION and health.version == package_version()
        text = f"{health.version} (API {health.api}); here {package_version()} (API {API_VERSION})"
        stop = "tieredckpt agent stop; checkpoints stay in memory, and the next job starts another"
        yield Finding("agent's version", "ok" if same else "fail", text, "" if same else stop)
    except TieredCkptError as error:
        hangs = isinstance(error.__cause__, TimeoutError)
        stop = f"kill -9 its process (id in {place.runtime_dir}/agent.lock); checkpoints stay"
        fix = stop if hangs else "a job starts one" if config.agent.start == "auto" else "start it"
        state: State = "fail" if hangs or error.fields.get("foreign") else "warn"
        yield Finding("agent", state, *_halves(str(error), fix))
    yield from _machine(config, place, status)
    try:
        namespace = place.namespace(status)
    except ConfigError as error:
        yield Finding("namespace", "warn", one_line(str(error)), "name one with --namespace")
        return
    spaces = {each.name: each for each in status.namespaces} if status is not None else {}
    yield from _tiers(config, namespace)
    if namespace in spaces:
        yield from _job(spaces[namespace], moved_tiers(place, status, namespace))
        yield from _clocks(place, spaces[namespace])


def _finding(check: str, why: str | None, found: str, fix: str, state: State = "fail") -> Finding:
    return Finding(check, state, *_halves(why, fix)) if why else Finding(check, "ok", found)


def _machine(config: Config, place: Place, status: Status | None) -> Iterator[Finding]:
    wrong = problems(config, place.runtime_dir, os.environ)
    for each in wrong:
        state: State = "fail" if each.fatal else "warn"
        yield Finding(each.key, state, *_halves(each.message, f"correct that, or {each.key}"))
    if not wrong:
        yield Finding("configuration", "ok", "folders, packages, interfaces and secrets are there")
    folder, total, free = tmpfs_of(place.runtime_dir)
    used = sum(each.slot_bytes for each in status.namespaces) if status is not None else 0
    headroom, wanted = headroom_of(folder), config.memory.capacity_bytes or total // 2
    found = f"{folder}: {size(total)}, {size(free)} free, memory.capacity {size(wanted)}"
    least = min(total, headroom.available_bytes + used)
    why = found + f", only {size(least)} can be had ({headroom.limit})" if least < wanted else None
    yield _finding("tmpfs", why, found, headroom.advice, "warn")
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    low = 0 <= files < FILES_MIN
    yield _finding("open files", f"{files}" if low else None, f"{files}", "ulimit -n 65536", "warn")
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    why = f"files of at most {limit} bytes" if limit != resource.RLIM_INFINITY else None
    yield _finding("size of files", why, "no limit", "ulimit -f unlimited")
    if config.discovery.kind != "torch" and status is None:
        yield _port(config.network.port)


def _port(port: int) -> Finding:
    try:
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("", port))
    except OSError as error:
        return Finding("port", "fail", f"{port}: {error.strerror}", "set another network.port")
    return Finding("port", "ok", f"{port} is free")


def _job(space: NamespaceStatus, moved: Mapping[str, str]) -> Iterator[Finding]:
    """What the agent knows of the job: lag, replicas, damage."""
    for tier in space.tiers:
        name = f"tier {tier.name}"
        if tier.name in moved:
            past = one_line(moved[tier.name])
            yield Finding(f"{name}: copies", "warn", past, "start the job")
            continue
        behind = f"{tier.queued} wait, {size(tier.lag_bytes)} to copy"
        yield _finding(f"{name}: copies", tier.error, behind, REPAIR)
        slow = f"behind by {tier.lag_steps} steps" if tier.alarm or tier.memory_full else None
        remedy = "as for its copies" if tier.error else "a faster tier, or a longer `every`"
        yield _finding(f"{name}: lag", slow, behind, remedy, "warn")
        bad = f"{tier.quarantined} damaged copies" if tier.quarantined else None
        yield _finding(f"{name}: damage", bad, "none known", "tieredckpt verify; check the disk")
    skipped = f"{space.skipped_saves} saves were skipped" if space.skipped_saves else None
    yield _finding("saves", skipped, "none was skipped", "see the log of training", "warn")
    for peer in space.peers:
        if peer.member:
            away = peer.error or "no answer" if peer.reachable is False else None
            yield _finding(f"host {peer.host.host_id}", away, str(peer.address), PORT)
    if (copies := space.replication) is not None:
        few = copies.possible < copies.replicas
        text = f"{copies.possible} of {copies.replicas}, step {copies.newest_replicated_step}"
        why = copies.error or (text if few else None)
        more = "more hosts, or fewer memory.replicas"
        yield _finding("replicas", why, text, more, "fail" if copies.error else "warn")


def _clocks(place: Place, space: NamespaceStatus) -> Iterator[Finding]:
    """The clock of each member that answers, against this host's."""
    members = [each.host.host_id for each in space.peers if each.member and each.reachable]
    if not members:
        return
    with ReadOnlyClient(place.runtime_dir, place.folders(space.name)) as client:
        others = OtherHosts(client, None)

        def ask(host: str) -> Finding:
            try:
                least_s, most_s = others.client(host).clock(time.time)
            except TieredCkptError as error:
                return Finding(f"host {host}: clock", "warn", *_halves(str(error), PORT))
            apart_s = max(least_s, -most_s)
            side = "ahead of" if least_s > 0 else "behind"
            why = f"{apart_s:.0f} s {side} this host's" if apart_s > APART_WARN_S else None
            ok = f"within {max(-least_s, most_s):.1f} s of this host's"
            state: State = "fail" if apart_s > SKEW_MAX_S else "warn"
            return _finding(f"host {host}: clock", why, ok, "run NTP on all hosts", state)

        with closing(others), ThreadPoolExecutor(min(HOSTS_AT_ONCE, len(members))) as pool:
            yield from pool.map(ask, members)


# --- tiers ----------------------------------------------------------------------------------------


def _tiers(config: Config, namespace: str) -> Iterator[Finding]:
    """Open and try all tiers at the same time, each within :data:`TIER_S`."""
    asked = [
        (tier, in_daemon(partial(_try, tier, namespace), f"tck-try-{tier.name}"))
        for tier in config.tiers
    ]
    for tier, answer in asked:
        name = f"tier {tier.name}"
        try:
            yield from answer.result(TIER_S)
        except TimeoutError:
            yield Finding(name, "fail", f"no answer within {TIER_S:g} s", NO_ANSWER)
        except CancelledError:  # a bug here or in a library
            yield Finding(name, "fail", "an unexpected failure", "see the traceback")


def _try(spec: TierSpec, namespace: str) -> list[Finding]:
    name, limits = f"tier {spec.name}", {}
    for key in ("retry_for_s", "timeout_s"):
        limits[key] = min(RETRY_S, getattr(spec.object, key))
    asked = msgspec.structs.replace(spec, object=msgspec.structs.replace(spec.object, **limits))
    if spec.is_file and spec.scope == "host":
        # An agent has the lock, or may be about to take it. Scope shared takes none, and sweeps
        # nothing of the agent's.
        asked = msgspec.structs.replace(asked, scope="shared")
    steps: Probed = {}
    more: list[Finding] = []
    made: list[Path] = []
    try:
        made = _missing(spec, namespace) if spec.is_file else []
        with closing(TierPlace(asked, namespace)) as place:
            tier = place.open()
            steps = probe(tier)
            more = [*_direct(name, tier), *_clock(name, tier, spec, steps)]
    except (TieredCkptError, OSError) as error:
        steps[OPEN] = error if isinstance(error, TieredCkptError) else TieredCkptError(str(error))
    for folder in made:  # a folder made as root would shut out the job's user
        with suppress(OSError):
            folder.rmdir()
    failures: dict[str, str] = {}
    for step, failure in steps.items():
        if failure is not None:  # each once, with the first step that it stopped
            failures.setdefault(_message(failure), step)
    found = [_finding(f"{name}: {step}", text, "", REPAIR) for text, step in failures.items()]
    tried = ", ".join(step for step, failure in steps.items() if failure is None)
    return [*found, *([] if failures else [Finding(name, "ok", tried)]), *more]


def _missing(spec: TierSpec, namespace: str) -> list[Path]:
    """The folders that :func:`_try` makes, the deepest first. Raises ConfigError."""
    root = folder_of_url(spec.url) / namespace
    inner = [root / name for name in FOLDERS]
    return [each for each in (*inner, root, *root.parents) if not os.path.lexists(each)]


def _message(error: TieredCkptError) -> str:
    unreachable = isinstance(error, TierUnavailableError) and error.fields.get("status") == 0
    text = one_line(str(error))
    return f"{text}; {NO_ANSWER}" if unreachable and NO_ANSWER not in text else text


def _halves(text: str, otherwise: str) -> tuple[str, str]:
    """What is wrong, and what to do, which most of our messages have after a semicolon."""
    found, _, fix = one_line(text).partition("; ")
    return found, fix or otherwise


def _direct(name: str, tier: Tier) -> Iterator[Finding]:
    if isinstance(tier, FileTier):
        with tempfile.TemporaryFile(dir=tier.root) as file:
            why = None if set_direct(file.fileno()) else "refused: writes go through the page cache"
        yield _finding(f"{name}: direct I/O", why, "works", "a file system that has it", "warn")


def _clock(name: str, tier: Tier, spec: TierSpec, steps: Probed) -> Iterator[Finding]:
    if tier.scope is Scope.SHARED and spec.scope == "shared" and steps.get(CLOCK, ...) is None:
        skew_s = tier.now_s() - time.time()
        text = f"{skew_s:+.1f} s from this host's"
        state: State = "fail" if abs(skew_s) > SKEW_MAX_S else "warn"
        why = text if abs(skew_s) > SKEW_WARN_S else None
        yield _finding(f"{name}: clock", why, text, "set the clock of this host (NTP)", state)
