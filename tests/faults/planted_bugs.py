"""Bugs as they happen, each a patch of one function. The simulation has to find every one."""

from collections.abc import Callable, Mapping
from typing import Final

import pytest

from faults import planted_requests, planted_supervision, planted_worker

PLANTED: Final[Mapping[str, Callable[[pytest.MonkeyPatch], None]]] = {
    plant.__name__: plant
    for plant in (
        planted_worker.a_slot_is_freed_twice,
        planted_worker.a_prefix_stays_locked,
        planted_worker.the_end_is_reported_twice,
        planted_worker.an_abort_keeps_the_slot,
        planted_supervision.lost_incarnations_are_heard,
        planted_supervision.the_streak_is_never_reset,
        planted_supervision.the_restart_budget_is_endless,
        planted_supervision.what_cannot_start_is_started_again,
        planted_supervision.nobody_waits_for_accepted,
        planted_supervision.hangs_are_not_seen,
        planted_supervision.our_own_sleep_is_held_against_others,
        planted_supervision.the_old_process_is_not_waited_for,
        planted_supervision.members_of_a_group_survive_each_other,
        planted_supervision.nobody_is_killed,
        planted_requests.epochs_are_not_compared,
        planted_requests.the_last_token_is_sent_again,
        planted_requests.replays_forget_the_last_token,
        planted_requests.gaps_are_filled_with_what_comes,
        planted_requests.the_dead_get_requests,
        planted_requests.refusals_cost_a_worker,
        planted_requests.what_was_left_keeps_its_lease,
        planted_requests.bystanders_are_blamed,
        planted_requests.accidents_are_laid_to_requests,
        planted_requests.suspects_are_tried_together,
        planted_requests.what_was_lost_is_not_replayed,
        planted_requests.poison_goes_on_for_ever,
        planted_requests.attempts_are_not_counted,
        planted_requests.aborts_are_not_sent,
        planted_requests.a_slot_is_free_before_its_owner_says_so,
        planted_requests.tokens_of_an_answer_go_missing_at_its_end,
    )
}
