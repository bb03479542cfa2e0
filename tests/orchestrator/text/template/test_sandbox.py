"""Limits of a template: CPU time, memory, and no access beyond jinja2's own."""

import itertools
import tracemalloc

import pytest

from mlx_dp.orchestrator.text.chat.chat_template import (
    ChatTemplate,
    ChatTemplateError,
    ChatTemplateTimeoutError,
)
from mlx_dp.orchestrator.text.template.budget import Budget, TemplateTimeoutError

MAX_NBYTES = 96 * 2**20

MESSAGES = [{"role": "user", "content": "hi"}]
# No test waits for it to pass.
LONG_S = 60.0


def render(source: str, *, limit_s: float = LONG_S, messages: object = MESSAGES) -> str:
    return ChatTemplate(source, {}).render(messages, limit_s=limit_s)


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) ~ f(n - 1) }}{% endif %}{% endmacro %}{{ f(90) }}",
        "{% for i in [9] * 60 recursive %}{{ loop([i] * 60) }}{% endfor %}",
        "{% for i in range(99999) if i %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% set n = range(99999) | list %}{% for i in n %}{% for j in n %}{% endfor %}{% endfor %}",
    ],
    ids=["loops", "macros", "recursion", "filtered", "no call"],
)
def test_a_template_without_end_is_ended(source: str) -> None:
    with pytest.raises(ChatTemplateError) as caught:
        render(source, limit_s=0.05)
    assert isinstance(caught.value, ChatTemplateTimeoutError) or "recursion" in str(caught.value)


