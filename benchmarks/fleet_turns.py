"""A fleet on a GPU that is too small for it: models take turns in its memory, or run on the CPU, and all must answer.

The fleet is the written one with random weights, or FLEET, with the changes of a plan that leave context and
concurrency as they are. Each round sends one request to each model, one after another, so every sleeping model is woken
for its own. The time of a request is that to its whole answer; "woken" is one whose model slept when it was sent.
The GPU's used bytes are read after each answer.

    python benchmarks/fleet_turns.py --vram 79.6 --rounds 3      # as an H100 of 80 GB
    python benchmarks/fleet_turns.py --vram 32 --request-limit 300
"""

from __future__ import annotations

import argparse
import io
import json
import os
import statistics
import sys
import tempfile
import time
import wave
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
from bench_output import Row, Target, need_gpu, write_result
from plan_memory import GIB, LIMIT_S, POLL_S, dummy_fleet, running_fleet, used_bytes

from meltcore.cli.signals import signals_as_ctrl_c
from meltcore.fleet.admin.admin import call_admin
from meltcore.fleet.daemon import running
from meltcore.fleet.plan.context_memory import find_contexts
from meltcore.fleet.plan.machine import read_machine
from meltcore.fleet.plan.nearest import apply_changes
from meltcore.fleet.plan.plan import plan_fleet
from meltcore.protocol.fleet_plan import has_smaller_settings
from meltcore.settings.fleet_file import load_fleet

CLIP_S, CLIP_RATE = 10.0, 16000
SETTLED = ("ready", "sleeping", "failed")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("fleet", nargs="?", type=Path, help="A fleet.yaml (default: the written one).")
    parser.add_argument("--vram", type=float, required=True, metavar="GIB", help="Memory of the GPU that it may take.")
    parser.add_argument("--gguf", type=Path, metavar="DIR", help="Where NAME.gguf of the models is, or is written.")
    parser.add_argument("--only", nargs="+", metavar="MODEL", help="Only these models.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--request-limit", type=float, default=120.0, metavar="SECONDS")
    args = parser.parse_args()
    need_gpu()
    with tempfile.TemporaryDirectory(prefix="fleet-turns-") as name:
        folder = Path(name)
        os.environ["XDG_STATE_HOME"] = str(folder / "state")
        path = folder / "fleet.yaml"
        fleet = dummy_fleet(args, folder)
        path.write_text(json.dumps(fleet))
        changes = apply_nearest(fleet, path)
        path.write_text(json.dumps(fleet))
        rows = measure(fleet, path, args)
    write_result(rows, {"torch": str(torch.__version__)}, [f"changes: {'; '.join(changes) or 'none'}"], subject="fleet")
    return 0 if all(row.met is not False for row in rows) else 1


def apply_nearest(fleet: dict[str, Any], path: Path) -> tuple[str, ...]:
    """Change the fleet as its nearest plan says; returns the changes as lines."""
    machine = read_machine()
    spec = load_fleet(path)
    contexts = find_contexts(machine.gpus[0].name, machine.driver)
    sizes = [int(gpu["memory"]) for gpu in fleet["gpus"]]
    plan, nearest = plan_fleet(spec, sizes, contexts=contexts, host_bytes=machine.host_bytes)
    if plan is not None:
        return ()
    if nearest is None:
        raise SystemExit(f"no plan fits in {sizes[0] / GIB:.1f} GiB")
    is_whole = not has_smaller_settings(nearest.changes) or not nearest.other_changes
    changes = nearest.changes if is_whole else nearest.other_changes
    apply_changes(fleet, changes)
    print("\n".join(changes), flush=True)
    return changes


