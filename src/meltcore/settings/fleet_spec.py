"""Defines fleet.yaml: the models of one server, their GPUs, languages, keys and limits, as typed structs.

`fleet_file.load_fleet` reads and checks the file. `scripts/fleet_reference.py` writes the JSON schema and the
reference page from these structs, so each field states its meaning once, in its `Meta`.
"""

from __future__ import annotations

from argparse import ArgumentTypeError
from typing import Annotated, Literal, get_args

import msgspec
from msgspec import Meta

from meltcore.common.options import read_number, setting
from meltcore.common.tasks import DEFAULT, tasks
from meltcore.settings.config import ENGINE_GROUP, EngineSettings, PriorityClass, Profiler, SharingSection
from meltcore.settings.field_types import (
    AudioSeconds,
    Bytes,
    CallParser,
    Device,
    FleetSection,
    GpuId,
    KeyName,
    Name,
    Origin,
    Path,
    PerMinute,
    Port,
    PositiveSeconds,
    Processes,
    QueueRequests,
    QueueUnits,
    Replicas,
    Seconds,
    Sha256,
    Share,
    TaskName,
    Text,
    Url,
    VariableName,
    device_value,
)
from meltcore.settings.routes_section import LanguagesSection, RoutesSection

WeightsFormat = Literal["auto", "dense", "q4_0", "q8_0"]
ModelKind = Literal["engine", "url", "command"]
MAX_SIZE_BYTES = 2**50
MAX_BODY_BYTES = 8 * 2**20
HTTP_GROUP, LIMITS_GROUP = "HTTP server", "limits"


def _class_shares(text: str) -> tuple[int, ...]:
    """Return the share of each priority class from a text. Raises ArgumentTypeError for an invalid text."""
    try:
        shares = tuple(read_number(each, int) for each in text.split(","))
    except ValueError:
        shares = ()
    if len(shares) != len(get_args(PriorityClass)) or min(shares) < 1:
        classes = ", ".join(get_args(PriorityClass))
        raise ArgumentTypeError(f"must be a number of at least 1 for each of {classes}; got {text}")
    return shares


class ServerSection(FleetSection, frozen=True, kw_only=True):
    """The address of the server."""

    host: Annotated[Text, setting("Address to listen on; 0.0.0.0 accepts other machines.", group=HTTP_GROUP)] = (
        "127.0.0.1"
    )
    port: Annotated[Port, setting("TCP port; 0 lets the system choose one.", group=HTTP_GROUP)] = 8000
    admin_port: Annotated[
        Port | None,
        Meta(description="TCP port on 127.0.0.1 for metrics, reload and `meltcore ps`; none: no such port."),
    ] = None
    api_server_count: Annotated[
        Processes | None,
        setting("Number of API server processes (default: one per four cores, at most 4).", group=HTTP_GROUP),
    ] = None
    api_key_file: Annotated[
        Text | None,
        setting(
            "File with API keys, one per line: a name for the log, a space, the key.", group=HTTP_GROUP, metavar="FILE"
        ),
    ] = None
    allowed_origins: Annotated[
        tuple[Origin, ...],
        setting(
            "Web origins whose pages may use the server beside its own page, like https://app.example (CORS); "
            "'*': all.",
            group=HTTP_GROUP,
            nargs="+",
            action="extend",
            metavar="ORIGIN",
        ),
    ] = ()
    ssl_certfile: Annotated[
        Text | None,
        setting(
            "File with a TLS certificate and its chain in PEM, to serve https; read again when it changes.",
            group=HTTP_GROUP,
            metavar="FILE",
        ),
    ] = None
    ssl_keyfile: Annotated[
        Text | None,
        setting(
            "File with the certificate's private key in PEM (default: the file of the certificate).",
            group=HTTP_GROUP,
            metavar="FILE",
        ),
    ] = None
    log_format: Annotated[Literal["text", "json"], setting("Format of the line per request.", group=HTTP_GROUP)] = (
        "text"
    )
    log_limit: Annotated[
        Bytes | None,
        Meta(
            description="Size of a log file past which it begins anew; the one before is kept as *.previous "
            "(default: 64MiB)."
        ),
    ] = None
    otlp_endpoint: Annotated[
        Url | None,
        setting(
            "URL that OpenTelemetry traces are sent to, OTLP over HTTP, with its path, such as "
            "http://127.0.0.1:4318/v1/traces (default: as OTEL_EXPORTER_OTLP_TRACES_ENDPOINT says, else none).",
            help="URL for OpenTelemetry traces, OTLP over HTTP (default: OTEL_EXPORTER_OTLP_TRACES_ENDPOINT, else "
            "none).",
            group=HTTP_GROUP,
            flag="--otlp-traces-endpoint",
            metavar="URL",
        ),
    ] = None
    profile_dir: Annotated[
        Text | None,
        setting("Folder for profiles; enables /start_profile and /stop_profile.", group=HTTP_GROUP, metavar="DIR"),
    ] = None
    profiler: Annotated[
        Profiler,
        setting(
            "cuda: /start_profile and /stop_profile delimit a capture of Nsight Systems, with an NVTX range per step.",
            group=HTTP_GROUP,
        ),
    ] = "torch"

    def url(self, port: int, host: str | None = None) -> str:
        """Return the URL of the server that listens on `port`. `host` is the section's by default."""
        scheme, host = "http" if self.ssl_certfile is None else "https", host or self.host
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"

    @property
    def profiling(self) -> bool:
        """Whether the server has the routes /start_profile and /stop_profile."""
        return self.profile_dir is not None or self.profiler == "cuda"


