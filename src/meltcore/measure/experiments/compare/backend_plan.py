"""Plans the starts of `meltcore compare-backends`: a command per backend and set-up, or why it cannot run."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

from meltcore.common.errors import ConfigError
from meltcore.common.files import is_gguf
from meltcore.measure.documents.backends import START_KIND_BY_SET_UP, SetUp, StartKind
from meltcore.measure.documents.served_model import public_name
from meltcore.measure.experiments.servers import ARGS, PORT, ServerCommand
from meltcore.settings.server_templates import TEMPLATES, fill_command, find_program, server_environment

OURS = "meltcore"
MEMORY_FRACTION = 0.9  # of a GPU, for all engines on it where several share it
MODEL_NAME = "m"  # in requests, the same for all
_READ_GGUF = ("meltcore", "llama.cpp")  # SGLang and vLLM need a plugin or a flag: --command


@dataclass(frozen=True, kw_only=True)
class BackendOptions:
    """Options of one backend that differ from the template.

    `checkpoint` and `quantized` replace the files of the comparison. `command` replaces the template's command line;
    the template's flags take the place of {args}. `arguments` are added at the end.
    """

    checkpoint: str | None = None
    quantized: str | None = None
    python: str | None = None
    environment: dict[str, str] = field(default_factory=dict)
    command: str | None = None
    arguments: str = ""
    skip: frozenset[SetUp] = frozenset()


def parse_pair(text: str, flag: str) -> tuple[str, str]:
    """Parse NAME=VALUE into (name, value). Raises ConfigError if the name or the value is empty."""
    name, _, value = text.partition("=")
    if not name or not value:
        raise ConfigError(f"{flag}: {text!r} is not of the form NAME=VALUE")
    return name, value


def read_options(texts_by_flag: Mapping[str, Sequence[str]], backends: Sequence[str]) -> dict[str, BackendOptions]:
    """Return the options of each backend from texts such as "vllm=/opt/vllm/bin/python", by command-line flag.

    Raises ConfigError for a malformed text, and for a name that is not in `backends`.
    """
    fields: dict[str, dict[str, Any]] = {}
    for flag, texts in texts_by_flag.items():
        for text in texts:
            name, value = parse_pair(text, flag)
            if name not in backends:
                raise ConfigError(f"{flag}: {name!r} is not among --backends {','.join(backends)}")
            options = fields.setdefault(name, {"environment": {}, "skip": set()})
            if flag == "--env":
                options["environment"].update([parse_pair(value, f"{flag} {name}")])
            elif flag == "--skip" and value not in get_args(SetUp):
                raise ConfigError(f"{flag}: {value!r} is unknown; there are {', '.join(get_args(SetUp))}")
            elif flag == "--skip":
                options["skip"].add(value)
            else:
                options["arguments" if flag == "--args" else flag.removeprefix("--")] = value
    return {name: BackendOptions(**options | {"skip": frozenset(options["skip"])}) for name, options in fields.items()}


@dataclass(frozen=True, kw_only=True)
class EqualSettings:
    """Settings that every backend gets. None leaves a setting to the backend."""

    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    api_server_count: int | None = None
    load_format: Literal["auto", "dummy"] = "auto"

    @property
    def template_values(self) -> dict[str, Any]:
        """The settings as values of a template. Prefix caching is always off."""
        values = {name: value for name, value in asdict(self).items() if value not in (None, "auto")}
        return values | {"no_prefix_cache": True}


@dataclass(frozen=True, kw_only=True)
class BackendsPlan:
    """Plans to compare `model` on `backends` in `set_ups`. `gpus` are values of CUDA_VISIBLE_DEVICES.

    `running` has the addresses of servers that run already, by name. Such servers are measured only in set-ups of a
    single server. Levels with a concurrency of at most `max_session_concurrency` measure several sessions, and higher
    levels measure batching.
    """

    model: str
    quantized: str | None = None
    backends: tuple[str, ...] = tuple(TEMPLATES)
    running: dict[str, str] = field(default_factory=dict)
    set_ups: tuple[SetUp, ...] = get_args(SetUp)
    settings: EqualSettings = EqualSettings()
    options: dict[str, BackendOptions] = field(default_factory=dict)
    gpus: tuple[str, ...] = ()
    gpu_memory_bytes: int | None = None  # of the smallest GPU
    max_session_concurrency: int = 16

    def __post_init__(self) -> None:
        names = [*self.backends, *self.running]
        if len(set(names)) != len(names):
            raise ConfigError(f"each backend needs a name of its own; got {', '.join(names)}")
        if not names:
            raise ConfigError("no backend to measure: give --backends or --add NAME=URL")
        for name in self.backends:
            if name not in TEMPLATES and self._options(name).command is None:
                template_names = ", ".join(TEMPLATES)
                raise ConfigError(
                    f"backend {name!r} has no template (there are {template_names}): give --command {name}=TEXT"
                )
        for name in self.options:
            if name not in self.backends:
                raise ConfigError(f"options are given for {name!r}, which is not among --backends {','.join(names)}")

    def runs(self) -> list[PlannedRun]:
        """Return the starts in the order of running: all backends in one kind of start, then the next kind.

        Servers that run already come last.
        """
        kinds = list(dict.fromkeys(START_KIND_BY_SET_UP[set_up] for set_up in self.set_ups))
        planned = [self._planned(name, kind) for kind in kinds for name in self.backends]
        return planned + [
            PlannedRun(name, kind, public_name(self.model), url=url)
            if kind == "single"
            else PlannedRun(name, kind, public_name(self.model), reason="it runs already: only one server is measured")
            for kind in kinds
            for name, url in self.running.items()
        ]

    def _options(self, name: str) -> BackendOptions:
        return self.options.get(name, BackendOptions())

    def _planned(self, name: str, kind: StartKind) -> PlannedRun:
        """Return one planned start, with its command or with the reason why it cannot run."""
        options = self._options(name)
        checkpoint = options.checkpoint or self.model
        if kind == "quantized":
            checkpoint = options.quantized or self.quantized or ""
        model = public_name(checkpoint or self.model)
        reason = self._obstacle(name, kind, checkpoint, options)
        if reason:
            return PlannedRun(name, kind, model, reason=reason)
        values = self._values(kind)
        try:
            words, environment = self._command(name, checkpoint, values, options)
        except ConfigError as error:
            return PlannedRun(name, kind, model, reason=str(error).removeprefix(f"{name}: "))
        return PlannedRun(
            name,
            kind,
            model,
            command=ServerCommand(tuple(words), environment, inherits=False),
            variables=self._variables(name, options),
            lacks=self._unsupported_settings(name, options),
            replicas=self.num_replicas if kind in ("data-parallel", "load-balanced") else 1,
            memory_bytes=self._memory_bytes(),
        )

    @property
    def num_replicas(self) -> int:
        """The number of servers or replicas: one per GPU, and two on a machine with at most one GPU."""
        return max(2, len(self.gpus))

    def _obstacle(self, name: str, kind: StartKind, checkpoint: str, options: BackendOptions) -> str:
        """Return why a start cannot run, or "" if it can."""
        if all(set_up in options.skip for set_up in self.set_ups if START_KIND_BY_SET_UP[set_up] == kind):
            return "left out (--skip)"
        if not checkpoint:
            return "no quantized checkpoint was given (--quantized)"
        if options.command is None:
            if name == "llama.cpp" and not is_gguf(checkpoint):
                return f"llama.cpp reads GGUF files; got {public_name(checkpoint)} (--checkpoint llama.cpp=FILE.gguf)"
            if name not in _READ_GGUF and is_gguf(checkpoint):
                return f"its template reads no GGUF file; got {public_name(checkpoint)}"
        needed = {"data-parallel": "data_parallel_size", "split": "tensor_parallel_size"}.get(kind)
        if needed is None:
            return ""
        if needed not in (TEMPLATES[name].flags if name in TEMPLATES else {}):
            return "it has no data parallelism of its own" if kind == "data-parallel" else "its template cannot split"
        return "" if len(self.gpus) >= 2 else f"it needs 2 GPUs; {len(self.gpus)} can be used"

    def _values(self, kind: StartKind) -> dict[str, Any]:
        """Return the settings of a start, under the names by which templates map settings to flags."""
        values = self.settings.template_values
        if kind == "data-parallel":
            values["data_parallel_size"] = len(self.gpus)
        if kind == "split":
            values["tensor_parallel_size"] = len(self.gpus)
        if kind == "load-balanced" and len(self.gpus) == 1:
            values["memory_fraction"] = f"{MEMORY_FRACTION / self.num_replicas:.2f}"
            if (memory_bytes := self._memory_bytes()) is not None:
                values["memory_bytes"] = memory_bytes
        return values

    def _memory_bytes(self) -> int | None:
        """Return the bytes that one of several servers may use on its GPU, or None without a GPU."""
        if not self.gpus or self.gpu_memory_bytes is None:
            return None
        return int(MEMORY_FRACTION * self.gpu_memory_bytes * len(self.gpus) / self.num_replicas)

    def _command(
        self, name: str, checkpoint: str, values: Mapping[str, Any], options: BackendOptions
    ) -> tuple[list[str], dict[str, str]]:
        """Return the words of a command, one of which contains {port}, and the whole environment of the command.

        Raises ConfigError if the command cannot be built.
        """
        flags = TEMPLATES[name].flags if name in TEMPLATES else {}
        line = options.command or f"{TEMPLATES[name].command} {ARGS}"
        line = line.replace(ARGS, " ".join(flags[each] for each in values if each in flags))
        seqs = values.get("max_num_seqs") or 1
        context = values.get("max_model_len")
        texts = {key: str(value) for key, value in values.items()}
        texts |= {"checkpoint": checkpoint, "name": MODEL_NAME, "port": PORT}
        texts |= {"context_of_all": str(context * seqs)} if context is not None else {}
        words = fill_command(f"{line} {_escaped(options.arguments)}", texts, name)
        python = options.python or (sys.executable if name == OURS else None)
        gpus = self.gpus[:1] if values.keys().isdisjoint({"data_parallel_size", "tensor_parallel_size"}) else self.gpus
        environment = server_environment(python, gpus if self.gpus else None, self._variables(name, options))
        return find_program(words, environment, python, name), environment

    def _unsupported_settings(self, name: str, options: BackendOptions) -> list[str]:
        """Return the names of the equal settings that a backend's command line does not contain."""
        line = options.command or ARGS
        flags = TEMPLATES[name].flags if name in TEMPLATES and ARGS in line else {}
        return [each for each in self.settings.template_values if each not in flags and f"{{{each}}}" not in line]

    def _variables(self, name: str, options: BackendOptions) -> dict[str, str]:
        """Return the environment variables of a backend. Meltcore's own server inherits PYTHONPATH."""
        inherited = {"PYTHONPATH": os.environ["PYTHONPATH"]} if name == OURS and "PYTHONPATH" in os.environ else {}
        return inherited | options.environment


