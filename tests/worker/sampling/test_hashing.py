"""A draw's key is a pure function of seed and position, for ever."""

from mlx_dp.proto.messages.sampling_params import MAX_SEED
from mlx_dp.worker.sampling.hashing import draw_key


def test_keys_are_written_down():
    # A replayed request must draw what it would have drawn, by another release too.
    assert draw_key(0, 0) == (2802244911, 1293516399)
    assert draw_key(7, 1000) == (3630260379, 693891068)
    assert draw_key(MAX_SEED, 2**31) == (2961574162, 4285728905)


def test_keys_are_two_words_of_32_bits():
    for seed in (0, 1, 2**32, MAX_SEED):
        for position in (0, 1, 2**31):
            assert all(0 <= word < 2**32 for word in draw_key(seed, position))


def test_neighbouring_seeds_and_positions_have_keys_of_their_own():
    keys = {draw_key(seed, position) for seed in range(200) for position in range(200)}
    assert len(keys) == 200 * 200
    firsts = {key[0] for key in keys}
    assert len(firsts) > 200 * 200 - 10
