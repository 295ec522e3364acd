"""Output tokens per second of our engine's offline API on dummy weights, beside a peer's on the same prompts.

A level of c is c requests that start together, of uniform random prompt lengths and equal output lengths; EOS ignored,
greedy, prefix cache off, prefill in the wall time. The median of the repetitions is quoted. With --debug
uniform-routing a row says how many experts a decode step met, and does not count where that is not what was to come.

    python benchmarks/peer_vllm.py --model FOLDER                              # the peer, first
    python benchmarks/offline.py --peer benchmarks/results/offline_vllm.json
"""

from __future__ import annotations

import argparse
import json
from importlib import metadata
from pathlib import Path
from typing import Any

from bench_output import Row, write_result
from offline_work import LONG, SHORT, Measured, measure, parse_works, process_age_s
from uniform_routing import met_by, tell

from meltcore import LLM, SamplingParams
from meltcore.layers.uniform_routing import forget_drawn

# What was asked of us for REACH_MODEL: times the peer's rate, milliseconds and seconds.
REACH_MODEL = "Qwen/Qwen3-0.6B"
REACH = {
    ("10 requests, 128 to 1024 in / 128 out", "output tokens/s"): 2.0,
    ("100 requests, 128 to 1024 in / 128 out", "output tokens/s"): 1.4,
    ("400 requests, 128 to 1024 in / 128 out", "output tokens/s"): 1.2,
    ("1,000 requests, 128 to 1024 in / 128 out", "output tokens/s"): 1.25,
    ("2,000 requests, 128 to 1024 in / 128 out", "output tokens/s"): 1.25,
    ("64 requests, 1024 in / 1024 out", "output tokens/s"): 1.2,
    ("256 requests, 1024 in / 1024 out", "output tokens/s"): 1.1,
    ("1 requests, 128 to 1024 in / 128 out", "ms a token"): 0.75,
    ("process start to first token", "s"): 20.0,
}


class Peer:
    """A peer's result file, or nothing."""

    def __init__(self, path: Path | None) -> None:
        found: dict[str, Any] = json.loads(path.read_text()) if path else {"rows": [], "versions": {}}
        self.name = " ".join(("vLLM", found["versions"].get("vllm", "")))
        self.start_s: float | None = found.get("process_start_to_first_token_s")
        self._rates = {row["work"]: sorted(row["rates"])[len(row["rates"]) // 2] for row in found["rows"]}

    def beside(self, row: Row, ours: float, theirs: float | None, *, lower_is_better: bool = False) -> Row:
        if theirs is not None:
            row.peer, row.peer_value = self.name, theirs
            row.ratio = theirs / ours if lower_is_better else ours / theirs
        return row

    def rows(self, measured: Measured) -> list[Row]:
        work, ours = str(measured.work), measured.median
        theirs = self._rates.get(work)
        row = Row(work=work, unit="output tokens/s", value=ours)
        rows = [self.beside(row, ours, theirs)]
        if measured.work.requests == 1:
            milliseconds = 1000 / ours
            row = Row(work=work, unit="ms a token", value=milliseconds)
            rows.append(self.beside(row, milliseconds, 1000 / theirs if theirs else None, lower_is_better=True))
        return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default=REACH_MODEL)
    parser.add_argument("--works", default=f"{SHORT} {LONG}", help='"LEVELS@LOW:HIGH/OUT ..."')
    parser.add_argument("--seqs", type=int, default=1024)
    parser.add_argument("--budget", type=int, help="tokens a step; the offline API's own default")
    parser.add_argument("--tp", type=int, default=1, help="GPUs that share the model")
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--debug", default="", help="debug switches, with commas")
    parser.add_argument("--peer", type=Path, help="a peer's result of the same hour")
    parser.add_argument("--name", default="offline", help="of the result file")
    args = parser.parse_args()

    debug = ("no-prefix-cache", *filter(None, args.debug.split(",")))
    settings = {"load_format": "dummy", "tp": args.tp, "max_model_len": 4096, "max_num_seqs": args.seqs, "debug": debug}
    llm = LLM(args.model, max_num_batched_tokens=args.budget, **settings)

    def generate(prompts: list[list[int]], out: int) -> int:
        answers = llm.generate(prompts, SamplingParams(max_tokens=out, ignore_eos=True))
        return sum(len(answer.token_ids) for answer in answers)

    generate([[1000] * 8], 1)
    peer, start_s = Peer(args.peer), process_age_s()
    start = Row(work="process start to first token", unit="s", value=start_s)
    rows = [peer.beside(start, start_s, peer.start_s, lower_is_better=True)]
    forget_drawn()
    for measured in measure(parse_works(args.works), generate, args.reps, args.seed):
        print(
            f"{measured.work}: {measured.median:,.0f} tok/s of {[round(rate) for rate in measured.rates]}", flush=True
        )
        found = peer.rows(measured)
        if "uniform-routing" in debug:
            met = met_by(llm, measured.work.requests)
            for row in found:
                tell(row, met)
            forget_drawn()
        rows += found
    llm.close()
    if args.model == REACH_MODEL and args.tp == 1:
        for row in rows:
            row.reach = REACH.get((row.work, row.unit))
    versions = {"torch": metadata.version("torch"), "triton": metadata.version("triton")}
    write_result(args.name, rows, versions)


if __name__ == "__main__":
    main()
