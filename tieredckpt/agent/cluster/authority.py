"""Whose rules hold in a namespace of this agent: those of the run whose attempt was learnt last.

A run opens an attempt with its first save. Before that its configuration only adds tiers to read
from, its membership only tells where hosts are while a session of the ruling run lives here, and
nothing is deleted for its sake. The rules outlive the agent in a file.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import msgspec

from tieredckpt.agent.cluster.members import Peers
from tieredckpt.agent.host.sessions import FULL_ADVICE
from tieredckpt.errors import TieredCkptError
from tieredckpt.format.envelope import RecordCodec
from tieredckpt.format.manifest import AttemptRecord, HexId
from tieredckpt.policy.history import Chain
from tieredckpt.rpc.messages.agent import NamespaceSpec, TierSpec
from tieredckpt.rpc.messages.base import SMALL_BODY_BYTES_MAX
from tieredckpt.storage.catalog import Catalog
from tieredckpt.storage.folder import medium

log = logging.getLogger(__name__)


class Rule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of the file."""

    run: HexId
    spec: NamespaceSpec


RULES = RecordCodec(b"TCKRULES", Rule, "configuration", limit_bytes=SMALL_BODY_BYTES_MAX)


class Ruling:
    """See the module. What changes it expects the node's lock; what asks needs none.

    Args:
        path: Of the file.
        catalog: Of the memory tier: which attempts are known.
        peers: The job's other hosts.
        runs: Those that have sessions here.
    """

    def __init__(
        self, path: Path, catalog: Catalog, peers: Peers, runs: Callable[[], Collection[str]]
    ) -> None:
        self._path = path
        self._catalog = catalog
        self._peers = peers
        self._runs = runs
        self.rule: Rule | None = None
        self._guests: dict[str, NamespaceSpec] = {}
        """Of runs that have sessions here and do not rule, the last one last."""
        peers.is_over = lambda: self._is_over(peers.run)
        try:
            self.rule, is_old = RULES.decode_either(path.read_bytes())
            if is_old:  # for settle, which writes it down in the present form
                self._guests[self.rule.run] = self.rule.spec
        except FileNotFoundError:
            pass
        except (OSError, TieredCkptError) as error:
            log.warning("%s is not used; nothing is deleted before a save: %s", path, error)

    # --- whose they are ---------------------------------------------------------------------------

    def forget(self) -> None:
        """The namespace was purged."""
        self._path.unlink(missing_ok=True)

    def note(self, run: str, spec: NamespaceSpec) -> None:
        """A session of ``run`` is open."""
        self.drop_guests(last="")
        if self.rule != Rule(run=run, spec=spec):
            self._guests.pop(run, None)
            self._guests[run] = spec
            if self.rule is not None and self.rule.run == run:
                self.rule = Rule(run=run, spec=spec)  # at once: the file may be old

    def drop_guests(self, last: str | None = None) -> None:
        """A session ended. Where nobody rules the ``last`` one's tiers stay, for who looks from the
        command line.
        """
        if last is None and self.rule is None:
            last = next(reversed(self._guests), None)
        live = self._runs()
        self._guests = {r: s for r, s in self._guests.items() if r in live or r == last}

    def settle(self, run: str) -> bool:
        """Let the run of the newest attempt rule, if its configuration is known; whether it is new.

        Args:
            run: Whose it is if memory has lost all attempts: that of a commit, say, or "".

        Raises CapacityError, TierUnavailableError: It cannot be written down; nothing is changed.
        """
        run = self.newest_run() or run
        if run not in self._guests:
            return False
        rule = Rule(run=run, spec=self._guests[run])
        with medium("memory", f"store the configuration in {self._path}", advice=FULL_ADVICE):
            temporary = self._path.with_suffix(".tmp")
            temporary.write_bytes(RULES.encode(rule))
            os.replace(temporary, self._path)
        if self.rule is not None and self.rule.run in self._runs():  # it is told so when it saves
            self._guests[self.rule.run] = self.rule.spec
        self.rule = rule
        del self._guests[run]
        return True

    # --- what they allow --------------------------------------------------------------------------

    def _heads(self) -> list[AttemptRecord | None]:
        """The attempts that nobody followed; at a fork those of the run that rules.

        None: a checkpoint tells of it, and its record is not here, so that it may be anybody's.
        """
        chain = Chain(self._catalog.manifests(), self._catalog.attempts())
        found = [chain.records.get(each.id) for each in chain.heads]
        if len(found) > 1:
            found = [each for each in found if self.rule and each and each.run == self.rule.run]
            return found or [None]
        return found

    def newest_run(self) -> str:
        """The run of the newest attempt that memory knows; "" if it knows none."""
        newest = next(reversed(self._heads()), None)
        return newest.run if newest is not None else ""

    def _is_over(self, run: str) -> bool:
        """Whether ``run`` has saved, and another one since; at a fork no side is over."""
        attempts = self._catalog.attempts()
        chain = Chain(self._catalog.manifests(), attempts)
        newest = {chain.records[each.id].run for each in chain.heads if each.id in chain.records}
        saved = any(each.run == run for each in attempts)
        return (
            bool(newest)
            and run not in newest
            and (saved or (self.rule is not None and self.rule.run == run))
        )

    def term(self) -> str | None:
        """The run in whose name this agent may delete; None: nobody's.

        It is over once an attempt of another run is known.
        """
        rule = self.rule
        if rule is None or any(each is None or each.run != rule.run for each in self._heads()):
            return None
        return rule.run

    def leads(self) -> bool:
        """Whether this agent decides for all hosts of the run that rules."""
        return self.term() is not None and self._peers.is_leader

    def rules_here(self) -> bool:
        """Whether the run that rules has sessions here."""
        return self.term() in self._runs()

    def run_here(self) -> str | None:
        """The run whose configuration holds, if it has sessions here."""
        rule = self.rule
        return rule.run if rule is not None and rule.run in self._runs() else None

    def tidies(self) -> bool:
        """Whether what is too much is deleted before its room is needed.

        Not while all sessions here are of runs that do not rule: the run that does has ended, and
        one of theirs may have saved without this host's having heard of it.
        """
        term, runs = self.term(), self._runs()
        return term is not None and (not runs or term in runs)

    def fills(self, tier: TierSpec) -> bool:
        """Whether checkpoints are copied into ``tier``: a run that saved has said so."""
        return self.rule is not None and tier in self.rule.spec.tiers

    def prunes(self, tier: TierSpec) -> bool:
        """Whether what need not stay in ``tier`` is deleted, by its rules."""
        return self.fills(tier) and self.term() is not None

    def keep_last(self) -> int | None:
        """What memory keeps; None: everything."""
        return self.rule.spec.keep_last if self.rule is not None and self.term() else None

    # --- what is configured -----------------------------------------------------------------------

    @property
    def spec(self) -> NamespaceSpec | None:
        """The ruling configuration, else that of the last session; None: none is known."""
        if self.rule is not None:
            return self.rule.spec
        return next(reversed(self._guests.values()), None)

    def spec_of(self, run: str) -> NamespaceSpec | None:
        """What sessions of ``run`` were opened with, if it is known."""
        known = self.rule.spec if self.rule is not None and self.rule.run == run else None
        return self._guests.get(run, known)

    def tiers(self) -> dict[str, TierSpec]:
        """What is attached: the ruling run's tiers, and others' to read where they differ."""
        found = {tier.name: tier for tier in self.rule.spec.tiers} if self.rule else {}
        fixed = set(found) if self.rules_here() else set()
        for tier in (each for spec in list(self._guests.values()) for each in spec.tiers):
            known = found.get(tier.name)
            if known is None or (tier.name not in fixed and _place(known) != _place(tier)):
                found[tier.name] = tier
        return found

    def conflict(self, run: str, spec: NamespaceSpec, other: str) -> list[str]:
        """Why ``run`` cannot open with ``spec`` beside sessions of ``other``; empty: it can."""
        theirs = self.spec_of(other)
        if theirs is None:
            return []
        if other in (run, self.term()):
            return describe_difference(theirs, spec) if theirs != spec else []
        # One name is one tier: sessions would read each other's.
        places = {tier.name: _place(tier) for tier in theirs.tiers}
        moved = any(places.get(t.name, _place(t)) != _place(t) for t in spec.tiers)
        return describe_difference(theirs, spec) if moved else []


