"""The S3 server of the tests, and the proxy in front of it, do what the tests rely on."""

from __future__ import annotations

import http.client
import threading
from urllib.parse import urlsplit

import pytest

from tests.support.http_proxy import HttpProxy, Rule, slow_down
from tieredckpt.testing.s3_server import S3Server


def ask(endpoint: str, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
    """An unsigned request."""
    at = urlsplit(endpoint)
    assert at.hostname is not None
    connection = http.client.HTTPConnection(at.hostname, at.port, timeout=30)
    try:
        connection.request(method, path, body or None)
        reply = connection.getresponse()
        return reply.status, reply.read()
    finally:
        connection.close()


def test_conditional_put_has_one_winner(s3_server: S3Server, s3_prefix: str):
    statuses: list[int] = []
    together = threading.Barrier(8)

    def put(number: int) -> None:
        together.wait(30)
        headers = {"if-none-match": "*"}
        body = b"%d" % number
        statuses.append(
            s3_server.request("PUT", f"/{s3_prefix}/one", body=body, headers=headers).status
        )

    threads = [threading.Thread(target=put, args=(number,)) for number in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
    assert sorted(statuses) == [200] + [412] * 7


def test_what_was_acknowledged_survives_sigkill(s3_server_alone: S3Server, s3_prefix: str):
    for number in range(5):
        body = b"%d" % number * 1000
        assert s3_server_alone.request("PUT", f"/{s3_prefix}/{number}", body=body).status == 200
    before = s3_server_alone.endpoint
    s3_server_alone.kill()
    s3_server_alone.start()
    assert s3_server_alone.endpoint == before
    for number in range(5):
        reply = s3_server_alone.request("GET", f"/{s3_prefix}/{number}")
        assert reply.body == b"%d" % number * 1000


def test_strangers_are_refused(s3_server: S3Server, s3_prefix: str):
    assert ask(s3_server.endpoint, "PUT", f"/{s3_prefix}/x", b"x")[0] == 403
    assert s3_server.request("GET", f"/{s3_prefix}/x").status == 404


def test_proxy_answers_itself(s3_server: S3Server):
    with HttpProxy(s3_server.address, slow_down("GET /x", times=2)) as proxy:
        assert ask(proxy.endpoint, "GET", "/x")[0] == 503
        status, body = ask(proxy.endpoint, "GET", "/x")
        assert status == 503
        assert b"SlowDown" in body
        assert ask(proxy.endpoint, "GET", "/x")[0] == 403
        assert proxy.count("GET /x") == 3


@pytest.mark.parametrize("fault", ["cut_request", "lose_response"])
def test_proxy_cuts(s3_server: S3Server, s3_prefix: str, fault: str):
    """Cut in the body, the store has nothing; with the answer lost, it has everything."""
    rule = Rule(fault, "PUT", after_bytes=70_000)  # type: ignore[arg-type]
    with HttpProxy(s3_server.address, rule) as proxy:
        body = bytes(200_000)
        port = int(proxy.endpoint.rpartition(":")[2])
        with pytest.raises((OSError, http.client.HTTPException)):
            s3_server.request("PUT", f"/{s3_prefix}/x", body=body, port=port)
        assert rule.met == 1
        found = s3_server.request("GET", f"/{s3_prefix}/x")
        assert (found.status, len(found.body)) == (
            (404, len(found.body)) if fault == "cut_request" else (200, len(body))
        )
        assert s3_server.request("PUT", f"/{s3_prefix}/x", body=body, port=port).status == 200


def test_proxy_spoils_answers(s3_server: S3Server, s3_prefix: str):
    body = bytes(range(256)) * 1000
    s3_server.request("PUT", f"/{s3_prefix}/x", body=body)
    flip = Rule("flip_response", "GET", after_bytes=1234)
    cut = Rule("cut_response", "GET", after_bytes=100_000)
    with HttpProxy(s3_server.address, flip, cut) as proxy:
        port = int(proxy.endpoint.rpartition(":")[2])
        found = s3_server.request("GET", f"/{s3_prefix}/x", port=port).body
        assert [at for at in range(len(body)) if found[at] != body[at]] == [1234]
        with pytest.raises((OSError, http.client.HTTPException)):
            s3_server.request("GET", f"/{s3_prefix}/x", port=port)
        assert s3_server.request("GET", f"/{s3_prefix}/x", port=port).body == body
