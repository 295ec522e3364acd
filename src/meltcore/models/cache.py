"""What a model keeps per token between steps. The engine's pools are laid out from this."""

from typing import NamedTuple


class CacheGroup(NamedTuple):
    """Layers that share one page table: full attention over every earlier token.

    Sliding windows and recurrent states will be further groups beside this one.
    """

    layers: int
    kv_heads: int
    head_dim: int

    def page_bytes(self, page_size: int, element_size: int) -> int:
        """Keys and values of one page, all layers of the group together."""
        return 2 * self.layers * page_size * self.kv_heads * self.head_dim * element_size
