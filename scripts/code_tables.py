"""Parts of the docs that are computed from the code: request fields, definitions of metrics, models, weight formats."""

from __future__ import annotations

import copy
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, get_args
from unittest.mock import patch

import msgspec
import torch
from source_counts import CHAT_FORMS, MODEL_FORMS

from meltcore.common.errors import ConfigError
from meltcore.kernels.architectures import ARCHITECTURES as GPU_ARCHITECTURES
from meltcore.kernels.quant.ggml_skinny_gemm import is_decoded
from meltcore.kernels.quant.ggml_types import GgmlType
from meltcore.measure.documents.values.definitions import DEFINITIONS
from meltcore.measure.load.tasks.task import tasks
from meltcore.models.checkpoints.checkpoint import PUBLISHED_CONFIG_FOLDERS, Checkpoint, open_checkpoint
from meltcore.models.checkpoints.gguf.gguf_config import FAMILIES
from meltcore.models.checkpoints.gguf.gguf_formats import QUANTIZED_TYPES
from meltcore.models.checkpoints.gguf_weights import GGUFWeights
from meltcore.models.checkpoints.safetensors_file import SafetensorsFile
from meltcore.models.configs.quantization_config import METHODS
from meltcore.models.decoders.kv_cache_specs import FullAttentionSpec, KVCacheSpec, SlidingWindowSpec
from meltcore.models.decoders.model import Model
from meltcore.models.loader import build_meta_model, build_model
from meltcore.models.quantized.quantization import quantize_as_stored
from meltcore.models.registry import ARCHITECTURES
from meltcore.serve.http.operation import DWANI
from meltcore.serve.openapi import document
from meltcore.serve.requests import protocol
from meltcore.settings.config import Quantization

_PLACES = {
    protocol.ChatRequest: "chat",
    protocol.CompletionRequest: "completions",
    protocol.ChatMessage: "`messages[]`",
}
_TESTS = Path(__file__).resolve().parent.parent / "tests"
_THREAT = re.compile(
    r"^# threat: (?P<who>[^:\n]+): (?P<claim>[^\n]+)\n"
    r"(?:(?!\n\n)[\s\S])*?(?:def (?P<test>test_\w+)|(?=\n\n|\Z))",
    re.MULTILINE,
)
_WHO = ("who reaches a server", "a web page", "a client", "a chat template", "a model file", "an audio file")
# Fields of vLLM 0.33 that are not known here, by name a 400. A test sends each.
UNKNOWN_FIELDS = (
    *("add_special_tokens", "allowed_token_ids", "cache_salt", "chat_template", "ec_transfer_params"),
    *("kv_transfer_params", "logprob_token_ids", "media_io_kwargs", "mm_processor_kwargs", "prompt_embeds"),
    *("prompt_logprobs", "repetition_detection", "request_id", "return_mm_kwargs", "return_prompt_text"),
    *("return_token_offsets", "routed_experts_prompt_start", "stream_interval", "truncate_prompt_tokens"),
    *("truncation_side", "vllm_xargs", "watermarking"),
)


