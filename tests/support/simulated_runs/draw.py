"""Draws a run from its seed."""

import random
from dataclasses import replace
from typing import Final

from mlx_dp.orchestrator.api import Generation
from mlx_dp.orchestrator.control.routing.policies import METHODS
from mlx_dp.proto.messages.grammar import Grammar, GrammarKind
from mlx_dp.proto.messages.sampling_params import SamplingParams
from tests.support.simulation.schedule import (
    CONTEXT_LENGTH,
    HARMLESS_REPEATS,
    POISON,
    SLEEPS,
    VOCAB_SIZE,
    Arrival,
    Boot,
    Drawn,
    Fault,
    FaultKind,
    Schedule,
    Setting,
)

BEGIN_S = 0.8
"""By then, most workers have started."""
SPAN_S = 3.0
"""All requests and independent faults begin within this time."""
UP_TAGS = (
    *("", "accepted", "prefilled", "tokens", "tokens", "tokens"),
    *("finished", "preempted", "preempted", "rejected", "heartbeat"),
)
DOWN_TAGS = ("submit", "submit", "abort", "flush", "start")
BOOT_TAGS = ("hello", "ready")
SAID = ("accepted", "prefilled", "tokens", "tokens", "finished", "preempted", "ready", "hello")
STATUSES = (-9, -9, -11, -6, 0, 1, 4)
FRAME_FAULTS = (FaultKind.DROP, FaultKind.REPEAT, FaultKind.LATE, FaultKind.GARBLE)
KINDS = (
    *((FaultKind.DIE, FaultKind.DIE_SAYING) * 3),
    *((FaultKind.STOP, FaultKind.HANG, FaultKind.SLOW, FaultKind.BOOT) * 1),
    *(FRAME_FAULTS[:3] * 2),
    FaultKind.REPEAT,
    *(FaultKind.GARBLE, FaultKind.CUT, FaultKind.CONGEST, FaultKind.DELAY),
    *(FaultKind.SLEEP, FaultKind.FLUSH, FaultKind.SUSPEND, FaultKind.RESTART),
)
BOOTS = (*tuple(Boot), *((Boot.CRASH, Boot.NO_PROCESS, Boot.NO_HELLO, Boot.NO_READY) * 2))
SCARCE_TOKENS = 40
"""With so little memory, requests are preempted over and over."""
UNBOUNDED = 10**6


def draw(seed: int) -> Schedule:
    """The same seed gives the same run."""
    setting = _setting(random.Random(f"{seed} setting"))
    return Schedule(
        seed=seed,
        setting=setting,
        arrivals=_arrivals(random.Random(f"{seed} arrivals"), setting),
        faults=_faults(random.Random(f"{seed} faults"), setting),
    )


def draw_frames(seed: int) -> Schedule:
    """The run of this seed with faults of frames only: lost, late, repeated, truncated."""
    schedule = draw(seed)
    rng = random.Random(f"{seed} frames")
    faults = [
        _frame_fault(rng, schedule.setting, rng.choice(FRAME_FAULTS))
        for _ in range(rng.randint(1, 8))
    ]
    faults.sort(key=lambda fault: fault.at)
    return replace(schedule, faults=tuple(faults), drawn=Drawn.FRAMES)


def draw_sleeps(seed: int) -> Schedule:
    """The run of this seed with clock jumps only.

    Either the controller's clock jumps, or all clocks, as when a lid is closed.
    """
    schedule = draw(seed)
    rng = random.Random(f"{seed} sleeps")
    faults = [
        Fault(
            at=rng.uniform(0.0, BEGIN_S + SPAN_S),
            kind=rng.choice(tuple(sorted(SLEEPS))),
            for_s=rng.choice((0.3, 2.5, 9.0, 60.0)),
        )
        for _ in range(rng.randint(1, 3))
    ]
    arrivals = tuple(each for each in schedule.arrivals if not (each.poison or each.unservable))
    faults.sort(key=lambda fault: fault.at)
    return replace(schedule, faults=tuple(faults), arrivals=arrivals, drawn=Drawn.SLEEPS)


DRAWS: Final = {Drawn.ALL: draw, Drawn.FRAMES: draw_frames, Drawn.SLEEPS: draw_sleeps}


def _frame_fault(rng: random.Random, setting: Setting, kind: FaultKind) -> Fault:
    return Fault(
        at=rng.uniform(0.0, BEGIN_S + SPAN_S),
        kind=kind,
        worker=rng.randrange(setting.size),
        for_s=rng.choice((0.05, 0.3, 1.0, 3.0)),
        tag=rng.choice(rng.choice((UP_TAGS, UP_TAGS, DOWN_TAGS, BOOT_TAGS))),
        nth=rng.choice((1, 1, 2, 5)),
    )


def _setting(rng: random.Random) -> Setting:
    pool = rng.choice((120, 250, None))
    hybrid = rng.random() < 0.25
    group = rng.random() < 0.25
    scarce = rng.random() < 0.25
    return Setting(
        group=group,
        size=rng.randint(2, 3) if group else 1 if scarce else rng.randint(1, 3),
        slots=6 if scarce else rng.choice((1, 2, 4, 6)),
        pool=pool,
        memory_tokens=SCARCE_TOKENS if scarce else rng.choice((60, 60, 100, 1000)),
        hybrid=hybrid,
        prefix_cache=rng.random() < 0.8,
        method=rng.choice(METHODS),
        max_attempts=rng.choice((2, 3, UNBOUNDED)),
        max_restarts=rng.choice((2, 5, UNBOUNDED)),
        step_s=rng.choice((0.02, 0.04, 0.08)),
        latency_s=rng.choice((0.0, 0.001, 0.02)),
        max_queued=rng.choice((2, 100, 100)),
    )


