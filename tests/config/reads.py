"""Which fields of which models the code reads, by its annotations: a small inference of types over the syntax trees.

It knows what a reader of the code knows without running it: annotated parameters, attributes and results, what is
assigned to a name in the same function, and fields of models. What it cannot tell it leaves out, so a field may look
unread that is read; never the other way round by an equal name in another model.
"""

from __future__ import annotations

import ast
import builtins
import typing
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel

Function = ast.FunctionDef | ast.AsyncFunctionDef
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
Read = tuple[type[BaseModel], str]
_SAME = {"model_copy", "merged"}  # methods whose result is of the object's own type
_WRAPPERS = {"Sequence", "list", "tuple", "Mapping", "dict", "Iterable", "Iterator", "Generator", "type", "Callable"}
_VALIDATORS = {"model_validator", "field_validator"}


class Reads:
    """All reads of fields in a folder of sources.

    Args:
        models: whose fields count.

    Attributes:
        found: files by (model, field), relative to the folder.
    """

    def __init__(self, folder: Path, models: typing.Iterable[type[BaseModel]]) -> None:
        self.models = {model.__name__: model for model in models}
        self.found: dict[Read, set[str]] = {}
        self._attributes: dict[str, dict[str, str]] = {}
        self._results: dict[str, str] = {}
        self._bases: dict[str, list[str]] = {}
        trees = {
            path.relative_to(folder).as_posix(): ast.parse(path.read_text("utf-8")) for path in folder.rglob("*.py")
        }
        # Twice: an attribute may be made from another class's, which is read later.
        for _ in range(2):
            for tree in trees.values():
                self._learn(tree)
        for name, tree in trees.items():
            for function, owner in _functions(tree):
                for read in self._walk(function, owner):
                    self.found.setdefault(read, set()).add(name)

    def _learn(self, tree: ast.Module) -> None:
        for node in ast.walk(tree):
            if isinstance(node, FUNCTIONS) and node.returns is not None:
                kind = self._named(node.returns)
                if kind in self.models or kind in self._attributes:
                    self._results.setdefault(node.name, kind)
            if not isinstance(node, ast.ClassDef):
                continue
            self._bases[node.name] = [base.id for base in node.bases if isinstance(base, ast.Name)]
            own = self._attributes.setdefault(node.name, {})
            for item in node.body:
                if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                    own[item.target.id] = self._named(item.annotation)
                if isinstance(item, FUNCTIONS):
                    if item.returns is not None and _decorated(item, {"property"}):
                        own[item.name] = self._named(item.returns)
                    scope = self._scope(item, node.name)
                    for statement in ast.walk(item):
                        for target, value in _assigned(statement):
                            if isinstance(target, ast.Attribute) and _is_self(target.value):
                                kind = self._kind(value, scope)
                                if isinstance(statement, ast.AnnAssign):
                                    kind = self._named(statement.annotation) or kind
                                own[target.attr] = kind or own.get(target.attr, "")

    def _scope(self, function: Function, owner: str) -> dict[str, str]:
        inner = [node.args for node in ast.walk(function) if isinstance(node, FUNCTIONS)]
        scope = {
            argument.arg: self._named(argument.annotation)
            for given in reversed(inner)  # the function's own arguments win
            for argument in [*given.posonlyargs, *given.args, *given.kwonlyargs]
            if argument.annotation is not None
        }
        scope["self"] = scope["cls"] = owner
        for statement in ast.walk(function):
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                scope[statement.target.id] = self._named(statement.annotation)
                continue
            for target, value in _assigned(statement):
                if isinstance(target, ast.Name):
                    scope[target.id] = self._kind(value, scope) or scope.get(target.id, "")
            for loop in [statement] if isinstance(statement, ast.For | ast.comprehension) else []:
                target, over = loop.target, loop.iter
                if isinstance(target, ast.Tuple) and isinstance(over, ast.Call) and _is_enumerate(over.func):
                    target, over = target.elts[-1], over.args[0]
                if isinstance(target, ast.Name):
                    scope[target.id] = self._kind(over, scope)
        return scope

    def _walk(self, function: Function, owner: str) -> Iterator[Read]:
        if _decorated(function, _VALIDATORS):
            return  # what is only checked has no effect
        scope = self._scope(function, owner)
        for node in ast.walk(function):
            name, value = "", None
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                name, value = node.attr, node.value
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr":
                value = node.args[0]
                name = str(node.args[1].value) if isinstance(node.args[1], ast.Constant) else ""
            if value is not None:
                model = self.models.get(self._kind(value, scope))
                if model is not None:
                    # A name that is only known when it runs may be any of them.
                    yield from ((model, field) for field in model.model_fields if name in ("", field))

    def _named(self, annotation: ast.expr | None) -> str:
        """Name of the class that an annotation speaks of, of a sequence's items where it is one."""
        if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
            annotation = ast.parse(annotation.value, mode="eval").body
        if isinstance(annotation, ast.Name):
            return annotation.id if annotation.id not in vars(builtins) else ""
        if isinstance(annotation, ast.BinOp):
            return self._named(annotation.left) or self._named(annotation.right)
        if isinstance(annotation, ast.Attribute):
            return annotation.attr
        if isinstance(annotation, ast.Subscript):
            inner = annotation.slice
            parts = inner.elts if isinstance(inner, ast.Tuple) else [inner]
            if isinstance(annotation.value, ast.Name) and annotation.value.id in _WRAPPERS:
                return next((kind for part in parts if (kind := self._named(part))), "")
            return self._named(annotation.value)
        return ""

    def _kind(self, value: ast.expr, scope: dict[str, str]) -> str:
        """Name of the class of an expression, empty where nobody can say."""
        kind = ""
        if isinstance(value, ast.Name):
            kind = scope.get(value.id, "")
        elif isinstance(value, ast.Attribute):
            kind = self._attribute(self._kind(value.value, scope), value.attr)
        elif isinstance(value, ast.Subscript):
            kind = self._kind(value.value, scope)
        elif isinstance(value, ast.BoolOp):
            kind = next((found for one in value.values if (found := self._kind(one, scope))), "")
        elif isinstance(value, ast.IfExp):
            kind = self._kind(value.body, scope) or self._kind(value.orelse, scope)
        elif isinstance(value, ast.Call):
            kind = self._result(value, scope)
        return kind

    def _result(self, call: ast.Call, scope: dict[str, str]) -> str:
        function = call.func
        named = next(
            (one.id for one in call.args if isinstance(one, ast.Name) and one.id in self.models), ""
        )  # validate_parameters(values, Model)
        if isinstance(function, ast.Attribute):
            if function.attr == "model_validate" and isinstance(function.value, ast.Name):
                return function.value.id
            if function.attr in _SAME:
                return self._kind(function.value, scope)
            return self._results.get(function.attr, "")
        if isinstance(function, ast.Name):
            if function.id in self.models or function.id in self._attributes:
                return function.id
            return named or self._results.get(function.id, "")
        return ""

    def _attribute(self, owner: str, name: str) -> str:
        model = self.models.get(owner)
        if model is not None and name in model.model_fields:
            return _model_in(model.model_fields[name].annotation)
        for kind in [owner, *self._bases.get(owner, [])]:
            if found := self._attributes.get(kind, {}).get(name, ""):
                return found
        return ""


