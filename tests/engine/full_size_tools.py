"""A checkpoint of a published shape, transformers' answers to it in two precisions, and ours beside them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import engine_tools as tools
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from meltcore.models.checkpoints.checkpoint import open_checkpoint

# Router logits of two experts closer than this may be swapped by float32's rounding: either expert is correct.
ROUTE_GAP = 1e-5


def write_checkpoint(folder: Path, published: str, **changes: object) -> None:
    """Random bfloat16 weights of a published configuration, as transformers saves them.

    Made on the CPU, so that they are the same on every machine.
    """
    settings = open_checkpoint(published, files="config").config
    config = AutoConfig.for_model(**settings.get("text_config", settings) | changes)
    with torch.device("meta"):  # transformers' own random weights would take longer to draw than ours
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model = model.to_empty(device="cpu")
    model.tie_weights()
    tools.randomise(model, seed=0)
    _calm(model)
    model.to(torch.bfloat16).save_pretrained(folder)


@torch.no_grad()
def _calm(model: PreTrainedModel) -> None:
    """Scale a deep random network so that its input stays visible in the output, as in a trained one.

    Left alone, 28 blocks that each outweigh what came before blow bfloat16's rounding up to the size of the logits
    themselves, and nothing could be told from it. So all blocks together add as much as the embedding holds. A tied
    head would then always answer with the token it just read: the last norm's signs keep it from recognizing it.
    """
    embedding = model.get_input_embeddings().weight
    blocks_share = (2 * model.config.num_hidden_layers) ** -0.5 * embedding.shape[1] ** -0.5
    for name, parameter in model.named_parameters():
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj")):
            parameter.mul_(blocks_share)
        elif name == "model.norm.weight":
            parameter.mul_(torch.randint(0, 2, parameter.shape) * 2 - 1)


@dataclass(frozen=True)
class Subject:
    """One checkpoint on one device: `exact` and `rounded` are transformers in float32 and bfloat16."""

    folder: Path
    device: str
    answer_tokens: int
    exact: PreTrainedModel
    rounded: PreTrainedModel
    # Logits, and which experts are settled, by the tokens that most ways of the engine share.
    _references: dict[tuple[int, ...], tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    @classmethod
    def load(cls, folder: Path, device: str, answer_tokens: int) -> Subject:
        torch.set_float32_matmul_precision("highest")  # no TF32, neither there nor in our engine's products
        exact, rounded = (
            AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
            for dtype in (torch.float32, torch.bfloat16)
        )
        return cls(folder, device, answer_tokens, exact, rounded)

    def prompts(self) -> dict[str, list[int]]:
        """Sixteen prompts of different lengths, around the edges of pages and tiles."""
        lengths = [1, 2, 17, 63, 64, 65, 100, 127, 128, 129, 200, 255, 300, 384, 500, 641]
        return {f"r{length}": tools.random_prompt(length, length, self.exact.config.vocab_size) for length in lengths}

    def open_engine(self, dtype: str, **settings: object) -> tools.SeenEngine:
        defaults: dict[str, object] = {
            "pages": 200,
            "max_num_seqs": 16,
            "max_model_len": 1024,
            "max_num_batched_tokens": 4096,
            "memory_bytes": 16 * 2**30,  # the reserve of float32 experts is 3 GiB
        }
        return tools.open_engine(self.folder, device=self.device, dtype=dtype, **(defaults | settings))  # type: ignore[arg-type]

    def compare(self, seen: tools.SeenEngine, prompts: dict[str, list[int]]) -> Comparison:
        """Run the added requests; then the same tokens through transformers, each answer in one pass."""
        tokens = seen.run()
        exact, rounded, routed = zip(
            *(self._reference(prompt, tokens[request_id]) for request_id, prompt in prompts.items()), strict=True
        )
        return Comparison(
            chosen=torch.tensor([token for request_id in prompts for token in tokens[request_id]], device=self.device),
            ours=torch.stack([row for request_id in prompts for row in seen.logits[request_id]]),
            exact=torch.cat(exact),
            rounded=torch.cat(rounded),
            routed=torch.cat(routed).to(self.device),
        )

    def _reference(self, prompt: list[int], answer: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The logits of `exact` and of `rounded` that chose each token of an answer, and which experts are settled."""
        if (known := (len(prompt), *prompt, *answer)) not in self._references:
            # The plain form of attention: float32 inside in either precision, so the noise is no larger than needed.
            with sdpa_kernel(SDPBackend.MATH), route_gaps(self.exact) as gaps:
                exact = tools.reference_logits(self.exact, prompt, answer)
                settled = gaps.settled(len(prompt) + len(answer))[len(prompt) - 1 : -1]
                rounded = tools.reference_logits(self.rounded, prompt, answer).float()
            if len(self._references) >= 3 * len(self.prompts()):  # which take 4 GB with Qwen3's vocabulary
                self._references.clear()
            self._references[known] = exact, rounded, settled
        return self._references[known]


class RouteGaps:
    """The margin between the last selected and the first unselected expert, in a model's last pass."""

    def __init__(self) -> None:
        self._layers: list[torch.Tensor] = []

    def begin(self, *_: object) -> None:
        self._layers.clear()

    def note(self, router: torch.nn.Module, inputs: tuple[torch.Tensor, ...], _: object) -> None:
        logits = inputs[0].flatten(0, -2).double() @ router.weight.double().T
        best = logits.topk(router.top_k + 1, dim=-1).values
        self._layers.append(best[:, -2] - best[:, -1])

    def settled(self, tokens: int) -> torch.Tensor:
        """[tokens] bool: whether the experts of a token and of all tokens before it are unambiguous."""
        if not self._layers:
            return torch.ones(tokens, dtype=torch.bool)
        return (torch.stack(self._layers).amin(0) > ROUTE_GAP).cummin(0).values.cpu()


@contextmanager
def route_gaps(model: PreTrainedModel) -> Iterator[RouteGaps]:
    gaps = RouteGaps()
    routers = [module for name, module in model.named_modules() if name.endswith("mlp.gate")]
    hooks = [model.register_forward_pre_hook(gaps.begin), *(each.register_forward_hook(gaps.note) for each in routers)]
    try:
        yield gaps
    finally:
        for hook in hooks:
            hook.remove()


@dataclass(frozen=True)
class Comparison:
    """Every generated token's choice [tokens], and the logits it was taken from, [tokens, vocab] float32 each:
    `ours`, and transformers' in float32 (`exact`) and bfloat16 (`rounded`) after the very same tokens.

    routed: [tokens] bool, False from where two experts of a router were too close to call; True without routers.
    """

    chosen: torch.Tensor
    ours: torch.Tensor
    exact: torch.Tensor
    rounded: torch.Tensor
    routed: torch.Tensor

    def relative_error(self) -> float:
        """The largest error relative to the largest logit, over tokens with unambiguous experts."""
        return tools.relative_error(self.ours[self.routed], self.exact[self.routed])

    def error(self) -> tuple[float, float]:
        """Our differences: root mean square, and the largest."""
        return _size(self.ours - self.exact)

    def noise(self) -> tuple[float, float]:
        """The same errors of transformers in bfloat16: the cost of this precision on this input."""
        return _size(self.rounded - self.exact)

    def expected(self) -> torch.Tensor:
        return self.exact.argmax(-1)

    def gaps(self) -> torch.Tensor:
        """The difference of the two largest logits per token: [tokens]."""
        first, second = self.exact.topk(2, dim=-1).values.unbind(-1)
        return first - second


def _size(difference: torch.Tensor) -> tuple[float, float]:
    return float(difference.square().mean().sqrt()), float(difference.abs().max())
