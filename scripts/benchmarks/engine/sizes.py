"""The amounts of work in the sections of the engine's benchmark."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Counts of tokens, rows and steps. ``steps`` are those timed in a round."""

    steps: int = 24
    batches: tuple[int, ...] = (1, 4, 8, 16, 32)
    row_prompt: int = 32
    mixes: tuple[tuple[int, ...], ...] = (
        (48,) * 15 + (1500,),
        (24, 32, 48, 64, 64, 96, 96, 128, 128, 160, 192, 256, 320, 400, 800, 1500),
    )
    churn_rows: int = 8
    churn_requests: int = 32
    churn_prompts: tuple[int, ...] = (12, 24, 48, 96, 160, 320)
    churn_answers: tuple[int, ...] = (8, 16, 32, 64)
    long_prompt: int = 1000
    short_prompts: tuple[int, int] = (8, 40)
    """Prompts at once, and their tokens."""
    history: tuple[int, int] = (900, 100)
    """The first turn's prompt and answer."""
    turn: int = 40
    held: tuple[tuple[int, int], ...] = ((1, 1000), (4, 1000), (16, 1000))
    """Rows, and the tokens of each."""
    join_prompt: int = 16
    idle_steps: int = 40
    pace_rows: int = 4
    pace_prompts: tuple[int, ...] = (500, 500, 500)

    @property
    def answer(self) -> int:
        """A response length that no measurement reaches."""
        return 2000


QUICK = Sizes(
    steps=3,
    batches=(1, 4),
    row_prompt=8,
    mixes=((8, 8, 96),),
    churn_rows=3,
    churn_requests=6,
    churn_prompts=(6, 12, 24),
    churn_answers=(3, 6),
    long_prompt=130,
    short_prompts=(3, 10),
    history=(120, 10),
    turn=8,
    held=((1, 60), (2, 60)),
    idle_steps=6,
    pace_rows=2,
    pace_prompts=(100,),
)
"""Just enough to run everything; its numbers mean nothing."""
