"""`meltcore submit`: collect finished evaluations in a folder for submission."""

import argparse

HELP = (
    "Collect a submission: start script, one-page write-up made of the documentation, results/correctness.json and "
    "results/throughput.json in the schema of the hackathon's public harness, and the report. With --rules hackathon, "
    "refuse what its rules forbid in the served process, and record what was checked."
)
EXAMPLES = """\
  meltcore submit my-submission --rules hackathon          the newest runs under runs/
  meltcore submit my-submission runs/20261121T120000Z-eval-all
  meltcore submit my-submission runs/GSM8K_RUN runs/THROUGHPUT_RUN

exit status: 0 collected, 1 refused by the rules or a score of 0, 2 results are missing or wrong usage
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments for the folder and the runs, and the options of the command."""
    from meltcore.common.options import add_options
    from meltcore.measure.experiments.evals.config import SubmissionConfig

    parser.add_argument("folder", metavar="DIR", help="Folder of the submission: a new or an empty one.")
    parser.add_argument(
        "runs", nargs="*", metavar="RUN", help="Run folders of eval, or folders of them (default: runs)."
    )
    add_options(parser, SubmissionConfig)


def run(args: argparse.Namespace) -> int:
    """Collect the submission. Returns 1 if a rule refuses the submission or its score is zero, else 0."""
    from pathlib import Path

    from rich.console import Console

    from meltcore.common.options import from_options
    from meltcore.measure.documents.runfolder import RunFolder
    from meltcore.measure.documents.values.formatting import eval_score_line
    from meltcore.measure.documents.values.progress import print_check
    from meltcore.measure.experiments.evals.config import SubmissionConfig
    from meltcore.measure.experiments.evals.submission import collect, find_evidence
    from meltcore.measure.report.render import save_document

    console = Console(highlight=False)
    folder = Path(args.folder)
    evidence = find_evidence(args.runs or ["runs"])
    for evidence_run in evidence.runs:
        console.print(f"run: {evidence_run.path}", soft_wrap=True, markup=False)
    record = collect(folder, evidence, from_options(SubmissionConfig, args))
    for gate in record.gates:
        print_check(console, gate)
    if record.verdict == "REFUSED":
        console.print(f"refused by the rules ({record.rules}); recorded in {folder}", style="red", soft_wrap=True)
        return 1
    save_document(RunFolder(folder).result_path, evidence.result)
    score = evidence.result.eval_score
    if score is not None:
        console.print(eval_score_line(score), markup=False)
    console.print(f"score of the result files: {record.public_score:,.2f}", markup=False)
    console.print(f"submission: {folder}", soft_wrap=True, markup=False)
    return 1 if score is None or score.zero_reasons else 0
