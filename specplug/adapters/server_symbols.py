"""What a door uses of its server, checked by name and signature against the server's sources.

The check reads the sources and imports nothing, so that it also judges a release that cannot be installed here.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeAlias

__all__ = ["Attribute", "Call", "Function", "Symbol", "source_mismatches"]

Definition: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Attribute:
    """A class has it: as a field, a property or a method."""

    file: str
    owner: str
    name: str

    def fault(self, module: ast.Module) -> str | None:
        if self.name in {name for name, _ in _members(module, self.owner)}:
            return None
        return f"{self.owner}.{self.name} is gone"


@dataclass(frozen=True, slots=True)
class Function:
    """A function or method takes exactly these parameters (``self`` aside)."""

    file: str
    owner: str | None
    name: str
    parameters: tuple[str, ...]

    def fault(self, module: ast.Module) -> str | None:
        found = _function(module, self.owner, self.name)
        if found is None:
            return f"{_dotted(self.owner, self.name)}() is gone"
        names = tuple(each.arg for each in (*found.args.posonlyargs, *found.args.args, *found.args.kwonlyargs))
        names = names[1:] if self.owner else names
        if names == self.parameters:
            return None
        return f"{_dotted(self.owner, self.name)} takes ({', '.join(names)}), not ({', '.join(self.parameters)})"


@dataclass(frozen=True, slots=True)
class Call:
    """A method calls ``callee`` somewhere with arguments of these names (the last part of dotted ones)."""

    file: str
    owner: str
    name: str
    callee: str
    arguments: tuple[str, ...]
    keywords: tuple[str, ...] = ()

    def fault(self, module: ast.Module) -> str | None:
        found = _function(module, self.owner, self.name)
        if found is None:
            return f"{_dotted(self.owner, self.name)}() is gone"
        for node in ast.walk(found):
            if isinstance(node, ast.Call) and _last_name(node.func) == self.callee:
                arguments = tuple(map(_last_name, node.args))
                if arguments == self.arguments and tuple(word.arg for word in node.keywords) == self.keywords:
                    return None
        wanted = ", ".join((*self.arguments, *(f"{word}=" for word in self.keywords)))
        return f"{_dotted(self.owner, self.name)} no longer calls {self.callee}({wanted})"


Symbol: TypeAlias = Attribute | Function | Call


def source_mismatches(package: Path, symbols: Sequence[Symbol]) -> list[str]:
    """What of ``symbols`` the sources in ``package`` (the server's folder) no longer offer; [] when all fits."""
    parse = cache(_parse)
    return [f"{symbol.file}: {fault}" for symbol in symbols if (fault := _fault(symbol, parse(package / symbol.file)))]


def _fault(symbol: Symbol, module: ast.Module | None) -> str | None:
    return "the file is gone" if module is None else symbol.fault(module)


def _parse(path: Path) -> ast.Module | None:
    return ast.parse(path.read_text(encoding="utf-8")) if path.is_file() else None


def _members(module: ast.Module, owner: str) -> Iterator[tuple[str, Definition | None]]:
    """Names that the class body binds, and what its methods set on ``self``; with the function, where it is one."""
    for node in module.body:
        if not (isinstance(node, ast.ClassDef) and node.name == owner):
            continue
        for each in ast.walk(node):
            if isinstance(each, Definition):
                yield each.name, each
            elif isinstance(each, ast.AnnAssign):
                yield _last_name(each.target), None
            elif isinstance(each, ast.Assign):
                yield from ((_last_name(target), None) for target in each.targets)


def _function(module: ast.Module, owner: str | None, name: str) -> Definition | None:
    if owner is not None:
        return next((each for found, each in _members(module, owner) if found == name and each is not None), None)
    return next((each for each in module.body if isinstance(each, Definition) and each.name == name), None)


def _last_name(node: ast.expr) -> str:
    """``c`` for ``a.b.c`` and for ``c``; "" for anything else."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _dotted(owner: str | None, name: str) -> str:
    return f"{owner}.{name}" if owner else name
