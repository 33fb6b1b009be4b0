"""Several process groups of a run, their zombies and a dying agent, against a tree of saves.

The real history of each coordinator and the real agent, in one process; only the bytes are small.
The model is the one of test_policy_timeline.py: a save points to the save it went on from, a stream
has one head, and the candidates are what one meets walking up from it.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.format.samples import plan_id
from tests.support.agent import FakeTrainer, spec_of
from tests.support.faults import new_runtime_dir, remove_runtime_dir
from tests.unit.agent.test_node import Host
from tieredckpt.dcp.job.history import History
from tieredckpt.dcp.save.collective import _commit
from tieredckpt.dcp.state.metadata import EncodedPlan
from tieredckpt.errors import NotFoundError, StaleAttemptError, UsageError
from tieredckpt.format.manifest import Manifest
from tieredckpt.format.plan import encode_plan

KEEP = 3
STREAMS = ("actor", "critic")


@dataclass(eq=False)
class Save:
    save_id: str
    went_on_from: Save | None


class Coordinator:
    """Rank 0 of a process group: its session with the agent and its history."""

    def __init__(self, host: Host, run_id: str) -> None:
        self.trainer: FakeTrainer = host.trainer(spec_of(keep_last=KEEP), run=run_id, size=4096)
        self.client: Any = self.trainer.client
        self.history = History(self.client, [])
        self.knows: set[str] = set()

    def save(self, stream: str, step: int) -> Manifest:
        """As a writer does it: check, write, commit."""
        self.history.check_may_save(stream)
        ref = self.trainer.write_segment(step)
        given = self.trainer.manifest(step, (ref,), stream=stream)
        manifest = self.history.begin_save(
            stream,
            step,
            0.0,
            plan=given.plan,
            segments=given.segments,
            world_size=given.world_size,
            tags=given.tags,
        )
        plan = self.trainer.plan
        session: Any = SimpleNamespace(history=self.history, client=self.client)
        done = _commit(session, manifest, EncodedPlan(plan_id(plan), encode_plan(plan)))
        self.knows.add(stream)
        return done


def go_on_from(coordinator: Coordinator, stream: str, chosen: Manifest | None) -> None:
    """What a load ends with; None: nothing is there."""
    save_id = chosen.save_id if chosen is not None else None
    plan = coordinator.history.recovery_plan(stream, save_id=save_id)
    coordinator.history.restored([plan], {}, abandon_newer=True)


class Runs(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.folder = new_runtime_dir()
        self.host = Host(self.folder)
        self.saves: dict[str, Save] = {}
        self.heads: dict[str, Save | None] = dict.fromkeys(STREAMS)
        self.zombies: list[Coordinator] = []
        self.taken: dict[tuple[int, str], Save | None] = {}
        """By group and stream, what it has loaded, and not saved from yet."""
        self.begun = False
        """Whether the present run has saved: only then the ones before are over."""
        self.step = 0
        self.new_run()

    def teardown(self) -> None:
        if hasattr(self, "host"):
            self.host.close()
            remove_runtime_dir(self.folder)

    def new_run(self) -> None:
        run_id = secrets.token_hex(16)
        self.now = [Coordinator(self.host, run_id) for _ in STREAMS]
        self.owner = dict(zip(STREAMS, self.now, strict=True))
        self.taken, self.begun = {}, False

    def candidates(self, stream: str) -> list[Manifest]:
        plan = self.now[0].history.recovery_plan(stream)
        assert not plan.refused
        return [candidate.manifest for candidate in plan.candidates]

    def next_step(self) -> int:
        self.step += 1
        return self.step

    # --- what happens ---------------------------------------------------------------------------

    @rule(stream=st.sampled_from(STREAMS))
    def save(self, stream: str) -> None:
        owner = self.owner[stream]
        there = self.candidates(stream)
        if stream not in owner.knows and there:
            with pytest.raises(UsageError, match="has loaded none"):
                owner.save(stream, self.next_step())
            return
        head = self.taken.pop((self.now.index(owner), stream), self.heads[stream])
        manifest = owner.save(stream, self.next_step())
        assert manifest.parent == (head.save_id if head is not None else None)
        self.heads[stream] = self.saves[manifest.save_id] = Save(manifest.save_id, head)
        self.begun = True

    @rule(
        who=st.integers(0, 1), stream=st.sampled_from(STREAMS), back=st.integers(0, KEEP - 1)
    )  # fmt: skip
    def load(self, who: int, stream: str, back: int) -> None:
        """A group loads a stream, the newest or an older one, and is who saves into it then."""
        loader, there = self.now[who], self.candidates(stream)
        chosen = there[min(back, len(there) - 1)] if there else None
        go_on_from(loader, stream, chosen)
        self.taken[who, stream] = self.saves[chosen.save_id] if chosen is not None else None
        loader.knows.add(stream)
        self.owner[stream] = loader

    @rule(stream=st.sampled_from(STREAMS), back=st.integers(0, KEEP - 1))
    def load_together(self, stream: str, back: int) -> None:
        """Both groups load; the other one saves on from what the first one has agreed on."""
        self.load(0, stream, back)
        state = self.now[0].history.snapshot([stream])
        self.now[1].history.adopt(state)
        self.taken[1, stream] = self.taken[0, stream]
        self.now[1].knows.add(stream)
        self.owner[stream] = self.now[1]

    @rule(stream=st.sampled_from(STREAMS))
    def the_other_group_saves(self, stream: str) -> None:
        """Who is not the owner cannot add a checkpoint once the owner has."""
        owner = self.owner[stream]
        other = self.now[1 - self.now.index(owner)]
        if stream not in owner.knows and self.candidates(stream):
            return
        self.save(stream)
        with pytest.raises(UsageError):
            other.save(stream, self.next_step())
        # It only tried to: what it was allowed to do in other streams has not changed.

    @rule(stream=st.sampled_from(STREAMS))
    def the_other_group_rolls_back(self, stream: str) -> None:
        """Who saved until then would go on from what is abandoned now, and hears of it."""
        before = self.owner[stream]
        there = self.candidates(stream)
        if len(there) < 2 or stream not in before.knows:
            return
        self.load(1 - self.now.index(before), stream, 1)
        self.save(stream)
        with pytest.raises(UsageError, match=r"another checkpoint|two process groups"):
            before.save(stream, self.next_step())

    @rule()
    def restart_the_job(self) -> None:
        self.zombies = [*self.zombies, *self.now][-3:]
        self.new_run()

    @precondition(lambda self: self.begun)  # else sessions are opened again, by the real client
    @rule()
    def restart_the_agent(self) -> None:
        self.host.restart()

    @precondition(lambda self: self.zombies and self.begun)
    @rule(which=st.integers(0, 2), stream=st.sampled_from(STREAMS), loads=st.booleans())
    def a_zombie(self, which: int, stream: str, loads: bool) -> None:
        zombie = self.zombies[which % len(self.zombies)]
        there = self.candidates(stream)
        # One that never loaded the stream may hear of that instead.
        if not zombie.history.attempt_id and (loads or not zombie.knows):
            return  # who has not saved yet, and begins now, is the newest start of all
        if loads:  # that changes nothing, for itself neither
            go_on_from(zombie, stream, there[0] if there else None)
        # A real client would open the session again that another agent has forgotten.
        with pytest.raises((UsageError, StaleAttemptError, NotFoundError)):
            zombie.save(stream, self.next_step())

    # --- the laws -------------------------------------------------------------------------------

    @invariant()
    def the_candidates_are_the_tree(self) -> None:
        if not hasattr(self, "now"):
            return
        there = {each.save_id for tier in [self.now[0].trainer.tier()] for each in tier.manifests}
        for stream in STREAMS:
            expected, save = [], self.heads[stream]
            while save is not None:
                if save.save_id in there:
                    expected.append(save.save_id)
                save = save.went_on_from
            assert [each.save_id for each in self.candidates(stream)] == expected
            # Retention keeps the newest of each stream, whatever the other ones do.
            head = self.heads[stream]
            assert head is None or expected[0] == head.save_id


TestRuns = Runs.TestCase
TestRuns.settings = settings(
    max_examples=max(5, settings.default.max_examples // 8), stateful_step_count=20
)
