"""Bugs of a worker."""

from dataclasses import replace
from typing import Any

import pytest

from mlx_dp.kvcache.prefix.prefix_cache import PrefixCache, PrefixRequest
from mlx_dp.kvcache.slots.request_slots import RequestSlots
from mlx_dp.proto.messages.events import FinishReason, Prefilled
from mlx_dp.worker.scheduling.running_request import RunningRequest
from mlx_dp.worker.scheduling.scheduler import Scheduler
from mlx_dp.worker.scheduling.step_runner import StepRunner

Patch = pytest.MonkeyPatch


def a_slot_is_freed_twice(patch: Patch) -> None:
    free = RequestSlots.free

    def twice(slots: RequestSlots, slot: int) -> None:
        free(slots, slot)
        slots._idle.append(slot)

    patch.setattr(RequestSlots, "free", twice)


def a_prefix_stays_locked(patch: Patch) -> None:
    def let_go(cache: PrefixCache, request: PrefixRequest) -> None:
        request.reuse = request.leaf = None

    patch.setattr(PrefixCache, "_unlock_paths", let_go)


def the_end_is_reported_twice(patch: Patch) -> None:
    end = StepRunner._end

    def twice(runner: StepRunner, slots: Any) -> None:
        requests = runner._scheduler.requests
        ends = [requests.at(slot) for slot in slots]
        end(runner, slots)
        for request in ends:
            runner._send(request.finished)

    patch.setattr(StepRunner, "_end", twice)


def an_abort_keeps_the_slot(patch: Patch) -> None:
    forget = Scheduler._remove

    def leaking(scheduler: Scheduler, request: Any) -> None:
        if request.finish is FinishReason.ABORT:
            scheduler.requests.remove(request)
            scheduler._room.row_left(request.request_id)
        else:
            forget(scheduler, request)

    patch.setattr(Scheduler, "_remove", leaking)


def workers_find_nothing_cached(patch: Patch) -> None:
    told: Any = RunningRequest.was_prefilled

    def nothing(request: RunningRequest) -> Prefilled:
        return replace(told.__get__(request), cached_tokens=0)

    patch.setattr(RunningRequest, "was_prefilled", property(nothing))
