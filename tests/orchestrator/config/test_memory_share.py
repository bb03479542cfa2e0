"""Dividing one device's memory between workers."""

from dataclasses import replace
from typing import Literal

import pytest

from mlx_dp.orchestrator.config.memory_share import share_memory, shared_memory
from mlx_dp.orchestrator.model.model_probe import DeviceFacts
from mlx_dp.proto.errors import ConfigError
from tests.support.models.model_shapes import DENSE, GB

SHAPE = replace(DENSE, weights_nbytes=540_000_000)


def device(kind: Literal["cpu", "metal", "cuda"]) -> DeviceFacts:
    return DeviceFacts(kind=kind, name="test", memory_nbytes=100 * GB, working_set_nbytes=75 * GB)


def test_a_cpu_is_half_of_the_ram() -> None:
    memory = shared_memory(device("cpu"), ram_nbytes=16 * GB)
    assert share_memory(memory, SHAPE, workers=2, fraction=0.8) == 3_200_000_000


def test_metal_is_its_recommended_working_set() -> None:
    memory = shared_memory(device("metal"), ram_nbytes=100 * GB)
    assert share_memory(memory, SHAPE, workers=3, fraction=0.8) == 20 * GB


def test_each_cuda_worker_has_a_device_of_its_own() -> None:
    memory = shared_memory(device("cuda"), ram_nbytes=16 * GB, cuda_devices=4)
    assert share_memory(memory, SHAPE, workers=4, fraction=0.8) == 80 * GB


def test_cuda_workers_in_excess_of_the_devices_share_one() -> None:
    memory = shared_memory(device("cuda"), ram_nbytes=16 * GB, cuda_devices=2)
    assert share_memory(memory, SHAPE, workers=3, fraction=0.8) == 40 * GB


def test_too_many_workers_are_refused_with_the_sum_and_the_number_that_fits() -> None:
    memory = shared_memory(device("cpu"), ram_nbytes=5 * GB)
    with pytest.raises(ConfigError) as refused:
        share_memory(memory, SHAPE, workers=4, fraction=0.8)
    assert str(refused.value) == (
        "4 workers x (0.54 GB of weights + 0.07 GB for activations) exceed 2.00 GB "
        "(--mem-fraction-static 0.8 of 2.50 GB, half of the RAM): use --dp-size 3, a larger "
        "--mem-fraction-static, or a smaller or more quantised model"
    )
    assert share_memory(memory, SHAPE, workers=3, fraction=0.8) > 0


def test_a_model_that_fits_nowhere_gets_no_advice_on_workers() -> None:
    memory = shared_memory(device("cpu"), ram_nbytes=GB)
    with pytest.raises(ConfigError, match=r"^1 worker x .*: not even one worker fits, so use a sm"):
        share_memory(memory, SHAPE, workers=1, fraction=0.8)


def test_a_fraction_that_is_too_small_is_what_the_advice_names() -> None:
    memory = shared_memory(device("cpu"), ram_nbytes=5 * GB)
    with pytest.raises(ConfigError, match="so use a larger --mem-fraction-static or a smaller"):
        share_memory(memory, SHAPE, workers=2, fraction=0.01)


def test_the_smallest_pool_counts() -> None:
    memory = shared_memory(device("cpu"), ram_nbytes=5 * GB)
    greedy = replace(SHAPE, kv_bytes_per_token=50_000_000)
    with pytest.raises(ConfigError, match="use --dp-size 2"):
        share_memory(memory, greedy, workers=3, fraction=0.8)
