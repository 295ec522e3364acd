"""Defines the settings of a server and its models. `option` makes a field a flag of `serve`."""

from dataclasses import dataclass, field
from typing import Literal, get_args

from meltcore.common.errors import ConfigError
from meltcore.common.options import check_origins, not_empty, option
from meltcore.settings.config import ENGINE_GROUP, EngineConfig, PriorityClass, Profiler, SharingSection
from meltcore.settings.fleet_spec import LimitsSection, ModelSection, TimeoutsSection
from meltcore.settings.routes_section import LanguagesSection, RoutesSection

_HTTP_GROUP, _LIMITS_GROUP = "HTTP server", "limits"
_AT_LEAST_ONE = {"minimum": 1}


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Holds the settings of one model of a server: its engines, its names and its queue."""

    engine: EngineConfig
    served_model_name: tuple[str, ...] = option(
        (),
        "Names in the API (default: MODEL). The first stands in metrics and logs.",
        group=_HTTP_GROUP,
        nargs="+",
        action="extend",
        type=not_empty,
        metavar="NAME",
    )
    data_parallel_size: int = option(
        1,
        "Replicas, each on GPUs of its own; when one dies, its requests fail and the others continue.",
        group=ENGINE_GROUP,
        short="-dp",
        limits=_AT_LEAST_ONE,
    )
    replica_gpus: tuple[
        tuple[int, ...], ...
    ] = ()  # of each replica, numbered among visible ones; empty: in their order
    replica_nodes: tuple[str, ...] = ()  # of a cluster, of each replica; its GPUs are numbered on its node
    max_queue: int = option(
        16_384, "Requests that may wait; more get status 429.", group=_LIMITS_GROUP, limits={"minimum": 0}
    )
    max_queue_tokens: int = option(
        16_777_216, "Prompt tokens that may wait.", group=_LIMITS_GROUP, limits=_AT_LEAST_ONE, metavar="TOKENS"
    )
    generation_config: Literal["auto", "greedy"] = option(
        "greedy", "auto: take sampling defaults from the checkpoint's generation_config.json.", group=_HTTP_GROUP
    )
    max_queue_chars: int = option(
        4_194_304,
        "Characters to translate or to speak that may wait.",
        group=_LIMITS_GROUP,
        limits=_AT_LEAST_ONE,
        metavar="CHARS",
    )
    max_queue_audio_s: float = option(
        86_400.0, "Seconds of audio to transcribe that may wait.", group=_LIMITS_GROUP, limits=_AT_LEAST_ONE
    )
    sleepable: bool = False  # its memory may be given to other models while they have requests
    priority_class: PriorityClass = option(
        "standard", "Class of requests that name none in the header X-Priority-Class.", group=_LIMITS_GROUP
    )
    start_timeout_s: float | None = None  # of an engine, from its start to its first answer; None: no limit
    normalizer: Literal["itt", "original"] = option(
        "itt",
        "How texts of a translation model are prepared: as IndicTransToolkit does, or without two of its faults.",
        group=_HTTP_GROUP,
    )

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names that requests may use. The first stands in metrics and logs."""
        return self.served_model_name or (self.engine.model,)


@dataclass(frozen=True, kw_only=True)
class KeyConfig:
    """Holds an API key's name, where it comes from, and the limits of its requests, over all models together.

    Exactly one of env, file and sha256 is set. The key itself is never held.
    """

    name: str  # in the log
    env: str | None = None  # environment variable with the key
    file: str | None = None  # file whose only line is the key
    sha256: str | None = None  # of the key, in hexadecimal digits
    highest_class: PriorityClass = "interactive"  # a request for a more urgent class gets this one
    requests_per_minute: int | None = None  # None: no limit
    tokens_per_minute: int | None = None  # prompt and output tokens of text and translation

    def __post_init__(self) -> None:
        if not self.name or not self.name.isprintable() or len(self.name) > 64:
            raise ConfigError(f"the name of an API key must have 1 to 64 printable characters; got {self.name!r}")
        if sum(source is not None for source in (self.env, self.file, self.sha256)) != 1:
            raise ConfigError(f"the API key {self.name} needs exactly one of env, file and sha256")
        for limit in ("requests_per_minute", "tokens_per_minute"):
            value = getattr(self, limit)
            if value is not None and value < 1:
                raise ConfigError(f"the API key {self.name}: {limit} must be at least 1; got {value}")


