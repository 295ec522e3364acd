"""The engine: requests in, tokens out, one step at a time."""

from __future__ import annotations

import atexit
import time
import weakref
from collections.abc import Iterable

import numpy as np
import torch

from meltcore.config import EngineConfig
from meltcore.engine.compile_ahead import Turn
from meltcore.engine.group_runner import GroupRunner
from meltcore.engine.loading import check_shares, choose_device, load, or_default
from meltcore.engine.messages import (
    AddRequest,
    EngineReady,
    EngineStats,
    FinishReason,
    MemoryRow,
    RequestTimes,
    SequenceOutput,
    StepOutputs,
    TokenLogprobs,
)
from meltcore.engine.page_pool import PAGE_SIZE, PagePool
from meltcore.engine.prefix_cache import PrefixCache
from meltcore.engine.rank_start import StartedRanks
from meltcore.engine.ranks import Ranks
from meltcore.engine.request import Request, Sampled, TokenMask
from meltcore.engine.runner import LaunchedStep, Layout, ModelRunner
from meltcore.engine.sampler import Sampler
from meltcore.engine.scheduler import Scheduler
from meltcore.engine.state_pool import StatePool
from meltcore.engine.warm_up import Limits, compile_kernels, warm_up
from meltcore.errors import RequestError
from meltcore.kernels.dispatch import force_reference
from meltcore.layers.uniform_routing import route_at_random
from meltcore.models.checkpoint import open_checkpoint
from meltcore.models.loader import Progress


