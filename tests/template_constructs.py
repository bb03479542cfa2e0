"""Every construct of jinja2, one small template each, as chat templates may use them."""

from typing import Final

FILTERS: Final = {
    "abs": ["{{ -3 | abs }}"],
    "attr": ["{{ messages[0] | attr('role') }}|{{ 'a' | attr('upper') is defined }}"],
    "batch": ["{{ range(7) | batch(3) | list }}{{ 'abcde' | batch(2, '-') | map('join') | list }}"],
    "capitalize": ["{{ messages[0].role | capitalize }}"],
    "center": ["{{ 'ab' | center(7) }}|{{ 'ab' | center(width=4) }}|"],
    "count": ["{{ messages | count }}"],
    "d": ["{{ nothing | d('x') }}{{ '' | d('y', true) }}"],
    "default": ["{{ nothing | default }}{{ none | default('z', boolean=true) }}"],
    "dictsort": [
        "{{ {'b': 1, 'A': 2} | dictsort }}{{ {'b': 1, 'A': 2} | dictsort(true, 'value', true) }}"
    ],
    "e": ["{{ '<a href=\"x\">' | e }}{{ ('<' | e) ~ '<' }}{{ ('<' | e) + '<' }}"],
    "escape": ["{{ messages[0].content | escape }}"],
    "filesizeformat": ["{{ 1500 | filesizeformat }}{{ 1500 | filesizeformat(true) }}"],
    "first": ["{{ messages | first | tojson }}{{ [] | first }}{{ 'xy' | first }}"],
    "float": ["{{ '1.50' | float }}{{ 'x' | float(2.5) }}{{ 3 | float }}"],
    "forceescape": ["{{ '&' | e | forceescape }}"],
    "format": ["{{ '%s-%05.1f-%r' | format('a', 2.25, 'b') }}{{ '%(a)s' | format(a=3) }}"],
    "groupby": [
        "{% for k, g in messages | groupby('role') %}{{ k }}:{{ g | length }};{% endfor %}",
        "{% for g in messages | groupby('name', default='-') %}{{ g.grouper }}{{ g.list | length }}"
        "{% endfor %}",
    ],
    "indent": [
        "{{ 'a\\nb\\n\\nc' | indent }}|{{ 'a\\nb' | indent(2, true) }}|"
        "{{ 'a\\n\\nb' | indent('> ', first=false, blank=true) }}"
    ],
    "int": ["{{ '12' | int + 1 }}{{ 'x' | int(7) }}{{ 'ff' | int(base=16) }}{{ 2.9 | int }}"],
    "items": ["{% for k, v in messages[0] | items %}{{ k }}={{ v }};{% endfor %}"],
    "join": [
        "{{ [1, 'b', none] | join('-') }}{{ messages | join(', ', attribute='role') }}",
        "{{ messages | map(attribute='role') | join }}{{ ['a', 'b' | e, '<'] | join('&') }}",
    ],
    "last": ["{{ messages | last | tojson }}{{ 'xy' | last }}"],
    "length": ["{{ messages | length }}{{ messages[0] | length }}{{ 'é' | length }}"],
    "list": ["{{ 'abc' | list }}{{ messages[0] | list }}{{ range(3) | list }}"],
    "lower": ["{{ 'ÀB' | lower }}"],
    "map": [
        "{{ messages | map(attribute='role') | list }}{{ ['a', 'b'] | map('upper') | join }}",
        "{{ messages | map(attribute='name', default='?') | list }}",
        "{{ [' a '] | map('trim') | map('replace', 'a', 'b') | list }}",
    ],
    "max": ["{{ [3, 1, 2] | max }}{{ ['b', 'A'] | max }}{{ messages | max(attribute='role') }}"],
    "min": ["{{ [3, 1, 2] | min }}{{ ['b', 'A'] | min(case_sensitive=true) }}{{ [] | min }}"],
    "pprint": ["{{ messages | pprint }}{{ tools | pprint }}"],
    "random": ["{{ [1] | random }}"],
    "reject": ["{{ [1, 2, 3] | reject('odd') | list }}{{ [0, 1] | reject | list }}"],
    "rejectattr": [
        "{{ messages | rejectattr('role', 'equalto', 'system') | list | length }}"
        "{{ messages | rejectattr('name') | list | length }}"
    ],
    "replace": ["{{ 'aXbX' | replace('X', '-') }}{{ 'aXbX' | replace('X', '', 1) }}"],
    "reverse": ["{{ messages | reverse | map(attribute='role') | list }}{{ 'abc' | reverse }}"],
    "round": ["{{ 2.5 | round }}{{ 2.567 | round(2) }}{{ 2.1 | round(0, 'ceil') | int }}"],
    "safe": ["{{ '<b>' | safe }}{{ ('<' | safe) ~ '&' }}"],
    "select": ["{{ [1, 2, 3] | select('gt', 1) | list }}{{ ['', 'a'] | select | list }}"],
    "selectattr": [
        "{{ messages | selectattr('role', 'in', ['user', 'tool']) | map(attribute='role') | list }}"
        "{{ messages | selectattr('tool_calls', 'defined') | list | length }}"
    ],
    "slice": ["{% for s in range(7) | slice(3, 'x') %}{{ s }}{% endfor %}"],
    "sort": [
        "{{ ['b', 'A', 'c'] | sort }}{{ [2, 1] | sort(reverse=true) }}",
        "{{ messages | sort(attribute='role') | map(attribute='role') | list }}",
    ],
    "string": ["{{ 12 | string + 'a' }}{{ [1, 'é'] | string }}{{ none | string }}"],
    "striptags": ["{{ '<p>a  b</p><!-- c -->' | striptags }}"],
    "sum": [
        "{{ [1, 2.5] | sum }}{{ [[1], [2]] | sum(start=[]) }}"
        "{{ [{'n': 2}, {'n': 3}] | sum('n') }}{{ [{'n': 2}] | sum(attribute='n', start=1) }}"
    ],
    "title": ["{{ 'ab cd-ef (g' | title }}"],
    "tojson": [
        "{{ messages | tojson }}",
        "{{ messages | tojson(indent=2) }}{{ tools | tojson(4) }}",
        "{{ messages | tojson(ensure_ascii=true) }}{{ {'b': 1, 'a': 2.0} | tojson(sort_keys=true) }}",
        "{{ tools | tojson(separators=(',', ':')) }}{{ [1, none, true] | tojson(indent='\\t') }}",
        "{{ messages[0].content | tojson }}{{ 1 | tojson }}{{ nothing | tojson }}",
        "{{ messages | tojson(ensure_ascii=False, indent=none, separators=(', ', ': ')) }}",
    ],
    "trim": ["[{{ '  a ' | trim }}{{ 'xxaxx' | trim('x') }}{{ 5 | trim }}]"],
    "truncate": ["{{ 'foo bar baz qux' | truncate(9) }}{{ 'foobar' | truncate(5, true, '') }}"],
    "unique": [
        "{{ ['a', 'A', 'b'] | unique | list }}{{ messages | unique('role') | list | length }}"
    ],
    "upper": ["{{ 'aß' | upper }}"],
    "urlencode": ["{{ 'a b/é?' | urlencode }}{{ {'a': 1, 'b': 'c d'} | urlencode }}"],
    "urlize": ["{{ 'see http://a.b/c and www.x.org' | urlize(nofollow=true) }}"],
    "wordcount": ["{{ 'a bb  c' | wordcount }}"],
    "wordwrap": ["{{ 'aaa bbb cccccc' | wordwrap(4) }}|{{ 'aaaaaa' | wordwrap(2, true, '+') }}"],
    "xmlattr": ["<a{{ {'b': 1, 'c': none, 'd': '<'} | xmlattr }}>"],
}
TESTS: Final = {
    "!=": ["{{ [1, 2] | select('!=', 1) | list }}"],
    "<": ["{{ [1, 2] | select('<', 2) | list }}"],
    "<=": ["{{ [1, 2] | select('<=', 1) | list }}"],
    "==": ["{{ [1, 2] | select('==', 1) | list }}"],
    ">": ["{{ [1, 2] | select('>', 1) | list }}"],
    ">=": ["{{ [1, 2] | select('>=', 2) | list }}"],
    "boolean": ["{{ true is boolean }}{{ 1 is boolean }}"],
    "callable": ["{{ raise_exception is callable }}{{ 'a'.upper is callable }}{{ 1 is callable }}"],
    "defined": ["{{ tools is defined }}{{ nothing is defined }}{{ messages[9] is defined }}"],
    "divisibleby": [
        "{{ 6 is divisibleby 3 }}{{ 7 is divisibleby(3) }}{{ '%d' is divisibleby(3) }}"
    ],
    "eq": ["{{ 'a' is eq 'a' }}"],
    "equalto": ["{{ messages[0].role is equalto 'user' }}"],
    "escaped": ["{{ 'a' is escaped }}{{ ('a' | e) is escaped }}"],
    "even": ["{{ 2 is even }}{{ 3 is not even }}"],
    "false": ["{{ false is false }}{{ 0 is false }}{{ enable_thinking is false }}"],
    "filter": ["{{ 'trim' is filter }}{{ 'nope' is filter }}"],
    "float": ["{{ 1.0 is float }}{{ 1 is float }}"],
    "ge": ["{{ 2 is ge 1 }}"],
    "greaterthan": ["{{ 2 is greaterthan 1 }}"],
    "gt": ["{{ 2 is gt 1 }}"],
    "in": ["{{ 'a' is in 'abc' }}{{ 1 is in [2] }}{{ 'role' is in messages[0] }}"],
    "integer": ["{{ 1 is integer }}{{ true is integer }}"],
    "iterable": ["{{ 'a' is iterable }}{{ messages[0].content is iterable }}{{ 1 is iterable }}"],
    "le": ["{{ 1 is le 1 }}"],
    "lessthan": ["{{ 1 is lessthan 2 }}"],
    "lower": ["{{ 'a' is lower }}"],
    "lt": ["{{ 1 is lt 2 }}"],
    "mapping": ["{{ messages[0] is mapping }}{{ messages is mapping }}"],
    "ne": ["{{ 1 is ne 2 }}"],
    "none": ["{{ none is none }}{{ tools is none }}{{ messages[0].content is none }}"],
    "number": ["{{ 1 is number }}{{ '1' is number }}"],
    "odd": ["{{ loop is defined }}{{ 3 is odd }}{{ '%s' is odd }}"],
    "sameas": ["{{ none is sameas none }}{{ true is sameas 1 }}"],
    "sequence": [
        "{{ messages is sequence }}{{ messages[0].content is sequence }}{{ 1 is sequence }}"
    ],
    "string": ["{{ messages[0].content is string }}{{ 1 is string }}{{ 'a' is not string }}"],
    "test": ["{{ 'odd' is test }}{{ 'nope' is test }}"],
    "true": ["{{ true is true }}{{ enable_thinking is true }}"],
    "undefined": ["{{ nothing is undefined }}{{ nothing.x is undefined }}"],
    "upper": ["{{ 'A' is upper }}"],
}
_S: Final = "{% set s = 'Ab, <x> é\\n\\tc  ' %}"
_CALLS: Final = """capitalize() casefold() center(20) center(20,'*') count('b') encode() endswith('c')
endswith(('a','c')) expandtabs() expandtabs(3) expandtabs(tabsize=2) find('x') find('x',1,9)
format(1) format_map({}) index('x') isalnum() isalpha() isascii() isdecimal() isdigit()
isidentifier() islower() isnumeric() isprintable() isspace() istitle() isupper() join(['1','2'])
join('xyz') ljust(20,'.') lower() lstrip() lstrip('A') partition(',') removeprefix('Ab')
removesuffix('x') replace('b','bb') replace('b','bb',1) rfind('b') rindex('b') rjust(20) rpartition('<')
rsplit('<',1) rsplit() rstrip() rstrip('c\\t') split() split(',') split(',',1) split(sep=',',maxsplit=1)
splitlines() splitlines(true) startswith('Ab') strip() strip('A ') swapcase() title()
translate({65:'zz'}) upper() zfill(20) index('zzz') nope() maketrans('a','b')""".split()
TEXT_METHODS: Final = [f"{_S}{{{{ s.{call} }}}}" for call in _CALLS] + [
    "{{ '{0}{a!r:>5}{1:.2f}{0[0]}'.format('x', 2.5, a='y') }}{{ '{:{}}|'.format('a', 4) }}",
    "{{ '{a}'.format_map({'a': messages[0].role}) }}{{ '{0.role}'.format(messages[0]) }}",
    "{{ '%s' % 1 }}{{ '%-5s|%*d' % ('a', 4, 7) }}{{ '%(r)s' % {'r': 1} }}{{ 'a%%' % () }}",
    "{{ 'ab'['upper']() }}{{ 'abc'[1] }}{{ 'abc'[-1] }}{{ 'abc'[5] }}{{ 'abc'[::-1] }}",
    "{{ 'a' * 3 }}{{ 3 * 'ab' }}{{ [1] * 2 }}{{ (1,) * 2 }}{{ 'a' ~ 1 ~ none ~ [1] }}",
    "{{ ('<' | e).join(['<', '&']) }}{{ ('%s' | e) % '<' }}{{ ('{}' | e).format('<') }}",
    "{{ ('<x>' | e).upper() }}{{ ('a' | e) * 2 }}{{ ('<' | safe).split('x') }}",
    "{{ '-'.join(messages | map(attribute='role')) }}{{ b'x' }}{{ 'a'.encode('utf-16').hex() }}",
    "{{ messages[0].content.split('</think>')[-1].lstrip('\\n') }}",
    "{{ messages[0].content.split('</think>')|first|trim }}",
]
_D: Final = "{% set d = {'b': 1, 'a': [2, 3], 'items': 4} %}"
CONTAINERS: Final = [
    _D + "{{ d.get('a') }}{{ d.get('z') }}{{ d.get('z', 5) }}{{ d.keys() | list }}{{ d['items'] }}",
    _D + "{{ d.items() }}{{ d.values() | list }}{{ d.keys() }}{{ d.copy() }}{{ d.items }}",
    _D + "{% for k, v in d.items() | sort %}{{ k }}{{ loop.index }}{% endfor %}{{ 'a' in d }}",
    _D + "{{ d.pop('a') }}",
    _D + "{{ d.update({'x': 1}) }}",
    _D + "{{ {'a': 1}.fromkeys(['x', 'y'], 2) }}{{ d == {'a': 1} }}{{ d | length }}",
    "{{ dict(a=1, b=[2]) }}{{ dict({'a': 1}, **{'b': 2}) }}{{ dict([('a', 1)]) }}",
    "{{ dict.fromkeys('ab', 1) }}{{ dict(messages[0], content='x') }}",
    "{{ [1, 2, 3][1:] }}{{ [1, 2, 3][:-1] }}{{ [1, 2, 3][::2] }}{{ messages[1:] | length }}",
    "{{ [1, 2] + [3] }}{{ (1, 2) + (3,) }}{{ [1, 2].index(2) }}{{ [1, 1].count(1) }}{{ [1].copy() }}",
    "{{ [1].append(2) }}",
    "{{ [1].sort() }}",
    "{{ [[1, 2], [3]] == [[1, 2], [3]] }}{{ (1, 2) < (1, 3) }}{{ 1 < 2 < 3 }}{{ 1 < 3 < 2 }}",
    "{{ {'a': {'b': [1, {'c': none}]}}.a.b[1].c }}{{ {(1, 2): 'x'}[1, 2] }}{{ {(1, 2): 'x'}[(1, 2)] }}",
    "{{ [1, [2, [3, (4,)]]] }}{{ () }}{{ {} }}{{ [] }}{{ (1,) }}{{ {'a': true, 1: 2.0} }}",
    "{{ 'role' in messages[0] }}{{ 'x' not in messages[0] }}{{ messages[0] in messages }}",
    "{{ messages.x }}{{ messages['0'] }}{{ messages[0].nope }}|{{ messages[0]['nope'] }}",
    "{{ messages[0].nope.deeper }}",
    "{{ messages[0].get('role') }}{{ messages[-1]['content'] }}{{ messages[0].keys() | list }}",
    "{{ [messages[0], messages[-1]] | map(attribute='role') | list }}{{ {'m': messages[0]} }}",
    "{{ range(3) }}{{ range(1, 10, 4) | list }}{{ range(5)[1:3] | list }}{{ 3 in range(5) }}",
]
NUMBERS: Final = [
    "{{ 7 // 2 }}{{ 7 / 2 }}{{ 7 % 3 }}{{ 2 ** 10 }}{{ 2 ** -1 }}{{ -2 ** 2 }}{{ +3 }}{{ 1_000 }}",
    "{{ 1 + 2 * 3 - 4 }}{{ 1.5 + 1 }}{{ 0.1 + 0.2 }}{{ 1e3 }}{{ 0xff }}{{ 0b11 }}{{ not 1 }}",
    "{{ 1 / 0 }}",
    "{{ 'a' + 1 }}",
    "{{ messages[0].content + 1 }}",
    "{{ 1 + messages | length }}{{ (messages | length) % 2 == 0 }}{{ messages | length - 1 }}",
    "{{ true + 1 }}{{ true and 'x' }}{{ none or 'y' }}{{ 'a' and '' or 'b' }}{{ not none }}",
    "{{ (2.5).is_integer() }}{{ (5).bit_length() }}",
    "{{ 10 ** 30 }}{{ 2 ** 100 * 3 }}{{ 1 if enable_thinking is defined and enable_thinking else 2 }}",
]
LOOPS: Final = [
    "{% for m in messages %}{{ loop.index }}{{ loop.index0 }}{{ loop.revindex }}{{ loop.revindex0 }}"
    "{{ loop.first }}{{ loop.last }}{{ loop.length }}{{ loop.depth }}{{ loop.depth0 }};{% endfor %}",
    "{% for m in messages %}{{ loop.previtem.role }}<{{ loop.nextitem.role }}"
    "{{ loop.cycle('a', 'b', 'c') }}{{ loop.changed(m.role) }};{% else %}none{% endfor %}",
    "{% for m in [] %}x{% else %}none{% endfor %}{% for x in nothing %}x{% else %}u{% endfor %}",
    "{% for m in messages if m.role != 'system' %}{{ loop.index }}{{ m.role }}{{ loop.last }}{% endfor %}",
    "{% for m in messages %}{% if loop.index == 2 %}{% continue %}{% endif %}{{ m.role }}"
    "{% if loop.index > 3 %}{% break %}{% endif %}{% endfor %}",
    "{% for a in [1, 2] %}{% for b in 'xy' %}{{ a }}{{ b }}{{ loop.index }}{% endfor %}{{ loop.index }}"
    "{% endfor %}",
    "{% for x in [1, [2, [3, 4]], 5] recursive %}{% if x is iterable %}({{ loop(x) }}){{ loop.depth }}"
    "{% else %}{{ x }}{% endif %}{% endfor %}",
    "{% for n in [{'n': 'a', 'c': [{'n': 'b', 'c': []}]}] recursive %}{{ n.n }}{{ loop.depth0 }}"
    "{% if n.c %}[{{ loop(n.c) | upper }}]{% endif %}{% endfor %}",
    "{% for k, (a, b) in [(1, (2, 3))] %}{{ k + a + b }}{% endfor %}{% for a, b in ['xy'] %}{{ b }}{% endfor %}",
    "{% for i in range(3) %}{% set x = i %}{% endfor %}{{ x }}{% for i in 3 %}{% endfor %}",
    "{% for m in messages | reverse %}{{ loop.length }}{{ loop.revindex }}{{ m.role }}{% endfor %}",
    "{% for r in messages | map(attribute='role') %}{{ r }}{{ loop.last }}{{ loop.length }}{% endfor %}",
    "{% set g = messages | map(attribute='role') %}{% for r in g %}{{ r }}{% endfor %}+"
    "{% for r in g %}{{ r }}{% endfor %}",
    "{% macro twice(g) %}{{ g | list }}{{ g | list }}{% endmacro %}{{ twice(messages | map(attribute='role')) }}",
    "{% for i in range(700) %}{{ i }}{{ loop.length if loop.last }}{% endfor %}",
    "{% for i in range(700) %}{% if i == 650 %}{{ loop.revindex }}{{ loop.nextitem }}{% break %}{% endif %}"
    "{% endfor %}",
    "{% for m in messages[::-1] %}{% set i = loop.length - 1 - loop.index0 %}{{ i }}{% endfor %}",
    "{% for c in messages[0].content %}{{ c }}.{% endfor %}{% for k in messages[0] %}{{ k }}{% endfor %}",
    "{{ loop }}{% for x in [1] %}{% for y in loop.index | string %}{{ y }}{% endfor %}{% endfor %}",
]
BLOCKS: Final = [
    "{% macro r(c) %}{{ c }}{% endmacro %}{{ r(messages[0].content) }}{{ r() }}{{ r.name }}",
    "{% macro r(c, d='x', e=c) %}{{ c }}{{ d }}{{ e }}{% endmacro %}{{ r(1) }}{{ r(1, d=2) }}{{ r(c=3, e=4) }}",
    "{% macro r() %}{{ varargs }}{{ kwargs }}{% endmacro %}{{ r(1, 'b', z=[3]) }}{{ r() }}",
    "{% macro r(a) %}{% endmacro %}[{{ r(1) }}]{{ r.arguments }}{{ r.catch_kwargs }}{{ r.caller }}",
    "{% macro f(n) %}{{ n }}{% if n > 0 %}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(5) }}",
    "{% macro schema(s, level=0) %}{% if s is mapping %}{% for k, v in s.items() %}{{ '  ' * level }}"
    "{{ k }}:\n{{ schema(v, level + 1) }}{% endfor %}{% else %}{{ '  ' * level }}{{ s }}\n{% endif %}"
    "{% endmacro %}{{ schema(tools[0] if tools else {'a': {'b': 1}}) }}",
    "{% macro outer(x) %}{% macro inner(y) %}<{{ y }}{{ x }}>{% endmacro %}{{ inner(x + 1) }}{% endmacro %}"
    "{{ outer(1) }}",
    "{% macro w(t) %}[{{ t }}:{{ caller() }}:{{ caller() }}]{% endmacro %}{% call w('a') %}in{{ messages | length }}"
    "{% endcall %}",
    "{% macro w() %}{% for i in [1, 2] %}{{ caller(i, i * 2) }}{% endfor %}{% endmacro %}"
    "{% call(a, b) w() %}{{ a }}-{{ b }};{% endcall %}",
    "{% macro w() %}{{ caller is defined }}{{ caller() if caller }}{% endmacro %}{{ w() }}{% call w() %}x{% endcall %}",
    "{% set x %}a{{ messages[0].role }}{% endset %}{{ x }}{{ x | length }}{{ x is string }}",
    "{% set x | upper | trim %}  a{{ 1 }} {% endset %}[{{ x }}]",
    "{% set x %}{% set y %}in{% endset %}{{ y }}{{ y }}{% endset %}{{ x }}{% set z %}{% endset %}[{{ z }}]",
    "{% filter upper %}a{{ messages[0].role }}{% endfilter %}{% filter trim | replace('a', 'b') %} a {% endfilter %}",
    "{% filter indent(2, first=true) %}{% for i in [1, 2] %}x{{ i }}\n{% endfor %}{% endfilter %}",
    "{% block a %}x{% block b %}{{ messages | length }}{% endblock %}{% endblock %}{{ self.a() }}{{ self.b() }}",
    "{% for i in [1, 2] %}{% block c scoped %}{{ i }}{% endblock %}{% endfor %}{% block d required %}{% endblock %}",
    "{% block a %}{{ super() }}{% endblock %}",
    "{% with a = 1, b = 2 %}{{ a + b }}{% set c = 3 %}{{ c }}{% endwith %}{{ c }}{{ a }}",
    "{% set ns = namespace(x=1, found=false) %}{% for m in messages %}{% set ns.x = ns.x + 1 %}"
    "{% set ns.found = m.role %}{% endfor %}{{ ns.x }}{{ ns.found }}{{ ns.nope }}{{ ns['x'] }}",
    "{% set ns = namespace({'a': [1]}, b='c') %}{{ ns }}{% set ns.a = ns.a + [2] %}{{ ns.a }}{{ ns.a | length }}",
    "{% set ns = namespace(_x=1) %}",
    "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    "{% set x = 1 %}{% set x.y = 2 %}",
    "{% set a, b = 1, 2 %}{{ a }}{{ b }}{% set a, b = b, a %}{{ a }}{{ b }}{% set t = 1, 2 %}{{ t }}",
    "{% generation %}{{ messages[0].content }}{% set q = 1 %}{% endgeneration %}{{ q }}",
    "{% for m in messages %}{% generation %}{{ loop.index }}{{ m.role }}{% endgeneration %}{% endfor %}",
    "{%- generation -%}\n  a  {%- endgeneration -%} b",
    "{% autoescape true %}{{ '<' }}{{ '<' | safe }}{{ '<' ~ '>' }}{{ ['<'] }}{% endautoescape %}{{ '<' }}",
    "{% autoescape enable_thinking %}{{ '<' }}{{ '<' ~ 1 }}{{ messages[0].content }}{% endautoescape %}",
    "{% autoescape true %}{% macro m(x) %}<{{ x }}>{% endmacro %}{{ m('<') }}{% set s %}<{{ '<' }}{% endset %}{{ s }}"
    "{% endautoescape %}{{ m('&') }}",
    "{% if messages[0].role == 'system' %}a{% elif tools %}b{% else %}c{% endif %}{{ 'x' if false }}{{ 'y' if 1 else 2 }}",
    "{% raw %}{{ x }}{% y %}{% endraw %}{# comment #}{{ '{{' }}{{ '%}' }}",
    "{% set x = 'a' -%}   \n  b  {%- if true %} c {%- endif -%}  d\n\n{{- x -}}\n e {#- c -#} f",
    "  {% if true %}\n  a\n  {% endif %}\n{% if true +%}\n b{% endif %}\n{%+ if true %}c{% endif %}\n\n",
    "{{ raise_exception('no') }}",
    "{% if messages | length > 99 %}{{ raise_exception('no ' ~ messages[0].role) }}{% endif %}ok",
    "{{ strftime_now('%d %b %Y %H:%M:%S %j %%') }}{{ strftime_now('') }}",
    "{% set date = strftime_now('%Y-%m-%d') if strftime_now is defined else 'x' %}{{ date }}",
    "{% set c = cycler('a', 'b') %}{{ c.next() }}{{ c.current }}{{ c.next() }}{{ c.next() }}{{ c.reset() }}{{ c.items }}",
    "{% set j = joiner(', ') %}{% for m in messages %}{{ j() }}{{ m.role }}{% endfor %}",
    "{{ bos_token }}{{ eos_token }}{{ pad_token }}{{ unk_token is defined }}{{ add_generation_prompt }}",
    "{{ tools is none }}{{ documents is defined }}{{ documents }}{{ enable_thinking is defined }}{{ reasoning_effort }}",
    "{% include 'x' %}",
    "{% import 'x' as y %}",
    "{% extends 'x' %}",
    "{% do 1 %}",
    "{{ messages",
    "{% for x in y %}",
    "{{ 1 | nope }}",
    "{{ 1 is nope }}",
    "{% if false %}{{ 1 | nope }}{% endif %}ok",
    "{{ nope() }}",
    "{{ messages() }}",
    "{{ messages.__class__ }}",
    "{{ ''.__class__.__mro__ }}",
    "{{ messages[0]['__class__'] }}{{ 'a'.__len__ }}|",
    "{{ lipsum is defined }}{{ range is callable }}{{ namespace is defined }}{{ lipsum(n=1) | length > 9 }}",
    "{% macro m() %}{{ caller }}{% endmacro %}{% set x = m %}{{ x() }}",
    "{%- macro render(m) -%}{%- if m.content is string -%}{{- m.content -}}{%- else -%}"
    "{%- for p in m.content -%}{{- p.text -}}{%- endfor -%}{%- endif -%}{%- endmacro -%}"
    "{%- for m in messages -%}{{- m.role ~ ': ' ~ render(m) ~ '\n' -}}{%- endfor -%}",
]


def every_construct() -> dict[str, str]:
    """All of them by a name."""
    named = {**FILTERS, **{f"is {name}": sources for name, sources in TESTS.items()}}
    named |= {
        "text": TEXT_METHODS,
        "containers": CONTAINERS,
        "numbers": NUMBERS,
        "loops": LOOPS,
        "blocks": BLOCKS,
    }
    return {
        f"{name} {number}": source
        for name, sources in named.items()
        for number, source in enumerate(sources)
    }
