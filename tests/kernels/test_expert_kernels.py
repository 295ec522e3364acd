"""Routed experts: both bodies against float64, whatever the routing, and the same bits alone and in company."""

from __future__ import annotations

import pytest
import torch
from test_attention_kernels import interpreter_of_loops_and_dots  # noqa: F401, applies here too

from meltcore.kernels import expert_product as product_file
from meltcore.kernels import experts as experts_file
from meltcore.kernels.expert_product import ExpertsLaunch, Form, form_of, launches_of
from meltcore.kernels.experts import experts_add
from meltcore.kernels.routing import Routing, route

SMALLEST = ExpertsLaunch(pairs=16, rows=64, columns=64, stages=2, warps=4)
# The longer side of a tile comes first in its product: one launch for each order.
LAUNCHES = pytest.mark.parametrize(
    "launch", [SMALLEST, SMALLEST._replace(pairs=64, rows=32)], ids=["long-rows", "long-pairs"]
)


class Problem:
    """Weights of unit gain, and tokens with the experts they go to."""

    def __init__(
        self, seed: int, tokens: int, experts: int, choices: int, size: int, width: int, dtype: torch.dtype
    ) -> None:
        torch.manual_seed(seed)
        self.hidden = torch.randn(tokens, size).to(dtype)
        self.residual = torch.randn(tokens, size).to(dtype)
        self.gate_up = (torch.randn(experts, 2 * width, size) * size**-0.5).to(dtype)
        self.down = (torch.randn(experts, size, width) * width**-0.5).to(dtype)
        self.routing = route(2 * torch.randn(tokens, experts), choices, renormalised=True)

    def exact(self) -> torch.Tensor:
        """In float64, token by token."""
        result = self.residual.double()
        for token, (chosen, weights) in enumerate(zip(*self.routing, strict=True)):
            for expert, weight in zip(chosen.tolist(), weights.double(), strict=True):
                gate, up = (self.gate_up[expert].double() @ self.hidden[token].double()).chunk(2)
                result[token] += weight * (self.down[expert].double() @ (torch.nn.functional.silu(gate) * up))
        return result

    def run(
        self,
        device: torch.device,
        launch: ExpertsLaunch,
        tokens: slice = slice(None),
        form: Form | None = None,
    ) -> torch.Tensor:
        """By the Triton body."""
        routing = Routing(*(tensor[tokens].contiguous().to(device) for tensor in self.routing))
        residual = self.residual[tokens].to(device, copy=True)
        weights = self.gate_up.to(device), self.down.to(device)
        result = experts_file._experts_add_triton(
            residual, self.hidden[tokens].to(device), routing, *weights, launch=launch, form=form
        )
        assert result is residual
        return result.cpu()


