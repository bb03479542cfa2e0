"""A worker's settings of MLX's allocator, recorded instead of applied."""

from collections.abc import Callable

import pytest

pytest.importorskip("mlx.core")

import mlx.core as mx

from mlx_dp.worker.loading import device

pytestmark = pytest.mark.mlx

GB = 10**9


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The limits that were set, by name."""
    found: dict[str, int] = {}

    def recorder(name: str) -> Callable[[int], int]:
        def record(value: int) -> int:
            found[name] = value
            return 0

        return record

    for name in ("memory", "cache", "wired"):
        monkeypatch.setattr(mx, f"set_{name}_limit", recorder(name))
    return found


def on_a(kind: str, monkeypatch: pytest.MonkeyPatch, *, working_set_nbytes: int = 8 * GB) -> None:
    monkeypatch.setattr(device, "kind", lambda: kind)
    monkeypatch.setattr(device, "facts", lambda: {"working_set_nbytes": working_set_nbytes})


@pytest.mark.parametrize(("weights", "wired"), [(GB, GB), (8 * GB, 8 * GB), (9 * GB, 8 * GB)])
def test_no_more_is_wired_than_the_weights_nor_than_the_working_set(
    weights: int, wired: int, calls: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    on_a("metal", monkeypatch)
    device.wire_weights(weights)
    assert calls == {"wired": wired}


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_nothing_is_wired_where_there_is_no_metal(
    kind: str, calls: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    on_a(kind, monkeypatch)
    device.wire_weights(GB)
    assert calls == {}


def test_without_a_share_mlx_keeps_its_own_limits(calls: dict[str, int]) -> None:
    device.limit_memory(None)
    assert calls == {}


@pytest.mark.parametrize(("share", "cache"), [(10 * GB, GB), (GB // 4, device.MIN_CACHE_NBYTES)])
def test_a_share_bounds_the_memory_and_a_tenth_of_it_the_cache(
    share: int, cache: int, calls: dict[str, int]
) -> None:
    device.limit_memory(share)
    assert calls == {"memory": share, "cache": cache}


@pytest.mark.parametrize(
    ("share", "pool", "cache"),
    [
        (100 * GB, 4 * GB, 4 * GB),
        (10 * GB, 4 * GB, GB),
        (100 * GB, 10**6, device.MIN_CACHE_NBYTES),
        (None, 4 * GB, 4 * GB),
    ],
)
def test_free_buffers_are_bounded_by_the_pool_and_by_a_tenth_of_the_share(
    share: int | None, pool: int, cache: int, calls: dict[str, int]
) -> None:
    device.limit_free_buffers(share, pool)
    assert calls == {"cache": cache}


def test_a_pool_without_a_bound_leaves_the_limit_of_the_share(calls: dict[str, int]) -> None:
    device.limit_free_buffers(10 * GB, None)
    assert calls == {}
