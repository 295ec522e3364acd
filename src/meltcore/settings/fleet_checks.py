"""Checks fleet.yaml across several fields: names, references, and settings that exclude each other."""

from __future__ import annotations

import difflib
import re
import string
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from meltcore.common.errors import ConfigError
from meltcore.common.options import braces_fault, fields_by_flag, server_url_fault
from meltcore.common.tasks import DEFAULT, setting_tasks, tasks
from meltcore.settings.config import SharingSection
from meltcore.settings.fleet_spec import FleetSpec, LimitsSection, ModelSection, ServerSection, TimeoutsSection
from meltcore.settings.routes_section import PROMPT_FIELDS, language_models
from meltcore.settings.server_templates import PLACEHOLDERS, UPSTREAM_TEMPLATES

# Settings that an engine of Meltcore's own reads. An upstream server would ignore them.
_ENGINE_ONLY = (
    *(
        "tokenizer",
        "chat_template",
        "special_tokens_in_messages",
        "load_format",
        "dtype",
        "quantization",
        "kv_cache_dtype",
        "max_num_batched_tokens",
    ),
    *("enforce_eager", "enable_prefix_caching", "generation_config", "shapes", "format"),
    *("hf_overrides", "async_scheduling", "seed", "debug", "normalizer", "tool_call_parser", "reasoning_parser"),
    *("max_queue_chars", "max_queue_audio_s"),
)
# Settings of a `url` or a `command`. An engine of Meltcore's own would ignore them.
_UPSTREAM_ONLY = {"environment", "paths", "python", "sleep_mode", "upstream_model", "upstream_key_env"}
# Settings of a process that this fleet starts. A server that runs already has its own.
_PROCESS_ONLY = (
    *(
        "checkpoint",
        "environment",
        "python",
        "max_model_len",
        "memory",
        "tensor_parallel_size",
        "device",
    ),
    *("replicas", "residency", "sleep_mode"),
)


class FleetError(ConfigError):
    """Reports a fault of a fleet with the path of its key, and of a second key that `message` names as {other}.

    A caller adds the name of the file, or writes the flags of `serve` instead of the paths.
    """

    def __init__(self, path: str, message: str, other: str = "") -> None:
        self._path, self._message, self._other = path, message, other
        super().__init__(self.text(str))

    def text(self, write: Callable[[str], str]) -> str:
        """Return the text of the error. `write` returns how a front end writes the setting of a path."""
        message = self._message.replace("{other}", write(self._other)) if self._other else self._message
        return f"{write(self._path)}: {message}" if self._path else message


def keys_for_flags(error: Exception, name: str | None = None) -> str:
    """Return the text of an error with keys of fleet.yaml instead of the flags of `serve`.

    Checks that both have, and engines in other processes, write flags. `name` is the model that the error is about.
    """
    sections = {"server": ServerSection, "limits": LimitsSection, "timeouts": TimeoutsSection}
    paths = sections if name is None else sections | {f"models.{name}": ModelSection}
    keys = {flag: f"{path}.{key}" for path, section in paths.items() for flag, key in fields_by_flag(section).items()}
    return re.sub("--[a-z-]+", lambda flag: keys.get(flag[0], flag[0]), str(error))


def model_error(name: str, error: Exception) -> str:
    """Return the text of an error about the model `name` of a fleet, with keys of fleet.yaml instead of flags."""
    text = keys_for_flags(error, name)
    return text if text.startswith(f"models.{name}") else f"models.{name}: {text}"


def check_fleet(spec: FleetSpec, *, is_planned: bool = True) -> None:
    """Raise FleetError for the first fault of a fleet that a single field does not show.

    If `is_planned` is false, as for `serve`, settings that only a plan reads are faults too.
    """
    if not spec.models:
        raise FleetError("models", "got {}; must be a mapping of at least one")
    _check_server(spec)
    _check_gpus(spec)
    _check_names(spec)
    for name, model in spec.models.items():
        path = f"models.{name}"
        if model.url is not None and (fault := server_url_fault(model.url)):
            raise FleetError(f"{path}.url", fault)
        _check_kind(model, path, is_planned=is_planned)
        _check_device(spec, model, path)
        try:
            model.check_speculation()
        except ConfigError as error:
            raise FleetError(path, str(error)) from error
    _check_limits(spec)
    _check_languages(spec)
    _check_routes(spec)
    _check_keys(spec)
    _check_sharing(spec)


