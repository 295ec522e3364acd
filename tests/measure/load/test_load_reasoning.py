"""Reasoning counts as generated text and is never graded."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from meltcore.measure.load.config import LoadConfig
from meltcore.measure.load.record import RequestRecord
from meltcore.measure.load.run.runner import run_levels

REASONING, ANSWER = "12 and 7 more: nineteen. ", "It is eighteen."
USAGE = {"prompt_tokens": 5, "completion_tokens": 2}


class _Thinker(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else each small write waits up to 40 ms for the client's acknowledgement

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        self._send(json.dumps({"object": "list", "data": [{"id": "thinker", "object": "model"}]}), "application/json")

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        said = {"role": "assistant", "content": ANSWER, "reasoning_content": REASONING}
        if not asked["stream"]:
            body = {"choices": [{"message": said, "finish_reason": "stop"}], "usage": USAGE}
            self._send(json.dumps(body), "application/json")
            return
        chunks = [
            {"choices": [{"delta": {"reasoning": REASONING[:-2]}}]},
            {"choices": [{"delta": {"reasoning": REASONING[-2:], "content": ANSWER[:6]}}]},
            {"choices": [{"delta": {"content": ANSWER[6:]}}]},
            {"choices": [{"delta": {}, "finish_reason": "stop"}]},
            {"choices": [], "usage": USAGE},
        ]
        events = [*map(json.dumps, chunks), "[DONE]"]
        self._send("".join(f"data: {event}\n\n" for event in events), "text/event-stream")

    def _send(self, body: str, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())


@pytest.fixture
def thinker() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Thinker)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


@pytest.mark.slow
@pytest.mark.parametrize(("stream", "processes"), [(True, 1), (False, 1), (True, 2)])
def test_number_in_the_reasoning_is_not_an_answer(thinker: str, tmp_path: Path, stream: bool, processes: int) -> None:
    asked = tmp_path / "asked.jsonl"
    message = [{"role": "user", "content": "What is 12 + 7?"}]
    asked.write_text(
        "".join(json.dumps({"messages": message, "answer": value}) + "\n" for value in ("nineteen", "eighteen"))
    )
    seen: list[RequestRecord] = []
    config = LoadConfig(
        url=thinker, workload=str(asked), concurrency=(2,), num_prompts=(2,), num_warmups=0, stream=stream,
        keep_text=True, processes=processes,
    )  # fmt: skip
    [level] = run_levels(config, on_level=lambda _, records: seen.extend(records))
    assert (level.failures, level.accuracy) == ({}, 0.5)
    assert sorted((record.index, record.correct) for record in seen) == [(0, False), (1, True)]
    assert {(record.text, record.content) for record in seen} == {(REASONING + ANSWER, ANSWER)}
