"""Random chat templates: nested constructs of jinja2, the same for the same seed."""

import random
from collections.abc import Callable, Sequence
from typing import Final

_TEXTS: Final = ("''", "'a'", "'\\n'", "'<|im_start|>'", "' x '", "'é<&>'", "bos_token", "'%s'")
_FILTERS: Final = [
    "trim",
    "upper",
    "lower",
    "string|length",
    "title",
    "string",
    "capitalize",
    "string|tojson",
    "replace('a','b')",
    "default('d')",
    "string|first",
    "string|last",
    "escape",
    "string|indent(2)",
    "string|wordcount",
    "safe",
    "int",
    "center(9)",
    "striptags",
    "string|truncate(5)",
    "urlencode",
]
_METHODS: Final = [
    "strip()",
    "split()",
    "upper()",
    "lstrip('\\n')",
    "split('a')[-1]",
    "startswith('a')",
    "replace('e','')",
    "rstrip()",
    "endswith('</think>')",
    "find('o')",
    "title()",
    "join(['1','2'])",
    "isdigit()",
    "partition('l')[2]",
]
_LIST_FILTERS: Final = [
    "list",
    "reverse|list",
    "map('string')|sort",
    "map('string')|unique|list",
    "map('string')|list",
    "select|list",
    "reject('none')|list",
    "batch(2)|list",
    "slice(2)|list",
    "map('upper')|map('trim')|list",
]
_OPERATORS: Final = ("==", "!=", "<", ">", "<=", ">=", "in", "not in")
_TESTS: Final = [
    "defined",
    "none",
    "string",
    "mapping",
    "iterable",
    "number",
    "sequence",
    "undefined",
    "boolean",
    "sameas(none)",
    "eq('user')",
    "in(['user','a'])",
    "true",
    "false",
]
_LOOP: Final = [
    "index",
    "index0",
    "revindex",
    "revindex0",
    "first",
    "last",
    "length",
    "depth",
    "depth0",
    "previtem",
    "nextitem",
    "cycle('a','b')",
    "changed(1)",
]
_TRIMS: Final = ("", "", "", "-", "+")


