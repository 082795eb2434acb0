"""Checks of shapes and dtypes against the signatures, in every call: `pytest --check-shapes`."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import sys
import typing
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType, ModuleType
from typing import Any
from unittest.mock import patch

import jax
from beartype import beartype
from jaxtyping import install_import_hook

PACKAGES = ("jaxserve.models", "jaxserve.execution")
CHECKER = f"{__name__}.checked"


def check_shapes() -> None:
    """Import the packages with every function checked.

    Their modules import the names of shapes `if TYPE_CHECKING`, so that jaxserve runs without
    jaxtyping. Here that is true while they are imported, and for them alone: a first import, which
    is thrown away, has brought in all that they import themselves.
    """
    import_modules()
    for name in list(sys.modules):
        # Execution imports weights, and weights import models.
        if name.startswith((*PACKAGES, "jaxserve.weights")):
            del sys.modules[name]
    hook = install_import_hook(list(PACKAGES), CHECKER)
    with hook, patch.object(typing, "TYPE_CHECKING", True):
        modules = import_modules()
    for function in functions(modules):
        typing.get_type_hints(function)  # beartype ignores annotations that it cannot resolve


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """Check the calls of a function, except for a dataclass made of other values than arrays.

    JAX makes trees of shapes, shardings and bare objects by the same constructors.
    """
    check = beartype(function)
    if function.__name__ != "__init__":
        return check

    def init(self: Any, *args: Any, **fields: Any) -> Any:
        stands_in = any(map(stands_for_array, (*args, *fields.values())))
        return None if stands_in else check(self, *args, **fields)

    return init


def stands_for_array(value: Any) -> bool:
    is_jax = type(value).__module__.startswith("jax") and not isinstance(value, jax.Array)
    return is_jax or type(value) is object


def import_modules() -> list[ModuleType]:
    packages = [importlib.import_module(name) for name in PACKAGES]
    return [
        importlib.import_module(module.name)
        for package in packages
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    ]


def functions(modules: Iterable[ModuleType]) -> Iterator[FunctionType]:
    """Yield the functions of modules and of their classes, with the annotations as written."""
    for module in modules:
        for value in vars(module).values():
            members = vars(value).values() if isinstance(value, type) else [value]
            for member in members:
                function = inspect.unwrap(getattr(member, "__func__", member))
                if isinstance(function, FunctionType) and function.__module__ == module.__name__:
                    yield function
