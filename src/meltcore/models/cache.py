"""What a model keeps of a sequence between steps. The engine's pools are laid out from this."""

from collections.abc import Sequence
from typing import NamedTuple

_STATE_ELEMENT_SIZE = 4  # float32, whatever the model computes in: a state adds up errors over the whole sequence


class CacheGroup(NamedTuple):
    """Layers that share one page table: full attention over every earlier token.

    Sliding windows will be a further group beside this one.
    """

    layers: int
    kv_heads: int
    head_dim: int

    def page_bytes(self, page_size: int, element_size: int) -> int:
        """Keys and values of one page, all layers of the group together."""
        return 2 * self.layers * page_size * self.kv_heads * self.head_dim * element_size


class StateGroup(NamedTuple):
    """Recurrent layers: what they keep of a sequence has one size, however long it is.

    That is a matrix [key_dim, value_dim] for each head, and a ring of the last `conv_width` inputs of a convolution
    over `conv_channels`, the current one included.
    """

    layers: int
    conv_channels: int
    conv_width: int
    heads: int
    key_dim: int
    value_dim: int

    def slot_bytes(self, element_size: int) -> int:
        """One sequence's states, all layers of the group together; the convolution's inputs in the model's type."""
        conv = self.conv_width * self.conv_channels * element_size
        return self.layers * (conv + self.heads * self.key_dim * self.value_dim * _STATE_ELEMENT_SIZE)


def split_groups(groups: Sequence[CacheGroup | StateGroup]) -> tuple[CacheGroup, StateGroup | None]:
    """The pages and the states of a model, which has one group of the first kind and at most one of the second."""
    (pages,) = (group for group in groups if isinstance(group, CacheGroup))
    states = [group for group in groups if isinstance(group, StateGroup)]
    if len(states) > 1:
        raise ValueError(f"one group of recurrent states is what the engine lays out; the model has {len(states)}")
    return pages, states[0] if states else None
