"""fleet.yaml: what is read, what is refused and how, the settings of the server, and the published schema."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import fleet_reference
import msgspec
import pytest

from meltcore.common.errors import ConfigError
from meltcore.common.options import Size
from meltcore.fleet.admin.operations import check_startable, check_startable_fleet
from meltcore.fleet.plan.placement import engine_config
from meltcore.settings.config import SharingSection
from meltcore.settings.fleet_checks import FleetError, check_fleet, model_error
from meltcore.settings.fleet_file import load_fleet, parse_fleet
from meltcore.settings.fleet_spec import FleetSpec, KeySection

FLEET = """
server: {port: 9000, log_format: json}
gpus: [{id: 0, memory: 96GiB}, {id: 1}]
models:
  qwen:
    checkpoint: Qwen/Qwen3-30B-A3B-GGUF:Q8_0
    aliases: [qwen3]
    max_model_len: 8192
    max_num_seqs: 8
    memory: 40GiB
    priority: interactive
    device: [1]
  en-indic: {checkpoint: ai4bharat/indictrans2-en-indic-1B, task: translation, max_queue: 0}
  indic-indic: {checkpoint: ai4bharat/indictrans2-indic-indic-1B, task: translation, aliases: [mt]}
  ears:
    {checkpoint: ai4bharat/indic-conformer-600m-multilingual, task: transcription, device: cpu, max_queue_audio_s: 90}
  far: {url: "https://example.test", upstream_key_env: FAR_KEY}
languages:
  translation:
    - {source: eng_Latn, target: "*", model: en-indic}
    - {source: "*", target: "*", model: mt}
  transcription: {kan_Knda: ears, "*": ears}
  substitute: {kan_Knda: guj_Gujr, hin_Deva: [tam_Taml, tel_Telu]}
keys: [{name: app, env: APP_KEY, priority: standard, requests_per_minute: 60}]
limits:
  {max_body: 1MiB, max_queue: 7, max_queue_chars: 600, max_queue_audio_s: 30,
   tokens_per_minute: 900, class_shares: [5, 3, 2]}
timeouts: {request_s: 20, start_s: 7}
routes:
  translate: {backend: llm, model: qwen, prompt: "{source} to {target}:", stop: ["\\n"]}
  chat: {prompt: "Speak {language}.", language: eng_Latn}
