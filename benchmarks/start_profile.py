"""Where the time from process start to the first token goes, by phase, and what each kernel costs to compile.

Wraps the phases of the engine's start and prints when each begins (seconds since the process was started, imports
included) and how long it takes. GPU work is not waited for: a phase that waits has the time of what it waits for.
Prints only; `offline.py` writes the row "process start to first token".

    TRITON_CACHE_DIR=$(mktemp -d) python benchmarks/start_profile.py --model Qwen/Qwen3-0.6B
"""

from __future__ import annotations

from offline_work import process_age_s

INTERPRETER_S = process_age_s()

import argparse  # noqa: E402
import functools  # noqa: E402
import importlib  # noqa: E402
import json  # noqa: E402
import threading  # noqa: E402
from collections import defaultdict  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any, NamedTuple  # noqa: E402

PHASES = (
    "meltcore.engine.generation.engine:open_checkpoint",
    "meltcore.engine.generation.engine:choose_device",
    "meltcore.offline.llm:default_batched_tokens",
    "meltcore.engine.generation.engine:load",
    "meltcore.engine.worker.loading:build_model",
    "meltcore.models.loader:build_meta_model",
    "meltcore.engine.worker.loading:fill_weights",
    "meltcore.engine.worker.loading:plan_memory",
    "meltcore.engine.generation.engine:ModelRunner.__init__",
    "meltcore.engine.generation.engine:make_compiler",
    "meltcore.engine.worker.warm_up:KernelCompiler.compile_kernels",
    "meltcore.engine.worker.warm_up:rehearse",
    "meltcore.engine.generation.engine:warm_up",
    "meltcore.engine.worker.warm_up:_launch_prompts",
    "meltcore.engine.worker.warm_up:_launch_sampling",
    "meltcore.engine.worker.cuda_graphs:DecodeGraphs.capture",
    "meltcore.engine.worker.prefill_graphs:PrefillGraphs.capture",
    "meltcore.offline.llm:Tokenizer.from_checkpoint",
    "meltcore.offline.llm:ChatTemplate.from_checkpoint",
    "meltcore.offline.llm:LLM.generate",
)


class Phase(NamedTuple):
    """A call, and how many others contain it."""

    depth: int
    name: str
    start_s: float
    took_s: float


class Profile:
    """The calls of wrapped functions in the main thread."""

    def __init__(self) -> None:
        self.phases: list[Phase] = []
        self._depth = 0

    def wrap(self, place: str) -> None:
        """Record calls of MODULE:NAME or MODULE:CLASS.NAME from here on."""
        module_name, _, path = place.partition(":")
        owner: Any = importlib.import_module(module_name)
        *classes, name = path.split(".")
        for each in classes:
            owner = getattr(owner, each)
        function = getattr(owner, name)

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if threading.current_thread() is not threading.main_thread():
                return function(*args, **kwargs)
            self._depth += 1
            start_s = process_age_s()
            try:
                return function(*args, **kwargs)
            finally:
                self._depth -= 1
                self.phases.append(Phase(self._depth, path, start_s, process_age_s() - start_s))

        setattr(owner, name, staticmethod(timed) if classes and hasattr(function, "__self__") else timed)

    def show(self) -> None:
        """Print the phases in order of their starts."""
        print(f"{'start s':>8} {'took s':>7}  phase")
        for phase in sorted(self.phases, key=lambda phase: (phase.start_s, phase.depth)):
            print(f"{phase.start_s:8.2f} {phase.took_s:7.2f}  {'  ' * phase.depth}{phase.name}")

    def add(self, name: str, start_s: float) -> None:
        """Record a phase that ends now."""
        self.phases.append(Phase(0, name, start_s, process_age_s() - start_s))


