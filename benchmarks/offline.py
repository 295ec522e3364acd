"""Output tokens per second of our engine's offline API on dummy weights, beside a peer's on the same prompts.

A GGUF file is loaded with its weights, unless --load-format dummy only takes their shapes and formats.

A level of c is c requests that start together, of uniform random prompt lengths and equal output lengths; EOS ignored,
greedy, prefix cache off, prefill in the wall time. The median of the repetitions is quoted, with its share of the floor
(floors.py), beside the fastest peer. Notes say what the GPU spent. With --debug uniform-routing a row says how many
experts a decode step used, and is invalid where that is not the expected number. All seven levels of the throughput
evaluation, 1 to 64, make a weighted throughput. --speculative-config is in the subject, and shares of floors are left
out: they count one token per sequence and step.

    python benchmarks/peer_vllm.py --model FOLDER                              # the peers, first
    python benchmarks/peer_sglang.py --model FOLDER
    python benchmarks/offline.py --peer benchmarks/results/peer_vllm/h200.json benchmarks/results/peer_sglang/h200.json
    python benchmarks/offline.py --model Qwen/Qwen3.5-35B-A3B --debug uniform-routing --seqs 64 \\
        --works "1,8,64@1024:1024/256" --peer benchmarks/results/peer_vllm/h200.json
    python benchmarks/offline.py --model Qwen/Qwen3.5-35B-A3B --debug uniform-routing --seqs 64 \\
        --works "1,4,8,16,32,64@1024:1024/256" --speculative-config '{"method": "mtp", "num_speculative_tokens": 3, \\
        "rejection_sample_method": "synthetic", "synthetic_acceptance_length": 3.33}'
    python benchmarks/offline.py --model /dev/shm/gemma-3-27b-q4_0.gguf --works "1,16,64,256@1024:1024/256" \\
        --peer benchmarks/results/peer_llamacpp/h200.json
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
from machine import EnergyMeter, Gpu, Spent
from offline_reach import RATE, START, SUM, TARGETS, weighted_throughputs
from offline_work import LONG, SHORT, VOCAB, Measured, Work, measure, parse_works, process_age_s
from uniform_routing import experts_used_by, record

from meltcore import LLM, SamplingParams
from meltcore.layers.uniform_routing import clear_routing_record
from meltcore.settings.speculation import SpeculativeConfig, speculative_settings


def newest_run(path: Path, subject: str) -> dict[str, Any]:
    """The newest run of a subject in a result file. Exits where there is none."""
    runs = [run for run in json.loads(path.read_text())["runs"] if run["subject"] == subject]
    if not runs:
        raise SystemExit(f"{path} has no run of {subject}; name one with --peer-subject")
    merged: dict[str, Any] = {**runs[-1], "rows": [row for run in runs for row in run["rows"]]}
    return merged


NAMES = {"llama.cpp": "llama.cpp", "sglang": "SGLang", "vllm": "vLLM"}


class Peer:
    """The rates in a peer's result file. Exits where the peer routed experts in another way."""

    def __init__(self, path: Path, subject: str, *, uniform: bool) -> None:
        found = newest_run(path, subject)
        if uniform != (found.get("routing") == "uniform_random"):
            raise SystemExit(f"{path} was measured with routing {found.get('routing')}; see --debug uniform-routing")
        versions = found["versions"]
        package = next(package for package in NAMES if package in versions)
        self.name = f"{NAMES[package]} {versions[package]}"
        self.start_s: float | None = found.get("process_start_to_first_token_s")
        self._rates = {row["work"]: statistics.median(row["rates"]) for row in found["rows"]}

    def rate(self, work: Work) -> float | None:
        return self._rates.get(str(work))


