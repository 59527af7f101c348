"""A chat template cannot run on or grow: what it does is counted, and what is large is refused before it is made."""

from __future__ import annotations

import resource

import pytest

from omnidraft.runtime.chat import ChatTemplate
from omnidraft.runtime.errors import OmniDraftError
from omnidraft.runtime.template_limits import MAX_SOURCE, MOST_NODES

CONVERSATION = [{"role": "user", "content": "Hi"}]
TWICE = "{% set ns = namespace(x=START) %}{% for i in range(60) %}{% set ns.x = STEP %}{% endfor %}{{ ns.x }}"


def twice(start: str, step: str) -> str:
    """What doubles, or worse, sixty times."""
    return TWICE.replace("START", start).replace("STEP", step)


RUN_ON = {
    "nested loops": "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}",
    "filtered loops": "{% for a in range(9999) %}{% for b in range(99999) if false %}{% endfor %}{% endfor %}",
    "long bodies": "{% for a in range(99999) %}" + "{% set b = a %}" * 1000 + "{% endfor %}",
    "macros that call twice": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "recursive loops": "{% for a in [[[]]] recursive %}{{ loop([a, a]) }}{% endfor %}",
    "filters that only look": "{% set r = range(99999) %}" + "{% set a = r|reject|first %}" * 900,
    "comparisons": "{% set a = 'x' * 900000 %}" + "{% if a == a ~ '' %}{% endif %}" * 400,
    "comparing what contains itself twice": twice("[1]", "[ns.x, ns.x]").replace("{{ ns.x }}", "{{ ns.x == [ns.x] }}"),
}
GROW = {
    "products of text": "{{ 'a' * 10**10 }}",
    "products of lists": "{{ 10**9 * [0] }}",
    "powers": "{{ 2 ** 99999999 }}",
    "products of numbers": twice("9 ** 99", "ns.x * ns.x"),
    "sums": twice("'ab'", "ns.x + ns.x"),
    "joined text": twice("'ab'", "ns.x ~ ns.x"),
    "nested lists": twice("[1]", "[ns.x, ns.x]"),
    "nested dicts": twice("[1]", "{'a': ns.x, 'b': ns.x}"),
    "dict()": twice("[1]", "dict(a=ns.x, b=ns.x)"),
    "sums of lists": twice("[1]", "ns.x + ns.x"),
    "replace()": twice("'a'", "ns.x.replace('a', 'aaaa')"),
    "replacing nothing": twice("'a'", "ns.x.replace('', 'aaaa')"),
    "|replace": twice("'a'", "ns.x|replace('a', 'aaaa')"),
    "join()": twice("'a'", "ns.x.join(['a'] * 99)"),
    "|join": twice("'a'", "['a', 'a', 'a']|join(ns.x)"),
    "slices": "{% set a = 'x' * 900000 %}{% for i in range(999) %}{% set b = a[1:] %}{% endfor %}",
    "% widths": "{{ '%999999999d' % 1 }}",
    "computed % widths": "{{ '%*d' % (999999999, 1) }}",
    "hidden % widths": "{{ '%(a(b))999999999d' % {'a(b)': 1} }}",
    "many % fields": "{{ ('%s' * 9999) % (('a' * 9999,) * 9999) }}",
    "format() widths": "{{ '{:>999999999}'.format(1) }}",
    "computed format() widths": "{{ '{:{}}'.format(1, 999999999) }}",
    "many format() fields": "{{ ('{0}' * 9999).format('a' * 9999) }}",
    "|format": "{{ '%999999999d'|format(1) }}",
    "|indent": "{{ 'x'|indent(10**9, true) }}",
    "|tojson": "{{ [1]|tojson(indent=10**9) }}",
    "|round": "{{ 1|round(-10**9) }}",
    "dates": "{{ strftime_now('%999999999d') }}",
    "written many times": "{% set a = 'x' * 9999 %}{% for i in range(9999) %}{{ a }}{% endfor %}",
    "blocks of text": "{% filter upper %}{% for i in range(9999) %}" + "x" * 9999 + "{% endfor %}{% endfilter %}",
    "namespaces in lists": "{% set a = namespace() %}{% set a.x = [a, a] %}{{ a }}",
    "lists of characters": twice("'漢字' * 50000", "ns.x ~ (ns.x|list|length)"),
    "escapes": "{{ ('<' * 900000)|escape|length }}",
    "percent escapes": "{{ ('é' * 400000)|urlencode|length }}",
    "fromkeys": "{{ dict.fromkeys(range(99999), 'x' * 999) }}",
}
LONG_LOOP = "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}"
REFILL = {
    "a negative indent": "{{ 'a'|indent(-(10**15)) }}" + LONG_LOOP,
    "a negative toll": "{{ [-(10**15)]|map('!toll')|list|length }}" + LONG_LOOP,
    "a negative product": "{{ 'a' * -(10**15) }}" + LONG_LOOP,
    "a negative power": "{{ 2 ** -(10**15) }}" + LONG_LOOP,
}
UNUSED = {
    "center()": "{{ 'a'.center(10**9) }}",
    "|center": "{{ 'a'|center(10**9) }}",
    "expandtabs()": "{{ '\t'.expandtabs(10**9) }}",
    "methods of numbers": "{{ (5).to_bytes(10**9) }}",
    "|batch": "{{ [1]|batch(10**9, 'x')|list }}",
    "|slice": "{{ [1]|slice(10**9)|list }}",
    "lipsum()": "{{ lipsum(10**6) }}",
    "by |attr": "{{ ('a'|attr('center'))(10**9) }}",
    "by |map": "{{ ['a']|map('center', 10**9)|list }}",
    "randomness": "{{ [1, 2]|random }}",
}


