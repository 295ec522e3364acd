"""The decoder that all families share: pre-norm blocks of grouped-query attention and a gated feed-forward.

Each family has a file of its own. Families differ by the switches of DecoderConfig, by `experts` (routed instead of
dense feed-forwards) and by `recurrent` layers (Gated DeltaNet instead of attention).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property

import torch
from torch import nn

from meltcore.kernels.attention.metadata import AttentionMetadata
from meltcore.kernels.launch import use_triton
from meltcore.kernels.persistent.decode_layers import MAX_TOKENS, DecodeLayers
from meltcore.kernels.rotary import rotary_table, unrotated_table
from meltcore.layers.attention import Attention
from meltcore.layers.decode_layers import persistent_layers
from meltcore.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from meltcore.layers.feed_forward import GatedMLP, SparseMoeBlock
from meltcore.layers.gated_delta_net import GatedDeltaNet
from meltcore.layers.residual import ResidualStream
from meltcore.layers.tensor_parallel import TensorParallelGroup
from meltcore.layers.weight_loader import WeightLoader
from meltcore.models.decoders.decoder_config import DecoderConfig
from meltcore.models.decoders.kv_cache_specs import (
    FullAttentionSpec,
    KVCacheSpec,
    RecurrentStateSpec,
    SlidingWindowSpec,
)
from meltcore.models.decoders.model import Model
from meltcore.models.decoders.tensor_names import (
    FusedTensor,
    attention_tensors,
    dense_tensors,
    expert_tensors,
    fused_expert_tensors,
    gated_delta_tensors,
    merged_tensors,
    named_tensors,
    norm_tensors,
)

# Triton compiles a kernel for tensors that begin at a multiple of it, and another one for the others.
_ALIGNMENT_BYTES = 16


class DecoderBlock(nn.Module):
    """Runs attention or Gated DeltaNet, then a feed-forward. Both add their output to the residual stream."""

    def __init__(self, config: DecoderConfig, layer_idx: int) -> None:
        super().__init__()
        self.attention = _attention(config, layer_idx)
        self.mlp = _feed_forward(config, layer_idx)
        self._rotary_dim = config.rotary_dim

    def forward(
        self,
        residual: ResidualStream,
        positions: torch.Tensor,
        rotary: torch.Tensor,
        cache: tuple[torch.Tensor, torch.Tensor],
        metadata: AttentionMetadata,
    ) -> None:
        """Add the block's outputs to the residual stream and update the layer's cache. positions: [tokens] int64."""
        if isinstance(self.attention, GatedDeltaNet):
            self.attention(residual, cache, metadata)
        else:
            self.attention(residual, positions, rotary, cache, metadata)
        self.mlp(residual)

    def kv_cache_spec(self) -> KVCacheSpec:
        """Return the specification of the block's cache per sequence."""
        mixer = self.attention
        if isinstance(mixer, GatedDeltaNet):
            sizes = mixer.conv_channels, mixer.conv_kernel, mixer.num_heads, mixer.key_dim, mixer.value_dim
            return RecurrentStateSpec(*sizes)
        if mixer.sliding_window is not None:
            return SlidingWindowSpec(mixer.num_kv_heads, mixer.head_dim, mixer.sliding_window)
        return FullAttentionSpec(mixer.num_kv_heads, mixer.head_dim)

    def shard(self, group: TensorParallelGroup) -> None:
        """Keep this rank's shard of attention and feed-forward."""
        self.attention.shard(group)
        self.mlp.shard(group)

    def checkpoint_tensors(self) -> dict[str, WeightLoader]:
        """Return the weight loader of each checkpoint tensor of the block, by the tensor's name within the block."""
        attention, mlp = self.attention, self.mlp
        loaders = norm_tensors(attention, mlp)
        if isinstance(attention, GatedDeltaNet):
            loaders |= gated_delta_tensors(attention)
        else:
            loaders |= attention_tensors(attention, self._rotary_dim)
        return loaders | (expert_tensors(mlp) if isinstance(mlp, SparseMoeBlock) else dense_tensors(mlp))

    def fused_tensors(self) -> dict[str, FusedTensor]:
        """Return the checkpoint tensors that merge several weights, by name within the block."""
        experts = fused_expert_tensors(self.mlp) if isinstance(self.mlp, SparseMoeBlock) else {}
        return merged_tensors(self.checkpoint_tensors()) | experts