def _check_server(spec: FleetSpec) -> None:
    port, admin_port = spec.server.port, spec.server.admin_port
    if admin_port and admin_port == port:
        raise FleetError("server.admin_port", f"got {admin_port}, which is {{other}}; choose another", "server.port")
    if spec.server.ssl_keyfile is not None and spec.server.ssl_certfile is None:
        message = f"got {spec.server.ssl_keyfile}, and no certificate; add {{other}}"
        raise FleetError("server.ssl_keyfile", message, "server.ssl_certfile")


def _check_gpus(spec: FleetSpec) -> None:
    ids = [gpu.id for gpu in spec.gpus]
    for index, gpu in enumerate(ids):
        if gpu in ids[:index]:
            raise FleetError(f"gpus[{index}].id", f"got {gpu}, which gpus[{ids.index(gpu)}] has; name each GPU once")


def _check_names(spec: FleetSpec) -> None:
    """Refuse two equal names. Names that differ only in case count as equal, because users confuse them."""
    owners: dict[str, str] = {}
    for path, name in _names(spec):
        owner = owners.setdefault(name.casefold(), path)
        if owner != path:
            message = f"{name!r} is also {{other}}; every name and alias must differ, not by case alone"
            raise FleetError(path, message, owner)


def _names(spec: FleetSpec) -> Iterator[tuple[str, str]]:
    for name, model in spec.models.items():
        yield f"models.{name}", name
        yield from ((f"models.{name}.aliases[{index}]", alias) for index, alias in enumerate(model.aliases))


def _changed(model: ModelSection | SharingSection | LimitsSection) -> set[str]:
    """Return the names of the fields whose value is not the default."""
    fields = msgspec.structs.fields(model)
    return {field.name for field in fields if getattr(model, field.name) != _default(field)}


def _default(field: Any) -> Any:
    return field.default_factory() if field.default_factory is not msgspec.NODEFAULT else field.default


def _check_kind(model: ModelSection, path: str, *, is_planned: bool) -> None:
    """Check that a model has exactly one kind, and only settings of this kind."""
    given = [name for name in ("url", "command") if getattr(model, name) is not None]
    if len(given) == 2 or (model.kind == "engine" and model.checkpoint is None):
        found = "both url and command" if given else "none of them"
        raise FleetError(
            path, f"has {found}; give a checkpoint (an engine of Meltcore's), a url or a command (other servers)"
        )
    changed = _changed(model)
    if "format" in changed and model.shapes is None:
        raise FleetError(f"{path}.format", f"got {model.format!r}, which is of shapes, and the model has none")
    if model.kind == "engine":
        _check_task(model, changed, path, is_planned=is_planned)
        if upstream := sorted(changed & _UPSTREAM_ONLY):
            raise FleetError(f"{path}.{upstream[0]}", "is for a url or a command, and this model has neither")
        if (
            model.load_format == "dummy"
            and model.format in ("q4_0", "q8_0")
            and not Path(model.model).expanduser().exists()
        ):
            raise FleetError(
                path,
                f"random weights in {model.format} need a GGUF file for their layout, and {model.model} is not on this "
                f"machine; name a file, or remove format for dense weights of {model.shapes}",
            )
        return
    refused = [name for name in _ENGINE_ONLY if name in changed]
    if model.kind == "url":
        refused += [name for name in _PROCESS_ONLY if name in changed]
    if refused:
        value = getattr(model, refused[0])
        raise FleetError(
            f"{path}.{refused[0]}", f"got {value!r}; a model with a {model.kind} has no such setting: remove it"
        )
    if model.max_queue_tokens is not None and not _has_tokens(model):
        raise FleetError(
            f"{path}.max_queue_tokens",
            f"got {model.max_queue_tokens}; uploads of task {model.task} have no tokens: use max_queue",
        )
    if "sleep_mode" in changed and model.residency != "sleepable":
        raise FleetError(
            f"{path}.sleep_mode",
            f"got {model.sleep_mode!r} for a model that is {model.residency}; add residency: sleepable",
        )
    if model.command is not None:
        _check_command(model, model.command, f"{path}.command")


