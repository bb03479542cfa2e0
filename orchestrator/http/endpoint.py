"""What all routes share."""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from mlx_dp.orchestrator.http.body_parser import BodyParser
from mlx_dp.orchestrator.http.body_room import BodyRoom
from mlx_dp.orchestrator.http.loop_share import LoopShare
from mlx_dp.orchestrator.http.queue_pace import QueuePace
from mlx_dp.orchestrator.http.wait_room import WaitRoom
from mlx_dp.orchestrator.options import HttpOptions
from mlx_dp.orchestrator.service import Service
from mlx_dp.orchestrator.text.grammar_check import GrammarCheck
from mlx_dp.orchestrator.text.text_model import TextModel


@dataclass(slots=True, kw_only=True)
class Endpoint:
    """One endpoint: the service behind it, and its model's text side."""

    service: Service
    text: TextModel
    options: HttpOptions
    dropped_lines: Callable[[], int] = lambda: 0
    """Lines of the log that were not taken, since the start."""
    created: int = field(default_factory=lambda: int(time.time()))
    posts: Counter[int] = field(default_factory=Counter)
    """Answers to POSTs by status: most refusals are made before the service hears of them."""
    preparing: int = 0
    """Requests whose body is here and that are not queued yet."""
    pace: QueuePace = field(default_factory=QueuePace)
    room: BodyRoom = field(init=False)
    share: LoopShare = field(default_factory=LoopShare)
    bodies: BodyParser = field(default_factory=BodyParser)
    grammars: GrammarCheck = field(default_factory=GrammarCheck)
    grammar_room: WaitRoom = field(default_factory=lambda: WaitRoom("grammars"))
    """For requests whose grammar is not known yet."""

    def __post_init__(self) -> None:
        self.room = BodyRoom(self.options.max_bodies_nbytes)

    @property
    def model(self) -> str:
        return self.options.served_model_name

    def context_length(self) -> int | None:
        """The model's limit for requests, as configured before an owner is ready."""
        limits = self.service.limits()
        if limits is not None:
            return limits.context_length
        known = (self.options.context_length, self.text.facts.context_length)
        return min((length for length in known if length is not None), default=None)

    def max_model_len(self) -> int | None:
        """The most tokens of a request: of the context, or of the largest pool if that is less."""
        limits = self.service.limits()
        return self.context_length() if limits is None else limits.max_request_tokens
