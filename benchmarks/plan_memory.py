"""Compares the plan of a fleet with what NVML reports while the fleet is up, model by model and in total.

The fleet is the written one with dummy weights, or FLEET. It starts with its first model, and each reload adds one: so
the difference of NVML's used bytes is the new model's, also where NVML does not know the processes of a container.
Nothing else may use the GPU. At last language models get requests, and the total is read once more. Totals are all that
NVML says is in use, against the plan with what the driver keeps of the GPU.

    python benchmarks/plan_memory.py --out plan.json
    python benchmarks/plan_memory.py --vram 96 --out plan.json      # within 96 GiB of the GPU
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any

import httpx
import msgspec
import yaml

from meltcore.cli.signals import signals_as_ctrl_c
from meltcore.common.process import end_group, start
from meltcore.fleet.admin.admin import call_admin
from meltcore.fleet.daemon import running
from meltcore.fleet.plan.context_memory import find_contexts
from meltcore.fleet.plan.machine import read_gpus, read_machine
from meltcore.fleet.plan.plan import plan_fleet
from meltcore.fleet.plan.planned import FleetPlanner
from meltcore.fleet.plan.site import OneMachine

MIB, GIB = 2**20, 2**30
TOTAL = "all, with the driver"
LIMIT_S, END_LIMIT_S, SETTLE_S, POLL_S = 400.0, 60.0, 1.0, 0.5
GGUF = {"q4_0": "q4_0", "q8_0": "q8_0"}


def main() -> int:
    """Start the fleet model by model, and print planned and measured bytes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("fleet", nargs="?", type=Path, help="A fleet.yaml (default: the written one).")
    parser.add_argument("--vram", type=float, metavar="GIB", help="Memory of the GPU that the fleet may take.")
    parser.add_argument("--gguf", type=Path, metavar="DIR", help="Where NAME.gguf of the models is, or is written.")
    parser.add_argument("--only", nargs="+", metavar="MODEL", help="Only these models.")
    parser.add_argument("--out", type=Path, help="Write the rows as JSON, after every model.")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="plan-memory-") as name:
        folder = Path(name)
        fleet = dummy_fleet(args, folder)
        return measure(fleet, folder, args.out)


