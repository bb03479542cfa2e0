"""Which added tokens are control tokens, and where they are in a text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models

from mlx_dp.orchestrator.text.chat.control_tokens import ControlTokens, TokenFinder, control_tokens


def tell_apart(*special: str, plain: tuple[str, ...] = (), **more: object) -> ControlTokens:
    added = [AddedToken(token, special=True) for token in special]
    added += [AddedToken(token, special=False) for token in plain]
    arguments = {"end_ids": (), "unknown": None, "written": (), **more}
    return control_tokens(dict(enumerate(added)), **arguments)


@pytest.mark.parametrize(
    ("token", "is_control"),
    [
        ("<|user|>", True),
        ("<\uff5cAssistant\uff5c>", True),
        ("<|end|>", True),
        ("[INST]", True),
        ("<|tool|>", True),
        ("<think>", False),
        ("<tool_call>", False),
        ("</tool_response>", False),
        ("<|channel>", False),
        ("user", False),
        ("\n\n", False),
        ("---", False),
    ],
)
def test_marks_of_turns_that_the_template_writes_are_control_tokens(
    token: str, is_control: bool
) -> None:
    assert (token in tell_apart(plain=(token,), written=[f"a{token}b"]).anywhere) is is_control
    assert token not in tell_apart(plain=(token,), written=["ab"]).anywhere


def test_assistants_may_write_marks_of_thinking_and_tools() -> None:
    found = tell_apart("<|im_end|>", "<think>", "<|tool_call|>")
    assert set(found.anywhere) == {"<|im_end|>", "<think>", "<|tool_call|>"}
    assert set(found.of_assistant) == {"<|im_end|>"}


def test_end_tokens_are_control_tokens_whatever_their_name() -> None:
    found = tell_apart("<|call|>", plain=("<|stop|>",), end_ids=(0, 1))
    assert set(found.anywhere) == set(found.of_assistant) == {"<|call|>", "<|stop|>"}


def test_any_text_may_be_unknown_or_layout() -> None:
    assert set(tell_apart("<unk>", "\n", "<s>", unknown="<unk>").anywhere) == {"<s>"}


@given(
    tokens=st.sets(st.text(alphabet="<|ab>", min_size=1, max_size=6), max_size=5),
    text=st.text(alphabet="<|ab>", max_size=30),
)
def test_tokens_are_found_as_the_tokenizer_finds_them(tokens: set[str], text: str) -> None:
    model = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    model.add_tokens([AddedToken(token, normalized=False) for token in sorted(tokens)])
    encoding = model.encode(text)
    expected = [place for i, place in zip(encoding.ids, encoding.offsets, strict=True) if i]
    assert list(TokenFinder(tokens).spans(text)) == expected
