"""Decides from measured steps for how many sequences speculative decoding pays, and counts accepted drafts.

A step with drafts takes longer and yields more tokens. Whether it pays depends on the model, the GPU, the texts, and
above all on the number of decoding sequences: few sequences leave the arithmetic units idle, many do not. So the engine
measures both kinds of steps for each size class of batches, 1, 2, 3 to 4, 5 to 8 sequences and so on.

Once both kinds have been measured, the kind that is not in use is measured again now and then, since texts change. That
takes at most MAX_PROBE_SHARE of the steps and MAX_LOSS of the time. Nothing here reads a clock or draws random numbers.
"""

from __future__ import annotations

import math

# Steps of each kind that are measured before they are compared.
MIN_STEPS = 16
# A probe has one step more, since the first step after a change is not measured: it may still wait for the last one.
PROBE_STEPS = MIN_STEPS + 1
MAX_PROBE_SHARE, MAX_LOSS = 0.02, 0.01
# Steps with drafts must be this many times as fast as others before they are used, and at least as fast while they are:
# what is not measured, steps with prompts and the first one after a change, takes longer with drafts, too.
SWITCH_GAIN = 1.05
# Older steps than these hardly count. A step counts at most as OUTLIER mean steps, so that a single stall is no result.
MEMORY_STEPS, OUTLIER = 128, 4.0


class DraftCounts:
    """Counts drafts by their position in the window.

    `drafted` and `accepted` have an entry for each of the k positions. Drafts after a rejected draft are drafted, but
    not accepted.
    """

    def __init__(self, num_speculative_tokens: int) -> None:
        """Start without a window."""
        self.drafted = [0] * num_speculative_tokens
        self.accepted = [0] * num_speculative_tokens

    def add(self, num_drafts: int, num_accepted: int) -> None:
        """Add a window that has verified `num_drafts` drafts, of which the first `num_accepted` were accepted."""
        for position in range(num_drafts):
            self.drafted[position] += 1
            self.accepted[position] += position < num_accepted


class _MeanStep:
    """Mean seconds and tokens per sequence of steps, in which recent steps count more."""

    def __init__(self) -> None:
        self.steps = 0
        self.step_s = 0.0
        self.tokens = 0.0

    @property
    def is_known(self) -> bool:
        return self.steps >= MIN_STEPS

    def add(self, took_s: float, tokens: float) -> None:
        if self.is_known:
            took_s = min(took_s, OUTLIER * self.step_s)
        self.steps = min(self.steps + 1, MEMORY_STEPS)
        self.step_s += (took_s - self.step_s) / self.steps
        self.tokens += (tokens - self.tokens) / self.steps

    def forget(self) -> None:
        """Make the next steps count as much as all earlier steps together."""
        self.steps = min(self.steps, MIN_STEPS)


