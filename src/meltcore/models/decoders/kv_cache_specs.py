"""The cache contents of each layer per sequence, from which the engine plans its caches. No torch."""

from collections.abc import Sequence
from math import gcd
from typing import NamedTuple

from meltcore.common.errors import ConfigError

_STATE_ELEMENT_SIZE = 4  # float32 in any model: a recurrent state accumulates errors over the whole sequence


class FullAttentionSpec(NamedTuple):
    """The KV cache of a layer that attends to every earlier token: keys and values in pages."""

    kv_heads: int
    head_dim: int

    def page_bytes(self, page_size: int, element_size: int) -> int:
        """Return the bytes of a page: keys and values of `page_size` tokens. An element has `element_size` bytes."""
        return 2 * page_size * self.kv_heads * self.head_dim * element_size


class SlidingWindowSpec(NamedTuple):
    """The KV cache of a layer that attends to the newest `window` tokens, including the current token.

    Keys and values lie in pages. Pages whose tokens have all left the window are released.
    """

    kv_heads: int
    head_dim: int
    window: int

    def page_bytes(self, page_size: int, element_size: int) -> int:
        """Return the bytes of a page: keys and values of `page_size` tokens. An element has `element_size` bytes."""
        return 2 * page_size * self.kv_heads * self.head_dim * element_size


class RecurrentStateSpec(NamedTuple):
    """The state of a recurrent layer, whose size does not depend on the sequence length.

    It is a matrix [key_dim, value_dim] per head, and a ring buffer of the last `conv_width` inputs of a convolution
    over `conv_channels`, including the current input. In an engine that computes windows of several tokens per
    sequence, the ring also has the inputs of two windows, of which drafts may be rejected, and each head's b and a.
    """

    conv_channels: int
    conv_width: int
    heads: int
    key_dim: int
    value_dim: int

    def ring_shape(self, window: int) -> tuple[int, int]:
        """Return the entries and columns of the ring for windows of up to `window` tokens (gated_delta/window.py)."""
        return self.conv_width + 2 * (window - 1), self.conv_channels + 2 * self.heads * (window > 1)

    def slot_bytes(self, element_size: int, window: int = 1) -> int:
        """Return the bytes of one sequence's state. An element of the ring has `element_size` bytes."""
        entries, columns = self.ring_shape(window)
        return entries * columns * element_size + self.heads * self.key_dim * self.value_dim * _STATE_ELEMENT_SIZE


AttentionSpec = FullAttentionSpec | SlidingWindowSpec
KVCacheSpec = AttentionSpec | RecurrentStateSpec


class AttentionGroup(NamedTuple):
    """The attention layers that share one spec, by ascending index."""

    spec: AttentionSpec
    layers: tuple[int, ...]

    @property
    def window(self) -> int | None:
        """The sliding window in tokens, or None for full attention."""
        return self.spec.window if isinstance(self.spec, SlidingWindowSpec) else None


class KVCacheGroups(NamedTuple):
    """The cache groups of a model: layers of equal spec.

    Args:
        attention: the groups with pages, full attention first.
        recurrent_layers: the indices of the recurrent layers.
        recurrent: the spec of the recurrent layers. None means that the model has no such layers.

    A page holds `layers_per_page` layers, the greatest common divisor of the groups' layer counts. So one pool of equal
    pages serves all groups. A group consists of sub-groups of that many layers, each with its own pages.
    """

    attention: tuple[AttentionGroup, ...]
    recurrent_layers: tuple[int, ...]
    recurrent: RecurrentStateSpec | None

    @property
    def layers_per_page(self) -> int:
        """Number of layers whose keys and values one page holds."""
        return gcd(*(len(group.layers) for group in self.attention))

    @property
    def sub_groups(self) -> tuple[tuple[int, ...], ...]:
        """The layers of each sub-group, group by group."""
        size = self.layers_per_page
        return tuple(
            group.layers[start : start + size]
            for group in self.attention
            for start in range(0, len(group.layers), size)
        )

    def page_bytes(self, page_size: int, element_size: int) -> int:
        """Return the bytes of the keys and values of one page, which holds `layers_per_page` layers."""
        return self.layers_per_page * self.attention[0].spec.page_bytes(page_size, element_size)

    def slot_bytes(self, element_size: int, window: int = 1) -> int:
        """Return the bytes of one sequence's recurrent states in all layers, for windows of up to `window` tokens."""
        return len(self.recurrent_layers) * self.recurrent.slot_bytes(element_size, window) if self.recurrent else 0


def group_layers(specs: Sequence[KVCacheSpec]) -> KVCacheGroups:
    """Group the layers of a model by equal specs. `specs` has the spec of each layer.

    Raises ConfigError for a window below 1 and for attention layers whose keys differ in size. Raises ValueError
    without an attention layer, and for several kinds of recurrent layers.
    """
    layers: dict[KVCacheSpec, list[int]] = {}
    for layer, spec in enumerate(specs):
        layers.setdefault(spec, []).append(layer)
    attention = [
        AttentionGroup(spec, tuple(layers[spec]))
        for spec in layers
        if isinstance(spec, FullAttentionSpec | SlidingWindowSpec)
    ]
    recurrent = [spec for spec in layers if isinstance(spec, RecurrentStateSpec)]
    if not attention or len(recurrent) > 1:
        raise ValueError(
            "the engine lays out one kind of attention or more, and at most one of recurrent layers; "
            f"the model has {len(attention)} and {len(recurrent)}"
        )
    for group in attention:
        _check_attention(group, attention[0])
    attention.sort(key=lambda group: group.window is not None)
    recurrent_spec = recurrent[0] if recurrent else None
    return KVCacheGroups(
        tuple(attention), tuple(layers[recurrent_spec]) if recurrent_spec is not None else (), recurrent_spec
    )


def _check_attention(group: AttentionGroup, first: AttentionGroup) -> None:
    """Raise ConfigError for a group that the pages of `first` cannot hold, or whose window is empty."""
    if group.window is not None and group.window < 1:
        raise ConfigError(f"the sliding window of layer {group.layers[0]} must be 1 or more; got {group.window}")
    spec, first_spec = group.spec, first.spec
    if spec.kv_heads * spec.head_dim != first_spec.kv_heads * first_spec.head_dim:
        raise ConfigError(
            "all attention layers must have keys of one size, since their caches share pages; "
            f"layer {first.layers[0]} has {first_spec.kv_heads} heads of {first_spec.head_dim}, "
            f"layer {group.layers[0]} has {spec.kv_heads} heads of {spec.head_dim}"
        )
