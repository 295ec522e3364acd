"""Compiles and runs every kernel of serving in advance, since compiling during a step would delay all requests.

First, a rehearsal makes the launches of serving with one layer of each kind, but the kernels do not run. Triton's hook
before compilation, and the launches of CUDA C++, report the missing kernels. Worker processes compile these while the
rehearsal continues, the longest first. Ranks that need the same kernels compile a part each, and then find the other
ranks' kernels in Triton's cache.

Then the warm-up runs. Decode steps are compiled by the capture of CUDA graphs. The warm-up runs prompts of every size
that kernels distinguish, and every method of sampling. All of it uses the padding row, whose page and recurrent-state
slot hold nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from queue import PriorityQueue
from threading import Lock, Thread, get_ident, local
from typing import Any, NamedTuple

import torch
from triton import knobs
from triton.runtime.cache import triton_key
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from meltcore.engine.core.chunk import Chunk
from meltcore.engine.core.request import Request
from meltcore.engine.host.device import has_budget, has_mps
from meltcore.engine.memory.graph_sizes import window_shapes
from meltcore.engine.worker.compile_workers import CompileWorkers, KernelSource, worker_count
from meltcore.engine.worker.cuda_graphs import PADDING_ROW
from meltcore.engine.worker.model_runner import ModelRunner
from meltcore.kernels.launch import force_implementation
from meltcore.kernels.nvrtc import Binary, record_launches
from meltcore.layers.uniform_routing import set_uniform_routing
from meltcore.models.checkpoints.checkpoint import Progress
from meltcore.protocol.generation import AddRequest
from meltcore.protocol.sampling_params import SamplingParams
from meltcore.protocol.shell import MemoryRow
from meltcore.settings.config import EngineConfig

# One step each: GEMMs of one token, of few, and of all tile sizes (kernels/gemm/linear.py, kernels/gemm/tma.py and
# kernels/fp8/fp8_split_k.py). The largest tiles of a weight of few rows are those of the largest step.
PROMPT_TOKENS = (1, 2, 17, 33, 65, 129, 257, 1024, 2048)
# Further ones for routed experts: every mode and alignment of kernels/moe/grouped_gemm.py, grouped_gemm_tma.py,
# grouped_gemm_wgmma.py and kernels/quant/ggml_experts.py. Experts are dequantized in the largest step,
# `_max_tile_prompts`, or in none.
EXPERT_TOKENS = (3, 5, 9, 114, 228, 456, 513, 912, 3656)
# Of recurrent layers: states are split by the number of prompts in a step (kernels/gated_delta/state_scan.py).
PROMPTS_PER_STEP = (2, 4, 8, 16)
# Sequences of decode steps that consist of different kernels (kernels/gemm/linear.py, kernels/attention/decode.py,
# kernels/quant/ggml_skinny_gemm.py and kernels/persistent/decode_layers.py).
DECODE_BATCHES = (1, 2, 4, 8, 12, 16, 24, 48, 96, 160, 320)
# Kernels in CUDA C++ compile first: the persistent decode kernel takes as long as the slowest one of Triton.
_CUDA_COST = 1_000_000
EVERY_SAMPLING = (
    SamplingParams(),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=1.0, top_k=2, top_p=0.9, min_p=0.01),
    SamplingParams(frequency_penalty=0.1, logit_bias={0: 0.0}),
    SamplingParams(logprobs=1),
)


class StepLimits(NamedTuple):
    """Limits of a step: decoding sequences, tokens of one sequence, and all tokens."""

    max_num_seqs: int
    max_model_len: int
    max_num_batched_tokens: int


class CompileOrder(NamedTuple):
    """The index of this process among the processes that compile the same kernels, and the number of processes."""

    process_index: int = 0
    num_processes: int = 1

    def is_assigned(self, index: int) -> bool:
        """Return whether this process is the first to compile the kernel of this index.

        All processes number kernels in the same order.
        """
        return index % self.num_processes == self.process_index


_SINGLE_ORDER = CompileOrder()


# --- compiling -----------------------------------------------------------------------------------------------------


class KernelCompiler:
    """Compiles the kernels of an engine. Create it before the engine uses the GPU, since it forks processes."""

    def __init__(self, order: CompileOrder, num_processes: int) -> None:
        """Fork workers, and start threads that prepare what Triton needs first.

        Up to `num_processes` processes on this machine may compile at the same time, including processes of other
        engines.
        """
        self.order = order
        self.workers = CompileWorkers(worker_count(num_processes))
        self._loading_driver = Thread(target=_load_driver, daemon=True)
        self._hashing = Thread(target=triton_key, daemon=True)
        self._loading_driver.start()
        self._hashing.start()

    def compile_kernels(self, runner: ModelRunner, limits: StepLimits) -> None:
        """Compile the kernels that serving is known to launch on this GPU, in parallel."""
        device_index = torch.cuda.current_device()

        def prepare_thread() -> None:
            self._hashing.join()  # or each thread would compute it
            torch.cuda.set_device(device_index)

        self._loading_driver.join()
        compile_ahead(partial(rehearse, runner, limits), prepare_thread, self.workers, self.order)

    def close(self) -> None:
        """End the workers."""
        self.workers.close()


def make_compiler(config: EngineConfig, device: torch.device, rank: int = 0) -> KernelCompiler | None:
    """Return the compiler of a rank's kernels. Returns None if no kernels are compiled."""
    if device.type != "cuda" or "reference-kernels" in config.debug:
        return None
    order = CompileOrder(rank, config.tensor_parallel_size)
    return KernelCompiler(order, max(config.tensor_parallel_size, config.node_ranks))


