"""The permissions in docs/operate/object-stores.md: enough for everything, and none too many.

A real server judges by the very document of that page, and by it with each action left out.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.agent import wait_until
from tests.support.s3 import object_settings, open_object_tier, parts_sent, running, uploads_of
from tests.support.s3_bench import DEADLINE_S, credentials, restored, state_of, zeros
from tests.support.states import same, save
from tieredckpt.errors import TieredCkptError
from tieredckpt.storage.backends.probe import probe
from tieredckpt.storage.object.s3_http import Answer
from tieredckpt.storage.object.s3_upload import upload_id_in
from tieredckpt.storage.object.tier import ObjectTier
from tieredckpt.testing.s3_server import BUCKET, S3Server
from tieredckpt.testing.tier_suite import SampleSource

PAGE = Path(__file__).parents[2] / "docs" / "operate" / "object-stores.md"
SECRET = "secret-of-the-policy"
PLAN, SEGMENT = "plans/" + "cd" * 16, "segments/" + "ab" * 16
LENIENT = {"s3:AbortMultipartUpload", "s3:ListMultipartUploadParts"}
"""What this server allows to whoever may upload; Amazon's asks for it (by its documentation)."""
PART = 8 << 20
NUMBERS = 70_000
DATA = random.Random(2).randbytes(17 << 20)
"""Three parts."""


def documented() -> dict[str, Any]:
    """The policy of the page, for our bucket."""
    (text,) = re.findall(r"```json\n(\{\n  \"Version\".*?)```", PAGE.read_text(), re.DOTALL)
    return json.loads(text.replace("my-bucket", BUCKET))


def actions(policy: dict[str, Any]) -> list[str]:
    return [action for statement in policy["Statement"] for action in statement["Action"]]


def only(policy: dict[str, Any], wanted: Collection[str]) -> dict[str, Any]:
    """The policy with these actions alone."""
    statements = [
        {**each, "Action": [action for action in each["Action"] if action in wanted]}
        for each in policy["Statement"]
    ]
    return {**policy, "Statement": [each for each in statements if each["Action"]]}


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    """With an identity for each policy: its access key is the policy's name."""
    policy = documented()
    policies = {"all": policy, "restore": only(policy, ("s3:GetObject", "s3:ListBucket"))}
    for action in actions(policy):
        policies[f"without {action}"] = only(policy, set(actions(policy)) - {action})
    names = {name: name.replace(" ", "").replace(":", "") for name in policies}
    yield from running(
        {
            "identities": [
                {
                    "name": each,
                    "credentials": [{"accessKey": each, "secretKey": SECRET}],
                    "policyNames": [each],
                }
                for each in names.values()
            ],
            "policies": [
                {"name": names[name], "content": json.dumps(found)}
                for name, found in policies.items()
            ],
        }
    )


def keys_of(name: str) -> dict[str, str]:
    key = name.replace(" ", "").replace(":", "")
    return credentials(SECRET) | {"AWS_ACCESS_KEY_ID": key}


def opened(server: S3Server, prefix: str, name: str, patch: pytest.MonkeyPatch) -> ObjectTier:
    for variable, value in keys_of(name).items():
        patch.setenv(variable, value)
    settings = object_settings(server.endpoint, retry_for_s=2.0)
    tier = open_object_tier("s3", f"s3://{prefix}", settings)
    assert isinstance(tier, ObjectTier)
    return tier


def begun(server: S3Server, prefix: str) -> None:
    """Another agent's unfinished upload of the segment, with its first part."""
    path = f"/{prefix}/{SEGMENT}"
    reply = server.request("POST", path, query={"uploads": ""})
    upload = upload_id_in(Answer(reply.status, reply.headers, reply.body))
    query = {"partNumber": "1", "uploadId": upload}
    assert server.request("PUT", path, query=query, body=DATA[:PART]).status == 200


