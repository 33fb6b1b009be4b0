"""Laws of what hosts keep for each other: no host deletes what another one may count on."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.support.saves import manifest_of
from tieredckpt.policy.completeness import NOT_WHOLE, Claim, Parts, Whole, newest_whole, spared
from tieredckpt.policy.retention import Keep, retain

HOSTS = ("a", "b", "c")
LINE = [manifest_of(seq, HOSTS) for seq in range(8, 0, -1)]
SAVES = [m.save_id for m in LINE]

some = st.frozensets(st.sampled_from(SAVES))
wholes = st.builds(Whole, st.sampled_from([None, *SAVES]), some, some)
claims = st.dictionaries(
    st.sampled_from(HOSTS), st.builds(Claim, some, st.none() | some, st.just((1, 9)))
)


def parts(save_id: str) -> Parts:
    manifest = LINE[SAVES.index(save_id)]
    return Parts(frozenset(HOSTS), (1, manifest.seq))


@given(wholes, st.integers(1, 9), st.booleans())
def test_the_newest_whole_one_and_what_is_newer_stay(whole: Whole, last: int, full: bool) -> None:
    stay = spared(LINE, whole, full=full)
    gone = set(retain(LINE, [], Keep(last=last), stay).delete)
    newest = SAVES.index(whole.newest) if whole.newest is not None else len(SAVES)
    never = whole.never | whole.missing if full else whole.never
    assert gone.isdisjoint(set(SAVES[: newest + 1]) - never)
    # And what is older goes by the rules alone.
    assert set(SAVES[newest + 1 :]) & set(SAVES[last:]) <= gone


@given(claims)
def test_what_is_said_to_be_whole_is_held_by_all(claims: dict[str, Claim]) -> None:
    found = newest_whole(SAVES, claims, HOSTS, parts, lambda save_id: False)
    whole = [s for s in SAVES if all(h in claims and s in claims[h].saves for h in HOSTS)]
    assert found.newest == next(iter(whole), None)
    for save_id in found.missing:
        assert any(
            h in claims and save_id not in claims[h].saves | (claims[h].coming or set())
            for h in HOSTS
        ), "somebody has it not"


@given(claims, st.sampled_from(HOSTS), some)
def test_knowing_less_deletes_no_more(
    claims: dict[str, Claim], silent: str, lacking: frozenset[str]
) -> None:
    all_known = newest_whole(SAVES, claims, HOSTS, parts, lacking.__contains__)
    fewer = {host: claim for host, claim in claims.items() if host != silent}
    known = newest_whole(SAVES, fewer, HOSTS, parts, lacking.__contains__)
    assert spared(LINE, all_known).keys() <= spared(LINE, known).keys()
    assert set(spared(LINE, Whole()).values()) == {NOT_WHOLE}


@given(claims)
def test_who_left_the_job_holds_nothing_up_where_there_is_no_room(
    claims: dict[str, Claim],
) -> None:
    left = newest_whole(SAVES, claims, HOSTS[:2], parts, lambda save_id: False)
    older = SAVES if left.newest is None else SAVES[: SAVES.index(left.newest)]
    assert left.missing == set(older)
    assert set(spared(LINE, left, full=True)) == ({left.newest} if left.newest else set())
