"""Configured places of other hosts, and which of them have not answered."""

from __future__ import annotations

from tieredckpt.agent.cluster.members import NOT_YET, Seeds

ONE, TWO, NAME = "10.0.0.1:7411", "10.0.0.2:7411", "agents.my-job:7411"


def test_a_list_is_unmet_until_each_has_answered():
    seeds = Seeds((ONE, TWO))
    assert seeds
    assert seeds.unmet() == {ONE: NOT_YET, TWO: NOT_YET}
    assert seeds.failed(ONE, "refused")
    assert not seeds.failed(ONE, "refused")
    seeds.met(TWO)
    assert seeds.unmet() == {ONE: "refused"}
    assert not seeds.failed(TWO, "it is down now, and its holdings are asked for by its name")
    seeds.met(ONE)
    assert seeds.unmet() == {}


def test_a_name_is_unmet_until_all_that_it_stands_for_have_answered():
    seeds = Seeds((), NAME)
    assert seeds.unmet() == {NAME: NOT_YET}
    assert seeds.failed(NAME, "no such name")
    assert seeds.unmet() == {NAME: "no such name"}
    seeds.resolved([ONE, TWO])
    assert seeds.unmet() == {f"{each} ({NAME})": NOT_YET for each in (ONE, TWO)}
    seeds.failed(ONE, "refused")
    seeds.met(TWO)
    seeds.resolved([TWO, ONE])
    assert seeds.unmet() == {f"{ONE} ({NAME})": "refused"}
    seeds.resolved([TWO])  # the other one was replaced
    assert seeds.unmet() == {}
    assert not seeds.failed(NAME, "the name was known once, so its hosts are")


def test_nothing_is_configured():
    assert not Seeds()
    assert Seeds().unmet() == {}
