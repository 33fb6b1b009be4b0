"""What S3 answers, taken apart: XML that is hostile until it is proven otherwise."""

from __future__ import annotations

import email.utils
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from xml.etree import ElementTree

from tieredckpt.errors import TierUnavailableError
from tieredckpt.tiers.object_errors import Refusal, refusal_of
from tieredckpt.tiers.object_wire import Answer


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A part that the store has."""

    size: int
    etag: str
    crc32: str | None


@dataclass(frozen=True, slots=True)
class Upload:
    """One that was begun and not completed."""

    key: str
    upload_id: str
    begun_s: float
    """By the store's clock, seconds since 1970."""


def upload_id_in(answer: Answer) -> str:
    """The id of an upload that was begun. Raises TierUnavailableError, like all here."""
    found = _text(_parsed(answer), "UploadId")
    if not found:
        raise _malformed("an upload has no id")
    return found


def parts_in(answer: Answer) -> tuple[dict[int, StoredPart], str]:
    """A page of parts by number, and the marker of the next page; empty: there is none."""
    page = _parsed(answer)
    found = {}
    for part in _all(page, "Part"):
        found[_number(part, "PartNumber")] = StoredPart(
            size=_number(part, "Size"),
            etag=_text(part, "ETag"),
            crc32=_text(part, "ChecksumCRC32") or None,
        )
    more = _text(page, "IsTruncated") == "true"
    return found, _text(page, "NextPartNumberMarker") if more else ""


def uploads_in(answer: Answer, prefix: str) -> tuple[list[Upload], dict[str, str]]:
    """A page of uploads below ``prefix``, with keys relative to it, and how to ask for the next."""
    page = _parsed(answer)
    found = []
    for each in _all(page, "Upload"):
        key, upload_id = _text(each, "Key"), _text(each, "UploadId")
        if key.startswith(prefix) and upload_id:
            found.append(Upload(key[len(prefix) :], upload_id, _time(_text(each, "Initiated"))))
    if _text(page, "IsTruncated") != "true" or not _text(page, "NextKeyMarker"):
        return found, {}
    return found, {
        "key-marker": _text(page, "NextKeyMarker"),
        "upload-id-marker": _text(page, "NextUploadIdMarker"),
    }


def error_inside(answer: Answer) -> Refusal | None:
    """The error in an answer that began as a success; None: it is one."""
    text = answer.body.decode("utf-8", "replace")
    return refusal_of(text, 500) if "<Error>" in text else None


def clock_of(answer: Answer) -> float:
    """The store's clock when it answered, seconds since 1970."""
    try:
        return email.utils.parsedate_to_datetime(answer.headers["date"]).timestamp()
    except (KeyError, ValueError) as error:
        raise _malformed("an answer has no date") from error


def _parsed(answer: Answer) -> ElementTree.Element:
    if b"<!" in answer.body:
        raise _malformed("an answer declares entities")  # none does; they could be made to explode
    try:
        return ElementTree.fromstring(answer.body)  # noqa: S314 (no entities, limited in size)
    except ElementTree.ParseError as error:
        raise _malformed(f"an answer is no XML ({error})") from error


def _all(around: ElementTree.Element, name: str) -> Iterator[ElementTree.Element]:
    return (each for each in around if each.tag.rpartition("}")[2] == name)


def _text(around: ElementTree.Element, name: str) -> str:
    return next((each.text or "" for each in _all(around, name)), "")


def _number(around: ElementTree.Element, name: str) -> int:
    text = _text(around, name)
    if not (text.isascii() and text.isdigit()) or len(text) > 18:
        raise _malformed(f"{name} is {text[:40]!r}")
    return int(text)


def _time(text: str) -> float:
    try:
        found = datetime.fromisoformat(text)
    except ValueError as error:
        raise _malformed(f"a time is {text[:40]!r}") from error
    if found.tzinfo is None:
        raise _malformed(f"a time is {text[:40]!r}")
    return found.timestamp()


def _malformed(what: str) -> TierUnavailableError:
    return TierUnavailableError(
        f"the object store answers what S3 does not: {what}", outcome="unknown"
    )