class GpuSection(FleetSection, frozen=True, kw_only=True):
    """One GPU of the fleet."""

    id: Annotated[GpuId, Meta(description="Its number among the visible GPUs.")]
    memory: Annotated[
        Bytes | None, Meta(description="Bytes that the fleet may take of it (default: what the GPU has).")
    ] = None


class ModelSection(EngineSettings, frozen=True, kw_only=True):
    """One model. It has a checkpoint for an engine of Meltcore, or the `url` or the `command` of another server."""

    checkpoint: Annotated[
        Text | None, Meta(description="Folder, file or hub id, as `meltcore serve MODEL` takes it.")
    ] = None
    url: Annotated[
        Url | None,
        Meta(description="A server that runs already: its base address before /v1."),
    ] = None
    command: Annotated[
        Text | None,
        Meta(
            description="Command line that starts another server, with names in braces; or a template: vllm, sglang, "
            "llama.cpp, tensorrt-llm."
        ),
    ] = None
    python: Annotated[
        Text | None, Meta(description="Python interpreter of the environment that has the program of `command`.")
    ] = None
    environment: Annotated[
        dict[VariableName, str], Meta(description="Environment variables of `command`, beside the inherited ones.")
    ] = msgspec.field(default_factory=dict)
    upstream_model: Annotated[
        Text | None, Meta(description="The model's name at a `url` or `command` (default: the same).")
    ] = None
    upstream_key_env: Annotated[
        VariableName | None, Meta(description="Environment variable with the API key that a `url` asks for.")
    ] = None
    paths: Annotated[
        tuple[Path, ...],
        Meta(description="Paths whose requests a `url` or `command` gets (default: the paths of its task)."),
    ] = ()
    format: Annotated[
        WeightsFormat,
        Meta(description="How `shapes` are stored, for a plan: dense or a GGUF format; auto: as the checkpoint says."),
    ] = "auto"
    shapes: Annotated[
        Text | None,
        Meta(
            description="Published configuration, or a folder with one, to plan with and to fill with random weights "
            "(load_format dummy) while the checkpoint is not on this machine."
        ),
    ] = None
    task: Annotated[
        TaskName,
        Meta(
            description="What the model does; decides the routes that accept it. A checkpoint of another task is an "
            "error, once its configuration is on this machine."
        ),
    ] = DEFAULT.name
    aliases: Annotated[tuple[Name, ...], Meta(description="Further names in the API.")] = ()
    memory: Annotated[
        Bytes | None,
        setting(
            "Bytes of each GPU, or of the host (default: what `meltcore plan` computes).",
            help="Memory of an engine on each GPU, or of the host on a CPU, like 40GiB: weights, caches and workspace; "
            "a GPU enforces it (default: all that is free; CPU: what the context and --max-num-seqs need, and at most "
            "a quarter of available memory beside the weights).",
            group=ENGINE_GROUP,
        ),
    ] = None
    replicas: Annotated[
        Replicas,
        setting(
            "Engines with the same weights.",
            help="Replicas, each on GPUs of its own; when one dies, the others continue.",
            group=ENGINE_GROUP,
            flag="--data-parallel-size",
            short="-dp",
            metavar="N",
        ),
    ] = 1
    device: Annotated[
        Device,
        setting(
            "auto: where the plan puts it; cuda: the same, and never on the CPU; cpu; or GPU numbers, "
            "tensor_parallel_size per replica.",
            help="auto, cpu, cuda or cuda:N.",
            group=ENGINE_GROUP,
            type=device_value,
        ),
    ] = "auto"
    residency: Annotated[
        Literal["always_on", "sleepable"],
        Meta(description="sleepable: its memory may be given to others in turns; see `residency` of the file."),
    ] = "always_on"
    sleep_mode: Annotated[
        Literal["restart", "vllm"],
        Meta(
            description="How a sleepable `command` sleeps. restart: its process is ended, and started again; vllm: by "
            "vLLM's /sleep and /wake_up."
        ),
    ] = "restart"
    priority: Annotated[
        PriorityClass,
        setting(
            "Class of its requests against those of other models.",
            help="Class of requests that name none in the header X-Priority-Class.",
            group=LIMITS_GROUP,
            flag="--priority-class",
        ),
    ] = "standard"
    max_queue: Annotated[
        QueueRequests | None, Meta(description="Requests that may wait (default: limits.max_queue).")
    ] = None
    max_queue_tokens: Annotated[
        QueueUnits | None, Meta(description="Prompt tokens that may wait (default: limits.max_queue_tokens).")
    ] = None
    max_queue_chars: Annotated[
        QueueUnits | None,
        Meta(description="Characters to translate or speak that may wait (default: limits.max_queue_chars)."),
    ] = None
    max_queue_audio_s: Annotated[
        AudioSeconds | None,
        Meta(description="Seconds of audio to transcribe that may wait (default: limits.max_queue_audio_s)."),
    ] = None
    generation_config: Annotated[
        Literal["auto", "greedy"],
        setting(
            "auto: sampling defaults from the checkpoint.",
            help="auto: take sampling defaults from the checkpoint's generation_config.json.",
            group=HTTP_GROUP,
        ),
    ] = "greedy"
    tool_call_parser: Annotated[CallParser, setting("Format of tool calls (auto: found).", group=HTTP_GROUP)] = "auto"
    reasoning_parser: Annotated[
        Literal["auto", "none"], setting("auto: separate reasoning from answers. none: leave it.", group=HTTP_GROUP)
    ] = "auto"
    normalizer: Annotated[
        Literal["itt", "original"],
        setting(
            "How texts of a translation model are prepared: as IndicTransToolkit does, or without two of its faults.",
            group=HTTP_GROUP,
        ),
    ] = "itt"

    @property
    def model(self) -> str:
        """The checkpoint that an engine of Meltcore loads."""
        assert self.checkpoint is not None, "an upstream server has its own"
        return self.checkpoint

    @property
    def kind(self) -> ModelKind:
        """The program that runs the model: an engine of Meltcore, a server at a URL, or the server of a command."""
        return "url" if self.url is not None else "command" if self.command is not None else "engine"

    @property
    def upstream_paths(self) -> tuple[str, ...]:
        """The paths whose requests are forwarded to the model's `url`, or to the server of its `command`."""
        return self.paths or tuple(tasks()[self.task].paths)

    @property
    def is_sleepable(self) -> bool:
        """Whether other models may use the model's memory while they have requests."""
        return self.residency == "sleepable"

    @property
    def replica_gpus(self) -> list[tuple[int, ...]]:
        """The GPUs that the file names for each replica. A replica has `tensor_parallel_size` GPUs.

        If the file names no GPUs, each entry is empty, and any GPUs may be used. If it names fewer GPUs than the
        replicas need, several replicas are on the same GPUs.
        """
        if isinstance(self.device, str):
            return [()] * self.replicas
        ranks = self.tensor_parallel_size
        groups = [self.device[first : first + ranks] for first in range(0, len(self.device), ranks)]
        return [groups[replica % len(groups)] for replica in range(self.replicas)]

    @property
    def has_context(self) -> bool:
        """Whether the model's engines have a context length and a concurrency, which a plan may lower."""
        return tasks()[self.task].has_context


