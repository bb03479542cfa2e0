"""The MLX engine keeps the contract, and answers as mlx-lm does alone."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("mlx.core")

from engine_contract import EngineContract
from tiny_models import DENSE, TINY_MODELS
from worker_starts import mlx_start

from mlx_dp.worker.engine import Engine
from mlx_dp.worker.mlx_engine import MlxEngine

pytestmark = pytest.mark.mlx

CONTRACT_MODELS = {
    "in several slabs": DENSE["llama"],
    "in one slab": DENSE["stablelm"],
    "latent attention": TINY_MODELS["deepseek_v2"],
}


@pytest.fixture(scope="module", params=CONTRACT_MODELS)
def contract_model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    return CONTRACT_MODELS[request.param].write(tmp_path_factory.mktemp("model"))


class TestMlxEngineContract(EngineContract):
    @pytest.fixture
    def make_engine(self, contract_model: Path) -> Iterator[Callable[[], Engine]]:
        made: list[MlxEngine] = []

        def make() -> Engine:
            made.append(MlxEngine.load(mlx_start(contract_model)))
            return made[-1]

        yield make
        for engine in made:
            engine.close()
