"""``tieredckpt bench``: measures with the own state, tiers and ranks."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import msgspec

from tieredckpt.bench import launch
from tieredckpt.bench.settings import Mode, Settings
from tieredckpt.bench.show import show
from tieredckpt.config.schema import load_config
from tieredckpt.config.units import parse_duration, parse_size
from tieredckpt.errors import UsageError


class Size(click.ParamType[int]):
    """Bytes, such as 8GiB."""

    name = "size"

    def convert(self, value: Any, param: Any, ctx: Any) -> int:
        """Parse a value of the command line."""
        try:
            return parse_size(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class Duration(click.ParamType[float]):
    """Seconds, such as 500ms or 2s."""

    name = "duration"

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        """Parse a value of the command line."""
        try:
            return parse_duration(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


def _options(command: Callable[..., None]) -> Callable[..., None]:
    options = (
        click.option("--size", type=Size(), default="1GiB", show_default=True,
                     help="Of the state, all ranks together."),
        click.option("--tensors", type=click.IntRange(1, 1_000_000), default=300,
                     show_default=True, help="Into so many of equal size."),
        click.option("--like", default="", metavar="STEP|PATH",
                     help="Instead, the shapes of a checkpoint: a step or latest of the "
                     "configuration's namespace, a DCP folder (whose metadata is unpickled), a "
                     "safetensors file, folder or index."),
        click.option("--ranks", type=click.IntRange(1, 1024), default=1, show_default=True,
                     help="Processes on this host. Below torchrun: its own."),
        click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu",
                     show_default=True, help="Where the tensors are."),
        click.option("--config", "config_file", type=click.Path(path_type=Path, exists=True),
                     envvar="TIEREDCKPT_CONFIG", help="Its tiers and memory are used; else "
                     "./tieredckpt.yaml if there is one."),
        click.option("--json", "as_json", is_flag=True, help="Print JSON on standard output."),
        click.option("--plot", default="", metavar="FILE", help="Draw it: a PNG or SVG file."),
    )  # fmt: skip

    @functools.wraps(command)
    def with_settings(
        config_file: Path | None, size: int, tensors: int, like: str, ranks: int, device: str,
        as_json: bool, plot: str, **others: Any,
    ) -> None:  # fmt: skip
        default = Path("tieredckpt.yaml")
        file = config_file or (default if default.exists() else None)
        settings = Settings(
            mode=MODES[command.__name__], config=str(file.absolute()) if file else "",
            size_bytes=size, tensors=tensors, like=like, device=device, as_json=as_json, plot=plot,
        )  # fmt: skip
        if "RANK" not in os.environ:
            # Also whether ``like`` can be read, before torchrun would report the end of each rank.
            settings = _with(settings, size_bytes=launch.state_bytes(settings))
            if device == "cpu":
                launch.check_memory(settings.size_bytes)
        command(settings=launch.named(settings), ranks=ranks, **others)

    for option in reversed(options):
        with_settings = option(with_settings)
    return with_settings


MODES: dict[str, Mode] = {"save": "save", "recover": "recover", "compare": "compare"}


@click.group("bench")
def group() -> None:
    """Measure with your own state size, tiers and ranks.

    Nothing of a job is touched: the checkpoints are in a namespace of their own, in memory of an
    agent of their own, and are deleted at the end. On several hosts, save and compare are run by
    torchrun on each: torchrun ... -m tieredckpt bench save ...

    \b
    Example:
      tieredckpt bench save --size 8GiB --ranks 4 --plot save.png
      tieredckpt bench recover --like latest
      torchrun --nnodes 2 --nproc-per-node 8 ... -m tieredckpt bench save --like /data/model
    """


@group.command()
@_options
@click.option("--saves", type=click.IntRange(2, 10_000), default=10, show_default=True,
              help="How many with each call.")  # fmt: skip
@click.option("--every", type=Duration(), default="1s", show_default=True,
              help="From one save to the next, for the steps of training in between.")  # fmt: skip
def save(settings: Settings, ranks: int, saves: int, every: float) -> None:
    """Stall per save, of async_save and of dcp.save, and when a checkpoint is in each tier.

    \b
    Example:
      tieredckpt bench save --size 8GiB --ranks 4 --saves 20 --every 5s --json
    """
    _run(_with(settings, count=saves, step_s=every), ranks)


@group.command()
@_options
@click.option("--times", type=click.IntRange(1, 1000), default=5, show_default=True,
              help="Recoveries from each source.")  # fmt: skip
@click.option("--source", "sources", multiple=True,
              help='"memory" or a tier; may be repeated. All by default.')  # fmt: skip
def recover(settings: Settings, ranks: int, times: int, sources: tuple[str, ...]) -> None:
    """Time from SIGKILL of one rank to the first step of all, by source, with its stages.

    torchrun starts all ranks again. For a tier, the copies nearer than it are deleted before, and
    the agent is ended, as after the loss of the host.

    \b
    Example:
      tieredckpt bench recover --size 8GiB --ranks 4 --source memory --source nvme
    """
    settings = _with(settings, count=times)
    result = launch.recover(settings, ranks, sources, functools.partial(click.echo, err=True))
    show(result, settings)


@group.command()
@_options
@click.option("--rounds", type=click.IntRange(1, 1000), default=5, show_default=True,
              help="In each, every way saves and loads once.")  # fmt: skip
@click.option("--folder", "folders", multiple=True, type=click.Path(path_type=Path),
              help="Where stock DCP writes: a disk, a tmpfs, a file system that all hosts mount; "
              "may be repeated. By default /dev/shm and the first tier's folder.")  # fmt: skip
def compare(settings: Settings, ranks: int, rounds: int, folders: tuple[Path, ...]) -> None:
    """Against stock DCP (FileSystemWriter), save and async_save, in turns.

    \b
    Example:
      tieredckpt bench compare --size 4GiB --ranks 2 --folder /mnt/nvme --folder /dev/shm
    """
    found = folders or _default_folders(settings)
    where = {str(each): f"{each.absolute()}/{settings.namespace}-dcp" for each in found}
    if "RANK" not in os.environ or not settings.like:
        launch.check_space(where, settings.size_bytes)
    _run(_with(settings, count=rounds, folders=where), ranks)


def _default_folders(settings: Settings) -> tuple[Path, ...]:
    config = load_config(settings.config or None, os.environ)
    tiers = [Path(each.url.removeprefix("file://")) for each in config.tiers if each.is_file]
    if not tiers:
        raise UsageError("no tier is a folder: name a folder of a disk with --folder, and /dev/shm")
    return Path(settings.runtime_dir).parent, tiers[0]


def _with(settings: Settings, **changes: Any) -> Settings:
    return msgspec.structs.replace(settings, **changes)


def _run(settings: Settings, ranks: int) -> None:
    show(launch.run(settings, ranks), settings)
