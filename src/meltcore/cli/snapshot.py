"""`meltcore snapshot`: print this machine's fingerprint."""

import argparse

HELP = "Print what every result says of its machine: hardware, driver, versions, revision. No host name, no path."
EXAMPLES = """\
  meltcore snapshot
  meltcore snapshot --json > machine.json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="JSON in the form that result.json holds")


def run(args: argparse.Namespace) -> int:
    import msgspec

    from meltcore.results.fingerprint import take_fingerprint
    from meltcore.results.wording import fingerprint_rows

    fingerprint = take_fingerprint()
    if args.json:
        print(msgspec.json.format(msgspec.json.encode(fingerprint), indent=2).decode())
        return 0
    rows = fingerprint_rows(fingerprint)
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name:<{width}}  {value}")
    return 0
