"""The first requests of an engine, which nobody waits for."""

from typing import Final

from mlx_dp.proto.sampling_params import SamplingParams
from mlx_dp.worker.engine import Engine, EngineRequest, PrefillChunk, StepPlan

_GREEDY: Final = SamplingParams(temperature=0.0)
_SAMPLED: Final = SamplingParams(temperature=0.8, top_p=0.9, top_k=20, seed=1)


def warm_up(engine: Engine, *, slots: int) -> None:
    """Run two requests of unequal length, one of them sampled, through the real path."""
    width = min(2, slots)
    vocab_size = engine.facts.shape.vocab_size
    for slot, params in zip(range(width), (_GREEDY, _SAMPLED), strict=False):
        prompt = tuple(i % vocab_size for i in range(3 + 5 * slot))
        engine.add(
            slot, EngineRequest(prompt_ids=prompt, output_ids=(), max_tokens=4, params=params)
        )
    engine.step(
        StepPlan(
            prefill=tuple(PrefillChunk(slot=slot, num_tokens=3 + 5 * slot) for slot in range(width))
        )
    )
    while engine.busy:
        engine.step(StepPlan())
    for slot in range(width):
        engine.remove(slot)
