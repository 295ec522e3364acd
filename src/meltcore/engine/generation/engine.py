"""Generates tokens for requests, one step after another."""

from __future__ import annotations

import atexit
import time
import weakref
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial

import msgspec
import numpy as np
import torch

from meltcore.common.errors import RequestError, SleepError
from meltcore.engine.core.chunk import Chunk, prompt_tokens
from meltcore.engine.core.constraints import Constraints, Dropped
from meltcore.engine.core.kv_cache import PAGE_SIZE, PageLayout, PagePool, PrefixCache
from meltcore.engine.core.pacing import PromptSpeed
from meltcore.engine.core.recurrent_states import RecurrentStatePool
from meltcore.engine.core.request import Request, RequestStatus, TokenMask
from meltcore.engine.core.scheduler import Scheduler
from meltcore.engine.distributed.group_runner import GroupRunner
from meltcore.engine.distributed.rank_start import StartedRanks
from meltcore.engine.distributed.ranks import Ranks
from meltcore.engine.generation.speculation import Speculation
from meltcore.engine.host.device import choose_device, describe_device, describe_precision, dtype_name
from meltcore.engine.host.sleep import SleepResult
from meltcore.engine.host.sleep_memory import Keep, make_sleep_memory, require_memory
from meltcore.engine.host.step_pacing import NO_WAIT, StepCounts, StepTurn
from meltcore.engine.memory.graph_sizes import sampled_tokens
from meltcore.engine.worker.caches import ModelRunnerConfig
from meltcore.engine.worker.launched_step import Event, LaunchedStep, SampledTokens
from meltcore.engine.worker.loading import batched_tokens, check_shards, fill_weights, load
from meltcore.engine.worker.model_runner import ModelRunner
from meltcore.engine.worker.sampler import Sampler
from meltcore.engine.worker.warm_up import KernelCompiler, StepLimits, make_compiler, prepare_kernels
from meltcore.models.checkpoints.checkpoint import CheckpointFiles, Progress, open_checkpoint
from meltcore.models.decoders.kv_cache_specs import group_layers
from meltcore.models.quantized.quantization import weight_dtypes
from meltcore.protocol.generation import (
    NO_DRAFTS,
    AddRequest,
    EngineStats,
    FinishReason,
    GenerationReady,
    SequenceOutput,
    StepOutputs,
    TokenLogprobs,
)
from meltcore.settings.config import EngineConfig
from meltcore.text.grammar import GrammarCompiler