class Engine:
    """Everything of one replica on one device. `step` computes; between steps requests may be added and aborted.

    With overlap a step is launched before the last one's tokens are read, so that the device never waits for the host.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        progress: Progress | None = None,
        overlap: bool | None = None,
        pages: int | None = None,
        state_slots: int | None = None,
        ranks: StartedRanks | None = None,
    ) -> None:
        """ranks: `config.tp` of them where they are started already."""
        started = time.monotonic()
        progress = progress or (lambda stage, fraction: None)
        self.config = config
        self.checkpoint = open_checkpoint(config.model, files="config" if config.load_format == "dummy" else "all")
        device = choose_device(config.device, ranks=config.tp)
        if device.type == "cuda" and device.index is not None:
            torch.cuda.set_device(device)  # Triton launches, and graphs record, on this thread's current GPU
        if config.tp > 1:
            check_shares(config, self.checkpoint, device)
        self._ranks = Ranks(config, ranks) if config.tp > 1 else None
        if self._ranks is not None:
            atexit.register(_close, weakref.ref(self))  # NCCL must not be left to whoever tidies up first
        try:
            self._prepare(device, progress, pages, state_slots)
        except BaseException:
            self.close()
            raise
        if overlap is None:
            overlap = device.type == "cuda" and "no-overlap" not in config.debug
        self._overlap = overlap
        self._launched: LaunchedStep | None = None
        self._launched_s = 0.0
        self._returned_s = 0.0  # when `step` did last
        self._requests: dict[str, Request] = {}
        self._ended: list[SequenceOutput] = []
        # Some checkpoints name end tokens of a larger vocabulary, which nothing here can choose or mask.
        self._eos = frozenset(each for each in self.checkpoint.eos_token_ids if each < self.vocab_size)
        self._added = 0
        self._steps = 0
        self._step_s = 0.0
        self._prompt_tokens = 0
        self._generated_tokens = 0
        self.load_s = time.monotonic() - started

    def _prepare(self, device: torch.device, progress: Progress, pages: int | None, state_slots: int | None) -> None:
        """Load the model, and lay out what serving needs for as many sequences as the memory left can hold."""
        config, ranks = self.config, self._ranks
        group = None
        if ranks is not None:
            progress("meeting other ranks", 0.0)
            group = ranks.meet(device)
        progress("making the model", 0.0)
        loaded = load(config, self.checkpoint, device, progress if ranks is None else ranks.watched(progress), group)
        plan = loaded.plan if ranks is None else ranks.common_plan(loaded.plan)
        self.max_model_len, self.max_num_seqs = loaded.max_model_len, plan.max_num_seqs
        self.memory = plan.rows if ranks is None else [_on_each_rank(row) for row in plan.rows]
        pages = plan.pages if pages is None else pages
        self.pool = PagePool(pages)
        state_slots = plan.state_slots if state_slots is None else state_slots
        self.states = StatePool(state_slots) if plan.state_slots else None
        self.scheduler = Scheduler(
            self.pool,
            None if "no-prefix-cache" in config.debug else PrefixCache(self.pool),
            self.states,
            max_num_seqs=self.max_num_seqs,
            penalty_slots=plan.penalty_slots,
            max_num_batched_tokens=or_default(config.max_num_batched_tokens, device, cuda=8192, cpu=2048),
            max_model_len=self.max_model_len,
        )
        self.vocab_size = loaded.model.config.vocab_size
        tokens = self.scheduler.max_num_batched_tokens
        layout = Layout(pages, state_slots, self.max_num_seqs, self.max_model_len, tokens, plan.logit_rows)
        sampler = Sampler(self.vocab_size, device, config.seed, plan.penalty_slots)
        if ranks is None or group is None:
            self.runner = ModelRunner(loaded.model, sampler, layout, loaded.cache_dtype)
        else:
            ranks.settle(layout)
            self.runner = GroupRunner(loaded.model, sampler, layout, loaded.cache_dtype, group, ranks)
            ranks.wait_settled()
        self._make_fast(device, progress)
        if ranks is not None:
            ranks.serve()

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to compute, to read or to report."""
        return self.scheduler.has_work or self._launched is not None or bool(self._ended)

    def add(self, message: AddRequest, token_mask: TokenMask | None = None) -> None:
        """Queue a sequence. Raises RequestError where it cannot be served; the fronts check the same first."""
        if message.request_id in self._requests:
            raise RequestError(f"request id {message.request_id} is in use", param="request_id")
        length = message.prompt_length
        if not 1 <= length < self.max_model_len:
            raise RequestError(
                f"the prompt must have 1 to {self.max_model_len - 1} tokens; it has {length}", param="prompt"
            )
        message.sampling.check(self.vocab_size)
        stop_ids = frozenset(message.sampling.stop_token_ids)
        if not message.sampling.ignore_eos:
            stop_ids |= self._eos
        try:
            request = Request(message, self._added + 1, stop_ids, token_mask)
            fits = np.frombuffer(request.token_ids, np.uint32).max() < self.vocab_size
        except OverflowError:  # negative, or of more than 32 bits
            fits = False
        if not fits:
            raise RequestError(f"prompt token ids must be from 0 to {self.vocab_size - 1}", param="prompt")
        self._added += 1
        self._requests[request.id] = request
        self.scheduler.add(request)

    def abort(self, request_ids: Iterable[str]) -> None:
        """End these with reason "abort", reported by the next `step`; ids that ended already are ignored."""
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is not None:
                self.scheduler.finish(request, "abort")
                self._ended.append(self._last_output(request, [], None))

    def step(self) -> StepOutputs:
        """Launch the next step and read the one before it (without overlap: the same one). Returns what is new."""
        started = time.monotonic()
        plan = self.scheduler.schedule()
        for chunk in plan:
            if chunk.request.scheduled_s == 0.0:
                chunk.request.scheduled_s = started
                self._prompt_tokens += chunk.request.prompt_length
        try:
            launched = self.runner.launch(plan) if plan else None
        except BaseException:  # in a caller's token mask, or by Ctrl-C: the offline API goes on with other requests
            self.scheduler.abandon(plan)
            raise
        to_read, begun_s = (self._launched, self._launched_s) if self._overlap else (launched, started)
        self._launched, self._launched_s = (launched, started) if self._overlap else (None, 0.0)
        outputs, self._ended = self._ended, []
        if to_read is not None:
            outputs += self._read(to_read)
        ended = time.monotonic()
        if self.scheduler.pacer is not None and to_read is not None:
            self.scheduler.note_time(to_read.chunks, ended - max(begun_s, self._returned_s))
        self._returned_s = ended
        if plan:
            self._steps += 1
        self._step_s += ended - started
        return StepOutputs(outputs, self.stats(), ended)

    def stats(self) -> EngineStats:
        return EngineStats(
            running=len(self.scheduler.running),
            waiting=self.scheduler.waiting_count,
            pages_used=self.pool.used,
            pages_total=self.pool.total,
            steps_total=self._steps,
            step_s_total=self._step_s,
            prompt_tokens_total=self._prompt_tokens,
            generated_tokens_total=self._generated_tokens,
            prefix_queried_tokens_total=self.scheduler.prefix_queried_tokens,
            prefix_hit_tokens_total=self.scheduler.prefix_hit_tokens,
            preemptions_total=self.scheduler.preemptions,
            state_slots=0 if self.states is None else self.states.total,
            state_slots_used=0 if self.states is None else self.states.used,
            state_snapshots=0 if self.states is None else len(self.states.snapshots),
        )

    def check(self) -> None:
        """Raise RankError where a rank has failed; for times without work, since `step` notices by itself."""
        if self._ranks is not None:
            self._ranks.check()

    def close(self) -> None:
        """End the processes of other ranks. There can be no step after."""
        if self._ranks is not None:
            self._ranks.close(self._forget_graphs)

    def _forget_graphs(self) -> None:
        assert isinstance(self.runner, GroupRunner)
        self.runner.forget_graphs()

    def ready(self) -> EngineReady:
        model = self.runner.model
        return EngineReady(
            device=_describe(self.runner.device, self.config.tp),
            dtype=_precision(model.embedding.dtype, self.config),
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            vocab_size=self.vocab_size,
            pages_total=self.pool.total,
            page_size=PAGE_SIZE,
            weights="dummy" if self.config.load_format == "dummy" else "real",
            memory=self.memory,
            load_s=self.load_s,
        )

    def check_idle(self) -> None:
        """Raise AssertionError where an engine without work still holds something: a leak."""
        assert not self._requests, f"{len(self._requests)} requests are still known"
        assert self.pool.used == 0, f"{self.pool.used} pages are still held"
        self.pool.check()
        if self.states is not None:
            assert self.states.used == 0, f"{self.states.used} state slots are still held"
            self.states.check()
        if self.scheduler.cache is not None:
            self.scheduler.cache.check()
        if self.scheduler.snapshots is not None:
            self.scheduler.snapshots.check()

    def _make_fast(self, device: torch.device, progress: Progress) -> None:
        """Choose the kernels' bodies; on a GPU compile them all, and record decode steps as graphs."""
        reference = "reference-kernels" in self.config.debug
        force_reference(reference)
        route_at_random("uniform-routing" in self.config.debug, self.config.seed)
        if device.type != "cuda" or reference:
            return  # the torch bodies need no compiling, and are told by the host how to pad: a graph has no host
        limits = Limits(self.max_num_seqs, self.max_model_len, self.scheduler.max_num_batched_tokens)
        progress("compiling kernels", 0.0)
        if self._ranks is not None:
            self._ranks.compile_kernels(limits)
        compile_kernels(self.runner, limits, Turn(0, self.config.tp))
        warm_up(self.runner, *limits)
        if "no-graphs" not in self.config.debug:
            before = torch.cuda.mem_get_info(device)[0]
            self.runner.capture_graphs(progress, prompts="no-prompt-graphs" not in self.config.debug)
            taken = before - torch.cuda.mem_get_info(device)[0]
            self.memory.append(MemoryRow("CUDA graphs", taken, "out of the reserve"))

    def _read(self, step: LaunchedStep) -> list[SequenceOutput]:
        sampled = step.read()
        now = time.monotonic()
        requests = [chunk.request for chunk in step.chunks if chunk.samples]
        live = [
            (request, result)
            for request, result in zip(requests, sampled, strict=True)
            if self._requests.get(request.id) is request
        ]
        finished = {end.request.id: end for end in self.scheduler.update(step.chunks, sampled)}
        outputs = []
        for request, result in live:
            self._generated_tokens += 1
            if request.first_token_s == 0.0:
                request.first_token_s = now
            end = finished.get(request.id)
            if end is None:
                logprobs = _listed(result)
                outputs.append(SequenceOutput(request.id, [result.token_id], logprobs=logprobs))
            else:
                outputs.append(self._last_output(request, [result.token_id], end.stop_token_id, _listed(result)))
        return outputs

    def _last_output(
        self,
        request: Request,
        token_ids: list[int],
        stop_token_id: int | None,
        logprobs: list[TokenLogprobs] | None = None,
    ) -> SequenceOutput:
        del self._requests[request.id]
        reason: FinishReason = request.finish_reason or "abort"
        return SequenceOutput(
            request.id,
            token_ids,
            finish_reason=reason,
            stop_token_id=stop_token_id,
            logprobs=logprobs,
            cached_tokens=request.cached_tokens,
            times=RequestTimes(request.arrived_s, request.scheduled_s, request.first_token_s, time.monotonic()),
        )


def _close(engine: weakref.ref[Engine]) -> None:
    living = engine()
    if living is not None:
        living.close()


def _precision(dtype: torch.dtype, config: EngineConfig) -> str:
    """What answers are computed in, so that results of unlike precision are told apart by name."""
    names = [str(dtype).removeprefix("torch.")]
    if config.quantization != "none":
        names.append(f"{config.quantization}-weights")
    if config.kv_cache_dtype != "auto":
        names.append(f"{config.kv_cache_dtype}-kv")
    return "+".join(names)


def _describe(device: torch.device, ranks: int) -> str:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return f"{ranks} x {name}" if ranks > 1 else name


def _on_each_rank(row: MemoryRow) -> MemoryRow:
    return MemoryRow(row.name, row.size_bytes, f"{row.note}, on each rank" if row.note else "on each rank")


def _listed(result: Sampled) -> list[TokenLogprobs] | None:
    return None if result.logprobs is None else [result.logprobs]
