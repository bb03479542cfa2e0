"""Plausible bugs, each a patch of one function. The simulation must find every one."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import pytest

from tests.support.planted_bugs import requests as planted_requests
from tests.support.planted_bugs import supervision as planted_supervision
from tests.support.planted_bugs import worker as planted_worker


@dataclass(frozen=True, slots=True)
class Planted:
    """A bug, and the beginning of the message with which it must be found."""

    plant: Callable[[pytest.MonkeyPatch], None]
    shows: str


PLANTED: Final[Mapping[str, Planted]] = {
    each.plant.__name__: each
    for each in (
        Planted(planted_worker.a_slot_is_freed_twice, "I1"),
        Planted(planted_worker.a_prefix_stays_locked, "I1"),
        Planted(planted_worker.the_end_is_reported_twice, "I3"),
        Planted(planted_worker.an_abort_keeps_the_slot, "I1"),
        Planted(planted_worker.workers_find_nothing_cached, "I8"),
        Planted(planted_supervision.lost_incarnations_are_heard, "I5"),
        Planted(planted_supervision.the_streak_is_never_reset, "I15"),
        Planted(planted_supervision.the_restart_budget_is_endless, "I15"),
        Planted(planted_supervision.what_cannot_start_is_started_again, "I15"),
        Planted(planted_supervision.nobody_waits_for_accepted, "never quiet"),
        Planted(planted_supervision.hangs_are_not_seen, "I9"),
        Planted(planted_supervision.our_own_sleep_is_held_against_others, "I10"),
        Planted(planted_supervision.the_old_process_is_not_waited_for, "I15"),
        Planted(planted_supervision.members_of_a_group_survive_each_other, "I18"),
        Planted(planted_supervision.nobody_is_killed, "I9"),
        Planted(planted_supervision.exits_are_never_seen, "I9"),
        Planted(planted_supervision.the_dead_are_routable, "I9"),
        Planted(planted_supervision.the_dead_are_settled_late, "I9"),
        Planted(planted_supervision.a_message_is_received_and_forgotten, "I2"),
        Planted(planted_requests.epochs_are_not_compared, "I2"),
        Planted(planted_requests.the_last_token_is_sent_again, "I4"),
        Planted(planted_requests.replays_forget_the_last_token, "I4"),
        Planted(planted_requests.gaps_are_filled_with_what_comes, "I4"),
        Planted(planted_requests.the_dead_get_requests, "I7"),
        Planted(planted_requests.refusals_cost_a_worker, "I10"),
        Planted(planted_requests.what_was_left_keeps_its_lease, "I2"),
        Planted(planted_requests.bystanders_are_blamed, "I2"),
        Planted(planted_requests.accidents_are_laid_to_requests, "I6"),
        Planted(planted_requests.suspects_are_tried_together, "I6"),
        Planted(planted_requests.what_was_lost_is_not_replayed, "I6"),
        Planted(planted_requests.poison_goes_on_for_ever, "I6"),
        Planted(planted_requests.attempts_are_not_counted, "I6"),
        Planted(planted_requests.aborts_are_not_sent, "I12"),
        Planted(planted_requests.a_slot_is_free_before_its_owner_says_so, "I2"),
        Planted(planted_requests.tokens_of_an_answer_go_missing_at_its_end, "I4"),
        Planted(planted_requests.replays_keep_their_epoch, "I5"),
        Planted(planted_requests.replays_are_held_back, "I9"),
        Planted(planted_requests.replays_count_their_cached_prefix_again, "I8"),
        Planted(planted_requests.nothing_is_said_to_be_cached, "I8"),
        Planted(planted_requests.the_queue_is_endless, "I11"),
        Planted(planted_requests.the_queue_is_shorter_than_it_is_said_to_be, "I11"),
    )
}