def _load_driver() -> None:
    """Load Triton's driver before the first launch would. The driver is compiled from C."""
    with suppress(Exception):  # the first launch has the error again
        _ = driver.active


class _Jobs:
    """Runs jobs in threads, the most costly waiting job first. Jobs of other ranks follow, the least costly first.

    All ranks use this order. So if this rank takes a job of another rank that is not done, that rank has not begun the
    job.
    """

    def __init__(self, pool: ThreadPoolExecutor, order: CompileOrder) -> None:
        self._pool, self._order = pool, order
        self._waiting: PriorityQueue[tuple[bool, int, int, Callable[[], None]]] = PriorityQueue()
        self._others: list[tuple[int, Callable[[], None]]] = []
        self._futures: list[Future[None]] = []
        self._num_jobs = 0

    def add(self, cost: int, job: Callable[[], None]) -> None:
        """Run a job, or keep it for later if another rank runs it first.

        `cost` is compared with the cost of other jobs.
        """
        if self._order.is_assigned(self._num_jobs):
            self._submit(False, -cost, job)
        else:
            self._others.append((cost, job))
        self._num_jobs += 1

    def finish(self) -> int:
        """Run the kept jobs, and wait for all jobs. Returns their number. Raises the error of a job that failed."""
        for cost, job in self._others:
            self._submit(True, cost, job)
        for future in self._futures:
            future.result()
        return self._num_jobs

    def cancel(self) -> None:
        """Do not begin any further job."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _submit(self, is_others: bool, rank: int, job: Callable[[], None]) -> None:
        self._waiting.put((is_others, rank, len(self._futures), job))
        self._futures.append(self._pool.submit(self._run_next))  # one for each job, but not for this one

    def _run_next(self) -> None:
        *_, job = self._waiting.get_nowait()
        job()


def compile_ahead(
    rehearsal: Callable[[], None],
    prepare_thread: Callable[[], None],
    workers: CompileWorkers,
    order: CompileOrder = _SINGLE_ORDER,
) -> int:
    """Compile the kernels that `rehearsal` launches and that are not compiled yet. Returns their number.

    The rehearsal launches nothing, so outputs of kernels are uninitialized memory. `prepare_thread` makes the device
    current in a thread. Each worker has a thread that gives it kernels, and compiles the kernels that the worker cannot
    compile. An error, also in the rehearsal, ends the workers.
    """
    launchers: defaultdict[tuple[str, ...], Lock] = defaultdict(Lock)
    with _refuse_compilation(), ThreadPoolExecutor(max(1, workers.count), initializer=prepare_thread) as pool:
        jobs = _Jobs(pool, order)

        def add(function: JITFunction[Any], specialization: str) -> None:
            # The length of the source tells which take long: see docs/decisions/host-overhead.md.
            jobs.add(len(function.src), partial(_compile, function, specialization, workers, launchers))

        def add_binary(binary: Binary) -> None:
            jobs.add(_CUDA_COST, partial(_compile_binary, binary, workers))

        try:
            with _record_launches(add), record_launches(add_binary):
                rehearsal()
            return jobs.finish()
        except BaseException:  # the start has failed, or is interrupted: each thread ends with its kernel
            jobs.cancel()
            workers.close()
            raise


@contextmanager
def _record_launches(report: Callable[[JITFunction[Any], str], None]) -> Iterator[None]:
    """Report each Triton kernel that this thread launches and that is not compiled. No kernel is launched.

    Kernels that another thread has compiled meanwhile are not launched either: skipped kernels may leave invalid
    indices.
    """
    thread, reported = get_ident(), set[tuple[JITFunction[Any], str]]()
    run, previous_hook = JITFunction.run, knobs.runtime.jit_cache_hook

    def record(*, fn: Any, compile: dict[str, Any], **details: Any) -> bool | None:
        if get_ident() != thread:
            return None if previous_hook is None else previous_hook(fn=fn, compile=compile, **details)
        kernel = fn.jit_function, compile["specialization_data"]
        if kernel not in reported:
            reported.add(kernel)
            report(*kernel)
        return True  # do not compile it here

    def run_without_launch(function: JITFunction[Any], *args: Any, warmup: bool, **kwargs: Any) -> Any:
        return run(function, *args, warmup=warmup or get_ident() == thread, **kwargs)

    knobs.runtime.jit_cache_hook = record
    JITFunction.run = run_without_launch
    try:
        yield
    finally:
        knobs.runtime.jit_cache_hook = previous_hook
        JITFunction.run = run


class _NotCompiledError(Exception):
    """Reports that Triton's cache folder does not have a kernel."""


