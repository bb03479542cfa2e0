from dataclasses import replace
from pathlib import Path

from mlx_dp.worker.host_overrides import HostOverrides
from tests.support.worker.worker_starts import mlx_start

START = mlx_start(Path("/there"), memory_nbytes=10)


def test_overrides_of_this_machine_replace_the_controllers_values() -> None:
    start = HostOverrides(model_path="/here", memory_nbytes=7).apply(START)
    assert (start.model_path, start.memory_nbytes) == ("/here", 7)
    assert start.share == START.share


def test_code_of_a_model_runs_only_where_the_machine_s_owner_wants_it() -> None:
    asked = replace(START, trust_remote_code=True)
    assert not HostOverrides(trust_remote_code=False).apply(asked).trust_remote_code
    assert HostOverrides(trust_remote_code=True).apply(START).trust_remote_code


def test_without_overrides_the_start_is_unchanged() -> None:
    assert HostOverrides().apply(START) == START
