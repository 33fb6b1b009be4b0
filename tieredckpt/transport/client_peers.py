"""The requests of :class:`tieredckpt.transport.client.AgentClient` that are about other hosts."""

from __future__ import annotations

from tieredckpt.transport import messages as m
from tieredckpt.transport.client_requests import Requests
from tieredckpt.transport.draft_messages import ReserveDraft, SealDraft


class PeerRequests(Requests):
    """See the module."""

    def listen(self, request: m.Listen) -> m.Listening:
        """Have the agent serve this namespace to other hosts; see the message. Idempotent.

        An agent that serves it with other values, for processes that have ended, changes over.

        Raises:
            ConfigError: No such interface or address, or neither token nor TLS.
            NamespaceInUseError: Another live session wants other values.
            AgentError: The port is taken, or the token cannot be one.
        """
        return self._post("listen", request, m.Listening)

    def reserve_draft(self, segment_bytes: int, stream: str, step: int, drafts: int) -> m.Grant:
        """A slot for one of the ``drafts`` of a save; see the message.

        Raises CapacityError if there is no room for it now.
        """
        request = ReserveDraft(
            session_id=self.session_id, segment_bytes=segment_bytes, stream=stream, step=step,
            drafts=drafts,
        )  # fmt: skip
        return self._post("reserve-draft", request, m.Grant)

    def seal_draft(
        self, grant_id: str, slot_id: str, segment_bytes: int, root: str,
        stream: str, step: int, ordinal: int,
    ) -> None:  # fmt: skip
        """Say that a draft is whole; see the message.

        Raises NotFoundError if its slot was taken back, IntegrityError if it says something else.
        """
        request = SealDraft(
            session_id=self.session_id, segment_id=grant_id, slot_id=slot_id,
            segment_bytes=segment_bytes, root=root, stream=stream, step=step, ordinal=ordinal,
        )  # fmt: skip
        self._tell("seal-draft", request)

    def set_peers(self, request: m.SetPeers) -> None:
        """Tell the agent who belongs to the job now, this host included; see the message."""
        self._tell("peers", request)

    def peers(self, namespace: str | None = None) -> m.PeerTable:
        """The other hosts as the agent finds them, and the secret to ask them with.

        Raises NotFoundError if the agent does not know the namespace.
        """
        return self._get("peers", m.PeerTable, namespace)