# Routes of OpenAI, vLLM 0.33 and this server: who else has them, and what ours does. The code says whether ours exists.
_BOTH, _OPENAI, _VLLM, _NEITHER = ("yes", "yes"), ("yes", "no"), ("no", "yes"), ("no", "no")
API_ROUTES: Mapping[tuple[str, ...], tuple[tuple[str, str], str]] = {
    ("/v1/chat/completions",): (
        _BOTH,
        "yes, streamed or not; `usage` has `cached_tokens` and `reasoning_tokens`; stored chats: no",
    ),
    ("/v1/completions",): (_BOTH, "yes; `echo` with `logprobs` gives prompt log-probabilities"),
    ("/v1/models", "/v1/models/{name}"): (_BOTH, "yes"),
    ("/v1/responses",): (
        _BOTH,
        "[chats without storage](#responses); log-probabilities (`top_logprobs`, `include: "
        "message.output_text.logprobs`) are a 400",
    ),
    ("/v1/responses/input_tokens",): (_OPENAI, "the tokens of such a chat's prompt"),
    ("/v1/responses/{id}", "/v1/responses/{id}/cancel"): (_BOTH, ""),
    ("/v1/messages", "/v1/messages/count_tokens"): (
        *(_VLLM, "chats in Anthropic's form: tools, thinking, `output_config`"),
    ),
    ("/v1/embeddings",): (
        _BOTH,
        "BERT, XLM-RoBERTa (all-MiniLM, multilingual-e5, bge-m3 dense), Qwen3-Embedding; `dimensions` of Matryoshka "
        "models alone: Qwen3-Embedding, or by `is_matryoshka` or `matryoshka_dimensions` in config.json",
    ),
    ("/v1/rerank", "/v2/rerank", "/rerank", "/v1/score", "/score"): (
        _VLLM,
        'rerankers of these families (`instruction`: Qwen3), else cosines; documents are texts or `{"text": ...}`, and '
        "come back with `return_documents: true`. A long input is a 400, or `truncate_prompt_tokens` (`-1`: the limit) "
        "cuts it: of a reranker's pairs the document alone",
    ),
    ("/v2/embed", "/classify", "/pooling"): (_VLLM, ""),
    ("/v1/audio/transcriptions",): (_BOTH, "by a [transcription](transcription.md) checkpoint; also dwani.ai's form"),
    ("/v1/audio/speech",): (_OPENAI, "by a [speech](synthesis.md#serve) checkpoint; also dwani.ai's form"),
    ("/v1/audio/translations", "/v1/realtime", "/v1/decisions"): (_BOTH, ""),
    ("/v1/images", "/v1/moderations", "/v1/files", "/v1/batches", "/v1/fine_tuning"): (_OPENAI, ""),
    ("/v1/load_lora_adapter",): (_VLLM, ""),
    ("/tokenize", "/detokenize"): (_VLLM, "yes"),
    ("/health", "/metrics"): (_VLLM, "[yes](engine/api-server.md#invariants), [yes](metrics.md)"),
    ("/v1/status", "/live"): (_NEITHER, "models with their open requests, GPUs; whether the process answers"),
    ("/v1/translate",): (_NEITHER, "by a [translation](translation.md) checkpoint, in dwani.ai's form"),
    ("/v1/indic_chat", "/v1/chat_direct", "/v1/chat", "/v1/speech_to_speech", "/transcribe_batch"): (
        *(_NEITHER, "[dwani.ai's API](dwani.md)"),
    ),
}


def api_routes() -> list[str]:
    """Lines of a table: routes of OpenAI, vLLM and this server. Raises ValueError for one of ours that is missing."""
    described = document()["paths"]
    listed = {path for paths in API_ROUTES for path in paths}
    missing = [
        path
        for path, methods in described.items()
        if path not in listed and path != "/v1/health" and all(DWANI not in each["tags"] for each in methods.values())
    ]
    if missing:
        raise ValueError(f"API_ROUTES lacks {', '.join(missing)}")
    lines = ["| route | OpenAI | vLLM 0.33 | Meltcore |", "|---|---|---|---|"]
    for paths, ((openai, vllm), note) in API_ROUTES.items():
        if {path in described for path in paths} != {bool(note)}:
            raise ValueError(f"{', '.join(paths)}: the server has them, and the table does not, or the other way round")
        lines.append(f"| {', '.join(f'`{path}`' for path in paths)} | {openai} | {vllm} | {note or 'no'} |")
    return lines


def request_fields() -> list[str]:
    """Lines of a table: all fields of a chat or a completion in OpenAI's and vLLM's API, by what is done with them."""
    places: dict[str, list[str]] = defaultdict(list)
    for struct, place in _PLACES.items():
        names = protocol._UNSUPPORTED[struct] if struct is protocol.ChatMessage else struct.__struct_fields__
        for name in names:
            places[name].append(place)
    groups: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name in sorted(places):
        if name in protocol._NEUTRAL:
            values = (f"`{msgspec.json.encode(value).decode()}`" for value in protocol._NEUTRAL[name])
            treatment = f"refused, but for {', '.join(['`null`', *values])}"
        else:
            treatment = "accepted, changes no answer" if name in protocol.UNUSED else "honored"
        groups[treatment, ", ".join(places[name])].append(f"`{name}`")
    lines = ["| fields | in | Meltcore |", "|---|---|---|"]
    for treatment, where in sorted(groups, key=lambda group: (not group[0].startswith("honored"), group)):
        lines.append(f"| {', '.join(groups[treatment, where])} | {where} | {treatment} |")
    return [*lines, f"| {', '.join(f'`{name}`' for name in UNKNOWN_FIELDS)} | chat, completions | refused |"]


def load_metrics() -> list[str]:
    """Lines of a list: the definitions of the load generator's metrics, word for word."""
    return [f"- **{each.name}** ({each.unit}): {each.text}" for each in DEFINITIONS]


def task_metrics() -> list[str]:
    """Lines of a list: the definitions of the metrics of translation, transcription and synthesis."""
    definitions = [each for task in tasks().values() for each in task.definitions]
    return [f"- **{each.name}** ({each.unit}): {each.text}" for each in definitions]


