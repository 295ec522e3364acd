"""Writes the tables of the documentation from the result files under benchmarks/results/ and from the code.

    performance_tables.py           write the tables in place
    performance_tables.py --check   exit 1 where a table is not what the result files say

A table stands between two comments. The first names a result file, a subject (empty for none) and, if only some rows
are wanted, a regular expression that is searched in "WORK [UNIT]":

    <!-- results: offline/h200.json | Qwen/Qwen3-0.6B | output tokens/s -->
    <!-- end of results -->

Tables of gpu_types.py, code_tables.py and result_tables.py, which are computed, stand between others:

    <!-- generated: gpu types -->
    <!-- end of generated -->
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

import backend_tables
import code_tables
import gpu_types
import result_tables

sys.path.append(str(Path(__file__).resolve().parent.parent / "benchmarks"))
from bench_output import HEADLINE, code_digest

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
_BLOCK = re.compile(
    r"(?P<head><!-- results: (?P<file>[^|]+?) \|(?P<subject>[^|]*?)(?:\|(?P<rows>[^\n]*?))? -->\n)"
    r"(?P<table>.*?)(?P<end><!-- end of results -->)",
    re.DOTALL,
)
_GENERATED = re.compile(
    r"(?P<head><!-- generated: (?P<name>[^\n]*?) -->\n).*?(?P<end><!-- end of generated -->)", re.DOTALL
)
_HEADLINE_WORK = re.compile(r"([\d,]+) requests?, 128 to 1024 in / 128 out")
_HEADLINE_LEVELS = ("1", "10", "100", "400", "1,000", "2,000")
_TABLES = {**gpu_types.TABLES, **code_tables.TABLES, **result_tables.TABLES, **backend_tables.TABLES}
_MOST_OPEN_ROWS = 13  # of a table that is not folded
_MAIN_VERSIONS = ("meltcore", "vllm", "torch", "triton")


def documents() -> list[Path]:
    """The files that may hold tables."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def target(row: dict[str, Any]) -> str:
    if "reach" not in row:
        return ""
    bound = f"{'≥' if row['better'] == 'higher' else '≤'} {number(row['reach'])}"
    met = {True: "met", False: "not met"}.get(row.get("met"), "no peer")  # type: ignore[arg-type]
    return f"{bound}{'×' if row['reach_of'] == 'ratio' else ''}, {met}"


def peer(row: dict[str, Any]) -> str:
    return f"{number(row['peer_value'])} ({row['peer']})" if "peer_value" in row else ""


def value(row: dict[str, Any]) -> str:
    span = f" ({number(row['lowest'])} to {number(row['highest'])})" if "repeats" in row else ""
    return f"{number(row['value'])}{span}"


_COLUMNS = {
    "work": lambda row: row["work"],
    "value": value,
    "unit": lambda row: row["unit"],
    "peer": peer,
    "ratio": lambda row: f"{row['ratio']:.2f}×" if "ratio" in row else "",
    "of limit": lambda row: f"{row['limit_share']:.0%}" if "limit_share" in row else "",
    "target": target,
}


def source(script: str, run: dict[str, Any]) -> str:
    """Where a run's rows come from: date, commit, machine, versions and command, and what a reader must know of them.

    That is whether the measured code has changed since, and whether no row has the spread of several runs.
    """
    gpus = run["machine"]["gpus"]
    machine = (
        f"{len(gpus)} x {gpus[0]}" if len(gpus) > 1 else gpus[0] if gpus else f"CPU, {run['machine']['cores']} cores"
    )
    versions = [f"{name} {run['versions'][name]}" for name in _MAIN_VERSIONS if name in run["versions"]]
    made = ", ".join([run["date"], f"commit {run['commit']}", machine, *versions])
    changed = "" if run.get("code") == code_digest(script) else "The code has changed since."
    spread = "" if any("repeats" in row for row in run["rows"]) else "No spread was recorded."
    sentences = [text for text in (changed, spread) if text]
    return f"{made}: `{run['command']}`" + "".join([". ", " ".join(sentences)] if sentences else [])


