"""Token ids are those of AutoTokenizer, for every kind of tokenizer and any text."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_dp.orchestrator.text.loading.tokenizer import load_text_model
from mlx_dp.orchestrator.text.text_model import Chat, TextModel
from tests.support.text.tokenizer_kinds import (
    CORPUS,
    IN_CONFIG_ONLY,
    KINDS,
    write_kind,
    write_sentencepiece,
)

TEXTS = st.lists(
    st.one_of(
        st.text(max_size=8),
        st.sampled_from(
            [*IN_CONFIG_ONLY, "<s>", "</s>", "[SEP]", "<|endoftext|>", " ", "\n\n", "▁", "é", "。"]
        ),
        st.sampled_from(sorted({word for line in CORPUS for word in line.split(" ")})),
    ),
    max_size=8,
).map("".join)


def loaded(directory: Path) -> tuple[TextModel, Any]:
    from transformers import AutoTokenizer

    return load_text_model(directory), AutoTokenizer.from_pretrained(str(directory))


def compare(directory: Path, examples: int) -> None:
    model, theirs = loaded(directory)

    @settings(max_examples=examples, deadline=None, derandomize=True)
    @given(text=TEXTS, special=st.booleans())
    def same(text: str, special: bool) -> None:
        ids = theirs(text, add_special_tokens=special)["input_ids"]
        assert list(model.encode(text, add_special_tokens=special)) == ids
        for skip in (True, False):
            found = model.decode(ids, skip_special_tokens=skip)
            assert found == theirs.decode(ids, skip_special_tokens=skip)

    same()


@pytest.mark.parametrize("name", KINDS)
def test_ids_are_those_of_auto_tokenizer(tmp_path: Path, name: str) -> None:
    write_kind(KINDS[name], tmp_path)
    compare(tmp_path, 40)


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_ids_are_those_of_auto_tokenizer_for_many_texts(tmp_path: Path, name: str) -> None:
    write_kind(KINDS[name], tmp_path)
    compare(tmp_path, 2000)


@pytest.mark.parametrize("config", [{}, {"legacy": False}, {"add_prefix_space": False}])
def test_a_sentencepiece_model_is_converted_as_auto_tokenizer_does(
    tmp_path: Path, config: dict[str, bool]
) -> None:
    write_sentencepiece(tmp_path, **config)
    compare(tmp_path, 40)


@pytest.mark.parametrize("name", KINDS)
def test_tokens_that_only_the_configuration_has_are_one_id(tmp_path: Path, name: str) -> None:
    write_kind(KINDS[name], tmp_path)
    model, theirs = loaded(tmp_path)
    for token in IN_CONFIG_ONLY:
        ids = model.encode(token, add_special_tokens=False)
        assert ids == (theirs.convert_tokens_to_ids(token),)
    assert model.facts.eos_token_ids == (theirs.eos_token_id,)


@pytest.mark.parametrize("name", KINDS)
def test_a_chat_without_control_tokens_has_the_ids_of_transformers(
    tmp_path: Path, name: str
) -> None:
    write_kind(KINDS[name], tmp_path)
    model, theirs = loaded(tmp_path)
    words = st.one_of(
        st.text(max_size=8),
        st.sampled_from(["<", "<|", "|>", "<think>", "</think>", " ", "</", ">"]),
    )

    @settings(max_examples=40, deadline=None, derandomize=True)
    @given(contents=st.lists(st.lists(words, max_size=6).map("".join), min_size=1, max_size=4))
    def same(contents: list[str]) -> None:
        roles = ("user", "assistant")
        messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]
        prompt = model.render_chat(Chat(messages=messages), limit_s=10.0)
        expected = theirs.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        assert prompt.text == theirs.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False
        )
        assert list(model.encode_chat(prompt)) == expected

    same()


def test_a_list_of_special_tokens_in_the_configuration_counts(tmp_path: Path) -> None:
    write_kind(KINDS["byte_level"], tmp_path)
    path = tmp_path / "tokenizer_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "additional_special_tokens": ["<|extra|>"]}))
    model, theirs = loaded(tmp_path)
    expected = theirs("a<|extra|>b", add_special_tokens=False)["input_ids"]
    assert list(model.encode("a<|extra|>b", add_special_tokens=False)) == expected
    assert model.decode(expected) == "ab"


def test_answers_are_cleaned_up_where_the_configuration_asks_for_it(tmp_path: Path) -> None:
    write_kind(KINDS["wordpiece"], tmp_path)
    path = tmp_path / "tokenizer_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "clean_up_tokenization_spaces": True}))
    model, theirs = loaded(tmp_path)
    ids = theirs("the dog, the fox.", add_special_tokens=False)["input_ids"]
    detokenizer = model.detokenizer()
    shown = "".join(detokenizer.push((token,)) for token in ids) + detokenizer.finish()
    assert shown == model.decode(ids) == theirs.decode(ids) == "the dog, the fox."


def test_loading_says_nothing_of_pytorch(tmp_path: Path) -> None:
    write_kind(KINDS["byte_level"], tmp_path)
    load = "from mlx_dp.orchestrator.text.loading.tokenizer import load_text_model as load\n"
    code = f"{load}from pathlib import Path\nload(Path({str(tmp_path)!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert (done.stdout, done.stderr) == (b"", b"")
