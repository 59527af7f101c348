"""A Jinja sandbox in which a template can neither run on nor grow: what it does is counted, and the count is bounded.

Jinja's own sandbox keeps a template away from Python. It does not stop nested loops, "a" * 10**10, or a list put
twice into itself forty times. So everything that a template makes or goes through is paid for from one purse, by size:
each turn of a loop and each call by the nodes inside, each value made by its characters and items. What would be large
is paid for before it is made. Counts, not seconds: a template that works on one device works on all.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Sequence, Sized
from datetime import datetime
from functools import wraps
from string import Formatter
from typing import Any

from jinja2 import nodes
from jinja2.filters import make_attrgetter
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError
from jinja2.utils import Namespace, _PassArg, pass_context

from omnidraft.runtime.template_tolls import GLANCE, LOOK, NODE, TOLL, with_tolls

MAX_SOURCE = 1 << 15  # characters of a template; the longest in use have half of that
MOST_NODES = 5000  # of its syntax tree: compiling takes 0.1 ms and 10 kB for each
PURSE = 3_000_000  # characters or items, for a conversation of no length
PER_CHARACTER = 256  # of a conversation, beside that
LARGEST_BITS = 8192  # of a whole number
CONTAINERS: Any = (dict, list, tuple, type({}.keys()), type({}.values()), type({}.items()))
WRITTEN: Any = (str, range, *CONTAINERS)  # what is as long as what is in it
WIDEST = 9999  # width or precision of one field of a format

STRING_METHODS = {
    "capitalize", "casefold", "count", "endswith", "find", "format", "format_map", "index", "isalnum", "isalpha",
    "isascii", "isdecimal", "isdigit", "islower", "isnumeric", "isspace", "istitle", "isupper", "join", "lower",
    "lstrip", "partition", "removeprefix", "removesuffix", "replace", "rfind", "rindex", "rpartition", "rsplit",
    "rstrip", "split", "splitlines", "startswith", "strip", "swapcase", "title", "upper",
}  # fmt: skip
FILTERS = {
    "abs", "attr", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "filesizeformat", "first",
    "float", "forceescape", "format", "groupby", "indent", "int", "items", "join", "last", "length", "list",
    "lower", "map", "max", "min", "reject", "rejectattr", "replace", "reverse", "round", "safe", "select",
    "selectattr", "sort", "string", "title", "tojson", "trim", "truncate", "unique", "upper", "urlencode",
    "wordcount",
}  # fmt: skip
# These look at no more of a value than its length, or at its items one by one, each of which is paid for.
SHALLOW = {
    GLANCE, "attr", "count", "d", "default", "first", "items", "last", "length", "map", "reject", "rejectattr",
    "reverse", "safe", "select", "selectattr",
}  # fmt: skip
DEEP_TESTS = {
    "!=", "<", "<=", "==", ">", ">=", "eq", "equalto", "ge", "greaterthan", "gt", "in", "le", "lessthan", "lower",
    "lt", "ne", "upper",
}  # fmt: skip
HARM = "it does more than any conversation needs; it is broken, or meant to harm"


class TooMuch(SecurityError):
    """The template does more than any conversation needs."""


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox; `begin` fills the purse for one rendering. Rendering raises TooMuch where it is empty."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._purse = threading.local()
        ours: dict[str, Callable[..., Any]] = {"tojson": self._tojson, "join": self._join, LOOK: _same, GLANCE: _same}
        found: dict[str, Callable[..., Any]] = {name: self.filters[name] for name in FILTERS} | ours
        self.filters = {name: self._paid(name, do, name not in SHALLOW) for name, do in found.items()}
        self.filters[TOLL] = pass_context(lambda _context, cost: self.spend(cost))
        tests: Any = self.tests
        self.tests = {name: self._paid(name, test, name in DEEP_TESTS) for name, test in tests.items()}
        del self.globals["lipsum"]

    def begin(self, conversation: Any) -> None:
        """Fill the purse for the rendering of a conversation, which is plain data."""
        self._purse.left = 1 << 62
        self._purse.left = PURSE + PER_CHARACTER * self._size(conversation, deep=True)

    def spend(self, amount: int) -> None:
        """Pay; nobody is paid. Raises TooMuch if that is more than what is left."""
        left = getattr(self._purse, "left", 0) - max(amount, 0)
        self._purse.left = left
        if left < 0:
            raise TooMuch(HARM)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Of strings, methods that make nothing out of proportion; of numbers, none."""
        if isinstance(obj, str):
            return attr in STRING_METHODS
        if isinstance(obj, int | float | complex | bytes):
            return False
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """str.format, paid for before it is done."""
        formatting = super().wrap_str_format(value)
        if formatting is None:
            return None

        @wraps(formatting)
        def paid(*args: Any, **kwargs: Any) -> str:
            self._pay_format(str(value.__self__), "{", [*args, *kwargs.values()])
            return str(formatting(*args, **kwargs))

        return paid

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call what a template may call; a macro pays when its body begins."""
        self, owner, name = __self, getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        self.spend(NODE + sum(self._size(value) for value in [*args, *kwargs.values()]))
        if isinstance(owner, str | list | tuple):
            self.spend(self._size(owner, deep=True))
        if isinstance(owner, str) and name == "replace":
            self._pay_replace(owner, *args)
        if isinstance(owner, str) and name == "join":
            (items,) = args
            args = (self._paid_items(items, owner),)
        made = super().call(__context, __obj, *args, **kwargs)
        return self._made(made, deep=isinstance(made, CONTAINERS))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Arithmetic that can grow."""
        numbers = isinstance(left, int) and isinstance(right, int)
        if operator == "+":
            self.spend(NODE + self._size(left) + self._size(right))
            return self._made(super().call_binop(context, operator, left, right), deep=True)
        if operator == "%" and isinstance(left, str):
            self._pay_format(left, "%", right if isinstance(right, tuple) else [right])
        elif operator == "*" and numbers:
            self._pay_bits(left.bit_length() + right.bit_length())
        elif operator == "**" and numbers:
            self._pay_bits(left.bit_length() * max(right, 0))
        elif operator == "*" and any(isinstance(side, str | list | tuple) for side in (left, right)):
            count = left if isinstance(left, int) else right if isinstance(right, int) else 1
            self.spend(NODE + max(count, 0) * (self._size(left, deep=True) + self._size(right, deep=True)))
        return super().call_binop(context, operator, left, right)

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> Any:
        if sum(1 for _ in source.find_all(nodes.Node)) > MOST_NODES:
            raise TooMuch(f"it has more than {MOST_NODES} parts")
        return super()._generate(with_tolls(source), *args, **kwargs)

    def _paid(self, name: str, function: Callable[..., Any], deep: bool) -> Callable[..., Any]:
        """A filter or test that pays for what it gets and gives. It takes a context, so nothing is computed ahead."""
        wanted = _PassArg.from_obj(function)

        @pass_context
        @wraps(function)
        def paid(context: Context, *args: Any, **kwargs: Any) -> Any:
            self.spend(NODE + sum(self._size(value, deep) for value in [*args, *kwargs.values()]))
            if name in GROWING:
                GROWING[name](self, *args, **kwargs)
            passed = {_PassArg.context: context, _PassArg.eval_context: context.eval_ctx, _PassArg.environment: self}
            first = [] if wanted is None else [passed[wanted]]
            return self._made(function(*first, *args, **kwargs), deep)

        return paid

    def _made(self, value: Any, deep: bool = False) -> Any:
        self.spend(self._size(value, deep))
        return value

    def _size(self, value: Any, deep: bool = False) -> int:
        """Characters or items of a value; deep: as often as they would be written. Raises TooMuch beyond the purse."""
        if not deep:
            return len(value) if isinstance(value, Sized) else 1
        most, total = getattr(self._purse, "left", 0), 0
        waiting: list[Any] = [value]
        while waiting:
            item = waiting.pop()
            if isinstance(item, Namespace):
                raise TooMuch("it writes or nests a namespace")
            total += NODE
            total += len(item) if isinstance(item, WRITTEN) else 0
            if total > most:
                raise TooMuch(HARM)
            if isinstance(item, CONTAINERS):
                waiting += [*item, *item.values()] if isinstance(item, dict) else item
        return total

    def _join(self, value: Any, d: Any = "", attribute: Any = None) -> str:
        get = _same if attribute is None else make_attrgetter(self, attribute)
        return str(d).join(str(item) for item in self._paid_items(map(get, value), str(d)))

    def _paid_items(self, items: Any, between: str) -> list[Any]:
        found = []
        for item in items:
            self.spend(self._size(item, deep=True) + len(between))
            found.append(item)
        return found

    def _tojson(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: Any = None,
        separators: Any = None,
        sort_keys: bool = False,
    ) -> str:
        # Jinja's own filter escapes HTML, which no model was trained on.
        if indent is not None and (len(indent) if isinstance(indent, str) else indent) > WIDEST // 100:
            raise TooMuch("it indents JSON too far")
        encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
        return "".join(self._made(piece) for piece in encoder.iterencode(value))

    def _pay_replace(self, text: Any, old: Any, new: Any, count: Any = None) -> None:
        times = str(text).count(str(old)) if str(old) else len(str(text)) + 1
        self.spend(times * len(str(new)))

    def _pay_indent(self, text: Any, width: Any = 4, *_: Any, **__: Any) -> None:
        self.spend((str(text).count("\n") + 1) * (len(width) if isinstance(width, str) else int(width)))

    def _pay_round(self, _value: Any, precision: Any = 0, *_: Any, **__: Any) -> None:
        self._pay_bits(4 * abs(int(precision)))

    def _pay_bits(self, bits: int) -> None:
        if bits > LARGEST_BITS:
            raise TooMuch("it computes with numbers that are too large")
        self.spend(NODE)

    def _pay_format(self, text: Any, sign: str, values: Sequence[Any]) -> None:
        """A field is as long as a value, or as wide as its width says; computed widths are not known before."""
        widths = _percent_widths(str(text)) if sign == "%" else _brace_widths(str(text))
        if any(not width.isdigit() or int(width) > WIDEST for width in widths):
            raise TooMuch("it formats with a width that is computed, or too large")
        longest = max([self._size(value, deep=True) for value in values], default=0)
        self.spend(len(str(text)) + str(text).count(sign) * longest + sum(map(int, widths)))


