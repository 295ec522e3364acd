"""The registry of model families: the class of each architecture name in config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from meltcore.models.decoders.gemma3 import Gemma3
from meltcore.models.decoders.granite import Granite
from meltcore.models.decoders.llama import Llama, Mistral
from meltcore.models.decoders.model import Model
from meltcore.models.decoders.olmo2 import Olmo2
from meltcore.models.decoders.phi3 import Phi3
from meltcore.models.decoders.qwen2 import Qwen2
from meltcore.models.decoders.qwen3 import Qwen3, Qwen3Moe
from meltcore.models.decoders.qwen3_5 import Qwen3_5
from meltcore.models.decoders.smollm3 import SmolLM3

# From a parsed config.json to a model without weights. Raises ConfigError for what the family does not compute.
ModelClass = Callable[[Mapping[str, Any]], Model]

ARCHITECTURES: dict[str, ModelClass] = {
    "Gemma3ForCausalLM": Gemma3,
    "Gemma3ForConditionalGeneration": Gemma3,
    "GraniteForCausalLM": Granite,
    "LlamaForCausalLM": Llama,
    "Mistral3ForConditionalGeneration": Mistral,
    "MistralForCausalLM": Mistral,
    "Olmo2ForCausalLM": Olmo2,
    "Phi3ForCausalLM": Phi3,
    "Qwen2ForCausalLM": Qwen2,
    "Qwen3ForCausalLM": Qwen3,
    "Qwen3_5MoeForCausalLM": Qwen3_5,
    "Qwen3_5MoeForConditionalGeneration": Qwen3_5,
    "Qwen3MoeForCausalLM": Qwen3Moe,
    "SmolLM3ForCausalLM": SmolLM3,
}
