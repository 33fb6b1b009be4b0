"""Sends this host's agent the credentials that the training script supplies.

The first rank of each host sends them at ``Engine.open``, and then in the thread that asks the
agent for its alerts, since the agent uploads between saves, too.
"""

from __future__ import annotations

import contextlib

import msgspec

from tieredckpt.config.schema import Config
from tieredckpt.errors import UsageError
from tieredckpt.rpc.agent_client import AgentClient
from tieredckpt.rpc.messages.agent import HandCredentials
from tieredckpt.storage.object.supplied import Keys, NotSuppliedError, Supplied

SEND_S = 5.0
"""Longest wait for the agent."""


def with_script(config: Config, source: object) -> Config:
    """``config`` whose tiers at ``s3://``, with no profile and not anonymous, use the credentials
    of the training script, and the region of its session if they have none.

    Raises:
        UsageError: There is no such tier.
    """
    region = getattr(source, "region_name", None)  # of a boto3.Session
    tiers = [
        msgspec.structs.replace(
            tier,
            object=msgspec.structs.replace(
                tier.object, of_script=True, region=tier.object.region or region
            ),
        )
        if tier.url.startswith("s3://") and not tier.object.anonymous and not tier.object.profile
        else tier
        for tier in config.tiers
    ]
    if tiers == list(config.tiers):
        raise UsageError(
            "credentials= was given, and no tier of the configuration uses it: a tier at s3:// "
            "without profile and anonymous does"
        )
    return msgspec.structs.replace(config, tiers=tuple(tiers))


class CredentialsFeed:
    """Sends them when the script supplies others, or the agent has none that work.

    Args:
        client: The agent, with an open session.
        script: Where they come from.
    """

    def __init__(self, client: AgentClient, script: Supplied) -> None:
        self._client, self._script = client, script
        self._sent: Keys | None = None

    def begin(self) -> None:
        """Send the first ones.

        Raises:
            UsageError: The script supplies none.
            AgentError: They could not be sent.
        """
        try:
            self._send(self._script.get_frozen_credentials(), wanted=True)
        except NotSuppliedError as error:
            raise UsageError(f"credentials=: {error}") from error

    def go_on(self, *, wanted: bool) -> None:
        """Send others if there are some; ``wanted``: the agent has none, or they were refused.

        To be called every few seconds. Raises AgentError.
        """
        with contextlib.suppress(NotSuppliedError):  # which is logged
            if wanted and self._sent is not None:
                self._script.find_anew(wait_s=0.0)
            self._send(self._script.get_frozen_credentials(wait_s=0.0), wanted=wanted)

    def _send(self, keys: Keys, *, wanted: bool) -> None:
        if keys == self._sent and not wanted:
            return
        self._client.call(
            HandCredentials(
                session_id=self._client.session_id,
                access_key=keys.access_key,
                secret_key=keys.secret_key,
                token=keys.token,
                expires_at_s=keys.expires_at_s,
            ),
            within_s=SEND_S,
            revive=False,
        )
        self._sent = keys
