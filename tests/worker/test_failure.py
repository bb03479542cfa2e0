import pytest

from mlx_dp.proto.codec import decode_up, encode
from mlx_dp.proto.errors import ConfigError
from mlx_dp.proto.fields import MAX_TEXT_CHARS
from mlx_dp.proto.messages import Failed, FailureKind
from mlx_dp.worker.engine import UnsupportedModelError
from mlx_dp.worker.failure import kind_of, sentence


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
