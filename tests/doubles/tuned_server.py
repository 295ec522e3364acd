"""A scripted server with settings: faster with more sequences up to 4, out of memory past a length or a count."""

from __future__ import annotations

import argparse
import asyncio
import sys

import uvloop
from scripted_server import Script, ScriptedServer

LONGEST, MOST_SEQS = 5000, 5
ITL_S = {1: 0.02, 2: 0.01}  # more sequences: 5 ms


class TunedServer(ScriptedServer):
    def metrics(self) -> str:
        preempted = max(0, self.in_flight_peak - MOST_SEQS)
        return f"vllm:num_requests_running {self.in_flight}.0\nvllm:num_preemptions_total {preempted}.0\n"


async def serve(script: Script, port: int, seqs: int) -> None:
    await TunedServer(script).start(port=port)
    print(f"  context 60 tokens, {seqs} sequences per step", flush=True)
    print("INFO GPU KV cache size: 5,120 tokens", flush=True)
    await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--max-num-seqs", type=int, default=4)
    parser.add_argument("--max-num-batched-tokens", type=int, default=64)
    parser.add_argument("--alone-s", type=float, default=ITL_S[1], help="seconds per token of a single sequence")
    options = parser.parse_args()
    if options.length > LONGEST:
        sys.exit(f"ValueError: {options.length} tokens need more memory than there is")
    itl_s = (ITL_S | {1: options.alone_s}).get(options.max_num_seqs, 0.005)
    script = Script(ttft_s=0.005, itl_s=itl_s, tokens=60)
    uvloop.run(serve(script, options.port, options.max_num_seqs))


if __name__ == "__main__":
    main()