def _place(tier: TierSpec) -> tuple[object, ...]:
    return tier.url, tier.scope, tier.object


def describe_difference(running: NamespaceSpec, asked: NamespaceSpec) -> list[str]:
    """Sentences such as ``memory.keep.last is 2 in the running job, 3 here``; empty if equal."""
    found: list[str] = []
    before, after = _parts_of(running), _parts_of(asked)
    for name in dict.fromkeys([*before, *after]):
        if name not in after:
            found.append(f"{name} is in the running job only")
        elif name not in before:
            found.append(f"{name} is here only")
        else:
            found += _differing(name, before[name], after[name])
    if not found and running != asked:
        orders = [", ".join(tier.name for tier in each.tiers) for each in (running, asked)]
        found.append(f"the order of tiers is {orders[0]} in the running job, {orders[1]} here")
    return found


def _parts_of(spec: NamespaceSpec) -> dict[str, object]:
    keep = {"last": spec.keep_last}
    memory = {"capacity": spec.capacity_bytes, "keep": keep, "wait": spec.wait_s}
    tiers = {
        f"tiers[{t.name}]": t.effective()
        | {"credentials": "the script's" if t.object.of_script else "the environment's"}
        for t in spec.tiers
    }
    return {"memory": memory} | tiers


def _differing(key: str, running: object, asked: object) -> Iterator[str]:
    if isinstance(running, dict) and isinstance(asked, dict):
        for name in dict.fromkeys([*running, *asked]):
            yield from _differing(f"{key}.{name}", running.get(name), asked.get(name))
    elif running != asked:
        yield f"{key} is {running} in the running job, {asked} here"
