import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("mlx.core")

import mlx.core as mx

from mlx_dp.proto.errors import ConfigError
from mlx_dp.proto.messages.group import DistributedBackend, GroupPlace
from mlx_dp.worker.contract.peers import RankLostError
from mlx_dp.worker.lockstep import group

pytestmark = pytest.mark.mlx

ADDRESSES = ("10.0.0.1:5001", "10.0.0.2:5001")


def place(backend: DistributedBackend = DistributedBackend.RING) -> GroupPlace:
    return GroupPlace(
        backend=backend,
        rank=1,
        size=2,
        addresses=ADDRESSES,
        peers=("ipc://a", "ipc://b"),
        generation=1,
    )


class FakeDistributed:
    """MLX's ``distributed``, which records its inputs when a group is formed."""

    def __init__(self, *, rank: int = 1, size: int = 2, there: bool = True) -> None:
        self.there = there
        self.group = SimpleNamespace(rank=lambda: rank, size=lambda: size)
        self.environment: dict[str, str] = {}
        self.hosts: Any = None
        self.links: int | None = None
        self.error: Exception | None = None

    def is_available(self, backend: str) -> bool:
        return self.there or backend == "ring"

    def init(self, *, strict: bool, backend: str) -> Any:
        assert strict
        self.environment = dict(group.os.environ)
        if "MLX_HOSTFILE" in self.environment:
            hosts = Path(self.environment["MLX_HOSTFILE"])
            self.hosts = json.loads(hosts.read_text())
            self.links = hosts.stat().st_nlink
        if self.error is not None:
            raise self.error
        return self.group


@pytest.fixture
def patched(monkeypatch: pytest.MonkeyPatch) -> Any:
    def patch(fake: FakeDistributed) -> FakeDistributed:
        monkeypatch.setattr(mx, "distributed", fake)
        monkeypatch.setattr(group, "os", SimpleNamespace(environ={}))
        return fake

    return patch


def test_a_ring_reads_all_addresses_from_a_file_without_a_name(patched: Any) -> None:
    fake = patched(FakeDistributed())
    assert group.join(place()) is fake.group
    assert fake.hosts == [[address] for address in ADDRESSES]
    assert fake.environment["MLX_RANK"] == "1"
    assert fake.links == 0
    assert not Path(fake.environment["MLX_HOSTFILE"]).exists()


@pytest.mark.parametrize(
    ("backend", "expected"),
    [
        (
            DistributedBackend.NCCL,
            {
                "MLX_RANK": "1",
                "MLX_WORLD_SIZE": "2",
                "NCCL_HOST_IP": "10.0.0.1",
                "NCCL_PORT": "5001",
            },
        ),
        (
            DistributedBackend.JACCL,
            {"MLX_RANK": "1", "MLX_JACCL_COORDINATOR": "10.0.0.1:5001"},
        ),
    ],
)
def test_each_backend_reads_its_own_names(
    patched: Any, backend: DistributedBackend, expected: dict[str, str]
) -> None:
    fake = patched(FakeDistributed())
    group.join(place(backend))
    assert fake.environment == expected


def test_a_backend_that_is_not_there_is_refused_with_those_that_are(patched: Any) -> None:
    patched(FakeDistributed(there=False))
    with pytest.raises(ConfigError, match=r"jaccl is not in this build of MLX: use ring$"):
        group.join(place(DistributedBackend.JACCL))


@pytest.mark.parametrize(("rank", "size"), [(0, 2), (1, 3), (0, 1)])
def test_another_place_than_asked_for_is_refused(patched: Any, rank: int, size: int) -> None:
    patched(FakeDistributed(rank=rank, size=size))
    with pytest.raises(ConfigError, match=f"rank {rank} of {size}, .* rank 1 of 2"):
        group.join(place())


def test_peers_that_cannot_be_met_are_lost_and_no_file_is_left(patched: Any) -> None:
    fake = patched(FakeDistributed())
    fake.error = RuntimeError("[ring] Couldn't connect")
    with pytest.raises(RankLostError, match="rank 1 cannot meet its group"):
        group.join(place())
    assert fake.links == 0
    assert not Path(fake.environment["MLX_HOSTFILE"]).exists()
