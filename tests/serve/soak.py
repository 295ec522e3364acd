"""Loads a tiny fleet for hours while a fault comes every minute: `soak.py --seconds 7200 --log FILE`.

The fleet has two replicas of meltcore/sums and one of meltcore/phrases on CPU cores. Chats, streams and translations
come at the rate that makes the fleet's processes use 60 % of two cores. The faults take turns: an engine is killed,
clients leave, the log's disk is full, clocks step by an hour, NVML hangs, the file is reloaded. A fake in
sitecustomize.py steps clocks and holds NVML.

The log has JSON lines. A later piece adds to it, and is judged against the first hour of the first piece. A request is
lost if no answer comes, or one without its end. Other answers than 200 are counted by status; 503 may follow a kill.
Prints the verdict last: memory, descriptors and threads of supervisor, API server and engines, and lost requests. Each
piece starts a fleet, so no process is older than a piece.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
_HOOKS = """
import mmap, os, time
_file = open(os.environ["SOAK_SWITCHES"], "r+b")
_switches = mmap.mmap(_file.fileno(), 2)
_file.close()
_time = time.time
time.time = lambda: _time() + 3600.0 * _switches[0]
import pynvml
_init = pynvml.nvmlInit
def _held(*args):
    while _switches[1]:
        time.sleep(0.1)
    return _init(*args)