def headline() -> list[str]:
    """Lines of the README's table: output tok/s of Meltcore and of its peer by concurrency."""
    file, subject = HEADLINE
    runs = [run for run in json.loads((RESULTS / f"{file}.json").read_text())["runs"] if run["subject"] == subject]
    found = {
        match[1]: (row, run)
        for run in runs
        for row in run["rows"]
        if row["unit"] == "output tokens/s" and (match := _HEADLINE_WORK.fullmatch(row["work"]))
    }
    rows = [found[level][0] for level in _HEADLINE_LEVELS]
    [name] = {row["peer"] for row in rows}
    lines = {
        "concurrency": list(_HEADLINE_LEVELS),
        "Meltcore": [value(row) for row in rows],
        name: [number(row["peer_value"]) for row in rows],
        "ratio": [f"{row['ratio']:.2f}" for row in rows],
        "of the physical limit": [f"{row['limit_share']:.0%}".replace("%", " %") for row in rows],
    }
    table = [f"| {' | '.join([head, *cells])} |" for head, cells in lines.items()]
    sources = dict.fromkeys(source(file.partition("/")[0], found[level][1]) for level in _HEADLINE_LEVELS)
    return [table[0], f"|---{'|--:' * len(rows)}|", *table[1:], "", *sources]


_TABLES["headline"] = headline


def run_table(script: str, run: dict[str, Any], wanted: re.Pattern[str]) -> list[str]:
    """Lines of one run's table and of its source; none where no row is wanted."""
    rows = [row for row in run["rows"] if wanted.search(f"{row['work']} [{row['unit']}]")]
    if not rows:
        return []
    columns = {name: cells for name, of in _COLUMNS.items() if any(cells := [of(row) for row in rows])}
    align = "|".join("---" if name in ("work", "unit", "peer", "target") else "--:" for name in columns)
    lines = [f"| {' | '.join(columns)} |", f"|{align}|"]
    lines += [f"| {' | '.join(cells)} |" for cells in zip(*columns.values(), strict=True)]
    if len(rows) > _MOST_OPEN_ROWS:  # else a phone shows one table for ten screens
        lines = [f'<details markdown="1"><summary>{len(rows)} rows</summary>', "", *lines, "", "</details>"]
    return [*lines, "", source(script, run), ""]


def table(file: str, subject: str, rows: str) -> str:
    """The tables of all runs of a subject, newest first. Raises ValueError where no row is found."""
    runs = [run for run in json.loads((RESULTS / file).read_text())["runs"] if run["subject"] == subject]
    wanted = re.compile(rows)
    lines = [line for run in reversed(runs) for line in run_table(file.partition("/")[0], run, wanted)]
    if not lines:
        raise ValueError(f"{file} has no rows for {subject!r} and {rows!r}")
    return "\n" + "\n".join(lines) + "\n"


def rendered(text: str) -> str:
    """A document with every table as the result files and the code have it."""

    def replace(match: re.Match[str]) -> str:
        found = table(match["file"].strip(), match["subject"].strip(), (match["rows"] or "").strip())
        return match["head"] + found + match["end"]

    def generate(match: re.Match[str]) -> str:
        if match["name"] not in _TABLES:
            raise ValueError(f"no generated table {match['name']!r}; one of {', '.join(_TABLES)}")
        return "\n".join([match["head"], *_TABLES[match["name"]](), "", match["end"]])

    return _GENERATED.sub(generate, _BLOCK.sub(replace, text))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="Write nothing; exit 1 where a table is out of date.")
    check = parser.parse_args().check
    stale = []
    for path in documents():
        before = path.read_text()
        after = rendered(before)
        if after != before:
            stale.append(str(path.relative_to(ROOT)))
            if not check:
                path.write_text(after)
    if stale:
        print(f"{'out of date' if check else 'written'}: {', '.join(stale)}")
    return 1 if stale and check else 0


if __name__ == "__main__":
    sys.exit(main())