def layers_of_all_kinds(kinds: Sequence[Hashable]) -> list[int]:
    """Return indices of layers that are enough to launch every kernel of the model.

    `kinds` has the kind of each layer. The indices include each kind after each kind that precedes it in the model, and
    the last layer. A layer performs the deferred addition of the layer before it (ResidualStream), and so does the
    final norm. Therefore the kernels of a layer depend on both kinds.
    """
    pairs = set[tuple[Hashable, ...]]()
    chosen = {len(kinds) - 1}
    for index in range(len(kinds)):
        pair = tuple(kinds[max(0, index - 1) : index + 1])
        if pair not in pairs:
            pairs.add(pair)
            chosen |= {max(0, index - 1), index}
    return sorted(chosen)


def _kind(block: DecoderBlock) -> Hashable:
    """Return the kind of a block.

    Blocks of one kind launch the same kernels: their modules have equal settings and shapes.
    """
    settings: list[Hashable] = [block.kv_cache_spec()]
    for name, module in block.named_modules():
        settings.append((name, type(module)))
        settings += [(key, _setting(value)) for key, value in vars(module).items() if key != "_modules"]
    return tuple(settings)


def _setting(value: object) -> Hashable:
    """Return a hashable form of a setting. For a tensor it holds the shape and the alignment."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype, *_alignments([value])
    if isinstance(value, tuple | list):
        return tuple(map(_setting, value))
    if isinstance(value, dict):
        return tuple((key, _setting(item)) for key, item in value.items())
    return repr(value)


def _alignments(values: Iterable[object]) -> tuple[int, ...]:
    """Return by how many bytes each tensor among `values` misses an aligned address."""
    return tuple(value.data_ptr() % _ALIGNMENT_BYTES for value in values if isinstance(value, torch.Tensor))


def _attention(config: DecoderConfig, layer_idx: int) -> Attention | GatedDeltaNet:
    recurrent = config.recurrent
    if recurrent is not None and layer_idx in recurrent.layers:
        return GatedDeltaNet(
            config.hidden_size,
            recurrent.linear_num_key_heads,
            recurrent.linear_num_value_heads,
            recurrent.linear_key_head_dim,
            recurrent.linear_value_head_dim,
            recurrent.linear_conv_kernel_dim,
            config.rms_norm_eps,
            config.norm,
        )
    return Attention(
        config.hidden_size,
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
        config.norm,
        qkv_bias=config.qkv_bias,
        qk_norm=config.qk_norm,
        output_gate=config.output_gate,
        sliding_window=config.sliding_window if layer_idx in config.sliding_layers else None,
        scale=config.attention_scale,
        post_norm=config.post_norms,
        pre_norm=config.pre_norms,
        wide_qk_norm=config.wide_qk_norm,
    )


def _feed_forward(config: DecoderConfig, layer_idx: int) -> GatedMLP | SparseMoeBlock:
    experts = config.experts
    if experts is None or layer_idx in experts.dense_layers:
        assert config.intermediate_size is not None
        return GatedMLP(
            config.hidden_size,
            config.intermediate_size,
            config.norm,
            activation=config.activation,
            post_norm=config.post_norms,
            pre_norm=config.pre_norms,
        )
    return SparseMoeBlock(
        config.hidden_size,
        experts.moe_intermediate_size,
        experts.num_experts,
        experts.num_experts_per_tok,
        config.norm,
        norm_topk_prob=experts.norm_topk_prob,
        shared_expert=experts.shared_expert,
    )


class Decoder(Model):
    """A decoder of token embedding, blocks, final norm and output head."""

    prefix = "model."  # of all tensor names of a checkpoint but the head's

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = VocabParallelEmbedding(
            config.vocab_size, config.hidden_size, config.stream_scale, rounds_scale=config.rounds_embedding_scale
        )
        self.blocks = nn.ModuleList(DecoderBlock(config, layer_idx) for layer_idx in range(config.num_hidden_layers))
        self.norm = config.norm(config.hidden_size)
        tie_word_embeddings = config.tie_word_embeddings
        self.lm_head = self.embedding if tie_word_embeddings else ParallelLMHead(config.vocab_size, config.hidden_size)
        self.rotary = self.local_rotary = self.unrotated = torch.empty(0)
        self._decode_layers: DecodeLayers | None = None
        self._runs_few_layers = False

    @property
    def local_vocab_size(self) -> int:
        """Number of tokens whose logits `logits` computes."""
        return self.lm_head.local_vocab_size

    @property
    def dtype(self) -> torch.dtype:
        """The type of hidden states, and of unquantized weights unless a layer needs another."""
        return self.embedding.weight.dtype

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.embedding.weight.device

    def shard(self, group: TensorParallelGroup) -> None:
        """Keep this rank's shard of every layer and of the vocabulary. Call this before weights are loaded."""
        self.embedding.shard(group)
        if not self.config.tie_word_embeddings:
            self.lm_head.shard(group)
        for _, block in self.named_blocks():
            block.shard(group)

    def prepare(self, max_model_len: int) -> None:
        """Build the rotary tables for positions up to `max_model_len` on the device of the weights."""
        config, device = self.config, self.device
        self.rotary = self.local_rotary = self.unrotated = rotary_table(
            *(config.head_dim, max_model_len, config.rope_theta, device, config.rotary_dim, config.rope_scaling)
        )
        if config.nope_layers:
            self.unrotated = unrotated_table(config.head_dim, max_model_len, device)
        if config.rope_local_theta is not None:
            self.local_rotary = rotary_table(
                config.head_dim, max_model_len, config.rope_local_theta, device, config.rotary_dim
            )

    def prepare_decode(self, caches: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Make decode steps of few sequences run in one launch, if the kernel supports the model."""
        if self.config.nope_layers or self.config.rope_local_theta is not None:
            return  # that launch has one rotary table for all layers
        layers = [(block.attention, block.mlp) for block in self._blocks()]
        self._decode_layers = persistent_layers(layers, caches, self.rotary)

    @contextmanager
    def one_layer_per_kind(self) -> Iterator[None]:
        """Return a context in which `forward` launches the kernels of all layers, but few of the layers."""
        before, self._runs_few_layers = self._runs_few_layers, True
        try:
            yield
        finally:
            self._runs_few_layers = before

    @cached_property
    def _kinds(self) -> list[int]:
        """The kind of each layer. Layers of equal kind have the same number."""
        numbers: dict[Hashable, int] = {}
        return [numbers.setdefault(_kind(block), len(numbers)) for block in self._blocks()]

    def _layers_to_run(
        self, caches: Sequence[tuple[torch.Tensor, torch.Tensor]], metadata: Sequence[AttentionMetadata]
    ) -> Collection[int]:
        """Return the indices of the layers that `forward` runs.

        Layers of one kind have caches and metadata of the same shape. Their alignment may differ, since sub-groups of
        attention layers share one tensor, and so do recurrent layers. Ranks have shards of equal sizes. So all ranks
        return the same layers, and no rank waits for a layer that another rank skips.
        """
        if not self._runs_few_layers:
            return range(len(self.blocks))
        kinds = [
            (kind, _alignments(cache), _alignments(layer_metadata))
            for kind, cache, layer_metadata in zip(self._kinds, caches, metadata, strict=True)
        ]
        return frozenset(layers_of_all_kinds(kinds))

    def kv_cache_specs(self) -> list[KVCacheSpec]:
        """Return the specification of each layer's cache per sequence."""
        return [block.kv_cache_spec() for _, block in self.named_blocks()]

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        caches: list[tuple[torch.Tensor, torch.Tensor]],
        metadata: list[AttentionMetadata],
        between_layers: Callable[[], None] | None = None,
    ) -> torch.Tensor:
        """Compute hidden states [tokens, hidden_size].

        Args:
            token_ids: [tokens] int64.
            positions: [tokens] int64.
            caches: each layer's keys and values, or its conv_states and states.
            metadata: each layer's metadata.
            between_layers: is called before each layer, unless all layers are one launch.
        """
        residual: ResidualStream = self.embedding(token_ids)
        fused_decode, num_decodes = self._decode_layers, metadata[0].num_decodes
        if fused_decode is not None and len(positions) == num_decodes <= MAX_TOKENS and use_triton(positions):
            table, rows = metadata[0].page_table, metadata[0].rows
            return ResidualStream(fused_decode.run(residual.values, positions, table, rows)).normalized(self.norm)
        layers_to_run = self._layers_to_run(caches, metadata)
        for layer_idx, (block, cache, layer_metadata) in enumerate(zip(self.blocks, caches, metadata, strict=True)):
            if layer_idx not in layers_to_run:
                continue
            if between_layers is not None:
                between_layers()
            block(residual, positions, self._rotary_of(layer_idx), cache, layer_metadata)
        return residual.normalized(self.norm)

    def _rotary_of(self, layer_idx: int) -> torch.Tensor:
        """Return the rotary table of a layer."""
        if layer_idx in self.config.nope_layers:
            return self.unrotated
        return self.local_rotary if layer_idx in self.config.sliding_layers else self.rotary

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Compute logits of hidden states: [rows, hidden_size] -> [rows, vocab_size] float32.

        A rank computes logits of its own part of the vocabulary only.
        """
        logits = self.lm_head.logits(hidden, out)
        return logits if self.config.logits_scaling == 1.0 else logits.div_(self.config.logits_scaling)

    def head_rows(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return the rows of the output head for tokens: [tokens] int64 -> [tokens, hidden_size]."""
        return self.lm_head.weight.embeddings(token_ids, None)

    def checkpoint_tensors(self) -> dict[str, WeightLoader]:
        """Return the weight loader of each tensor of a published checkpoint, by the tensor's name."""
        loaders = named_tensors(f"{self.prefix}embed_tokens", self.embedding.tensors())
        loaders[f"{self.prefix}norm.weight"] = self.norm.loader
        if not self.config.tie_word_embeddings:
            loaders |= named_tensors("lm_head", self.lm_head.tensors())
        for prefix, block in self.named_blocks():
            loaders |= {prefix + name: tensor for name, tensor in block.checkpoint_tensors().items()}
        return loaders

    def fused_tensors(self) -> dict[str, FusedTensor]:
        """Return the checkpoint tensors that merge several of `checkpoint_tensors`, by name."""
        fused: dict[str, FusedTensor] = {}
        for prefix, block in self.named_blocks():
            for name, (tensor, checkpoint_names) in block.fused_tensors().items():
                fused[prefix + name] = FusedTensor(tensor, tuple(prefix + suffix for suffix in checkpoint_names))
        return fused

    def ignored_tensor(self, name: str) -> bool:
        """Return whether `name` is the copy of a tied output head, which is not read."""
        return self.config.tie_word_embeddings and name == "lm_head.weight"

    def named_blocks(self) -> Iterator[tuple[str, DecoderBlock]]:
        """Yield each block that has weights, and the prefix of its tensors' names in a checkpoint."""
        for index, block in enumerate(self._blocks()):
            yield f"{self.prefix}layers.{index}.", block

    def _blocks(self) -> Iterator[DecoderBlock]:
        for block in self.blocks:
            assert isinstance(block, DecoderBlock)
            yield block
