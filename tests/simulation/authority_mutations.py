"""The protocol of authority, broken on purpose: each of these must be found by seeds or a scene.

Each is a context manager, to be entered before :func:`.authority_seam.simulated`, which keeps what
pure functions answered. How many seeds each took, of one theme or of all, on one core:

    python -m tests.simulation.authority_mutations 200 ["cut off"]
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from tests.simulation import authority_host as hw
from tests.simulation.authority_adapter import simulated
from tests.simulation.authority_oracle import Violation
from tests.simulation.authority_world import run_case
from tieredckpt.agent.cluster.authority import Rule, Ruling
from tieredckpt.agent.cluster.in_doubt import Fates
from tieredckpt.agent.namespace import Namespace
from tieredckpt.agent.peering import attempts, memory_retention
from tieredckpt.agent.peering.attempts import Attempts
from tieredckpt.agent.tiers import host_retention, pruner, upload
from tieredckpt.dcp.job import history
from tieredckpt.format.manifest import AttemptId, AttemptRecord, Manifest
from tieredckpt.policy import history as history_module
from tieredckpt.policy.history import Chain
from tieredckpt.rpc.messages.agent import NamespaceSpec, SetPeers

Patch = tuple[object, str, object]
Mutation = Callable[[], contextlib.AbstractContextManager[None]]

MUTATIONS: dict[str, Mutation] = {}
"""By what is wrong."""


def _mutation(patches: Callable[[], Iterable[Patch]]) -> Mutation:
    """List what replaces the names that ``patches`` gives, by the words of its own name."""

    @contextlib.contextmanager
    def patched() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for where, what, how in patches():
                stack.callback(setattr, where, what, vars(where)[what])
                setattr(where, what, how)
            yield

    patched.__doc__ = patches.__doc__
    MUTATIONS[patches.__name__.replace("_", " ")] = patched
    return patched


def _nothing(*_: object, **__: object) -> None:
    pass


_TERM: Patch = (Ruling, "term", lambda self: self.rule.run if self.rule is not None else None)
_UNCLAIMED = [(upload, "check_term", _nothing), (pruner, "check_term", _nothing)]


# --- who may rule ---------------------------------------------------------------------------------


@_mutation
def a_term_never_ends() -> list[Patch]:
    """Bring back that who ruled once rules until another run rules on that host (finding 3)."""
    return [_TERM]


@_mutation
def who_deletes_from_a_bucket_asks_for_no_claim() -> list[Patch]:
    """Bring back that an agent need not ask the bucket whether somebody else has taken over."""
    return [*_UNCLAIMED]


@_mutation
def a_former_leader_prunes_the_bucket() -> list[Patch]:
    """Bring back both: the agent of a former leader rules over the bucket (finding 3)."""
    return [_TERM, *_UNCLAIMED]


@_mutation
def who_opens_rules() -> list[Patch]:
    """Bring back that the rules are those of who opened an engine last (finding 14)."""
    note = Ruling.note

    def noted(self: Ruling, run: str, spec: NamespaceSpec) -> None:
        note(self, run, spec)
        if self.rule is not None:
            self.rule = Rule(run=self.rule.run, spec=spec)

    return [(Ruling, "note", noted)]


@_mutation
def members_of_who_opens_take_over() -> list[Patch]:
    """Bring back that the hosts of who opened last are those of the job."""

    def set_peers(self: Namespace, request: SetPeers) -> None:
        self.across.set_peers(request, later=False)
        self.settle()

    return [(Namespace, "set_peers", set_peers)]


# --- who may win ----------------------------------------------------------------------------------


@_mutation
def the_highest_number_wins() -> list[Patch]:
    """Bring back that of two sides the one with more attempts goes on (finding 1)."""
    heads = vars(Chain)["heads"].fget
    return [(Chain, "heads", property(lambda self: heads(self)[-1:]))]


@_mutation
def forks_are_not_seen() -> list[Patch]:
    """Bring back that who saves need not know of what its attempt did not follow."""
    return [(Chain, "beside", lambda self, attempts: ())]


@_mutation
def a_second_side_may_begin() -> list[Patch]:
    """Bring back that a run may begin to save, whoever began since it loaded."""
    return [(Attempts, "_check_not_second", _nothing)]


@_mutation
def who_was_followed_saves_on() -> list[Patch]:
    """Bring back that a run may save as long as its processes live, as zombies do.

    All three that refuse it are off: the agent's check, its look for forks and the trainer's.
    """

    def beside(self: Chain, attempts: Iterable[str]) -> tuple[AttemptId, ...]:
        own = set(attempts)
        known = self.ancestors(own)
        others = (each for each in self.heads if each.id not in known)
        return tuple(each for each in others if not own & self.ancestors([each.id]))

    return [(Chain, "after", lambda self, attempt: ()), (Chain, "beside", beside)]


@_mutation
def an_agent_does_not_look_whether_a_run_is_over() -> list[Patch]:
    """Bring back that trainers find out by themselves that they must stop."""
    return [(Attempts, "_check_not_over", _nothing)]


@_mutation
def an_attempt_without_saves_outranks() -> list[Patch]:
    """Bring back that an attempt counts from when it was opened, though nothing was saved."""

    def everything(
        attempts: Iterable[AttemptRecord], saved: Collection[str]
    ) -> tuple[AttemptRecord, ...]:
        return tuple(attempts)

    return [(where, "with_saves", everything) for where in (attempts, history, history_module)]


@_mutation
def nobody_claims_before_a_save() -> list[Patch]:
    """Bring back that it is soon enough to ask for the bucket when something is uploaded."""
    return [(Attempts, "_claim", _nothing)]


# --- what may go ----------------------------------------------------------------------------------


def _goes_too(of: Callable[..., tuple[Manifest, ...]]) -> list[Patch]:
    """Let what ``of`` gives go by the rules for what was abandoned, unless there is a fork."""
    abandoned, candidates = history_module.abandoned, history_module.candidates

    def more(
        manifests: Iterable[Manifest], attempts: Iterable[AttemptRecord], *stream: Any
    ) -> tuple[Manifest, ...]:
        given = (tuple(manifests), tuple(attempts), *stream)
        found = {each.save_id: each for each in abandoned(*given)}
        if candidates(*given[:3]):
            found |= {each.save_id: each for each in of(*given[:3])}
        return tuple(sorted(found.values(), key=history_module.age, reverse=True))

    return [(memory_retention, "abandoned", more), (host_retention, "abandoned_of", more)]


@_mutation
def what_another_side_saved_goes() -> list[Patch]:
    """Bring back that all that is not on the line is superfluous."""
    return _goes_too(history_module.branches)


@_mutation
def what_was_passed_over_in_silence_goes() -> list[Patch]:
    """Bring back that a restart means to abandon what it could not read."""
    return _goes_too(history_module.left_behind)


# --- who may vouch and free -----------------------------------------------------------------------


@_mutation
def whoever_answers_is_meant() -> list[Patch]:
    """Bring back that who answers at a host's address is that host (finding 4).

    The wires are the simulation's; what they stand for is ``rpc/http1.py`` and
    ``rpc/peer_server.py``, which compare names and incarnations.
    """
    request = hw.World.request

    def asked(self: hw.World, *args: Any) -> Any:
        source, address, namespace, token, _, what, call = args
        return request(self, source, address, namespace, token, ("", ""), what, call)

    return [(hw.World, "request", asked)]


@_mutation
def what_nobody_here_has_heard_of_failed() -> list[Patch]:
    """Bring back that a host knows by itself what was committed (finding 5)."""
    return [(Fates, "_has_taken_over", lambda self: True)]


@_mutation
def who_says_that_a_save_failed_is_believed() -> list[Patch]:
    """Bring back that a host frees on others' word, whatever it knows itself (finding 5)."""

    def disown(self: Fates, segments: Iterable[str]) -> set[str]:
        gone = set(segments)
        self._disowned.update(dict.fromkeys(sorted(gone)))
        return gone

    return [(Fates, "disown", disown)]


