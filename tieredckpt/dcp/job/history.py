"""What a process knows of the run: which attempt this is, and what each stream went on from.

A load changes nothing: what it took up is remembered here, and an attempt that says so is opened
before the first save. It names the stream that is saved; all others go on as they are, since
another process may be the one that saves into them: of the process groups of one run each may load
and save by itself. So a save may find that other ranks of this run have opened a newer attempt
meanwhile: it is adopted, and the save is committed in it.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from tieredckpt import failpoints
from tieredckpt.config.tiers import TierSpec
from tieredckpt.errors import (
    NotFoundError,
    StaleAttemptError,
    TieredCkptError,
    TierUnavailableError,
    UsageError,
)
from tieredckpt.format.envelope import INT_MAX
from tieredckpt.format.manifest import (
    Ancestor,
    AttemptId,
    AttemptRecord,
    Followed,
    Manifest,
    decode_attempt,
    decode_manifest,
    encode_attempt,
    encode_manifest,
    is_capture,
)
from tieredckpt.policy.history import Chain, ancestry_of, base_of, saved_by, with_saves
from tieredckpt.policy.schedule import LastSpill, due_tiers
from tieredckpt.recovery.evidence import read_attempts
from tieredckpt.recovery.other_hosts import (
    FindOthers,
    manifests_in,
    read_holdings,
    read_plan,
    spilled_up_to,
)
from tieredckpt.recovery.plan import RecoveryPlan
from tieredckpt.rpc.agent_client import AgentClient
from tieredckpt.rpc.messages.agent import AddRecord, BaseSpec
from tieredckpt.storage.holdings import Holdings


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenUp:
    """How these ranks took a stream up, until an attempt says so: nothing is changed by it."""

    manifest: bytes = b""
    """The encoded manifest of what was loaded; b"": the stream begins anew, or goes on as it is."""
    newest: tuple[Ancestor, ...] = ()
    """The line up to the newest checkpoint when that was chosen."""
    in_silence: bool = False
    """Newer ones were passed over while somebody did not answer, and nobody agreed to that."""
    followed: tuple[Followed, ...] = ()
    """The attempts that were known then; see ``RecoveryPlan.followed``."""
    load_id: str = ""
    """Of the load in which all ranks of the group did; "": it goes on as it is."""
    refusal: str = ""
    """Why nothing may be saved after it without consent; "": it may."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamState:
    """Where one stream stands, as this process knows it."""

    head: str | None
    """The newest checkpoint that these ranks restored or committed."""
    taken_up: TakenUp | None = None
    """None: an attempt of this run says where the stream goes on."""
    lineage: tuple[Ancestor, ...] = ()
    next_seq: int = 0
    moved_to: str | None = None
    """Where the newest attempt takes the stream up, if that is not ``head``."""
    in_doubt: bytes | None = None
    """The manifest of a commit of unknown outcome."""
    spilled: Mapping[str, LastSpill] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryState:
    """A :class:`History`, or a part of it, for another process of the same run. Pickles."""

    run_id: str
    attempt: bytes | None
    """The encoded record of the attempt that it stands in; None: none was opened yet."""
    streams: tuple[tuple[str, StreamState], ...]
    load_id: str
    """Of the last load; random."""


def age(record: AttemptRecord | None) -> tuple[int, str]:
    """What attempts are sorted by; None is older than all."""
    return (record.number, record.id) if record is not None else (0, "")


def base_spec(stream: str, state: StreamState, taken: TakenUp) -> BaseSpec:
    """Where an attempt takes up ``stream``."""
    return BaseSpec(
        stream=stream,
        save_id=state.head,
        manifest=taken.manifest,
        newest=taken.newest,
        in_silence=taken.in_silence,
    )


log = logging.getLogger(__name__)


