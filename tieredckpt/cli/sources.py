"""Where a command looks: which configuration, which runtime folder, which namespace.

Facts come from the node agent if one runs, else from the slot folder and the tiers themselves,
read-only: an operator must get an answer while everything is down.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import click

from tieredckpt.agent.host.runtime import default_runtime_dir, host_id
from tieredckpt.config.schema import Config, load_config, resolve_namespace
from tieredckpt.errors import AgentError, ConfigError, NotFoundError, UsageError
from tieredckpt.format.manifest import Manifest
from tieredckpt.recovery.evidence import known_manifests
from tieredckpt.recovery.folders import Folders, ReadOnlyClient, namespaces
from tieredckpt.recovery.other_hosts import AllHoldings, OtherHosts
from tieredckpt.rpc.agent_client import AgentClient
from tieredckpt.rpc.messages.agent import Status
from tieredckpt.storage.holdings import Holdings, TierFacts, decode_holdings

CONFIG_VARIABLE = "TIEREDCKPT_CONFIG"
DEFAULT_CONFIG = Path("tieredckpt.yaml")
AGENT_DEADLINE_S = 10.0
"""An agent that takes longer to answer is reported as not answering."""
HOLDINGS_DEADLINE_S = 60.0
"""The agent itself waits 30 s for a tier before it says what the others hold."""

_Command = TypeVar("_Command", bound=Callable[..., Any])


def place_options(command: Callable[..., None]) -> Callable[..., None]:
    """The options that say where to look; ``command`` gets what they come to as ``place``.

    That takes up ``--namespace`` and ``--json``, too, if the command has these.
    """

    @click.option(
        "--runtime-dir",
        type=click.Path(path_type=Path),
        help="The agent's folder; else the configuration's, else the user's default one.",
    )
    @click.option(
        "--config",
        "config_file",
        type=click.Path(path_type=Path),
        help=f"Configuration; else ${CONFIG_VARIABLE}, else ./{DEFAULT_CONFIG}.",
    )
    @functools.wraps(command)
    def located(
        config_file: Path | None,
        runtime_dir: Path | None,
        named: str | None = None,
        as_json: bool = False,
        **others: Any,
    ) -> None:
        found = Place.find(config_file, runtime_dir)
        command(place=replace(found, named=named, as_json=as_json), **others)

    return located


def json_option(command: _Command) -> _Command:
    """``--json``."""
    return click.option(
        "--json", "as_json", is_flag=True, help="Print JSON on standard output, nothing else."
    )(command)


def look_options(command: Callable[..., None]) -> Callable[..., None]:
    """Those options, ``--namespace`` and ``--json``: for commands that look at one namespace."""
    namespace_option = click.option(
        "--namespace",
        "named",
        help="Which one; else the configuration's, or the only one there is.",
    )
    return place_options(namespace_option(json_option(command)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What the options and the environment resolve to."""

    config: Config | None
    runtime_dir: Path
    named: str | None = None
    """The namespace of ``--namespace``."""
    as_json: bool = False
    """Whether JSON is wanted, and nothing else on standard output."""

    @classmethod
    def find(cls, config_file: Path | None, runtime_dir: Path | None) -> Place:
        """Resolve the options; the configuration is by option, environment or current folder.

        Raises ConfigError: a file that was named does not exist, or it is wrong.
        """
        named = config_file or os.environ.get(CONFIG_VARIABLE)
        if not named and DEFAULT_CONFIG.is_file():
            named = DEFAULT_CONFIG
        config = load_config(named, os.environ) if named else None
        configured = config.agent.runtime_dir if config else None
        chosen = Path(runtime_dir or configured or default_runtime_dir(os.environ))
        return cls(config=config, runtime_dir=chosen.absolute())

    def agent(self, deadline_s: float = AGENT_DEADLINE_S) -> closing[AgentClient]:
        """A line to the agent; connects at the first call, and never starts one."""
        return closing(AgentClient(self.runtime_dir, deadline_s=deadline_s))

    def folders(self, namespace: str) -> Folders:
        """What this process reads of a namespace by itself; close it."""
        tiers = self.config.tiers if self.config is not None else ()
        return Folders(tiers, self.runtime_dir, namespace, host_id(os.environ))

    def status(self) -> Status | None:
        """What the agent says, or None if none runs here."""
        try:
            with self.agent() as client:
                return client.status()
        except AgentError:
            return None

    def namespace(self, status: Status | None) -> str:
        """Which namespace is meant. Raises ConfigError if that is not certain."""
        if self.named:
            return self.named
        if self.config is not None:
            return resolve_namespace(self.config.namespace, os.environ)
        known = (
            sorted(each.name for each in status.namespaces)
            if status
            else namespaces(self.runtime_dir)
        )
        if len(known) == 1:
            return known[0]
        found = f"{len(known)} namespaces ({', '.join(known)})" if known else "no namespace"
        raise ConfigError(
            f"{self.runtime_dir} holds {found}: name one with --namespace, or name a "
            "configuration with --config",
            key="namespace",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What one host holds of a namespace, and who said so."""

    namespace: str
    holdings: Holdings
    source: str
    """"agent" or "folders"."""


def find_holdings(place: Place) -> Found:
    """Facts from the agent, else from the folders; says on standard error if it is the latter.

    Raises:
        ConfigError: It is not certain which namespace is meant.
        NotFoundError: A namespace was named, everything could be asked, and nothing is there.
        TierUnavailableError: Neither agent nor folders could be read.
    """
    status = place.status()
    name = place.namespace(status)
    if status is not None:
        try:
            with place.agent(HOLDINGS_DEADLINE_S) as client:
                holdings = decode_holdings(client.holdings(name))
            told = {tier.tier for tier in holdings.tiers}
            tiers = place.config.tiers if place.config is not None else ()
            if left := [each.name for each in tiers if each.name not in told]:
                text = (
                    f"not shown: {', '.join(left)} of the configuration, which the agent hears of "
                    "when a job opens it"
                )
                click.secho(text, fg="yellow", err=True)
            return Found(namespace=name, holdings=holdings, source="agent")
        except NotFoundError:
            why = f"the agent has not opened namespace {name} yet"
    else:
        why = f"no agent runs in {place.runtime_dir}"
    click.secho(f"{why}: reading the folders themselves", dim=True, err=True)
    with closing(place.folders(name)) as folders:
        holdings = folders.holdings()
    if place.named and not holdings.attempts and not any(map(_may_hold, holdings.tiers)):
        known = set(namespaces(place.runtime_dir)) - {name}
        if status is not None:
            known.update(each.name for each in status.namespaces)
        there = f"there: {', '.join(sorted(known))}" if known else "nor any other"
        raise NotFoundError(
            f"no namespace {name} in {place.runtime_dir} or the configured tiers ({there})",
            key=name,
        )
    return Found(namespace=name, holdings=holdings, source="folders")


def find_told(place: Place, what: str) -> Found:
    """What an agent holds, for a command that tells ``what`` to all hosts through it.

    Raises AgentError: none runs. Else as :func:`find_holdings`.
    """
    found = find_holdings(place)
    if found.source != "agent":
        raise AgentError(
            f"no agent of namespace {found.namespace} runs in {place.runtime_dir}: {what} told to "
            "all hosts by one",
            outcome="not_applied",
        )
    return found


def ask_others(place: Place, found: Found, limit_s: float) -> AllHoldings:
    """Ask every host that the local agent knows. Shows progress on a terminal's standard error."""
    own = found.holdings
    shown = sys.stderr.isatty()

    def progress(done: int, total: int) -> None:
        if shown:
            click.echo(f"\r{done} of {total} other hosts have answered ", nl=False, err=True)

    with ReadOnlyClient(place.runtime_dir, place.folders(found.namespace)) as client:
        others = OtherHosts(client, None)
        table = others.refresh() if found.source == "agent" else None
        if table is None or not (table.peers or table.unmet):
            return AllHoldings((own,))
        try:
            held = others.ask_all(own, limit_s=limit_s, progress=progress)
        finally:
            others.close()
    if shown:
        click.echo(err=True)
    return held


def full_save_id(holdings: Sequence[Holdings], start: str) -> str:
    """The save id that begins with ``start``, as ``ls`` shows it; ``start`` itself if none does.

    Raises UsageError: several do.
    """
    known = {f.save_id for each in holdings for tier in each.tiers for f in tier.manifests}
    found = sorted(each for each in known if each.startswith(start))
    if len(found) > 1 and start not in known:
        raise UsageError(f"{len(found)} save ids begin with {start}: {', '.join(found[:4])}")
    return found[0] if len(found) == 1 else start


def find_save(found: Found, start: str) -> Manifest:
    """The checkpoint whose save id begins with ``start``.

    Raises NotFoundError: this host knows none; UsageError: it knows several.
    """
    save_id = full_save_id([found.holdings], start)
    for manifest in known_manifests([found.holdings]).values():
        if manifest.save_id == save_id:
            return manifest
    raise NotFoundError(f"this host knows no checkpoint {start}", key=start)


def _may_hold(tier: TierFacts) -> bool:
    return not tier.available or bool(tier.manifests or tier.plans or tier.segments)
