"""Time budgets of hand-made traces: every row is known and nothing is left over."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from traces import TraceBuilder, one_of_each

from meltcore.common.errors import ConfigError
from meltcore.measure.documents.gaps import GapReport
from meltcore.measure.report.nodes.profile import budget_rows, budget_title
from meltcore.measure.trace.gaps import analyze
from meltcore.measure.trace.trace import kernel_group


def rows(report: GapReport) -> dict[str, tuple[int, float, float]]:
    return {row.name: (row.count, row.ran_us, row.idle_before_us) for row in report.budget}


def decode_steps(count: int) -> TraceBuilder:
    """Steps of 100 us: attention 60, a GEMM of 30 that begins 5 early, sampling 10, and 5 us idle."""
    made = TraceBuilder()
    for step in range(count):
        at = 100 * step
        made.host(at - 20, 60, "step", "user_annotation")
        made.kernel(at, 60, "_decode_kernel", made.launch(at - 9))
        made.kernel(at + 55, 30, "nvjet_tst_64x8", made.launch(at - 7))
        made.kernel(at + 85, 10, "_first_maximum_kernel", made.launch(at - 5))
    return made


def test_overlapping_time_belongs_to_the_kernel_that_began_first() -> None:
    report = analyze(decode_steps(4).trace(), 0)
    assert rows(report) == {
        "attention and recurrent state": (4, 240.0, 15.0),
        "GEMM": (4, 100.0, 0.0),
        "sampling": (4, 40.0, 0.0),
    }
    assert [row.name for row in report.budget] == ["attention and recurrent state", "GEMM", "sampling"]


def test_kernels_inside_a_longer_one_add_no_time() -> None:
    made = TraceBuilder()
    made.kernel(0, 100, "gemm", stream=1)
    made.kernel(20, 30, "rms_norm", stream=2)
    made.kernel(60, 50, "flash_attention", stream=3)
    assert rows(analyze(made.trace(), 0)) == {
        "GEMM": (1, 100.0, 0.0),
        "norm and activation": (1, 0.0, 0.0),
        "attention and recurrent state": (1, 10.0, 0.0),
    }


def test_collectives_and_copies_have_only_their_time_alone() -> None:
    found = rows(analyze(one_of_each().trace(), 0))
    assert found["collectives"] == (1, 30.0, 0.0)
    assert found["copies"] == (1, 40.0, 0.0)
    assert found["other kernels"] == (9, 523.0, 407.0)


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["gemm", "attention", "nccl", "gpu_memcpy"]), st.integers(0, 400), st.integers(1, 60)
        ),
        min_size=1,
        max_size=30,
    ),
    st.tuples(st.integers(0, 200), st.integers(201, 500)),
)
def test_run_and_idle_times_add_up_to_the_window(events: list[tuple[str, int, int]], window: tuple[int, int]) -> None:
    made = TraceBuilder()
    made.kernel(-10, 600, "nccl_under_it_all", stream=99)
    for stream, (kind, start, dur) in enumerate(events):
        if kind == "gpu_memcpy":
            made.gpu("gpu_memcpy", start, dur, "Memcpy", stream=stream)
        else:
            made.kernel(start, dur, kind, stream=stream)
    report = analyze(made.trace(), 0, (window[0] * 1000, window[1] * 1000))
    total = sum(round(1000 * (row.ran_us + row.idle_before_us)) for row in report.budget)
    assert total == round(1000 * report.window_us)
    computed = sum(row.ran_us for row in report.budget if row.name in ("GEMM", "attention and recurrent state"))
    assert computed == pytest.approx(report.computing_us)


def test_steps_are_counted_by_their_ranges() -> None:
    trace = decode_steps(4).trace()
    assert (analyze(trace, 0).steps, analyze(trace, 0).step_marker) == (4, "step")  # the first began before the window
    assert analyze(trace, 0, (90_000, 290_000)).steps == 2


def test_steps_are_counted_by_a_named_kernel() -> None:
    report = analyze(decode_steps(4).trace(), 0, step="_first_max")
    assert (report.steps, report.step_marker) == (4, "_first_maximum_kernel")
    with pytest.raises(
        ConfigError, match="no kernel and no range within the window has a name that begins with 'nothing'"
    ):
        analyze(decode_steps(4).trace(), 0, step="nothing")


def test_budget_is_shown_per_step_where_steps_are_known() -> None:
    known = analyze(decode_steps(4).trace(), 0, step="_first")
    assert budget_title(known) == "an average step of 4, counted by _first_maximum_kernel"
    name, figures = budget_rows(known)[0]
    assert (name, figures) == ("attention and recurrent state", ["1.0", "60.0", "60.76 %", "3.8", "100 %"])
    assert budget_rows(known)[-1] == ("all", ["3.0", "95.0", "96.20 %", "3.8", "100 %"])
    unknown = analyze(one_of_each().trace(), 0)
    assert unknown.steps is None
    assert "--step NAME" in budget_title(unknown)


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("_decode_kernel", "attention and recurrent state"),
        ("void flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits<128>>", "attention and recurrent state"),
        ("kernel_unified_attention_2d", "attention and recurrent state"),
        ("_chunk_kernel", "attention and recurrent state"),
        ("_best_chunk_kernel", "sampling"),
        ("_chunk_maximum_kernel", "sampling"),
        ("nvjet_tst_192x192_64x4_2x1_v_bz_coopB_TNT", "GEMM"),
        ("void cutlass::device_kernel<GemmUniversal>", "GEMM"),
        ("_gemv_kernel", "GEMM"),
        ("_fp8_skinny_gemm_kernel", "GEMM"),
        ("void vllm::moe::topkGatingSoftmax<8>", "MoE"),
        ("_moe_grouped_gemm_kernel", "MoE"),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "collectives"),
        ("_all_reduce_kernel", "collectives"),
        ("_all_reduce_exchange_kernel", "collectives"),
        ("void vllm::rms_norm_kernel<c10::BFloat16>", "norm and activation"),
        ("_swiglu_or_geglu_kernel", "norm and activation"),
        ("_store_kv_kernel", "KV cache and embedding"),
        ("_quantize_kernel", "quantization"),
        ("Memcpy HtoD (Pinned -> Device)", "copies"),
        ("void at::native::vectorized_elementwise_kernel<4, convert>", "other kernels"),
    ],
)
def test_kernels_are_grouped_by_name(name: str, group: str) -> None:
    assert kernel_group(name) == group