class History:
    """See the module. Used by one save or load at a time.

    Every rank has one. The coordinator of a load or save works with its own, and hands the outcome
    of a load to all ranks of the group.

    Args:
        client: With an open session, whose run this is.
        tiers: As configured, with their schedules.
    """

    def __init__(self, client: AgentClient, tiers: Sequence[TierSpec]) -> None:
        self._client = client
        self._tiers = tiers
        self.others: FindOthers = lambda: None
        self._attempt: AttemptRecord | None = None
        self._streams: dict[str, StreamState] = {}
        self._read: dict[str, Manifest] = {}
        self._is_resumed = False
        """By :meth:`resume_newest`, and nothing was loaded since."""
        self._load_id = client.run_id
        self.plans_sent: set[str] = set()
        """Ids of plans that the agent certainly had at the last commit."""

    @property
    def attempt_id(self) -> str:
        """Of the attempt that saves belong to; "" before the first."""
        return self._attempt.id if self._attempt is not None else ""

    @property
    def attempt(self) -> bytes:
        """Its encoded record; b"" before the first."""
        return encode_attempt(self._attempt) if self._attempt is not None else b""

    def recovery_plan(self, stream: str, **wanted: Any) -> RecoveryPlan:
        """What could be restored now, as far as anyone answers; see :func:`read_plan`."""
        return read_plan(self._client, self.others(), stream, **wanted)

    # --- other processes of the run ---------------------------------------------------------------

    def snapshot(self, streams: Collection[str]) -> HistoryState:
        """What this process knows of these streams."""
        return HistoryState(
            run_id=self._client.run_id,
            attempt=self.attempt or None,
            streams=tuple(each for each in self._streams.items() if each[0] in streams),
            load_id=self._load_id,
        )

    def adopt(self, state: HistoryState) -> None:
        """Take over what another process of this run has loaded; other streams stay as they are.

        Raises:
            UsageError: It is of another run.
        """
        if state.run_id != self._client.run_id:
            raise UsageError("the ranks have opened their engines apart: open them together")
        record = decode_attempt(state.attempt) if state.attempt is not None else None
        if record is not None and age(record) > age(self._attempt):
            self._stand_in(record)
        self._load_id = state.load_id
        for stream, known in state.streams:
            self._streams[stream] = known
            self._read.pop(stream, None)

    # --- loading ---------------------------------------------------------------------------------

    def restored(
        self,
        plans: Iterable[RecoveryPlan],
        known: Mapping[str, Iterable[Manifest]],
        *,
        abandon_newer: bool,
    ) -> None:
        """The ranks restored what was chosen, or nothing: training goes on from there.

        Nothing is changed by it: the attempt that says so is opened before the first save.

        Args:
            plans: One per stream.
            known: Known manifests by stream; those up to the restored step say what was spilled.
            abandon_newer: What is newer may be abandoned by the next save.
        """
        self._load_id = secrets.token_hex(16)
        for plan in plans:
            manifest = plan.chosen.manifest if plan.chosen is not None else None
            known_here = known.get(plan.stream, ())
            if self._is_resumed and manifest is not None and self._is_head(manifest):
                continue  # the next save of these ranks follows it anyway
            self._begin(plan.stream, manifest, plan, known_here, agreed=abandon_newer)
        self._is_resumed = False

    def resume_newest(self, stream: str, loaded: str | None) -> None:
        """Resume at the newest recoverable checkpoint without reading it.

        If this run has saved it, its attempt continues: a run of many worlds stays one attempt.

        Raises:
            StaleAttemptError: It is neither ``loaded`` nor of this run.
        """
        plan = self.recovery_plan(stream)
        newest = plan.chosen.manifest if plan.chosen is not None else None
        here, others = read_holdings(self._client), self.others()
        # The host of the coordinator may be a new one that has saved nothing yet.
        elsewhere = others.ask_all(here).holdings if others is not None else ()
        records = read_attempts([here, *elsewhere])[0]
        own = {each.id: each for each in records if each.run == self._client.run_id}
        is_own = newest is not None and newest.attempt.id in own
        if newest is not None and not is_own and newest.save_id != loaded:
            raise StaleAttemptError(
                f"step {newest.step} of stream {stream!r} was saved by another run meanwhile: if "
                "that run is to continue, this one must stop",
                newest_attempt=newest.attempt.number,
                same_run=False,
            )
        known = [each.manifest for each in plan.candidates]
        self.restored([plan], {stream: known}, abandon_newer=False)
        self._is_resumed = True
        last = max(own.values(), key=age, default=None)
        if newest is None or last is None or last.id != newest.attempt.id:
            return
        if plan.newer or plan.incomplete:  # there may be one that has this number
            return
        self._attempt = last
        self._streams[stream] = replace(
            self._streams[stream], taken_up=None, lineage=newest.lineage, next_seq=newest.seq + 1
        )

    def _is_head(self, manifest: Manifest) -> bool:
        known = self._streams.get(manifest.stream)
        if known is None or known.taken_up is not None or known.in_doubt is not None:
            return False
        return known.head == manifest.save_id and self.attempt_id == manifest.attempt.id

    def _begin(
        self,
        stream: str,
        manifest: Manifest | None,
        plan: RecoveryPlan,
        known: Iterable[Manifest],
        refusal: str = "",
        *,
        agreed: bool = False,
    ) -> None:
        spilled = spilled_up_to([*known, manifest], manifest.step) if manifest is not None else {}
        taken = TakenUp(
            manifest=encode_manifest(manifest) if manifest is not None else b"",
            newest=ancestry_of(plan.newest) if plan.newest is not None else (),
            followed=plan.followed,
            load_id=self._load_id,
            refusal=refusal,
            # Who answers later may have what was passed over: it must not be gone by then.
            in_silence=bool(plan.incomplete) and plan.newest not in (None, manifest) and not agreed,
        )
        self._streams[stream] = StreamState(
            head=manifest.save_id if manifest is not None else None, taken_up=taken,
            spilled=spilled,
        )  # fmt: skip
        self._read.pop(stream, None)

    def was_read(self, stream: str, manifest: Manifest) -> None:
        """A bare ``dcp.load`` read a checkpoint.

        It counts as what training goes on from until the stream is first saved or loaded by
        ``engine.load``; later ones do not, as they may be for evaluation.
        """
        if stream not in self._streams:
            self._read[stream] = manifest

    # --- saving ----------------------------------------------------------------------------------

    def check_may_save(self, stream: str) -> None:
        """Whether a save may begin; opens the attempt at the first one.

        Raises:
            UsageError: The stream holds checkpoints, and this process has loaded none of them.
            TierUnavailableError: A tier cannot say whether it holds checkpoints of the stream.
            StaleAttemptError: A newer start of this run has taken over.
        """
        known = self._streams.get(stream)
        if known is None:
            self._take_up(stream)
        elif known.in_doubt is not None:
            self._settle(stream, known)
        self._be_ready(stream)

    def _be_ready(self, stream: str) -> None:
        taken = self._streams[stream].taken_up
        if self._attempt is None or taken is not None:
            self._open_attempt(stream, taken or TakenUp())
        self._check_not_moved(stream)

    def _take_up(self, stream: str) -> None:
        read = self._read.get(stream)
        if read is not None:
            plan = self.recovery_plan(stream)
            newer = [each.manifest for each in plan.candidates]
            newer = newer[: newer.index(read)] if read in newer else newer
            self._begin(stream, read, plan, (), consent_text(read, newer))
            return
        plan = self.recovery_plan(stream)
        held = len(plan.candidates) + len(plan.refused) + len(plan.abandoned)
        if held:
            raise UsageError(
                f"the stream {stream!r} of this namespace holds {held} checkpoint(s) already, and "
                "this process has loaded none: call engine.load(state) before the first save, or "
                "choose another namespace"
            )
        if plan.incomplete:
            anew = ", or call engine.load(state, fresh_start=True) to begin anew"
            raise TierUnavailableError(
                "whether this namespace holds checkpoints is not known, as not every tier answers: "
                f"{'; '.join(plan.incomplete)}; repair it{'' if plan.is_denied else anew}",
                outcome="not_applied",
            )
        # Nobody said to begin anew: the stream goes on from what the attempt says, if that exists.
        self._streams[stream] = StreamState(head=None)
        if self._attempt is not None:
            self._place(stream, self._attempt)
        else:
            taken = TakenUp(followed=plan.followed)
            self._streams[stream] = StreamState(head=None, taken_up=taken)

    def _settle(self, stream: str, known: StreamState) -> None:
        assert known.in_doubt is not None
        manifest = decode_manifest(known.in_doubt)
        try:
            exists = self._client.progress(manifest.save_id).levels.get("memory") == "done"
        except NotFoundError:
            exists = False
        self._streams[stream] = replace(known, in_doubt=None)
        if exists:
            self.saved(manifest)

    def begin_save(
        self, stream: str, step: int, now_s: float, *, tags: dict[str, str], **content: Any
    ) -> Manifest:
        """The manifest of a save. Its number is used up even if the save then fails.

        Args:
            stream: What is saved.
            step: Likewise.
            now_s: Seconds since 1970.
            tags: Of the checkpoint.
            content: Plan, segments and what else the manifest has of the save itself.
        """
        spilled = self._streams[stream].spilled
        return Manifest(
            save_id=secrets.token_hex(16),
            namespace=self._client.namespace,
            stream=stream,
            step=step,
            tiers=() if is_capture(tags) else due_tiers(self._tiers, step, spilled, now_s),
            created_at_s=now_s,
            tags=tags,
            **self._next_place(stream),
            **content,
        )

    def _next_place(self, stream: str) -> dict[str, Any]:
        known = self._streams[stream]
        attempt = self._attempt
        assert attempt is not None
        self._streams[stream] = replace(known, next_seq=known.next_seq + 1)
        return {
            "attempt": AttemptId(attempt.number, attempt.id),
            "seq": known.next_seq,
            "parent": known.head,
            "lineage": known.lineage,
        }

    def moved(self, manifest: Manifest) -> Manifest:
        """The same save in the newest attempt, which other ranks of this run have opened.

        Raises:
            StaleAttemptError: The newest attempt is another run's.
            UsageError: Those ranks took this stream up at another checkpoint.
        """
        stream = manifest.stream
        beside = self._adopt_newest(read_holdings(self._client))
        if beside and self._streams[stream].taken_up is None:
            taken = TakenUp(followed=tuple(Followed(each.number, each.id) for each in beside))
            self._streams[stream] = replace(self._streams[stream], taken_up=taken)
        self._be_ready(stream)
        return msgspec.structs.replace(manifest, **self._next_place(stream))

    def saved(self, manifest: Manifest) -> None:
        """The commit succeeded."""
        at = LastSpill(step=manifest.step, at_s=manifest.created_at_s)
        known = self._streams[manifest.stream]
        self._streams[manifest.stream] = replace(
            known,
            head=manifest.save_id,
            spilled={**known.spilled, **dict.fromkeys(manifest.tiers, at)},
        )

    def save_unknown(self, manifest: Manifest) -> None:
        """The commit's outcome is not known; the next save asks."""
        known = self._streams[manifest.stream]
        self._streams[manifest.stream] = replace(known, in_doubt=encode_manifest(manifest))
        self.plans_sent = set()

    # --- attempts --------------------------------------------------------------------------------

    def _open_attempt(self, stream: str, taken: TakenUp) -> None:
        """Streams that were loaded together are taken up in one attempt."""
        together = {stream: taken}
        for other, known in self._streams.items():
            if known.taken_up is not None and known.taken_up.load_id == taken.load_id != "":
                together[other] = known.taken_up
        for each in together.values():
            if each.refusal:
                raise UsageError(each.refusal)
        others = self.others()
        # Named, as the record that says whose it is may be lost.
        at = self._attempt
        named = {at.id: Followed(at.number, at.id)} if at is not None else {}
        named |= {each.id: each for each in taken.followed if each.id not in named}
        failpoints.reach("save.attempt.before")
        data = self._client.open_attempt(
            secrets.token_hex(16),
            tuple(base_spec(name, self._streams[name], each) for name, each in together.items()),
            followed=tuple(named.values()),
            cause="load" if taken.load_id else "save",
            silent=others.unreachable() if others is not None else (),
        )
        failpoints.reach("save.attempt.after")
        for name in together:
            self._streams[name] = replace(self._streams[name], taken_up=None)
        self._stand_in(decode_attempt(data))
        for name in together if others is not None and taken.load_id else ():
            self._note_restored(name, self._streams[name].head)

    def _note_restored(self, stream: str, save_id: str | None) -> None:
        """All hosts hear of it: the leader has its copies made again, and who sees a checkpoint
        restored again and again, and the run never get further, may mark it as bad.
        """
        if save_id is None:
            return
        request = AddRecord(stream=stream, save_id=save_id, kind="restored", text=self.attempt_id)
        try:
            self._client.call(request)
        except TieredCkptError as error:
            # A checkpoint that memory does not hold has no records.
            log.info("that %s was restored is not recorded: %s", save_id, error)

    def _adopt_newest(self, held: Holdings) -> tuple[AttemptId, ...]:
        """Stand in the newest attempt of this run; returns the heads that it did not know of."""
        manifests, records = manifests_in(held), read_attempts([held])[0]
        run = self._client.run_id
        mine = [each.id for each in records if each.run == run]
        counted = with_saves(records, saved_by(manifests).union(mine, held.saved))
        chain = Chain(manifests, counted)
        newest = chain.of_run(run)
        for each in chain.after(newest.id) if newest is not None else chain.heads:
            record = chain.records.get(each.id)
            if record is None or record.run != run:
                raise StaleAttemptError(
                    f"attempt {each.number} of namespace {self._client.namespace} is not of this "
                    "run: this process is left over from before a restart and must stop",
                    newest_attempt=each.number,
                    same_run=False,
                )
        if newest is None:
            return ()
        if age(newest) > age(self._attempt):
            self._stand_in(newest)
        return chain.beside([newest.id])

    def _stand_in(self, record: AttemptRecord) -> None:
        """Saves belong to this attempt from now on."""
        before = self._attempt.id if self._attempt is not None else ""
        self._attempt = record
        for stream, known in self._streams.items():
            if known.taken_up is None:
                self._place(stream, record, before)

    def _place(self, stream: str, record: AttemptRecord, before: str = "") -> None:
        known = self._streams[stream]
        base = base_of(record, stream)
        # What is open in the new lineage goes on from whatever this process saved there last.
        mine = {before, *(each.id for each in known.lineage)}
        found = [n for n, each in enumerate(base.lineage) if each.id in mine]
        goes_on = found and all(each.last_seq == INT_MAX for each in base.lineage[found[-1] :])
        if known.head is not None and all(each.stream != stream for each in record.bases):
            # Who opened it did not know of this stream.
            self._streams[stream] = replace(known, taken_up=TakenUp())
            return
        self._streams[stream] = replace(
            known,
            lineage=base.lineage,
            next_seq=0,
            moved_to=base.parent if base.parent != known.head and not goes_on else None,
        )

    def _check_not_moved(self, stream: str) -> None:
        """Raises UsageError if other ranks took the stream up somewhere else."""
        known = self._streams[stream]
        if known.moved_to is None:
            return
        # A head that is lost cannot be gone on from; then the attempt's base is what is left.
        here = known.head if known.head is not None else known.moved_to
        held = manifests_in(read_holdings(self._client))
        # An attempt that was opened while a save was in doubt goes on from that one, if it exists.
        if known.moved_to != known.head and any(m.save_id == here for m in held):
            raise UsageError(
                f"other ranks of this run have loaded or saved stream {stream!r} meanwhile, and go "
                "on from another checkpoint of it: give each process group its own stream, or "
                "call engine.load(state) on the ranks that save this one"
            )
        self._streams[stream] = replace(known, moved_to=None)


def newer_text(newer: Sequence[Manifest]) -> str:
    """The checkpoints ``newer`` of one stream, for a message: how many, and their steps."""
    steps = sorted({each.step for each in newer})
    what = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
    return f"{len(newer)} newer checkpoint(s) of stream {newer[0].stream!r}, {what}"


def consent_text(manifest: Manifest, newer: Sequence[Manifest]) -> str:
    """Why nothing may be saved after ``manifest``; "": nothing is newer."""
    if not newer:
        return ""
    named = f"save_id={manifest.save_id!r}"
    return (
        f"a save after step {manifest.step} would abandon {newer_text(newer)}. To go back for "
        f"good, call engine.load(state, {named}, abandon_newer=True); to continue from the newest, "
        f"engine.load(state); to read this one only, dcp.load(state, storage_reader=engine.reader("
        f"{named})), or open the engine with read_only=True. Nothing was lost"
    )