def published_shapes() -> list[str]:
    """Lines of a table: the models whose config.json is in the package, with what their layers cache."""
    lines = ["| model | architecture | parameters | context | layers |", "|---|---|--:|--:|---|"]
    for model_id in PUBLISHED_CONFIG_FOLDERS:
        checkpoint = open_checkpoint(model_id, files="config")
        config = {name: value for name, value in checkpoint.config.items() if name != "quantization_config"}
        model = build_model(replace(checkpoint, config=config), torch.bfloat16, torch.device("meta"))
        parameters = sum(parameter.numel() for parameter in model.parameters())
        architecture = checkpoint.config["architectures"][0]
        layers = _layers(model.kv_cache_specs())
        lines.append(f"| `{model_id}` | `{architecture}` | {parameters:,} | {model.config.max_context:,} | {layers} |")
    return lines


def _layers(specs: list[KVCacheSpec]) -> str:
    counts: dict[str, int] = defaultdict(int)
    for spec in specs:
        if isinstance(spec, SlidingWindowSpec):
            counts[f"a window of {spec.window:,} tokens"] += 1
        else:
            counts["full attention" if isinstance(spec, FullAttentionSpec) else "recurrent states"] += 1
    return ", ".join(f"{count} with {kind}" for kind, count in sorted(counts.items()))


class _Format(NamedTuple):
    """A weight format: its name, where it comes from, and how a model is built with it. None: no checkpoint has it."""

    name: str
    source: str
    build: Callable[[dict[str, Any], torch.device], Model | None]


# A quantization_config of each method, as its publishers write it.
_PUBLISHED: dict[str, dict[str, Any]] = {
    "fp8": {"weight_block_size": [128, 128], "activation_scheme": "dynamic", "fmt": "e4m3"},
    "compressed-tensors": {
        "format": "float-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"type": "float", "num_bits": 8, "strategy": "channel"},
                "input_activations": {"type": "float", "num_bits": 8, "strategy": "token", "dynamic": True},
            }
        },
        "ignore": ["lm_head"],
    },
    "awq": {"bits": 4, "group_size": 128, "version": "gemm"},
    "gptq": {"bits": 4, "group_size": 128},
}
_PUBLISHED_NAMES = {
    "fp8": "FP8, blocks of 128 x 128",
    "compressed-tensors": "FP8, per channel",
    "awq": "AWQ, 4 bits",
    "gptq": "GPTQ, 4 bits",
}


def weight_formats() -> list[str]:
    """Lines of a table: which family is built with which weight format, and on which GPUs.

    Each cell is tried: a small network of the family on the meta device, for a CPU and for each architecture of GPUs.
    """
    configs = _family_configs()
    lines = [
        f"| weights | from | {' | '.join(f'`{name}`' for name in configs)} | GPUs | CPU |",
        f"|---|---|{'---|' * len(configs)}---|---|",
    ]
    for each in _formats():
        served = {name: _is_built(each, config, torch.device("cpu")) for name, config in configs.items()}
        tried = next((config for name, config in configs.items() if served[name]), None)
        capabilities = [
            capability
            for capability in GPU_ARCHITECTURES
            if tried is not None and _is_built(each, tried, torch.device("cuda", capability))
        ]
        cells = ["yes" if is_served else "no" for is_served in served.values()]
        cells += [_gpus(capabilities), "yes" if tried is not None else "no"]
        lines.append(f"| {each.name} | {each.source} | {' | '.join(cells)} |")
    return lines


def _formats() -> list[_Format]:
    stored = [each.name for each in QUANTIZED_TYPES]
    unquantized = ", ".join(name for name in GGUFWeights.DTYPES if name not in stored)
    return [
        _Format(", ".join(SafetensorsFile.DTYPES), "safetensors", _build),
        *(
            _Format(
                f"{name.upper()}, quantized at load", f"`--quantization {name}`", partial(_build, quantization=name)
            )
            for name in get_args(Quantization)
            if name != "none"
        ),
        *(
            _Format(_PUBLISHED_NAMES[method], f"`quant_method` {method}", partial(_build_published, method=method))
            for method in METHODS
        ),
        _Format(unquantized, "GGUF", partial(_build_gguf, stored=[unquantized])),
        _Format(f"[{len(stored)} quantized formats](#gguf-formats)", "GGUF", partial(_build_gguf, stored=stored)),
    ]


def gguf_formats() -> list[str]:
    """Lines of a table: how a device holds each format of GGUF files, with its bytes per value, and what is lost."""
    lines = [
        "| stored as | held as | bytes of 256 values, in the file and held | loss | GPU, up to 32 tokens |",
        "|---|---|---|---|---|",
    ]
    for stored in GgmlType:
        held, loss = stored.held
        sizes = f"{stored.row_bytes(256)}, {sum(held.array_bytes(256))}"
        kernel = "CUDA C++" if is_decoded(held) else "Triton"
        lines.append(f"| {stored.name} | {held.name} | {sizes} | {loss or 'none'} | {kernel} |")
    return lines


