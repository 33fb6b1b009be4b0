"""``tieredckpt verify``: read every block of every copy and compare it with its digest."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from tieredckpt.cli.checkpoints.ls import Listed, make_listing, print_unread
from tieredckpt.cli.output import print_json, print_table
from tieredckpt.cli.sources import Found, Place, find_holdings, namespace_options
from tieredckpt.errors import IntegrityError, NotFoundError, TierUnavailableError, UsageError
from tieredckpt.format.digest import digest
from tieredckpt.format.manifest import Manifest, SegmentRef, read_footer
from tieredckpt.format.segment import PAGE_BYTES
from tieredckpt.rpc.messages.agent import ReportIntact
from tieredckpt.storage.base import OpenObject, segment_key
from tieredckpt.storage.file_io import OpenFile, aligned_buffer

Open = Callable[[str, str], OpenObject]
"""(tier, segment id) -> the copy; raises NotFoundError, TierUnavailableError or IntegrityError."""
Advance = Callable[[int], None]
"""Called with the number of bytes that were read."""

READ_BYTES = 4 << 20
"""Bytes per read."""


@dataclass(slots=True, kw_only=True)
class Checked:
    """The result of reading one copy."""

    tier: str
    manifest: Manifest
    ordinal: int
    """Index of the segment in the manifest."""
    error: str | None = None
    """Why the copy as a whole is bad or cannot be read."""
    bad_blocks: list[int] = field(default_factory=list)
    began_ns: int = 0
    """When reading began, on the monotonic clock."""
    unread: bool = False
    """Whether the tier or the agent did not answer, so that nothing is known of the copy."""

    @property
    def ref(self) -> SegmentRef:
        """The manifest's entry of the segment."""
        return self.manifest.segments[self.ordinal]

    @property
    def intact(self) -> bool:
        """Whether every block matches its digest."""
        return self.error is None and not self.bad_blocks