def what_fails(server: S3Server, prefix: str, tier: ObjectTier) -> set[str]:
    """Of all that a tier does, by the action that it needs."""
    server.request("PUT", f"/{prefix}/{PLAN}", body=b"x")
    begun(server, prefix)

    def resumes() -> bool:
        sent = parts_sent(tier)
        tier.put_from(SEGMENT, SampleSource(DATA))
        return sum(sent) == len(DATA) - PART

    def sweeps() -> bool:
        begun(server, prefix)
        return tier.sweep_unfinished(-1.0) >= 1

    def deletes() -> bool:
        tier.delete(PLAN)
        return server.request("HEAD", f"/{prefix}/{PLAN}").status == 404

    tried: dict[str, Callable[[], object]] = {
        "s3:GetObject": lambda: tier.get(PLAN, limit=1) == b"x",
        "s3:ListBucket": lambda: [each.key for each in tier.list("plans/")] == [PLAN],
        "s3:PutObject": lambda: tier.put("plans/" + "00" * 16, b"y") is None,
        "s3:ListMultipartUploadParts": resumes,
        "s3:ListBucketMultipartUploads": lambda: bool(uploads_of(tier).abandoned(-1.0)) or True,
        "s3:AbortMultipartUpload": sweeps,
        "s3:DeleteObject": deletes,
    }
    failed = set()
    for action, act in tried.items():
        try:
            fine, said = act(), "403"
        except TieredCkptError as error:
            fine, said = False, str(error)
        assert "403" in said, said
        if not fine:
            failed.add(action)
    return failed


def test_the_policy_of_the_page(server: S3Server, monkeypatch: pytest.MonkeyPatch):
    """With all of it everything works; without one action what needs it does not."""
    prefix = f"{BUCKET}/ckpt/all"
    tier = opened(server, prefix, "all", monkeypatch)
    assert set(probe(tier).values()) == {None}
    assert what_fails(server, prefix, tier) == set()
    tier.close()
    elsewhere = opened(server, f"{BUCKET}/other", "all", monkeypatch)
    with pytest.raises(TieredCkptError, match=r"docs/operate/object-stores\.md"):
        elsewhere.put(PLAN, b"x")
    elsewhere.close()
    for number, action in enumerate(actions(documented())):
        prefix = f"{BUCKET}/ckpt/without-{number}"
        tier = opened(server, prefix, f"without {action}", monkeypatch)
        failed = what_fails(server, prefix, tier)
        assert action in failed or action in LENIENT, action
        tier.close()


def test_the_page_asks_for_lists_that_are_consistent():
    """No store that is tested here is otherwise, so only the page warns of one that is."""
    page = " ".join(PAGE.read_text().split())
    assert (
        "It also has to be strongly consistent, for lists as well as for reads: what was written "
        "is in every list that begins later."
    ) in page
    assert "Without it pinned checkpoints, and those of another job, can be deleted" in page


@pytest.mark.full
def test_who_may_only_read_restores(server: S3Server, monkeypatch: pytest.MonkeyPatch):
    """And trains on; the tier says that it may not be written."""
    prefix = f"{BUCKET}/ckpt/restore"
    for variable, value in credentials().items():
        monkeypatch.setenv(variable, value)
    with restored(server, prefix, numbers=NUMBERS, load=False) as first:
        assert first.engine.load(zeros(NUMBERS)) is None
        save(first.engine, 1, state_of(1, NUMBERS))
        first.engine.wait(1, "s3", DEADLINE_S)
    for variable, value in keys_of("restore").items():
        monkeypatch.setenv(variable, value)
    with restored(server, prefix, numbers=NUMBERS, environ=keys_of("restore")) as found:
        assert found.step == 1
        assert same(found.state, state_of(1, NUMBERS))
        save(found.engine, 2, state_of(2, NUMBERS))

        def refused() -> bool:
            (tier,) = found.engine.status().namespaces[0].tiers
            return "403 AccessDenied" in (tier.error or "")

        wait_until(refused, deadline_s=DEADLINE_S)