class GenerationEngine:
    """Runs one replica of a model on one device, or on one device per rank.

    Requests may be added and aborted between steps. With async scheduling a step is launched before the tokens of the
    previous step are read, so the device never waits for the host.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        progress: Progress | None = None,
        pages: int | None = None,
        recurrent_slots: int | None = None,
        ranks: StartedRanks | None = None,
    ) -> None:
        """Load the model and prepare to serve.

        Args:
            config: the settings.
            progress: receives the stage and the fraction of loading.
            pages: the number of cache pages, for tests. None takes the number from the memory plan.
            recurrent_slots: the number of recurrent-state slots, for tests. None takes the number from the memory plan.
            ranks: rank processes that were started earlier. None starts them if there are several ranks.

        Raises ConfigError if the model or a setting cannot work, and RankError if a rank fails.
        """
        start_s = time.monotonic()
        progress = progress or (lambda _stage, _fraction: None)
        self.config = config
        files: CheckpointFiles = "config" if config.load_format == "dummy" else "all"
        self.checkpoint = open_checkpoint(config.model, files=files, tokenizer=config.tokenizer)
        device = choose_device(config.device, num_ranks=config.tensor_parallel_size)
        if config.tensor_parallel_size > 1:
            check_shards(config, self.checkpoint, device)
        self._compiler: KernelCompiler | None = None
        self._speculation: Speculation | None = None
        self._ranks = Ranks(config, ranks) if config.tensor_parallel_size > 1 else None
        if self._ranks is not None:
            atexit.register(_close, weakref.ref(self))  # NCCL must not be left to the interpreter's teardown
        self._constraints = Constraints(
            partial(GrammarCompiler.from_checkpoint, self.checkpoint, allow_missing=config.load_format == "dummy"),
            lambda num_ids: self.runner.sampler.allocate_masks(self.max_num_seqs + 1, num_ids, config.max_drafts),
        )
        try:
            self._compiler = make_compiler(config, device)  # it forks, so before the GPU has a context of this process
            self._constraints.start()  # reads the vocabulary while weights are read, and is no thread of a fork
            if device.type == "cuda" and device.index is not None:
                torch.cuda.set_device(device)  # for Triton launches and graph captures of this thread
            self._sleep_memory = make_sleep_memory(
                config, device, lambda: (self.runner.weights, self.runner.cache_tensors)
            )
            with nullcontext() if self._sleep_memory is None else self._sleep_memory.building():
                self._prepare(device, progress, pages, recurrent_slots)
            if self._sleep_memory is not None:
                self.memory += self._sleep_memory.memory_rows()
        except BaseException:
            self.close()
            raise
        self._overlap = device.type == "cuda" if config.async_scheduling is None else config.async_scheduling
        self._launched: LaunchedStep | None = None
        self._launched_at, self._turn = (0.0, NO_WAIT), NO_WAIT  # its time and turn, and the newest turn
        self._prompt_speed = PromptSpeed(self.scheduler.max_num_batched_tokens)
        self._requests: dict[str, Request] = {}
        self._dropped = Dropped([], [])  # from the step that is being launched
        self._tokens: SampledTokens | None = None  # of the step that is read next
        self._unused = Dropped([], [])  # its requests whose tokens are not used
        self._read_s = 0.0  # when they were read
        self._make_outputs: Callable[[], list[SequenceOutput]] = list  # of a step that was read before a launch
        self._ended_outputs: list[SequenceOutput] = []
        # Some checkpoints name end tokens of a larger vocabulary, which this model can neither sample nor mask.
        self._eos_token_ids = frozenset(each for each in self.checkpoint.eos_token_ids if each < self.vocab_size)
        self._num_added = self._prompt_tokens = self._generated_tokens = 0
        self._step_counts = StepCounts()
        self.load_s = time.monotonic() - start_s

    def _prepare(
        self, device: torch.device, progress: Progress, pages: int | None, recurrent_slots: int | None
    ) -> None:
        """Load the model, and allocate caches and tables by the memory plan."""
        config, ranks = self.config, self._ranks
        group = None
        if ranks is not None:
            progress("joining the ranks", 0.0)
            group = ranks.join(device)
        progress("making the model", 0.0)
        loaded = load(
            config, self.checkpoint, device, progress if ranks is None else ranks.watched_progress(progress), group
        )
        plan = loaded.plan if ranks is None else ranks.common_plan(loaded.plan)
        self.max_model_len, self.max_num_seqs, self.memory = loaded.max_model_len, plan.max_num_seqs, plan.rows
        self.outside_bytes = 0 if plan.workspace is None else plan.workspace.nodes
        has_states = plan.recurrent_slots > 0
        plan = plan._replace(
            pages=plan.pages if pages is None else pages,
            recurrent_slots=plan.recurrent_slots if recurrent_slots is None else recurrent_slots,
        )
        self.pool = PagePool(plan.pages)
        self.states = RecurrentStatePool(plan.recurrent_slots) if has_states else None
        layout = PageLayout.of(group_layers(loaded.model.kv_cache_specs()))
        self.scheduler = Scheduler(
            self.pool,
            PrefixCache(self.pool, layout) if config.enable_prefix_caching else None,
            self.states,
            layout,
            max_num_seqs=self.max_num_seqs,
            penalty_slots=plan.penalty_slots,
            max_num_batched_tokens=batched_tokens(config, device),
            max_model_len=self.max_model_len,
        )
        # What is computed again must find its state and the pages of its window, and its token on all ranks.
        is_repeatable = not has_states and not layout.sliding_groups and ranks is None
        self._constraints.does_device_wait = device.type == "cuda" and is_repeatable and config.speculation is None
        self.vocab_size = loaded.model.config.vocab_size
        tokens = self.scheduler.max_num_batched_tokens
        sizes = plan.pages, plan.recurrent_slots, self.max_num_seqs, self.max_model_len, tokens, plan.logit_rows
        runner_config = ModelRunnerConfig(*sizes, window=1 + config.max_drafts)
        sampler = Sampler(self.vocab_size, device, config.seed, plan.penalty_slots)
        if ranks is None or group is None:
            self.runner = ModelRunner(loaded.model, sampler, runner_config, loaded.cache_dtype)
        else:
            ranks.allocate(runner_config)
            self.runner = GroupRunner(loaded.model, sampler, runner_config, loaded.cache_dtype, group, ranks)
            ranks.wait_allocated()
        assert self.runner.cache_bytes == plan.cache_bytes, "the caches are allocated as planned"
        if (speculation := config.speculation) is not None:
            self._speculation = Speculation(speculation)
            self.runner.start_drafts(speculation, config.seed)
            self.scheduler.max_sampled_tokens = sampled_tokens(self.max_num_seqs, runner_config.window)
        limits = StepLimits(self.max_num_seqs, self.max_model_len, tokens)
        compile_on_ranks = None if ranks is None else ranks.compile_kernels
        self.memory += prepare_kernels(self.runner, config, limits, self._compiler, compile_on_ranks, progress)
        if ranks is not None:
            ranks.serve()

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do."""
        return bool(self._requests or self._ended_outputs) or self._launched is not None

    def add(self, message: AddRequest, token_mask: TokenMask | None = None) -> None:
        """Queue a sequence. Raises RequestError if it cannot be served. API servers make the same checks."""
        if message.request_id in self._requests:
            raise RequestError(f"request id {message.request_id} is in use", param="request_id")
        leader = self._requests.get(message.leader_id or "")
        length = message.prompt_length or (0 if leader is None else leader.prompt_length)
        if not 1 <= length < self.max_model_len:
            raise RequestError(
                f"the prompt must have 1 to {self.max_model_len - 1} tokens; it has {length}", param="prompt"
            )
        message.sampling.check(self.vocab_size)
        stop_ids = frozenset(message.sampling.stop_token_ids)
        if not message.sampling.ignore_eos:
            stop_ids |= self._eos_token_ids
        try:
            request = Request(message, self._num_added + 1, stop_ids, token_mask, leader)
            is_valid = np.frombuffer(request.token_ids, np.uint32).max() < self.vocab_size
        except OverflowError:  # negative, or of more than 32 bits
            is_valid = False
        if not is_valid:
            raise RequestError(f"prompt token ids must be from 0 to {self.vocab_size - 1}", param="prompt")
        self._num_added += 1
        self._requests[request.id] = request
        if request.sampling.grammar is None:
            self.scheduler.add(request)
        else:
            self._constraints.add(request, request.sampling.grammar)

    def refuse(self, request_id: str, error: str) -> StepOutputs:
        """Return the outputs that end a request which `add` has rejected."""
        refused = [SequenceOutput(request_id, [], finish_reason="error", error=error)]
        return StepOutputs(refused, self.stats(), time.monotonic())

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests with the reason "abort", which the next `step` reports. Ids of ended requests are ignored."""
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is not None:
                self._end(request, "abort")

    def take_turn(self, turn: StepTurn) -> None:
        """Limit the prompt tokens of the next step if an engine of a higher class is using the same GPU."""
        self._turn, limit_s, budget = turn, turn.limit_s, self.scheduler.max_num_batched_tokens
        self._step_counts.begin(turn.waited_s, is_in_flight=self._launched is not None)
        wait = None if turn.wait is None or self._ranks is not None else partial(self._wait_in_step, turn.wait)
        whole = budget if limit_s is None else self._prompt_speed.tokens_in(limit_s)
        parts = self.runner.yield_between_layers(wait, whole)
        self.scheduler.max_prompt_tokens = budget if limit_s is None else self._prompt_speed.tokens_in(limit_s * parts)

    def _wait_in_step(self, wait: Callable[[], float]) -> float:
        """Wait between the layers of a step that is launched, but first for the end of the step before it."""
        if self._launched is not None:
            self._read_tokens(self._launched)
        return wait()

    def step(self) -> StepOutputs:
        """Launch the next step, then read the previous step. Return the new outputs.

        A step with drafts may have to be read first. Its outputs are returned once the next step is launched. Without
        async scheduling, or if it has yielded, the launched step is read, too.
        """
        for request in self._constraints.take_compiled():
            if request.error is None:
                self.scheduler.add(request)
            else:
                self._end(request, "error")
        following = self._choose_drafts()
        start_s, scheduled = time.monotonic(), following or self.scheduler.schedule()
        for chunk in scheduled:
            if chunk.request.scheduled_s == 0.0:
                chunk.request.scheduled_s = start_s
                self._prompt_tokens += chunk.request.prompt_length
        self._dropped = Dropped([], [])
        limits_s = self._constraints.device_limits_s
        prepare = self._prepare_sampling if self._constraints.num_open and limits_s is None else None
        self.runner.sampler.mask_limits_s = limits_s
        try:
            launched = self.runner.launch(scheduled, prepare) if scheduled else None
        except BaseException:  # in a caller's token mask, or by Ctrl-C: the offline API continues with other requests
            self.scheduler.abandon(scheduled)
            raise
        if launched is not None and any(self._dropped):
            launched = self._without(launched, self._dropped, is_read=False)
        elif launched is not None and limits_s is not None:
            if self._launched is not None:
                self._read_tokens(self._launched)
            self._constraints.launched(launched.requests)
        previous, previous_at = self._launched, self._launched_at
        self._launched, self._launched_at = launched, (start_s, self._turn)
        outputs, self._ended_outputs = [*self._ended_outputs, *self._make_outputs()], []
        self._make_outputs = list
        if previous is not None:
            outputs += self._read(previous, *previous_at)()
        if launched is not None and (not self._overlap or launched.yielded_s is not None):
            outputs += self._read_launched(launched)()
        if not scheduled and previous is None and not outputs:
            self._constraints.wait_idle()
        return StepOutputs(outputs, self.stats(), time.monotonic())

    def _choose_drafts(self) -> list[Chunk]:
        """Decide how many drafts the next step checks, which follow the tokens in flight.

        Return its chunks if it follows the step in flight before this is read. Otherwise read it first.
        """
        launched, speculation, following = self._launched, self._speculation, list[Chunk]()
        num_drafts = 0 if speculation is None else speculation.begin(self.scheduler)
        self.scheduler.max_drafts, self.runner.proposes_drafts = num_drafts, num_drafts > 0
        if speculation and num_drafts and launched and launched.windows and not self._constraints.num_open:
            following = speculation.follow(launched, self.scheduler, self.runner)
        if launched and (launched.windows or num_drafts) and not following:
            self._make_outputs = self._read_launched(launched)
        return following

    def _prepare_sampling(self, requests: list[Request], record_event: Callable[[], Event | None]) -> None:
        """Wait for the masks of a step between its forward pass and its sampling.

        The tokens of the step before are read first. Requests whose masks are late miss the step.
        """
        # A request with drafts samples several rows.
        requests = [each for each in dict.fromkeys(requests) if each.status is not RequestStatus.FINISHED]
        if all(request.constraint is None for request in requests):
            return
        forward = record_event()
        if self._launched is not None:
            self._read_tokens(self._launched)
        self._constraints.fill(requests)
        # A recurrent state cannot take the same token again.
        self._dropped = self._constraints.wait(
            requests, None if forward is None else forward.query, may_be_late=self.states is None
        )

    def _without(self, step: LaunchedStep, dropped: Dropped, *, is_read: bool) -> LaunchedStep:
        """Postpone the requests whose masks are late, and end those whose grammars have failed.

        The tokens of a step that is read have been used by the next step, in flight, which is without them, too.
        """
        requests, late = frozenset([*dropped.late, *dropped.failed]), frozenset(dropped.late)
        for chunk in step.chunks:
            if chunk.samples and chunk.request in late:
                self.scheduler.postpone(chunk, chunk.request.in_flight if is_read else 1)
                self._constraints.hold(chunk.request)
        for request in dropped.failed:
            if request.status is not RequestStatus.FINISHED:  # as one that has failed in two steps is
                self._end(request, "error")
        if is_read:
            self.runner.put_last_tokens([each for each in dropped.late if each.status is RequestStatus.RUNNING])
            self._launched = None if self._launched is None else self._launched.without(requests)
        return step.without(requests)

    def _end(self, request: Request, reason: FinishReason) -> None:
        """End a request. The next `step` reports it."""
        self.scheduler.finish(request, reason)
        self._ended_outputs.append(self._last_output(request, []))

    def _record_time(self, step: LaunchedStep, used: list[list[int]], launched_s: float, turn: StepTurn) -> None:
        tokens, goes_on = prompt_tokens(step.chunks), bool(self._launched or self.scheduler.running)
        took_s = self._step_counts.end(
            launched_s, self._read_s, len(step.chunks), tokens, turn, goes_on=goes_on, yielded_s=step.yielded_s or 0.0
        )
        if took_s is not None:
            self._prompt_speed.record(took_s, tokens)
            self.scheduler.record_step_time(step.chunks, took_s)
        if self._speculation is not None:
            self._speculation.record(step, used, took_s)

    def stats(self) -> EngineStats:
        """Return gauges and counters."""
        return EngineStats(
            running=len(self.scheduler.running),
            waiting=self.scheduler.waiting_count + self._constraints.num_compiling,
            pages_used=self.pool.num_used,
            num_pages=self.pool.total,
            prompt_tokens_total=self._prompt_tokens,
            generated_tokens_total=self._generated_tokens,
            prefix_queried_tokens_total=self.scheduler.prefix_queried_tokens,
            prefix_hit_tokens_total=self.scheduler.prefix_hit_tokens,
            preemptions_total=self.scheduler.preemptions,
            **({} if self.states is None else self.states.stats()),
            **self._constraints.stats(),
            draft_sums=NO_DRAFTS if self._speculation is None else self._speculation.packed(),
            step_sums=self._step_counts.packed(),
        )

    def check(self) -> None:
        """Raise RankError if a rank has failed. Call this while there is no work; `step` checks the ranks itself."""
        if self._ranks is not None:
            self._ranks.check()

    def close(self) -> None:
        """End threads and the processes of other ranks. No step may follow."""
        self._constraints.close()
        if self._compiler is not None:
            self._compiler.close()
        if self._ranks is not None:
            self._ranks.close(lambda: self.runner.drop_graphs())

    def sleep(self, keep: Keep) -> SleepResult:
        """Release weights and caches while there is no work. Cached prefixes are lost.

        Raises SleepError and changes nothing if the engine cannot sleep, for example without `enable_sleep_mode`.
        """
        memory = require_memory(self._sleep_memory)
        if self.has_work:
            raise SleepError(f"the engine has {len(self._requests)} open requests; it sleeps only without any")
        self.runner.forget_step()
        slept = memory.sleep(keep)
        self.pool.drop_cached()
        return slept

    def wake(self) -> int:
        """Allocate weights and caches again. Return the bytes of weights that were copied.

        Raises SleepError if the engine cannot wake. It then stays asleep, and `wake` can be called again.
        """
        fill = partial(fill_weights, self.runner.model, self.config, self.checkpoint, lambda _stage, _part: None)
        return require_memory(self._sleep_memory).wake(fill)

    def ready(self) -> GenerationReady:
        """Return the properties of a loaded engine that API servers need."""
        return GenerationReady(
            device=describe_device(self.runner.device, self.config.tensor_parallel_size),
            dtype=describe_precision(self.runner.model.dtype, self.config),
            weights="dummy" if self.config.load_format == "dummy" else "real",
            memory=self.memory,
            load_s=self.load_s,
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            vocab_size=self.vocab_size,
            num_pages=self.pool.total,
            page_size=PAGE_SIZE,
            weight_dtypes=weight_dtypes(self.runner.model),
            kv_cache_dtype=dtype_name(self.runner.kv_cache_dtype),
            speculative_decoding="none" if self.config.speculation is None else self.config.speculation.description,
        )

    def check_idle(self) -> None:
        """Raise AssertionError if an engine without work still holds memory, which would be a leak."""
        assert not self._requests, f"{len(self._requests)} requests are still known"
        assert self._constraints.num_open == 0, f"{self._constraints.num_open} grammars are still in use"
        self.scheduler.check_idle()

    def _read_tokens(self, step: LaunchedStep) -> SampledTokens:
        """Wait for a step and advance the grammars of its requests. A second call returns the same tokens."""
        if self._tokens is None:
            self._tokens, self._read_s = step.read(), time.monotonic()
            if self._constraints.num_open:
                sampled = zip(step.requests, self._tokens[0], strict=True)
                self._unused = self._constraints.commit([each for each in sampled if each[0] not in step.dropped])
        return self._tokens

    def _read_launched(self, step: LaunchedStep) -> Callable[[], list[SequenceOutput]]:
        self._launched = None
        return self._read(step, *self._launched_at)

    def _read(self, step: LaunchedStep, launched_s: float, turn: StepTurn) -> Callable[[], list[SequenceOutput]]:
        """Wait for a step and update its requests. Return a function that makes its outputs.

        Between the two, the next step may be launched.
        """
        sampled, self._tokens = self._read_tokens(step), None
        if any(self._unused):
            step, self._unused = self._without(step, self._unused, is_read=True), Dropped([], [])
        used = [each for request, each in zip(step.requests, sampled[0], strict=True) if request not in step.dropped]
        self.scheduler.update(step.chunks, used)
        if self._launched is not None and self._launched.windows:
            self._launched = self._launched.after_read()
        if not self._overlap:  # the host prepares the next step meanwhile
            self._constraints.fill([request for request in step.requests if request.status is RequestStatus.RUNNING])
        return partial(self._outputs_of, step, sampled, used, launched_s, turn)

    def _outputs_of(
        self, step: LaunchedStep, sampled: SampledTokens, used: list[list[int]], launched_s: float, turn: StepTurn
    ) -> list[SequenceOutput]:
        (token_ids, logprobs), outputs = sampled, []
        for index, request in enumerate(step.requests):
            if self._requests.get(request.id) is not request or request in step.dropped:
                continue  # aborted while the step was in flight, or it missed the step
            new_ids = token_ids[index]
            self._generated_tokens += len(new_ids)
            if is_first := request.first_token_s == 0.0:
                request.first_token_s = self._read_s
            token_logprobs = logprobs[index][: len(new_ids)] if index in logprobs else None
            if request.finish_reason is None:
                output = SequenceOutput(request.id, new_ids, logprobs=token_logprobs)
            else:
                output = self._last_output(request, new_ids, token_logprobs)
            if is_first and request.sampling.prompt_logprobs is not None:
                output = msgspec.structs.replace(output, prompt_logprobs=request.prompt_logprobs)
            outputs.append(output)
        self._record_time(step, used, launched_s, turn)
        return outputs

    def _last_output(
        self, request: Request, token_ids: list[int], logprobs: list[TokenLogprobs] | None = None
    ) -> SequenceOutput:
        del self._requests[request.id]
        if request.sampling.grammar is not None:
            self._constraints.remove(request)
        return request.last_output(token_ids, logprobs)


def _close(engine: weakref.ref[GenerationEngine]) -> None:
    live_engine = engine()
    if live_engine is not None:
        live_engine.close()