def measure(fleet: dict[str, Any], path: Path, args: argparse.Namespace) -> list[Row]:
    """Start the fleet and ask every model in each round."""
    where, log = f"{args.vram:g} GiB", path.parent / "up.log"
    idle, most = used_bytes(), 0
    asleep: dict[str, int] = {}  # what engines hold of the GPU while they sleep, beside their contexts
    times: dict[str, dict[bool, list[float]]] = {name: {True: [], False: []} for name in fleet["models"]}
    began_s = time.monotonic()
    with running_fleet(path, log):
        failed = wait_settled(list(fleet["models"]))
        start_s = time.monotonic() - began_s
        for name, reason in failed.items():
            print(f"{name}: failed: {reason[:1500]}", flush=True)
        (record,) = running()
        for turn in range(args.rounds):
            for name, model in fleet["models"].items():
                rows_of = {each["model"]: each for each in call_admin(record.admin, "GET", "/ps")}
                status = rows_of[name]["status"]
                for each in rows_of.values():
                    if each["status"] == "sleeping":
                        asleep[each["model"]] = max(asleep.get(each["model"], 0), each["memory_bytes"])
                seconds, answer = ask(record.url, name, model, args.request_limit)
                most = max(most, used_bytes() - idle)
                print(f"round {turn} {name:24} was {status:9} {seconds:7.2f} s {answer[:160]}", flush=True)
                if not answer:
                    times[name][status != "ready"].append(seconds)
    rows = [
        Row(work=f"{where}: start to all models ready or asleep", unit="s", value=start_s),
        Row(
            work=f"{where}: models that answered every request",
            unit="models",
            value=float(sum(sum(map(len, each.values())) == args.rounds for each in times.values())),
            target=Target(float(len(times))),
        ),
        Row(
            work=f"{where}: most memory in use, beside {args.vram:g} GiB",
            unit="GiB",
            value=most / GIB,
            target=Target(args.vram, better="lower"),
        ),
    ]
    for name, size in asleep.items():
        rows.append(Row(work=f"{where}: {name}, held asleep beside its context", unit="MiB", value=size / 2**20))
    for name, both in times.items():
        for woken, seconds in both.items():
            if seconds:
                kind = "woken" if woken else "CPU" if fleet["models"][name].get("device") == "cpu" else "awake"
                work = f"{where}: {name}, {kind}, median of {len(seconds)}"
                rows.append(Row(work=work, unit="s to the whole answer", value=statistics.median(seconds)))
    return rows


def wait_settled(names: list[str]) -> dict[str, str]:
    """Wait until each model is ready, asleep or failed; returns the reasons of those that failed."""
    deadline_s = time.monotonic() + LIMIT_S
    found: list[dict[str, Any]] = []
    while time.monotonic() < deadline_s:
        time.sleep(POLL_S)
        for record in running():
            try:
                found = call_admin(record.admin, "GET", "/ps")
            except Exception as error:  # not up yet
                found = [{"reason": str(error)}]
            if {each.get("model") for each in found if each.get("status") in SETTLED} == set(names):
                return {each["model"]: each["reason"] for each in found if each["status"] == "failed"}
    raise SystemExit(f"not all models were ready within {LIMIT_S:.0f} s: {found}")


def ask(url: str, name: str, model: dict[str, Any], limit_s: float) -> tuple[float, str]:
    """Send one request of the model's task. Returns its seconds, and "" or what was wrong with the answer."""
    task = model.get("task", "generation")
    began_s = time.monotonic()
    try:
        if task == "generation":
            body = {"model": name, "prompt": [7] * 512, "max_tokens": 32, "temperature": 0, "ignore_eos": True}
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=limit_s)
            is_whole = answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 32
        elif task == "translation":
            source, target = ("kan_Knda", "hin_Deva") if name.endswith("indic-indic") else ("eng_Latn", "kan_Knda")
            if name.endswith("indic-en"):
                source, target = target, source
            text = "Where is the station?" if source == "eng_Latn" else "ನಮಸ್ಕಾರ, ನಿಲ್ದಾಣ ಎಲ್ಲಿದೆ?"
            body = {"model": name, "sentences": [text], "src_lang": source, "tgt_lang": target}
            answer = httpx.post(f"{url}/v1/translate", json=body, timeout=limit_s)
            is_whole = answer.status_code == 200 and bool(answer.json()["translations"])
        elif task == "synthesis":
            body = {"model": name, "input": "ನಮಸ್ಕಾರ.", "response_format": "wav"}
            answer = httpx.post(f"{url}/v1/audio/speech", json=body, timeout=limit_s)
            is_whole = answer.status_code == 200 and len(answer.content) > 10_000
        else:
            files = {"file": ("clip.wav", clip(), "audio/wav")}
            data = {"model": name, "language": "kn"}
            answer = httpx.post(f"{url}/v1/audio/transcriptions", files=files, data=data, timeout=limit_s)
            is_whole = answer.status_code == 200 and "text" in answer.json()
    except httpx.HTTPError as error:
        return time.monotonic() - began_s, f"{type(error).__name__}: {error}"
    seconds = time.monotonic() - began_s
    return seconds, "" if is_whole else f"status {answer.status_code}: {answer.text[:300]}"


def clip() -> bytes:
    """Noise of CLIP_S seconds as a WAV file."""
    noise = np.random.default_rng(1).normal(0, 3000, round(CLIP_S * CLIP_RATE)).astype("<i2")
    target = io.BytesIO()
    with wave.open(target, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(CLIP_RATE)
        file.writeframes(noise.tobytes())
    return target.getvalue()


if __name__ == "__main__":
    with signals_as_ctrl_c():
        sys.exit(main())
