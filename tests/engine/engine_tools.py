"""Small random checkpoints whose attention is peaked, and engines on them whose logits can be seen."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from meltcore.engine.core.request import Request
from meltcore.engine.generation.engine import GenerationEngine
from meltcore.engine.memory.memory_plan import MemoryPlan, ModelShape, plan_memory
from meltcore.engine.worker.model_runner import LogitsAt
from meltcore.engine.worker.sampler import Drafts, SampleResult
from meltcore.models.decoders.kv_cache_specs import FullAttentionSpec, group_layers
from meltcore.protocol.generation import AddRequest, SequenceOutput
from meltcore.protocol.sampling_params import SamplingParams
from meltcore.settings.config import EngineConfig
from meltcore.text.tokenizer import Tokenizer

VOCAB = 320


# Small networks of each family. Qwen2's query heads for a key head are no power of two, as in Qwen2.5-1.5B. The middle
# layer of the routed one is dense, that of the hybrid one attention, of which a quarter of each head turns.
FAMILIES: dict[str, dict[str, object]] = {
    "qwen3": {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32},
    "qwen3_moe": {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
    # A window of more than a page in two layers of three, and scores scaled by another size than that of a head.
    "gemma3_text": {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "query_pre_attn_scalar": 48,
        "sliding_window": 96,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "llama": {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10_000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128,
        },
    },
    # A window of more than a page in all layers, as in Mistral 7B v0.1.
    "mistral": {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "sliding_window": 96,
    },
    # Multipliers that are no powers of two, and an eps that the scale of the residual stream makes visible.
    "granite": {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "embedding_multiplier": 5.0,
        "attention_multiplier": 0.21,
        "residual_multiplier": 0.3,
        "logits_scaling": 3.0,
        "rms_norm_eps": 0.01,
    },
    "olmo2": {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": None},
    # Three quarters of a head rotate, in all layers within a window of more than a page.
    "phi3": {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "sliding_window": 96,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75},
        "pad_token_id": None,
    },
    # The middle layer does not rotate its queries and keys.
    "smollm3": {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "no_rope_layers": [1, 0, 1],
        "pad_token_id": None,
    },
    "qwen2": {"hidden_size": 192, "num_attention_heads": 6, "num_key_value_heads": 2},
    "qwen3_5_moe_text": {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 48,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
    },
}


def make_reference(seed: int = 0, family: str = "qwen3", **overrides: object) -> PreTrainedModel:
    """A random float32 network where most of each head's attention falls on a few keys: an error in masks, positions
    or pages then changes the logits by far more than rounding does."""
    settings: dict[str, object] = {
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "vocab_size": VOCAB,
        "max_position_embeddings": 1024,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": False,
        "eos_token_id": 1,
        "bos_token_id": None,
    }
    config = AutoConfig.for_model(family, **(settings | FAMILIES[family] | overrides))
    model = AutoModelForCausalLM.from_config(config).float().eval()
    randomise(model, seed)
    return model


@torch.no_grad()
def randomise(model: PreTrainedModel, seed: int) -> None:
    """Weights that keep the size of what they multiply, and scores of a spread of 4, of which softmax keeps a few.

    Recurrent states forget half in one to a hundred tokens. Zero-centered norms get the scales that others have.
    """
    torch.manual_seed(seed)
    names = [name for name, _ in model.named_parameters()]
    heads_normed = any(name.endswith("q_norm.weight") for name in names)
    is_hybrid = any(name.endswith("A_log") for name in names)
    is_zero_centered = is_hybrid or any(name.endswith("pre_feedforward_layernorm.weight") for name in names)
    for name, parameter in model.named_parameters():
        center = 1.0 if is_zero_centered and "linear_attn" not in name else 0.0
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            parameter.uniform_(1.5 - center, 2.5 - center)
        elif name.endswith(("A_log", "dt_bias")):
            parameter.uniform_(-4.0, 0.0)
        elif name.endswith("bias"):
            parameter.normal_()
        elif parameter.dim() == 1:
            parameter.uniform_(0.5 - center, 1.5 - center)
        else:
            parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
        if not heads_normed and name.endswith(("q_proj.weight", "k_proj.weight", "qkv_proj.weight")):
            parameter.mul_(2)


@dataclass
class SeenEngine:
    """An engine that records the logits each token was chosen from, and runs requests to their end."""

    engine: GenerationEngine
    logits: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    steps: int = 0

    def __post_init__(self) -> None:
        runner = self.engine.runner
        sample = runner.sample

        def recording(
            logits_at: LogitsAt, token_ids: torch.Tensor, requests: list[Request], drafts: Drafts | None = None
        ) -> SampleResult:
            logits = logits_at(torch.arange(len(requests), device=token_ids.device))
            for row, request in enumerate(requests):
                self.logits.setdefault(request.id, []).append(logits[row].float().clone())
            return sample(logits_at, token_ids, requests, drafts)

        runner.sample = recording  # type: ignore[method-assign]

    def add(self, request_id: str, prompt: list[int], **sampling: object) -> None:
        settings = {"max_tokens": 8, "ignore_eos": True} | sampling
        self.engine.add(AddRequest(request_id, prompt, SamplingParams(**settings)))

    def run(self, limit: int = 4000) -> dict[str, list[int]]:
        """Step until idle; the generated ids of each request."""
        tokens: dict[str, list[int]] = {}
        for output in self.outputs(limit):
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
        self.engine.check_idle()
        return tokens

    def outputs(self, limit: int = 4000) -> Iterator[SequenceOutput]:
        for _ in range(limit):
            if not self.engine.has_work:
                return
            self.steps += 1
            yield from self.engine.step().outputs
        raise AssertionError(f"not idle after {limit} steps")


def open_engine(
    folder: Path,
    *,
    overlap: bool = False,
    pages: int | None = None,
    recurrent_slots: int | None = None,
    debug: tuple = (),
    **settings: object,
) -> SeenEngine:
    defaults: dict[str, object] = {
        "device": "cpu",
        "dtype": "float32",
        "max_num_seqs": 8,
        "max_num_batched_tokens": 2048,
        # On a GPU a budget holds workspaces of libraries, too.
        "memory_bytes": 2**30 if str(settings.get("device")).startswith("cuda") else 2**28,
        "async_scheduling": overlap,
    }
    config = EngineConfig(model=str(folder), debug=debug, **(defaults | settings))  # type: ignore[arg-type]
    return SeenEngine(GenerationEngine(config, pages=pages, recurrent_slots=recurrent_slots))


def with_tokenizer(folder: Path, target: Path) -> Path:
    """A copy of a checkpoint with a token for each byte, and " t300" for the token 300."""
    shutil.copytree(folder, target, dirs_exist_ok=True)
    (target / "tokenizer.json").write_text(Tokenizer.synthetic_bytes(VOCAB).serialize())
    return target


def random_prompt(length: int, seed: int, vocab: int = VOCAB) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, vocab, (length,), generator=generator).tolist()


@torch.no_grad()
def reference_logits(reference: PreTrainedModel, prompt: list[int], generated: list[int]) -> torch.Tensor:
    """The logits that chose each generated token, from one whole pass: [generated, vocab]."""
    ids = torch.tensor([prompt + generated], device=reference.device)
    return reference(ids, logits_to_keep=len(generated) + 1).logits[0, :-1]


@torch.no_grad()
def attention_peak(reference: PreTrainedModel, prompt: list[int]) -> float:
    """The largest weight of a query's attention, averaged over heads and the prompt's later half; the worst layer's."""
    implementation = reference.config._attn_implementation
    reference.set_attn_implementation("eager")
    ids = torch.tensor([prompt], device=reference.device)
    weights = reference(ids, output_attentions=True).attentions
    reference.set_attn_implementation(implementation)
    return min(float(layer[0, :, len(prompt) // 2 :].amax(-1).mean()) for layer in weights)


def relative_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The largest difference against the largest logit."""
    return float((ours - theirs).abs().max() / theirs.abs().max())


def error_against(reference: PreTrainedModel, path: Path, *, vocab: int = VOCAB, **settings: object) -> float:
    """The error of an engine that is opened for it, as `error_of` measures it."""
    return error_of(open_engine(path, **settings), reference, vocab)


def error_of(seen: SeenEngine, reference: PreTrainedModel, vocab: int = VOCAB) -> float:
    """The largest relative error of an engine's logits after a prompt of 200 tokens, and of 4 further ones."""
    prompt = random_prompt(200, 1, vocab)
    seen.add("one", prompt, max_tokens=5)
    generated = seen.run()["one"]
    return relative_error(torch.stack(seen.logits["one"]), reference_logits(reference, prompt, generated))


def plan_of_qwen(memory_bytes: int, max_num_seqs: int = 1024, *, scratch_bytes: int = 0) -> MemoryPlan:
    """The plan of Qwen3-0.6B in bfloat16: 1.1 GiB of weights, a vocabulary of 152 thousand tokens."""
    caches = group_layers([FullAttentionSpec(kv_heads=8, head_dim=128)] * 28)
    return plan_memory(
        ModelShape(1_192_099_840, 151_936, caches, element_size=2, cache_element_size=2, scratch_bytes=scratch_bytes),
        memory_bytes=memory_bytes,
        max_model_len=4096,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=8192,
        may_run_fewer=True,
    )
