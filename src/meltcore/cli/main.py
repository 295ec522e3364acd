"""`meltcore COMMAND ...`: find the command's module, parse the options, call it, and print errors as one line.

Only the module of the command is imported. It imports what it needs when it runs, so `meltcore --help` stays fast.
"""

import argparse
import difflib
import errno
import importlib
import os
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple

from meltcore import __version__
from meltcore.cli.output import OutputError, check_output, drop_output, flush_output
from meltcore.cli.signals import drop_unfinished
from meltcore.common.errors import MeltcoreError

EXIT_ERROR = 2  # wrong usage, a MeltcoreError or lost output; 1 means "it ran, and the answer is no"
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as in shells
EXIT_CLOSED_PIPE = 141  # 128 + SIGPIPE


class CommandParser(argparse.ArgumentParser):
    """Parses the arguments of a command. An error follows one line of usage and names what was probably meant.

    `refused` has options of other servers, and values behind an option, each with the reason why it is not taken. An
    address where a subcommand is expected is for `default_subcommand`.
    """

    refused: Mapping[str, str] = MappingProxyType({})
    default_subcommand = ""

    def format_usage(self) -> str:
        """Return one line with the arguments that are required. `--help` lists all others."""
        formatter = self._get_formatter()
        formatter.add_usage(
            self.usage, [each for each in self._actions if each.required or not each.option_strings], ()
        )
        return f"{formatter.format_help().rstrip()} [options] (--help lists them)\n"

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Return the parsed arguments. An unknown option is an error with the reason or the most similar option."""
        words = sys.argv[1:] if args is None else list(args)
        if self.default_subcommand and words and not words[0].startswith("-") and ":" in words[0]:
            words.insert(0, self.default_subcommand)
        parsed, unknown = self.parse_known_args(words, namespace)
        for word in unknown:
            flag = word.partition("=")[0]
            if flag in self.refused:
                self.error(f"argument {flag}: {self.refused[flag]}")
            if close := difflib.get_close_matches(flag, self.options(), n=1, cutoff=0.7):
                self.error(f"unrecognized arguments: {' '.join(unknown)} (did you mean {close[0]}?)")
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return parsed

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        reason = self.refused.get(f"{action.option_strings[-1]} {value}") if action.option_strings else None
        if reason is not None:
            raise argparse.ArgumentError(action, f"{value}: {reason}")
        super()._check_value(action, value)

    def options(self) -> Iterator[str]:
        """Yield the options of the command and of its subcommands."""
        yield from self._option_string_actions
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                for subparser in action.choices.values():
                    yield from subparser.options()


class Command(NamedTuple):
    """A command in the list of `meltcore --help`.

    Args:
        group: heading under which the list has the command.
        help: what the command does.
        folder: folder of the command's module, relative to `meltcore/cli`.
        needs_engine: whether the command needs the package's extra `engine`, which installs torch.
    """

    group: str
    help: str
    folder: str = ""
    needs_engine: bool = False

    @staticmethod
    def module(name: str) -> str:
        """Return the name of the module of the command `name`."""
        parts = ("meltcore.cli", COMMANDS[name].folder, name.replace("-", "_"))
        return ".".join(filter(None, parts))


_SERVE, _MEASURE, _TUNE, _GPUS, _RESULTS = (
    "Serve",
    "Measure a server",
    "Improve a server",
    "GPUs and machines",
    "Results",
)
COMMANDS: dict[str, Command] = {
    "serve": Command(_SERVE, "Serve a model through the OpenAI API.", needs_engine=True),
    "stop": Command(_SERVE, "Stop a server that was started with serve --daemon.", needs_engine=True),
    "up": Command(_SERVE, "Serve a fleet: all models of a fleet.yaml behind one address.", "fleet", needs_engine=True),
    "down": Command(_SERVE, "Drain and end a fleet.", "fleet", needs_engine=True),
    "ps": Command(_SERVE, "List the engines of a fleet.", "fleet", needs_engine=True),
    "logs": Command(_SERVE, "Print or follow the logs of a fleet's engines.", "fleet", needs_engine=True),
    "restart": Command(_SERVE, "Replace the engines of a fleet one after another.", "fleet", needs_engine=True),
    "sleep": Command(_SERVE, "Put a sleepable model of a fleet to sleep.", "fleet", needs_engine=True),
    "wake": Command(_SERVE, "Wake a model of a fleet before its turn.", "fleet", needs_engine=True),
    "reload": Command(_SERVE, "Let a fleet follow its changed fleet.yaml.", "fleet", needs_engine=True),
    "fleet": Command(_SERVE, "Write a fleet.yaml: models that share GPUs behind one address.", "fleet"),
    "plan": Command(_SERVE, "Say which models of a fleet fit on which GPU.", "fleet", needs_engine=True),
    "demo": Command(_SERVE, "Serve, check, load and report in one command.", needs_engine=True),
    "chat": Command(_SERVE, "Chat with a model of a server in the terminal."),
    "quantize": Command(_SERVE, "Write a model's weights in 8 or 4 bits.", needs_engine=True),
    "load": Command(_MEASURE, "Load any OpenAI-compatible server and measure it."),
    "eval": Command(_MEASURE, "Check a server's answers, API and speed, and score it."),
    "tune": Command(_TUNE, "Find a server's limits and best settings by restarting it.", "compare"),
    "compare": Command(_TUNE, "Judge a change by fresh starts of both servers, or compare two runs.", "compare"),
    "compare-backends": Command(
        _TUNE, "Measure the same work on ours, vLLM, SGLang, llama.cpp, TensorRT-LLM.", "compare"
    ),
    "baseline": Command(_TUNE, "Save fresh starts of a server to compare against.", "compare"),
    "profile": Command(_TUNE, "Find when a GPU was idle, and why, from a profiler's trace."),
    "bench": Command(_GPUS, "Measure the GPU score: the rate that this GPU sustains.", "score", needs_engine=True),
    "leaderboard": Command(_GPUS, "Rank GPU scores.", "score"),
    "certify": Command(_GPUS, "Check this node's GPUs and links and write a certificate.", "gpu"),
    "monitor": Command(_GPUS, "Log temperature, power, clocks, errors and activity of the GPUs.", "gpu"),
    "snapshot": Command(_GPUS, "Print hardware, driver and versions of this machine, or what changed.", "gpu"),
    "report": Command(_RESULTS, "Join a node's results to a report card, or render a run's page again."),
    "submit": Command(_RESULTS, "Collect a submission: start script, write-up, result files, report.", "score"),
}

_HELP_COLUMNS = 80
_EXAMPLES = """\
examples:
  meltcore demo
  meltcore serve meltcore/sums --port 8000
  meltcore load http://127.0.0.1:8000 --concurrency 10,100
  meltcore COMMAND --help