class _BatchSizes:
    """What is known of the steps of one size class, and which kind of steps runs."""

    def __init__(self) -> None:
        self.is_on = True
        self.is_judged = False
        self.without, self.with_drafts = _MeanStep(), _MeanStep()
        self._probe_steps_left = 0
        self._steps_to_probe = PROBE_STEPS

    @property
    def speedup(self) -> float:
        """How many times as many tokens per second steps with drafts yield. Both kinds must be known."""
        fast, slow = self.with_drafts, self.without
        return (fast.tokens / fast.step_s) / (slow.tokens / slow.step_s)

    @property
    def _is_known(self) -> bool:
        return self.without.is_known and self.with_drafts.is_known

    def begin(self) -> bool:
        """Return whether the next step has drafts."""
        if not self._probe_steps_left:
            if self._steps_to_probe:
                self._steps_to_probe -= 1
                return self.is_on
            self._begin_probe()
        self._probe_steps_left -= 1
        return not self.is_on

    def judge(self) -> bool:
        """Compare both kinds of steps. Return whether the kind in use has changed, or has been confirmed at first."""
        if not self._is_known:
            return False
        is_better = self.speedup >= (1 if self.is_on and self.is_judged else SWITCH_GAIN)
        if is_better == self.is_on and self.is_judged:
            return False
        if is_better != self.is_on:
            self.is_on, self._probe_steps_left = is_better, 0
            self._steps_to_probe = self._probe_interval()
        self.is_judged = True
        return True

    def _begin_probe(self) -> None:
        self._probe_steps_left = PROBE_STEPS
        self._steps_to_probe = self._probe_interval()
        (self.without if self.is_on else self.with_drafts).forget()

    def _probe_interval(self) -> int:
        """Return after how many steps of the kind in use a probe of the other kind has lost little enough."""
        interval = PROBE_STEPS * (1 / MAX_PROBE_SHARE - 1)
        if self._is_known:
            used, other = (self.with_drafts, self.without) if self.is_on else (self.without, self.with_drafts)
            # What a step of the other kind takes longer than its tokens would take, in steps of the kind in use.
            lost_steps = other.step_s / used.step_s - other.tokens / used.tokens
            interval = max(interval, PROBE_STEPS * lost_steps / MAX_LOSS)
        return math.ceil(interval)


class SpeculationController:
    """Chooses for each step whether its sequences get drafts, by the measured steps of batches of similar size."""

    def __init__(self, num_speculative_tokens: int) -> None:
        """Start without a measurement, with drafts for every number of sequences."""
        self._num_speculative_tokens = num_speculative_tokens
        self._sizes: dict[int, _BatchSizes] = {}
        self._had_drafts: bool | None = None  # the last step that was recorded

    def begin(self, decodes: int) -> int:
        """Return the most drafts that each sequence gets in the next step, 0 or k. Call it once for each step.

        decodes: the number of decoding sequences, at least 1.
        """
        sizes = self._sizes.setdefault(_size_class(decodes), _BatchSizes())
        return self._num_speculative_tokens if sizes.begin() else 0

    def in_use(self, decodes: int) -> int:
        """Return the most drafts of each sequence in a step that is not measured: none before drafts are judged."""
        sizes = self._sizes.get(_size_class(decodes))
        return self._num_speculative_tokens if sizes is not None and sizes.is_judged and sizes.is_on else 0

    def record(self, took_s: float, decodes: int, num_drafts: int, tokens: int) -> str | None:
        """Record a finished step, which had no prompt tokens.

        Args:
            took_s: its time. It must be above 0.
            decodes: the number of its sequences.
            num_drafts: what `begin` returned for it, also if fewer drafts were found.
            tokens: the tokens that all of its sequences together got.

        Returns a line for the log if the engine starts or stops to use drafts for this number of sequences, or has
        found for the first time that they pay.
        """
        has_drafts = num_drafts > 0
        if has_drafts != self._had_drafts:
            self._had_drafts = has_drafts
            return None
        size_class = _size_class(decodes)
        sizes = self._sizes.setdefault(size_class, _BatchSizes())
        (sizes.with_drafts if has_drafts else sizes.without).add(took_s, tokens / decodes)
        return self._describe(size_class, sizes) if sizes.judge() else None

    def _describe(self, size_class: int, sizes: _BatchSizes) -> str:
        first, last = 2**size_class // 2 + 1, 2**size_class
        return (
            f"speculative decoding is {'on' if sizes.is_on else 'off'} in batches of "
            f"{last if last <= 2 else f'{first} to {last}'}: with num_speculative_tokens "
            f"{self._num_speculative_tokens} a step takes {sizes.with_drafts.step_s / sizes.without.step_s:.2f} times "
            f"as long and yields {sizes.with_drafts.tokens:.2f} tokens per sequence"
        )


def _size_class(decodes: int) -> int:
    """Return the exponent of the power of two that `decodes` is rounded up to."""
    return (decodes - 1).bit_length()