class LimitsSection(FleetSection, frozen=True, kw_only=True):
    """Limits of requests. The limits of queues hold for each model. A model may replace them by limits of its own."""

    max_body: Annotated[Bytes | None, setting("Largest request body (default: 8MiB).", group=LIMITS_GROUP)] = None
    max_queue: Annotated[
        QueueRequests,
        setting(
            "Requests of a model that may wait; more get status 429.",
            help="Requests that may wait; more get status 429.",
            group=LIMITS_GROUP,
        ),
    ] = 16_384
    max_queue_tokens: Annotated[
        QueueUnits,
        setting(
            "Prompt tokens of a model that may wait.",
            help="Prompt tokens that may wait.",
            group=LIMITS_GROUP,
            metavar="TOKENS",
        ),
    ] = 16_777_216
    max_queue_chars: Annotated[
        QueueUnits,
        setting(
            "Characters to translate or speak, of a model, that may wait.",
            help="Characters to translate or to speak that may wait.",
            group=LIMITS_GROUP,
            metavar="CHARS",
        ),
    ] = 4_194_304
    max_queue_audio_s: Annotated[
        AudioSeconds,
        setting(
            "Seconds of audio to transcribe, of a model, that may wait.",
            help="Seconds of audio to transcribe that may wait.",
            group=LIMITS_GROUP,
        ),
    ] = 86_400.0
    class_shares: Annotated[
        tuple[Share, ...],
        Meta(min_length=3, max_length=3),
        setting(
            "Shares of the classes interactive, standard and batch in a model's work while all of them wait.",
            group=LIMITS_GROUP,
            type=_class_shares,
            metavar="N,...",
        ),
    ] = (60, 30, 10)
    requests_per_minute: Annotated[
        PerMinute | None, Meta(description="Requests per key and minute (default: no limit).")
    ] = None
    tokens_per_minute: Annotated[
        PerMinute | None, Meta(description="Prompt and output tokens per key and minute (default: no limit).")
    ] = None

    @property
    def max_body_bytes(self) -> int:
        """The largest allowed size of a request body, in bytes."""
        return MAX_BODY_BYTES if self.max_body is None else self.max_body

    def of(self, model: ModelSection) -> LimitsSection:
        """Return the limits of one model. Limits that the model itself sets replace the limits of all models."""
        names = ("max_queue", "max_queue_tokens", "max_queue_chars", "max_queue_audio_s")
        own = {name: value for name in names if (value := getattr(model, name)) is not None}
        return msgspec.structs.replace(self, **own)


