"""What a benchmark does, from the command line to each rank."""

from __future__ import annotations

from typing import Literal

import msgspec

Mode = Literal["save", "recover", "compare"]
ASYNC = "async_save"
CALLS = (ASYNC, "dcp.save")
"""How a state is saved, in this order."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """As JSON the only argument of a rank.

    Attributes:
        mode: What is measured.
        config: The YAML file, or "".
        namespace: Of the checkpoints: a new one, so that no other job's are touched. Below several
            hosts "", and rank 0's decides.
        runtime_dir: Folder of an agent of its own; it must not be there.
        size_bytes: Of the state, all ranks together.
        tensors: Into so many of equal size.
        like: Instead: a step, a DCP folder, a safetensors file or index, of which names, shapes and
            types are taken.
        device: "cpu" or "cuda".
        count: Saves of each call, or rounds.
        step_s: Between two saves, as training would.
        folders: By name, where stock DCP writes.
        events: Folder of the files by which ranks and the command know of each other (recover).
        parent: The command's process; ranks end with it (recover).
        result: File for the result, or "": rank 0 prints it.
        as_json: Whether it is printed as JSON.
        plot: PNG file, or "".
    """

    mode: Mode
    config: str = ""
    namespace: str = ""
    runtime_dir: str = ""
    size_bytes: int = 0
    tensors: int = 1
    like: str = ""
    device: str = "cpu"
    count: int = 10
    step_s: float = 0.0
    folders: dict[str, str] = {}
    events: str = ""
    parent: int = 0
    result: str = ""
    as_json: bool = False
    plot: str = ""


class Level(msgspec.Struct, frozen=True, kw_only=True):
    """Where saves arrive: "memory", "replicated", or a tier's name.

    Attributes:
        seconds: By step, from the save's begin until the whole checkpoint was there.
    """

    name: str
    seconds: dict[int, float]


class Way(msgspec.Struct, frozen=True, kw_only=True):
    """One way to save or to load, such as "tieredckpt async" or "DCP async to disk".

    Attributes:
        name: Of it.
        stall_s: By round, how long training waits.
        done_s: By round, until it is complete there.
        load_s: By round, of a load.
    """

    name: str
    stall_s: list[float]
    done_s: list[float]
    load_s: list[float]


class Recovery(msgspec.Struct, frozen=True, kw_only=True):
    """From SIGKILL of one rank to the first step of all, from one source.

    Attributes:
        source: "memory", or a tier's name.
        total_s: Seconds.
        stages: Seconds by stage, in their order; each ends when the last rank has done it.
        bytes_by_tier: What all ranks have read from where.
    """

    source: str
    total_s: float
    stages: dict[str, float]
    bytes_by_tier: dict[str, int]


STAGES = {
    "noticed": "torchrun starts all ranks again",
    "started": "Python, and imports",
    "joined": "process group, empty tensors",
    "opened": "engine, and agent",
    "loaded": "load, verified",
    "stepped": "first update",
}
"""What ends, and what a stage consists of."""


class Times(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank of one generation leaves, in seconds of the monotonic clock.

    Attributes:
        ends_s: Of :data:`STAGES`.
        pid: Its process.
        bytes_by_tier: What it read from where.
    """

    ends_s: list[float]
    pid: int
    bytes_by_tier: dict[str, int]


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What a benchmark found. Durations are the maximum over ranks.

    Attributes:
        mode: What was measured.
        machine: Versions, processor, device.
        ranks: Number of ranks.
        state_bytes: Of all ranks.
        rank_bytes: Of the rank with the most.
        tensors: Their number.
        step_s: Between two saves.
        stall_s: By call, of each save, the first one first (save).
        levels: Where those of ``async_save`` went (save).
        ways: Compared with each other (compare).
        recoveries: One of each source and round (recover).
    """

    mode: Mode
    machine: dict[str, str]
    ranks: int
    state_bytes: int
    rank_bytes: int
    tensors: int
    step_s: float = 0.0
    stall_s: dict[str, list[float]] = {}
    levels: list[Level] = []
    ways: list[Way] = []
    recoveries: list[Recovery] = []
