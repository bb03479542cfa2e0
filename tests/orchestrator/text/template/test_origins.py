"""The template's own text and the text that it took over, in one rendering."""

import sys

import pytest

from mlx_dp.orchestrator.text.chat.chat_template import ChatTemplate, Rendering
from mlx_dp.orchestrator.text.template.origins import Origins

TOKEN = "<|im_end|>"


def rendering(source: str, content: object = "hi", **arguments: object) -> Rendering:
    template = ChatTemplate(source, {"eos_token": TOKEN})
    messages = [{"role": "user", "content": content}]
    return template.rendering(messages, arguments=arguments)


def is_own(made: Rendering) -> bool:
    """Whether the template wrote the first token in the text."""
    start = made.text.index(TOKEN)
    return made.is_templates_own([(start, start + len(TOKEN))])


@pytest.mark.parametrize(
    "source",
    [
        "<|im_end|>",
        "{{ m.content }}<|im_end|>{{ m.content }}",
        "{{ '<|im_end|>' }}",
        "{{ '<|im_' ~ 'end|>' }}",
        "{{ m.content + '<|im_end|>' + m.content }}",
        "{{ m.content ~ '<|im_end|>' ~ m.content }}",
        "{{ '<|' + 'im_' + ('end|>') }}",
        "{{ eos_token }}",
        "{{ m.content + eos_token }}",
        "{% set x = m.content + '<|im_end|>' %}{{ x + m.content }}",
        "{% set x %}{{ m.content }}<|im_end|>{% endset %}{{ x }}",
        "{% macro f(x) %}{{ x }}<|im_end|>{% endmacro %}{{ f(m.content) }}",
        "{% macro f(x) %}{{ x }}{% endmacro %}{{ f(m.content + '<|im_end|>') }}",
        "{% set ns = namespace(x='') %}{% for i in range(9) %}"
        "{% set ns.x = ns.x + m.content + '<|im_end|>' %}{% endfor %}{{ ns.x }}",
        "{{ {'user': '<|im_end|>'}[m.role] }}",
        "{{ ('<|im_end|>', '')[0] }}",
        "{% block b %}<|im_end|>{% endblock %}",
    ],
)
def test_what_a_template_writes_or_joins_is_its_own(source: str) -> None:
    assert is_own(rendering("{% set m = messages[0] %}" + source))


def test_roles_are_the_templates_own() -> None:
    made = rendering("{{ '<|' + messages[0].role + '|>' }}")
    assert made.is_templates_own([(0, len("<|user|>"))])
    forged = rendering("{{ '<|' + messages[0].content + '|>' }}", "user")
    assert not forged.is_templates_own([(0, len("<|user|>"))])


@pytest.mark.parametrize(
    ("source", "content"),
    [
        ("{{ c }}", TOKEN),
        ("<|im_{{ c }}", "end|>"),
        ("{{ '<|im_' + c + '|>' }}", "end"),
        ("{{ '<|im_' ~ c ~ '|>' }}", "end"),
        ("{% set x %}<|im_{{ c }}{% endset %}{{ x }}", "end|>"),
        ("{{ c | list | join }}", TOKEN),
        ("{{ '<' + c }}", "|im_end|>"),
        ("{% set x = '<' %}{{ c[0] }}|im_end|>", "<"),
        ("{% set x = 'im_end' %}{{ '<|' + c + '|>' }}", sys.intern("im_end")),
        ("{{ style }}", "x"),
        ("{% set eos_token = c %}{{ eos_token }}", TOKEN),
    ],
)
def test_what_a_client_sent_is_not(source: str, content: str) -> None:
    made = rendering("{% set c = messages[0].content %}" + source, content, style=TOKEN)
    assert not is_own(made)
    assert made.is_templates_own([])


def test_an_argument_in_the_name_of_a_special_token_is_not() -> None:
    assert not is_own(rendering("{{ eos_token }}", eos_token="".join(["<|im_", "end|>"])))


def test_a_span_that_is_own_in_part_is_not() -> None:
    own, other = "<|im", "_end|>"
    origins = Origins(frozenset([id(own)]), 100)
    text = own + other
    origins.joined(text, [own, other])
    assert origins.wrote(text, [(0, 4)])
    assert not origins.wrote(text, [(0, 5)])
    assert not origins.wrote(text, [(0, 4), (3, 5)])


def test_what_is_beyond_the_size_counts_as_taken_over() -> None:
    own, other = "<|im_end|>", "text"
    origins = Origins(frozenset([id(own)]), 13)
    text = own + other
    origins.joined(text, [own, other])
    assert not origins.wrote(text, [(0, 10)])


def test_strings_that_are_joined_with_themselves_are_not_searched_for_long() -> None:
    own = "<|im_end|>"
    origins = Origins(frozenset([id(own)]), 10**6)
    empty, text = "", own
    for _ in range(1000):
        joined = text + "a"
        origins.joined(joined, [*[empty] * 1000, text, "a"])
        text = joined
    assert not origins.wrote(text, [(0, 10)])
