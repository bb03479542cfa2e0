"""A text side that records the template's input, for tests of the HTTP side."""

from mlx_dp.orchestrator.text.fake_tokenizer import FakeTextModel
from mlx_dp.orchestrator.text.text_model import Chat


class RecordingModel(FakeTextModel):
    """Keeps the chats that it renders."""

    def __init__(self) -> None:
        super().__init__(512)
        self.chats: list[Chat] = []

    def render_chat(self, chat: Chat, *, limit_s: float) -> str:
        self.chats.append(chat)
        return super().render_chat(chat, limit_s=limit_s)
