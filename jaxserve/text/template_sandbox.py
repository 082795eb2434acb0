"""Sandbox: Jinja as Transformers configures it, with a budget for all work of a chat template.

Loops, literals, comparisons and slices are rewritten to call filters, which charge for them. All
other operations of a template take bounded time.
"""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AnySet
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import nodes, pass_context
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension
from jinja2.runtime import BlockReference, Context, LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from jaxserve.text import template_costs
from jaxserve.text.template_budget import Budget, Paid

# Literals with more elements are charged.
_SMALL = 16
_MAX_PAIRS = 4096
_MAX_MESSAGE = _MAX_TIME_FORMAT = 1000
_NUMBER_BITS = 1024
# Maximum source tokens per node.
_TOKENS_OF_NODE = 4
# Nodes charged for a scoped block, whose code copies all variables.
_SCOPED = 100
_AROUND = ("_loop_vars", "_block_vars")
_OTHERS = (nodes.Extends, nodes.FromImport, nodes.Import, nodes.Include)


class _Metered(NodeTransformer):
    """Transformer of a template's syntax tree that routes expensive operations through filters.

    The filters charge the template's budget. Their names contain a space, so templates cannot use
    them.
    """

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        text = sum(len(part.data) for part in node.find_all(nodes.TemplateData))
        node.iter = _through("each of", node.iter)
        if text:
            node.body.insert(0, nodes.ExprStmt(_through("step of", nodes.Const(text))))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:
        self.generic_visit(node)
        return _through("text of", nodes.List(node.nodes), node.lineno)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Compare:
        self.generic_visit(node)
        node.expr = _read(node.expr)
        for operand in node.ops:
            if operand.op in ("in", "notin"):
                operand.expr = _through("search of", operand.expr)
            else:
                operand.expr = _read(operand.expr)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Slice):
            return node
        ends = [node.arg.start, node.arg.stop, node.arg.step]
        bounds = [nodes.Const(None) if end is None else end for end in ends]
        return _through("slice of", node.node, node.lineno, bounds)

    def visit_List(self, node: nodes.List) -> nodes.Expr:
        self.generic_visit(node)
        return _through("list of", node) if len(node.items) > _SMALL else node

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Expr:
        self.generic_visit(node)
        is_long = node.ctx == "load" and len(node.items) > _SMALL
        return _through("list of", node) if is_long else node

    def visit_Dict(self, node: nodes.Dict) -> nodes.Expr:
        self.generic_visit(node)
        return _through("list of", node) if len(node.items) > _SMALL else node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Pair:
        self.generic_visit(node)
        node.key = _read(node.key)
        return node

    def visit_Const(self, node: nodes.Const) -> nodes.Const:
        if isinstance(node.value, int) and node.value.bit_length() > _NUMBER_BITS:
            raise ValueError(f"it holds a number of more than {_NUMBER_BITS} bits")
        return node


def _through(
    name: str, node: Any, line: int | None = None, arguments: list[nodes.Expr] | None = None
) -> nodes.Filter:
    filter_node = nodes.Filter(node, name, arguments or [], [], None, None)
    filter_node.set_lineno(node.lineno or line or 1)
    return filter_node


def _read(node: nodes.Expr) -> nodes.Expr:
    return node if isinstance(node, nodes.Const) else _through("value of", node)


class _Generation(Extension):
    """Jinja extension for the tag `{% generation %}`, which marks an assistant's text for training.

    The tag has no effect on the rendered text.
    """

    tags = {"generation"}  # noqa: RUF012, as Jinja declares it

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def filter_stream(self, stream: Any) -> Any:
        """Yield the tokens of a template's source unchanged.

        Raises:
            ValueError: there are more tokens than the sandbox allows.
        """
        for count, token in enumerate(stream):
            if count > _TOKENS_OF_NODE * self.environment.max_nodes:  # type: ignore[attr-defined]
                raise ValueError(_too_large(self.environment))
            yield token


