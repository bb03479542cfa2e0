"""The BLAS of workers on a Linux CPU."""

import os
from pathlib import Path

from mlx_dp.orchestrator.process.worker_environment import choose_blas, find_openblas, usable_cores

LIBRARY = "libopenblas.so.0"


def test_workers_share_the_cores() -> None:
    choice = choose_blas({}, library=LIBRARY, cores=8, workers=3)
    assert choice.variables == {"LD_PRELOAD": LIBRARY, "OPENBLAS_NUM_THREADS": "2"}
    assert choice.warning is None


def test_more_workers_than_cores_get_one_thread_each() -> None:
    choice = choose_blas({}, library=LIBRARY, cores=2, workers=4)
    assert choice.variables["OPENBLAS_NUM_THREADS"] == "1"


def test_threads_that_the_user_set_stay() -> None:
    choice = choose_blas({"OPENBLAS_NUM_THREADS": "5"}, library=LIBRARY, cores=8, workers=2)
    assert "OPENBLAS_NUM_THREADS" not in choice.variables


def test_other_preloads_are_kept() -> None:
    choice = choose_blas({"LD_PRELOAD": "/lib/jemalloc.so"}, library=LIBRARY, cores=8, workers=2)
    assert choice.variables["LD_PRELOAD"] == f"/lib/jemalloc.so:{LIBRARY}"


def test_a_blas_that_the_user_preloads_is_left_alone() -> None:
    choice = choose_blas({"LD_PRELOAD": "/opt/libmkl_rt.so"}, library=None, cores=8, workers=2)
    assert "LD_PRELOAD" not in choice.variables
    assert choice.warning is None


def test_without_openblas_one_line_says_what_to_install_and_why() -> None:
    choice = choose_blas({}, library=None, cores=8, workers=2)
    assert choice.variables == {}
    assert choice.warning is not None
    assert "libopenblas0-pthread" in choice.warning
    assert "25 times slower" in choice.warning


def test_the_library_is_found_where_no_linker_cache_knows_it(tmp_path: Path) -> None:
    nested = tmp_path / "openblas-pthread"
    nested.mkdir()
    (nested / LIBRARY).touch()
    found = find_openblas((tmp_path,))
    assert found in (LIBRARY, str(nested / LIBRARY))


def test_cores_are_those_of_this_process() -> None:
    assert 1 <= usable_cores() <= (os.cpu_count() or 1)