NOT_VISIBLE = {
    "an agent does not look whether a run is over":
        "who was followed sees a fork with who followed it, and the trainer stops by itself; only "
        "the text of the error is another one",
}  # fmt: skip
"""Why nobody is told anything else, and the same lies everywhere."""

SEEDS = {
    "a term never ends": ("pressed", 59),
    "a former leader prunes the bucket": ("moved", 42),
    "what another side saved goes": ("cut off", 31),
    "whoever answers is meant": ("dead host", 1),
    "what nobody here has heard of failed": ("agents cut", 1),
}
"""The theme whose seeds find it soon, and one of them: any other is as good.

The others are found by scenes; seeds find them rarely, or never.
"""


def first_found(name: str, theme: str | None, seeds: Iterable[int]) -> tuple[int, str] | None:
    """The first of these seeds with which a promise is broken, and how."""
    with MUTATIONS[name](), simulated():
        for seed in seeds:
            try:
                run_case(seed, theme=theme)
            except Violation as found:
                return seed, str(found)
    return None


def main() -> None:
    most, theme = int(sys.argv[1]), (sys.argv[2] if len(sys.argv) > 2 else None)
    for name in MUTATIONS:
        found, how = first_found(name, theme, range(most)) or ("none", f"not in {most} seeds")
        print(f"{found!s:>6}  {name}: {how}", flush=True)


if __name__ == "__main__":
    main()
