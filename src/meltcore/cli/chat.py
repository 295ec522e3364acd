"""`meltcore chat`: chat with a model of an OpenAI-compatible server in a terminal."""

import argparse

HELP = "Chat with a model of an OpenAI-compatible server in the terminal."
EXAMPLES = """\
  meltcore chat                                      the server on port 8000 of this machine
  meltcore chat http://127.0.0.1:8000 --system "Answer in one sentence."
  echo "What is 12 + 30?" | meltcore chat --model meltcore/sums
"""
_HINT = "Ctrl-C stops an answer, Ctrl-D ends the chat, /new begins a new one."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    from meltcore.common.options import number

    parser.add_argument(
        "url",
        nargs="?",
        default="http://127.0.0.1:8000",
        metavar="URL",
        help="Address of the server, with or without /v1 (default: http://127.0.0.1:8000).",
    )
    parser.add_argument("--model", metavar="NAME", help="Name of the model (default: the first in /v1/models).")
    parser.add_argument("--system", metavar="TEXT", help="The system message, before the first question.")
    parser.add_argument("--max-tokens", type=number(int, minimum=1), metavar="N", help="Tokens of an answer at most.")
    parser.add_argument("--temperature", type=number(float, minimum=0.0), metavar="T", help="Temperature of sampling.")
    parser.add_argument("--api-key", metavar="KEY", help="API key of the server.")


def run(args: argparse.Namespace) -> int:
    """Ask for questions and print the answers as they come. Returns 1 if the last question got no answer, else 0.

    Without a terminal each line of the input is a question. Raises ConfigError if the server does not answer or has no
    model.
    """
    import io
    import sys

    from meltcore.measure.load.wire.connection import resolve_target, run_coroutine
    from meltcore.measure.load.wire.printed_chat import print_answer
    from meltcore.measure.load.wire.probe import first_model

    target = resolve_target(args.url, args.api_key)
    model = args.model or run_coroutine(first_model(target))
    sampling = {"max_tokens": args.max_tokens, "temperature": args.temperature}
    request = {"model": model, "stream": True, **{key: value for key, value in sampling.items() if value is not None}}
    beginning = [] if args.system is None else [{"role": "system", "content": args.system}]
    is_terminal = sys.stdin.isatty()
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # a request must be valid Unicode
    if is_terminal:
        import readline  # noqa: F401 - gives input() a history

        print(f"{model} at {target.url}. {_HINT}")
    messages, is_answered = [*beginning], True
    while (question := _read(is_terminal)) is not None:
        if question == "/new":
            messages = [*beginning]
        elif question:
            messages.append({"role": "user", "content": question})
            answer, error = print_answer(target, {**request, "messages": messages})
            print(flush=True)
            is_answered = error is None
            if error is not None:
                print(f"meltcore chat: {error}", file=sys.stderr)
            if answer and is_answered:
                messages.append({"role": "assistant", "content": answer})
            else:
                messages.pop()
    return 0 if is_answered else 1


def _read(is_terminal: bool) -> str | None:
    """Return the next question without spaces around it, or None at the end of the input."""
    while True:
        try:
            return input("> " if is_terminal else "").strip()
        except EOFError:
            if is_terminal:
                print()
            return None
        except KeyboardInterrupt:
            if not is_terminal:
                raise
            print(f"\n{_HINT}")
