"""Frames: every message survives the trip, and bad input causes a ProtocolError only."""

from dataclasses import asdict, fields, replace
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlx_dp.proto.capacity.ownership import OwnerCapacity
from mlx_dp.proto.errors import ProtocolError
from mlx_dp.proto.fields import (
    MAX_CACHE_SALT_CHARS,
    MAX_GRAMMAR_CHARS,
    MAX_TEXT_CHARS,
    MAX_WARNINGS,
    clip_text,
)
from mlx_dp.proto.messages.commands import Abort, Down, Submit
from mlx_dp.proto.messages.events import (
    Accepted,
    Failed,
    FailureKind,
    Hello,
    TokenChunk,
    TokenLogprob,
    Tokens,
    Up,
)
from mlx_dp.proto.messages.sampling_params import SamplingParams
from mlx_dp.proto.wire import codec
from mlx_dp.proto.wire.codec import (
    MAX_FRAME_BYTES,
    PROTOCOL_VERSION,
    decode_down,
    decode_up,
    encode,
)
from tests.support.control import message_strategies

DOWN = get_args(Down)
UP = get_args(Up)

relaxed = settings(deadline=None, suppress_health_check=list(HealthCheck))


def frame(tag: str, fields: Any, version: Any = PROTOCOL_VERSION) -> bytes:
    return msgspec.msgpack.encode((version, tag, fields))


def refuse(data: bytes) -> list[str]:
    """Both decoders' errors. Anything but ProtocolError fails the test."""
    complaints = []
    for decode in (decode_down, decode_up):
        with pytest.raises(ProtocolError) as caught:
            decode(data)
        complaints.append(str(caught.value))
    return complaints


@pytest.mark.parametrize("kind", [*DOWN, *UP], ids=lambda kind: kind.__name__)
@given(data=st.data())
@relaxed
def test_every_message_survives_the_trip(kind, data):
    message = data.draw(message_strategies.of_class(kind))
    decode, other = (decode_down, decode_up) if kind in DOWN else (decode_up, decode_down)
    assert decode(encode(message)) == message
    with pytest.raises(ProtocolError, match="unexpected message"):
        other(encode(message))


@pytest.mark.parametrize("kind", [*DOWN, *UP], ids=lambda kind: kind.__name__)
def test_every_text_and_list_has_a_bound(kind):
    assert message_strategies.unbounded_fields(kind) == []


def test_tags_are_unique():
    tags = [kind.tag for kind in (*DOWN, *UP)]
    assert len(set(tags)) == len(tags)


@pytest.mark.parametrize("version", [0, 2, -1, 2**64 - 1, True, None, "1", 1.0])
def test_other_versions_are_refused(version):
    refuse(frame("shutdown", {}, version))


def test_the_wrong_version_is_named():
    assert refuse(frame("shutdown", {}, 7)) == ["protocol version 7, expected 1"] * 2


@pytest.mark.parametrize("tag", ["", "Start", "x" * 10**6, None, 3, ["start"]])
def test_unknown_tags_are_refused_briefly(tag):
    assert all(len(complaint) < 200 for complaint in refuse(frame(tag, {})))


@pytest.mark.parametrize(
    "bad",
    [
        *(True, -1, 2**63, 1.0, float("nan"), "1", b"1", None, [], {}),
        # Its repr holds its address, and workers of a parallel run must agree on the names.
        pytest.param(msgspec.msgpack.Ext(5, b"1"), id="Ext"),
    ],
    ids=repr,
)
def test_a_request_id_is_a_whole_number_in_range(bad):
    refuse(frame("abort", {"request_id": bad, "epoch": 0}))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), True, "0.5", None])
@pytest.mark.parametrize(
    "field", ["temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty"]
)
def test_sampling_numbers_are_finite(field, bad):
    submit = asdict(Submit(request_id=1, epoch=0, prompt_ids=(1,), max_tokens=1))
    submit["params"][field] = bad
    refuse(frame("submit", submit))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_log_probabilities_are_finite(bad):
    for logprob in ({"logprob": bad}, {"logprob": 0.0, "top": [[1, bad]]}):
        chunk = {"request_id": 1, "epoch": 0, "index": 0, "ids": [1], "logprobs": [logprob]}
        refuse(frame("tokens", {"chunks": [chunk]}))


