"""`meltcore compare`: two runs' levels side by side."""

import argparse

HELP = "Two runs' levels side by side, with ratios and what changed around them. Refuses unlike or partial runs."
EXAMPLES = """\
  meltcore compare runs/20261121T120000Z-load runs/20261121T130000Z-load
  meltcore compare A B --json
  meltcore compare A B --force
"""
METRICS = ("output_tokens_per_s", "total_tokens_per_s", "ttft_ms", "itl_ms", "e2e_ms", "accuracy")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("first", metavar="A", help="run folder of the base")
    parser.add_argument("second", metavar="B", help="run folder set against it")
    parser.add_argument("--force", action="store_true", help="show runs that do not compare, with the reasons")
    parser.add_argument("--json", action="store_true", help="rows as JSON")


def run(args: argparse.Namespace) -> int:
    from meltcore.report.compare import compare, environment_changes, reasons_not_to_compare
    from meltcore.report.compare_output import as_json, print_comparison
    from meltcore.results.runfolder import read_result

    first, second = read_result(args.first), read_result(args.second)
    rows = compare(first, second, force=args.force)
    doubts, changes = reasons_not_to_compare(first, second), environment_changes(first, second)
    if args.json:
        print(as_json(rows, doubts, changes))
    else:
        print_comparison(rows, doubts, changes)
    return 0