@dataclass(frozen=True)
class PlannedRun:
    """One planned start, or the `reason` why it cannot run. With a `url`, a server that runs already is loaded instead.

    `variables` are added to the inherited environment variables. Each of several servers may use `memory_bytes` of its
    GPU.
    """

    backend: str
    start: StartKind
    model: str
    reason: str = ""
    command: ServerCommand | None = None
    variables: dict[str, str] = field(default_factory=dict)
    lacks: Sequence[str] = ()
    replicas: int = 1
    url: str = ""
    memory_bytes: int | None = None

    def fleet(self, port: int, start_limit_s: float, api_server_count: int | None) -> dict[str, Any]:
        """Return the content of a fleet.yaml that serves all servers of this start behind `port`."""
        assert self.command is not None
        words = [_escaped(word).replace("{{port}}", PORT) for word in self.command.template]
        command, memory_bytes = shlex.join(words), self.memory_bytes
        model = {"command": command, "replicas": self.replicas, "environment": self.variables}
        return {
            "version": 1,
            "server": {"port": port, **({} if api_server_count is None else {"api_server_count": api_server_count})},
            "models": {MODEL_NAME: {**model, **({} if memory_bytes is None else {"memory": memory_bytes})}},
            "timeouts": {"start_s": start_limit_s, "request_s": 1800.0},
        }


def _escaped(text: str) -> str:
    """Return the text with its braces escaped for `str.format`."""
    return text.replace("{", "{{").replace("}", "}}")
