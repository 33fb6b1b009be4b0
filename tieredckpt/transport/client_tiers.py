"""The requests of :class:`tieredckpt.transport.client.AgentClient` that are about tiers."""

from __future__ import annotations

from tieredckpt.transport import messages as m
from tieredckpt.transport.client_requests import Requests, decode_reply, encode_json


class TierRequests(Requests):
    """See the module."""

    def status(self, *, within_s: float | None = None) -> m.Status:
        """What the agent holds and does."""
        return decode_reply(self._call("GET", "/v1/status", within_s=within_s), m.Status)

    def metrics(self) -> bytes:
        """The status as Prometheus's text, and no request that keeps an idle agent alive."""
        return self._call("GET", "/metrics")

    def progress(
        self,
        save_id: str,
        *,
        namespace: str | None = None,
        awaited: str = "",
        within_s: float | None = None,
    ) -> m.Progress:
        """How far a checkpoint has come in each tier; one that is ``awaited`` is tried now.

        Raises NotFoundError if no tier that answers knows of it.
        """
        verb = f"progress/{save_id}" + (f"?awaited={awaited}" if awaited else "")
        return self._get(verb, m.Progress, namespace, within_s)

    def flush(
        self, request: m.Flush, *, namespace: str | None = None, within_s: float | None = None
    ) -> m.Flushed:
        """Have the newest checkpoints brought to a tier now; see the message. Idempotent.

        Raises:
            NotFoundError: There is no such tier, or no checkpoint.
            UsageError: No tier is configured.
            TierUnavailableError: None answers.
        """
        path = self._path("flush", namespace)
        body = self._call("POST", path, encode_json(request), within_s=within_s)
        return decode_reply(body, m.Flushed)

    def needs(self, namespace: str | None = None) -> m.RetentionNeeds:
        """What retention leaves alone at this moment. Raises NotFoundError: no such namespace."""
        return self._get("needs", m.RetentionNeeds, namespace)

    def add_record(self, request: m.AddRecord, namespace: str | None = None) -> None:
        """Say something of a checkpoint, to this agent and, soon, to all hosts of the job.

        Raises NotFoundError if its manifest is not in this agent's memory.
        """
        self._tell("records", request, namespace)

    def pin(self, request: m.AddRecord, namespace: str | None = None) -> m.Pinned:
        """Pin a checkpoint or end its pins, and wait for its tiers as long as the request says.

        Raises:
            NotFoundError: There is no such checkpoint, or no pin to end.
            UsageError: It is in memory only, and there is no tier to keep it.
        """
        path = self._path("records", namespace)
        reply = self._call("POST", path, encode_json(request), more_s=request.wait_s)
        return decode_reply(reply, m.Pinned)