HOSTILE = RUN_ON | GROW | REFILL | UNUSED


@pytest.mark.parametrize("source", HOSTILE.values(), ids=HOSTILE)
def test_it_is_stopped_in_one_line(source: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(OmniDraftError, match=r"\Ax\.jinja(, line 1)?: the chat template fails: [^\n]+\Z"):
        ChatTemplate(source, {}, "x.jinja").render(CONVERSATION)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10


@pytest.mark.parametrize(
    ("source", "what"),
    [("x" * (MAX_SOURCE + 1), "characters"), ("{{a}}" * MOST_NODES, "parts"), ("{{ " + "(" * 9999, "recursion")],
)
def test_a_template_that_is_slow_to_compile_is_not_compiled(source: str, what: str) -> None:
    with pytest.raises(OmniDraftError, match=what):
        ChatTemplate(source, {})


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ 'ab' * 3 }}{{ 2 ** 10 }}{{ 3.5 * 1000000000 }}{{ [0] * 2 }}", "ababab10243500000000.0[0, 0]"),
        ("{{ '%s-%03d' % ('a', 7) }}{{ '{}:{:>3}'.format('b', 'c') }}", "a-007b:  c"),
        ("{{ '%.1f 20260'|format(2) }}{{ '%(a)s 20260' % {'a': 1} }}", "2.0 202601 20260"),
        ("{{ ['a', 'b'].copy()|join(', ') }}{{ ','.join(['a']) }}{{ [{'a': {'b': 1}}]|join('', 'a.b') }}", "a, ba1"),
        ("{{ 'a\nb'|indent(2) }}{{ 2.567|round(1) }}{{ 'aXb'.replace('X', '--') }}", "a\n  b2.6a--b"),
        ("{% for a in range(3)|reverse %}{{ a }}{{ loop.length }}{{ loop.last }}{% endfor %}", "23False13False03True"),
        ("{% for a in [1, [2, [3]]] recursive %}{{ a if a is number else loop(a) }}{% endfor %}", "123"),
        ("{% macro m(a) %}<{{ a }}{{ caller() }}>{% endmacro %}{% call m(1) %}x{% endcall %}", "<1x>"),
        ("{% set a %}b{{ 1 }}{% endset %}{{ a }}{% filter upper %}c{% endfilter %}", "b1C"),
        ("{{ messages|map(attribute='role')|list }}{{ messages|selectattr('role', 'eq', 'x')|list }}", "['user'][]"),
        ("{% set ns = namespace(n=0) %}{% for a in 'abc' %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "3"),
    ],
)  # fmt: skip
def test_control_what_templates_do_is_as_it_was(source: str, text: str) -> None:
    assert ChatTemplate(source, {}).render(CONVERSATION) == text


def test_a_long_conversation_is_rendered_by_a_template_that_builds_it_piece_by_piece() -> None:
    """A million characters, and a quadratic way to put them together: more work is allowed for more text."""
    talk = [{"role": ("user", "assistant")[i % 2], "content": "word " * 1000} for i in range(200)]
    source = (
        "{% set ns = namespace(x='') %}{% for m in messages %}{% set last = loop.index0 == (messages|length - 1) %}"
        "{% set ns.x = ns.x ~ '<' ~ m.role ~ '>' ~ m.content.strip() %}{% endfor %}{{ ns.x }}"
    )
    text = ChatTemplate(source, {}).render(talk)
    assert text == "".join(f"<{m['role']}>{m['content'].strip()}" for m in talk)


def test_renderings_do_not_share_a_purse() -> None:
    template = ChatTemplate("{% for a in range(30000) %}{{ a }}{% endfor %}", {})
    assert len({template.render(CONVERSATION) for _ in range(3)}) == 1
