"""Reads the imports between the modules of the package: circles, and folders that import each other."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).resolve().parent.parent / "src" / "meltcore"
PACKAGE = "meltcore"
Graph = Mapping[str, set[str]]


@cache
def parsed_files(source: Path = SOURCE) -> dict[str, ast.Module]:
    """Return the syntax tree of every module by its path below `source`, without the ending .py."""
    return {
        path.relative_to(source).with_suffix("").as_posix(): ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted(source.rglob("*.py"))
    }


def imported_names(tree: ast.Module) -> Iterator[str]:
    """Yield the full names that a module imports at any depth, in functions and for type checkers too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imports(files: Mapping[str, ast.Module]) -> dict[str, set[str]]:
    """Return the modules of the package that each module imports, both as paths."""
    by_name = {path.removesuffix("/__init__").replace("/", "."): path for path in files}
    found: dict[str, set[str]] = {}
    for path, tree in files.items():
        inner = (name.split(".")[1:] for name in imported_names(tree) if name.startswith(f"{PACKAGE}."))
        found[path] = {target for parts in inner if (target := _module_of(parts, by_name)) not in (None, path)}
    return found


def _module_of(parts: list[str], by_name: Mapping[str, str]) -> str | None:
    """Return the module that holds a name: its longest beginning that is a module."""
    for length in range(len(parts), 0, -1):
        if (path := by_name.get(".".join(parts[:length]))) is not None:
            return path
    return None


def circles(graph: Graph) -> list[list[str]]:
    """Return the groups of nodes that reach each other, each sorted (Tarjan's strongly connected components)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in sorted(graph.get(node, ())):
            if target not in index:
                visit(target)
            if target in stack:
                low[node] = min(low[node], low[target])
        if low[node] == index[node]:
            group = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(group) > 1:
                found.append(sorted(group))

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return found


def folders(graph: Graph) -> dict[str, set[str]]:
    """Return the folders that the modules of each folder import from, without itself."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for path, targets in graph.items():
        folder = path.rpartition("/")[0]
        found[folder] |= {target.rpartition("/")[0] for target in targets} - {folder}
    return dict(found)


def two_way_pairs(graph: Graph) -> list[tuple[str, str]]:
    """Return the pairs of nodes that import each other."""
    return sorted((one, two) for one, targets in graph.items() for two in targets if one < two and one in graph[two])