def assert_near(result: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    """Both roundings of an expert's values, and in float32 the errors of its sums, by what the results are like."""
    error, steps = result.double() - expected, 4 if dtype == torch.float32 else 1
    assert result.dtype == dtype
    assert error.norm() <= steps * torch.finfo(dtype).eps * expected.norm()
    assert error.abs().max() <= 10 * steps * torch.finfo(dtype).eps * expected.pow(2).mean().sqrt()


@LAUNCHES
@pytest.mark.parametrize(
    ("tokens", "experts", "choices", "size", "width", "dtype"),
    [
        (1, 8, 3, 64, 48, torch.float32),
        (7, 5, 2, 96, 32, torch.bfloat16),
        (24, 4, 4, 64, 64, torch.float16),
        (33, 4, 1, 72, 40, torch.float32),
        (2, 20, 8, 64, 16, torch.bfloat16),
    ],
)
def test_a_token_gets_the_weighted_sum_of_its_experts(
    tokens: int,
    experts: int,
    choices: int,
    size: int,
    width: int,
    dtype: torch.dtype,
    launch: ExpertsLaunch,
    device: torch.device,
) -> None:
    problem = Problem(tokens, tokens, experts, choices, size, width, dtype)
    assert_near(problem.run(device, launch), problem.exact(), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda dtype: str(dtype)[6:])
def test_the_torch_body_is_what_the_words_say(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem(3, 21, 6, 3, 64, 40, dtype)
    residual = problem.residual.clone()
    result = experts_add(residual, problem.hidden, problem.routing, problem.gate_up, problem.down)
    assert result is residual
    assert_near(result, problem.exact(), dtype)


@LAUNCHES
def test_all_tokens_to_one_expert_and_none_to_the_others(launch: ExpertsLaunch, device: torch.device) -> None:
    problem = Problem(0, 70, 5, 1, 32, 16, torch.float32)
    problem.routing.experts.fill_(4)
    assert_near(problem.run(device, launch), problem.exact(), torch.float32)


@LAUNCHES
@pytest.mark.parametrize("shared", [False, True], ids=["", "shared"])
@pytest.mark.parametrize(("tokens", "experts", "choices"), [(1, 4, 3), (2, 10, 4), (6, 12, 3), (20, 5, 2), (32, 3, 1)])
def test_however_pairs_are_found_the_bits_are_the_same(
    tokens: int, experts: int, choices: int, shared: bool, launch: ExpertsLaunch, device: torch.device
) -> None:
    """From fewer pairs than experts to many of each expert."""
    problem = Problem(tokens, tokens, experts, choices, 64, 16, torch.bfloat16)
    if shared:
        problem.routing = route(torch.randn(tokens, experts), choices, renormalised=True, shared=True)
    forms: list[Form] = ["found", "placed", *(["alone"] if tokens < 10 else [])]  # type: ignore[list-item]
    results = [problem.run(device, launch, form=form) for form in forms]
    assert_near(results[0], problem.exact(), torch.bfloat16)
    assert all(torch.equal(results[0], result) for result in results)


def test_few_tokens_are_alone_more_are_found_and_many_are_placed() -> None:
    def down(width: int) -> torch.Tensor:
        return torch.empty(257, 2048, width, dtype=torch.bfloat16, device="meta")

    assert [form_of(tokens, down(512)) for tokens in (1, 2, 3, 16)] == ["alone"] * 2 + ["found"] * 2
    assert [form_of(tokens, down(128)) for tokens in (1, 8, 9, 16)] == ["alone"] * 2 + ["found"] * 2
    assert [form_of(tokens, down(128)) for tokens in (17, 8192)] == ["placed"] * 2


@LAUNCHES
def test_a_token_has_the_same_bits_alone_and_in_company(launch: ExpertsLaunch, device: torch.device) -> None:
    problem = Problem(1, 20, 3, 2, 64, 32, torch.bfloat16)
    whole = problem.run(device, launch)
    assert torch.equal(whole, problem.run(device, launch))
    for token in (0, 19):
        assert torch.equal(whole[token : token + 1], problem.run(device, launch, slice(token, token + 1)))


def test_what_lies_behind_the_result_is_not_written(device: torch.device) -> None:
    problem = Problem(2, 5, 4, 2, 40, 24, torch.float32)
    kept = torch.full((5 * 40 + 64,), 7.0, device=device)
    problem.residual = kept[:200].view(5, 40)
    routing = Routing(*(tensor.to(device) for tensor in problem.routing))
    weights = problem.gate_up.to(device), problem.down.to(device)
    experts_file._experts_add_triton(problem.residual, problem.hidden.to(device), routing, *weights, launch=SMALLEST)
    assert (kept[200:] == 7.0).all()
    assert not (kept[:200] == 7.0).all()


@pytest.mark.parametrize("body", [experts_file._experts_add_torch, experts_file._experts_add_triton])
def test_without_a_residual_the_sum_alone_comes(body: object, device: torch.device) -> None:
    problem = Problem(5, 7, 4, 2, 64, 32, torch.bfloat16)
    routing = Routing(*(tensor.to(device) for tensor in problem.routing))
    given = [tensor.to(device) for tensor in (problem.hidden, problem.gate_up, problem.down)]
    result = body(None, given[0], routing, *given[1:])  # type: ignore[operator]
    problem.residual.zero_()
    assert_near(result.cpu(), problem.exact(), torch.bfloat16)


def test_no_tokens_are_no_work(device: torch.device) -> None:
    problem = Problem(0, 3, 4, 2, 32, 16, torch.float32)
    assert problem.run(device, SMALLEST, slice(0, 0)).shape == (0, 32)


@pytest.mark.parametrize("shared_kib", [99, 163, 227])
@pytest.mark.parametrize("element_bytes", [2, 4])
@pytest.mark.parametrize(("pairs", "experts"), [(8, 128), (1024, 128), (4096, 128), (16384, 256), (65536, 8)])
def test_launches_fit_in_shared_memory(pairs: int, experts: int, element_bytes: int, shared_kib: int) -> None:
    launch = ExpertsLaunch.sound(pairs, experts, element_bytes, shared_kib * 1024)
    step_bytes = (launch.pairs + launch.rows) * launch.columns * element_bytes
    assert launch.stages >= 2
    assert launch.stages * step_bytes <= shared_kib * 1024
    assert launch.pairs >= min(128, 2 * pairs / experts) or element_bytes == 4


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 20, 200, 2000])
def test_at_published_sizes_the_bodies_agree(tokens: int) -> None:
    """Qwen3-30B-A3B's, with fewer experts: each size of tile is launched."""
    problem = Problem(tokens, tokens, 32, 8, 2048, 768, torch.bfloat16)
    given = [tensor.cuda() for tensor in (problem.hidden, problem.gate_up, problem.down)]
    routing = Routing(*(tensor.cuda() for tensor in problem.routing))
    results = [
        body(problem.residual.cuda(), given[0], routing, *given[1:])
        for body in (experts_file._experts_add_triton, experts_file._experts_add_torch)
    ]
    assert_near(results[0].cpu(), results[1].cpu().double(), torch.bfloat16)


