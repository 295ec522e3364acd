"""Runs the engine on the CPU whatever its configuration says: its GPUs are those of a scripted NVML."""

from __future__ import annotations

import io
import sys

import msgspec

from meltcore.engine.__main__ import main
from meltcore.settings.config import EngineConfig

if __name__ == "__main__":
    config = msgspec.json.decode(sys.stdin.buffer.readline(), type=EngineConfig)
    on_cpu = msgspec.structs.replace(config, device="cpu")
    sys.stdin = io.TextIOWrapper(io.BytesIO(msgspec.json.encode(on_cpu) + b"\n"))
    sys.exit(main())
