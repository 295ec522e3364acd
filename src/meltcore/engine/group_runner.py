"""A runner on every rank of a group: rank 0 plans a step and tells the others, all compute it.

Each rank has the logits of its own tokens. For the likeliest token, and for one drawn by temperature alone, ranks
exchange one candidate a row. Only rows that need more (top-k, log-probabilities, penalties, ...) are put together, on
rank 0, which chooses and tells the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from meltcore.engine.batch import Step
from meltcore.engine.rank_messages import Choices
from meltcore.engine.ranks import Ranks
from meltcore.engine.request import Request
from meltcore.engine.runner import Event, LaunchedStep, Layout, LogitsAt, ModelRunner
from meltcore.engine.sampler import Sampler, SampleResult
from meltcore.engine.scheduler import Chunk
from meltcore.engine.transfer import to_device, to_device_together
from meltcore.kernels.candidates import candidates, drawn_candidates, tokens_of
from meltcore.layers.group import Group
from meltcore.models.decoder import Decoder
from meltcore.models.loader import Progress


class GroupRunner(ModelRunner):
    """`launch` is rank 0's; the others `follow`. ranks: its hold on them; None elsewhere, and while a rank is alone."""

    # Ranks share what a step computes, but each launches all of it.
    most_graph_tokens = 16384

    def __init__(
        self,
        model: Decoder,
        sampler: Sampler,
        layout: Layout,
        cache_dtype: torch.dtype,
        group: Group,
        ranks: Ranks | None = None,
    ) -> None:
        super().__init__(model, sampler, layout, cache_dtype)
        self._group = group
        self._ranks = ranks
        self._failure: BaseException | None = None  # of the choice of the step under way

    def capture_graphs(self, progress: Progress, *, prompts: bool) -> None:
        if self._ranks is None:
            super().capture_graphs(progress, prompts=prompts)
            return
        self._ranks.capture_graphs()
        with self._ranks.together():
            super().capture_graphs(progress, prompts=prompts)

    def launch(self, plan: list[Chunk]) -> LaunchedStep:
        with nullcontext() if self._ranks is None else self._ranks.together():
            launched = super().launch(plan)
        # Raised within, it would be put down to a rank, and the group given up.
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        return launched

    def forget_graphs(self) -> None:
        """Before the group is left: from 2.26 on, NCCL does not end before the last graph that it is part of."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self._graphs = self._prompt_graphs = self._decoded = None

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Every rank can launch then, and none is told."""
        ranks, self._ranks = self._ranks, None
        try:
            with self._group.alone():
                yield
        finally:
            self._ranks = ranks

    @torch.inference_mode()
    def follow(self, step: Step, choices: Choices) -> None:
        """Compute a step that rank 0 computes too."""
        token_ids, logits_at = self._compute(step)
        self._choose(logits_at, token_ids, choices, [])

    def likeliest(self, logits: torch.Tensor) -> torch.Tensor:
        return tokens_of(self._group.largest(candidates(logits, self._first_token(logits))))

    def _run(self, step: Step, requests: list[Request]) -> SampleResult:
        choices = self._choices(requests)
        if self._ranks is not None:
            self._ranks.run(step, choices)
        token_ids, logits_at = self._compute(step)
        return self._choose(logits_at, token_ids, choices, requests)

    def _done(self) -> Event | None:
        event = super()._done()
        return None if event is None or self._ranks is None else _WatchedEvent(event, self._ranks)

    def _choices(self, requests: list[Request]) -> Choices:
        drawn: list[int] = []
        full: list[int] = []
        for index, request in enumerate(requests):
            # Whole rows are dear, so once an end token may come the candidates of each share do.
            if not (request.plain_greedy or (request.takes_likeliest and not request.may_not_end)):
                (drawn if _by_temperature_alone(request) else full).append(index)
        drawing = [requests[index] for index in drawn]
        return Choices(
            drawn=drawn,
            drawn_rows=[request.row for request in drawing],
            seeds=[self.sampler.seed_of(request) for request in drawing],
            positions=[request.length for request in drawing],
            temperatures=[request.sampling.temperature for request in drawing],
            full=full,
            full_rows=[requests[index].row for index in full],
        )

    def _choose(
        self, logits_at: LogitsAt, token_ids: torch.Tensor, choices: Choices, requests: list[Request]
    ) -> SampleResult:
        """Replace the greedy choice `token_ids` where a request wants another; in place. requests: rank 0's."""
        if choices.drawn:
            self._draw(logits_at, token_ids, choices)
        if not choices.full:
            return SampleResult(token_ids, [], None)
        at, rows = to_device_together([choices.full, choices.full_rows], self.device)
        whole = self._group.side_by_side(logits_at(at))
        if whole is None:
            chosen = SampleResult(torch.empty_like(at), [], None)
        else:
            chosen = self._choose_alone(whole, [requests[index] for index in choices.full])
        token_ids[at] = self._last_token[rows] = self._group.as_first(chosen.token_ids)
        return SampleResult(token_ids, [choices.full[row] for row in chosen.logprob_rows], chosen.logprobs)

    def _choose_alone(self, logits: torch.Tensor, requests: list[Request]) -> SampleResult:
        """Rank 0's choice from whole rows. Where it fails, in a caller's token mask or by Ctrl-C, tokens that stand for
        it: the others wait for some, and after these all are ready for the next step. `launch` raises the failure."""
        try:
            return self.sampler.sample(logits, requests)
        except BaseException as error:
            self._failure = error
            return SampleResult(torch.zeros(len(requests), dtype=torch.int64, device=self.device), [], None)

    def _draw(self, logits_at: LogitsAt, token_ids: torch.Tensor, choices: Choices) -> None:
        at, rows, seeds, positions = to_device_together(
            [choices.drawn, choices.drawn_rows, choices.seeds, choices.positions], self.device
        )
        temperatures = to_device(choices.temperatures, torch.float32, self.device)
        logits = logits_at(at)
        own = drawn_candidates(logits, temperatures, seeds, positions, self._first_token(logits))
        token_ids[at] = self._last_token[rows] = tokens_of(self._group.largest(own))

    def _first_token(self, logits: torch.Tensor) -> int:
        return self._group.rank * logits.shape[1]


class _WatchedEvent:
    """An event that is waited for with an eye on the other ranks."""

    def __init__(self, event: Event, ranks: Ranks) -> None:
        assert isinstance(event, torch.cuda.Event)
        self._event, self._ranks = event, ranks

    def synchronize(self) -> None:
        self._ranks.wait(self._event)


def _by_temperature_alone(request: Request) -> bool:
    """Whether a draw from all tokens by their own logits is all that is asked for."""
    each = request.sampling
    return (
        each.temperature > 0
        and (each.top_k, each.top_p, each.min_p) == (0, 1.0, 0.0)
        and not each.penalised
        and each.logprobs is None
        and not request.may_not_end
        and request.token_mask is None
    )