@pytest.mark.parametrize("bad", [-1, 2**31, 2**63, True, 1.5])
def test_token_ids_are_range_checked_wherever_they_stand(bad):
    submit = asdict(Submit(request_id=1, epoch=0, prompt_ids=(1,), max_tokens=2))
    for name in ("prompt_ids", "output_ids", "stop_token_ids"):
        refuse(frame("submit", {**submit, name: [bad]}))
    refuse(frame("submit", {**submit, "params": {"logit_bias": [[bad, 0.0]]}}))


def test_missing_fields_are_refused():
    for kind in (*DOWN, *UP):
        if fields(kind):
            refuse(frame(kind.tag, {}))


def test_a_submit_has_a_prompt():
    whole = asdict(Submit(request_id=1, epoch=0, prompt_ids=(1,), max_tokens=2))
    refuse(frame("submit", {**whole, "prompt_ids": []}))


def test_a_chunk_has_a_log_probability_for_each_token_or_none():
    TokenChunk(request_id=1, epoch=0, index=0, ids=(1, 2))
    one = TokenLogprob(logprob=-1.0)
    chunk = asdict(TokenChunk(request_id=1, epoch=0, index=0, ids=(1, 2), logprobs=(one, one)))
    refuse(frame("tokens", {"chunks": [{**chunk, "logprobs": [asdict(one)]}]}))


def test_frames_above_the_limit_are_refused_on_both_sides():
    ids = tuple(range(2**17, 2**17 + 2**20))
    request = Submit(request_id=1, epoch=0, prompt_ids=ids, max_tokens=1)
    assert decode_down(encode(request)) == request
    with pytest.raises(ProtocolError, match="exceeds the limit"):
        encode(replace(request, output_ids=ids, max_tokens=2**20))
    padded = frame("hello", {"pid": 1, "padding": bytes(MAX_FRAME_BYTES)})
    assert all("exceeds the limit" in complaint for complaint in refuse(padded))


def test_texts_and_lists_above_their_bound_are_refused():
    failed = {"kind": "internal", "message": "x" * (MAX_TEXT_CHARS + 1)}
    refuse(frame("failed", failed))
    capacity = asdict(OwnerCapacity(request_slots=1, auxiliary_slots=0, pool_tokens=None))
    many = {**capacity, "warnings": ["x"] * (MAX_WARNINGS + 1)}
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(many, OwnerCapacity)
    submit = asdict(Submit(request_id=1, epoch=0, prompt_ids=(1,), max_tokens=1))
    refuse(frame("submit", {**submit, "stop_token_ids": [1] * 257}))
    refuse(frame("submit", {**submit, "prompt_ids": [1] * (2**20 + 1)}))
    refuse(frame("submit", {**submit, "cache_salt": "x" * (MAX_CACHE_SALT_CHARS + 1)}))
    for text in ("", "x" * (MAX_GRAMMAR_CHARS + 1)):
        refuse(frame("submit", {**submit, "grammar": {"kind": "regex", "text": text}}))


def test_text_that_utf8_cannot_hold_is_refused_before_it_is_sent():
    with pytest.raises(ProtocolError, match="failed"):
        encode(Failed(kind=FailureKind.INTERNAL, message="bad \udc80 name"))
    refuse(
        b"\x93\x01"
        + msgspec.msgpack.encode("failed")
        + b"\x82\xa4kind\xa8internal\xa7message\xa2\xff\xfe"
    )


@given(st.text(alphabet=st.characters(codec=None)) | st.just("é" * 5000))
@relaxed
def test_clipped_text_always_fits(text):
    failed = Failed(kind=FailureKind.INTERNAL, message=clip_text(text))
    assert decode_up(encode(failed)) == failed


def test_unknown_fields_are_ignored():
    assert decode_up(frame("hello", {"pid": 7, "colour": "red"})) == Hello(pid=7)


def test_the_same_values_make_the_same_frame():
    logprob = TokenLogprob(logprob=-0.5, top=((3, -0.5), (4, -1.5)))
    chunk = TokenChunk(request_id=1, epoch=2, index=3, ids=(4,), logprobs=(logprob,))
    assert encode(Tokens(chunks=(chunk,))) == encode(Tokens(chunks=(replace(chunk),)))


def test_a_frame_of_another_message_of_the_same_fields_is_not_taken_for_it():
    accepted = Accepted(request_id=1, epoch=2, slot=3)
    assert decode_up(encode(accepted)) == accepted
    refuse(frame("hello", asdict(Abort(request_id=1, epoch=2))))


def test_defaults_need_not_travel():
    minimal = {"request_id": 1, "epoch": 0, "prompt_ids": [9], "max_tokens": 4}
    assert decode_down(frame("submit", minimal)).params == SamplingParams()
    assert codec.PROTOCOL_VERSION == 1
