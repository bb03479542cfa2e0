"""The application's context: the state that all routes share."""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from mlx_dp.orchestrator.api import Service
from mlx_dp.orchestrator.http.body.body_parser import BodyParser
from mlx_dp.orchestrator.http.body.limits import ConcurrencyLimit, MemoryLimit
from mlx_dp.orchestrator.http.stream.queue_pace import QueuePace
from mlx_dp.orchestrator.http.stream.yield_budget import YieldBudget
from mlx_dp.orchestrator.options import HttpOptions
from mlx_dp.orchestrator.text.grammar_check import GrammarCheck
from mlx_dp.orchestrator.text.text_model import TextModel


@dataclass(slots=True, kw_only=True)
class AppContext:
    """One service and its model's text side, with the limits that all its requests share."""

    service: Service
    text: TextModel
    options: HttpOptions
    dropped_lines: Callable[[], int] = lambda: 0
    """Log lines dropped since the start."""
    created: int = field(default_factory=lambda: int(time.time()))
    post_statuses: Counter[int] = field(default_factory=Counter)
    """Responses to POSTs by status. Most refusals happen before the service sees the request."""
    preparing: int = 0
    """Requests whose body has arrived and that are not queued yet."""
    queue_pace: QueuePace = field(default_factory=QueuePace)
    body_memory: MemoryLimit = field(init=False)
    yield_budget: YieldBudget = field(default_factory=YieldBudget)
    body_parser: BodyParser = field(default_factory=BodyParser)
    grammars: GrammarCheck = field(default_factory=GrammarCheck)
    grammar_limit: ConcurrencyLimit = field(default_factory=lambda: ConcurrencyLimit("grammars"))
    """For requests whose grammar is not known yet."""

    def __post_init__(self) -> None:
        self.body_memory = MemoryLimit(self.options.max_bodies_nbytes)

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
        """The most tokens of a request: the context, or the largest token pool if that is less."""
        limits = self.service.limits()
        return self.context_length() if limits is None else limits.max_request_tokens