@pytest.mark.gpu
def test_a_graph_follows_the_routing_of_its_inputs() -> None:
    problem = Problem(4, 24, 8, 3, 64, 48, torch.bfloat16)
    hidden, gate_up, down = (tensor.cuda() for tensor in (problem.hidden, problem.gate_up, problem.down))
    logits = torch.randn(24, 8, device="cuda")

    def step() -> torch.Tensor:
        return experts_add(torch.zeros_like(hidden), hidden, route(logits, 3, renormalised=True), gate_up, down)

    step()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step()
    for _ in range(3):
        logits.normal_()
        hidden.normal_()
        graph.replay()
        assert torch.equal(result, step())


@pytest.mark.parametrize(("pairs", "place"), [(9, 0), (18, 0), (19, 1), (10**6, -1)])
def test_on_an_h200_launches_come_from_the_table(pairs: int, place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.empty(257, 1024, 2048, dtype=torch.bfloat16, device="meta")
    monkeypatch.setattr(product_file, "capability", lambda device: 90)
    found = ExpertsLaunch.of(pairs, weight)
    assert found == ExpertsLaunch(*product_file.TABLE[257, 1024, 2048][place][1])
    # Neither for another processor nor for another type or shape.
    monkeypatch.setattr(product_file, "shared_bytes", lambda device: 227 * 1024)
    sound = ExpertsLaunch.sound(pairs, 257, 2, 227 * 1024)
    assert ExpertsLaunch.of(pairs, weight[:, :60]) == sound
    monkeypatch.setattr(product_file, "capability", lambda device: 100)
    assert ExpertsLaunch.of(pairs, weight) == sound


@pytest.mark.parametrize(
    ("shape", "like"), [((64, 1408, 2048), (128, 1536, 2048)), ((96, 2048, 384), (257, 2048, 512))]
)
def test_a_shape_that_was_not_tuned_takes_launches_of_one_much_like_it(
    shape: tuple[int, ...], like: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At as many pairs an expert."""
    weight = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    monkeypatch.setattr(product_file, "capability", lambda device: 90)
    for most, launch in product_file.TABLE[like]:
        pairs = most * shape[0] // like[0]
        assert ExpertsLaunch.of(pairs, weight) == ExpertsLaunch(*launch)
        assert shape[2] % ExpertsLaunch(*launch).columns == 0


def test_the_table_rises_and_its_tiles_divide_what_they_are_for() -> None:
    for (_, _, columns), launches in product_file.TABLE.items():
        most = [pairs for pairs, _ in launches]
        assert most == sorted(set(most))
        for _, launch in launches:
            assert columns % ExpertsLaunch(*launch).columns == 0


@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize(("experts", "width"), [(128, 768), (257, 512), (257, 384), (257, 256), (257, 128), (257, 64)])
def test_both_products_have_tiles_of_as_many_pairs(
    experts: int, width: int, capability: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pairs are placed once for both; tables say when tiles grow for each of them."""
    monkeypatch.setattr(product_file, "capability", lambda device: capability)
    monkeypatch.setattr(product_file, "shared_bytes", lambda device: 227 * 1024)
    gate_up = torch.empty(experts, 2 * width, 2048, dtype=torch.bfloat16, device="meta")
    down = torch.empty(experts, 2048, width, dtype=torch.bfloat16, device="meta")
    for pairs in (*range(8, 4096, 120), 9216, 9217, 18432, 18433, 80_000):
        up, way_down = launches_of(pairs, gate_up, down)
        assert up.pairs == way_down.pairs
        if capability == 90:
            assert up == ExpertsLaunch.of(pairs, gate_up)
            assert 2048 % up.columns == width % way_down.columns == 0
