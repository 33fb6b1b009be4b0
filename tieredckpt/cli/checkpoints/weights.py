"""``tieredckpt export``, ``import`` and ``show``: a checkpoint's contents, out, in, and listed.

These commands import torch, when they run.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.text import Text
from rich.tree import Tree

from tieredckpt.cli.output import (
    TABLE_WIDTH_MAX,
    count,
    one_line,
    print_json,
    print_table,
    short,
    size,
)
from tieredckpt.cli.sources import Place, find_holdings, full_save_id, namespace_options
from tieredckpt.config.schema import Config, load_config
from tieredckpt.config.units import parse_duration, parse_size
from tieredckpt.errors import UsageError

if TYPE_CHECKING:
    from tieredckpt.export.source import Which
    from tieredckpt.export.tree import Contents, Leaf

NAMES_SHOWN = 10
LATEST = "latest"
_ID_START = re.compile(r"[0-9a-f]{4,32}")

_STREAM = click.option(
    "--stream", default="default", show_default=True, help="The sequence of checkpoints."
)
_STEP = click.argument("step")


def _which(place: Place, step: str, stream: str) -> Which:
    """The checkpoint that STEP names: by a number, `latest`, or the first digits of its save id."""
    from tieredckpt.export.source import Which

    if step.isdecimal():
        return Which(step=int(step), stream=stream)
    if step == LATEST:
        return Which(stream=stream)
    if not _ID_START.fullmatch(step):
        raise UsageError(f"STEP is a number, `{LATEST}` or a save id, not {step!r}")
    return Which(save_id=full_save_id([find_holdings(place).holdings], step), stream=stream)


def _config(place: Place) -> Config:
    """The configuration with the options' namespace and folder."""
    config = place.config or load_config(None, os.environ)
    name = place.namespace(place.status())
    agent = msgspec.structs.replace(config.agent, runtime_dir=str(place.runtime_dir))
    return msgspec.structs.replace(config, namespace=name, agent=agent)


@contextmanager
def _bar(what: str, *, quiet: bool) -> Iterator[Any]:
    """Yield a function of (bytes done, bytes in all) that draws a bar on a terminal."""
    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    shown = not quiet and sys.stderr.isatty()
    with Progress(*columns, console=Console(stderr=True), disable=not shown) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@click.command()
@_STEP
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--format",
    "format_",
    type=click.Choice(["dcp", "safetensors", "torch"]),
    required=True,
    help="safetensors and dcp make a folder, torch makes a file.",
)
@click.option("--keys", multiple=True, metavar="GLOB", help="Only these keys; may be repeated.")
@click.option("--strip", default="", metavar="PREFIX", help="Remove it from keys that begin so.")
@click.option("--dtype", type=click.Choice(["bf16", "fp16", "fp32"]), help="Cast floating tensors.")
@click.option(
    "--shard-size",
    default="5GB",
    show_default=True,
    help="Of safetensors: the most bytes of tensors in one file.",
)
@click.option("--number-keys", is_flag=True, help="Of torch: decimal keys are numbers.")
@_STREAM
@namespace_options
def export(
    place: Place,
    step: str,
    out: Path,
    format_: Any,
    keys: tuple[str, ...],
    strip: str,
    dtype: str | None,
    shard_size: str,
    number_keys: bool,
    stream: str,
) -> None:
    """Write the checkpoint of STEP to OUT, in a format of other programs.

    STEP is a number, `latest`, or the first digits of a save id, which may be off the timeline.

    Reads memory, disks and buckets, whichever are there, also beside a live job, and needs no
    agent. Each block is verified; a damaged one is read from the next copy. OUT appears complete or
    not at all, and is not overwritten.

    Values that are no tensors are not in safetensors; torch has those that
    torch.load(weights_only=True) accepts. The others are named. So are dicts whose keys may have
    been numbers, and what was empty, if a plain dcp.save left that in doubt.

    \b
    Examples:
      tieredckpt export latest ./hf --format safetensors --keys 'model.*' --strip model.
      tieredckpt export 12000 weights.pt --format torch --dtype bf16
      tieredckpt export 12000 ./dcp --format dcp --config bucket.yaml --json
    """
    from tieredckpt.export.export import Request, export_checkpoint

    try:
        shard_bytes = parse_size(shard_size)
    except ValueError as error:
        raise UsageError(f"--shard-size: {error}") from None
    which = _which(place, step, stream)
    request = Request(
        out=out.absolute(),
        format=format_,
        keys=keys,
        strip=strip,
        dtype=dtype,
        shard_bytes=shard_bytes,
        number_keys=number_keys,
    )
    with _bar(f"exporting {step}", quiet=place.as_json) as progress:
        report = export_checkpoint(_config(place), which, request, progress)
    for names, what in (
        (report.text_keys, "keys came out as text, and may have been numbers (--number-keys)"),
        (report.missing, "what was empty is not in the checkpoint"),
    ):
        if names:
            click.secho(f"{what}: {_some(names)}", fg="yellow", err=True)
    if place.as_json:
        print_json(
            **{name: getattr(report, name) for name in report.__slots__},
            format=format_,
        )
        return
    tiers = ", ".join(report.bytes_by_tier) or "no tier"
    click.echo(
        f"step {report.step} (save id {short(report.save_id)}) is in {out}: "
        f"{count(report.tensors, 'tensor')}, {size(report.bytes)}, read from {tiers} in "
        f"{report.seconds:.1f} s"
    )
    if report.repaired_blocks:
        blocks = count(report.repaired_blocks, "damaged block")
        click.secho(f"{blocks} came from another copy: run `tieredckpt verify`", fg="yellow")
    if names := [*report.left_out]:
        text = f"not exported: {count(len(names), 'value')}, {_some(names)}"
        click.secho(f"{text} (--json has the reasons)", fg="yellow")


