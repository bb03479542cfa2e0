"""Chat templates are rendered as transformers does, and cannot do more than render."""

from datetime import datetime
from pathlib import Path

import pytest

from mlx_dp.orchestrator.text.chat.chat_template import (
    ChatTemplate,
    ChatTemplateError,
    read_template,
)
from mlx_dp.proto.errors import ConfigError

MESSAGES = [{"role": "user", "content": "hi é <&>"}]


def render(source: str, **arguments: object) -> str:
    template = ChatTemplate(source, {"bos_token": "<s>"}, now=lambda: datetime(2026, 1, 2))
    return template.render(MESSAGES, arguments=arguments)


def test_templates_get_messages_tokens_and_helpers() -> None:
    assert render("{{ bos_token }}{{ messages[0].content }}") == "<s>hi é <&>"
    assert render("{{ messages | tojson }}") == '[{"role": "user", "content": "hi é <&>"}]'
    assert render("{{ strftime_now('%d %b %Y') }}") == "02 Jan 2026"
    assert render("{% if tools %}x{% endif %}{{ add_generation_prompt }}") == "True"
    assert render("{% for m in messages %}{% break %}{% endfor %}ok") == "ok"
    assert render("{% generation %}a{% endgeneration %}b") == "ab"
    assert render("{% if enable_thinking %}t{% endif %}", enable_thinking=True) == "t"


def test_blocks_leave_no_blank_lines() -> None:
    assert render("{% if true %}\n    {% set x = 1 %}\na\n{% endif %}\n") == "a\n"


def test_arguments_cannot_replace_the_messages() -> None:
    assert render("{{ messages[0].role }}", messages=[], add_generation_prompt=0) == "user"


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].content + 1 }}",
        "{{ undefined.x }}",
        "{{ messages.__class__.__mro__ }}{{ ''.__class__.__base__.__subclasses__() }}",
        "{% set _ = messages.append(1) %}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ 1 / 0 }}",
        "{{ range(10 ** 9) }}",
        "{% for i in range(99999) %}{{ 'x' * 9999 }}{% endfor %}",
    ],
)
def test_what_a_template_must_not_do_is_one_error(source: str) -> None:
    with pytest.raises(ChatTemplateError):
        render(source)


def test_a_template_says_why_it_refuses() -> None:
    with pytest.raises(ChatTemplateError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


def test_macros_and_blocks_render_as_text() -> None:
    source = "{% macro r(c) %}{{ c }}{% endmacro %}[{{ r(messages[0].role) }}]"
    assert render(source) == "[user]"
    assert render("{% set x %}a{% endset %}{% filter upper %}{{ x }}{% endfilter %}") == "A"


def test_a_developer_is_system_unless_the_template_names_it() -> None:
    messages = [{"role": "developer", "content": "x"}]
    for source, text in (
        ("{{ messages[0].role }}", "system"),
        ("developer: {{ messages[0].role }}", "developer: system"),
        (
            "{{ messages[0].role }}{% if messages[0].role == 'developer' %}!{% endif %}",
            "developer!",
        ),
    ):
        assert ChatTemplate(source, {}).render(messages) == text


def test_messages_reach_the_template_as_transformers_passes_them() -> None:
    messages = [{"role": "assistant", "content": None, "reasoning": "r"}]
    source = "{{ messages[0] | tojson }}"
    assert ChatTemplate(source, {}).render(messages) == (
        '{"thinking": "r", "role": "assistant", "reasoning": "r", "reasoning_content": "r"}'
    )


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"{% if %}", "not a valid jinja template: line 1"),
        (b"\xff\xfe", "not UTF-8"),
        (b"x" * (2**20 + 1), "too large"),
    ],
)
def test_a_template_file_that_cannot_work_is_one_sentence(
    tmp_path: Path, content: bytes, said: str
) -> None:
    path = tmp_path / "t.jinja"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=said) as caught:
        read_template(path)
    assert str(caught.value).startswith(f"--chat-template {path}")


def test_a_template_file_that_is_absent_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_template(tmp_path / "nope.jinja")
    with pytest.raises(ConfigError, match="directory"):
        read_template(tmp_path)