def _family_configs() -> dict[str, dict[str, Any]]:
    """Return a configuration of each family in the registry, by its class, with few layers and experts."""
    configs: dict[str, dict[str, Any]] = {}
    for model_id in PUBLISHED_CONFIG_FOLDERS:
        config = copy.deepcopy(open_checkpoint(model_id, files="config").config)
        if "quantization_config" in config:
            continue
        text = config.get("text_config", config)
        text["num_hidden_layers"] = text.get("full_attention_interval", 1)
        text |= {"num_experts": 8} if "num_experts" in text else {}
        configs[getattr(ARCHITECTURES[config["architectures"][0]], "__name__", "")] = config
    families = {getattr(family, "__name__", "") for family in ARCHITECTURES.values()}
    if configs.keys() != families:
        raise ValueError(f"no published configuration of {', '.join(sorted(families - configs.keys()))}")
    return dict(sorted(configs.items()))


def _build(config: dict[str, Any], device: torch.device, quantization: Quantization = "none") -> Model:
    return build_meta_model(Checkpoint("", Path(), config, {}), torch.bfloat16, device, quantization)


def _build_published(config: dict[str, Any], device: torch.device, method: str) -> Model:
    return _build(config | {"quantization_config": {"quant_method": method} | _PUBLISHED[method]}, device)


def _build_gguf(config: dict[str, Any], device: torch.device, stored: Sequence[str]) -> Model | None:
    """Build a model for each format that all matrices are stored in. None for a family without GGUF files here."""
    names = {family.architecture for family in FAMILIES.values()} | {"MistralForCausalLM"}  # of `llama` files
    if ARCHITECTURES[config["architectures"][0]] not in {ARCHITECTURES[name] for name in names}:
        return None
    model = None
    for each in stored:
        model = _build(config, device)
        matrices = [name for name, loader in model.checkpoint_tensors().items() if len(loader.shape) > 1]
        quantize_as_stored(model, dict.fromkeys(matrices, each))
    return model


def _is_built(each: _Format, config: dict[str, Any], device: torch.device) -> bool:
    """Return whether a network is accepted. A GPU's index is its compute capability as 10 * major + minor."""
    with (
        patch("torch.cuda.get_device_capability", lambda device: divmod(torch.device(device).index, 10)),
        patch("torch.cuda.get_device_name", lambda _: "a GPU"),
        patch("meltcore.models.loader.check_memory", lambda *_: None),
    ):
        try:
            return each.build(config, device) is not None
        except ConfigError:
            return False


def _gpus(capabilities: list[int]) -> str:
    """Describe the architectures from the first of `capabilities` on."""
    known = list(GPU_ARCHITECTURES)
    if not capabilities:
        return "none"
    if capabilities != known[known.index(capabilities[0]) :]:
        return ", ".join(f"{each / 10}" for each in capabilities)
    return f"{capabilities[0] / 10} and later ({GPU_ARCHITECTURES[capabilities[0]].gpu_type})"


def forms(found: Mapping[str, tuple[str, str]]) -> list[str]:
    """Lines of a table: each form, what it holds, and the border that it crosses or its lifetime."""
    lines = ["| form | what it holds | border, or lifetime |", "|---|---|---|"]
    for name, (content, lifetime) in found.items():
        lines.append(f"| {f'`{name}`' if name[0].isupper() else name} | {content} | {lifetime} |")
    return lines


def threats(folder: Path = _TESTS) -> list[str]:
    """Return the claims that stand as `# threat: WHO: CLAIM` above the tests that show them.

    Raises ValueError for a claim without a test below it.
    """
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted(folder.rglob("test_*.py")):
        for claim in _THREAT.finditer(path.read_text()):
            if claim["test"] is None:
                raise ValueError(f"{path}: no test is below {claim[0]!r}")
            found[claim["who"]].append(
                f"| {claim['who']} | {claim['claim']} | `{path.relative_to(folder.parent)}`: `{claim['test']}` |"
            )
    order = sorted(found, key=lambda who: (_WHO.index(who) if who in _WHO else len(_WHO), who))
    return ["| who | claim | test |", "|---|---|---|", *(line for who in order for line in found[who])]


TABLES = {
    "threats": threats,
    "forms of a chat request": partial(forms, CHAT_FORMS),
    "forms of a model at start": partial(forms, MODEL_FORMS),
    "API routes": api_routes,
    "request fields": request_fields,
    "load metrics": load_metrics,
    "task metrics": task_metrics,
    "published shapes": published_shapes,
    "weight formats": weight_formats,
    "gguf formats": gguf_formats,
}