"""


def _fill_closed_streams() -> None:
    """Open closed standard streams (`2>&-`) as /dev/null.

    Otherwise the next socket would get the descriptor and receive the output.
    """
    if None in (sys.stdin, sys.stdout, sys.stderr):
        while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
            os.set_inheritable(fd, True)
        os.close(fd)
        sys.stdin, sys.stdout, sys.stderr = (
            stream or open(fd, mode, closefd=False)  # noqa: SIM115, for as long as the process lives
            for fd, (stream, mode) in enumerate(((sys.stdin, "r"), (sys.stdout, "w"), (sys.stderr, "w")))
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    The code is 0 for success, 1 if the answer is no, 2 for an error, and 130 if interrupted. It is 141 if the reader of
    the output is gone, as after `| head -1`. Nothing is printed then.
    """
    _fill_closed_streams()
    check_output()
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        try:
            code = _run(arguments)
        except SystemExit:  # of argparse, after --help too
            flush_output()
            raise
        sys.stdout.flush()
    except OutputError as error:
        drop_output()
        if error.errno == errno.EPIPE:
            return EXIT_CLOSED_PIPE
        name = arguments[0] if arguments and arguments[0] in COMMANDS else None
        print(f"meltcore {name}: {error}" if name else f"meltcore: {error}", file=sys.stderr)
        module = None if name is None else sys.modules.get(Command.module(name))
        return getattr(module, "EXIT_ERROR", EXIT_ERROR)
    return code


def _run(arguments: list[str]) -> int:
    if not arguments or arguments[0] not in COMMANDS:
        return _handle_missing_command(arguments)
    name = arguments[0]
    try:
        module = importlib.import_module(Command.module(name))
        args = command_parser(name, module).parse_args(arguments[1:])
        return int(args.act(args))
    except MeltcoreError as error:
        print(f"meltcore {name}: {error}", file=sys.stderr)
        return EXIT_ERROR
    except ModuleNotFoundError as error:
        if not COMMANDS[name].needs_engine or (error.name or "").startswith("meltcore"):
            raise
        print(
            f"meltcore {name}: needs the engine, and {error.name} is not installed: pip install 'meltcore[engine]'",
            file=sys.stderr,
        )
        return EXIT_ERROR
    except KeyboardInterrupt as interrupt:
        drop_unfinished(interrupt)
        print(f"meltcore {name}: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def command_parser(name: str, module: ModuleType) -> argparse.ArgumentParser:
    """Return the parser of a command. Its help ends with examples and with definitions of the command's metrics."""
    epilog = f"examples:\n{module.EXAMPLES.rstrip()}"
    metrics = getattr(module, "METRICS", ())
    if metrics:
        from meltcore.measure.documents.values.definitions import definitions_text

        epilog += f"\n\nmetrics:\n{definitions_text(*metrics)}"
    parser = CommandParser(
        prog=f"meltcore {name}",
        description=textwrap.fill(module.HELP, _HELP_COLUMNS),
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.refused = getattr(module, "REFUSED", parser.refused)
    parser.default_subcommand = getattr(module, "DEFAULT_SUBCOMMAND", "")
    parser.set_defaults(act=module.run)  # an option may choose another function
    module.add_arguments(parser)
    return parser


def _handle_missing_command(arguments: list[str]) -> int:
    width = max(map(len, COMMANDS))
    lines: list[str] = []
    for name, command in COMMANDS.items():
        heading = f"\n{command.group}:"
        lines += [heading] * (heading not in lines) + [f"  {name:<{width}}  {command.help}"]
    parser = argparse.ArgumentParser(
        prog="meltcore",
        usage="meltcore COMMAND ...",
        description="\n".join(["Serve, score and certify LLM inference.", *lines]),
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"meltcore {__version__}")
    if not arguments:
        print(parser.format_help(), end="")
        return EXIT_ERROR
    _, unknown = parser.parse_known_args(arguments)
    print(f"meltcore: unknown command {unknown[0]!r}; commands are {', '.join(COMMANDS)}", file=sys.stderr)
    return EXIT_ERROR


if __name__ == "__main__":
    sys.exit(main())
