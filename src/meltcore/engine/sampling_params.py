"""How one request wants its tokens chosen, and when it wants to stop."""

import msgspec

from meltcore.errors import RequestError

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
SEED_LIMIT = 2**63
MAX_TOP_K = 2**31 - 1  # more than any vocabulary, and a number that every kernel can hold
# Logits are divided by these in float32, which holds no more than 3.4e38: beyond it all tokens would look the same.
MIN_TEMPERATURE, MIN_REPETITION_PENALTY = 1e-20, 1e-3


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling settings of one request, validated by `check`.

    Greedy by default. A `temperature` of 0 means greedy whatever the other fields say.
    `top_k` 0 means off. `logprobs` None means none; n means the chosen token's and the n likeliest ones.
    `max_tokens` counts generated tokens, the end token included.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    logprobs: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    @property
    def penalised(self) -> bool:
        """Whether the next token depends on how often each was there before."""
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0.0, 0.0, 1.0)

    def check(self, vocab_size: int) -> None:
        """Raise RequestError naming the first field out of its range."""
        _range("max_tokens", self.max_tokens, 1, None)
        _range("min_tokens", self.min_tokens, 0, self.max_tokens)
        _range("temperature", self.temperature, 0.0, 2.0)
        if 0.0 < self.temperature < MIN_TEMPERATURE:
            raise RequestError(
                f"temperature must be 0 (greedy) or at least {MIN_TEMPERATURE}; got {self.temperature}",
                param="temperature",
            )
        _range("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _range("top_k", self.top_k, 0, MAX_TOP_K)
        _range("min_p", self.min_p, 0.0, 1.0)
        _range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _range("repetition_penalty", self.repetition_penalty, MIN_REPETITION_PENALTY, 10.0)
        if self.seed is not None:
            _range("seed", self.seed, -SEED_LIMIT, SEED_LIMIT - 1)
        if self.logprobs is not None:
            _range("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if len(self.stop) > MAX_STOP_STRINGS:
            raise RequestError(f"stop holds {len(self.stop)} strings; the limit is {MAX_STOP_STRINGS}", param="stop")
        if "" in self.stop:
            raise RequestError("stop holds an empty string, which would stop every answer at once", param="stop")
        for token_id in self.stop_token_ids:
            _range("stop_token_ids", token_id, 0, vocab_size - 1)


def _range(name: str, value: float, low: float, high: float | None, *, low_open: bool = False) -> None:
    # Asked this way round, NaN is outside of every range.
    inside = (low < value if low_open else low <= value) and (high is None or value <= high)
    if not inside:
        interval = f"{'more than' if low_open else 'at least'} {low}" + (
            f" and at most {high}" if high is not None else ""
        )
        raise RequestError(f"{name} must be {interval}; got {value}", param=name)