class _ClosedError(Exception):
    """Reports that no more kernels are to be compiled."""


_thread = local()


@contextmanager
def _refuse_compilation() -> Iterator[None]:
    """Make Triton's compiler raise _NotCompiledError in threads that ask workers, instead of compiling."""

    def refuse(*_: object) -> None:
        if getattr(_thread, "asks", False):
            raise _NotCompiledError
        if previous_hook is not None:
            previous_hook(*_)

    previous_hook = knobs.runtime.add_stages_inspection_hook
    knobs.runtime.add_stages_inspection_hook = refuse
    try:
        yield
    finally:
        knobs.runtime.add_stages_inspection_hook = previous_hook


def _compile_binary(binary: Binary, workers: CompileWorkers) -> None:
    if binary.is_compiled() or workers.compile(binary):
        return
    if workers.is_closed:
        raise _ClosedError
    binary.compile()


def _compile(
    function: JITFunction[Any],
    specialization: str,
    workers: CompileWorkers,
    launchers: Mapping[tuple[str, ...], AbstractContextManager[Any]],
) -> None:
    """Compile a kernel and its launcher. The first launch finds both in Triton's cache.

    A C compiler makes one launcher per signature, which takes as long as the kernel. `launchers` has a lock per
    signature, so that no launcher is compiled twice.
    """
    _thread.asks = True
    try:
        kernel = function.preload(specialization)
    except _NotCompiledError:
        _thread.asks = False
        target = driver.active.get_current_target()
        workers.compile(KernelSource(function.module, function.fn.__qualname__, specialization, target))
        if workers.is_closed:
            raise _ClosedError from None
        kernel = function.preload(specialization)
    if kernel is not None:
        with launchers[tuple(map(str, kernel.src.signature.values()))]:
            driver.active.launcher_cls(kernel.src, kernel.metadata)


def rehearse(runner: ModelRunner, limits: StepLimits) -> None:
    """Launch the steps of `warm_up` and decode steps with kernels skipped, so that their results are invalid.

    No sampled token is used as an index: penalties do not count tokens, and log-probabilities, which have no kernel of
    this package, are not computed. Layers of one kind launch the same kernels, so one layer of each kind runs. Each
    rank rehearses alone.
    """
    # The largest step is a size of its own: it may run other kernels than the next size below.
    decodes = sorted({count for count in (*DECODE_BATCHES, limits.max_num_seqs) if 0 < count <= limits.max_num_seqs})
    with runner.without_collectives(), runner.model.one_layer_per_kind(), runner.sampler.without_counts():
        runner.warm_up_decodes(decodes)
        _launch_prompts(runner, limits)
        _launch_sampling(runner, [params for params in EVERY_SAMPLING if params.logprobs is None])
        _launch_windows(runner, limits)  # last: ranks number kernels in this order, and one drafts by n-gram
    runner.reset_last_tokens()


# --- running -------------------------------------------------------------------------------------------------------


def warm_up(runner: ModelRunner, limits: StepLimits) -> None:
    """Run prompts within these limits on the padding row."""
    _launch_prompts(runner, limits)
    _launch_sampling(runner, EVERY_SAMPLING)
    _launch_windows(runner, limits)


def prepare_kernels(
    runner: ModelRunner,
    config: EngineConfig,
    limits: StepLimits,
    compiler: KernelCompiler | None,
    compile_on_ranks: Callable[[StepLimits], None] | None,
    progress: Progress,
) -> list[MemoryRow]:
    """Select the implementations of the kernels. On a GPU, compile all kernels and capture steps as CUDA graphs.

    `compile_on_ranks` lets other ranks compile theirs. Returns a row for the memory of graphs, or none.
    """
    force_implementation("reference" if "reference-kernels" in config.debug else None)
    set_uniform_routing("uniform-routing" in config.debug, config.seed)
    if compiler is None:
        return []  # torch bodies need no compiling, and the host tells them how to pad, which a graph cannot
    if may_stay_on_all_sms(config, runner.device):
        runner.model.prepare_decode(runner.caches)
    progress("compiling kernels", 0.0)
    if compile_on_ranks is not None:
        compile_on_ranks(limits)
    compiler.compile_kernels(runner, limits)
    compiler.close()
    warm_up(runner, limits)
    return [] if config.enforce_eager else capture_graphs(runner, config, progress)


