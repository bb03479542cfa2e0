"""The index of owners' prefixes: exact while it is small, bounded when it is not."""

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from mlx_dp.orchestrator.control.routing.prefix_index import BLOCK_TOKENS, PrefixIndex, PrefixKeys

FEW = 6
"""Blocks that an owner may hold in the machine."""


def keys_of(ids: list[int], salt: str = "") -> list[bytes]:
    keys = PrefixKeys(salt)
    keys.extend(ids)
    return list(keys.keys)


def blocks(*names: int) -> list[int]:
    """A sequence with one block of tokens for each name."""
    return [name for name in names for _ in range(BLOCK_TOKENS)]


def test_there_is_a_key_for_each_full_block_and_none_for_the_rest() -> None:
    assert keys_of([]) == []
    assert len(keys_of([1] * (BLOCK_TOKENS - 1))) == 0
    assert len(keys_of([1] * (2 * BLOCK_TOKENS + 5))) == 2


def test_a_key_stands_for_all_that_comes_before_its_block() -> None:
    same, other = keys_of(blocks(1, 2, 3)), keys_of(blocks(9, 2, 3))
    assert keys_of(blocks(1, 2, 4))[:2] == same[:2]
    assert not set(same) & set(other)


def test_salts_keep_equal_prompts_apart() -> None:
    prompt = blocks(1, 2)
    assert not set(keys_of(prompt, "a")) & set(keys_of(prompt, "b"))
    assert keys_of(prompt, "a") == keys_of(prompt, "a")


@given(st.lists(st.integers(0, 2**31 - 1), max_size=300), st.data())
def test_keys_do_not_depend_on_how_a_sequence_grew(ids: list[int], data: st.DataObject) -> None:
    keys = PrefixKeys("s")
    start = 0
    while start < len(ids):
        end = data.draw(st.integers(start + 1, len(ids)))
        keys.extend(ids[start:end])
        start = end
    assert list(keys.keys) == keys_of(ids, "s")
    assert keys.num_tokens == len(ids)


def test_an_owner_holds_what_it_was_given_up_to_where_prompts_part() -> None:
    index = PrefixIndex()
    index.add_blocks(0, keys_of(blocks(1, 2, 3)), FEW)
    assert index.held_tokens(0, keys_of(blocks(1, 2, 3, 4))) == 3 * BLOCK_TOKENS
    assert index.held_tokens(0, keys_of(blocks(1, 2, 9))) == 2 * BLOCK_TOKENS
    assert index.held_tokens(0, keys_of(blocks(9, 2, 3))) == 0
    assert index.held_tokens(1, keys_of(blocks(1))) == 0
    assert list(index.dp_ranks()) == [0]


def test_what_was_used_last_stays() -> None:
    index = PrefixIndex()
    index.add_blocks(0, keys_of(blocks(1, 2)), 4)
    index.add_blocks(0, keys_of(blocks(3, 4)), 4)
    index.add_blocks(0, keys_of(blocks(1, 2)), 4)
    index.add_blocks(0, keys_of(blocks(5)), 4)
    assert index.held_tokens(0, keys_of(blocks(1, 2))) == 2 * BLOCK_TOKENS
    assert index.held_tokens(0, keys_of(blocks(3, 4))) == BLOCK_TOKENS


def test_an_owner_that_is_forgotten_holds_nothing_and_others_keep_theirs() -> None:
    index = PrefixIndex()
    for dp_rank in (0, 1):
        index.add_blocks(dp_rank, keys_of(blocks(1)), FEW)
    index.forget_owner(0)
    index.forget_owner(7)
    assert index.held_tokens(0, keys_of(blocks(1))) == 0
    assert index.held_tokens(1, keys_of(blocks(1))) == BLOCK_TOKENS


class IndexMachine(RuleBasedStateMachine):
    """Prompts that share beginnings, against a plain list of uses in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex()
        self.used: dict[int, list[bytes]] = {0: [], 1: []}
        self.seen: set[bytes] = set()

    prompts = st.lists(st.integers(0, 2), max_size=FEW + 3)

    @rule(dp_rank=st.integers(0, 1), prompt=prompts, salt=st.sampled_from(("", "s")))
    def hold(self, dp_rank: int, prompt: list[int], salt: str) -> None:
        keys = keys_of(blocks(*prompt), salt)
        self.index.add_blocks(dp_rank, keys, FEW)
        self.seen.update(keys)
        new = keys[::-1]
        kept = [key for key in self.used[dp_rank] if key not in new]
        self.used[dp_rank] = (kept + new)[-FEW:]

    @rule(dp_rank=st.integers(0, 1))
    def forget_owner(self, dp_rank: int) -> None:
        self.index.forget_owner(dp_rank)
        self.used[dp_rank] = []

    @rule(dp_rank=st.integers(0, 1), prompt=prompts)
    def look_up(self, dp_rank: int, prompt: list[int]) -> None:
        keys = keys_of(blocks(*prompt))
        held = 0
        while held < len(keys) and keys[held] in self.used[dp_rank]:
            held += 1
        assert self.index.held_tokens(dp_rank, keys) == held * BLOCK_TOKENS
        # No gaps: all blocks after the first missing one are missing too.
        assert not set(keys[held:]) & set(self.used[dp_rank])

    @invariant()
    def is_bounded(self) -> None:
        for dp_rank, used in self.used.items():
            held = {key for key in self.seen if self.index.held_tokens(dp_rank, [key])}
            assert held == set(used)
            assert len(held) <= FEW


TestIndexMachine = IndexMachine.TestCase
TestIndexMachine.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