TOO_LARGE = {
    "times": "{{ 'a' * 10 ** 8 }}",
    "times, the other way": "{{ 10 ** 8 * 'a' }}",
    "a list": "{{ [0] * 10 ** 8 }}",
    "power": "{{ 10 ** (10 ** 8) }}",
    "product": "{% set x = 2 ** 10000 %}{{ x * x }}",
    "doubled by +": "{% set n = namespace(x='aa') %}{% for i in range(60) %}"
    "{% set n.x = n.x + n.x %}{% endfor %}",
    "doubled by ~": "{% set n = namespace(x='aa') %}{% for i in range(60) %}"
    "{% set n.x = n.x ~ n.x %}{% endfor %}",
    "doubled list": "{% set n = namespace(x=[1]) %}{% for i in range(60) %}"
    "{% set n.x = n.x + n.x %}{% endfor %}",
    "doubled by replace": "{% set n = namespace(x='aa') %}{% for i in range(60) %}"
    "{% set n.x = n.x.replace('a', 'aa') %}{% endfor %}",
    "squared by replace": "{% set x = 'a' * 10 ** 6 %}{{ x.replace('a', x) }}",
    "squared by the filter": "{% set x = 'a' * 10 ** 6 %}{{ x | replace('a', x) }}",
    "squared by join": "{% set x = 'a' * 10 ** 6 %}{{ x.join([x] * 10 ** 5) }}",
    "join filter": "{% set x = 'a' * 10 ** 6 %}{{ ([x] * 10 ** 5) | join }}",
    "padded": "{{ 'a'.ljust(10 ** 9) }}",
    "centred": "{{ 'a' | center(10 ** 9) }}",
    "indented": "{{ 'a\\nb' | indent(10 ** 9) }}",
    "JSON": "{{ messages | tojson(indent=10 ** 9) }}",
    "percent": "{{ '%1000000000d' % 1 }}",
    "percent with a star": "{{ '%*d' % (10 ** 9, 1) }}",
    "percent filter": "{{ '%1000000000d' | format(1) }}",
    "braces": "{{ '{:1000000000}'.format(1) }}",
    "braces in braces": "{{ '{:{}}'.format(1, 10 ** 9) }}",
    "braces again and again": "{{ ('{0}' * 10 ** 4).format('a' * 10 ** 6) }}",
    "JSON, deep": "{% set n = namespace(x=[1]) %}{% for i in range(100) %}{% set n.x = [n.x] %}"
    "{% endfor %}{{ ([n.x] * 200) | tojson(indent=9999) }}",
    "JSON, wide separators": "{{ ([1] * 9999) | tojson(separators=('b' * 99999, ':')) }}",
    "summed lists": "{{ ([[1] * 100] * 30000) | sum(start=[]) }}",
    "wide breaks": "{{ ('a' * 2000) | wordwrap(1, true, 'b' * 100000) }}",
    "a text that is odd": "{{ '%1000000000d' is odd }}",
    "bytes": "{{ (1).to_bytes(10 ** 9, 'big') }}",
    "a product of bytes": "{{ 'a'.encode() * 10 ** 9 }}",
    "named again and again": "{{ ('%(a)s' * 10 ** 4) % {'a': 'a' * 10 ** 6} }}",
    "shared lists": "{% set n = namespace(x=[1]) %}{% for i in range(60) %}"
    "{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x == n.x }}",
    "shared tuples as a key": "{% set n = namespace(x=(1,)) %}{% for i in range(60) %}"
    "{% set n.x = (n.x, n.x) %}{% endfor %}{{ {n.x: 1} }}",
    "nested tuples as a key": "{% set n = namespace(x=(1,)) %}{% for i in range(99999) %}"
    "{% set n.x = (n.x,) %}{% endfor %}{{ {n.x: 1} }}",
    "shared varargs": "{% macro f(n) %}{% if n %}{{ f(n - 1, varargs, varargs) }}{% else %}"
    "{{ varargs }}{% endif %}{% endmacro %}{{ f(60, 1) }}",
    "rounded": "{{ 1.5 | round(10 ** 9, 'ceil') }}",
    "filled": "{{ [1] | batch(10 ** 9, 'x') | list }}",
    "found from the right": "{% set x = 'a' * 4000000 %}{{ x.rfind('b' + x[:2000000]) }}",
    "stripped": "{% set x = 'a' * 4000000 %}{{ x.strip('b' * 3999999 + 'a') }}",
    "set-blocks in a macro": "{% macro f() %}{% for i in range(99999) %}{{ 'x' * 9999 }}"
    "{% endfor %}{% endmacro %}{{ f() | length }}",
    "indented by a text": "{{ ('\\n' * 2000) | indent('b' * 100000) }}",
    "tabs": "{{ ('\\t' * 20000).expandtabs(9999) }}",
    "translated": "{{ ('a' * 2000).translate({97: 'b' * 100000}) }}",
    **{
        f"lists in lists, {how}": "{% set x = [['x' * 1000] * 1000] * 200 %}" + source
        for how, source in {
            "string": "{{ x | string }}",
            "written": "{{ x }}",
            "~": "{{ 'a' ~ x }}",
            "%": "{{ '%s' % (x,) }}",
            "format": "{{ '{}'.format(x) }}",
            "JSON": "{{ x | tojson }}",
            "upper": "{{ x | upper }}",
            "pprint": "{{ x | pprint }}",
            "dict": "{{ {'a': x} }}",
            "items": "{{ {'a': x}.values() }}",
            "joined one by one": "{{ '-'.join(x | map('string')) }}",
            "mapped": "{{ [x] | map('string') | list | length }}",
        }.items()
    },
    "output": "{% for i in range(99999) %}{{ 'x' * 9999 }}{% endfor %}",
}