class Grammar:
    """Writes one template. Names that it has set may be read from then on."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._names = ["bos_token", "enable_thinking"]
        self._macros: list[str] = []
        self._loops = 0
        self._messages = False
        self._serial = 0

    def template(self) -> str:
        return "".join(self._statement(3) for _ in range(self._random.randint(2, 6)))

    def _pick(self, choices: Sequence[str]) -> str:
        return self._random.choice(choices)

    def _chance(self, part: float) -> bool:
        return self._random.random() < part

    def _new(self, prefix: str) -> str:
        self._serial += 1
        return f"{prefix}{self._serial}"

    def _tag(self, inside: str) -> str:
        # Only a tag reads a plus at its end; it also reads one at its start.
        return f"{{%{self._pick(_TRIMS)} {inside} {self._pick(_TRIMS)}%}}"

    def _body(self, depth: int) -> str:
        """Statements whose names are undefined, or may be, after they end."""
        names, macros = [*self._names], [*self._macros]
        body = "".join(self._statement(depth - 1) for _ in range(self._random.randint(1, 3)))
        self._names, self._macros = names, macros
        return body

    def _statement(self, depth: int) -> str:
        if depth <= 0:
            return self._output(1)
        made: Sequence[Callable[[int], str]] = (
            self._output,
            self._output,
            self._data,
            self._if,
            self._for,
            self._for,
            self._set,
            self._set_block,
            self._macro,
            self._macro,
            self._call_block,
            self._filter_block,
            self._with,
            self._namespace,
            self._generation,
            self._recursive,
            self._autoescape,
            self._block,
        )
        return self._random.choice(made)(depth)

    def _output(self, depth: int) -> str:
        minus = "-" if self._chance(0.2) else ""
        return f"{{{{{minus} {self._expression(depth)} {self._pick(('', '', '-'))}}}}}"

    def _data(self, depth: int) -> str:
        return self._pick(
            ("\n", "  \n  x", "a ", "<|im_end|>\n", "{# c #}", "{% raw %}{{{% endraw %}")
        )

    def _if(self, depth: int) -> str:
        middle = (
            self._tag(f"elif {self._condition(1)}") + self._body(depth) if self._chance(0.3) else ""
        )
        last = self._tag("else") + self._body(depth) if self._chance(0.5) else ""
        return (
            self._tag(f"if {self._condition(2)}")
            + self._body(depth)
            + middle
            + last
            + self._tag("endif")
        )

    def _for(self, depth: int) -> str:
        kind = self._random.randrange(5)
        head = (
            "m in messages",
            "m in messages if m.role != 'system'",
            "m in messages | reverse",
            f"q in {self._list(1)}",
            "k, q in messages[0].items()",
        )[kind]
        last = self._tag("else") + self._body(depth) if self._chance(0.2) else ""
        loops, messages = self._loops, self._messages
        self._loops, self._messages = loops + 1, messages or kind < 3
        stop = ""
        if self._chance(0.2):
            leave = self._pick(("break", "continue"))
            stop = f"{{% if {self._condition(1)} %}}{{% {leave} %}}{{% endif %}}"
        body = self._body(depth)
        self._loops, self._messages = loops, messages
        return self._tag(f"for {head}") + body + stop + last + self._tag("endfor")

    def _set(self, depth: int) -> str:
        value = self._expression(depth)
        name = self._new("v")
        self._names.append(name)
        return self._tag(f"set {name} = {value}")

    def _set_block(self, depth: int) -> str:
        name, through = self._new("b"), " | upper" if self._chance(0.3) else ""
        body = self._body(depth)
        self._names.append(name)
        return self._tag(f"set {name}{through}") + body + self._tag("endset")

    def _macro(self, depth: int) -> str:
        name = self._new("f")
        rest = self._pick(
            ("", "", "{{ varargs }}", "{{ kwargs | length }}", "{{ caller() if caller }}")
        )
        again = f"{{% if c and c is number and c > 0 %}}{{{{ {name}(0) }}}}{{% endif %}}"
        self._names.append("c")
        # A macro does not see the loops around it.
        loops, messages = self._loops, self._messages
        self._loops, self._messages = 0, False
        body = self._body(depth)
        self._loops, self._messages = loops, messages
        self._names.remove("c")
        made = self._tag(f"macro {name}(c, d='q')") + body + rest + again + self._tag("endmacro")
        self._macros.append(name)
        return made + f"{{{{ {name}({self._expression(1)}) }}}}"

    def _call_block(self, depth: int) -> str:
        name = self._new("w")
        inside = f"[{{{{ t }}}}{{{{ caller({self._expression(1)}) }}}}]"
        macro = f"{{% macro {name}(t) %}}{inside}{{% endmacro %}}"
        return macro + f"{{% call(c) {name}(1) %}}{{{{ c }}}}" + self._body(depth) + "{% endcall %}"

    def _filter_block(self, depth: int) -> str:
        name = self._pick(("upper", "trim", "indent(1)", "replace('a', 'z') | lower", "escape"))
        return self._tag(f"filter {name}") + self._body(depth) + self._tag("endfilter")

    def _with(self, depth: int) -> str:
        name, value = self._new("l"), self._expression(1)
        self._names.append(name)
        body = self._body(depth)
        self._names.remove(name)
        return self._tag(f"with {name} = {value}") + body + self._tag("endwith")

    def _namespace(self, depth: int) -> str:
        name = self._new("n")
        start = f"{{% set {name} = namespace(x={self._expression(1)}, i=0) %}}"
        change = f"{{% set {name}.x = {self._expression(1)} %}}{{% set {name}.i = {name}.i + 1 %}}"
        loop = (
            f"{{% for m in messages %}}{change}{{% endfor %}}{{{{ {name}.i }}}}{{{{ {name}.x }}}}"
        )
        self._names.append(f"{name}.x")
        return start + loop

    def _generation(self, depth: int) -> str:
        return self._tag("generation") + self._body(depth) + self._tag("endgeneration")

    def _recursive(self, depth: int) -> str:
        items = self._pick(("[1, [2, [3]], 'ab']", "[[1, 2], [[]]]", "messages[0].values()"))
        through = self._pick(("", "| upper"))
        return (
            f"{{% for x in {items} recursive %}}{{% if x is iterable and x is not string %}}"
            f"({{{{ loop(x) {through} }}}}){{% else %}}{{{{ x }}}}{self._body(depth)}"
            "{% endif %}{% endfor %}"
        )

    def _autoescape(self, depth: int) -> str:
        how = self._pick(("true", "false", "enable_thinking"))
        return f"{{% autoescape {how} %}}" + self._body(depth) + "{% endautoescape %}"

    def _block(self, depth: int) -> str:
        name = self._new("k")
        return (
            f"{{% block {name} scoped %}}"
            + self._body(depth)
            + f"{{% endblock %}}{{{{ self.{name}() }}}}"
        )

    def _expression(self, depth: int) -> str:
        if depth <= 0:
            return self._atom()
        kind = self._random.randrange(12)
        match kind:
            case 0 | 1:
                return f"{self._expression(depth - 1)} ~ {self._expression(depth - 1)}"
            case 2:
                return f"{self._text()} + {self._text()} + {self._text()}"
            case 3:
                return f"({self._expression(depth - 1)}) | {self._pick(_FILTERS)}"
            case 4:
                return f"({self._text()}).{self._pick(_METHODS)}"
            case 5:
                return (
                    f"({self._expression(depth - 1)} if {self._condition(1)} else {self._atom()})"
                )
            case 6:
                return f"{self._list(1)} | length"
            case 7:
                return f"({self._text()})[{self._pick(('0', '1:', '-1', ':2', '::-1', '::2'))}]"
            case 8 if self._macros:
                return f"{self._pick(self._macros)}({self._atom()}, d={self._atom()})"
            case 9 if self._loops:
                return f"loop.{self._pick(_LOOP)}"
            case 10:
                return f"{{'a': {self._atom()}, 'b': {self._list(1)}}}"
            case _:
                return self._atom()

    def _condition(self, depth: int) -> str:
        kind = self._random.randrange(5)
        match kind:
            case 0:
                return f"({self._atom()}) is {self._pick(('', 'not '))}{self._pick(_TESTS)}"
            case 1 if depth > 0:
                word = self._pick(("and", "or"))
                return f"({self._condition(depth - 1)} {word} {self._condition(depth - 1)})"
            case 2:
                return f"not {self._atom()}"
            case 3:
                return f"{self._text()} {self._pick(_OPERATORS)} {self._text()}"
            case _:
                return f"{self._atom()} {self._pick(('==', '!='))} {self._atom()}"

    def _text(self) -> str:
        kinds = [
            *_TEXTS,
            "(messages[0].content | string)",
            "messages[-1]['role']",
            "(messages | length | string)",
        ]
        if self._messages:
            kinds += ["(m.content | string)", "m['role']", "m.role"]
        if self._loops:
            kinds.append("(loop.index | string)")
        return self._pick(kinds)

    def _list(self, depth: int) -> str:
        base = self._pick(
            (
                "messages",
                "[1, 2, 3]",
                "['b', 'a']",
                "range(4)",
                "messages[1:]",
                "messages | map(attribute='role') | list",
                "messages | selectattr('role', 'eq', 'user') | list",
                "(tools or [])",
                f"[{self._atom()}, {self._atom()}]",
            )
        )
        return f"{base} | {self._pick(_LIST_FILTERS)}" if depth and self._chance(0.3) else base

    def _atom(self) -> str:
        if self._chance(0.4):
            return self._text()
        return self._pick(
            [*self._names, "1", "2.5", "none", "true", "[]", "tools", "(messages[0].nope | d(3))"]
        )
