"""All messages between controller and worker.

Commands go down, controller to worker: Start, Submit, Abort, Flush, Drain, Shutdown. Events go up:
Hello, Ready, Accepted, Rejected, Prefilled, Tokens, Preempted, Finished, Flushed, Heartbeat,
Failed. Every field's declaration has its bounds, and the codec enforces them on arrival.

``epoch`` counts the grants of one request: an event whose epoch is not the request's present one is
stale and dropped. The sender's incarnation is its socket identity, so it is on every frame.
"""

from mlx_dp.proto.messages.commands import Abort as Abort
from mlx_dp.proto.messages.commands import Drain as Drain
from mlx_dp.proto.messages.commands import EngineKind as EngineKind
from mlx_dp.proto.messages.commands import Flush as Flush
from mlx_dp.proto.messages.commands import Shutdown as Shutdown
from mlx_dp.proto.messages.commands import Start as Start
from mlx_dp.proto.messages.commands import Submit as Submit
from mlx_dp.proto.messages.events import Accepted as Accepted
from mlx_dp.proto.messages.events import Failed as Failed
from mlx_dp.proto.messages.events import FailureKind as FailureKind
from mlx_dp.proto.messages.events import Finished as Finished
from mlx_dp.proto.messages.events import FinishReason as FinishReason
from mlx_dp.proto.messages.events import Flushed as Flushed
from mlx_dp.proto.messages.events import Heartbeat as Heartbeat
from mlx_dp.proto.messages.events import Hello as Hello
from mlx_dp.proto.messages.events import Preempted as Preempted
from mlx_dp.proto.messages.events import Prefilled as Prefilled
from mlx_dp.proto.messages.events import Ready as Ready
from mlx_dp.proto.messages.events import Rejected as Rejected
from mlx_dp.proto.messages.events import RejectReason as RejectReason
from mlx_dp.proto.messages.events import Tokens as Tokens
from mlx_dp.proto.messages.events import WorkerPhase as WorkerPhase
from mlx_dp.proto.messages.fake_engine_options import FakeEngineOptions as FakeEngineOptions
from mlx_dp.proto.messages.grammar import Grammar as Grammar
from mlx_dp.proto.messages.token_chunk import TokenChunk as TokenChunk
from mlx_dp.proto.messages.token_chunk import TokenLogprob as TokenLogprob

Down = Start | Submit | Abort | Flush | Drain | Shutdown
Up = (
    Hello
    | Ready
    | Accepted
    | Rejected
    | Prefilled
    | Tokens
    | Preempted
    | Finished
    | Flushed
    | Heartbeat
    | Failed
)
Message = Down | Up
