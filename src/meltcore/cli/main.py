"""`meltcore VERB ...`: finds the verb's module, parses, calls, prints errors as one line. No logic here.

Only the chosen verb's module is imported, and it imports its real work when run, so `meltcore --help` stays fast.
"""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple

from meltcore import __version__
from meltcore.errors import MeltcoreError

EXIT_ERROR = 2  # wrong usage or a MeltcoreError; 1 is left for "it ran, and the answer is no"
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells have it


class Verb(NamedTuple):
    """`help` stands here too, so that the list of verbs needs no import. `needs_engine`: wants the extra installed."""

    module: str
    help: str
    needs_engine: bool = False


VERBS: dict[str, Verb] = {
    "serve": Verb("meltcore.cli.serve", "serve a model through the OpenAI API", needs_engine=True),
    "stop": Verb("meltcore.cli.stop", "end a server started with serve --daemon", needs_engine=True),
    "demo": Verb("meltcore.cli.demo", "serve, check, load and report, in one go", needs_engine=True),
    "load": Verb("meltcore.cli.load", "load any OpenAI-compatible server and measure it"),
    "eval": Verb("meltcore.cli.eval", "check a server's answers, API forms and speed, and score it"),
    "report": Verb("meltcore.cli.report", "join a node's results to one report card, or draw a run's page again"),
    "compare": Verb("meltcore.cli.compare", "judge a change by fresh starts of both servers; or two runs side by side"),
    "baseline": Verb("meltcore.cli.baseline", "keep a control set of fresh starts, to compare against"),
    "tune": Verb("meltcore.cli.tune", "find a server's limits and good settings by restarting it"),
    "profile": Verb("meltcore.cli.profile", "where a GPU was idle, and why, from a profiler's trace"),
    "monitor": Verb("meltcore.cli.monitor", "log the GPUs' temperature, power, clocks, errors and activity"),
    "bench": Verb("meltcore.cli.bench", "the GPU score: what this GPU sustains, and how it is", needs_engine=True),
    "rank": Verb("meltcore.cli.rank", "GPU scores side by side"),
    "snapshot": Verb("meltcore.cli.snapshot", "what this machine is, or what changed: hardware, driver, versions"),
    "certify": Verb("meltcore.cli.certify", "check this node's GPUs and links, and give it a certificate"),
}

_EXAMPLES = """\
examples:
  meltcore demo
  meltcore serve meltcore/sums --port 8000
  meltcore load http://127.0.0.1:8000 --concurrency 10,100
  meltcore VERB --help
"""


def _fill_closed_streams() -> None:
    """Where the shell closed a standard stream (`2>&-`): the next socket would get its number, and be printed into."""
    if None in (sys.stdin, sys.stdout, sys.stderr):
        while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
            os.set_inheritable(number, True)
        os.close(number)
        sys.stdin, sys.stdout, sys.stderr = (
            stream or open(number, mode, closefd=False)  # noqa: SIM115, for as long as the process lives
            for number, (stream, mode) in enumerate(((sys.stdin, "r"), (sys.stdout, "w"), (sys.stderr, "w")))
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return the exit code: 0 done, 1 done and the answer is no, 2 could not, 130 interrupted."""
    _fill_closed_streams()
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] not in VERBS:
        return _without_verb(arguments)
    name = arguments[0]
    try:
        module = importlib.import_module(VERBS[name].module)
        parsed = verb_parser(name, module).parse_args(arguments[1:])
        return int(module.run(parsed))
    except MeltcoreError as error:
        print(f"meltcore {name}: {error}", file=sys.stderr)
        return EXIT_ERROR
    except ModuleNotFoundError as error:
        if not VERBS[name].needs_engine or (error.name or "").startswith("meltcore"):
            raise
        print(
            f"meltcore {name}: needs the engine, and {error.name} is not installed: pip install 'meltcore[engine]'",
            file=sys.stderr,
        )
        return EXIT_ERROR
    except KeyboardInterrupt:
        print(f"meltcore {name}: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def verb_parser(name: str, module: ModuleType) -> argparse.ArgumentParser:
    """The parser of one verb; its help ends in examples and, where the module names METRICS, their definitions."""
    epilog = f"examples:\n{module.EXAMPLES.rstrip()}"
    metrics = getattr(module, "METRICS", ())
    if metrics:
        from meltcore.results.definitions import as_text

        epilog += f"\n\nwhat the words mean:\n{as_text(*metrics)}"
    parser = argparse.ArgumentParser(
        prog=f"meltcore {name}",
        description=module.HELP,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    module.add_arguments(parser)
    return parser


def _without_verb(arguments: list[str]) -> int:
    width = max(map(len, VERBS))
    verbs = "\n".join(f"  {name:<{width}}  {verb.help}" for name, verb in VERBS.items())
    parser = argparse.ArgumentParser(
        prog="meltcore",
        usage="meltcore VERB ...",
        description=f"Serve, score and certify LLM inference.\n\nverbs:\n{verbs}",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"meltcore {__version__}")
    if not arguments:
        parser.print_help()
        return EXIT_ERROR
    _, unknown = parser.parse_known_args(arguments)
    print(f"meltcore: no verb {unknown[0]!r}; there are {', '.join(VERBS)}", file=sys.stderr)
    return EXIT_ERROR


if __name__ == "__main__":
    sys.exit(main())
