import pytest

from mlx_dp.proto.errors import ConfigError
from mlx_dp.proto.fields import MAX_TEXT_CHARS
from mlx_dp.proto.messages.events import Failed, FailureKind
from mlx_dp.proto.wire.codec import decode_up, encode
from mlx_dp.worker.channel import ShutdownRequestedError
from mlx_dp.worker.contract.engine import UnsupportedModelError
from mlx_dp.worker.contract.failure import (
    is_model_fault,
    kind_of,
    sentence,
    serving_failure,
    starting_failure,
)
from mlx_dp.worker.contract.peers import RankLostError


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ConfigError("no such model"), FailureKind.CONFIG),
        (UnsupportedModelError("rotating cache"), FailureKind.UNSUPPORTED_MODEL),
        (MemoryError(), FailureKind.OUT_OF_MEMORY),
        (RuntimeError("[malloc] Unable to allocate 68719476736 bytes."), FailureKind.OUT_OF_MEMORY),
        (
            RuntimeError(
                "[metal::malloc] Attempting to allocate 9 bytes which is greater than the maximum "
                "allowed buffer size of 8 bytes."
            ),
            FailureKind.OUT_OF_MEMORY,
        ),
        (
            RuntimeError("[METAL] Command buffer execution failed: Insufficient Memory (00000008)"),
            FailureKind.OUT_OF_MEMORY,
        ),
        (RuntimeError("[load_safetensors] Failed to open file"), FailureKind.INTERNAL),
        (KeyError("rope"), FailureKind.INTERNAL),
        (ModuleNotFoundError("No module named 'mlx'"), FailureKind.CONFIG),
        (ImportError("libmlx.so: undefined symbol"), FailureKind.CONFIG),
        (RankLostError("rank 1 did not come", 1), FailureKind.PEER_LOST),
        (RuntimeError("[ring] connection to a peer was lost"), FailureKind.PEER_LOST),
    ],
)
def test_an_error_has_a_kind(error: Exception, kind: FailureKind) -> None:
    assert kind_of(error) is kind


def test_our_own_errors_speak_for_themselves_and_others_say_their_type() -> None:
    assert sentence(ConfigError("no such model")) == "no such model"
    assert sentence(KeyError("rope")) == "KeyError: 'rope'"
    assert sentence(MemoryError()) == "MemoryError"


def test_a_long_error_fits_a_message() -> None:
    assert len(sentence(ValueError("x" * 10_000))) == MAX_TEXT_CHARS


def test_an_error_that_names_a_file_in_no_encoding_can_be_sent() -> None:
    error = ConfigError("no model in /m\udcff")
    failed = Failed(kind=FailureKind.CONFIG, message=sentence(error))
    assert decode_up(encode(failed)) == failed


@pytest.mark.parametrize(
    ("error", "starting", "serving"),
    [
        (ConfigError("no such model"), FailureKind.CONFIG, FailureKind.INTERNAL),
        (ImportError("cannot import"), FailureKind.CONFIG, FailureKind.INTERNAL),
        (MemoryError(), FailureKind.OUT_OF_MEMORY, FailureKind.INTERNAL),
        (RankLostError("gone", 3), FailureKind.PEER_LOST, FailureKind.PEER_LOST),
    ],
)
def test_what_worked_once_may_work_again(
    error: Exception, starting: FailureKind, serving: FailureKind
) -> None:
    assert starting_failure(error).kind is starting
    assert serving_failure(error).kind is serving


def test_the_lost_rank_is_told() -> None:
    failed = starting_failure(RankLostError("rank 3 did not come", 3))
    assert (failed.lost_rank, failed.message) == (3, "rank 3 did not come")


@pytest.mark.parametrize(
    ("error", "of_model"),
    [
        (ValueError("[broadcast_shapes] Shapes cannot be broadcast"), True),
        (RuntimeError("[matmul] odd shapes"), True),
        (MemoryError(), False),
        (RankLostError("gone", 3), False),
        (RuntimeError("[ring] connection to a peer was lost"), False),
        (ShutdownRequestedError("now"), False),
        (ConfigError("another model"), False),
        (ModuleNotFoundError("No module named 'einops'"), True),
    ],
)
def test_what_ends_the_process_says_nothing_of_the_model(error: Exception, of_model: bool) -> None:
    assert is_model_fault(error) is of_model