class CompileTimes:
    """What Triton's listener reports per kernel that this process compiles."""

    def __init__(self) -> None:
        self.stages: defaultdict[str, float] = defaultdict(float)
        self.kernels: list[tuple[float, str]] = []
        self.hits = 0

    def listen(self, *, src: Any, times: Any, cache_hit: bool, **_: Any) -> None:
        """Add one kernel's times."""
        if cache_hit:
            self.hits += 1
            return
        stages = [("ast to ir", times.ir_initialization), *times.lowering_stages]
        for stage, took_us in stages:
            self.stages[stage] += took_us / 1e6
        self.kernels.append((sum(took_us for _, took_us in stages) / 1e6, src.name))

    def show(self) -> None:
        """Print sums of threads' seconds, and the slowest kernels."""
        print(f"{len(self.kernels)} kernels compiled by this process, {self.hits} found in the cache")
        if not self.kernels:
            return
        print("  s, by threads: " + ", ".join(f"{stage} {took_s:.2f}" for stage, took_s in self.stages.items()))
        slowest = sorted(self.kernels, reverse=True)[:12]
        print("  slowest: " + ", ".join(f"{name} {took_s:.2f}" for took_s, name in slowest))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="Qwen/Qwen3-0.6B")
    parser.add_argument("--seqs", type=int, default=1024)
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--debug", default="", help="Debug switches, separated by commas.")
    parser.add_argument("--keys", type=Path, help="Write the specializations of the compiled kernels here.")
    args = parser.parse_args()

    profile, compile_times = Profile(), CompileTimes()
    profile.phases.append(Phase(0, "interpreter", 0.0, INTERPRETER_S))
    start_s = process_age_s()
    import torch

    profile.add("import torch", start_s)
    start_s = process_age_s()
    import meltcore.offline.llm

    profile.add("import meltcore.offline.llm", start_s)
    from triton import knobs

    from meltcore.engine.worker import warm_up

    knobs.compilation.listener = compile_times.listen
    for place in PHASES:
        profile.wrap(place)
    jobs: list[tuple[float, float, str, str]] = []
    keys: list[dict[str, str]] = []

    def job(kind: str, function: Any, name_of: Any) -> Any:
        def timed(*args: Any) -> Any:
            start_s = process_age_s()
            try:
                return function(*args)
            finally:
                jobs.append((start_s, process_age_s() - start_s, kind, name_of(*args)))

        return timed

    def name_of(function: Any, specialization: str, *_: object) -> str:
        keys.append({"module": function.module, "name": function.fn.__qualname__, "data": specialization})
        return str(function.__name__)

    warm_up._compile = job("Triton", warm_up._compile, name_of)
    warm_up._compile_binary = job("NVRTC", warm_up._compile_binary, lambda binary, _: binary.kernel.name)

    llm = meltcore.offline.llm.LLM(
        args.model,
        load_format="dummy",
        max_model_len=args.max_model_len,
        max_num_seqs=args.seqs,
        enable_prefix_caching=False,
        debug=tuple(filter(None, args.debug.split(","))),
    )
    from meltcore import SamplingParams

    llm.generate([[9] * 8], SamplingParams(max_tokens=1, ignore_eos=True))
    end_s = process_age_s()
    profile.show()
    compile_times.show()
    for kind in ("Triton", "NVRTC"):
        found = [each for each in jobs if each[2] == kind]
        if found:
            total_s = sum(took_s for _, took_s, _, _ in found)
            first_s, last_s = min(each[0] for each in found), max(each[0] + each[1] for each in found)
            longest = ", ".join(f"{name} {took_s:.2f}" for _, took_s, _, name in sorted(found, key=lambda e: -e[1])[:8])
            print(f"{kind}: {len(found)} jobs, {first_s:.2f} to {last_s:.2f} s, {total_s:.2f} s in threads: {longest}")
    print(f"{args.model}: first token {end_s:.2f} s after process start; {torch.cuda.get_device_name()}")
    if args.keys:
        args.keys.write_text(json.dumps(keys))
    llm.close()


if __name__ == "__main__":
    main()
