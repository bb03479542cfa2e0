"""Every end token that a model's files name ends an answer, or the start is refused."""

import json
from pathlib import Path

import pytest

from mlx_dp.orchestrator.text.loading.tokenizer import load_text_model
from mlx_dp.proto.errors import ConfigError
from tests.support.text.tiny_tokenizer import EOS_TOKEN_ID, VOCAB_SIZE, write_tokenizer
from tests.support.text.tokenizer_kinds import KINDS, write_kind


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    write_tokenizer(tmp_path)
    return tmp_path


def edit(directory: Path, name: str, **values: object) -> None:
    path = directory / name
    old = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**old, **values}))


def ends(directory: Path) -> tuple[int, ...]:
    return load_text_model(directory).facts.eos_token_ids


def test_all_files_count(directory: Path) -> None:
    edit(directory, "generation_config.json", eos_token_id=[9, 8])
    edit(directory, "config.json", eos_token_id=7, text_config={"eos_token_id": [6, 9]})
    assert ends(directory) == (9, 8, 7, 6, EOS_TOKEN_ID)


@pytest.mark.parametrize("value", [None, -1, [], [-1, None]])
def test_none_may_be_named(directory: Path, value: object) -> None:
    edit(directory, "generation_config.json", eos_token_id=value)
    assert ends(directory) == (EOS_TOKEN_ID,)


@pytest.mark.parametrize("kind", ["eot_token", "eom_token"])
def test_ends_of_turns_count(directory: Path, kind: str) -> None:
    edit(directory, "tokenizer_config.json", **{kind: "<|pad|>"})
    assert ends(directory) == (EOS_TOKEN_ID, 3)


def test_a_token_by_its_name_counts(directory: Path) -> None:
    edit(directory, "generation_config.json", eos_token_id="<|endoftext|>")
    assert ends(directory) == (0, EOS_TOKEN_ID)


def test_an_end_token_in_the_map_of_special_tokens_counts(directory: Path) -> None:
    edit(directory, "special_tokens_map.json", eos_token={"content": "<|endoftext|>"})
    assert set(ends(directory)) == {0, EOS_TOKEN_ID}


@pytest.mark.parametrize("name", KINDS)
def test_an_end_token_that_only_the_configuration_has_counts(tmp_path: Path, name: str) -> None:
    write_kind(KINDS[name], tmp_path)
    model = load_text_model(tmp_path)
    assert model.facts.eos_token_ids == model.encode("<|im_end|>", add_special_tokens=False)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("tokenizer_config.json", {"eos_token": "<|no such|>"}),
        ("tokenizer_config.json", {"eot_token": "<|no such|>"}),
        ("special_tokens_map.json", {"eos_token": "<|no such|>"}),
        ("generation_config.json", {"eos_token_id": "<|no such|>"}),
        ("generation_config.json", {"eos_token_id": [0, "<|no such|>"]}),
        ("generation_config.json", {"eos_token_id": VOCAB_SIZE + 1}),
        ("config.json", {"eos_token_id": 2.5}),
        ("config.json", {"eos_token_id": True}),
    ],
)
def test_one_without_an_id_is_an_error_with_token_and_file(
    directory: Path, name: str, values: dict[str, object]
) -> None:
    edit(directory, "config.json", vocab_size=VOCAB_SIZE)
    edit(directory, name, **values)
    with pytest.raises(ConfigError) as refused:
        load_text_model(directory)
    [value] = values.values()
    wrong = value[-1] if isinstance(value, list) else value
    assert name in str(refused.value) and repr(wrong) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_an_id_that_the_model_has_and_the_tokenizer_has_not_is_fine(directory: Path) -> None:
    edit(directory, "config.json", vocab_size=VOCAB_SIZE + 9, eos_token_id=VOCAB_SIZE + 1)
    assert ends(directory) == (VOCAB_SIZE + 1, EOS_TOKEN_ID)


def test_an_id_behind_a_gap_is_an_error(directory: Path) -> None:
    token = {"content": "<|turn|>", "special": True}
    edit(
        directory,
        "tokenizer_config.json",
        eos_token="<|turn|>",
        added_tokens_decoder={str(VOCAB_SIZE + 3): token},
    )
    with pytest.raises(ConfigError, match=rf"'<\|turn\|>'.* id {VOCAB_SIZE + 3} "):
        load_text_model(directory)