"""
MODELS = "models:\n  a: {checkpoint: x, aliases: [alpha]}\n  mt: {checkpoint: y, task: translation}\n"


def test_fleet_is_read_into_typed_sections(tmp_path: Path) -> None:
    (tmp_path / "fleet.yaml").write_text(FLEET)
    spec = load_fleet(tmp_path / "fleet.yaml")
    qwen = spec.models["qwen"]
    assert (qwen.memory, qwen.device, qwen.priority, qwen.kind) == (40 * 2**30, (1,), "interactive", "engine")
    assert spec.gpus[0].memory == 96 * 2**30
    assert spec.models["far"].kind == "url"
    assert (spec.resolve("qwen3"), spec.resolve("qwen"), spec.resolve("other")) == ("qwen", "qwen", None)


def test_languages_reach_the_server_in_the_order_of_the_file() -> None:
    languages = parse_fleet(FLEET).languages
    assert [(rule.source, rule.target, rule.model) for rule in languages.translation] == [
        ("eng_Latn", "*", "en-indic"),
        ("*", "*", "mt"),
    ]
    assert (languages.transcription, languages.synthesis) == ({"kan_Knda": "ears", "*": "ears"}, {})
    assert languages.substitute_lists == {"kan_Knda": ("guj_Gujr",), "hin_Deva": ("tam_Taml", "tel_Telu")}


def test_settings_of_the_server_are_those_of_the_file() -> None:
    config = parse_fleet(FLEET)
    assert (config.server.port, config.server.log_format, config.limits.max_body, config.timeouts.request_s) == (
        9000,
        "json",
        2**20,
        20,
    )
    qwen, en_indic, _, ears, _ = config.models.values()
    assert [*config.engines] == ["qwen", "en-indic", "indic-indic", "ears"]
    engine = engine_config(qwen)
    assert (engine.model, engine.memory_bytes, engine.device) == ("Qwen/Qwen3-30B-A3B-GGUF:Q8_0", 40 * 2**30, "cuda")
    assert (engine.max_model_len, engine.max_num_seqs, qwen.replica_gpus) == (8192, 8, [(1,)])
    limits = [config.limits.of(model) for model in (qwen, en_indic, ears)]
    assert [each.max_queue for each in limits] == [7, 0, 7]
    assert [(each.max_queue_chars, each.max_queue_audio_s) for each in limits] == [(600, 30), (600, 30), (600, 90)]
    assert engine_config(ears).device == "cpu"
    assert (qwen.priority, ears.priority) == ("interactive", "standard")
    assert (config.limits.class_shares, config.timeouts.start_s) == ((5, 3, 2), 7)
    routes = config.routes
    assert (routes.translate.system_message, routes.translate.stop) == ("{source} to {target}:", ("\n",))
    assert (routes.chat.system_message, routes.chat.language) == ("Speak {language}.", "eng_Latn")
    assert config.keys == (KeySection(name="app", env="APP_KEY", priority="standard", requests_per_minute=60),)


def test_random_weights_of_a_checkpoint_that_is_not_here_have_its_shapes(tmp_path: Path) -> None:
    model = "models:\n  a: {checkpoint: CHECKPOINT, shapes: org/shapes, task: translation, FIELDS}\n"

    def opened(checkpoint: object, fields: str) -> str:
        text = model.replace("CHECKPOINT", str(checkpoint)).replace("FIELDS", fields)
        return check_startable(parse_fleet(text)).models["a"].model

    assert opened("org/model", "load_format: dummy") == "org/shapes"
    assert opened("org/model", "load_format: auto") == "org/model"
    assert opened(tmp_path, "load_format: dummy") == str(tmp_path)
    with pytest.raises(ConfigError, match=r"models\.a: random weights in q8_0 need a GGUF file .* org/model is not on"):
        opened("org/model", "load_format: dummy, format: q8_0")


def test_sharing_is_paced_unless_switched_off() -> None:
    assert parse_fleet(FLEET).sharing == SharingSection(means="pacing", min_share=0.5, max_wait_ms=100.0, step_ms=50.0)
    changed = parse_fleet(FLEET + "sharing: {min_share: 0.8, max_wait_ms: 20, step_ms: 10}")
    assert changed.sharing == SharingSection(min_share=0.8, max_wait_ms=20.0, step_ms=10.0)
    assert parse_fleet(FLEET + "sharing: {means: none}").sharing.means == "none"


def test_upstream_servers_of_the_file() -> None:
    text = """
timeouts: {start_s: 7, connect_s: 2, request_s: 90}
models:
  near: {command: vllm, checkpoint: org/m, python: /envs/v/bin/python, device: [2, 3, 4, 5], tensor_parallel_size: 2,
         replicas: 2, memory: 2GiB, max_num_seqs: 8, environment: {A: b}, aliases: [n]}
  ears: {url: 'http://10.0.0.1:9', task: transcription, upstream_model: whisper, upstream_key_env: KEY}
  cpu: {command: 'llama-server --port {port}', device: cpu}
