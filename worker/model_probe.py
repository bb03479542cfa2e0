"""The child process that measures a model for the controller, without loading its weights."""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from mlx_dp.kvcache.layout import inspect_caches
from mlx_dp.proto.capacity.model_shape import RankWeights
from mlx_dp.proto.errors import ConfigError
from mlx_dp.proto.fields import clip_text
from mlx_dp.worker.contract.engine import UnsupportedModelError
from mlx_dp.worker.loading import device
from mlx_dp.worker.loading.model_fault import describe_fault
from mlx_dp.worker.loading.model_measure import measure_shape
from mlx_dp.worker.loading.weight_files import check_weight_files
from mlx_dp.worker.shards.sharded_load import shard_nbytes


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="mlx_dp.worker probe")
    parser.add_argument("model", type=Path)
    parser.add_argument("--ranks", type=int, help="divide the weights among this many ranks")
    parser.add_argument("--vocabulary", action="store_true", help="divide embedding and head too")
    parser.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="allow the model directory to bring code, which is run",
    )
    arguments = parser.parse_args(argv)
    try:
        answer = probe_model(
            arguments.model,
            ranks=arguments.ranks,
            vocabulary=arguments.vocabulary,
            trust_remote_code=arguments.trust_remote_code,
        )
    except ConfigError as error:
        print(json.dumps({"error": str(error)}))
        return 1
    except Exception as error:
        # A model's code may raise anything, and mlx-lm has no error type of its own.
        print(json.dumps({"error": describe_fault(arguments.model, error)}))
        return 1
    print(json.dumps(answer))
    return 0


def probe_model(
    path: Path,
    *,
    ranks: int | None = None,
    vocabulary: bool = False,
    trust_remote_code: bool = False,
) -> dict[str, Any]:
    """Return sizes, precision, batching, quantization and device as one JSON object.

    ``ranks``: add the bytes that each of this many ranks would hold.
    """
    check_weight_files(path)
    model, config = load_model(path, lazy=True, trust_remote_code=trust_remote_code)
    quantization = config.get("quantization") or {}
    caches = make_prompt_cache(model)
    logits = model(mx.zeros((1, 1), dtype=mx.int32), cache=caches)
    return {
        "model_type": str(config["model_type"]),
        "shape": asdict(measure_shape(model, config)),
        "float32": logits.dtype == mx.float32,
        "unbatchable": inspect_caches(caches).unbatchable,
        "quantization_bits": quantization.get("bits"),
        "device": device.facts(),
        "rank_weights": None
        if ranks is None
        else asdict(_rank_weights(model, ranks, vocabulary=vocabulary)),
    }


def _rank_weights(model: Any, ranks: int, *, vocabulary: bool) -> RankWeights:
    try:
        return RankWeights(nbytes=shard_nbytes(model, ranks, vocabulary=vocabulary))
    except UnsupportedModelError as error:
        return RankWeights(refusal=clip_text(str(error)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