def verify_copy(source: OpenObject, checked: Checked, advance: Advance) -> None:
    """Read a copy from end to end, and record its bad blocks in ``checked``.

    Raises IntegrityError: the footer is not the manifest's; TierUnavailableError: no answer.
    """
    ref = checked.ref
    if source.size < ref.size:
        raise IntegrityError(f"has {source.size} of {ref.size} bytes")

    def read(start: int, stop: int) -> bytes:
        pages = aligned_buffer(stop - start)
        source.read_into(start, pages)
        return bytes(pages)

    footer = read_footer(ref, read)[0]
    block_bytes = footer.trailer.block_bytes
    count = max(1, READ_BYTES // block_bytes)
    buffer = aligned_buffer(count * block_bytes)
    for first in range(0, footer.trailer.num_blocks, count):
        blocks = range(first, min(first + count, footer.trailer.num_blocks))
        begin, end = footer.block_range(first)[0], footer.block_range(blocks[-1])[1]
        # Whole pages, as direct I/O wants them; a segment ends on a page.
        piece = buffer[: -(-(end - begin) // PAGE_BYTES) * PAGE_BYTES]
        source.read_into(begin, piece)
        for block in blocks:
            start, stop = footer.block_range(block)
            if digest(piece[start - begin : stop - begin]) != footer.block_digest(block):
                checked.bad_blocks.append(block)
        advance(end - begin)


@contextmanager
def opener(place: Place, found: Found) -> Iterator[Open]:
    """Yield a function that opens copies: through the agent if it answered, else from the folders.

    An agent passes descriptors, which object stores do not have: this process reads those itself.
    """
    by_agent = {
        each.tier
        for each in found.holdings.tiers
        if found.source == "agent" and each.kind != "object"
    }
    with place.agent() as client, closing(place.folders(found.namespace)) as folders:

        def open_copy(tier: str, segment_id: str) -> OpenObject:
            if tier not in by_agent:
                return folders.open_segment(tier, segment_id)
            opened, fd = client.open_segment(tier, segment_id, namespace=found.namespace)
            key = segment_key(segment_id)
            return OpenFile(fd, opened.size_bytes, tier=tier, key=key, direct=opened.direct)

        yield open_copy


def copies(listed: list[Listed], tiers: tuple[str, ...]) -> Iterator[Checked]:
    """Yield the copies of each listed checkpoint in each chosen tier that has its manifest."""
    for each in listed:
        for tier in each.tiers:
            if not tiers or tier in tiers:
                for ordinal in range(len(each.manifest.segments)):
                    yield Checked(tier=tier, manifest=each.manifest, ordinal=ordinal)


def verify_all(found: list[Checked], open_copy: Open, *, quiet: bool) -> None:
    """Read all copies, with a progress bar on standard error."""
    visible = not quiet and sys.stderr.isatty()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), disable=not visible) as bar:
        task = bar.add_task("verifying", total=sum(each.ref.size for each in found))
        done = 0
        for each in found:
            bar.update(task, description=f"step {each.manifest.step} in {each.tier}")
            each.began_ns = time.monotonic_ns()
            try:
                with open_copy(each.tier, each.ref.id) as source:
                    verify_copy(source, each, lambda n: bar.advance(task, n))
            except (IntegrityError, NotFoundError, TierUnavailableError) as error:
                each.error = str(error)
                each.unread = isinstance(error, TierUnavailableError) and not each.bad_blocks
            done += each.ref.size
            bar.update(task, completed=done)


def _plain(copy: Checked) -> dict[str, Any]:
    """Return one copy as ``verify --json`` prints it."""
    return {
        "tier": copy.tier,
        "step": copy.manifest.step,
        "save_id": copy.manifest.save_id,
        "segment": copy.ordinal,
        "segment_id": copy.ref.id,
        "bytes": copy.ref.size,
        "intact": copy.intact,
        "error": copy.error,
        "bad_blocks": copy.bad_blocks,
    }


@click.command()
@namespace_options
@click.option("--step", type=click.IntRange(min=0), help="Only checkpoints of this step.")
@click.option("--save-id", help="Only this checkpoint; its first digits are enough.")
@click.option("--tier", "tiers", multiple=True, help="Only this tier; may be repeated.")
@click.option(
    "--quarantine",
    is_flag=True,
    help="Report damaged copies to the agent, but not those that cannot be read.",
)
def verify(
    place: Place,
    step: int | None,
    save_id: str | None,
    tiers: tuple[str, ...],
    quarantine: bool,
) -> None:
    """Read every block of the chosen checkpoints in every tier, and compare with its digest.

    A mark of damage on a copy that is intact is lifted, if an agent runs. Nothing else is changed
    without --quarantine. Exit code 1 if any copy is damaged, or a chosen tier or a manifest in it
    cannot be read.

    \b
    Examples:
      tieredckpt verify
      tieredckpt verify --step 400 --tier nvme --json
    """
    found = find_holdings(place)
    there = [each.tier for each in found.holdings.tiers]
    if unknown := [name for name in tiers if name not in there]:
        raise UsageError(f"there is no tier {unknown[0]}; there are: {', '.join(there) or 'none'}")
    listing = make_listing(found.holdings)
    chosen = [
        each
        for each in listing.checkpoints
        if (step is None or each.manifest.step == step)
        and (save_id is None or each.manifest.save_id.startswith(save_id))
    ]
    checked = list(copies(chosen, tiers))
    if not checked:
        raise NotFoundError(
            f"namespace {found.namespace} has no "
            + (f"checkpoint of step {step}" if step is not None else "checkpoint")
            + (f" with a save id that begins with {save_id}" if save_id is not None else "")
            + (f" in {', '.join(tiers)}" if tiers else ""),
            key=save_id,
        )
    with opener(place, found) as open_copy:
        verify_all(checked, open_copy, quiet=place.as_json)
    damaged = [each for each in checked if not each.intact and not each.unread]
    away = {name: why for name, why in listing.unavailable.items() if not tiers or name in tiers}
    lost = [each for each in listing.unreadable if not tiers or each["tier"] in tiers]
    rows = [_plain(each) for each in checked]
    if place.as_json:
        print_json(namespace=found.namespace, copies=rows, unreadable=lost, unavailable=away)
    else:
        columns = ("tier", "step", "save_id", "segment", "bytes", "state")
        print_table(None, [each | {"state": _state(each)} for each in rows], columns)
        print_unread(lost, away)
    if quarantine and damaged:
        _report(place, found, damaged)
    _lift_marks(place, found, [each for each in checked if each.intact])
    _raise_for(checked, len(damaged), tuple(away), len(lost))


def _raise_for(checked: list[Checked], damaged: int, away: tuple[str, ...], lost: int) -> None:
    """Raise the worst error that was found, if any."""
    if damaged:
        raise IntegrityError(f"{damaged} of {len(checked)} copies are damaged")
    if unread := sum(each.unread for each in checked):
        raise TierUnavailableError(
            f"{unread} of {len(checked)} copies cannot be read, for the reasons above, and nothing "
            "is known of them: repair the connection to their tier or agent, and verify again"
        )
    if away:
        raise TierUnavailableError(
            f"nothing is known of tier {', '.join(away)}: repair the connection to it, and verify "
            "again",
            tier=away[0],
        )
    if lost:
        raise IntegrityError(f"{lost} manifests or records cannot be read")


def _state(copy: dict[str, Any]) -> str:
    bad = copy["bad_blocks"]
    blocks = ", ".join(map(str, bad[:8])) + (", ..." * (len(bad) > 8))
    return copy["error"] or (f"bad block numbers: {blocks}" if bad else "intact")


def _lift_marks(place: Place, found: Found, intact: list[Checked]) -> None:
    """Inform the agent of the copies that it holds for damaged, and that are intact."""
    facts = [(tier, fact) for tier in found.holdings.tiers for fact in tier.segments]
    marked = {(t.tier, f.id): t.kind for t, f in facts if f.error or f.bad_blocks}
    repaired = [each for each in intact if (each.tier, each.ref.id) in marked]
    if repaired and found.source != "agent":
        click.secho("no agent runs: marks of damage stay on intact copies", fg="yellow", err=True)
        return
    specs = {each.name: each for each in place.config.tiers} if place.config is not None else {}
    with place.agent() as client:
        for each in repaired:
            at = specs[each.tier] if marked[each.tier, each.ref.id] == "object" else None
            request = ReportIntact(
                tier=each.tier, segment_id=each.ref.id, began_ns=each.began_ns, read_at=at
            )
            client.call(request, found.namespace)
            click.echo(f"{each.tier}, step {each.manifest.step}: reported as intact", err=True)


def _report(place: Place, found: Found, damaged: list[Checked]) -> None:
    if found.source != "agent":
        click.secho("no agent runs: nothing was quarantined", fg="yellow", err=True)
        return
    with place.agent() as client:
        for each in damaged:
            why = f"tieredckpt verify: {each.error or 'digests differ'}"
            client.report_damage(
                each.tier, each.ref.id, tuple(each.bad_blocks), why, namespace=found.namespace
            )
