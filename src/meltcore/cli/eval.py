"""`meltcore eval`: check any server's answers or API forms."""

import argparse
import sys

HELP = "Check a server's answers (200 held-out arithmetic problems) or its API forms. Any OpenAI-compatible server."
EXAMPLES = """\
  meltcore eval http://127.0.0.1:8000 conformance
  meltcore eval http://127.0.0.1:8000 problems --at-least 0.95
  meltcore eval https://example.com/v1 problems --model my-model --api-key $KEY
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", metavar="URL", help="the server's address, with or without /v1")
    parser.add_argument("what", choices=("problems", "conformance"), help="what to check")
    parser.add_argument("--model", help="the model's name (default: the first that /v1/models lists)")
    parser.add_argument("--api-key", help="sent as a bearer token")
    parser.add_argument("--concurrency", type=int, default=8, metavar="N", help="problems asked at once (default: 8)")
    parser.add_argument("--at-least", type=float, metavar="SHARE", help="exit 1 below this share right, such as 0.95")
    parser.add_argument("--out", default="runs", metavar="DIR", help="where run folders go (default: runs)")


def run(args: argparse.Namespace) -> int:
    from rich.console import Console

    from meltcore.errors import ConfigError
    from meltcore.evals import run_eval
    from meltcore.report import save
    from meltcore.results.progress import answers_bar, print_check
    from meltcore.results.runfolder import RunFolder
    from meltcore.results.wording import evaluation_line

    if args.concurrency < 1:
        raise ConfigError(f"--concurrency must be at least 1; got {args.concurrency}")
    console = Console()
    with answers_bar(console, args.what == "problems") as on_answer:
        result = run_eval(
            args.url,
            args.what,
            model=args.model,
            api_key=args.api_key,
            at_least=args.at_least,
            concurrency=args.concurrency,
            arguments=sys.argv[1:],
            on_answer=on_answer,
            on_check=lambda check: print_check(console, check),
        )
    folder = RunFolder.create(args.out, "eval")
    save(folder, result)
    if result.evaluation is not None:
        console.print(evaluation_line(result.evaluation))
    for reason in result.reasons:
        console.print(f"[red]{result.verdict}[/]: {reason}", highlight=False)
    console.print(f"report: {folder.report_path}", highlight=False, soft_wrap=True)
    return 0 if result.verdict == "OK" else 1