class KeySection(FleetSection, frozen=True, kw_only=True):
    """One API key. The file names the place of the key, or has its hash, but never has the key itself."""

    name: Annotated[KeyName, Meta(description="Its name in logs and metrics.")]
    env: Annotated[VariableName | None, Meta(description="Environment variable that holds the key.")] = None
    file: Annotated[Text | None, Meta(description="File that holds the key: only its owner may read it.")] = None
    sha256: Annotated[Sha256 | None, Meta(description="SHA-256 of the key, in hexadecimal digits.")] = None
    priority: Annotated[PriorityClass, Meta(description="Highest class that its requests may have.")] = "interactive"
    requests_per_minute: Annotated[
        PerMinute | None, Meta(description="Requests per minute (default: limits.requests_per_minute).")
    ] = None
    tokens_per_minute: Annotated[
        PerMinute | None, Meta(description="Prompt and output tokens per minute (default: limits.tokens_per_minute).")
    ] = None


class TimeoutsSection(FleetSection, frozen=True, kw_only=True):
    """The time limits of a server in seconds."""

    request_s: Annotated[
        PositiveSeconds,
        setting(
            "Time limit of a request, from arrival to the last token.", group=LIMITS_GROUP, flag="--request-timeout"
        ),
    ] = 600.0
    drain_s: Annotated[
        Seconds,
        setting(
            "Open requests, when a model or the server stops, or a model falls asleep.",
            help="Time for open requests to finish after SIGTERM or SIGHUP.",
            group=LIMITS_GROUP,
            flag="--drain-timeout",
        ),
    ] = 30.0
    start_s: Annotated[PositiveSeconds, Meta(description="A model, from download to an answer within 120 s.")] = 600.0
    connect_s: Annotated[PositiveSeconds, Meta(description="A connection to a `url` or `command`.")] = 5.0
    first_byte_s: Annotated[
        PositiveSeconds, Meta(description="A `url` or `command`, from a request to the first byte of its answer.")
    ] = 300.0
    health_interval_s: Annotated[
        PositiveSeconds, Meta(description="Pause between two looks at the health of a `url` or `command`.")
    ] = 5.0


