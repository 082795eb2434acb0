"""Attacks by templates: each filter, test and method with the inputs that cost it most."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any

import pytest
from jinja2 import TemplateError

from jaxserve.text.template import ChatTemplate, TemplateTooLong
from jaxserve.text.template_costs import ATTRIBUTES
from jaxserve.text.template_sandbox import Sandbox

SECONDS = 0.02
# One step may take this much longer than a rendering may take, since the CPUs of CI are slow.
STEP = 0.7
# Inputs that are long themselves, and so allow the most work: texts of 80 million characters.
INPUT: Any = {
    "A": "a" * 1_000_000,
    "B": "a" * 16_000_000,
    "N": "\n" * 1_000_000,
    "T": "ab \t\n" * 200_000,
    "W": "ΐ" * 1_000_000,
}
# C holds numbers of one hash.
LISTS = (
    "{% set L = range(100000) | list %}"
    f"{{% set C = range(0, {100_000 * (2**61 - 1)}, {2**61 - 1}) %}}"
)
NAMES = "{% set ns = namespace(x=['a'], y=['a'], t=('a',)) %}"
# Nested values of 2 ** 40 leaves, and values 3,000 deep.
WIDE = (
    "{% for i in range(40) %}{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}"
    "{% set ns.t = (ns.t, ns.t) %}{% endfor %}"
)
DEEP = (
    "{% for i in range(3000) %}{% set ns.x = [ns.x] %}{% set ns.y = [ns.y] %}"
    "{% set ns.t = (ns.t,) %}{% endfor %}"
)
# The names of filters, and their inputs. A filter may stand in several rows.
FILTERS = """
abs             2 ** 64 | abs
attr            L | attr('x' * 100000)
batch           [1] | batch(100000, 1) | list
batch           L | batch(1) | batch(1) | batch(1) | list
capitalize      W | capitalize
count           L | count
d               A | d(B)
default         L | map('default', A) | list
dictsort        {'a': ns.x, 'b': ns.y} | dictsort(by='value')
e               ('&' * 3000000) | e
escape          ns.x | escape
first           L | select('eq', -1) | first
float           B | float
format          ('%99999d' * 9999) | format(*L)
format          ('%(a)s' * 10000) | format(a=A)
format          '%999999999d' | format(1)
groupby         L | groupby('real')
groupby         [ns.x, ns.y] | groupby(0)
indent          N | indent(100000, true, true)
indent          N | indent(A, true, true)
int             ('f' * 1000000) | int(0, 16)
int             ('9' * 4300) | int
items           {'a': L} | items | list
join            L | join(A)
join            L | join
join            T | join(A)
last            L | last
length          L | length
list            B | list
list            C | list
lower           W | lower
map             L | map('string') | list
map             L | map(attribute='real') | list
map             L | map('batch', 100000, 1) | map('list') | list
map             L | map('step of', -1000000) | list
map             L | map('round', 100000) | list
max             L | max(attribute='real')
max             [ns.x, ns.y] | max
min             L | min(attribute='real')
min             [ns.x, ns.y] | min
reject          L | reject('divisibleby', 3) | list
rejectattr      L | rejectattr('real.real.real.real') | list
replace         T | replace('a', 'b' * 100000)
replace         T | replace(old='a', new='b' * 100000)
replace         A | replace('', A)
reverse         L | reverse | list
round           5 | round(100000, 'ceil')
round           5 | round(-100000)
safe            ns.x | safe
select          L | select('odd') | list
select          L | select | select | select | select | select | list
select          L | select('in', L) | list
selectattr      L | selectattr('real', 'in', L) | list
slice           L | slice(100000) | list
sort            L | sort(attribute='real')
sort            L | sort(attribute='real.real.real,real,real')
sort            L | sort(attribute=',' * 10000)
sort            [ns.x, ns.y] | sort
sort            (L | map('string') | list) | sort
string          ns.x | string
string          ns | string
title           B | title
tojson          ns.x | tojson
tojson          L | tojson(indent=100000)
tojson          L | tojson(separators=(A, A))
tojson          ('\x01' * 3000000) | tojson
trim            A | trim(W)
trim            A | trim('b' * 500000 ~ 'a')
truncate        B | truncate(100000)
unique          C | unique | list
unique          [ns.t] | unique | list
upper           W | upper
urlencode       B | urlencode
urlencode       ns.x | urlencode
wordcount       T | wordcount
"""
TESTS = """
!=              ns.x is ne(ns.y)
<               ns.x is lt(ns.y)
<=              ns.x is le(ns.y)
==              ns.x is eq(ns.y)
>               ns.x is gt(ns.y)
>=              ns.x is ge(ns.y)
boolean         ns.x is boolean
callable        ns.x is callable
defined         ns.x is defined
divisibleby     '%999999999d' is divisibleby(3)
divisibleby     '%999999999d' is divisibleby([3])
eq              L is eq(L[:])
equalto         ns.x is equalto(ns.y)
escaped         ns.x is escaped
even            '%999999999d' is even
false           ns.x is false
filter          ns.t is filter
float           ns.x is float
ge              ns.x is ge(ns.y)
greaterthan     ns.x is greaterthan(ns.y)
gt              ns.x is gt(ns.y)
in              ns.x is in([ns.y])
in              L is in([L[:], L[:], L[:]])
integer         ns.x is integer
iterable        ns.x is iterable
le              ns.x is le(ns.y)
lessthan        ns.x is lessthan(ns.y)
lower           ns.x is lower
lt              ns.x is lt(ns.y)
mapping         ns.x is mapping
ne              ns.x is ne(ns.y)
none            ns.x is none
number          ns.x is number
odd             '%999999999d' is odd
sameas          ns.x is sameas(ns.y)
sequence        ns.x is sequence
string          ns.x is string
test            ns.t is test
true            ns.x is true
undefined       ns.x is undefined
upper           ns.x is upper
"""
METHODS = """
bit_length      (2 ** 64).bit_length()
capitalize      W.capitalize()
casefold        W.casefold()
center          A.center(100000)
conjugate       (5).conjugate()
copy            L.copy()
copy            {'a': L}.copy()
count           [ns.x].count(ns.y)
count           A.count('a' * 5000 ~ 'b' ~ 'a' * 5000)
denominator     L | map(attribute='denominator') | list
endswith        A.endswith((A,) * 100000)
expandtabs      T.expandtabs(100000)
find            A.find('a' * 5000 ~ 'b' ~ 'a' * 5000)
format          ('{0}' * 10000).format(A)
format          '{:{}}'.format('a', '999999999')
format          ('{:>99999}' * 10000).format(*L)
format          '{0!r}'.format(ns.x)
format_map      ('{a}' * 10000).format_map({'a': A})
get             {}.get(ns.t)
grouper         (L | groupby('real'))[0].grouper
imag            L | groupby('imag')
index           [ns.x].index(ns.y)
index           A.index('a' * 5000 ~ 'b' ~ 'a' * 5000)
is_integer      (5.5).is_integer()
isalnum         A.isalnum()
isalpha         A.isalpha()
isascii         A.isascii()
isdecimal       W.isdecimal()
isdigit         W.isdigit()
isidentifier    A.isidentifier()
islower         W.islower()
isnumeric       W.isnumeric()
isprintable     A.isprintable()
isspace         N.isspace()
istitle         W.istitle()
isupper         W.isupper()
items           {'a': 1}.items() - L
join            A.join(L | map('string'))
join            ''.join([A] * 100000)
keys            {'a': 1}.keys() - C
list            (L | groupby('real'))[0].list
ljust           'a'.ljust(100000)
lower           W.lower()
lstrip          A.lstrip('b' * 500000 ~ 'a')
numerator       L | sort(attribute='numerator')
partition       A.partition('a' * 5000 ~ 'b' ~ 'a' * 5000)
real            L | groupby('real')
removeprefix    A.removeprefix(A)
removesuffix    A.removesuffix(A)
replace         T.replace('a', 'b' * 100000)
replace         A.replace('', A)
rfind           A.rfind('a' * 5000 ~ 'b' ~ 'a' * 5000)
rindex          A.rindex('a' * 5000 ~ 'b' ~ 'a' * 5000)
rjust           'a'.rjust(100000)
rpartition      A.rpartition('a' * 5000 ~ 'b' ~ 'a' * 5000)
rsplit          A.rsplit('a' * 5000 ~ 'b' ~ 'a' * 5000)
rsplit          A.rsplit('a', -5)
rstrip          A.rstrip('b' * 500000 ~ 'a')
split           A.split('a')
split           T.split()
splitlines      N.splitlines()
start           range(5).start
startswith      A.startswith((A,) * 100000)
step            range(5).step
stop            range(5).stop
strip           A.strip('b' * 500000 ~ 'a')
swapcase        W.swapcase()
title           W.title()
upper           W.upper()
values          {'a': ns.x}.values() | list | string
zfill           'a'.zfill(100000)
"""
OTHERS = """
+               L + L
+               A + B
-               {'a': 1}.keys() - C
*               L * 5
*               [L] * 100000
*               A * 1000
%               ('%99999d' * 10000) % (1,)
%               ('%(a)s' * 10000) % {'a': A}
%               '%s' % ns.x
**              10 ** 10 ** 8
**              (2 ** 64) ** 64
//              (2 ** 64 * 2 ** 64 * 2 ** 64) // 3
~               B ~ B
~               ns.x ~ ''
[:]             [L[:], L[:], L[:], L[:], L[:], L[:], L[:], L[:]] * 10000
[:]             L[::-1]
[]              {}[ns.t]
{}              {ns.t: 1}
==              ns.x == ns.y
<               ns.x < ns.y
in              ns.x in [ns.y]
in              ns.t in {}
in              L in [L[:], L[:]]
in              'b' in B
calls           dict(C | batch(2))
calls           dict.fromkeys(C)
calls           dict.update({}, {'a': 1})
calls           raise_exception(ns.x)
calls           strftime_now('%99999Y' * 10000)
calls           cycler(*L).next()
calls           namespace(**{'a': L}) | string
calls           (5).to_bytes(100000, 'big')
calls           T.encode('punycode')
calls           T.translate({97: 'b' * 1000})
calls           (A | safe).unescape()
calls           (A | safe) + ('&' * 5000000)
"""
ROWS = [
    tuple(line.split(maxsplit=1))
    for table in (FILTERS, TESTS, METHODS, OTHERS)
    for line in table.strip().splitlines()
]


def cpu_seconds(source: str) -> float:
    """Return the CPU time of a rendering, which may end with an error, but not for memory."""
    template = ChatTemplate(source)
    before = time.thread_time()
    with suppress(TemplateError, ValueError, TypeError, OverflowError, AttributeError):
        template.render(INPUT, SECONDS)
    return time.thread_time() - before


@pytest.mark.parametrize(("name", "attack"), ROWS)
def test_no_step_of_a_template_takes_long(name: str, attack: str) -> None:
    loop = "{% for i in range(99999) %}{% set q = " + attack + " %}{% endfor %}"
    for values in (NAMES + WIDE, NAMES + DEEP) if "ns" in attack else (LISTS,):
        assert cpu_seconds(values + loop) < SECONDS + STEP


def test_all_filters_tests_and_methods_are_attacked() -> None:
    def names(table: str) -> set[str]:
        return {line.split()[0] for line in table.strip().splitlines()}

    sandbox = Sandbox(100)
    assert names(FILTERS) == {name for name in sandbox.filters if not name.endswith(" of")}
    assert names(TESTS) == set(sandbox.tests)
    assert names(METHODS) == {name for _, own in ATTRIBUTES for name in own}


STOPPED = [
    "{% set l=range(100000)|list %}{% set L=l*5 %}{{ (L|groupby('real'))|length }}",
    "{% set l=range(100000)|list %}{% for i in range(1000) %}{{ (l|groupby('real'))|length }}"
    "{% endfor %}",
    "{% set l=range(100000)|list %}{{ (l*10)|sort(attribute='real')|length }}",
    "{% set l=range(100000)|list %}{{ (l*10)|max(attribute='real') }}",
    "{% set l=range(100000)|list %}{{ (l*10)|select('odd')|list|length }}",
    # Loops that call themselves went round the budget.
    "{% for a in [1] recursive %}" + "x" * 60000 + "{% if a == 1 %}{{ loop(range(2, 99999)) }}"
    "{% endif %}{% endfor %}",
    "{% for i in range(99999) %}{{ [-99999]|map('step of')|list }}{{ 'x' * 100000 }}{% endfor %}",
    "{% set ns=namespace(x=['a']) %}{% for i in range(40) %}{% set ns.x=[ns.x, ns.x] %}{% endfor %}"
    "{{ ns.x == [[ns.x[0], 1], ns.x] }}{{ loop }}{{ ns }}",
]


@pytest.mark.parametrize("source", STOPPED)
def test_filters_of_long_lists_end_within_their_second(source: str) -> None:
    before = time.thread_time()
    with pytest.raises(TemplateTooLong, match="the chat template was stopped"):
        ChatTemplate(source).render({"messages": []})
    assert time.thread_time() - before < 1.5


def test_a_list_has_a_bound() -> None:
    def render(source: str) -> str:
        return ChatTemplate(source).render({})

    assert render("{{ range(100000) | list | length }}") == "100000"
    assert render("{{ (range(50000) | list * 2) | length }}") == "100000"
    for source in (
        "{{ ('a' * 100001) | list }}",
        "{{ (range(50001) | list) * 2 }}",
        "{{ (range(50001) | list) + (range(50001) | list) }}",
        "{{ ('a ' * 100001).split() }}",
        "{{ ('a ' * 100001).rsplit(' ', -1) }}",
        "{{ ('\n' * 100001).splitlines() }}",
        "{{ ('a' * 100001) | map('upper') | list }}",
    ):
        with pytest.raises(TemplateTooLong, match="a list of more than 100000 elements"):
            render(source)


def test_values_are_as_jinja_makes_them() -> None:
    source = (
        "{{ 'a b c'.split(none, 1) }}{{ 'a b c'.rsplit(' ', 1) }}{{ 'a-b'.split(sep='-') }}"
        "{{ 'a\nb'.splitlines() }}{{ [3, 1, 2] | sort(reverse=true) }}{{ [1, 2, 3][1:] }}"
        "{{ 'abc'[::-1] }}{{ (1, 2)[:1] }}{{ 1 < 2 < 3 }}{{ 1 in [1] }}{{ 'a' not in {'b': 1} }}"
        "{{ [1, 2, 3, 4] | batch(2) | list }}{{ [1, 2] | map('string') | join('-') }}"
        "{{ dict(a=1) }}{{ dict([('b', 2)]) }}{{ {'a': 1}.items() | list }}{{ 7 // 2 }}{{ 7 % 4 }}"
        "{% for a in [1, [2, [3]]] recursive %}{{ loop(a) if a is iterable else a }}{% endfor %}"
        "{% for a in [1, 2, 3] if a is odd %}{{ loop.length }}{% endfor %}"
        "{{ '%s-%d' % ('a', 5) }}{{ '{}:{a}'.format(1, a=2) }}{{ 'x' ~ 1 ~ none }}"
        "{% for i in [1] %}{{ '{}{}'.format(i, i) }}{% endfor %}"
        "{{ {'b': [1, {'c': 2}]} | tojson(indent=2) }}{{ [1, 2] | tojson(separators=(',', ':')) }}"
        "{{ ([{'a': 1}, {'a': 2}] | groupby('a'))[1].list }}{{ [1, 2] | select('gt', 1) | first }}"
    )
    assert ChatTemplate(source).render({}) == (
        "['a', 'b c']['a b', 'c']['a', 'b']['a', 'b'][3, 2, 1][2, 3]cba(1,)TrueTrueTrue"
        "[[1, 2], [3, 4]]1-2{'a': 1}{'b': 2}[('a', 1)]3312322a-51:2x1None11"
        '{\n  "b": [\n    1,\n    {\n      "c": 2\n    }\n  ]\n}[1,2]'
        "[{'a': 2}]2"
    )


# Templates of 65,536 characters that took longest to compile.
LARGE = {
    "sets": lambda n: "{% set a=1 %}" * n,
    "names": lambda n: "".join(f"{{{{v{i}}}}}" for i in range(n)),
    "branches": lambda n: "".join(f"{{%if a%}}{{%set v{i}=1%}}{{%endif%}}" for i in range(n)),
    "elifs": lambda n: "{%if a%}" + "".join(f"{{%elif v{i}%}}" for i in range(n)) + "{%endif%}",
    "attributes": lambda n: ("{{a" + ".a" * 80 + "}}") * n,
    "sums": lambda n: ("{{" + "a+" * 80 + "a}}") * n,
    "macros": lambda n: "".join(f"{{%macro m{i}()%}}{{{{a}}}}{{%endmacro%}}" for i in range(n)),
    "blocks": lambda n: (
        "{%for a in b%}"
        + "".join(f"{{%set v{i}=1%}}{{%block b{i} scoped%}}{{%endblock%}}" for i in range(n))
        + "{%endfor%}"
    ),
    "includes": lambda n: "".join(f"{{%set v{i}=1%}}{{%include a%}}" for i in range(n)),
    "imports": lambda n: "{%from a import " + ",".join(f"v{i}" for i in range(n)) + "%}",
    "constants": lambda n: "{{[" + "1," * n + "a]}}",
    "folded": lambda n: "{{['a'|batch(99999, 'a')|list]}}" * n,
}


@pytest.mark.parametrize("name", LARGE)
def test_compiling_a_template_takes_half_a_second(name: str) -> None:
    made = LARGE[name]
    sizes = [
        size for size in (100, 300, 600, 900, 1200, 2000, 2900, 20000) if len(made(size)) < 1 << 16
    ]
    for size in sizes:
        before = time.thread_time()
        with suppress(ValueError):
            ChatTemplate(made(size), max_nodes=3000)
        assert time.thread_time() - before < 0.5


def test_a_number_in_a_template_has_a_bound() -> None:
    with pytest.raises(ValueError, match="a number of more than 1024 bits"):
        ChatTemplate("{{ 0x" + "f" * 60000 + " // 3 }}")
