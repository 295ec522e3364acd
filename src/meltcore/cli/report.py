"""`meltcore report`: join all evidence about a node into one card, or render the page of a run again."""

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meltcore.measure.documents.card import EvidenceType
    from meltcore.measure.documents.values.documents import DocumentFile

HELP = (
    "Of several run folders: the node's report card, which joins snapshot, certificate, benchmark, evaluation, tuning, "
    "profile and comparison into one page with one verdict, the worst. PASS needs all required evidence (--require); "
    "without it the card is INCOMPLETE at best, and names what is missing. Of a single one: its page again."
)
EXAMPLES = """\
  meltcore report runs/*-certify runs/*-bench runs/*-eval-all runs/*-tune-batching runs/*-compare machine.json
  meltcore report runs --card                       the newest of each kind within a folder
  meltcore report runs --require certificate,benchmark   a node's acceptance: these two decide, others are shown
  meltcore report runs/20261121T120000Z-demo        this run's page again
  meltcore report runs/20261121T120000Z-demo --output shared/report.html
  meltcore report --verify runs/20261121T120000Z-certify   is it young, signed, and as it was written?

exit status of a card and of --verify: 0 PASS, 1 WARN, 2 FAIL, 3 UNKNOWN, 4 INCOMPLETE; 2 also for wrong usage
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments for the evidence, and the options for the card and for the page of a single run."""
    parser.add_argument(
        "places", nargs="+", metavar="DIR", help="Run folders, folders of run folders, or files such as a snapshot"
    )
    parser.add_argument("--card", action="store_true", help="Make a card even of one document")
    parser.add_argument(
        "--require",
        type=_evidence_types,
        metavar="TYPE,...",
        help="Evidence without which the card is INCOMPLETE (default: snapshot, certificate, benchmark, evaluation, "
        "tuning, profile and comparison; `load` may be named too)",
    )
    parser.add_argument("--out", metavar="DIR", help="Where the card goes (default: a fresh folder under runs)")
    parser.add_argument("--output", metavar="FILE", help="Where the page of a single run goes (default: beside it)")
    parser.add_argument(
        "--export", metavar="FILE", help="Write the charts of a single run into one .svg or .png (PNG: meltcore[png])"
    )
    parser.add_argument("--force", action="store_true", help="Join documents of several machines; never a PASS")
    parser.add_argument(
        "--verify",
        action="store_true",
        help="Verify the age, the evidence and the signature of certificates, and write nothing",
    )
    parser.add_argument(
        "--signers",
        metavar="FILE",
        help="With --verify: allowed signers, lines of a name and a public SSH key; any other key, or none, is a FAIL",
    )
    parser.add_argument("--json", action="store_true", help="Print the card as JSON")


def _evidence_types(text: str) -> "list[EvidenceType]":
    from typing import get_args

    from meltcore.measure.documents.card import EvidenceType

    all_types: tuple[EvidenceType, ...] = get_args(EvidenceType)
    names = [name.strip() for name in text.split(",")]
    unknown = [name for name in names if name not in all_types]
    if unknown:
        raise argparse.ArgumentTypeError(f"no type of evidence {unknown[0]!r}; there are {', '.join(all_types)}")
    return [name for name in all_types if name in names]


def run(args: argparse.Namespace) -> int:
    """Render the page of a run, or join evidence about a node into a card, and return the exit code.

    The exit code of a card follows from its verdict. Raises ConfigError if there is no evidence, or if --output or
    --export is given with a card.
    """
    from pathlib import Path

    from meltcore.common.errors import ConfigError
    from meltcore.measure.documents.values.documents import find_documents
    from meltcore.measure.report.page.charts_export import check_export
    from meltcore.measure.report.render import export_document, render_document

    documents = [document for place in args.places for document in find_documents(Path(place))]
    if args.verify:
        return _verify(documents, args.signers)
    if args.signers:
        raise ConfigError("--signers is of --verify: give both")
    if len(documents) == 1 and not args.card:
        if args.export:
            check_export(Path(args.export))  # before the page is written
        print(render_document(documents[0], Path(args.output) if args.output else None))
        if args.export:
            print(export_document(documents[0], Path(args.export)))
        return 0
    if args.output or args.export:
        raise ConfigError("--output and --export are of a single run's page; a card goes to a folder: --out")
    return _card(args, documents)


def _verify(documents: "Sequence[DocumentFile]", signers: str | None) -> int:
    """Print what is found about each certificate, and return the exit code of the worst."""
    from datetime import UTC, datetime

    from meltcore.common.errors import ConfigError
    from meltcore.measure.documents.node import Certificate
    from meltcore.measure.documents.signature import verify
    from meltcore.measure.documents.verdicts import MEANINGS, CheckVerdict, worst_verdict

    verdicts: list[CheckVerdict] = []
    for document in documents:
        if isinstance(document.content, Certificate):
            print(document.path)
            for verdict, text in verify(document.path, document.content, datetime.now(UTC), signers):
                print(f"  {verdict:<9} {text}")
                verdicts.append(verdict)
    if not verdicts:
        raise ConfigError("--verify is of certificates, and none is here")
    return MEANINGS[worst_verdict(verdicts, "UNKNOWN")].exit_code


def _card(args: argparse.Namespace, documents: "Sequence[DocumentFile]") -> int:
    from pathlib import Path

    from rich.console import Console

    from meltcore.common.errors import ConfigError
    from meltcore.measure.documents.card import CARD_FILE, REQUIRED
    from meltcore.measure.documents.runfolder import RunFolder
    from meltcore.measure.node.snapshot import diff_snapshots
    from meltcore.measure.report.nodes.card import (
        build_card,
        card_page,
        conflicting_snapshots,
        newest_documents,
    )
    from meltcore.measure.report.page.console import print_document, print_page
    from meltcore.measure.report.render import save_document

    newest, older = newest_documents(documents)
    if not newest:
        raise ConfigError("there is nothing here to join: a card is not evidence for another")
    snapshots = conflicting_snapshots(newest)
    changed_facts = [] if snapshots is None else diff_snapshots(*snapshots)
    card = build_card(newest, older, changed_facts=changed_facts, required=args.require or REQUIRED, force=args.force)
    console = Console(stderr=args.json)
    folder = Path(args.out) if args.out else RunFolder.create("runs", "card").path
    page = save_document(folder / CARD_FILE, card)
    if args.json:
        print_document(card)
    print_page(card_page(card), console)
    console.print(f"page: {page}", highlight=False, soft_wrap=True)
    return card.exit_code
