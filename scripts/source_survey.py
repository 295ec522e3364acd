"""Counts and samples the source, for reviews of its language and size.

source_survey.py count                 statements per package (AST nodes of kind `stmt`, without docstrings)
source_survey.py functions             how long and how branched functions are
source_survey.py duplicates            public class names that are defined more than once
source_survey.py sample [--seed N]     200 identifiers and 60 docstrings drawn at random, the seed printed
"""

from __future__ import annotations

import argparse
import ast
import random
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).resolve().parent.parent / "src" / "meltcore"
IDENTIFIERS, DOCSTRINGS = 200, 60
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_DEFINITIONS = (ast.ClassDef, *_FUNCTIONS)
_BRANCHES = (ast.If, ast.IfExp, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.Assert, ast.match_case)


def modules() -> Iterator[tuple[Path, ast.Module]]:
    """Every module of the package with its syntax tree, by path."""
    for path in sorted(SOURCE.rglob("*.py")):
        yield path.relative_to(SOURCE), ast.parse(path.read_text())


def statements_of(tree: ast.Module) -> int:
    """Statements of a module at any depth. Docstrings do not count, nor do comments and lines."""
    nodes = list(ast.walk(tree))
    docstrings = sum(
        isinstance(node, (ast.Module, *_DEFINITIONS)) and ast.get_docstring(node, clean=False) is not None
        for node in nodes
    )
    return sum(isinstance(node, ast.stmt) for node in nodes) - docstrings


def count() -> None:
    statements: Counter[str] = Counter()
    for path, tree in modules():
        statements[path.parts[0]] += statements_of(tree)
    print("statements (AST), docstrings not counted")
    for package, number in sorted(statements.items()):
        print(f"{number:7,} {package}")
    print(f"{sum(statements.values()):7,} in all")


def functions() -> None:
    """Print the number of functions, the lines of one (median, 95 % have at most) and their cyclomatic complexity."""
    found = [node for _, tree in modules() for node in ast.walk(tree) if isinstance(node, _FUNCTIONS)]
    lines = sorted((node.end_lineno or node.lineno) - node.lineno + 1 for node in found)
    branches = [complexity_of(node) for node in found]
    print(f"{len(found):,} functions; lines: median {statistics.median(lines):g}, p95 {lines[len(lines) * 95 // 100]}")
    print(f"complexity: mean {statistics.mean(branches):.2f}; above 20: {sum(count > 20 for count in branches)}")


def complexity_of(function: ast.AST) -> int:
    """Return the cyclomatic complexity: 1, and 1 for each branch. Those of functions within it count too."""
    nodes = list(ast.walk(function))
    operands = sum(len(node.values) - 1 for node in nodes if isinstance(node, ast.BoolOp))
    comprehensions = sum(1 + len(node.ifs) for node in nodes if isinstance(node, ast.comprehension))
    return 1 + operands + comprehensions + sum(isinstance(node, _BRANCHES) for node in nodes)


def duplicates() -> dict[str, list[str]]:
    """Public classes at the top of a module, by name, where a name occurs more than once: the modules."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for path, tree in modules():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(str(path))
    return {name: paths for name, paths in sorted(found.items()) if len(paths) > 1}


def identifiers(tree: ast.Module) -> Iterator[str]:
    """Names that a module defines: classes, functions, parameters, fields and variables."""
    for node in ast.walk(tree):
        if isinstance(node, _DEFINITIONS):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def sample(seed: int) -> None:
    names: set[tuple[str, str]] = set()
    docstrings: list[tuple[str, str]] = []
    for path, tree in modules():
        names |= {(str(path), name) for name in identifiers(tree) if len(name) > 1}
        docstrings += [
            (f"{path}: {getattr(node, 'name', 'module')}", text)
            for node in ast.walk(tree)
            if isinstance(node, (ast.Module, *_DEFINITIONS)) and (text := ast.get_docstring(node))
        ]
    draw = random.Random(seed)
    print(f"seed {seed}: {IDENTIFIERS} of {len(names):,} identifiers, {DOCSTRINGS} of {len(docstrings):,} docstrings\n")
    for path, name in sorted(draw.sample(sorted(names), IDENTIFIERS)):
        print(f"{path}: {name}")
    for where, text in draw.sample(docstrings, DOCSTRINGS):
        print(f"\n--- {where}\n{text}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=("count", "functions", "duplicates", "sample"))
    parser.add_argument("--seed", type=int, default=None, help="Seed of the sample (default: drawn, and printed).")
    args = parser.parse_args()
    if args.verb == "count":
        count()
    elif args.verb == "functions":
        functions()
    elif args.verb == "duplicates":
        found = duplicates()
        for name, paths in found.items():
            print(f"{name}: {', '.join(paths)}")
        print(f"{len(found)} names")
    else:
        sample(args.seed if args.seed is not None else random.SystemRandom().randrange(10**6))
    return 0


if __name__ == "__main__":
    sys.exit(main())