@pytest.mark.parametrize("name", TOO_LARGE)
def test_a_template_makes_nothing_huge(name: str) -> None:
    template = ChatTemplate(TOO_LARGE[name], {})
    tracemalloc.start()
    try:
        with pytest.raises(ChatTemplateError):
            template.render(MESSAGES, limit_s=LONG_S)
        _, peak_nbytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_nbytes < MAX_NBYTES


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ 'a' * 3 + 'b' ~ 1 ~ none }}", "aaab1None"),
        ("{{ '%s has 12345 of %d%%' % ('x', 3) }}", "x has 12345 of 3%"),
        ("{{ '{} {{12345}} {}'.format('a', 123456) }}", "a {12345} 123456"),
        ("{{ 'a-b'.replace('-', '+') }}{{ 'a-b' | replace('-', '') }}", "a+bab"),
        ("{{ ['a', 'b'] | join(', ') }}{{ messages | join(attribute='role') }}", "a, buser"),
        ("{{ 'x\\ny' | indent(2) }}|{{ 'a' | center(3) }}|{{ 'a'.ljust(2) }}|", "x\n  y| a |a |"),
        ("{{ 2 ** 10 * 3 % 7 }}", "6"),
        ("{{ 123456 | string }}{{ '-'.join('ab' | map('upper')) }}", "123456A-B"),
        (
            "{{ [1, 2.5] | sum }}{{ messages | map(attribute='role') | map('length') | sum }}",
            "3.54",
        ),
        ("{{ messages | tojson(separators=(',', ':')) }}", '[{"role":"user","content":"hi"}]'),
        ("{{ [1] | tojson(indent=2) }}{{ {'a': [1, none]} }}", "[\n  1\n]{'a': [1, None]}"),
        ("{% for i in range(3) %}{{ loop.index ~ i }}{% else %}none{% endfor %}", "102132"),
        ("{% for i in [] %}x{% else %}none{% endfor %}", "none"),
        ("{{ messages | map(attribute='role') | list | length + 12345 }}", "12346"),
    ],
)
def test_what_templates_do_is_as_before(source: str, text: str) -> None:
    assert render(source) == text


def test_a_template_cannot_put_its_own_clock_in_our_place() -> None:
    source = (
        "{% set tick = 1 %}{% set environment = 1 %}{% set concat = 1 %}"
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    )
    with pytest.raises(ChatTemplateTimeoutError):
        render(source, limit_s=0.05)


def test_each_rendering_has_a_limit_of_its_own() -> None:
    template = ChatTemplate("{% for i in range(3) %}{{ messages[0].content }}{% endfor %}", {})
    with pytest.raises(ChatTemplateTimeoutError):
        template.render(MESSAGES, limit_s=-1.0)
    assert template.render(MESSAGES, limit_s=LONG_S) == "hihihi"


def test_a_busy_machine_refuses_nothing_that_an_idle_one_serves() -> None:
    hours = itertools.count(0.0, 3600.0)
    limits = Budget([], {}, limit_s=1.0, cpu_time=lambda: 0.5, now=lambda: next(hours))
    spend_often(limits)


def spend_often(limits: Budget) -> None:
    for _ in range(100):
        limits.spend(2**16 + 1)


def test_cpu_time_is_bounded() -> None:
    seconds = itertools.count(0.0, 0.3)
    limits = Budget([], {}, limit_s=1.0, cpu_time=seconds.__next__, now=itertools.count().__next__)
    limits.spend(2**16 + 1)
    limits.spend(2**16 + 1)
    with pytest.raises(TemplateTimeoutError):
        spend_often(limits)


def test_bounds_follow_the_size_of_the_input() -> None:
    message = {"role": "user", "content": "x" * 2**20}
    assert render("{{ messages[0].content * 8 }}", messages=[message])
    many = [{"role": "user", "content": "x"}] * 3000
    assert Budget(many, {}, limit_s=1.0)._limit_s >= 4.0


def test_length_in_a_loop_looks_at_no_message_again() -> None:
    source = "{% for m in messages %}{% if loop.index == messages|length %}x{% endif %}{% endfor %}"
    seen: list[int] = []

    class Counted(str):
        def __len__(self) -> int:
            seen.append(1)
            return super().__len__()

    render(source, messages=[{"role": "user", "content": Counted("x")}] * 300)
    assert len(seen) <= 600


def test_a_list_given_by_the_client_is_not_changed() -> None:
    tools = [{"a": 1}]
    with pytest.raises(ChatTemplateError):
        ChatTemplate("{{ tools | indent(2) }}", {}).render(MESSAGES, arguments={"tools": tools})
    assert tools == [{"a": 1}]