class ResidencySection(FleetSection, frozen=True, kw_only=True):
    """The rules by which sleepable models that share memory take turns. They apply only if a model is sleepable."""

    minimum_s: Annotated[Seconds, Meta(description="Time that a woken model stays awake.")] = 5.0
    turn_s: Annotated[
        Seconds, Meta(description="Time that a busy model stays while requests of its class wait for another.")
    ] = 20.0
    swaps_per_minute: Annotated[Share, Meta(description="Times per minute that models are put to sleep.")] = 6
    keep: Annotated[
        Literal["host", "disk"],
        Meta(description="Where weights are meanwhile: in pinned host memory, or only in the checkpoint."),
    ] = "host"


class FleetSpec(FleetSection, frozen=True, kw_only=True):
    """A fleet: models that share GPUs behind one address."""

    version: Annotated[Literal[1], Meta(description="Version of this format.")] = 1
    server: Annotated[ServerSection, Meta(description="Address and processes of the API.")] = ServerSection()
    gpus: Annotated[
        tuple[GpuSection, ...], Meta(description="GPUs that the fleet may use (default: all that are visible).")
    ] = ()
    models: Annotated[
        dict[Name, ModelSection],
        Meta(max_length=256, description="Models by name.", extra_json_schema={"minProperties": 1}),
    ]
    languages: Annotated[LanguagesSection, Meta(description="Which model serves which language.")] = LanguagesSection()
    keys: Annotated[tuple[KeySection, ...], Meta(description="API keys (default: none is asked for).")] = ()
    limits: Annotated[LimitsSection, Meta(description="Limits of requests.")] = LimitsSection()
    timeouts: Annotated[TimeoutsSection, Meta(description="Time limits in seconds.")] = TimeoutsSection()
    residency: Annotated[ResidencySection, Meta(description="When sleepable models take turns.")] = ResidencySection()
    routes: Annotated[RoutesSection, Meta(description="Models behind routes without a model's name.")] = RoutesSection()
    sharing: Annotated[SharingSection, Meta(description="How classes share a GPU in time.")] = SharingSection()

    @property
    def engines(self) -> dict[str, ModelSection]:
        """The models that run on engines of Meltcore, by name."""
        return {name: model for name, model in self.models.items() if model.kind == "engine"}

    def resolve(self, name: str) -> str | None:
        """Return the name of the model whose name or alias is given, or None if there is no such model."""
        if name in self.models:
            return name
        return next((model for model, section in self.models.items() if name in section.aliases), None)