pynvml.nvmlInit = _held
"""
_MAIN = "import sys; from meltcore.cli.main import main; sys.exit(main())"
_LOAD, _CORES = 0.6, 2
_ANSWER_LIMIT_S, _SAMPLE_S, _MINUTE_S, _HOUR_S = 60.0, 10.0, 60.0, 3600.0
_MOST_GROWTH = 0.02
_MOST_RATE, _MOST_OPEN, _DISK_BYTES = 100.0, 32, 256 * 1024
CHAT, TRANSLATE = "/v1/chat/completions", "/v1/translate"


class Soak:
    """A running fleet, its clients and its log."""

    def __init__(self, folder: Path, log: Path) -> None:
        self.folder, self._log = folder, log.open("a")
        self.file, self.port, self.rate = folder / "fleet.yaml", 0, 2.0
        self.ended: Counter[str] = Counter()
        self.tasks: set[asyncio.Task[None]] = set()
        switches = folder / "switches"
        switches.write_bytes(bytes(2))
        self.switches = switches
        (folder / "hooks").mkdir()
        (folder / "hooks/sitecustomize.py").write_text(_HOOKS)
        (folder / "disk").mkdir()
        self.has_disk = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={_DISK_BYTES}", "soak", str(folder / "disk")],
            check=False, timeout=10, capture_output=True,
        ).returncode == 0  # fmt: skip
        self.environment = os.environ | {
            "PYTHONPATH": f"{folder / 'hooks'}:{ROOT / 'src'}", "SOAK_SWITCHES": str(switches), "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1", "XDG_STATE_HOME": str(folder / "disk" if self.has_disk else folder / "state"),
            "TMPDIR": str(folder),
        }  # fmt: skip
        self.write_fleet(32)

    def write_fleet(self, sentences: int) -> None:
        """Write fleet.yaml; the number of sentences differs between reloads."""
        models = {
            "sums": {"checkpoint": "meltcore/sums", "max_num_seqs": 8, "replicas": 2, "device": "cpu"},
            "phrases": {
                "checkpoint": "meltcore/phrases",
                "task": "translation",
                "max_num_seqs": sentences,
                "device": "cpu",
            },
        }
        self.file.write_text(json.dumps({"server": {"port": 0, "api_server_count": 1}, "models": models}))

    def note(self, event: str, **fields: Any) -> None:
        """Write a line of the log, and print it."""
        line = json.dumps({"time_s": round(time.time(), 1), "event": event, **fields})
        print(line, file=self._log, flush=True)
        print(line, flush=True)

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a command of meltcore for this fleet."""
        command = [sys.executable, "-c", _MAIN, *arguments]
        return subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=120, check=False)

    def children(self) -> dict[int, str]:
        """Return the processes of the fleet by id: supervisor, api or engine."""
        found, waiting = {self.process.pid: "supervisor"}, [self.process.pid]
        while waiting:
            with suppress(OSError):
                pid = waiting.pop()
                for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
                    line = Path(f"/proc/{child}/cmdline").read_text()
                    found[int(child)] = "api" if "api_server" in line else "engine"
                    waiting.append(int(child))
        return found

    # --- clients

    async def ask(self, rng: random.Random) -> None:
        """Send one request and count how it ended."""
        kind = rng.choice(["chat", "stream", "stream", "translate"])
        try:
            async with asyncio.timeout(_ANSWER_LIMIT_S):
                self.ended[await self.answer(kind, rng)] += 1
        except TimeoutError:
            self.ended["lost: no answer"] += 1
        except OSError as error:
            self.ended[f"lost: {error.strerror or error}"] += 1

    async def answer(self, kind: str, rng: random.Random, leave_after_s: float | None = None) -> str:
        """Return the status of an answer, and whether it was whole."""
        if kind == "translate":
            path, body = TRANSLATE, {"sentences": ["the small dog sees a bird"], "src_lang": "eng_Latn"}
            body |= {"tgt_lang": "guj_Gujr", "model": "phrases"}
        else:
            question = f"What is {rng.randint(1, 99)} * {rng.randint(1, 99)}?"
            path, body = CHAT, {"model": "sums", "messages": [{"role": "user", "content": question}]}
            body |= {"stream": kind == "stream", "max_tokens": rng.randint(8, 64), "ignore_eos": True}
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(head.encode() + b"content-length: %d\r\n\r\n" % len(data) + data)
            if leave_after_s is not None:
                await asyncio.sleep(leave_after_s)
                writer.transport.abort()
                return "left"
            found = await reader.read()
        finally:
            writer.close()
        status = found[9:12].decode()
        is_whole = b"[DONE]" in found or b'"error"' in found if kind == "stream" else found.rstrip().endswith(b"}")
        is_error = kind == "stream" and status == "200" and b'"error"' in found
        return f"{status} with an error" if is_error else status if is_whole else f"lost: {status} without its end"

    async def load(self, end_s: float) -> None:
        """Start requests at `rate` per second until a time."""
        rng = random.Random(1)
        while (now_s := time.monotonic()) < end_s:
            if len(self.tasks) < _MOST_OPEN:  # else other programs have the cores, and more requests would only wait
                task = asyncio.create_task(self.ask(rng))
                self.tasks.add(task)
                task.add_done_callback(self.tasks.discard)
            await asyncio.sleep(max(0.0, now_s + rng.expovariate(self.rate) - time.monotonic()))
        await asyncio.gather(*self.tasks)

    # --- faults

    async def kill_engine(self) -> str:
        """Kill one engine, which the fleet starts again."""
        engines = [pid for pid, role in self.children().items() if role == "engine"]
        os.kill(engines[0], signal.SIGKILL)
        return f"{len(engines)} engines were there"

    async def leave(self) -> str:
        """Let 30 clients leave."""
        rng = random.Random(2)
        await asyncio.gather(*(self.answer("stream", rng, leave_after_s=rng.random() * 0.1) for _ in range(30)))
        return "30 clients"

    async def fill_disk(self) -> str:
        """Fill the disk of the state and the engines' logs for half a minute."""
        if not self.has_disk:
            return "not done: no file system could be mounted"
        full = self.folder / "disk/full"
        with suppress(OSError):
            full.write_bytes(bytes(_DISK_BYTES))
        await asyncio.sleep(30)
        full.unlink()
        return "for 30 s"

    async def step_clock(self) -> str:
        """Step the clock of all processes an hour ahead, and back after half a minute."""
        self.switch(0, 1)
        await asyncio.sleep(30)
        self.switch(0, 0)
        return "an hour ahead for 30 s"

    async def hold_nvml(self) -> str:
        """Let NVML hang for half a minute, while the status is read."""
        self.switch(1, 1)
        begin_s = time.monotonic()
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(b"GET /v1/status HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        status = (await reader.read())[9:12].decode()
        writer.close()
        waited_s = time.monotonic() - begin_s
        await asyncio.sleep(max(0.0, 30 - waited_s))
        self.switch(1, 0)
        return f"/v1/status answered {status} after {waited_s:.1f} s"

    async def reload(self) -> str:
        """Change fleet.yaml and reload it."""
        self.write_fleet(random.Random(time.time()).choice((16, 24, 32)))
        done = await asyncio.to_thread(self.command, "reload")
        return (done.stdout + done.stderr).strip().replace("\n", "; ")[-300:]

    def switch(self, place: int, value: int) -> None:
        """Set a switch of the hooks."""
        with self.switches.open("r+b") as file:
            file.seek(place)
            file.write(bytes([value]))

    # --- samples

    async def watch(self, begin_s: float, end_s: float) -> None:
        """Sample the processes, and follow the load of 60 % with the rate."""
        used_s, before_s = self.cpu_seconds(), time.monotonic()
        while time.monotonic() < end_s:
            await asyncio.sleep(_SAMPLE_S)
            now_s, now_used_s = time.monotonic(), self.cpu_seconds()
            load = (now_used_s - used_s) / (now_s - before_s) / _CORES
            used_s, before_s = now_used_s, now_s
            self.rate = min(_MOST_RATE, max(0.5, self.rate * min(1.3, max(0.7, _LOAD / max(load, 0.01)))))
            ended, self.ended = dict(self.ended), Counter()
            self.note(
                "sample",
                s=round(now_s - begin_s),
                load=round(load, 2),
                rate=round(self.rate, 1),
                ended=ended,
                **self.sample(),
            )

    def sample(self) -> Counter[str]:
        """Return the resident bytes, descriptors and threads of the processes, added up by role."""
        sums: Counter[str] = Counter()
        for pid, role in self.children().items():
            with suppress(OSError):
                pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
                sums[f"{role}_bytes"] += pages * os.sysconf("SC_PAGE_SIZE")
                sums[f"{role}_descriptors"] += len(list(Path(f"/proc/{pid}/fd").iterdir()))
                sums[f"{role}_threads"] += len(list(Path(f"/proc/{pid}/task").iterdir()))
        sums["clients"] = len(self.tasks)
        return sums

    def cpu_seconds(self) -> float:
        """Return the CPU seconds of the fleet's processes that live, and of those that have ended."""
        ticks = 0
        for pid in self.children():
            with suppress(OSError):
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                ticks += sum(map(int, fields[11:15]))
        return ticks / os.sysconf("SC_CLK_TCK")

    def start(self) -> None:
        """Start the fleet."""
        with (self.folder / "stderr").open("w") as stderr:
            command = [sys.executable, "-c", _MAIN, "up", str(self.file)]
            self.process = subprocess.Popen(
                command, env=self.environment, stdout=subprocess.PIPE, stderr=stderr, text=True
            )

    def unmount(self) -> None:
        """Release the file system of the state."""
        if self.has_disk:
            subprocess.run(["umount", "-l", str(self.folder / "disk")], check=False, timeout=10)

    async def run(self, seconds: float) -> None:
        """Start the fleet, run it for some seconds or until SIGINT or SIGTERM, and end it."""
        task = asyncio.current_task()
        assert task is not None
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        self.start()
        try:
            assert self.process.stdout is not None
            line = await asyncio.to_thread(self.process.stdout.readline)
            if "listening on" not in line:
                raise RuntimeError((self.folder / "stderr").read_text()[-2000:])
            self.port = int(line.rpartition(":")[2])
            await self.wait_ready()
            begin_s = time.monotonic()
            self.note("start", seconds=seconds, cores=os.cpu_count(), load_of_others=os.getloadavg()[0])
            faults = (self.kill_engine, self.leave, self.fill_disk, self.step_clock, self.hold_nvml, self.reload)
            await asyncio.gather(
                self.load(begin_s + seconds),
                self.watch(begin_s, begin_s + seconds),
                self.fail(faults, begin_s + seconds),
            )
            await asyncio.sleep(1)
            self.note("end", ended=dict(self.ended), left=await self.in_flight())
        finally:
            self.process.terminate()
            code = await asyncio.to_thread(self.process.wait, 120)
            self.note("exit", code=code)
            self.unmount()

    async def fail(self, faults: Sequence[Callable[[], Any]], end_s: float) -> None:
        """Bring about a fault each minute, while one is left before the end."""
        for index in range(10**6):
            if time.monotonic() + _MINUTE_S > end_s:
                return
            await asyncio.sleep(_MINUTE_S / 2)
            begin_s, fault = time.monotonic(), faults[index % len(faults)]
            self.note("fault", name=fault.__name__, result=await fault())
            await asyncio.sleep(max(0.0, begin_s + _MINUTE_S / 2 - time.monotonic()))

    async def wait_ready(self) -> None:
        """Wait until a chat and a translation are answered."""
        for _ in range(600):
            with suppress(OSError):
                statuses = [await self.answer(kind, random.Random(0)) for kind in ("chat", "translate")]
                if statuses == ["200", "200"]:
                    return
            await asyncio.sleep(0.2)
        raise TimeoutError((self.folder / "stderr").read_text()[-2000:])

    async def in_flight(self) -> float:
        """Return the number of requests that the server counts as open."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(b"GET /metrics HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        text = (await reader.read()).decode()
        writer.close()
        return sum(
            float(line.split()[-1]) for line in text.splitlines() if re.match(r"meltcore:requests_in_flight[ {]", line)
        )


def verdict(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Judge the lines of a log: growth since the first hour, in the log and in each piece, and what was lost.

    The first minute warms up. Medians of the first hour, or of the first third of a shorter run, are compared with
    medians of as long a time at the end. Descriptors of API servers are counted without those of clients.
    """
    pieces: list[list[dict[str, Any]]] = [[]]
    for line in lines:
        if line["event"] == "start":
            pieces.append([])
        if line["event"] == "sample" and line["s"] > _MINUTE_S:
            pieces[-1].append(line)
    pieces = [piece for piece in pieces if len(piece) >= 6]
    samples = [line for piece in pieces for line in piece]
    if not samples:
        return {"verdict": "UNKNOWN", "reason": "fewer than six samples after the first minute"}
    compared = [_medians(samples), *map(_medians, pieces)]
    parts = compared[0]
    grown = {name: max(each[name][1] / each[name][0] - 1 for each in compared) for name in parts}
    ended = sum((Counter(line.get("ended", {})) for line in lines), Counter())
    lost = {name: count for name, count in ended.items() if name.startswith("lost")}
    left = [line["left"] for line in lines if line["event"] == "end"]
    is_flat = all(growth <= _MOST_GROWTH for name, growth in grown.items() if name.endswith("bytes"))
    counts = [name for name in parts if not name.endswith("bytes")]
    is_flat &= all(each[name][1] <= each[name][0] + 2 for each in compared for name in counts)
    passed = is_flat and not lost and not any(left)
    return {
        "verdict": "PASS" if passed else "FAIL",
        "seconds": sum(piece[-1]["s"] for piece in pieces),
        "load": round(statistics.mean(each["load"] for each in samples), 2),
        "faults": dict(Counter(line["name"] for line in lines if line["event"] == "fault")),
        "ended": dict(ended),
        "lost": lost,
        "left": left,
        "parts": parts,
        "growth": {name: round(growth, 4) for name, growth in grown.items()},
    }


def _medians(samples: Sequence[dict[str, Any]]) -> dict[str, list[float]]:
    """Return medians of the first hour, or third, and of as many samples at the end."""
    size = min(round(_HOUR_S / _SAMPLE_S), len(samples) // 3)
    roles = ("supervisor", "api", "engine")
    return {
        name: [
            statistics.median(each[name] - each.get("clients", 0) * (name == "api_descriptors") for each in part)
            for part in (samples[:size], samples[-size:])
        ]
        for name in (f"{role}_{unit}" for unit in ("bytes", "descriptors", "threads") for role in roles)
    }


def main() -> int:
    """Run one piece, and judge the whole log."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=7200.0)
    parser.add_argument("--log", type=Path, default=Path("soak.jsonl"))
    args = parser.parse_args()
    # A run that is ended early is judged by what it has logged.
    with tempfile.TemporaryDirectory(prefix="soak") as folder, suppress(asyncio.CancelledError):
        asyncio.run(Soak(Path(folder), args.log).run(args.seconds))
    lines = [json.loads(line) for line in args.log.read_text().splitlines()]
    found = verdict([line for line in lines if line["event"] != "verdict"])
    with args.log.open("a") as log:
        print(json.dumps({"time_s": round(time.time(), 1), "event": "verdict", **found}), file=log)
    print(json.dumps(found, indent=1))
    return int(found["verdict"] != "PASS")


if __name__ == "__main__":
    sys.exit(main())
