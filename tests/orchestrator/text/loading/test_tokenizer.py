"""Loading the text side of a model directory."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_dp.orchestrator.text.fake_tokenizer import FakeTextModel
from mlx_dp.orchestrator.text.loading.tokenizer import load_text_model
from mlx_dp.orchestrator.text.text_model import Chat
from mlx_dp.proto.errors import ConfigError
from mlx_dp.proto.messages.sampling_params import SamplingParams
from tests.support.text.tiny_tokenizer import (
    CHAT_TEMPLATE,
    CONTEXT_LENGTH,
    EOS_TOKEN_ID,
    VOCAB_SIZE,
    write_tokenizer,
)
from tests.support.text.tokenizer_kinds import KINDS, write_kind

CONVERSATIONS = [
    [{"role": "user", "content": "hi"}],
    [
        {"role": "system", "content": "Sei kurz é"},
        {"role": "user", "content": "hi 😀"},
        {"role": "assistant", "content": "yo"},
        {"role": "user", "content": " x\n<im_end> {{ 7 }}"},
    ],
]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    write_tokenizer(tmp_path)
    return tmp_path


def edit(directory: Path, name: str, **values: object) -> None:
    path = directory / name
    old = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**old, **values}))


def test_facts_come_from_the_models_files(directory: Path) -> None:
    edit(
        directory,
        "config.json",
        model_type="tiny",
        architectures=["TinyLM"],
        max_position_embeddings=CONTEXT_LENGTH,
        eos_token_id=3,
    )
    facts = load_text_model(directory).facts
    assert facts.vocab_size == VOCAB_SIZE
    assert facts.context_length == CONTEXT_LENGTH
    assert (facts.model_type, facts.architectures) == ("tiny", ("TinyLM",))
    assert facts.eos_token_ids == (3, EOS_TOKEN_ID)
    assert facts.sampling == SamplingParams()
    edit(
        directory,
        "generation_config.json",
        eos_token_id=[0, 1],
        temperature=0.6,
        top_k=-1,
        top_p=0.9,
    )
    facts = load_text_model(directory).facts
    assert facts.eos_token_ids == (0, 1, 3, EOS_TOKEN_ID)
    assert facts.sampling == SamplingParams(temperature=0.6, top_p=0.9)


def test_nested_text_config_counts(directory: Path) -> None:
    edit(directory, "config.json", text_config={"max_position_embeddings": 9, "eos_token_id": 1})
    facts = load_text_model(directory).facts
    assert (facts.context_length, facts.eos_token_ids) == (9, (1, EOS_TOKEN_ID))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", "{"),
        ("tokenizer.json", "{}"),
        ("config.json", "[]"),
        ("generation_config.json", '{"temperature": '),
        ("generation_config.json", "[]"),
        ("chat_template.jinja", "{% if %}"),
    ],
)
def test_broken_files_are_one_configuration_error(directory: Path, name: str, content: str) -> None:
    (directory / name).write_text(content)
    with pytest.raises(ConfigError, match=r"json|template"):
        load_text_model(directory)


def test_template_file_wins_and_named_templates_have_a_default(directory: Path) -> None:
    chat = Chat(messages=CONVERSATIONS[0])
    named = [{"name": "tools", "template": "t"}, {"name": "default", "template": "d"}]
    edit(directory, "tokenizer_config.json", chat_template=named)
    assert load_text_model(directory).render_chat(chat, limit_s=10.0).text == "d"
    (directory / "chat_template.jinja").write_text("{{ eos_token }}f")
    assert load_text_model(directory).render_chat(chat, limit_s=10.0).text == "<|im_end|>f"


def test_a_template_of_the_operator_takes_the_place_of_the_models(directory: Path) -> None:
    chat = Chat(messages=CONVERSATIONS[0])
    (directory / "chat_template.jinja").write_text("{% broken")
    with pytest.raises(ConfigError, match="--chat-template FILE"):
        load_text_model(directory)
    own = directory / "own.jinja"
    own.write_text("{{ eos_token }}own")
    model = load_text_model(directory, chat_template=own)
    assert model.render_chat(chat, limit_s=10.0).text == "<|im_end|>own"


def test_truncation_in_the_file_is_switched_off(directory: Path) -> None:
    edit(
        directory,
        "tokenizer.json",
        truncation={
            "direction": "Right",
            "max_length": 3,
            "strategy": "LongestFirst",
            "stride": 0,
        },
    )
    assert len(load_text_model(directory).encode("abcdef", add_special_tokens=True)) == 6


@pytest.mark.parametrize("messages", CONVERSATIONS)
def test_chat_equals_transformers(directory: Path, messages: list[dict[str, str]]) -> None:
    _compare_with_transformers(directory, messages)


@pytest.mark.model
@pytest.mark.parametrize("messages", CONVERSATIONS)
def test_chat_equals_transformers_on_the_demo_model(
    demo_model_dir: Path, messages: list[dict[str, str]]
) -> None:
    _compare_with_transformers(demo_model_dir, messages)


def _compare_with_transformers(directory: Path, messages: list[dict[str, str]]) -> None:
    from transformers import AutoTokenizer

    model = load_text_model(directory)
    theirs = AutoTokenizer.from_pretrained(str(directory))
    for prompt in (True, False):
        rendered = model.render_chat(
            Chat(messages=messages, add_generation_prompt=prompt), limit_s=10.0
        )
        assert rendered.text == theirs.apply_chat_template(
            messages, add_generation_prompt=prompt, tokenize=False
        )
        ids = theirs.apply_chat_template(messages, add_generation_prompt=prompt)["input_ids"]
        assert list(model.encode_chat(rendered)) == ids


@pytest.mark.model
def test_demo_model_streams_any_text(demo_model_dir: Path) -> None:
    model = load_text_model(demo_model_dir)

    @given(text=st.text(max_size=60))
    def streams(text: str) -> None:
        ids = model.encode(text, add_special_tokens=False)
        detokenizer = model.detokenizer()
        shown = "".join([detokenizer.push((token,)) for token in ids])
        assert detokenizer.finish() == ""
        assert shown == model.decode(ids)

    @given(ids=st.lists(st.integers(min_value=0, max_value=49_151), max_size=60))
    def any_ids(ids: list[int]) -> None:
        detokenizer = model.detokenizer()
        shown = "".join([detokenizer.push((token,)) for token in ids]) + detokenizer.finish()
        assert shown == model.decode(ids)

    streams()
    any_ids()


def test_template_of_the_tiny_model_is_what_the_tests_think() -> None:
    assert "add_generation_prompt" in CHAT_TEMPLATE


@pytest.mark.parametrize("vocab_size", [2, 100, 256, 257, 512])
def test_fake_text_stays_within_its_vocabulary(vocab_size: int) -> None:
    model = FakeTextModel(vocab_size)
    ids = model.encode("é\xff~", add_special_tokens=True)
    assert all(token < vocab_size for token in ids)
    assert all(token < vocab_size for token in model.facts.eos_token_ids)
    if vocab_size >= 256:
        assert model.decode(ids) == "é\xff~"
    assert model.decode([65, 256, 300]) == "A"
    assert model.token_bytes(256) == b"<|end|>"


@pytest.mark.parametrize("converted", [True, False])
def test_code_that_comes_with_a_model_is_not_run_unasked(directory: Path, converted: bool) -> None:
    code = f"open({str(directory / 'ran')!r}, 'w')\nclass X: pass\n"
    for name in ("evil.py", "tokenization_evil.py", "modeling_evil.py"):
        (directory / name).write_text(code)
    mapped = {"AutoTokenizer": ["evil.X", "tokenization_evil.X"], "AutoModel": "modeling_evil.X"}
    edit(directory, "config.json", model_type="evil", auto_map=mapped)
    edit(directory, "tokenizer_config.json", tokenizer_class="X", auto_map=mapped)
    if converted:
        load_text_model(directory)
    else:
        (directory / "tokenizer.json").unlink()
        with pytest.raises(ConfigError, match="no usable tokenizer"):
            load_text_model(directory)
    assert not (directory / "ran").exists()


def test_a_tokenizer_that_is_code_is_run_for_those_who_trust_it(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Where the library keeps copies of such code was settled when it was imported.
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(directory / "modules"))
    monkeypatch.syspath_prepend(str(directory / "modules"))
    (directory / "tokenizer.json").rename(directory / "own.json")
    (directory / "own_tokenizer.py").write_text(
        "from transformers import PreTrainedTokenizerFast\n"
        "class Own(PreTrainedTokenizerFast):\n"
        "    def __init__(self, **named):\n"
        f"        super().__init__(tokenizer_file={str(directory / 'own.json')!r})\n"
    )
    mapped = {"AutoTokenizer": [None, "own_tokenizer.Own"]}
    edit(directory, "config.json", model_type="own", auto_map=mapped)
    edit(directory, "tokenizer_config.json", tokenizer_class="Own", auto_map=mapped)
    with pytest.raises(ConfigError, match="no usable tokenizer"):
        load_text_model(directory)
    model = load_text_model(directory, trust_remote_code=True)
    assert model.decode(model.encode("hi", add_special_tokens=False)) == "hi"


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
