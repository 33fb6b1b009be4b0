"""``dcp.async_save``, and loads while a save is under way."""

from __future__ import annotations

import threading
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.staging import BlockingAsyncStager, DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from tieredckpt.testing.dcp import oracle
from tieredckpt.testing.dcp.job import Job
from tieredckpt.testing.dcp.process_executor import meet_on_loopback
from tieredckpt.testing.dcp.scenario import scenario
from tieredckpt.testing.dcp.scenarios.failures import SaveHooks, boom, state_of

WAIT_S = 80.0


class Started:
    """A save in the background.

    Args:
        response: What ``dcp.async_save`` returned.
    """

    def __init__(self, response: Any) -> None:
        self._upload = getattr(response, "upload_completion", response)
        self._staging = getattr(response, "staging_completion", None)

    def staged(self) -> None:
        """Wait until the trainer may change its tensors."""
        if self._staging is not None:
            self._staging.result(WAIT_S)

    def result(self) -> None:
        """Wait until it is saved; raises what it raised."""
        self._upload.result(WAIT_S)


def start(job: Job, state: dict[str, Any], step: int, **options: Any) -> Started:
    """``dcp.async_save`` with a writer of the plug-in."""
    return Started(dcp.async_save(state, storage_writer=job.storage.writer(step), **options))


def _in_the_background(job: Job, **options: Any) -> None:
    group = dist.new_group(list(range(job.world)))  # or it races with the trainer's collectives
    state = state_of(job)
    for step in (1, 2, 3):
        oracle.fill(state, step)
        started = start(job, state, step, process_group=group, **options)
        started.staged()
        oracle.fill(state, 99)  # training goes on
        started.result()
        job.load_checked(state_of(job), step)
    job.restart()
    job.load_checked(state_of(job), 3)


@scenario(2)
def async_save_in_a_thread(job: Job) -> None:
    """The thread executor with the plug-in's own stager, or DCP's default one"""
    _in_the_background(job)


@scenario(2, deadline_s=180.0)
def async_save_in_a_process(job: Job) -> None:
    """The process executor"""
    meet_on_loopback()
    _in_the_background(job, async_checkpointer_type=AsyncCheckpointerType.PROCESS)


@scenario(2)
def async_save_with_the_default_stager(job: Job) -> None:
    """The thread executor with DCP's DefaultStager, given by the caller"""
    # The other options need an accelerator.
    stager = DefaultStager(StagingOptions(False, False, False, False))
    try:
        _in_the_background(job, async_stager=stager)
    finally:
        stager.close()


@scenario(2)
def async_save_with_the_blocking_stager(job: Job) -> None:
    """The thread executor with DCP's BlockingAsyncStager"""
    _in_the_background(job, async_stager=BlockingAsyncStager(cache_staged_state_dict=False))


@scenario(2)
def async_save_fails(job: Job) -> None:
    """A failure in the background arrives at every rank's future; then saves work again"""
    group = dist.new_group([0, 1])
    job.save_filled(state_of(job), 1)
    planner = SaveHooks("resolve", boom) if job.rank == 1 else DefaultSavePlanner()
    state = state_of(job)
    oracle.fill(state, 2)
    started = start(job, state, 2, process_group=group, planner=planner)
    job.all_raise(started.result)
    job.not_visible(state_of(job), 2)
    # A plug-in may say it once more, to who has not looked at the future; but on all ranks.
    oracle.fill(state, 3)
    raised: BaseException | None = None
    try:
        start(job, state, 3, process_group=group).result()
    except (Exception, CheckpointException) as error:  # noqa: BLE001 (checked below)
        raised = error
    said = job.meet("" if raised is None else "raised")
    assert len(set(said)) == 1, f"the ranks differ: {said}, {raised!r}"
    oracle.fill(state, 4)
    start(job, state, 4, process_group=group).result()
    job.load_checked(state_of(job), 4)


@scenario(2)
def two_async_saves_at_once(job: Job) -> None:
    """A second async_save while the first one runs: both are saved, or the second raises on all"""
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    job.save_filled(state_of(job), 1)
    # Whoever waits for the first save in the second call must not wait for ever.
    timer = threading.Timer(0.5, job.tell, ["go on"])
    timer.start()
    slow = SaveHooks("resolve", lambda: job.wait_for("go on"))
    first, second = state_of(job), state_of(job)
    oracle.fill(first, 2)
    oracle.fill(second, 3)
    started = start(job, first, 2, process_group=groups[0], planner=slow)
    raised: BaseException | None = None
    try:
        start(job, second, 3, process_group=groups[1]).result()
    except (Exception, CheckpointException) as error:  # noqa: BLE001 (checked below)
        raised = error
    timer.join()
    started.result()
    said = job.meet("" if raised is None else "raised")
    assert len(set(said)) == 1, f"the ranks differ: {said}, {raised!r}"
    job.load_checked(state_of(job), 2)
    if raised is None:
        job.load_checked(state_of(job), 3)
    job.save_filled(state_of(job), 4)
    job.load_checked(state_of(job), 4)


@scenario(2)
def load_while_an_async_save_runs(job: Job) -> None:
    """The earlier step is loaded while the next one is being written in the background"""
    group = dist.new_group([0, 1])
    job.save_filled(state_of(job), 1)

    def pause() -> None:
        job.wait_for("loaded")

    planner = SaveHooks("resolve", pause)
    state = state_of(job)
    oracle.fill(state, 2)
    started = start(job, state, 2, process_group=group, planner=planner)
    job.load_checked(state_of(job), 1)
    job.tell("loaded")
    started.result()
    job.load_checked(state_of(job), 2)


@scenario(2)
def load_while_another_rank_saves(job: Job) -> None:
    """Rank 1 loads the earlier step while rank 0, alone, is in the middle of a save"""
    job.save_filled({"x": torch.zeros(9)}, 1)
    if job.rank == 0:

        def pause() -> None:
            job.tell("writing")
            job.wait_for("loaded")

        planner = SaveHooks("resolve", pause)
        job.save_filled({"x": torch.zeros(9)}, 2, planner=planner, no_dist=True)
    else:
        job.wait_for("writing")
        job.load_checked({"x": torch.zeros(9)}, 1, no_dist=True)
        job.tell("loaded")
    job.meet()
    job.load_checked({"x": torch.zeros(9)}, 2)