class Peers:
    """Any number of peers. A row stands beside the best of them that has it."""

    def __init__(self, peers: list[Peer]) -> None:
        self.peers = peers

    def beside(self, row: Row, ours: float, values: list[float | None], *, lower_is_better: bool = False) -> Row:
        """values: in the order of the peers."""
        found = [(value, peer.name) for value, peer in zip(values, self.peers, strict=True) if value is not None]
        if found:
            row.peer_value, row.peer = (min if lower_is_better else max)(found)
            row.ratio = row.peer_value / ours if lower_is_better else ours / row.peer_value
        return row

    def start(self, ours: float) -> Row:
        row = Row(work=START, unit="s", value=ours)
        return self.beside(row, ours, [peer.start_s for peer in self.peers], lower_is_better=True)

    def rows(self, measured: Measured) -> list[Row]:
        work, ours = str(measured.work), measured.median
        theirs = [peer.rate(measured.work) for peer in self.peers]
        repeats = measured.rates if len(measured.rates) > 1 else []
        row = Row(work=work, unit=RATE, value=ours, repeats=tuple(Row(work=work, unit=RATE, value=v) for v in repeats))
        rows = [self.beside(row, ours, theirs)]
        if measured.work.requests == 1:
            milliseconds, unit = 1000 / ours, "ms per token"
            times = tuple(Row(work=work, unit=unit, value=1000 / rate) for rate in repeats)
            row = Row(work=work, unit=unit, value=milliseconds, repeats=times)
            their_times = [1000 / rate if rate else None for rate in theirs]
            rows.append(self.beside(row, milliseconds, their_times, lower_is_better=True))
        return rows

    def sums(self, rates: dict[Work, float]) -> list[Row]:
        theirs = [weighted_throughputs(list(rates), peer.rate) for peer in self.peers]
        return [
            self.beside(Row(work=work, unit=SUM, value=value), value, [each.get(work) for each in theirs])
            for work, value in weighted_throughputs(list(rates), rates.get).items()
        ]


def shares_of_floors(llm: LLM, rates: dict[Work, float]) -> dict[str, float]:
    """By work: the fraction that its rate is of the rate at the floor."""
    needs, limits = Needs.of(llm.engine.runner.model), Limits.measure()
    shares = {}
    for work, rate in rates.items():
        concurrency = min(work.requests, llm.engine.max_num_seqs)
        shares[str(work)] = rate * floor_s(needs, work, concurrency, limits) / (work.requests * work.out)
    return shares


