"""The shipped suite on object tiers: a real S3 server, and what every other store goes through."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.s3 import object_settings, open_object_tier
from tieredckpt.format.segment import BLOCK_BYTES
from tieredckpt.storage.base import Tier
from tieredckpt.storage.object import tier as object_tier
from tieredckpt.storage.object.errors import ObjectUrl
from tieredckpt.storage.object.tier import ObjectTier
from tieredckpt.testing.s3_server import ACCESS_KEY, SECRET_KEY, S3Server
from tieredckpt.testing.tier_suite import TierSuite

SIZES = (1, BLOCK_BYTES, 2 * BLOCK_BYTES - 4096, 2 * BLOCK_BYTES, 3 * BLOCK_BYTES + 12345)
"""Around the least part, of two blocks, and several of them."""


class TestS3(TierSuite):
    sizes = SIZES

    @pytest.fixture(autouse=True)
    def _server(self, s3_server: S3Server, s3_prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
        self.server, self.prefix = s3_server, s3_prefix

    def make_tier(self, folder: Path) -> Tier:
        tier = open_object_tier("s3", f"s3://{self.prefix}", object_settings(self.server.endpoint))
        tier.check()
        return tier


@pytest.mark.full
class TestS3ThroughObstoreOnly(TestS3):
    """As behind a proxy of the environment, where requests of our own are not made."""

    sizes = SIZES[1:]

    @pytest.fixture(autouse=True)
    def _no_wire(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(object_tier, "_is_proxied", lambda origin: True)


@pytest.mark.full
class TestMemoryStore(TierSuite):
    """What Google's and Azure's stores go through, without a store behind it."""

    sizes = SIZES

    def make_tier(self, folder: Path) -> Tier:
        return ObjectTier("objects", ObjectUrl("memory", "", "ns"), object_settings("http://x"))

    def reopen(self, tier: Tier, folder: Path) -> Tier:
        assert isinstance(tier, ObjectTier)
        again = self.make_tier(folder)
        assert isinstance(again, ObjectTier)
        again._store = again._quick = tier._store  # it has no other life
        tier.close()
        return again