def dummy_fleet(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The fleet with dummy weights, those of GGUF formats from files without weights."""
    text = (
        args.fleet.read_text()
        if args.fleet
        else (resources.files("meltcore.fleet") / "examples" / "fleet.yaml").read_text()
    )
    fleet: dict[str, Any] = yaml.safe_load(text)
    fleet = {"server": {"port": 0, "api_server_count": 1}, "models": fleet["models"]}
    if args.only:
        fleet["models"] = {name: fleet["models"][name] for name in args.only}
    for name, model in fleet["models"].items():
        model["load_format"] = "dummy"
        if model.get("format") in GGUF:
            shapes, stored, file = model.pop("shapes"), model.pop("format"), (args.gguf or folder) / f"{name}.gguf"
            if not file.exists():
                script = Path(__file__).parent / "random_gguf.py"
                command = [sys.executable, str(script), shapes, stored, str(file), "--sparse"]
                subprocess.run(command, check=True, timeout=LIMIT_S)
            model["checkpoint"] = str(file)
    if args.vram:
        fleet["gpus"] = [{"id": 0, "memory": int(args.vram * GIB)}]
    return fleet


def measure(fleet: dict[str, Any], folder: Path, out: Path | None) -> int:
    """Add one model after another and compare; 1 where one is beyond 3 % and 200 MB, or all beyond 3 %."""
    os.environ["XDG_STATE_HOME"] = str(folder / "state")
    path = folder / "fleet.yaml"
    path.write_text(json.dumps(fleet))
    planned, driver_bytes = planned_bytes(path)
    planned_total = driver_bytes + sum(planned.values())
    rows: list[dict[str, Any]] = []
    names, before = list(fleet["models"]), used_bytes()
    path.write_text(json.dumps(fleet | {"models": {names[0]: fleet["models"][names[0]]}}))
    with running_fleet(path, folder / "up.log"):
        for index, name in enumerate(names):
            began_s = time.monotonic()
            path.write_text(
                json.dumps(fleet | {"models": {each: fleet["models"][each] for each in names[: index + 1]}})
            )
            if index:
                subprocess.run([sys.executable, "-m", "meltcore.cli.main", "reload"], check=True, timeout=LIMIT_S)
            failed = wait_ready(name)
            time.sleep(SETTLE_S)
            after = used_bytes()
            rows.append(row(name, planned[name], after - before, time.monotonic() - began_s) | {"failed": failed})
            show(rows[-1], out, rows)
            before = after
        requests(fleet)
        rows.append(row(f"{TOTAL}, after requests", planned_total, used_bytes(), 0.0))
        show(rows[-1], out, rows)
    total = row(TOTAL, planned_total, before, 0.0)
    rows.append(total)
    show(total, out, rows)
    is_close = all(abs(each["off"]) <= 0.03 or abs(each["measured"] - each["planned"]) <= 200e6 for each in rows)
    return 0 if is_close and abs(total["off"]) <= 0.03 else 1


def planned_bytes(path: Path) -> tuple[dict[str, int], int]:
    """Budget and context of each model's engines on the GPU, and what the driver keeps of it."""
    machine = read_machine()
    spec = FleetPlanner(path, lambda _spec: OneMachine.of(machine)).config().spec
    contexts = find_contexts(machine.gpus[0].name, machine.driver) if machine.gpus else find_contexts("")
    plan, _ = plan_fleet(spec, [gpu.total_bytes for gpu in machine.gpus], contexts=contexts)
    assert plan is not None, "it has been planned already"
    print(contexts.note)
    sizes = dict.fromkeys(spec.models, 0)
    for gpu in plan.gpus:
        for engine in gpu.engines:
            sizes[engine.model] += engine.size_bytes
    return sizes, contexts.driver_bytes


def row(name: str, planned: int, measured: int, seconds: float) -> dict[str, Any]:
    """One line of the table."""
    off = (measured - planned) / planned if planned else 0.0
    return {"model": name, "planned": planned, "measured": measured, "off": round(off, 4), "seconds": round(seconds, 1)}


def show(line: dict[str, Any], out: Path | None, rows: list[dict[str, Any]]) -> None:
    """Print a line, and write all."""
    print(
        f"{line['model']:24} planned {line['planned'] / MIB:9,.0f} MiB, NVML {line['measured'] / MIB:9,.0f} MiB, "
        f"{(line['measured'] - line['planned']) / MIB:+7,.0f} MiB, {line['off']:+.2%}, {line['seconds']:.0f} s "
        f"{line.get('failed', '')}",
        flush=True,
    )
    if out is not None:
        gpus, driver = read_gpus()
        document = {"gpu": gpus[0].name if gpus else "", "driver": driver, "rows": rows}
        out.write_bytes(msgspec.json.format(msgspec.json.encode(document)) + b"\n")


def used_bytes() -> int:
    """NVML's used bytes of the first GPU; 0 without one."""
    gpus, _ = read_gpus()
    return gpus[0].used_bytes if gpus else 0


@contextmanager
def running_fleet(path: Path, log: Path) -> Iterator[None]:
    """`meltcore up` until the end of the block."""
    with log.open("wb") as output:
        process = start([sys.executable, "-m", "meltcore.cli.main", "up", str(path)], stdout=output, stderr=output)
        try:
            yield
        except BaseException:
            print(log.read_text()[-4000:])
            raise
        finally:
            end_group(process, END_LIMIT_S)


def wait_ready(name: str) -> str:
    """Wait until a model is ready or has failed; returns the reason of the failure."""
    deadline_s = time.monotonic() + LIMIT_S
    reason = "no fleet"
    while time.monotonic() < deadline_s:
        time.sleep(POLL_S)
        for record in running():
            try:
                found = [each for each in call_admin(record.admin, "GET", "/ps") if each["model"] == name]
            except Exception as error:  # not up yet
                reason = str(error)
                continue
            if found and found[0]["status"] in ("ready", "failed"):
                return found[0]["reason"] if found[0]["status"] == "failed" else ""
            reason = str(found)
    raise SystemExit(f"{name} was not ready within {LIMIT_S:.0f} s: {reason}")


def requests(fleet: dict[str, Any]) -> None:
    """Send prompts to each language model at its concurrency."""
    (record,) = running()

    def send(name: str, length: int) -> int:
        body = {"model": name, "prompt": [7] * length, "max_tokens": 32, "temperature": 0.8, "top_p": 0.9}
        return httpx.post(f"{record.url}/v1/completions", json=body, timeout=300).status_code

    for name, model in fleet["models"].items():
        if model.get("task", "generation") == "generation":
            length, count = model.get("max_model_len", 512) - 40, model.get("max_num_seqs", 4)
            with ThreadPoolExecutor(count) as pool:
                statuses = list(pool.map(send, [name] * count, [length - index for index in range(count)]))
            print(f"{name}: {count} prompts of {length} tokens, statuses {sorted(set(statuses))}", flush=True)


if __name__ == "__main__":
    with signals_as_ctrl_c():
        sys.exit(main())
