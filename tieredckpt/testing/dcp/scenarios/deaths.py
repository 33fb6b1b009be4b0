"""A rank dies, as SIGKILL does it: what was saved before is whole, what was not is not there."""

from __future__ import annotations

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from tieredckpt.testing.dcp.job import Job
from tieredckpt.testing.dcp.scenario import scenario
from tieredckpt.testing.dcp.scenarios.failures import SaveHooks, state_of

ONE = frozenset({1})
ZERO = frozenset({0})


def _killed(job: Job, place: str, on: int) -> None:
    if job.stage == 0:
        job.save_filled(state_of(job), 1)
        job.meet()
        planner = SaveHooks(place, job.die) if job.rank == on else DefaultSavePlanner()
        job.save_filled(state_of(job), 2, planner=planner)
    else:
        saved = state_of(job)
        saved.pop("text.2", None)  # of a rank that was not there yet
        job.not_visible(saved, 2)
        job.load_checked(saved, 1)
        job.save_filled(state_of(job), 2)
        job.load_checked(state_of(job), 2)


@scenario(2, 2, killed={0: ONE})
def killed_while_planning(job: Job) -> None:
    """A rank is killed while it plans; the restarted job loads what was before"""
    _killed(job, "local", 1)


@scenario(2, 2, killed={0: ONE})
def killed_while_writing(job: Job) -> None:
    """A rank is killed in the middle of its writes; the restarted job loads what was before"""
    _killed(job, "resolve", 1)


@scenario(2, 3, killed={0: ZERO})
def coordinator_killed_while_writing(job: Job) -> None:
    """The coordinator is killed in the middle of its writes; three ranks go on"""
    _killed(job, "resolve", 0)


@scenario(2, 2, killed={0: ZERO})
def coordinator_killed_before_the_commit(job: Job) -> None:
    """The coordinator is killed when all have written, before it makes the checkpoint exist"""
    if job.stage == 0:
        job.save_filled(state_of(job), 1)
        job.meet()
        state = state_of(job)
        writer = job.storage.writer(2)

        def finish(*_args: object, **_kwargs: object) -> None:
            job.die()

        writer.finish = finish  # type: ignore[method-assign]
        dcp.save(state, storage_writer=writer)
    else:
        job.not_visible(state_of(job), 2)
        job.load_checked(state_of(job), 1)
        job.save_filled(state_of(job), 2)
        job.load_checked(state_of(job), 2)


@scenario(2, 2, killed={0: frozenset({0, 1})})
def killed_after_the_save(job: Job) -> None:
    """All ranks are killed as soon as the save has returned on all of them: it is there"""
    if job.stage == 0:
        job.save_filled(state_of(job), 1)
        job.meet()
        job.die()
    job.load_checked(state_of(job), 1)


@scenario(2, 2, killed={0: ONE})
def killed_while_an_existing_step_is_saved(job: Job) -> None:
    """A step is saved again and a rank is killed in it: the first one is still whole"""
    if job.stage == 0:
        job.save_filled(state_of(job), 1)
        job.meet()
        planner = SaveHooks("resolve", job.die) if job.rank == 1 else DefaultSavePlanner()
        other = state_of(job)
        other["plain"].fill_(3.0)
        job.save(other, 1, planner=planner)
    job.load_checked(state_of(job), 1)
