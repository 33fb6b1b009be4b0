"""What the requests of :class:`tieredckpt.transport.client.AgentClient` have in common."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from tieredckpt.errors import RemoteProtocolError
from tieredckpt.format.packing import MALFORMED
from tieredckpt.transport import messages as m
from tieredckpt.transport.replies import JSON_TYPE, MSGPACK_TYPE

_Reply = TypeVar("_Reply")

encode_json = msgspec.json.Encoder().encode


def decode_reply(body: bytes, kind: type[_Reply]) -> _Reply:
    """The agent's reply. Raises RemoteProtocolError: it is no ``kind``."""
    try:
        return msgspec.json.decode(body, type=kind)
    except MALFORMED as error:
        raise RemoteProtocolError(
            f"the agent's reply is no {kind.__name__} ({error}): it is of another version; "
            "stop it with `tieredckpt agent stop`, then retry"
        ) from error


class Requests:
    """Base of the groups, which are mixed into the client; it has the properties and ``_call``."""

    run_id: str
    """Of the open session: whose attempts and saves are this client's own."""

    @property
    def namespace(self) -> str:
        """Of the open session."""
        raise NotImplementedError

    @property
    def session_id(self) -> str:
        """Of the open session."""
        raise NotImplementedError

    def _call(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        *,
        content_type: str = JSON_TYPE,
        more_s: float = 0.0,
        within_s: float | None = None,
    ) -> bytes:
        raise NotImplementedError

    def _path(self, verb: str, namespace: str | None = None) -> str:
        return f"/v1/namespaces/{namespace or self.namespace}/{verb}"

    def _get(
        self, verb: str, kind: type[_Reply], namespace: str | None, within_s: float | None = None
    ) -> _Reply:
        return decode_reply(self._call("GET", self._path(verb, namespace), within_s=within_s), kind)

    def _pack(self, verb: str, request: m.Message, kind: type[_Reply]) -> _Reply:
        body = msgspec.msgpack.encode(request)
        return decode_reply(
            self._call("POST", self._path(verb), body, content_type=MSGPACK_TYPE), kind
        )

    def _post(
        self, verb: str, request: m.Message, kind: type[_Reply], namespace: str | None = None
    ) -> _Reply:
        return decode_reply(self._tell(verb, request, namespace), kind)

    def _tell(self, verb: str, request: m.Message, namespace: str | None = None) -> bytes:
        return self._call("POST", self._path(verb, namespace), encode_json(request))
