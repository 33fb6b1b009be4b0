"""Answers to requests that were proven: each carries the proof that we know the secret, too."""

from __future__ import annotations

from dataclasses import dataclass

from aiohttp import web

from tieredckpt.errors import TieredCkptError
from tieredckpt.transport.auth import HOST_HEADER, PROOF_HEADER, Secret, body_digest, sign_reply
from tieredckpt.transport.replies import JSON_TYPE, encode_error


@dataclass(frozen=True, slots=True)
class Proven:
    """One proven request, as far as its answer needs it."""

    name: str
    """Of this host."""
    secret: Secret
    nonce: str
    counter: int

    def headers(self, status: int, span: str, digest: str) -> dict[str, str]:
        """Our name and proof; see :func:`tieredckpt.transport.auth.sign_reply`."""
        if not self.secret.token:
            return {HOST_HEADER: self.name}
        text = (self.name, status, span, digest)
        mac = sign_reply(self.secret.token, self.nonce, self.counter, *text)
        return {HOST_HEADER: self.name, PROOF_HEADER: mac}

    def answer(self, status: int, body: bytes, content_type: str) -> web.Response:
        """A whole reply."""
        headers = self.headers(status, "", body_digest(body))
        return web.Response(status=status, body=body, content_type=content_type, headers=headers)

    def error(self, error: TieredCkptError) -> web.Response:
        """One of our errors as a reply."""
        return self.answer(*encode_error(error), JSON_TYPE)
