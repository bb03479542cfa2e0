"""Runs each form of step once before the worker is ready, so that no request waits for a kernel."""

import logging
from collections.abc import Callable
from functools import partial

from mlx_dp.proto.capacity.ownership import OwnerCapacity
from mlx_dp.proto.capacity.request_limits import AdmissionLimits
from mlx_dp.proto.messages.commands import Abort, Flush
from mlx_dp.proto.messages.events import Rejected, Up
from mlx_dp.worker.contract.engine import Engine
from mlx_dp.worker.scheduling.scheduler import Scheduler
from mlx_dp.worker.scheduling.step_runner import StepRunner
from mlx_dp.worker.warm_up_rounds import WarmUpRound, WarmUpScope, warm_up_rounds

_logger = logging.getLogger(__name__)


def warm_up(
    engine: Engine,
    capacity: OwnerCapacity,
    *,
    context_length: int,
    chunk_tokens: int,
    clock: Callable[[], float],
) -> None:
    """Serve made-up requests with the code that serves real ones, then reset the engine.

    A separate scheduler plans the steps, within the owner's memory. Requests that it rejects,
    because the model cannot follow grammars or memory is short, are left out.
    """
    engine.warm_up()
    longest_s = engine.facts.warm_up_s
    if not longest_s:
        return
    limits = AdmissionLimits(context_length=context_length, pool_tokens=capacity.pool_tokens)
    scope = WarmUpScope(
        shape=engine.facts.shape,
        request_slots=capacity.request_slots,
        max_request_tokens=limits.max_request_tokens,
    )
    scheduler = Scheduler(capacity, engine, context_length)
    runner = StepRunner(engine, scheduler, _discard)
    began_at = clock()

    def elapsed_s() -> float:
        return clock() - began_at

    for warm_up_round in warm_up_rounds(scope):
        so_far_s = elapsed_s()
        if so_far_s > longest_s:
            _logger.info("warm-up: stopped after %.1f s, before %s", so_far_s, warm_up_round.name)
            break
        end_s = 2 * so_far_s if warm_up_round.dispensable else longest_s
        budget = min(warm_up_round.budget, chunk_tokens)
        _run(warm_up_round, runner, budget, late=partial(_is_late, elapsed_s, end_s))
    runner.flush(Flush(flush_id=0))
    scheduler.check()
    engine.reset()
    _logger.info("warm-up took %.1f s", elapsed_s())


def _is_late(elapsed_s: Callable[[], float], end_s: float) -> bool:
    return elapsed_s() > end_s


def _run(
    requests: WarmUpRound, runner: StepRunner, budget: int, *, late: Callable[[], bool]
) -> None:
    """Run a round to its end, or until it is ``late``."""
    for wave in (requests.companions, *requests.waves):
        for submit in wave:
            runner.submit(submit)
        while runner.waiting and not late():
            _step(runner, budget)
    others = [submit for wave in requests.waves for submit in wave]
    while any(map(runner.is_running, others)) and not late():
        _step(runner, budget)
    for submit in (*requests.companions, *others):
        runner.abort(Abort(request_id=submit.request_id, epoch=submit.epoch))
    while runner.busy:
        _step(runner, budget)


def _step(runner: StepRunner, budget: int) -> None:
    runner.make_room()
    runner.absorb(runner.launch(runner.plan(budget)))


def _discard(message: Up) -> None:
    """Drop the events of made-up requests; log those that were left out."""
    if isinstance(message, Rejected):
        _logger.info("warm-up: request %d: %s", message.request_id, message.message)
