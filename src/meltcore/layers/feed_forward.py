"""Feed-forward blocks: dense, and a sparse mixture of experts."""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn

from meltcore.kernels.activation import geglu
from meltcore.kernels.gemm.linear import linear
from meltcore.kernels.moe.router import route_tokens
from meltcore.kernels.moe.routing import RouterLogits, Routing
from meltcore.kernels.norm import Norm
from meltcore.layers.linear import ColumnParallelLinear, RowParallelLinear
from meltcore.layers.norm import NormFactory
from meltcore.layers.quantization import UNQUANTIZED, ExpertsWeight, QuantizationMethod
from meltcore.layers.residual import ResidualStream
from meltcore.layers.tensor_parallel import TensorParallelGroup
from meltcore.layers.uniform_routing import record_routing, uniform_routing_seed

# Activations of a dense feed-forward, by their names in config.json.
Activation = Literal["silu", "gelu_pytorch_tanh"]


class GatedMLP(nn.Module):
    """Computes residual + down_proj(act(gate(x)) * up(x)), where x = norm(residual). One GEMM computes gate and up.

    With `post_norm`, down_proj's output is normalized before it is added (Gemma 3). Without `pre_norm`, x = residual
    (OLMo 2).
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        norm: NormFactory,
        *,
        activation: Activation = "silu",
        post_norm: bool = False,
        pre_norm: bool = True,
    ) -> None:
        super().__init__()
        self.activation = activation
        self.post_norm = norm(hidden_size) if post_norm else None
        self.norm = norm(hidden_size) if pre_norm else None
        self.gate_up_proj = ColumnParallelLinear(hidden_size, intermediate_size, intermediate_size)
        self.down_proj = RowParallelLinear(intermediate_size, hidden_size)

    def shard(self, group: TensorParallelGroup) -> None:
        """Keep this rank's part of the intermediate size."""
        local_columns = group.shard(self.down_proj.input_size, "columns of the feed-forward (intermediate_size)")
        self.gate_up_proj.shard(local_columns, local_columns)
        self.down_proj.shard(local_columns, group)

    def forward(self, residual: ResidualStream) -> None:
        """Add the block's output to the residual stream."""
        hidden, norm = residual.read(self.norm)
        if self.activation == "silu":
            activated = self.gate_up_proj.silu_and_mul(hidden, norm)
        else:
            activated = geglu(self.gate_up_proj(hidden, norm))
        self.down_proj.add_to(residual, activated, self.post_norm)


class SparseMoeBlock(nn.Module):
    """Adds to each token's residual the weighted outputs of the top_k experts that the router selects for it.

    Router and experts read norm(residual). The router is [experts, hidden_size]. With `norm_topk_prob` the weights of a
    token's experts add up to one. With `shared_expert` every token also goes through one more expert, the last of
    `experts`, weighted by the sigmoid of a gate. The last row of the router computes that gate.
    """

    experts: ExpertsWeight

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        top_k: int,
        norm: NormFactory,
        *,
        norm_topk_prob: bool,
        shared_expert: bool = False,
    ) -> None:
        super().__init__()
        self.num_experts, self.top_k = num_experts, top_k
        self.norm_topk_prob, self.shared_expert = norm_topk_prob, shared_expert
        self._intermediate_size, self._local_columns = intermediate_size, range(intermediate_size)
        self._group: TensorParallelGroup | None = None
        self.norm = norm(hidden_size)
        self.router = nn.Parameter(torch.empty(num_experts + shared_expert, hidden_size), requires_grad=False)
        self.quantize(UNQUANTIZED)

    @property
    def local_width(self) -> int:
        """Number of columns of an expert's intermediate size that this rank keeps."""
        return len(self._local_columns)

    def shard(self, group: TensorParallelGroup) -> None:
        """Keep this rank's part of every expert's intermediate size."""
        self._local_columns = group.shard(self._intermediate_size, "columns of an expert (moe_intermediate_size)")
        self._group = group
        self.quantize(self._method)

    def quantize(self, method: QuantizationMethod) -> None:
        """Allocate the experts in the format of `method`. Call this before weights are loaded.

        Raises ValueError if the method does not support experts.
        """
        if method.experts is None:
            raise ValueError("this quantization method does not support experts")
        method.check_columns(self._intermediate_size, self._local_columns)
        self._method = method
        num_experts, hidden_size = self.router.shape
        self.experts = method.experts(num_experts, hidden_size, self._intermediate_size, self._local_columns)

    def forward(self, residual: ResidualStream) -> None:
        """Add the block's output to the residual stream."""
        hidden, routing = self._route(*residual.read(self.norm))
        if isinstance(routing, Routing) and len(hidden) > 1:
            residual.add_experts(self.experts.outputs(hidden, routing), routing.topk_weights, self._group)
        elif self._group is None:  # the kernel for one token sums over its experts itself
            self.experts.add_outputs(residual.values, hidden, routing)
        else:
            residual.add_all_reduce(self._group, self.experts.add_outputs(None, hidden, routing))

    def _route(self, inputs: torch.Tensor, norm: Norm | None) -> tuple[torch.Tensor, Routing | RouterLogits]:
        """Return the input of the experts, [tokens, hidden_size], and the routing of each token.

        If `norm` is None, `inputs` are normalized already. If the experts' kernels normalize a token and select its
        experts themselves, `inputs` and the router's logits are returned instead.
        """
        seed = uniform_routing_seed()
        if seed is None and self.experts.selects(inputs, norm, self.top_k + self.shared_expert):
            logits = linear(inputs, self.router, norm)
            return inputs, RouterLogits(logits, norm, self.top_k, self.norm_topk_prob, self.shared_expert)
        hidden, routing = route_tokens(
            inputs,
            norm,
            self.router,
            self.top_k,
            norm_topk_prob=self.norm_topk_prob,
            shared_expert=self.shared_expert,
            uniform_seed=seed,
        )
        if seed is not None:
            record_routing(id(self), routing.topk_ids[:, : self.top_k])
        return hidden, routing
