"""Names in a config that stand for Python: `module:function`, `path/to/file.py:function`, `name(key=value)`; and the
name that a source is given, `name=source`."""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import re
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

from jaxrl_llm.errors import UserError, nearest


def split_call(text: str) -> tuple[str, dict[str, Any]]:
    """The name and the keyword arguments of `name` or `name(key=literal, …)`.

    Raises:
      UserError: the arguments are not keywords with literal values.

    >>> split_call("jaxrl_llm.tasks:addition(digits=2, split='test')")
    ('jaxrl_llm.tasks:addition', {'digits': 2, 'split': 'test'})
    >>> split_call("number")
    ('number', {})
    """
    name, bracket, rest = text.strip().partition("(")
    if not bracket:
        return name, {}
    try:
        with warnings.catch_warnings():  # an escape that Python does not know, as in a pattern, stays what it is
            warnings.simplefilter("ignore")
            call = ast.parse(f"f({rest}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            raise ValueError("only key=value may stand in the brackets")
        kwargs = {}
        for keyword in call.keywords:
            if keyword.arg is None:
                raise ValueError("** is not possible here")
            kwargs[keyword.arg] = ast.literal_eval(keyword.value)
    except (SyntaxError, ValueError) as error:
        raise UserError(f"{text!r}: expected name(key=value, …) with plain values: {error}") from error
    return name.strip(), kwargs


def split_name(text: str) -> tuple[str, str]:
    """The name and the source of `name=source`; ("", text) where no name is given.

    What is the path of something that exists is never taken apart, nor what has a "/", ":" or "(" before its first "=".

    Raises:
      UserError: the name has characters that no name of a metric has, or there is no source behind it.

    >>> split_name("sums=jaxrl_llm.tasks:addition(split='test')")
    ('sums', "jaxrl_llm.tasks:addition(split='test')")
    >>> split_name("jaxrl_llm.tasks:addition(split='test')")
    ('', "jaxrl_llm.tasks:addition(split='test')")
    """
    name, equals, source = text.partition("=")
    if not equals or set(name) & set(":/\\(~") or Path(text).exists():
        return "", text
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", name):
        better = re.sub(r"[^A-Za-z0-9_.-]+", "_", name).strip("_.-")
        hint = f"did you mean {better!r}?" if better else f"expected a name as in test={source}"
        raise UserError(f"{text!r}: {name!r} is no name of a set (letters, digits, _, . and -); {hint}")
    if not source.strip():
        raise UserError(f"{text!r}: no source behind the name; expected {name}=SOURCE")
    return name, source


def load(name: str) -> Any:
    """What `module:attribute`, `module.attribute` or `file.py:attribute` names.

    Raises:
      UserError: no such file, module or attribute (naming the nearest one), or a module that fails when imported.
    """
    module_name, separator, attribute = name.rpartition(":" if ":" in name else ".")
    if not separator or not module_name or not attribute:
        raise UserError(f"{name!r}: expected module:function, or path/to/file.py:function")
    module = _import_file(Path(module_name)) if module_name.endswith(".py") else _import_module(module_name, name)
    if not hasattr(module, attribute):
        public = [key for key in vars(module) if not key.startswith("_")]
        raise UserError(f"{name!r}: no {attribute!r} in {module_name}; {nearest(attribute, public)}")
    return getattr(module, attribute)


def _import_module(module_name: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise UserError(f"{name!r}: there is no module {error.name!r}") from error
        raise UserError(f"{name!r}: importing {module_name} failed: {error}") from error
    except Exception as error:
        raise UserError(f"{name!r}: importing {module_name} failed: {type(error).__name__}: {error}") from error


def _import_file(path: Path) -> ModuleType:
    path = path.expanduser().resolve()
    if not path.is_file():
        raise UserError(f"there is no file {str(path)!r}")
    # The same file is imported once; two files of one name stay apart.
    name = f"{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise UserError(f"importing {str(path)!r} failed: {type(error).__name__}: {error}") from error
    return module
