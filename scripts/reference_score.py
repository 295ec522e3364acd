"""Make a reference score that the package ships from the result of `meltcore bench`.

    python scripts/reference_score.py benchmarks/results/gpu_score/h200.json src/meltcore/bundled/scores/h200.json

Keeps what a leaderboard and a ratio need: levels, sustained run, spread, health. Leaves out the time series and what
names the machine: arguments, UUIDs, host. `--check` compares instead of writing, and fails where they differ.
"""

import argparse
import sys
from pathlib import Path

import msgspec

from meltcore.common.errors import ConfigError
from meltcore.common.files import read_document, write_document
from meltcore.measure.documents.score import UTILIZATION, ScoredRun
from meltcore.measure.documents.values.scores import expectations, totals


def trim(run: ScoredRun) -> ScoredRun:
    """The reference of a run, in place. Raises ConfigError for a run that does not rank."""
    score = run.score
    if score.output_tokens_per_s is None or score.not_comparable or run.verdict != "OK":
        raise ConfigError("a reference must be a complete, comparable run with verdict OK")
    score.totals, score.expectations = totals(score), expectations(score)
    for device in score.devices:
        for level in [*device.levels, *([device.sustained] if device.sustained else [])]:
            means = {key: device.mean_utilization(level, key) for key in UTILIZATION}
            level.utilization = {key: round(value, 2) for key, value in means.items() if value is not None}
        device.lines = None
        device.uuid = None
    run.fingerprint.arguments = []
    run.fingerprint.kernel = ""
    run.fingerprint.gpus = [msgspec.structs.replace(gpu, uuid="") for gpu in run.fingerprint.gpus]
    return run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", help="result.json of meltcore bench")
    parser.add_argument("reference", help="the file to write")
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    args = parser.parse_args()
    reference = trim(read_document(args.result, ScoredRun))
    if not args.check:
        print(f"written: {write_document(Path(args.reference), reference)}")
        return 0
    same = read_document(args.reference, ScoredRun) == reference
    print(f"{args.reference} {'equals' if same else 'differs from'} what {args.result} makes")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