def _arrivals(rng: random.Random, setting: Setting) -> tuple[Arrival, ...]:
    stems = [tuple(rng.randrange(VOCAB_SIZE - 1) for _ in range(70)) for _ in range(2)]
    crowds = [rng.uniform(BEGIN_S, BEGIN_S + SPAN_S) for _ in range(rng.randint(1, 3))]
    times = sorted(rng.choice(crowds) + rng.uniform(0.0, 0.3) for _ in range(rng.randint(3, 14)))
    arrivals = [_arrival(rng, setting, time, stems) for time in times]
    if rng.random() < 0.06:
        poisoned = Generation(
            prompt_ids=(POISON, 1),
            max_tokens=8,
            stop_token_ids=(),
            params=SamplingParams(),
        )
        arrivals += [
            Arrival(at=rng.uniform(BEGIN_S, BEGIN_S + SPAN_S), generation=poisoned)
            for _ in range(rng.choice((1, 3)))
        ]
    return tuple(arrivals)


def _arrival(
    rng: random.Random, setting: Setting, time: float, stems: list[tuple[int, ...]]
) -> Arrival:
    refused = rng.random() < 0.03
    longest = (setting.pool or CONTEXT_LENGTH) - 45
    scarce = setting.memory_tokens == SCARCE_TOKENS
    stem = rng.choice(stems)[: rng.choice((0, 3) if scarce else (0, 3, 66, 70))]
    own = tuple(rng.randrange(VOCAB_SIZE - 1) for _ in range(rng.choice((1, 5, 20))))
    prompt = (stem + own)[:longest]
    generation = Generation(
        prompt_ids=(VOCAB_SIZE + 5,) if refused else prompt,
        max_tokens=40 if scarce else rng.choice((1, 12, 40, 40)),
        stop_token_ids=(32,) if rng.random() < 0.3 else (),
        params=SamplingParams(seed=rng.randrange(100), temperature=rng.choice((0.0, 1.0))),
        routed_dp_rank=rng.randrange(setting.size) if rng.random() < 0.15 else None,
        cache_salt=rng.choice(("", "", "", "other")),
        grammar=Grammar(kind=GrammarKind.REGEX, text="a") if rng.random() < 0.03 else None,
    )
    leaves = rng.random()
    return Arrival(
        at=time,
        generation=generation,
        leaves_after=rng.randint(0, 6) if leaves < 0.15 else None,
        leaves_at=time + rng.uniform(0.0, 2.0) if leaves > 0.9 else None,
        content=rng.random() < 0.3,
        reads_every_s=rng.choice((0.0, 0.0, 0.4)),
        refused=refused,
    )


def _faults(rng: random.Random, setting: Setting) -> tuple[Fault, ...]:
    most = rng.choice((0, 1, 2, 4, 8))
    if setting.memory_tokens == SCARCE_TOKENS and rng.random() < 0.5:
        return tuple(_repeat(rng, setting) for _ in range(most))
    faults = [_fault(rng, setting) for _ in range(most)]
    if rng.random() < 0.05:
        worker = rng.randrange(setting.size)
        faults += [
            Fault(at=0.0, kind=FaultKind.BOOT, worker=worker, nth=12, boot=Boot.CRASH),
            Fault(at=rng.uniform(BEGIN_S, BEGIN_S + SPAN_S), kind=FaultKind.DIE, worker=worker),
        ]
    if rng.random() < 0.05:
        worker = rng.randrange(setting.size)
        faults += [
            Fault(at=1.0 + turn * 1.6, kind=FaultKind.DIE, worker=worker) for turn in range(5)
        ]
    if rng.random() < 0.05:
        # Its owners die over and over: the limits on losses must end that.
        tag, nth, after = rng.choice((("accepted", 1, False), ("tokens", 2, True)))
        faults += [
            Fault(
                at=BEGIN_S + turn * 0.4,
                kind=FaultKind.DIE_SAYING,
                worker=worker,
                tag=tag,
                nth=nth,
                after=after,
            )
            for turn in range(12)
            for worker in range(setting.size)
        ]
    return tuple(sorted(faults, key=lambda fault: fault.at))


def _repeat(rng: random.Random, setting: Setting) -> Fault:
    """A request that is granted again soon gets events of its earlier grant."""
    return Fault(
        at=rng.uniform(BEGIN_S, BEGIN_S + SPAN_S),
        kind=FaultKind.REPEAT,
        worker=rng.randrange(setting.size),
        for_s=rng.choice((0.1, 0.3, 0.5, 0.7)),
        tag=rng.choice(HARMLESS_REPEATS),
        nth=rng.choice((1, 2)),
    )


def _fault(rng: random.Random, setting: Setting) -> Fault:
    kind = rng.choice(KINDS)
    tag = ""
    for_s = rng.choice((0.05, 0.3, 1.0, 3.0))
    if kind is FaultKind.DIE_SAYING:
        tag = rng.choice(SAID)
    elif kind in FRAME_FAULTS:
        tag = rng.choice(rng.choice((UP_TAGS, UP_TAGS, DOWN_TAGS, BOOT_TAGS)))
    elif kind is FaultKind.STOP or kind in SLEEPS:
        for_s = rng.choice((0.3, 2.5, 6.0, 9.0))
    return Fault(
        at=rng.uniform(0.0, BEGIN_S + SPAN_S),
        kind=kind,
        worker=rng.randrange(setting.size),
        for_s=for_s,
        tag=tag,
        nth=rng.choice((1, 1, 2, 5)) if kind is not FaultKind.BOOT else rng.choice((1, 1, 3)),
        after=rng.random() < 0.5,
        status=rng.choice(STATUSES),
        boot=rng.choice(BOOTS),
    )
