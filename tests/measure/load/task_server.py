"""A scripted server of translation, transcription and synthesis: answers take known times and have known content."""

from __future__ import annotations

import json
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from email import message_from_bytes, policy
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from waiting import WAIT_S

SPEECH_S = 0.5  # of every answer of synthesis, 16-bit mono at 24 kHz
SPEECH = b"\x01\x02" * int(SPEECH_S * 24_000)


class TaskServer(ThreadingHTTPServer):
    """`behavior` is what a test changes: delays in seconds, faults, known answers, and whether tokens are counted."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.behavior: dict[str, Any] = {}
        self.received: list[dict[str, Any]] = []
        self.url = f"http://127.0.0.1:{self.server_port}"
        self._lock = threading.Lock()
        self.num_posts = 0

    def refuses(self) -> bool:
        """Whether this request gets a 429: those whose numbers are in `refuse`."""
        with self._lock:
            self.num_posts += 1
            return self.num_posts in self.behavior.get("refuse", ())


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else each small write waits up to 40 ms for the client's acknowledgement
    server: TaskServer

    def log_message(self, format: str, *args: Any) -> None:
        """Stay silent."""

    def do_GET(self) -> None:
        if self.path == "/metrics":
            read = self.server.behavior.get("metrics")
            self._reply(read(self.server).encode() if read else b"", 200 if read else 404)
            return
        self._reply(json.dumps({"data": self.server.behavior.get("models", [{"id": "scripted"}])}).encode())

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        behavior = self.server.behavior
        time.sleep(behavior.get("delay_s", 0.0))
        if self.server.refuses():
            self._reply(b'{"error": {"message": "the queue is full"}}', 429, {"retry-after": behavior["retry_after"]})
        elif behavior.get("status"):
            self._reply(b'{"error": {"message": "the queue is full"}}', status=behavior["status"])
        elif behavior.get("drop"):
            self.close_connection = True
        elif self.path == "/v1/audio/transcriptions":
            self._transcribe(body)
        elif self.path == "/v1/translate":
            self._translate(json.loads(body))
        elif self.path == "/v1/completions":
            self._complete(json.loads(body))
        else:
            self._speak(json.loads(body))

    def _translate(self, request: dict[str, Any]) -> None:
        self.server.received.append(request)
        behavior = self.server.behavior
        sentences = request["sentences"]
        known = behavior.get("answers", {})
        translations = [known.get(each, behavior.get("text", f"<{each}>")) for each in sentences]
        answer: dict[str, Any] = {"translations": translations}
        if "translations" in behavior:
            answer["translations"] = behavior["translations"]
        if "tokens" in behavior:
            answer["usage"] = {"prompt_tokens": behavior["tokens"], "completion_tokens": 3 * len(sentences)}
        self._reply(json.dumps(answer).encode())

    def _transcribe(self, body: bytes) -> None:
        head = f"Content-Type: {self.headers['content-type']}\r\n\r\n".encode()
        form = message_from_bytes(head + body, policy=policy.HTTP)
        parts = {part.get_param("name", header="content-disposition"): part for part in form.iter_parts()}
        request = {str(name): part.get_payload(decode=True) for name, part in parts.items()}
        self.server.received.append(request)
        behavior = self.server.behavior
        text = behavior.get("answers", {}).get(request["file"], behavior.get("text", "hello"))
        self._reply(json.dumps({"text": text}).encode())

    def _complete(self, request: dict[str, Any]) -> None:
        self.server.received.append(request)
        usage = {"prompt_tokens": len(request["prompt"]), "completion_tokens": 2}
        choices = [{"index": 0, "text": "a"}, {"index": 0, "text": "b", "finish_reason": "length"}]
        events = [{"choices": [choice], "usage": usage} for choice in choices]
        lines = [f"data: {json.dumps(event)}\n\n" for event in events]
        self._reply("".join([*lines, "data: [DONE]\n\n"]).encode(), headers={"content-type": "text/event-stream"})

    def _speak(self, request: dict[str, Any]) -> None:
        self.server.received.append(request)
        behavior = self.server.behavior
        size = behavior.get("data_size", 0xFFFFFFFF)
        layout = struct.pack("<HHIIHH", 1, 1, 24_000, 48_000, 2, 16)
        header = b"RIFF" + struct.pack("<I", 0xFFFFFFFF) + b"WAVEfmt " + struct.pack("<I", 16) + layout
        header += b"data" + struct.pack("<I", size)
        audio = behavior.get("audio", SPEECH)
        parts = [audio[: len(audio) // 2], audio[len(audio) // 2 :]]
        parts = [header, *parts] if request["response_format"] == "wav" else parts
        self.send_response(200)
        self.send_header("content-type", "audio/wav")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for part in filter(None, parts):
            self.wfile.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
            self.wfile.flush()
            time.sleep(behavior.get("part_s", 0.0))
        self.wfile.write(b"0\r\n\r\n")

    def _reply(self, body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        common = {"content-type": "application/json", "content-length": str(len(body))}
        for name, value in (common | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def serve_tasks(**behavior: Any) -> Iterator[TaskServer]:
    """Serve until the end of the block."""
    server = TaskServer()
    server.behavior = behavior
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join(WAIT_S)
        server.server_close()