@dataclass(frozen=True, kw_only=True)
class ResidencyConfig:
    """Holds when sleepable models wake and sleep. Times in seconds."""

    minimum_s: float = 5.0  # that a model stays awake
    turn_s: float = 20.0  # that a busy one stays while requests of its own class wait for another
    swaps_per_minute: int = 6
    keep: Literal["host", "disk"] = "host"  # where weights are meanwhile
    start_timeout_s: float = 600.0  # of an engine that is started in its turn
    room_bytes: dict[str, int] = field(default_factory=dict)  # for models in turns, by device; empty: of the largest


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Holds the settings of a server: its models, its address, and the limits of its requests."""

    models: tuple[ModelConfig, ...]
    upstream: dict[str, ModelSection] = field(default_factory=dict)  # after `models` in statistics
    limits: LimitsSection = field(default_factory=LimitsSection)  # of the queues of `upstream`
    timeouts: TimeoutsSection = field(default_factory=TimeoutsSection)  # of `upstream`
    order: tuple[str, ...] = ()  # first names of models, as fleet.yaml has them
    languages: LanguagesSection = field(default_factory=LanguagesSection)
    routes: RoutesSection = field(default_factory=RoutesSection)
    residency: ResidencyConfig = ResidencyConfig()
    host: str = option(
        "127.0.0.1", "Address to listen on; 0.0.0.0 accepts other machines.", group=_HTTP_GROUP, type=not_empty
    )
    port: int = option(
        8000, "TCP port; 0 lets the system choose one.", group=_HTTP_GROUP, limits={"minimum": 0, "maximum": 65_535}
    )
    api_server_count: int | None = option(
        None,
        "Number of API server processes (default: one per four cores, at most 4).",
        group=_HTTP_GROUP,
        limits=_AT_LEAST_ONE,
    )
    request_timeout_s: float = option(
        600.0,
        "Time limit of a request, from arrival to the last token.",
        group=_LIMITS_GROUP,
        limits={"exclusive_minimum": 0},
    )
    drain_timeout_s: float = option(
        30.0, "Time for open requests to finish after SIGTERM or SIGHUP.", group=_LIMITS_GROUP, limits={"minimum": 0}
    )
    api_key: str | None = option(
        None,
        "Bearer token that requests must send, except to /, /docs, /openapi.json, /health and /live (default: the "
        "environment variable MELTCORE_API_KEY).",
        group=_HTTP_GROUP,
        type=not_empty,
        metavar="KEY",
    )
    api_key_file: str | None = option(
        None,
        "File with API keys, one per line: a name for the log, a space, the key.",
        group=_HTTP_GROUP,
        type=not_empty,
        metavar="FILE",
    )
    api_keys: tuple[KeyConfig, ...] = ()  # beside api_key and those of api_key_file
    class_shares: tuple[int, ...] = option(
        (60, 30, 10),
        "Shares of the classes interactive, standard and batch in a model's work while all of them wait.",
        group=_LIMITS_GROUP,
        limits=_AT_LEAST_ONE,
    )
    max_body_bytes: int = option(8 * 2**20, "Largest request body (default: 8MiB).", group=_LIMITS_GROUP)
    allowed_origins: tuple[str, ...] = option(
        (),
        "Web origins whose pages may use the server beside its own page, like https://app.example (CORS); '*': all.",
        group=_HTTP_GROUP,
        nargs="+",
        action="extend",
        metavar="ORIGIN",
    )
    log_format: Literal["text", "json"] = option("text", "Format of the line per request.", group=_HTTP_GROUP)
    otlp_traces_endpoint: str | None = option(
        None,
        "URL for OpenTelemetry traces, OTLP over HTTP (default: OTEL_EXPORTER_OTLP_TRACES_ENDPOINT, else none).",
        group=_HTTP_GROUP,
        type=not_empty,
        metavar="URL",
    )
    sharing: SharingSection = field(default_factory=lambda: SharingSection(means="none"))  # of its engines
    profile_dir: str | None = option(
        None, "Folder for profiles; enables /start_profile and /stop_profile.", group=_HTTP_GROUP, metavar="DIR"
    )
    profiler: Profiler = option(
        "torch",
        "cuda: /start_profile and /stop_profile delimit a capture of Nsight Systems, with an NVTX range per step.",
        group=_HTTP_GROUP,
    )

    def __post_init__(self) -> None:
        if len(self.class_shares) != len(get_args(PriorityClass)) or min(self.class_shares) < 1:
            classes = ", ".join(get_args(PriorityClass))
            given = ",".join(map(str, self.class_shares))
            raise ConfigError(f"class_shares must be a number of at least 1 for each of {classes}; got {given}")
        check_origins(self.allowed_origins)

    @property
    def profiling(self) -> bool:
        """Whether /start_profile and /stop_profile exist."""
        return self.profile_dir is not None or self.profiler == "cuda"