def notes_on(llm: LLM, measured: list[Measured], spent: dict[Work, Spent]) -> list[str]:
    """For each work: the keys and values of its running requests when they end, the prompts' share, what it took."""
    needs, notes = Needs.of(llm.engine.runner.model), []
    for each in measured:
        context = (each.work.low + each.work.high) / 2 + each.work.out
        cached = min(each.work.requests, llm.engine.max_num_seqs) * needs.context_bytes(context)
        share = "" if each.prompt_share is None else f"; prompts take {each.prompt_share:.0%} of the time"
        power = f"; {spent[each.work]}" if each.work in spent else ""
        notes.append(f"{each.work}: {cached / 1e9:.2f} GB of keys and values at the end{share}{power}")
    drafted, accepted = llm.engine.stats().drafted, llm.engine.stats().accepted
    if sum(drafted):
        tokens = 1 + sum(accepted) / drafted[0]
        notes.append(f"{drafted[0]:,.0f} windows of drafts were checked, and yielded {tokens:.2f} tokens on average")
    return notes


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="Qwen/Qwen3-0.6B")
    parser.add_argument("--works", default=f"{SHORT} {LONG}", help='Work as "LEVELS@LOW:HIGH/OUT ...".')
    parser.add_argument("--seqs", type=int, default=1024)
    parser.add_argument("--max-model-len", type=int, default=4096, help="Of prompt and answer together.")
    parser.add_argument("--budget", type=int, help="Tokens per step (default: that of the offline API).")
    parser.add_argument("--tp", type=int, default=1, help="Tensor-parallel size.")
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--vocab", type=int, help=f"Prompts have token ids below it, the peer's too (default: {VOCAB:,}, or all)."
    )
    parser.add_argument("--load-format", choices=("auto", "dummy"), help="Default: auto for a GGUF file, else dummy.")
    parser.add_argument("--prompt-share", action="store_true", help="Also time the prompts alone, once per work.")
    parser.add_argument("--debug", default="", help="Debug switches, separated by commas.")
    parser.add_argument("--speculative-config", type=speculative_settings, metavar="JSON")
    parser.add_argument("--peer", type=Path, nargs="+", default=[], help="Peers' result files of the same run.")
    parser.add_argument("--peer-subject", help="Subject of the peer's run in that file (default: the model).")
    parser.add_argument("--subject", help="Subject of the run in the result file (default: the model).")
    parser.add_argument("--out", type=Path, help="Result file (default: the tracked results/offline/GPU.json).")
    args = parser.parse_args()
    need_gpu(args.tp, args.model)

    debug = tuple(filter(None, args.debug.split(",")))
    settings = {
        "load_format": args.load_format or ("auto" if args.model.endswith(".gguf") else "dummy"),
        "tensor_parallel_size": args.tp,
        "max_model_len": args.max_model_len,
        "max_num_seqs": args.seqs,
        "debug": debug,
        "enable_prefix_caching": False,
        "speculative_config": args.speculative_config,
    }
    name = Path(args.model).name if args.model.endswith(".gguf") else args.model
    speculation = SpeculativeConfig.of(args.speculative_config)
    speculates = f", {speculation.num_speculative_tokens} drafts by {speculation.description}" if speculation else ""
    subject = args.subject or name + speculates
    peers = Peers(
        [Peer(path, args.peer_subject or name + speculates, uniform="uniform-routing" in debug) for path in args.peer]
    )
    llm = LLM(args.model, max_num_batched_tokens=args.budget, **settings)

    vocab = args.vocab or min(VOCAB, llm.engine.vocab_size)

    def generate(prompts: list[list[int]], out: int) -> int:
        answers = llm.generate(prompts, SamplingParams(max_tokens=out, ignore_eos=True))
        return sum(len(answer.token_ids) for answer in answers)

    generate([[vocab - 1] * 8], 1)
    rows = [peers.start(process_age_s())]
    rates: dict[Work, float] = {}
    all_measured: list[Measured] = []
    spent: dict[Work, Spent] = {}
    meter = EnergyMeter(Gpu().read) if torch.cuda.is_available() and args.tp == 1 else None
    clear_routing_record()
    works = parse_works(args.works)
    for measured in measure(works, generate, args.reps, args.seed, vocab, prompt_share=args.prompt_share, meter=meter):
        print(
            f"{measured.work}: {measured.median:,.0f} tok/s of {[round(rate) for rate in measured.rates]}", flush=True
        )
        rates[measured.work] = measured.median
        all_measured.append(measured)
        if meter and (took := meter.spent()):
            spent[measured.work] = took
        found = peers.rows(measured)
        if "uniform-routing" in debug:
            experts = experts_used_by(llm, measured.work.requests)
            for row in found:
                record(row, experts)
            clear_routing_record()
        rows += found
    for row in peers.sums(rates):
        row.invalid = next((level.invalid for level in rows if level.invalid), None)
        rows.append(row)
    shares = shares_of_floors(llm, rates) if torch.cuda.is_available() and not speculation else {}
    notes = notes_on(llm, all_measured, spent)
    llm.close()
    for row in rows:
        row.limit_share = shares.get(row.work)
        row.target = TARGETS.get((subject, args.tp), {}).get((row.work, row.unit))
    versions = {"torch": metadata.version("torch"), "triton": metadata.version("triton")}
    write_result(rows, versions, notes, subject=subject, gpus=args.tp, out=args.out)


if __name__ == "__main__":
    main()
