"""Where the ranks of a group meet, which is another place at each start."""

from dataclasses import dataclass
from typing import Protocol

from mlx_dp.proto.curve_keys import CurveKeys


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupAddresses:
    """As in ``GroupPlace``, in the order of ranks."""

    addresses: tuple[str, ...]
    peers: tuple[str, ...]
    curve: CurveKeys | None = None


class AddressBook(Protocol):
    """Finds addresses for a group; this machine has them, tests have fakes."""

    def fresh(self, size: int, generation: int) -> GroupAddresses:
        """Addresses that are free now, none of them of an earlier generation.

        Called once no process of an earlier generation is left. Raises OSError when there are
        none to be had.
        """
