from mlx_dp.kvcache.prefix.snapshot_points import snapshot_points


def test_a_prompt_of_70_tokens_is_tracked_at_64_and_at_its_end() -> None:
    assert snapshot_points(70, cached=0, kv_tokens=0) == (64, 69)


def test_a_prompt_of_257_with_64_cached_runs_192_and_1_and_is_tracked_at_256() -> None:
    assert snapshot_points(257, cached=64, kv_tokens=64) == (256,)


def test_a_short_prompt_is_tracked_at_its_end_alone() -> None:
    assert snapshot_points(64, cached=0, kv_tokens=0) == (63,)
    assert snapshot_points(65, cached=0, kv_tokens=0) == (64,)


def test_the_only_token_of_a_prompt_is_decoded_so_there_is_no_state_to_keep() -> None:
    assert snapshot_points(1, cached=0, kv_tokens=0) == ()


def test_state_is_tracked_at_the_boundary_before_prompts_part() -> None:
    assert snapshot_points(500, cached=0, kv_tokens=200) == (192, 448, 499)


def test_no_boundary_is_tracked_that_is_cached_already() -> None:
    assert snapshot_points(500, cached=192, kv_tokens=200) == (448, 499)
    assert snapshot_points(500, cached=448, kv_tokens=499) == (499,)
    assert snapshot_points(500, cached=499, kv_tokens=500) == ()


def test_a_prompt_that_is_cached_whole_has_its_branch_at_its_own_last_boundary() -> None:
    assert snapshot_points(129, cached=0, kv_tokens=129) == (128,)
    assert snapshot_points(128, cached=0, kv_tokens=128) == (64, 127)