def _check_task(model: ModelSection, changed: set[str], path: str, *, is_planned: bool) -> None:
    """Refuse settings that engines of the model's task would ignore. Only models on Meltcore's engines are checked."""
    for name, names in setting_tasks().items():
        if name in changed and model.task not in names:
            raise FleetError(
                f"{path}.{name}",
                f"got {getattr(model, name)!r}; is for task {' or '.join(names)}, and the model's is {model.task}",
            )
    if not model.has_context and model.max_num_seqs is not None and (model.memory is not None or not is_planned):
        raise FleetError(
            f"{path}.max_num_seqs",
            f"got {model.max_num_seqs}; memory decides how many of task {model.task} run together: remove it",
        )


def _has_tokens(model: ModelSection) -> bool:
    """Return whether the queue of an upstream server counts tokens. They are estimated from the length of JSON bodies.

    Uploads have no tokens.
    """
    return not tasks()[model.task].is_upload


def _check_limits(spec: FleetSpec) -> None:
    """Raise FleetError for a changed queue limit if no model of the fleet has a task that it applies to."""
    tasks_by_setting = setting_tasks()
    for name in sorted(_changed(spec.limits) & tasks_by_setting.keys()):
        names = tasks_by_setting[name]
        if not any(
            model.task in names if model.kind == "engine" else name == "max_queue_tokens" and _has_tokens(model)
            for model in spec.models.values()
        ):
            raise FleetError(
                f"limits.{name}",
                f"got {getattr(spec.limits, name)}; is for task {' or '.join(names)}, and no model is of it",
            )


def _check_command(model: ModelSection, command: str, path: str) -> None:
    """Check the names in braces of a command. Each must be known and have a value, and {port} must be among them."""
    import shlex

    if command in UPSTREAM_TEMPLATES:
        if model.checkpoint is None:
            raise FleetError(path, f"the template {command} needs the model's checkpoint: add it")
        return
    try:
        shlex.split(command)
        named = {name for _, name, _, _ in string.Formatter().parse(command) if name is not None}
    except ValueError as error:
        raise FleetError(path, f"got {command!r}; not a command line: {error}") from error
    for name in sorted(named):
        if name not in PLACEHOLDERS:
            close = difflib.get_close_matches(name, PLACEHOLDERS, n=1)
            hint = f" (did you mean {{{close[0]}}}?)" if close else ""
            known = ", ".join(f"{{{each}}}" for each in PLACEHOLDERS)
            raise FleetError(path, f"{{{name}}} is unknown{hint}; known: {known}; write other braces twice")
        field = {"memory_bytes": "memory"}.get(name, name)
        if field in ("checkpoint", "memory", "max_model_len", "max_num_seqs") and getattr(model, field) is None:
            raise FleetError(path, f"uses {{{name}}}, and the model has no {field}: add it")
    if "port" not in named:
        raise FleetError(path, f"got {command!r}; must pass {{port}}, the port that the server has to listen on")


def _check_device(spec: FleetSpec, model: ModelSection, path: str) -> None:
    device, ranks = model.device, model.tensor_parallel_size
    if device == "cpu":
        return
    fleet_gpus = [gpu.id for gpu in spec.gpus]
    if isinstance(device, str):
        if fleet_gpus and ranks > len(fleet_gpus):
            raise FleetError(f"{path}.tensor_parallel_size", f"got {ranks}; gpus lists {len(fleet_gpus)}")
        return
    if len(set(device)) != len(device):
        raise FleetError(f"{path}.device", f"got {list(device)}; name each GPU once")
    unknown = [gpu for gpu in device if fleet_gpus and gpu not in fleet_gpus]
    if unknown:
        raise FleetError(f"{path}.device", f"got GPU {unknown[0]}; gpus lists {', '.join(map(str, fleet_gpus))}")
    if len(device) % ranks or len(device) > ranks * model.replicas:
        raise FleetError(
            f"{path}.device",
            f"got {len(device)} GPUs for {model.replicas} replicas of {ranks}; must be a multiple of {ranks}, "
            f"at most {ranks * model.replicas}",
        )


