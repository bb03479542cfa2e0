"""Frames to messages and back: one msgpack array of (version, tag, fields).

Decoding first checks that a frame is well formed, then every type and bound. A hostile frame raises
only ProtocolError, and no frame costs more than 32 times its own size: a number of one byte becomes
an object.
"""

from collections.abc import Mapping
from typing import Final, TypeVar, get_args

import msgspec

from mlx_dp.proto.errors import ProtocolError
from mlx_dp.proto.messages.commands import Down
from mlx_dp.proto.messages.events import Up
from mlx_dp.proto.messages.host_messages import HostDown, HostUp

PROTOCOL_VERSION: Final = 1
MAX_FRAME_BYTES: Final = 8 * 2**20

_T = TypeVar("_T")

_ENCODER: Final = msgspec.msgpack.Encoder()
_HEADER: Final = msgspec.msgpack.Decoder(tuple[int, str, msgspec.Raw])
_DOWN: Final[Mapping[str, msgspec.msgpack.Decoder[Down]]] = {
    kind.tag: msgspec.msgpack.Decoder(kind) for kind in get_args(Down)
}
_UP: Final[Mapping[str, msgspec.msgpack.Decoder[Up]]] = {
    kind.tag: msgspec.msgpack.Decoder(kind) for kind in get_args(Up)
}
_HOST_DOWN: Final[Mapping[str, msgspec.msgpack.Decoder[HostDown]]] = {
    kind.tag: msgspec.msgpack.Decoder(kind) for kind in get_args(HostDown)
}
_HOST_UP: Final[Mapping[str, msgspec.msgpack.Decoder[HostUp]]] = {
    kind.tag: msgspec.msgpack.Decoder(kind) for kind in get_args(HostUp)
}


def encode(message: Down | Up | HostDown | HostUp) -> bytes:
    """Return the frame of a message.

    Raises ProtocolError if the frame would be longer than a receiver accepts, or has text that
    UTF-8 cannot encode.
    """
    try:
        frame = _ENCODER.encode((PROTOCOL_VERSION, message.tag, message))
    except UnicodeEncodeError as error:
        raise ProtocolError(f"{message.tag}: {error}") from None
    if len(frame) > MAX_FRAME_BYTES:
        raise ProtocolError(
            f"{message.tag}: a frame of {len(frame)} bytes exceeds the limit of {MAX_FRAME_BYTES}"
        )
    return frame


def decode_down(frame: bytes) -> Down:
    """Return the controller's message in this frame, or raise ProtocolError."""
    return _decode(frame, _DOWN)


def decode_up(frame: bytes) -> Up:
    """Return the worker's message in this frame, or raise ProtocolError."""
    return _decode(frame, _UP)


def decode_host_down(frame: bytes) -> HostDown:
    """Return the controller's message to a host in this frame, or raise ProtocolError."""
    return _decode(frame, _HOST_DOWN)


def decode_host_up(frame: bytes) -> HostUp:
    """Return the host's message in this frame, or raise ProtocolError."""
    return _decode(frame, _HOST_UP)


def _decode(frame: bytes, decoders: Mapping[str, msgspec.msgpack.Decoder[_T]]) -> _T:
    if len(frame) > MAX_FRAME_BYTES:
        raise ProtocolError(f"a frame of {len(frame)} bytes exceeds the limit of {MAX_FRAME_BYTES}")
    try:
        version, tag, fields = _HEADER.decode(frame)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ProtocolError(f"not a frame of ours ({len(frame)} bytes): {error}") from None
    if version != PROTOCOL_VERSION:
        raise ProtocolError(f"protocol version {version}, expected {PROTOCOL_VERSION}")
    decoder = decoders.get(tag)
    if decoder is None:
        raise ProtocolError(f"unexpected message {tag[:32]!r}")
    try:
        return decoder.decode(fields)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ProtocolError(f"{tag}: {error}") from None
