"""What object tiers are compared with: other writers and readers of DCP checkpoints in S3.

s3fs is installed for the tests. s3torchconnector is no dependency: it is best installed beside the
project and found by ``PYTHONPATH`` (docs/understand/benchmarks.md).
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

from benchmarks.object_limits import At
from tieredckpt.testing.s3_server import ACCESS_KEY, BUCKET, REGION, SECRET_KEY


@dataclass(frozen=True, slots=True, kw_only=True)
class Other:
    """One of them."""

    name: str
    package: str
    writer: Callable[[At], StorageWriter]
    reader: Callable[[At], StorageReader]

    @property
    def version(self) -> str | None:
        """Of its package; None: it is not installed."""
        if importlib.util.find_spec(self.package) is None:
            return None
        return importlib.metadata.version(self.package)


def _connector_fs(at: At, **more: Any) -> Any:
    """Its file system, for a server that is not AWS's: its own constructors take no endpoint."""
    from s3torchconnector import S3ClientConfig
    from s3torchconnector._s3client import S3Client
    from s3torchconnector.dcp import S3FileSystem

    config = S3ClientConfig(force_path_style=True, part_size=at.part_bytes)
    client = S3Client(REGION, endpoint=at.endpoint, s3client_config=config)
    return S3FileSystem(REGION, s3_client=client, **more)


def _connector_writer(at: At) -> StorageWriter:
    from s3torchconnector.dcp import S3StorageWriter

    writer: Any = S3StorageWriter(REGION, path=f"s3://{BUCKET}/{at.key}/")
    writer.fs = _connector_fs(at)
    return writer  # type: ignore[no-any-return]


def _connector_reader(at: At) -> StorageReader:
    from s3torchconnector.dcp import S3StorageReader

    reader: Any = S3StorageReader(REGION, path=f"s3://{BUCKET}/{at.key}/")
    reader.fs = _connector_fs(at, reader_constructor=reader._reader_constructor)
    return reader  # type: ignore[no-any-return]


def _fsspec_options(at: At) -> dict[str, Any]:
    return {
        "key": ACCESS_KEY,
        "secret": SECRET_KEY,
        "client_kwargs": {"endpoint_url": at.endpoint, "region_name": REGION},
    }


def _fsspec_writer(at: At) -> StorageWriter:
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

    # Its fsync is for local files; s3fs has none.
    return FsspecWriter(f"s3://{BUCKET}/{at.key}", sync_files=False, **_fsspec_options(at))


def _fsspec_reader(at: At) -> StorageReader:
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

    return FsspecReader(f"s3://{BUCKET}/{at.key}", **_fsspec_options(at))


OTHERS = (
    Other(
        name="s3torchconnector",
        package="s3torchconnector",
        writer=_connector_writer,
        reader=_connector_reader,
    ),
    Other(
        name="FsspecWriter over s3fs",
        package="s3fs",
        writer=_fsspec_writer,
        reader=_fsspec_reader,
    ),
)
