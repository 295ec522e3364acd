"""Defines the settings of an engine.

The fields of EngineSettings are flags of `serve` and keys of fleet.yaml. Other classes have only one of the two.
"""

from argparse import BooleanOptionalAction
from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import Meta

from meltcore.common.errors import ConfigError
from meltcore.common.options import json_object, not_empty, number, setting
from meltcore.settings.field_types import ContextTokens, FleetSection, Sequences, Text, Tokens
from meltcore.settings.speculation import SpeculativeConfig, speculative_settings

LoadFormat = Literal["auto", "dummy"]
DType = Literal["auto", "float32", "bfloat16", "float16"]
Quantization = Literal["none", "fp8"]
Profiler = Literal["torch", "cuda"]
KVCacheDType = Literal["auto", "fp8"]
PriorityClass = Literal["interactive", "standard", "batch"]  # of a request, the most urgent first
# Of a model. "restarting": its engines have died or are replaced; "failed": they are not started again by themselves;
# "dead": the server goes down with the model. "sleeping", "waking": its memory is given to others; requests wait.
ModelStatus = Literal["loading", "ready", "sleeping", "waking", "restarting", "draining", "failed", "dead"]
DebugSwitch = Literal[
    "reference-kernels",
    "no-prefill-graphs",
    "no-peer-memory",
    "no-persistent-decode",
    "uniform-routing",
]
ENGINE_GROUP = "engine"


class SharingSection(FleetSection, frozen=True, kw_only=True):
    """The settings by which engines whose models have different priority classes share the time of a GPU."""

    means: Annotated[
        Literal["pacing", "mps", "none"],
        Meta(
            description="pacing: an engine waits between its steps while a higher class is at work; mps: and kernels "
            "of different engines run at the same time, under an MPS daemon of the fleet; none: the driver's turns."
        ),
    ] = "pacing"
    mps_sm_percent: Annotated[
        Annotated[int, Meta(ge=1, le=100)],
        Meta(description="With mps: of the SMs of a GPU, those that engines below the class interactive may use."),
    ] = 100
    min_share: Annotated[
        Annotated[float, Meta(gt=0, le=1)],
        Meta(description="Of the time in which an engine has work: what higher classes leave to its steps."),
    ] = 0.5
    max_wait_ms: Annotated[
        Annotated[float, Meta(ge=0, le=10_000)], Meta(description="The longest wait before a step, in milliseconds.")
    ] = 100.0
    step_ms: Annotated[
        Annotated[float, Meta(gt=0, le=10_000)],
        Meta(description="What steps are limited to, in milliseconds, while a higher class is at work."),
    ] = 50.0

    @property
    def sm_percent(self) -> int | None:
        """The percentage of SMs that engines below the class interactive may use under MPS, or None without MPS."""
        return self.mps_sm_percent if self.means == "mps" else None


class EngineSharing(SharingSection, frozen=True, kw_only=True):
    """The settings by which one engine shares its GPUs with engines of other classes."""

    priority_class: PriorityClass = "standard"
    marks: tuple[str, ...] = ()  # the file of step marks of each of its GPUs