def _too_large(sandbox: Any) -> str:
    return f"it is too large: it may hold {sandbox.max_nodes} expressions and statements"


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja environment as Transformers configures it for chat templates, with a budget per
    rendering.

    Every operation that can repeat or grow charges the budget of the rendering in its thread.

    Args:
        max_nodes: maximum nodes in a template's syntax tree. Compiling takes up to 0.1 ms per node.
    """

    intercepted_binops = frozenset(["*", "**", "+", "%", "-", "/", "//"])

    def __init__(self, max_nodes: int) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, "jinja2.ext.loopcontrols"],
            finalize=self._value,
            # Constants would be folded without a budget, in quadratic time.
            optimized=False,
        )
        self.max_nodes = max_nodes
        self._now = threading.local()
        self.globals.pop("lipsum")
        self.globals |= {"raise_exception": _refuse, "strftime_now": _strftime_now}
        self.globals |= {"namespace": _Namespace, "dict": self._dict}
        for name in template_costs.NO_FILTERS:
            del self.filters[name]
        self.filters["tojson"] = self._to_json
        self.filters = {name: self._paid(name, run) for name, run in self.filters.items()}
        self.tests = {name: self._paid_test(name, run) for name, run in self.tests.items()}
        metered = {"each": self._each, "step": self._step, "text": self._text, "value": self._value}
        metered |= {"search": self._search, "slice": self._slice, "list": self._list}
        self.filters |= {f"{name} of": run for name, run in metered.items()}

    @property
    def budget(self) -> Budget:
        """Budget for the rendering in the current thread."""
        return self._now.budget

    @budget.setter
    def budget(self, budget: Budget | None) -> None:
        """Set the budget for the rendering in the current thread, None after the rendering."""
        self._now.budget = budget

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        parsed = super()._parse(source, name, filename)
        count = 0
        for node in parsed.find_all(nodes.Node):
            if isinstance(node, _OTHERS):
                raise ValueError("it reads other templates, of which there are none")
            count += _SCOPED if isinstance(node, nodes.Block) and node.scoped else 1
            if count > self.max_nodes:
                raise ValueError(_too_large(self))
        return _Metered().visit(parsed)

    @pass_context
    def _each(self, _: Context, values: Any) -> Iterator[Any]:
        return Paid(values, self.budget)

    @pass_context
    def _step(self, _: Context, text: Any) -> None:
        self.budget.spend(max(0, int(text)))

    @pass_context
    def _text(self, _: Context, parts: Any) -> str:
        self.budget.read(parts)
        return "".join(map(str, parts))

    @pass_context
    def _value(self, _: Context, value: Any) -> Any:
        self.budget.read(value)
        return value

    @pass_context
    def _search(self, _: Context, values: Any) -> Any:
        template_costs.pay_for_search(self.budget, values)
        return values

    @pass_context
    def _slice(self, _: Context, value: Any, *ends: Any) -> Any:
        part = slice(*ends)
        if isinstance(value, str):
            self.budget.spend(len(value))
        elif isinstance(value, list | tuple):
            self.budget.items(len(range(*part.indices(len(value)))))
        return value[part]

    @pass_context
    def _list(self, _: Context, values: Any) -> Any:
        self.budget.items(len(values))
        return values

    def _dict(self, *pairs: Any, **more: Any) -> dict[Any, Any]:
        # The number of pairs is limited, since keys may be chosen to collide.
        if pairs and not isinstance(pairs[0], Mapping):
            listed = self.budget.listed(pairs[0])
            if len(listed) > _MAX_PAIRS:
                raise SecurityError(f"dict takes at most {_MAX_PAIRS} pairs")
            pairs = (listed, *pairs[1:])
        return dict(*pairs, **more)

    def _paid(self, name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        passed = getattr(getattr(run, "jinja_pass_arg", None), "name", None)

        @pass_context
        @functools.wraps(run)
        def paid(context: Context, *data: Any, **more: Any) -> Any:
            budget = self.budget
            data = template_costs.pay_for_filter(budget, name, data, more)
            passable = {"context": context, "environment": self, "eval_context": context.eval_ctx}
            result = run(passable[passed], *data, **more) if passed else run(*data, **more)
            result = budget.settle(result)
            budget.check()
            return result

        return paid

    def _paid_test(self, name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        takes_environment = hasattr(run, "jinja_pass_arg")

        @pass_context
        @functools.wraps(run)
        def paid(_: Context, *data: Any) -> Any:
            template_costs.pay_for_test(self.budget, name, data)
            return run(self, *data) if takes_environment else run(*data)

        return paid

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Return the element of an object that a template reads as `obj[argument]`.

        The budget is charged one step, or the reading of an argument that is neither text nor
        integer.
        """
        if isinstance(argument, str | int):
            self.budget.spend()
        else:
            self.budget.read(argument)
        return super().getitem(obj, argument)

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Return the attribute of an object that a template reads as `obj.attribute`, and charge
        one step.
        """
        self.budget.spend()
        return super().getattr(obj, attribute)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Return whether templates may read the attribute `attr` of an object, whose value is
        `value`.

        Attributes of strings, numbers and containers must be listed in `ATTRIBUTES`. Attributes of
        classes, sets and iterators are refused.
        """
        for kinds, names in template_costs.ATTRIBUTES:
            if isinstance(obj, kinds):
                return attr in names
        # Methods of classes may modify arguments. Iterators and views give access to other objects.
        if isinstance(obj, type | AnySet):
            return False
        if hasattr(obj, "__next__") and not isinstance(obj, LoopContext):
            return False
        return super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Return the result of a binary operator in a template, after charging the budget.

        Raises:
            TemplateTooLong: the cost exceeds the budget.
            jinja2.SecurityError: an exponent or a format is too large, or an operand is a set.
        """
        budget = self.budget
        if operator == "**":
            if not all(isinstance(n, int | float) and abs(n) <= 64 for n in (left, right)):
                raise SecurityError("numbers to a power are 64 at most")
        elif operator == "*":
            for part, times in ((left, right), (right, left)):
                if isinstance(times, int) and isinstance(part, str):
                    budget.spend(len(part) * max(0, times))
                elif isinstance(times, int) and isinstance(part, list | tuple):
                    budget.items(len(part) * max(0, times))
        elif operator == "%" and isinstance(left, str):
            template_costs.pay_for_format(budget, left, right)
        elif operator == "+" and isinstance(left, list | tuple) and isinstance(right, list | tuple):
            budget.items(len(left) + len(right))
        elif operator == "+" and isinstance(left, str) and isinstance(right, str):
            budget.spend(len(left) + len(right))
        elif isinstance(left, AnySet) or isinstance(right, AnySet):
            raise SecurityError(f"{operator} takes no keys or items of a mapping")
        return budget.settle(super().call_binop(context, operator, left, right))

    # Parameter names that do not collide with keywords of the called function.
    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the result of a function or method that a template calls, after charging the
        budget.

        Raises:
            TemplateTooLong: the cost exceeds the budget.
            jinja2.SecurityError: an argument is too large, or the template may not make the call.
        """
        budget = __self.budget
        # Jinja passes variables of the surrounding loop or block along with calls.
        around = {name: kwargs.pop(name) for name in _AROUND if name in kwargs}
        budget.items(len(args) + len(kwargs))
        # Jinja wraps `str.format` in its own function.
        method = getattr(__obj, "__wrapped__", __obj)
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str):
            args, kwargs = template_costs.pay_for_method(
                budget, method.__name__, owner, args, kwargs
            )
        elif isinstance(__obj, LoopContext):
            args = (*(Paid(values, budget) for values in args[:1]), *args[1:])
        elif isinstance(owner, list | tuple | range) and args:
            budget.read([owner, args])
        elif isinstance(owner, dict) and not args:
            budget.items(len(owner))
        elif not isinstance(__obj, Macro | BlockReference) and __obj is not _Namespace:
            budget.read([args, kwargs])
            if __obj is _strftime_now:
                template_costs.check_numbers(args, kwargs)
        return budget.settle(super().call(__context, __obj, *args, **kwargs, **around))

    def _to_json(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: Any = None,
        sort_keys: bool = False,
    ) -> str:
        """Return a value as JSON text, as Transformers' filter `tojson` writes it: without HTML
        escapes.

        Raises:
            jinja2.TemplateError: the value is undefined.
        """
        if isinstance(value, Undefined):
            raise TemplateError("tojson of something undefined")
        encoder = json.JSONEncoder(
            ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )
        if indent is None and separators is None:
            return encoder.encode(value)
        # Both may be long, and are repeated between all values.
        return "".join(Paid(_spent(encoder.iterencode(value), self.budget), self.budget))


def _spent(parts: Iterator[str], budget: Budget) -> Iterator[str]:
    for part in parts:
        budget.spend(len(part))
        yield part


class _Namespace(Namespace):
    """Jinja's namespace object, which refuses names that begin with an underscore.

    Such names give access to Python internals.
    """

    def __init__(*args: Any, **kwargs: Any) -> None:  # `self` may be a name
        for name in dict(*args[1:], **kwargs):
            _check_name(name)
        Namespace.__init__(*args, **kwargs)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<Namespace>"  # its values may be large


def _check_name(name: Any) -> None:
    if str(name).startswith("_"):
        raise SecurityError(f"{name!r} may not be set")


def _refuse(message: Any) -> NoReturn:
    raise TemplateError(str(message)[:_MAX_MESSAGE])


def _strftime_now(form: str) -> str:
    if len(form) > _MAX_TIME_FORMAT:
        raise SecurityError(f"a format of the time has {_MAX_TIME_FORMAT} characters at most")
    template_costs.check_widths(form)
    return datetime.now().strftime(form)
