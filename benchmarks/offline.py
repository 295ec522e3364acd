"""Output tokens per second of our engine's offline API on dummy weights, beside a peer's on the same prompts.

A level of c is c requests that start together, of uniform random prompt lengths and equal output lengths; EOS ignored,
greedy, prefix cache off, prefill in the wall time. The median of the repetitions is quoted, with its share of the floor
(floors.py). With --debug uniform-routing a row says how many experts a decode step met, and does not count where that
is not what was to come. All seven levels of the throughput evaluation, 1 to 64, make a speed sum.

    python benchmarks/peer_vllm.py --model FOLDER                              # the peer, first
    python benchmarks/offline.py --peer benchmarks/results/offline_vllm.json
    python benchmarks/offline.py --model Qwen/Qwen3.5-35B-A3B --debug uniform-routing --seqs 64 \\
        --works "1,8,64@1024:1024/256" --peer benchmarks/results/NAME.json --name offline_35b
"""

from __future__ import annotations

import argparse
import json
import statistics
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from bench_output import Row, need_gpu, write_result
from floors import Limits, Needs, floor_s
from offline_reach import RATE, REACH, START, SUM, speed_sums
from offline_work import LONG, SHORT, Measured, Work, measure, parse_works, process_age_s
from uniform_routing import met_by, tell

from meltcore import LLM, SamplingParams
from meltcore.layers.uniform_routing import forget_drawn


class Peer:
    """A peer's result file, or nothing. Leaves where the peer did not route as we are to."""

    def __init__(self, path: Path | None, uniform: bool) -> None:
        found: dict[str, Any] = json.loads(path.read_text()) if path else {"rows": [], "versions": {}}
        if path and uniform != (found.get("routing") == "uniform_random"):
            raise SystemExit(f"{path} was measured with routing {found.get('routing')}; see --debug uniform-routing")
        self.name = " ".join(("vLLM", found["versions"].get("vllm", "")))
        self.start_s: float | None = found.get("process_start_to_first_token_s")
        self._rates = {row["work"]: statistics.median(row["rates"]) for row in found["rows"]}

    def rate(self, work: Work) -> float | None:
        return self._rates.get(str(work))

    def beside(self, row: Row, ours: float, theirs: float | None, *, lower_is_better: bool = False) -> Row:
        if theirs is not None:
            row.peer, row.peer_value = self.name, theirs
            row.ratio = theirs / ours if lower_is_better else ours / theirs
        return row

    def rows(self, measured: Measured) -> list[Row]:
        work, ours = str(measured.work), measured.median
        theirs = self.rate(measured.work)
        row = Row(work=work, unit=RATE, value=ours)
        rows = [self.beside(row, ours, theirs)]
        if measured.work.requests == 1:
            milliseconds = 1000 / ours
            row = Row(work=work, unit="ms a token", value=milliseconds)
            rows.append(self.beside(row, milliseconds, 1000 / theirs if theirs else None, lower_is_better=True))
        return rows

    def sums(self, rates: dict[Work, float]) -> list[Row]:
        theirs = speed_sums(list(rates), self.rate)
        return [
            self.beside(Row(work=work, unit=SUM, value=value), value, theirs.get(work))
            for work, value in speed_sums(list(rates), rates.get).items()
        ]


def shares_of_floors(llm: LLM, rates: dict[Work, float]) -> dict[str, float]:
    """By work: what share its rate is of the one that the device could at best give."""
    needs, limits = Needs.of(llm.engine.runner.model), Limits.measure()
    shares = {}
    for work, rate in rates.items():
        at_once = min(work.requests, llm.engine.max_num_seqs)
        shares[str(work)] = rate * floor_s(needs, work, at_once, limits) / (work.requests * work.out)
    return shares


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="Qwen/Qwen3-0.6B")
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
    need_gpu(args.tp, args.model)

    debug = ("no-prefix-cache", *filter(None, args.debug.split(",")))
    settings = {"load_format": "dummy", "tp": args.tp, "max_model_len": 4096, "max_num_seqs": args.seqs, "debug": debug}
    peer = Peer(args.peer, "uniform-routing" in debug)
    llm = LLM(args.model, max_num_batched_tokens=args.budget, **settings)

    def generate(prompts: list[list[int]], out: int) -> int:
        answers = llm.generate(prompts, SamplingParams(max_tokens=out, ignore_eos=True))
        return sum(len(answer.token_ids) for answer in answers)

    generate([[1000] * 8], 1)
    start_s = process_age_s()
    start = Row(work=START, unit="s", value=start_s)
    rows = [peer.beside(start, start_s, peer.start_s, lower_is_better=True)]
    rates: dict[Work, float] = {}
    forget_drawn()
    for measured in measure(parse_works(args.works), generate, args.reps, args.seed):
        print(
            f"{measured.work}: {measured.median:,.0f} tok/s of {[round(rate) for rate in measured.rates]}", flush=True
        )
        rates[measured.work] = measured.median
        found = peer.rows(measured)
        if "uniform-routing" in debug:
            met = met_by(llm, measured.work.requests)
            for row in found:
                tell(row, met)
            forget_drawn()
        rows += found
    for row in peer.sums(rates):
        row.invalid = next((level.invalid for level in rows if level.invalid), None)
        rows.append(row)
    shares = shares_of_floors(llm, rates) if torch.cuda.is_available() else {}
    llm.close()
    for row in rows:
        row.limit_share = shares.get(row.work)
        row.reach = REACH.get((args.model, args.tp), {}).get((row.work, row.unit))
    versions = {"torch": metadata.version("torch"), "triton": metadata.version("triton")}
    write_result(args.name, rows, versions)


if __name__ == "__main__":
    main()