def _functions(tree: ast.Module) -> Iterator[tuple[Function, str]]:
    for node in tree.body:
        if isinstance(node, FUNCTIONS):
            yield node, ""
        elif isinstance(node, ast.ClassDef):
            for item in node.body:
                if isinstance(item, FUNCTIONS):
                    yield item, node.name


def _assigned(statement: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    if isinstance(statement, ast.Assign):
        for target in statement.targets:
            if isinstance(target, ast.Tuple) and isinstance(statement.value, ast.Tuple):
                yield from zip(target.elts, statement.value.elts, strict=False)
            else:
                yield target, statement.value
    elif isinstance(statement, ast.AnnAssign) and statement.value is not None or isinstance(statement, ast.NamedExpr):
        yield statement.target, statement.value


def _is_enumerate(function: ast.expr) -> bool:
    return isinstance(function, ast.Name) and function.id == "enumerate"


def _is_self(value: ast.expr) -> bool:
    return isinstance(value, ast.Name) and value.id == "self"


def _decorated(function: Function, names: set[str]) -> bool:
    found = [one.func if isinstance(one, ast.Call) else one for one in function.decorator_list]
    return any(isinstance(one, ast.Name) and one.id in names for one in found)


def _model_in(annotation: object) -> str:
    if isinstance(annotation, type):
        return annotation.__name__ if issubclass(annotation, BaseModel) else ""
    return next((name for one in typing.get_args(annotation) if (name := _model_in(one))), "")
