"""One rank saves while its host hears of some saves, late or never, and its agent starts anew.

Whatever comes late or is lost: nothing is freed that may be the newest checkpoint of its stream,
nor what retention would keep of what the rank knows to be committed.
"""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import event, given
from hypothesis import strategies as st

from tests.support.sealed import Here
from tieredckpt.dcp.job.unreported import UnreportedSegments
from tieredckpt.format.manifest import StreamBase

KEEP = 2
STREAMS = ("default", "other")


@dataclass
class Save:
    """What became of it is the truth; what is told of it, and heard, is not all of that."""

    segment: str
    stream: str
    committed: bool
    heard: bool = False


class World:
    """One host, its rank, and the truth."""

    def __init__(self) -> None:
        self.here, self.rank = Here(), UnreportedSegments()
        self.saves: list[Save] = []

    def save(self, stream: str, committed: bool, said: bool) -> None:
        segment = self.here.seal()
        self.saves.append(Save(segment, stream, committed))
        self.rank.begin(segment, stream)
        if said:
            self.rank.end([segment], "committed" if committed else "failed")

    def hear(self, number: int) -> None:
        """A manifest comes, unless retention would refuse it, which goes by what is here."""
        waiting = [each for each in self.saves if each.committed and not each.heard]
        if not waiting:
            return
        save = waiting[number % len(waiting)]
        if save.segment not in self.here.pool.sealed:
            return  # another host may have its copy
        save.heard = True
        self.here.commit(save.segment, stream=save.stream, step=self.saves.index(save))
        known = [each for each in self.here.known if each.stream == save.stream]
        for old in sorted(known, key=lambda each: each.step)[:-KEEP]:
            self.here.known.remove(old)
            del self.here.pool.sealed[old.segments[0].id]

    def reserve(self) -> None:
        """The rank has no room: it says what it knows, and gets what may go."""
        told = self.rank.report()
        undecided = self.here.fates.undecided()
        failed = {each.segment_id for each in told if each.fate == "failed"} & undecided.keys()
        self.here.fates.free(self.here.fates.disown(failed))
        found = self.here.overtaken(told, KEEP)
        if found is not None:
            self.check(found)

    def check(self, freed: str) -> None:
        (save,) = (each for each in self.saves if each.segment == freed)
        newer = [
            each
            for each in self.saves[self.saves.index(save) + 1 :]
            if each.stream == save.stream and each.committed
        ]
        event(f"freed, {'committed' if save.committed else 'failed'}")
        assert newer, "it may be the newest one"
        (said,) = (each.fate for each in self.rank.report() if each.segment_id == freed)
        assert said != "committed" or len(newer) >= KEEP

    def next_run(self, sees: bool) -> None:
        """All ends; the next run loads the newest checkpoint that there is in truth."""
        here = self.here
        here.begin_run(f"{len(here.catalog.opened) + 1:032x}", live=set())
        newest = [each for each in self.saves if each.stream == "default" and each.committed][-1:]
        names = {ref.id: each.save_id for each in here.known for ref in each.segments}
        loaded = newest[0].segment if newest else ""
        if sees:
            base = names.get(loaded) or (here.new_id() if newest else None)
            here.open_attempt(StreamBase("default", base, None, ()))
        if loaded in here.pool.sealed:
            held = here.fates.undecided().keys() | here.fates.named()
            assert loaded in held, "what was just loaded"


ACTIONS = st.one_of(
    st.tuples(st.just("save"), st.sampled_from(STREAMS), st.booleans(), st.booleans()),
    st.tuples(st.just("hear"), st.integers(0, 5)),
    st.tuples(st.just("reserve")),
    st.tuples(st.just("restart")),
)


@given(st.lists(ACTIONS, max_size=40), st.booleans())
def test_nothing_that_may_be_the_newest_is_freed_on_a_guess(actions: list[tuple], sees: bool):
    world = World()
    for name, *arguments in actions:
        if name == "restart":
            world.here.restart()
        else:
            getattr(world, name)(*arguments)
    held = world.here.fates.undecided().keys() | world.here.fates.named()
    for stream in STREAMS:
        committed = [s for s in world.saves if s.stream == stream and s.committed]
        assert all(each.segment in held for each in committed[-1:])
    world.next_run(sees)
