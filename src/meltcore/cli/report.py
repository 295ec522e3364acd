"""`meltcore report`: join what was found out about a node to one card, or draw the page of one run again."""

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meltcore.report.documents import Document

HELP = (
    "Of several run folders: the node's report card, which joins snapshot, certificate, benchmark, evaluation, tuning, "
    "profile and comparison into one page with one verdict, the gravest; what is missing is named and never passed. Of "
    "a single one: its own page, drawn again."
)
EXAMPLES = """\
  meltcore report runs/*-certify runs/*-bench runs/*-eval runs/*-tune-batching runs/*-compare machine.json
  meltcore report runs --card                       the newest of each kind within a folder
  meltcore report runs/20261121T120000Z-demo        this run's page again
  meltcore report runs/20261121T120000Z-demo --output shared/report.html

exit status of a card, as of a certificate: 0 PASS, 1 WARN, 2 FAIL, 3 UNKNOWN; 2 also for wrong usage
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "places", nargs="+", metavar="DIR", help="run folders, folders of run folders, or files such as a snapshot"
    )
    parser.add_argument("--card", action="store_true", help="a card even of one document")
    parser.add_argument("--out", metavar="DIR", help="where the card goes (default: a fresh folder under runs)")
    parser.add_argument("--output", metavar="FILE", help="where the page of a single run goes (default: beside it)")
    parser.add_argument("--force", action="store_true", help="join what is not of one machine; never a PASS")
    parser.add_argument("--json", action="store_true", help="print the card as JSON")


def run(args: argparse.Namespace) -> int:
    from pathlib import Path

    from meltcore.errors import ConfigError
    from meltcore.report.documents import find_documents

    found = [document for place in args.places for document in find_documents(Path(place))]
    if len(found) == 1 and not args.card:
        return _redraw(found[0], args.output)
    if args.output:
        raise ConfigError("--output is of a single run's page; a card goes to a folder: --out")
    return _card(args, found)


def _redraw(document: "Document", output: str | None) -> int:
    from pathlib import Path

    from meltcore.report.redraw import page_of, place_of
    from meltcore.results.runfolder import write_whole

    html = page_of(document)
    path = Path(output) if output else place_of(document)
    write_whole(path, html.encode())
    print(path)
    return 0


def _card(args: argparse.Namespace, found: "Sequence[Document]") -> int:
    from pathlib import Path

    import msgspec
    from rich.console import Console

    from meltcore.errors import ConfigError
    from meltcore.hardware.drift import drift
    from meltcore.report.card import make_card, newest, snapshots_apart
    from meltcore.report.card_output import print_card
    from meltcore.report.card_page import save_card
    from meltcore.results.runfolder import RunFolder

    counted, earlier = newest(found)
    if not counted:
        raise ConfigError("there is nothing here to join: a card is no part of another")
    snapshots = snapshots_apart(counted)
    drifted = [] if snapshots is None else drift(*snapshots)
    card = make_card(counted, earlier, drifted=drifted, force=args.force)
    console = Console(stderr=args.json)
    page = save_card(Path(args.out) if args.out else RunFolder.create("runs", "card").path, card)
    if args.json:
        print(msgspec.json.format(msgspec.json.encode(card), indent=2).decode())
    print_card(card, console)
    console.print(f"page: {page}", highlight=False, soft_wrap=True)
    return card.exit_code
