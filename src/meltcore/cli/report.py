"""`meltcore report`: draw the HTML report of a run folder again, from its result.json."""

import argparse

HELP = "Draw the HTML report of a run folder again. Reads result.json, writes report.html beside it."
EXAMPLES = """\
  meltcore report runs/20261121T120000Z-demo
  meltcore report runs/20261121T120000Z-demo --output shared/report.html
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="RUN_FOLDER", help="a folder written by load, demo or eval")
    parser.add_argument("--output", metavar="FILE", help="write here instead (default: RUN_FOLDER/report.html)")


def run(args: argparse.Namespace) -> int:
    from pathlib import Path

    from meltcore.report import render
    from meltcore.results.runfolder import RunFolder, read_result, write_whole

    html = render(read_result(args.folder))
    path = Path(args.output) if args.output else RunFolder(Path(args.folder)).report_path
    write_whole(path, html.encode())
    print(path)
    return 0
