"""The fake store refuses a caller that names the wrong tokens."""

import pytest

from mlx_dp.kvcache.prefix.cached_prefix import CachedPrefix, Save, SegmentPart
from mlx_dp.proto.messages.commands import FakeEngineOptions
from mlx_dp.worker.fake.engine import FakeEngine
from mlx_dp.worker.fake.store import FakeStore

IDS = (1, 2, 3, 4, 5, 6)


def store(*, stateful: bool = False) -> FakeStore:
    options = FakeEngineOptions(hybrid=stateful)
    engine = FakeEngine(options, clock=lambda: 0.0, sleep=lambda _: None)
    kept = FakeStore(engine.facts.shape, stateful=stateful)
    kept.save(IDS, (Save(0, 0, 4), Save(1, 4, 6)))
    if stateful:
        kept.snapshot(IDS, 7)
    return kept


def prefix(*pieces: tuple[int, int], snapshot: int | None = None) -> CachedPrefix:
    return CachedPrefix(
        pieces=tuple(SegmentPart(*piece) for piece in pieces),
        num_tokens=sum(num_tokens for _, num_tokens in pieces),
        snapshot=snapshot,
    )


def test_segments_of_the_right_tokens_are_accepted() -> None:
    store().verify(prefix((0, 4), (1, 2)), IDS)
    store().verify(prefix((0, 3)), (1, 2, 3, 9))
    store(stateful=True).verify(prefix((0, 4), (1, 2), snapshot=7), IDS)


@pytest.mark.parametrize(
    ("given", "ids"),
    [
        (prefix((0, 4)), (1, 2, 3, 9)),
        (prefix((1, 2)), (5, 6, 7)),
        (prefix((0, 3), (1, 2)), (1, 2, 3, 5, 6)),
        (prefix((0, 5)), IDS),
        (prefix((0, 2), snapshot=7), IDS),
    ],
    ids=["other tokens", "no beginning", "a gap", "too many", "a state of none"],
)
def test_segments_of_other_tokens_are_refused(given: CachedPrefix, ids: tuple[int, ...]) -> None:
    with pytest.raises(AssertionError):
        store().verify(given, ids)


@pytest.mark.parametrize(
    ("given", "ids"),
    [
        (prefix((0, 4), (1, 2)), IDS),
        (prefix((0, 4), snapshot=7), IDS),
        (prefix((0, 4), (1, 2), snapshot=8), IDS),
    ],
    ids=["no state", "a state of more tokens", "another slot"],
)
def test_a_wrong_state_is_found_out(given: CachedPrefix, ids: tuple[int, ...]) -> None:
    with pytest.raises((AssertionError, KeyError)):
        store(stateful=True).verify(given, ids)


def test_a_split_leaves_two_that_follow_each_other() -> None:
    kept = store()
    kept.split(0, 3, 9)
    kept.verify(prefix((9, 3), (0, 1), (1, 2)), IDS)
    with pytest.raises(AssertionError):
        kept.verify(prefix((0, 1)), (4,))


def test_no_number_is_used_twice() -> None:
    kept = store()
    with pytest.raises(AssertionError, match="segment 1 exists"):
        kept.save(IDS, (Save(1, 0, 2),))
    with pytest.raises(AssertionError, match="segment 1 exists"):
        kept.split(0, 1, 1)


def test_nothing_is_saved_that_was_not_fed() -> None:
    with pytest.raises(AssertionError):
        store().save(IDS, (Save(3, 4, 7),))


def test_what_is_forgotten_takes_nothing() -> None:
    kept = store(stateful=True)
    kept.drop((0, 1, 55), (7, 66))
    assert kept.nbytes == 0
