from mlx_dp.kvcache.prefix.eviction_queue import SLACK, EvictionQueue


def queue_of(uses: dict[int, int]) -> EvictionQueue:
    queue = EvictionQueue(uses.get)
    for candidate in uses:
        queue.push(candidate, living=len(uses))
    return queue


def test_the_least_recently_used_goes_first() -> None:
    queue = queue_of({1: 30, 2: 10, 3: 20})
    assert [queue.pop(), queue.pop(), queue.pop(), queue.pop()] == [2, 3, 1, None]


def test_a_candidate_used_since_moves_back() -> None:
    uses = {1: 10, 2: 20}
    queue = queue_of(uses)
    uses[1] = 30
    queue.push(1, living=2)
    assert [queue.pop(), queue.pop(), queue.pop()] == [2, 1, None]


def test_a_former_candidate_is_skipped() -> None:
    uses = {1: 10, 2: 20}
    queue = queue_of(uses)
    del uses[1]
    assert queue.pop() == 2


def test_stale_entries_do_not_pile_up() -> None:
    uses = {1: 0, 2: 0}
    queue = queue_of(uses)
    for use in range(10_000):
        uses[1] = use
        queue.push(1, living=2)
        assert len(queue) <= 2 * 2 + SLACK
    assert [queue.pop(), queue.pop(), queue.pop()] == [2, 1, None]


def test_one_candidate_entered_again_and_again_stays_one() -> None:
    uses = {1: 5}
    queue = queue_of(uses)
    for _ in range(10_000):
        queue.push(1, living=1)
    assert len(queue) <= 2 + SLACK