class EngineSettings(FleetSection, frozen=True, kw_only=True):
    """The settings of engines that are keys of fleet.yaml and also flags of `serve`.

    If a field is None, its value is chosen from the checkpoint and the device, and printed.
    """

    tokenizer: Annotated[
        Text | None,
        setting(
            "Folder or hub id whose tokenizer and chat template replace the checkpoint's.",
            group=ENGINE_GROUP,
            type=not_empty,
            metavar="PATH",
        ),
    ] = None
    chat_template: Annotated[
        Text | None,
        setting(
            "Jinja file with the chat template, instead of the checkpoint's.",
            group=ENGINE_GROUP,
            type=not_empty,
            metavar="FILE",
        ),
    ] = None
    special_tokens_in_messages: Annotated[
        bool,
        setting(
            "Read special tokens in the text of messages, as vLLM and llama.cpp do.",
            help="Read special tokens such as <|im_end|> in the text of messages, as vLLM and llama.cpp do "
            "(default: as text).",
            group=ENGINE_GROUP,
        ),
    ] = False
    load_format: Annotated[
        LoadFormat, setting("dummy: random weights of the configured shapes.", group=ENGINE_GROUP)
    ] = "auto"
    dtype: Annotated[
        DType,
        setting("Type of weights and activations (default: the checkpoint's; CPU: float32).", group=ENGINE_GROUP),
    ] = "auto"
    quantization: Annotated[
        Quantization,
        setting(
            "fp8: linear layers in e4m3, quantized while loading; a GPU needs compute capability 8.9.",
            group=ENGINE_GROUP,
        ),
    ] = "none"
    kv_cache_dtype: Annotated[
        KVCacheDType,
        setting(
            "fp8: keys and values in e4m3, twice as many tokens; a GPU needs compute capability 8.9.",
            group=ENGINE_GROUP,
        ),
    ] = "auto"
    tensor_parallel_size: Annotated[
        Literal[1, 2, 4, 8],
        setting(
            "GPUs per replica; each holds a shard of the model.",
            group=ENGINE_GROUP,
            short="-tp",
            metavar="N",
            type=number(int),
        ),
    ] = 1
    max_model_len: Annotated[
        ContextTokens | None,
        setting(
            "Context length in tokens: prompt and output; of a translation model a sentence, and its translation "
            "(default: the model's).",
            help="Context length: prompt and output tokens (default: the model's); above it, see --hf-overrides.",
            group=ENGINE_GROUP,
            metavar="TOKENS",
        ),
    ] = None
    max_num_seqs: Annotated[
        Sequences | None,
        setting(
            "Sequences, sentences or clips per step: the concurrency to plan for. An engine of another task than "
            "generation has as many as its `memory` holds.",
            help="Sequences per step (default: 1024; CPU: 256; fewer when recurrent states would take half of the "
            "memory).",
            group=ENGINE_GROUP,
        ),
    ] = None
    max_num_batched_tokens: Annotated[
        Tokens | None,
        setting(
            "Tokens per step.",
            help="Tokens per step (default: 8192; offline from 32 GiB on: 16384; CPU, and GPUs below 16 GiB: 2048).",
            group=ENGINE_GROUP,
            metavar="TOKENS",
        ),
    ] = None
    enforce_eager: Annotated[
        bool, setting("Launch every kernel by itself, without CUDA graphs.", group=ENGINE_GROUP)
    ] = False
    enable_prefix_caching: Annotated[
        bool,
        setting(
            "Reuse the KV cache of equal prompt prefixes (default: on).",
            group=ENGINE_GROUP,
            action=BooleanOptionalAction,
        ),
    ] = True
    hf_overrides: Annotated[
        dict[str, Any],
        setting(
            'rope_parameters instead of the checkpoint\'s, like \'{"rope_parameters": {"rope_type": "yarn", '
            '"factor": 4.0, "original_max_position_embeddings": 32768}}\'.',
            group=ENGINE_GROUP,
            metavar="JSON",
            type=json_object,
        ),
    ] = msgspec.field(default_factory=dict)
    speculative_config: Annotated[
        dict[str, Any] | None,
        setting(
            'Speculative decoding in vLLM\'s form, like \'{"method": "ngram", "num_speculative_tokens": 3}\'.',
            group=ENGINE_GROUP,
            metavar="JSON",
            type=speculative_settings,
        ),
    ] = None
    async_scheduling: Annotated[
        bool | None,
        setting("Schedule the next step while the device computes one (default: on; CPU: off).", group=ENGINE_GROUP),
    ] = None
    seed: Annotated[
        Annotated[int, Meta(ge=0, le=2**63 - 1)],
        setting("Seed of dummy weights and of requests without one.", group=ENGINE_GROUP),
    ] = 0
    debug: Annotated[
        tuple[DebugSwitch, ...],
        setting(
            "For bisecting; can be given several times. reference-kernels: torch code instead of every kernel of ours. "
            "no-prefill-graphs: steps with prompts or drafts are launched kernel by kernel. no-persistent-decode: a "
            "decode step of few sequences is many launches. no-peer-memory: NCCL does the all-reduces. "
            "uniform-routing: tokens go to experts at random, as benchmarks of dummy weights need.",
            group=ENGINE_GROUP,
        ),
    ] = ()

    @property
    def speculation(self) -> SpeculativeConfig | None:
        """The settings of speculative decoding, or None without it."""
        return SpeculativeConfig.of(self.speculative_config)

    def check_speculation(self) -> None:
        """Raise ConfigError for settings of speculative decoding that are wrong."""
        SpeculativeConfig.of(self.speculative_config)

    @property
    def has_mtp(self) -> bool:
        """Whether the model's layer for multi-token prediction drafts tokens."""
        return self.speculation is not None and self.speculation.has_mtp

    @property
    def max_drafts(self) -> int:
        """The maximum number of drafts of a sequence in a step, 0 without speculative decoding."""
        return 0 if self.speculation is None else self.speculation.num_speculative_tokens

    @property
    def debug_options(self) -> tuple[str, ...]:
        """The debug switches and the flags that disable an optimization. Results of measurements state them."""
        flags = {
            "--enforce-eager": self.enforce_eager,
            "--no-enable-prefix-caching": not self.enable_prefix_caching,
            "--no-async-scheduling": self.async_scheduling is False,
        }
        return (*(flag for flag, is_given in flags.items() if is_given), *self.debug)


class EngineConfig(EngineSettings, frozen=True, kw_only=True):
    """The settings with which an engine process starts. If `memory_bytes` is None, the engine takes the free memory."""

    model: str  # local folder or hub id
    device: str = "auto"  # or cpu, cuda, cuda:N
    rank_timeout_s: float = 10.0  # with several ranks a step that takes longer is stuck
    memory_bytes: int | None = None  # on each GPU, or of the host: weights, caches and workspace
    enable_sleep_mode: bool = False  # the idle engine can give its memory back, and take it again
    sharing: EngineSharing | None = None  # None: the engine waits for no other
    node_ranks: int = 0  # of all engines on GPUs of this machine, which may start together; 0: the engine is alone

    def __post_init__(self) -> None:
        self.check_speculation()
        valid_switches = get_args(DebugSwitch)
        for switch in self.debug:
            if switch not in valid_switches:  # a misspelled one would disable nothing
                raise ConfigError(f"debug must be any of {', '.join(valid_switches)}; got {switch!r}")
