"""Settings of a server and its engine: one dataclass each, every field with its unit and meaning."""

from dataclasses import dataclass
from typing import Literal

LoadFormat = Literal["auto", "dummy"]
DType = Literal["auto", "float32", "bfloat16", "float16"]
Quantization = Literal["none", "fp8"]
KVCacheDType = Literal["auto", "fp8"]
DebugSwitch = Literal[
    "reference-kernels",
    "no-graphs",
    "no-prompt-graphs",
    "no-overlap",
    "no-prefix-cache",
    "no-peer-memory",
    "uniform-routing",
]


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What an engine process needs to start. `None` means: decided from the checkpoint and the device, then printed."""

    model: str  # local folder or hub id
    load_format: LoadFormat = "auto"  # dummy: random weights of the configured shapes, no weight files read
    dtype: DType = "auto"  # the checkpoint's on CUDA, float32 on a CPU
    quantization: Quantization = "none"  # fp8: linear layers in e4m3, scales by output and by token; from sm_89 on
    kv_cache_dtype: KVCacheDType = "auto"  # fp8: e4m3 without scales, half as much to read; from sm_89 on
    device: str = "auto"  # auto, cpu, cuda, cuda:1
    tp: int = 1  # tensor parallel: ranks that share one model, each on a GPU of its own from `device` on
    rank_timeout_s: float = 10.0  # a step that takes longer is stuck, with more ranks than one
    max_model_len: int | None = None  # tokens, prompt and answer together
    max_num_seqs: int | None = None  # sequences in one step; 1024 on CUDA, 256 on a CPU, fewer by recurrent states
    max_num_batched_tokens: int | None = None  # tokens in one step; 8192 on CUDA (offline 16384), 2048 on a CPU
    memory_bytes: int | None = None  # all an engine may take of its GPU (or of host memory for KV on a CPU)
    seed: int = 0  # for dummy weights, and for requests that name no seed
    debug: tuple[DebugSwitch, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """What the HTTP front needs."""

    engine: EngineConfig
    served_model_names: tuple[str, ...] = ()  # every name is accepted; the first is the one answered with
    host: str = "127.0.0.1"
    port: int = 8000  # 0: the system picks one, and the banner says which
    dp: int = 1  # data parallel: engines of this many replicas behind the one port, each on GPUs of its own
    fronts: int | None = None  # front processes behind the one port; None: from the cores
    max_queue: int = 16_384  # requests waiting for a place in the engine; past it 429
    max_queue_tokens: int = 16_777_216  # their prompt tokens together
    request_timeout_s: float = 600.0  # from arrival to the last token
    drain_timeout_s: float = 30.0  # after SIGTERM or SIGHUP, before what is left is aborted
    api_key: str | None = None
    max_body_bytes: int = 8 * 2**20
    cors_origins: tuple[str, ...] = ()
    log_format: Literal["text", "json"] = "text"
    generation_config: Literal["greedy", "model"] = "greedy"
    profile_dir: str | None = None