def _require_model(spec: FleetSpec, path: str, name: str, task: str) -> None:
    """Raise FleetError if `name` is no model of this task."""
    owner = spec.resolve(name)
    if owner is None:
        known = [each for _, each in _names(spec)]
        close = difflib.get_close_matches(name, known, n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        raise FleetError(path, f"got {name!r}; no model has this name{hint}; models are {', '.join(spec.models)}")
    if spec.models[owner].task != task:
        raise FleetError(path, f"got {name!r}, a model of task {spec.models[owner].task}; must be one of task {task}")


def _check_languages(spec: FleetSpec) -> None:
    languages = spec.languages
    for task, key, name in language_models(languages):
        _require_model(spec, f"languages.{key}", name, task)
    for index, rule in enumerate(languages.translation):
        for earlier, other in enumerate(languages.translation[:index]):
            if other.matches(rule.source, rule.target):
                raise FleetError(
                    f"languages.translation[{index}]",
                    f"never applies: languages.translation[{earlier}] matches all of its directions",
                )
    for language, replacements in languages.substitute_lists.items():
        for replacement in replacements:
            if replacement in languages.substitute:
                raise FleetError(
                    f"languages.substitute.{language}",
                    f"got {replacement!r}, which is itself substituted; name its end",
                )


def _check_routes(spec: FleetSpec) -> None:
    translate, chat = spec.routes.translate, spec.routes.chat
    if translate.backend == "llm" and translate.model is None:
        raise FleetError("routes.translate.model", "missing; backend llm needs a language model")
    if translate.backend != "llm" and translate.model is not None:
        raise FleetError("routes.translate.model", "is for backend llm; indictrans2 uses languages.translation")
    if translate.model is not None:
        _require_model(spec, "routes.translate.model", translate.model, DEFAULT.name)
    for key, is_given in (("prompt", translate.prompt is not None), ("stop", bool(translate.stop))):
        if is_given and translate.backend != "llm":
            raise FleetError(f"routes.translate.{key}", "is for backend llm; translation models have no prompt")
    for route, prompt in (("translate", translate.prompt), ("chat", chat.prompt)):
        if fault := braces_fault(prompt or "", PROMPT_FIELDS[route]):
            raise FleetError(f"routes.{route}.prompt", fault)
    if chat.model is not None:
        _require_model(spec, "routes.chat.model", chat.model, DEFAULT.name)


def _check_keys(spec: FleetSpec) -> None:
    for limit in ("requests_per_minute", "tokens_per_minute"):
        if getattr(spec.limits, limit) is not None and not spec.keys and spec.server.api_key_file is None:
            raise FleetError(f"limits.{limit}", "is per key, and there are no keys")
    seen: dict[str, int] = {}
    for index, key in enumerate(spec.keys):
        path = f"keys[{index}]"
        if sum(source is not None for source in (key.env, key.file, key.sha256)) != 1:
            raise FleetError(path, "give env, the name of an environment variable, file or sha256: one of the three")
        if key.name in seen:
            raise FleetError(f"{path}.name", f"got {key.name!r}, which keys[{seen[key.name]}] has; names must differ")
        seen[key.name] = index


def _check_sharing(spec: FleetSpec) -> None:
    """Refuse settings of GPU sharing that only another value of `means` would apply."""
    sharing, changed = spec.sharing, _changed(spec.sharing)
    others = {"none": ("mps_sm_percent", "min_share", "max_wait_ms", "step_ms"), "pacing": ("mps_sm_percent",)}
    for name in others.get(sharing.means, ()):
        if name in changed:
            needed = "mps" if name == "mps_sm_percent" else "pacing or mps"
            raise FleetError(
                f"sharing.{name}",
                f"got {getattr(sharing, name)}, which is for means {needed}, and sharing.means is {sharing.means}",
            )