GROWING: dict[str, Callable[..., None]] = {
    "replace": BoundedEnvironment._pay_replace,
    "indent": BoundedEnvironment._pay_indent,
    "round": BoundedEnvironment._pay_round,
    "urlencode": lambda self, value: self.spend(12 * self._size(value, deep=True)),
    **dict.fromkeys(["e", "escape", "forceescape"], lambda self, value: self.spend(5 * self._size(value, deep=True))),
    "format": lambda self, text, *args, **kwargs: self._pay_format(text, "%", [*args, *kwargs.values()]),
}


def _percent_widths(text: str) -> list[str]:
    """Widths and precisions of the fields of a % format; "*" for a computed one, "(" for what is not understood."""
    if re.search(r"%\([^)]*\(", text):  # a name with parentheses would hide what follows it
        return ["("]
    fields = re.findall(r"%(?:\([^)]*\))?[-#0 +]*(\*|\d+)?(?:\.(\*|\d+))?", text)
    return [width for field in fields for width in field if width]


def _brace_widths(text: str) -> list[str]:
    """The same of str.format; "{" for a computed one."""
    return [n for _, _, spec, _ in Formatter().parse(text) for n in re.findall(r"\d+|\{", spec or "")]


def _same(value: Any) -> Any:
    return value


def clock(now: datetime) -> Callable[[str], str]:
    """strftime_now of chat templates, without widths: the C library would pad to any."""

    def strftime_now(form: str) -> str:
        if len(form) > 200 or re.search(r"%[^a-zA-Z%]*\d", form):
            raise TooMuch("it formats a date with a width")
        return now.strftime(form)

    return strftime_now