def _some(names: list[str]) -> str:
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return one_line(", ".join(names[:NAMES_SHOWN])) + more


@click.command(name="import")
@click.argument("source", type=click.Path(path_type=Path, exists=True))
@click.option("--step", type=click.IntRange(min=0), required=True, help="Of the checkpoint.")
@click.option(
    "--timeout", default="1 h", show_default=True, metavar="DURATION", help="For the tiers' copies."
)
@click.option("--prefix", default="", help="Of a file: put it before all keys, as `train.`.")
@_STREAM
@namespace_options
def import_(place: Place, source: Path, step: int, timeout: str, prefix: str, stream: str) -> None:
    """Commit SOURCE as the first checkpoint of a namespace: a job that starts there loads it.

    SOURCE is a folder that stock DCP wrote, or a file of torch.save. Nothing in it is executed: a
    file with types that a load refuses by default is refused. The checkpoint is copied to the
    tiers, and the command fails if one does not get it in time; the agent goes on. Starts this
    host's agent if none runs. A namespace that has checkpoints is refused, with the keys in which
    its newest one differs from SOURCE.

    \b
    Examples:
      tieredckpt import ./step-12000 --step 12000 --namespace gpt-run-8
      tieredckpt import named.pt --step 1200 --prefix train.
      tieredckpt import weights.pt --step 0 --config run.yaml --json
    """
    from tieredckpt.export.imports import import_checkpoint

    try:
        timeout_s = parse_duration(timeout)
    except ValueError as error:
        raise UsageError(f"--timeout: {error}") from None
    config = _config(place)
    done = import_checkpoint(config, source, step, stream, timeout_s=timeout_s, prefix=prefix)
    if place.as_json:
        print_json(**{name: getattr(done, name) for name in done.__slots__})
        return
    where = f"memory and {done.tier}" if done.tier else "memory alone, as no tier is configured"
    click.echo(
        f"step {done.step} (save id {short(done.save_id)}) is in {where}: "
        f"{count(done.keys, 'key')}, {size(done.bytes)}"
    )


@click.command()
@_STEP
@click.option("--tree", "as_tree", is_flag=True, help="Nested, with the bytes of each level.")
@_STREAM
@namespace_options
def show(place: Place, step: str, as_tree: bool, stream: str) -> None:
    """Print what is in the checkpoint of STEP, and which copies hold it.

    STEP is a number, `latest`, or the first digits of a save id, which may be off the timeline.

    Reads the plan and the segments' indexes alone. Changes nothing, and needs no agent.

    \b
    Examples:
      tieredckpt show latest --tree
      tieredckpt show 12000 --json
    """
    from tieredckpt.export.tree import contents

    found = contents(_config(place), _which(place, step, stream))
    segments = [
        {"segment": number, "id": ref.id, "bytes": ref.size, "host": ref.host, "held by": places}
        for number, (ref, places) in enumerate(
            zip(found.manifest.segments, found.places, strict=True)
        )
    ]
    if place.as_json:
        rows = [{key: getattr(each, key) for key in each.__slots__} for each in found.leaves]
        names = ("namespace", "stream", "step", "save_id", "world_size", "tags")
        about = {name: getattr(found.manifest, name) for name in names}
        print_json(**about, keys=rows, segments=segments)
        return
    if as_tree:
        Console(width=TABLE_WIDTH_MAX, highlight=False, emoji=False).print(_tree(found))
    else:
        print_table(None, [_row(each) for each in found.leaves])
    click.echo()
    for name, value in found.manifest.tags.items():
        click.echo(one_line(f"tag {name}: {value}"))
    rows = [
        each | {"id": short(str(each["id"])), "held by": ", ".join(each["held by"])}  # type: ignore[arg-type]
        for each in segments
    ]
    print_table(None, rows)


def _kind(leaf: Leaf) -> str:
    if leaf.shape is None:
        return "value"
    of = f" ({leaf.wrapper})" if leaf.wrapper else ""
    return f"{leaf.dtype} {list(leaf.shape)}{of}"


def _in_segments(leaf: Leaf) -> str:
    ordinals = leaf.segments
    if len(ordinals) > 2 and ordinals[-1] - ordinals[0] == len(ordinals) - 1:
        return f"{ordinals[0]}-{ordinals[-1]}"
    return ", ".join(map(str, ordinals))


def _row(leaf: Leaf) -> dict[str, Any]:
    return {
        "name": leaf.name,
        "type": _kind(leaf),
        "bytes": leaf.bytes,
        "segments": _in_segments(leaf),
    }


def _tree(found: Contents) -> Tree:
    """The leaves under their paths; each level with its bytes."""
    totals: dict[tuple[str | int, ...], int] = {}
    for leaf in found.leaves:
        for depth in range(len(leaf.path)):
            totals[leaf.path[:depth]] = totals.get(leaf.path[:depth], 0) + leaf.bytes
    manifest = found.manifest
    title = f"step {manifest.step} ({short(manifest.save_id)})  {size(totals.get((), 0))}"
    nodes: dict[tuple[str | int, ...], Tree] = {(): Tree(Text(title, style="bold"))}
    for leaf in found.leaves:
        for depth in range(1, len(leaf.path)):
            path = leaf.path[:depth]
            if path not in nodes:
                label = Text(f"{one_line(str(path[-1]))}  {size(totals[path])}")
                nodes[path] = nodes[path[:-1]].add(label)
        where = f"segment {_in_segments(leaf)}" if leaf.segments else "no segment"
        name = one_line(str(leaf.path[-1]))
        nodes[leaf.path[:-1]].add(Text(f"{name}  {_kind(leaf)}  {size(leaf.bytes)}  {where}"))
    return nodes[()]
