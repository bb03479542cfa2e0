"""The limit on open files that mlx-lm needs."""

import resource

import pytest

from mlx_dp.proto import descriptor_limit
from mlx_dp.proto.descriptor_limit import check_descriptor_limit
from mlx_dp.proto.errors import ConfigError

INFINITE = resource.RLIM_INFINITY


class Limits:
    """The limits of a process. ``privileged`` ones may raise the hard limit."""

    def __init__(self, hard: int, *, privileged: bool) -> None:
        self.now = (256, hard)
        self._privileged = privileged

    def get(self, which: int) -> tuple[int, int]:
        assert which == resource.RLIMIT_NOFILE
        return self.now

    def set(self, which: int, wanted: tuple[int, int]) -> None:
        if wanted[1] > self.now[1] and not self._privileged:
            raise ValueError("not allowed to raise maximum limit")
        self.now = wanted


@pytest.mark.parametrize(
    ("hard", "privileged", "left"),
    [(4096, False, 4096), (INFINITE, False, INFINITE), (10_240, False, 10_240), (1024, True, 4096)],
)
def test_a_limit_that_mlx_lm_can_live_with_or_raise_is_let_pass(
    monkeypatch: pytest.MonkeyPatch, hard: int, privileged: bool, left: int
) -> None:
    limits = Limits(hard, privileged=privileged)
    monkeypatch.setattr(descriptor_limit.resource, "getrlimit", limits.get)
    monkeypatch.setattr(descriptor_limit.resource, "setrlimit", limits.set)
    check_descriptor_limit()
    assert limits.now == (256, left)


def test_a_lower_one_is_one_sentence_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = Limits(4095, privileged=False)
    monkeypatch.setattr(descriptor_limit.resource, "getrlimit", limits.get)
    monkeypatch.setattr(descriptor_limit.resource, "setrlimit", limits.set)
    with pytest.raises(ConfigError) as refused:
        check_descriptor_limit()
    sentence = str(refused.value)
    for words in ("is 4095", "needs 4096", "ulimit -Hn", "HardResourceLimits", "NumberOfFiles"):
        assert words in sentence
