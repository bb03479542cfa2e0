"""Addresses of a simulated group, requested once per start."""

from mlx_dp.orchestrator.ports import GroupAddresses


class MeetingPlaces:
    """``AddressSource``. Asserts that no two starts share a generation."""

    def __init__(self) -> None:
        self._latest = -1

    def fresh(self, size: int, generation: int) -> GroupAddresses:
        assert generation > self._latest, f"generation {generation} after {self._latest}"
        self._latest = generation
        places = tuple(f"{generation}-{rank}" for rank in range(size))
        return GroupAddresses(addresses=places, peers=places)
