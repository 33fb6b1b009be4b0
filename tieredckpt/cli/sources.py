"""The sources of a command's answer: configuration, runtime folder, namespace, holdings.

The node agent answers if one runs; else the command reads the slot folder and the tiers itself,
read-only: an operator must get an answer while everything is down.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import click
import msgspec

from tieredckpt.agent.host.runtime import default_runtime_dir, host_id
from tieredckpt.cli.output import one_line
from tieredckpt.config.schema import Config, load_config, resolve_namespace
from tieredckpt.config.sections import parsed
from tieredckpt.errors import AgentError, ConfigError, NotFoundError, UsageError
from tieredckpt.format.manifest import Manifest, check_name
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
"""The agent itself waits 30 s for a tier before it answers for the others."""


def place_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add ``--runtime-dir`` and ``--config``; ``command`` receives the result as ``place``.

    ``place`` contains the values of ``--namespace`` and ``--json``, too, if the command has these.
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


json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print JSON on standard output, nothing else."
)


def namespace_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options of a command about one namespace: where it is, its name, and ``--json``."""
    namespace_option = click.option(
        "--namespace",
        "named",
        help="Which one; else the configuration's, or the only one there is.",
    )
    return place_options(namespace_option(json_option(command)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The options of a command, resolved."""

    config: Config | None
    runtime_dir: Path
    named: str | None = None
    """The namespace of ``--namespace``."""
    as_json: bool = False
    """Whether only JSON goes to standard output."""

    @classmethod
    def find(cls, config_file: Path | None, runtime_dir: Path | None) -> Place:
        """Find the configuration by option, environment or current folder.

        Raises ConfigError: the named file does not exist, or the configuration is wrong.
        """
        named = config_file or os.environ.get(CONFIG_VARIABLE)
        if not named and DEFAULT_CONFIG.is_file():
            named = DEFAULT_CONFIG
        config = load_config(named, os.environ) if named else None
        configured = config.agent.runtime_dir if config else None
        chosen = Path(runtime_dir or configured or default_runtime_dir(os.environ))
        return cls(config=config, runtime_dir=chosen.absolute())

    def agent(self, deadline_s: float = AGENT_DEADLINE_S) -> closing[AgentClient]:
        """Return a client of the agent; it connects at the first call, and starts no agent."""
        return closing(AgentClient(self.runtime_dir, deadline_s=deadline_s))

    def folders(self, namespace: str) -> Folders:
        """Open the folders of a namespace, read-only. The caller closes them."""
        tiers = self.config.tiers if self.config is not None else ()
        return Folders(tiers, self.runtime_dir, namespace, host_id(os.environ))

    def status(self) -> Status | None:
        """Return the agent's status, or None if no agent runs here.

        Raises AgentError: The agent is another user's, which this command cannot ask.
        """
        try:
            with self.agent() as client:
                return client.status()
        except AgentError as error:
            if error.fields.get("foreign"):
                raise
            return None

    def namespace(self, status: Status | None) -> str:
        """Return the namespace of the command.

        Raises ConfigError: it is ambiguous, missing, or no name.
        """
        if self.named:
            return parsed("--namespace", self.named, partial(check_name, what="namespace"))
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
    """The holdings of one host in a namespace, and where they come from."""

    namespace: str
    holdings: Holdings
    source: str
    """"agent" or "folders"."""


def moved_tiers(place: Place, status: Status | None, namespace: str) -> dict[str, str]:
    """By tier that the agent has at another URL than the configuration, a sentence on it."""
    urls = {each.name: each.url for each in place.config.tiers} if place.config else {}
    return {
        tier.name: f"tier {tier.name}: the agent uses an earlier configuration until a job opens "
        f"{urls[tier.name]}; past: {tier.error or tier.url}"
        for each in (status.namespaces if status is not None else ())
        for tier in each.tiers
        if each.name == namespace and urls.get(tier.name, tier.url) != tier.url
    }


def find_holdings(place: Place) -> Found:
    """Return the holdings by the agent, else by the folders, with a message on standard error.

    Raises:
        ConfigError: The namespace is ambiguous or missing.
        NotFoundError: The agent or all folders answered, and have no such namespace.
        TierUnavailableError: Neither agent nor folders could be read.
    """
    status = place.status()
    name = place.namespace(status)
    if status is not None:
        try:
            with place.agent(HOLDINGS_DEADLINE_S) as client:
                holdings = decode_holdings(client.holdings(name))
            if moved := moved_tiers(place, status, name):
                click.secho("\n".join(map(one_line, moved.values())), fg="yellow", err=True)
                kept = tuple(each for each in holdings.tiers if each.tier not in moved)
                holdings = msgspec.structs.replace(holdings, tiers=kept)
            attached = {tier.tier for tier in holdings.tiers}
            tiers = place.config.tiers if place.config is not None else ()
            if others := [each.name for each in tiers if each.name not in attached]:
                text = (
                    f"not shown: {', '.join(others)} of the configuration, which the agent reads "
                    "once a job has opened it"
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


def find_by_agent(place: Place, what: str) -> Found:
    """Return the agent's holdings, for a command that publishes ``what`` through it.

    Raises AgentError: no agent runs. Otherwise as :func:`find_holdings`.
    """
    found = find_holdings(place)
    if found.source != "agent":
        raise AgentError(
            f"no agent of namespace {found.namespace} runs in {place.runtime_dir}: {what} sent to "
            "all hosts by an agent",
            outcome="not_applied",
        )
    return found


def ask_others(place: Place, found: Found, limit_s: float) -> AllHoldings:
    """Ask every host that the local agent knows. Prints progress if standard error is a tty."""
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
            everyone = others.ask_all(own, limit_s=limit_s, progress=progress)
        finally:
            others.close()
    if shown:
        click.echo(err=True)
    return everyone


def full_save_id(holdings: Sequence[Holdings], start: str) -> str:
    """Return the save id that begins with ``start``; ``start`` itself if there is none.

    Raises UsageError: several save ids begin with it.
    """
    known = {f.save_id for each in holdings for tier in each.tiers for f in tier.manifests}
    found = sorted(each for each in known if each.startswith(start))
    if len(found) > 1 and start not in known:
        raise UsageError(f"{len(found)} save ids begin with {start}: {', '.join(found[:4])}")
    return found[0] if len(found) == 1 else start


def find_save(found: Found, start: str) -> Manifest:
    """Return the checkpoint whose save id begins with ``start``.

    Raises NotFoundError: this host knows no such checkpoint; UsageError: it knows several.
    """
    save_id = full_save_id([found.holdings], start)
    for manifest in known_manifests([found.holdings]).values():
        if manifest.save_id == save_id:
            return manifest
    raise NotFoundError(f"this host knows no checkpoint {start}", key=start)


def _may_hold(tier: TierFacts) -> bool:
    return not tier.available or bool(tier.manifests or tier.plans or tier.segments)
