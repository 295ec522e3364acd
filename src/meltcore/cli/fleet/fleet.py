"""`meltcore fleet init FILE`: write a first fleet.yaml."""

import argparse

HELP = "Write a fleet.yaml to begin with: models that share GPUs behind one address."
EXAMPLES = """\
  meltcore fleet init fleet.yaml           language, translation and speech models for one large GPU
  meltcore fleet init --tiny tiny.yaml     the bundled models, for any machine
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments for the action and the file, and the option for a fleet of the bundled models."""
    parser.prog += " init"  # the one action: its word stands in the usage, and the list names the file alone
    parser.add_argument("action", choices=("init",), metavar="init", help=argparse.SUPPRESS)
    parser.add_argument("path", metavar="FILE", help="The file to write; one that exists is left as it is")
    parser.add_argument("--tiny", action="store_true", help="Of the bundled models, which need no GPU and no download.")


def run(args: argparse.Namespace) -> int:
    """Write the file. Raises ConfigError if the file exists or cannot be written."""
    from importlib import resources
    from pathlib import Path

    from meltcore.common.files import write_atomic

    example = resources.files("meltcore.fleet") / "examples" / ("tiny.yaml" if args.tiny else "fleet.yaml")
    write_atomic(Path(args.path), example.read_bytes(), overwrite=False, hint="name another file")
    substitutes = "; kan_Knda stands for made-up languages" if args.tiny else ""
    print(f"written: {args.path}{substitutes}. Next: meltcore plan {args.path}")
    return 0
