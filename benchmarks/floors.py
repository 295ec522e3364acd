"""The least time of a closed batch of requests on a GPU, from the bytes to be read and the GEMMs to be computed.

A decode step reads its weights as they are stored (of experts, those that uniform routing selects) and the keys and
values that its queries see, of sliding windows the newest ones. It reads and writes recurrent states. Prefill takes as
long as its GEMMs or as reading the weights once.
Prefill and decode steps are added. With several GPUs each reads its shard; communication is not counted.

As a command it writes what `meltcore load --fleet --step-costs FILE` needs for the bound by bytes and operations:

    python benchmarks/floors.py step_costs.json --fleet fleet.yaml    # the GPU's peaks, and the models of fleet.yaml
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from attention import matmul_flops_per_us, read_bytes_per_us
from bench_output import need_gpu
from offline_work import Work
from torch import nn
from uniform_routing import expected_experts

from meltcore.common.files import write_document
from meltcore.engine.transcription.memory import planned_config
from meltcore.engine.worker.loading import meta_decoder
from meltcore.layers.feed_forward import SparseMoeBlock
from meltcore.layers.ggml_weights import PackedRows
from meltcore.measure.documents.step_costs import GpuStepCosts, StepCosts
from meltcore.measure.load.fleet.step_costs import merge_step_costs, read_step_costs
from meltcore.models.checkpoints.checkpoint import open_checkpoint
from meltcore.models.decoders.decoder import Decoder
from meltcore.models.decoders.kv_cache_specs import group_layers
from meltcore.models.tasks.indicconformer import IndicConformer
from meltcore.models.tasks.indicf5 import IndicF5, IndicF5Config
from meltcore.models.tasks.indictrans2 import IndicTrans2
from meltcore.settings.fleet_file import load_fleet
from meltcore.settings.fleet_spec import ModelSection

READ = 2**28  # numbers, of four bytes: several times any L2, and little of what an engine leaves free


class Limits(NamedTuple):
    """What this GPU does at best."""

    bytes_per_us: float
    flops_per_us: float

    @classmethod
    def measure(cls) -> Limits:
        return cls(read_bytes_per_us(READ), matmul_flops_per_us())


class Needs(NamedTuple):
    """What one rank's share of a model needs, all layers together.

    step_bytes: weights that every step reads; expert_bytes: of one routed expert; kv_bytes: per token of context, in
    layers of full attention; window_bytes: the same in layers with a sliding window, by window; state_bytes: per
    sequence, read and written; token_weights: weights per prompt token, without the head; head_weights: of the LM head,
    for each token that is sampled.
    """

    step_bytes: float
    expert_bytes: float
    experts: int
    top_k: int
    kv_bytes: int
    window_bytes: dict[int, int]
    state_bytes: int
    token_weights: float
    head_weights: int

    @classmethod
    def of(cls, model: Decoder) -> Needs:
        routed = [block for block in model.modules() if isinstance(block, SparseMoeBlock)]
        experts, top_k = (routed[0].num_experts, routed[0].top_k) if routed else (0, 0)
        expert_bytes, expert_weights = 0.0, 0.0
        for block in routed:
            stored_experts = block.num_experts + block.shared_expert
            expert_bytes += _num_bytes(block.experts) / stored_experts
            expert_weights += _num_weights(block.experts) / stored_experts
        step_bytes, weights = _num_bytes(model), _num_weights(model)
        if not model.config.tie_word_embeddings:
            step_bytes -= _num_bytes(model.embedding)
            weights -= _num_weights(model.embedding)
        head_weights = _num_weights(model.lm_head)
        caches = group_layers(model.kv_cache_specs())
        token_bytes = {
            group.window: len(group.layers) * group.spec.page_bytes(1, model.dtype.itemsize)
            for group in caches.attention
        }
        return cls(
            step_bytes=step_bytes - experts * expert_bytes,
            expert_bytes=expert_bytes,
            experts=experts,
            top_k=top_k,
            kv_bytes=token_bytes.pop(None, 0),
            window_bytes={window: size for window, size in token_bytes.items() if window is not None},
            state_bytes=2 * caches.slot_bytes(model.dtype.itemsize),
            token_weights=weights - head_weights - (experts - top_k) * expert_weights,
            head_weights=head_weights,
        )

    def context_bytes(self, context: float) -> float:
        """Bytes of the keys and values that a query after `context` tokens sees."""
        sliding = sum(min(context, window) * size for window, size in self.window_bytes.items())
        return context * self.kv_bytes + sliding

    def weight_bytes(self, tokens: float) -> float:
        """Bytes of the weights that a step of `tokens` tokens reads."""
        met = expected_experts(self.experts, self.top_k, tokens) if self.experts else 0.0
        return self.step_bytes + met * self.expert_bytes

    def as_costs(self) -> StepCosts:
        """The same as costs of steps. Bytes of routed experts are exact at powers of two, and between them too low."""
        tokens = [2**power for power in range(13)] if self.experts else [1]
        contexts = sorted({0, *self.window_bytes, 1 + max(self.window_bytes, default=0)})
        return StepCosts(
            weight_bytes=[(each, self.weight_bytes(each)) for each in tokens],
            context_bytes=[(each, self.context_bytes(each) + self.state_bytes) for each in contexts],
            unit_flops=2.0 * self.token_weights,
        )

    def decode_us(self, sequences: int, context: float, limits: Limits) -> float:
        """Microseconds of a decode step of `sequences` sequences."""
        read = self.weight_bytes(sequences) + sequences * (self.context_bytes(context) + self.state_bytes)
        computed = 2 * sequences * (self.token_weights + self.head_weights)
        return max(read / limits.bytes_per_us, computed / limits.flops_per_us)

    def prompts_us(self, sequences: int, tokens: float, limits: Limits) -> float:
        """Microseconds of prefill."""
        computed = 2 * sequences * (tokens * self.token_weights + self.head_weights)
        read = self.weight_bytes(sequences * tokens)
        return max(read / limits.bytes_per_us, computed / limits.flops_per_us)


def floor_s(needs: Needs, work: Work, batch: int, limits: Limits) -> float:
    """Seconds of a work whose requests run in batches of `batch`."""
    prompt = (work.low + work.high) / 2
    rounds, rest = divmod(work.requests, batch)
    total_us = 0.0
    for times, sequences in ((rounds, batch), (1, rest)):
        if times and sequences:
            decode_us = sum(needs.decode_us(sequences, prompt + done, limits) for done in range(1, work.out))
            total_us += times * (needs.prompts_us(sequences, prompt, limits) + decode_us)
    return total_us / 1e6


def _num_bytes(module: nn.Module) -> int:
    return sum(weight.nbytes for weight in module.parameters())


def _num_weights(module: nn.Module) -> int:
    """Number of weights, which in a block-quantized tensor take less than an element of its arrays each."""
    return sum(
        part.tensor.values.shape[:-1].numel() * part.columns
        if isinstance(part, PackedRows)
        else sum(weight.numel() for weight in part.parameters(recurse=False))
        for part in module.modules()
    )


# --- the bound of an experiment on interference -----------------------------------------------------------------------


def step_needs(model: ModelSection) -> StepCosts:
    """What the steps of a model need at least: bytes by tokens and by context, and operations, but no seconds.

    Of other tasks than generation the layers that run in every step count. Their units are characters and seconds, so
    their operations are unknown.
    """
    if model.shapes is not None and not Path(model.model).expanduser().exists():
        model = msgspec.structs.replace(model, checkpoint=model.shapes, shapes=None)
    if model.task == "generation":
        return Needs.of(meta_decoder(model, False)[0]).as_costs()
    # An engine of synthesis replaces the weights of modulations by their values.
    weights = _layers_of_each_step(model).named_parameters()
    return StepCosts(weight_bytes=[(1, sum(weight.nbytes for name, weight in weights if "modulation." not in name))])


def _layers_of_each_step(model: ModelSection) -> nn.Module:
    """The layers that every step runs, in 16 bits as on a GPU, without memory."""
    with torch.device("meta"):
        if model.task == "transcription":
            return IndicConformer(planned_config(model.model, is_dummy=True)).encoder.half()
        config = open_checkpoint(model.model, files="config").config
        if model.task == "translation":
            return IndicTrans2(config).decoder_layers.half()
        return IndicF5(IndicF5Config.read(config, 2)).layers.half()


def write_bound(gpu: GpuStepCosts, models: dict[str, ModelSection], limits: Limits) -> None:
    """Write the peaks of a GPU and the needs of the models that run on it, beside the costs that are there."""
    gpu.bytes_per_s, gpu.flops_per_s = 1e6 * limits.bytes_per_us, 1e6 * limits.flops_per_us
    for name, model in models.items():
        if model.device != "cpu":
            needs = step_needs(model)
            gpu.models[name] = merge_step_costs(needs, gpu.models.get(name, StepCosts()))
            operations = "unknown" if needs.unit_flops is None else f"{needs.unit_flops / 1e9:.2f} G"
            (_, least), (_, most) = needs.weight_bytes[0], needs.weight_bytes[-1]
            print(f"{name}: {least / 1e9:.2f} to {most / 1e9:.2f} GB each step, operations per token {operations}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the bytes and operations of steps into a file of step costs.")
    parser.add_argument("file", type=Path, help="File of step costs, as `load --fleet --step-costs` reads it.")
    parser.add_argument("--fleet", type=Path, required=True, help="fleet.yaml with the models.")
    args = parser.parse_args()
    need_gpu()
    device, costs = torch.cuda.get_device_name(), read_step_costs(args.file)
    write_bound(costs.gpus.setdefault(device, GpuStepCosts()), load_fleet(args.fleet).engines, Limits.measure())
    gpu = costs.gpus[device]
    print(f"{device}: {gpu.bytes_per_s:.3g} bytes/s, {gpu.flops_per_s:.3g} operations/s")
    write_document(args.file, costs)


if __name__ == "__main__":
    main()