def capture_graphs(runner: ModelRunner, config: EngineConfig, progress: Progress) -> list[MemoryRow]:
    """Capture steps as CUDA graphs. Returns a row for their memory, or none if it belongs to a budget."""
    has_prefill_graphs = "no-prefill-graphs" not in config.debug
    if has_budget(config, runner.device):
        torch.cuda.empty_cache()  # gaps of the warm-up belong to the graphs
        runner.capture_graphs(progress, prefill=has_prefill_graphs, capture_all=True)
        return []
    free_bytes = torch.cuda.mem_get_info(runner.device)[0]
    runner.capture_graphs(progress, prefill=has_prefill_graphs)
    return [MemoryRow("CUDA graphs", free_bytes - torch.cuda.mem_get_info(runner.device)[0], "out of the reserve")]


def may_stay_on_all_sms(config: EngineConfig, device: torch.device) -> bool:
    """Return whether a kernel may wait for its blocks on other SMs.

    Under MPS two such kernels could wait for each other forever, and ranks wait for each other's.
    """
    is_mps = config.sharing is not None and config.sharing.sm_percent is not None
    if config.tensor_parallel_size > 1 or is_mps or "no-persistent-decode" in config.debug:
        return False
    return not has_mps(device)


def _launch_prompts(runner: ModelRunner, limits: StepLimits) -> None:
    for num_tokens in PROMPT_TOKENS + (EXPERT_TOKENS if runner.model.config.experts else ()):
        if num_tokens <= limits.max_num_batched_tokens:
            runner.launch(_make_prompts(num_tokens, limits.max_model_len)).read()
    runner.launch(_max_tile_prompts(limits)).read()
    for count in PROMPTS_PER_STEP if runner.recurrent_states is not None else ():
        runner.launch([_make_prompt(index, 2, SamplingParams()) for index in range(count)]).read()


def _launch_sampling(runner: ModelRunner, params: Sequence[SamplingParams]) -> None:
    runner.proposes_drafts = runner.drafter is not None
    runner.launch([_make_prompt(index, 1, sampling) for index, sampling in enumerate(params)]).read()
    runner.proposes_drafts = False
    runner.sampler.warm_up_masks()


def _launch_windows(runner: ModelRunner, limits: StepLimits) -> None:
    """Run steps with drafts, with as many tokens as their graphs have. A step samples all of these tokens."""
    if runner.drafter is None:
        return
    runner.proposes_drafts = True
    window = 1 + runner.drafter.max_drafts
    for count, num_tokens in window_shapes(limits.max_num_seqs, limits.max_num_batched_tokens, window):
        sizes = [
            min(num_tokens // count + (index < num_tokens % count), limits.max_model_len) for index in range(count)
        ]
        windows = [
            _make_prompt(index, 1, SamplingParams())._replace(size=size, drafts=(0,) * (size - 1))
            for index, size in enumerate(sizes)
        ]
        runner.launch(windows).read()
    runner.proposes_drafts = False


def _max_tile_prompts(limits: StepLimits) -> list[Chunk]:
    """Return a step with as many query tiles as possible (kernels/attention/prefill.py).

    The step has as many short prompts as may run in it. The first prompt gets the rest of the tokens.
    """
    short_len = min(2, limits.max_model_len)
    count = max(1, min(limits.max_num_seqs, limits.max_num_batched_tokens // short_len))
    num_unassigned = limits.max_num_batched_tokens - count * short_len
    chunks = []
    for index in range(count):
        num_extra = min(num_unassigned, limits.max_model_len - short_len)
        num_unassigned -= num_extra
        chunks.append(_make_prompt(index, short_len + num_extra, SamplingParams()))
    return chunks


def _make_prompts(tokens: int, max_model_len: int) -> list[Chunk]:
    """Divide `tokens` among as few prompts as possible."""
    sizes = [min(max_model_len, tokens - start) for start in range(0, tokens, max_model_len)]
    return [_make_prompt(index, size, SamplingParams()) for index, size in enumerate(sizes)]


def _make_prompt(index: int, tokens: int, sampling: SamplingParams) -> Chunk:
    request = Request(AddRequest(f"warm up {index}", [0] * tokens, sampling), index, frozenset(), None)
    request.row = PADDING_ROW
    request.penalty_slot = 0  # not in use yet, and reset by the first sequence that gets it
    return Chunk(request, 0, tokens, samples=True)