"""
    config = parse_fleet(text)
    near, ears, cpu = config.models.values()
    assert config.engines == {}
    assert (near.command, near.checkpoint, near.python, near.memory) == (
        "vllm",
        "org/m",
        "/envs/v/bin/python",
        2 * 2**30,
    )
    assert (near.replica_gpus, cpu.replica_gpus) == ([(2, 3), (4, 5)], [()])
    assert (config.timeouts.start_s, config.timeouts.connect_s, config.timeouts.first_byte_s) == (7, 2, 300)
    assert ears.upstream_paths == ("/v1/audio/transcriptions",)
    assert msgspec.json.decode(msgspec.json.encode(config), type=FleetSpec) == config, "between processes"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("models: [", "line 1: not YAML"),
        ("- a", "got ['a']; must be a mapping with keys of version, server"),
        ("server: {}", "models: missing"),
        ("models: {}", "models: got {}; must be a mapping of at least one"),
        (MODELS + "model: 1", "model: unknown key (did you mean models?); known: version, server"),
        (MODELS + "  a: {checkpoint: z}", "line 4: 'a' stands twice"),
        (
            "models: {a: {checkpoint: x, max_model_length: 8}}",
            "models.a.max_model_length: unknown key (did you mean max_m",
        ),
        (MODELS + "timeouts: {first_byte_s: 0.0}", "timeouts.first_byte_s: got 0.0; must be float > 0"),
        (MODELS + "timeouts: {connect_s: .nan}", "timeouts.connect_s: got nan; must be a finite number"),
        (
            "models: {a: {url: 'http://h', paths: ['/v1/x HTTP/1.1\\r\\nx: y']}}",
            "models.a.paths[0]: got '/v1/x HTTP/1.1\\\\r\\\\nx: y'; must be a path such as /v1/chat/completions",
        ),
        ("models: {a: {checkpoint: x, paths: [/v1/rerank]}}", "models.a.paths: is for a url or a command"),
        ("models: {a: {url: 'http://h', max_queue: -1}}", "models.a.max_queue: got -1; must be int >= 0"),
        ("models: {a: {url: 'http://h', max_queue_tokens: -1}}", "models.a.max_queue_tokens: got -1; must be int >= 1"),
        (MODELS + "sharing: {min_share: 0}", "sharing.min_share: got 0; must be float > 0"),
        (MODELS + "sharing: {max_wait_ms: 20000}", "sharing.max_wait_ms: got 20000; must be float <= 10000"),
        (MODELS + "sharing: {step_ms: .inf}", "sharing.step_ms: got inf; must be a finite number"),
        (MODELS + "sharing: {mps_sm_percent: 101}", "sharing.mps_sm_percent: got 101; must be int <= 100"),
        (MODELS + "sharing: {means: mig}", "sharing.means: got 'mig'; must be pacing, mps or none"),
        ("models: {a: {checkpoint: x, max_num_seqs: 0}}", "models.a.max_num_seqs: got 0; must be int >= 1"),
        ("models: {a: {checkpoint: x, max_num_seqs: '8'}}", "models.a.max_num_seqs: got '8'; must be int"),
        ("models: {a: {checkpoint: 7}}", "models.a.checkpoint: got 7; must be str; put it in quotes"),
        (
            "models: {a: {checkpoint: x, memory: 40 gigs}}",
            "models.a.memory: got '40 gigs'; must be a size such as 40GiB",
        ),
        ("models: {a: {checkpoint: x, memory: true}}", "models.a.memory: got True; must be a size"),
        (
            "models: {a: {checkpoint: x, priority: interactiv}}",
            "models.a.priority: got 'interactiv'; must be interactive, standard or batch (did you mean interactive?)",
        ),
        ("models: {a b: {checkpoint: x}}", "models.a b: got 'a b'; must be a name of letters"),
        (
            "models: {a: {checkpoint: x, device: gpu}}",
            "models.a.device: got 'gpu'; must be auto, cuda, cpu or a list of GPU numbers such as [0]",
        ),
        (
            "models: {a: {checkpoint: x, device: 0}}",
            "models.a.device: got 0; must be auto, cuda, cpu or a list of GPU numbers such as [0]",
        ),
        ("models: {a: {checkpoint: x, device: [-1]}}", "models.a.device[0]: got -1; must be int >= 0"),
        ("models: {a: {checkpoint: x, tensor_parallel_size: 3}}", "got 3; must be 1, 2, 4 or 8"),
        ("models: {a: {}}", "models.a: has none of them; give a checkpoint"),
        ("models: {a: {url: 'http://h', command: 'x {port}'}}", "models.a: has both url and command"),
        ("models: {a: {url: 'ftp://h'}}", "models.a.url: got 'ftp://h'; must be an address such as http"),
        (
            "models: {a: {url: 'http://h', replicas: 2}}",
            "models.a.replicas: got 2; a model with a url has no such setting",
        ),
        (
            "models: {a: {checkpoint: x, command: vllm, sleep_mode: vllm}}",
            "models.a.sleep_mode: got 'vllm' for a model that is always_on; add residency: sleepable",
        ),
        (
            "models: {a: {checkpoint: x, residency: sleepable, sleep_mode: vllm}}",
            "models.a.sleep_mode: is for a url or a command, and this model has neither",
        ),
        (
            "{models: {a: {checkpoint: x}}, routes: {translate: {prompt: hi}}}",
            "routes.translate.prompt: is for backend llm",
        ),
        (
            "{models: {a: {checkpoint: x}}, routes: {chat: {prompt: 'in {lang}'}}}",
            "routes.chat.prompt: got 'in {lang}'; may hold {language} in braces",
        ),
        (
            "{models: {a: {checkpoint: x}}, limits: {class_shares: [1, 2]}}",
            "limits.class_shares: got [1, 2]; must be a list of 3",
        ),
        (
            "{models: {a: {checkpoint: x}}, limits: {class_shares: [1, 2, 3, 4]}}",
            "got [1, 2, 3, 4]; must be a list of 3",
        ),
        ("{models: {a: {checkpoint: x}}, limits: {class_shares: [1, 2, 0]}}", "limits.class_shares[2]: got 0; must be"),
        ("{models: {a: {checkpoint: x}}, limits: {class_shares: 60}}", "class_shares: got 60; must be a list of 3"),
        ("models: {a: {checkpoint: x, device: []}}", "models.a.device: got []; must be a list of at least 1"),
        ("models: {a: {checkpoint: x, aliases: b}}", "models.a.aliases: got 'b'; must be a list"),
        (
            "{models: {a: {checkpoint: x}}, routes: {chat: {prompt: '{language.x}'}}}",
            "routes.chat.prompt: got '{language.x}'; may hold {language} in braces",
        ),
        ("{models: {a: {checkpoint: x}}, routes: {chat: {language: kannada}}}", "must be a FLORES code"),
        ("models: {a: {command: 'x {port}', dtype: float16}}", "models.a.dtype: got 'float16'; a model with a command"),
        ("models: {a: {command: 'x'}}", "models.a.command: got 'x'; must pass {port}"),
        ("models: {a: {command: vllm}}", "models.a.command: the template vllm needs the model's checkpoint"),
        ("models: {a: {checkpoint: x, python: y}}", "models.a.python: is for a url or a command"),
        ("models: {a: {command: 'x {prt}'}}", "models.a.command: {prt} is unknown (did you mean {port}?)"),
        (
            "models: {a: {command: 'x {port} {checkpoint}'}}",
            "uses {checkpoint}, and the model has no checkpoint: add it",
        ),
        ('models: {a: {command: "x \'{port}"}}', "not a command line: No closing quotation"),
        ("models: {a: {checkpoint: x, upstream_model: y}}", "models.a.upstream_model: is for a url or a command"),
        (
            "models: {a: {checkpoint: x}, b: {checkpoint: y, aliases: [c, A]}}",
            "models.b.aliases[1]: 'A' is also models.a; every name and alias must differ, not by case alone",
        ),
        (
            "models: {a: {checkpoint: x, device: [0, 0]}}",
            "models.a.device: got [0, 0]; name each GPU once",
        ),
        (
            "models: {a: {checkpoint: x, device: [0, 1]}}",
            "got 2 GPUs for 1 replicas of 1; must be a multiple of 1, at most",
        ),
        ("models: {a: {checkpoint: x, device: [2]}}\ngpus: [{id: 0}]", "models.a.device: got GPU 2; gpus lists 0"),
        (
            "models: {a: {checkpoint: x, tensor_parallel_size: 2}}\ngpus: [{id: 0}]",
            "models.a.tensor_parallel_size: got 2; gpus lists 1",
        ),
        (MODELS + "gpus: [{id: 1}, {id: 1}]", "gpus[1].id: got 1, which gpus[0] has"),
        (MODELS + "gpus: [{memory: 1GiB}]", "gpus[0].id: missing"),
        (MODELS + "server: {port: 80, admin_port: 80}", "server.admin_port: got 80, which is server.port"),
        (
            MODELS + "languages: {transcription: {kan_Knda: alpah}}",
            "languages.transcription.kan_Knda: got 'alpah'; no model has this name (did you mean alpha?); models are a",
        ),
        (
            MODELS + "languages: {synthesis: {kan_Knda: a}}",
            "got 'a', a model of task generation; must be one of task syn",
        ),
        (
            "models: {a: {checkpoint: x, task: recognition}}",
            "models.a.task: got 'recognition'; must be generation, translation, transcription, synthesis or embedding",
        ),
        (
            MODELS + "languages: {transcription: {kannada: a}}",
            "transcription.kannada: got 'kannada'; must be a FLORES code",
        ),
        (
            MODELS + "languages: {translation: [{source: '*', target: '*', model: mt},"
            " {source: eng_Latn, target: '*', model: mt}]}",
            "languages.translation[1]: never applies: languages.translation[0] matches all",
        ),
        (MODELS + "languages: {substitute: {kan_Knda: guj_Gujr, guj_Gujr: hin_Deva}}", "which is itself substituted"),
        (MODELS + "languages: {substitute: {kan_Knda: []}}", "substitute.kan_Knda: got []; must be a list of"),
        (MODELS + "routes: {translate: {backend: llm}}", "routes.translate.model: missing; backend llm needs"),
        (MODELS + "routes: {translate: {model: mt}}", "routes.translate.model: is for backend llm"),
        (MODELS + "routes: {chat: {model: mt}}", "routes.chat.model: got 'mt', a model of task translation"),
        (MODELS + "limits: {tokens_per_minute: 9}", "limits.tokens_per_minute: is per key, and there are no keys"),
        (MODELS + "keys: [{name: k}]", "keys[0]: give env, the name of an environment variable, file or sha256"),
        (MODELS + "keys: [{name: k, env: K}, {name: k, env: L}]", "keys[1].name: got 'k', which keys[0] has"),
        (MODELS + "timeouts: {request_s: 0}", "timeouts.request_s: got 0; must be float > 0"),
        (MODELS + "timeouts: {request_s: .nan}", "timeouts.request_s: got nan; must be"),
        ("models: !!python/object/apply:os.getcwd []", "line 1: not YAML: could not determine a constructor"),
    ],
)
def test_fault_is_named_with_file_key_value_and_limit(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_fleet(text, "my/fleet.yaml")
    assert str(raised.value).startswith("my/fleet.yaml: ")
    assert message in str(raised.value)


def test_error_about_a_model_names_keys_instead_of_flags() -> None:
    error = ConfigError("--data-parallel-size 2: Raise --memory, or lower --max-model-len to the 64 of --nothing")
    text = "models.a.replicas 2: Raise models.a.memory, or lower models.a.max_model_len to the 64 of --nothing"
    assert model_error("a", error) == text
    assert model_error("a", ConfigError("no such folder")) == "models.a: no such folder"


@pytest.mark.parametrize(
    ("server", "error"),
    [
        ("api_key_file: /none", "server.api_key_file"),
        ("ssl_certfile: /none", "server.ssl_certfile: /none cannot be read"),
    ],
)
def test_checks_of_a_server_name_keys_for_a_fleet(server: str, error: str) -> None:
    spec = parse_fleet(MODELS + f"server: {{{server}}}")
    with pytest.raises(ConfigError) as raised:
        check_startable_fleet(spec)
    assert str(raised.value).startswith(error)


def test_key_in_place_of_a_variable_name_is_not_repeated() -> None:
    with pytest.raises(ConfigError, match="must be the name of an environment variable") as raised:
        parse_fleet(MODELS + "keys: [{name: k, env: 'sk-5ecret'}]")
    assert "5ecret" not in str(raised.value)


def test_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml: no such file; `meltcore fleet init .*none\.yaml` writes one"):
        load_fleet(tmp_path / "none.yaml")
    os.mkfifo(tmp_path / "pipe")
    for path, kind in ((tmp_path, "a folder"), (tmp_path / "pipe", "a named pipe"), (Path("/dev/null"), "a device")):
        with pytest.raises(ConfigError, match=rf"{path}: is {kind}.*; name a file, such as fleet\.yaml"):
            load_fleet(path)
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"bytes\.yaml: cannot be read as UTF-8"):
        load_fleet(tmp_path / "bytes.yaml")


def test_published_schema_and_reference_are_those_of_the_structs() -> None:
    stale = [path.name for path, text in fleet_reference.files().items() if path.read_text() != text]
    assert stale == [], "run scripts/fleet_reference.py"


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"sharing": {"mps_sm_percent": 40}}, "sharing.mps_sm_percent: got 40, which is for means mps"),
        ({"sharing": {"means": "none", "mps_sm_percent": 40}}, "sharing.mps_sm_percent: got 40"),
        (
            {"sharing": {"means": "none", "min_share": 0.2}},
            "sharing.min_share: got 0.2, which is for means pacing or",
        ),
        ({"sharing": {"means": "none", "max_wait_ms": 5}}, "sharing.max_wait_ms: got 5"),
        ({"sharing": {"means": "none", "step_ms": 5}}, "sharing.step_ms: got 5"),
        ({"sharing": {"means": "mps", "mps_sm_percent": 40, "min_share": 0.2}}, None),
        ({"models": {"m": {"checkpoint": "c", "format": "q8_0"}}}, "models.m.format: got 'q8_0', which is of shapes"),
        *(
            (
                {"models": {"m": {"checkpoint": "c", "task": task, name: value}}},
                f"models.m.{name}: got {value!r}; is for task {tasks}, and the model's is {task}",
            )
            for task, name, value, tasks in (
                ("synthesis", "generation_config", "auto", "generation"),
                ("transcription", "max_queue_tokens", 9, "generation or embedding"),
                ("translation", "max_num_batched_tokens", 512, "generation"),
                ("translation", "enable_prefix_caching", False, "generation"),
                ("synthesis", "enforce_eager", True, "generation"),
                ("transcription", "tensor_parallel_size", 2, "generation"),
                ("transcription", "max_model_len", 512, "generation or translation or embedding"),
                ("generation", "max_queue_chars", 9, "translation or synthesis"),
                ("synthesis", "max_queue_audio_s", 9.0, "transcription"),
            )
        ),
        ({"models": {"m": {"checkpoint": "c", "task": "translation", "max_model_len": 99, "max_num_seqs": 2}}}, None),
        (
            {"models": {"m": {"checkpoint": "c", "task": "transcription", "memory": Size(9), "max_num_seqs": 4}}},
            "models.m.max_num_seqs: got 4; memory decides how many of task transcription run together",
        ),
        ({"models": {"m": {"checkpoint": "c", "memory": Size(9), "max_num_seqs": 4}}}, None),
        ({"models": {"m": {"url": "http://h", "max_queue_chars": 4}}}, "models.m.max_queue_chars: got 4; a model with"),
        (
            {"limits": {"max_queue_audio_s": 60.0}},
            "limits.max_queue_audio_s: got 60.0; is for task transcription, and no",
        ),
        (
            {"limits": {"max_queue_tokens": 9}, "models": {"m": {"checkpoint": "c", "task": "transcription"}}},
            "limits.max_queue_tokens: got 9; is for task generation or embedding, and no model is of it",
        ),
        (
            {"models": {"m": {"url": "http://h", "task": "transcription", "max_queue_tokens": 9}}},
            "models.m.max_queue_tokens: got 9; uploads of task transcription have no tokens: use max_queue",
        ),
        ({"limits": {"max_queue_tokens": 9}, "models": {"m": {"url": "http://h", "task": "synthesis"}}}, None),
    ],
)
def test_settings_that_would_be_ignored_are_refused(sections: dict[str, Any], words: str | None) -> None:
    spec = msgspec.convert({"models": {"m": {"checkpoint": "c"}}} | sections, FleetSpec)
    if words is None:
        check_fleet(spec)
        return
    with pytest.raises(FleetError) as error:
        check_fleet(spec)
    assert str(error.value).startswith(words)
