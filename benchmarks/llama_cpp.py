"""llama.cpp as a reference on a CPU: its tokens and completions of a GGUF file, through its bindings (xllamacpp).

It runs in a process of its own, which ends with its answers or after a time limit.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_PROGRAM = """
import json, socket, sys, urllib.request, xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.warmup, params.fit_params, params.verbosity = sys.argv[1], False, False, -1
params.n_ctx, params.n_parallel, params.cpuparams.n_threads = 512, 1, 2
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    params.port = free.getsockname()[1]
server = xllamacpp.Server(params)
def tokenize(body):
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{server.listening_address}/tokenize", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=30) as response:
        return json.load(response)
for request in json.load(sys.stdin):
    answer = tokenize(request) if "content" in request else server.handle_completions(request)
    print("ANSWER" + json.dumps(answer), flush=True)
"""


def completions(path: Path, requests: Sequence[Mapping[str, Any]], limit_s: float) -> list[list[dict[str, Any]]]:
    """Return the tokens of each completion, with `id` and `logprob`. requests: bodies of /v1/completions."""
    answers = _ask(path, [{"temperature": 0, "logprobs": 1, **request} for request in requests], limit_s)
    for answer in answers:
        if "choices" not in answer or not answer["choices"][0]["logprobs"]:
            raise RuntimeError(f"llama.cpp: {answer}")
    return [answer["choices"][0]["logprobs"]["content"] for answer in answers]


def tokens(path: Path, texts: Sequence[str], limit_s: float, *, special: bool = False) -> list[list[int]]:
    """Return the token ids of each text. special: names of special tokens in a text are these tokens."""
    requests = [{"content": text, "add_special": False, "parse_special": special} for text in texts]
    return [answer["tokens"] for answer in _ask(path, requests, limit_s)]


def _ask(path: Path, requests: Sequence[Mapping[str, Any]], limit_s: float) -> list[dict[str, Any]]:
    command = [sys.executable, "-c", _PROGRAM, str(path)]
    finished = subprocess.run(
        command, input=json.dumps(requests), capture_output=True, text=True, timeout=limit_s, check=False
    )
    lines = [line.removeprefix("ANSWER") for line in finished.stdout.splitlines() if line.startswith("ANSWER")]
    if len(lines) != len(requests):
        raise RuntimeError(f"llama.cpp answered {len(lines)} of {len(requests)} requests: {finished.stderr[-2000:]}")
    return [json.loads(line) for line in lines]
