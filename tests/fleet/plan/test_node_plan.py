"""Plans over the nodes of a cluster: an engine on one node, replicas spread, host memory by node; no Ray needed."""

from __future__ import annotations

import time

import pytest
from sized_engine import sized_engine

from meltcore.common.errors import ConfigError
from meltcore.common.gpus.machine import Machine, VisibleGpu
from meltcore.common.sizes import GIB
from meltcore.fleet.plan.cluster import Cluster
from meltcore.fleet.plan.first_fit import FilledGpu, Host, place, place_on_hosts
from meltcore.fleet.plan.plan import describe_plan, plan_fleet
from meltcore.fleet.plan.planned import does_not_fit, find_plan
from meltcore.fleet.plan.site import OneMachine
from meltcore.protocol.cluster import ClusterNode
from meltcore.settings.fleet_file import parse_fleet

QWEN = "checkpoint: none/here, shapes: Qwen/Qwen3-0.6B, max_model_len: 4096, max_num_seqs: 4"


def cluster(*gpus: int) -> Cluster:
    nodes = []
    for index, count in enumerate(gpus):
        cards = tuple(VisibleGpu(number, "NVIDIA Scripted", 40 * GIB, GIB // 2) for number in range(count))
        nodes.append(ClusterNode(f"n{index}", f"{index:06}", "10.0.0.1", Machine(cards, "570.1", 4 * GIB)))
    return Cluster(tuple(nodes))


def test_ranks_of_an_engine_are_on_one_node_and_replicas_on_different_ones() -> None:
    cards = [FilledGpu(number, 80 * GIB, node=node) for number, node in enumerate(("a", "b", "b", "a", "a"))]
    pairs = [sized_engine("m", replica, 30 * GIB, 2, (), False) for replica in range(2)]
    placed = place(pairs, cards)
    assert placed is not None
    nodes = [{gpu.node for gpu in placed if engine in gpu.engines} for engine in pairs]
    assert nodes == [{"a"}, {"b"}]
    # Each node has room on one card only: two cards with room are not enough.
    full = [
        sized_engine(f"x{node}", 0, 70 * GIB, 1, (number,), False) for number, node in ((1, "b"), (0, "a"), (4, "a"))
    ]
    assert place([*full, sized_engine("m", 0, 30 * GIB, 2, (), False)], cards) is None


def test_engines_on_cpus_go_where_memory_is_free_and_replicas_apart() -> None:
    sizes = [("a", 0, 3), ("a", 1, 3), ("b", 0, 2)]
    engines = [sized_engine(model, replica, size, 0, resident_bytes=1) for model, replica, size in sizes]
    placed = place_on_hosts(engines, [Host("x", 6), Host("y", 4)])
    assert placed is not None
    found = {host.node: sorted((each.model, each.replica) for each in host.engines) for host in placed}
    assert found == {"x": [("a", 0), ("b", 0)], "y": [("a", 1)]}
    assert place_on_hosts([*engines, sized_engine("c", 0, 2, 0)], [Host("x", 6), Host("y", 4)]) is None
    elsewhere = [engine._replace(excluded_nodes=frozenset({"x"})) for engine in engines]
    assert place_on_hosts(elsewhere, [Host("x", 6), Host("y", 4)]) is None


def test_models_that_take_turns_on_a_cpu_count_as_the_largest_and_what_sleeps() -> None:
    sizes = [("a", 0, 6), ("a", 1, 6), ("b", 0, 9), ("c", 0, 2)]  # of the process 1, and asleep 1 more
    engines = [
        sized_engine(model, replica, size, 0, (), model != "c", resident_bytes=1)._replace(asleep_bytes=1)
        for model, replica, size in sizes
    ]
    needed = 2 + 3 * (1 + 1) + 2 * 5  # c, those that sleep, and the budgets of both replicas of a
    placed = place_on_hosts(engines, [Host("", needed)])
    assert placed is not None
    assert (placed[0].engine_bytes, placed[0].free_bytes) == (needed, 0)
    assert place_on_hosts(engines, [Host("", needed - 1)]) is None
    assert Host("", None, tuple(engines[2:])).engine_bytes == 9 + 2, "one never takes more than it does awake"
    assert place_on_hosts([engines[2]], [Host("x", 17, (engines[0],)), Host("y", 17, (engines[3],))]) is not None


def test_replicas_of_a_model_that_takes_turns_are_awake_together_on_their_gpu() -> None:
    """The largest engine counted once, so two replicas on one GPU were planned with the memory of one."""
    sizes = [("a", 0, 6), ("a", 1, 6), ("b", 0, 9)]  # of these 1 stays while the engine sleeps
    engines = [sized_engine(model, replica, size, 1, (), True, resident_bytes=1) for model, replica, size in sizes]
    needed = 1 + 3 * 1 + 2 * 5  # the driver, three processes, and the budgets of both replicas of a
    placed = place(engines, [FilledGpu(0, needed, driver_bytes=1)])
    assert placed is not None
    assert placed[0].used_bytes == needed
    assert place(engines, [FilledGpu(0, needed - 1, driver_bytes=1)]) is None
    beside = FilledGpu(0, needed, (engines[0], engines[2]), driver_bytes=1)  # one runs there already
    kept = place([engines[1]], [beside])
    assert kept is not None
    assert kept[0].used_bytes == needed
    assert place([engines[1]], [beside._replace(total_bytes=needed - 1)]) is None
    apart = place(engines, [FilledGpu(number, 11, driver_bytes=1) for number in range(2)])
    assert apart is not None, "on two GPUs each has the larger of a and b"
    assert sorted(gpu.used_bytes for gpu in apart) == [7, 11]


def test_tensor_parallelism_over_nodes_is_refused_by_name() -> None:
    there = cluster(2, 2)
    with pytest.raises(ConfigError, match=r"models\.a\.tensor_parallel_size: got 4; the largest node .* has 2 GPUs"):
        find_plan(parse_fleet(f"models: {{a: {{{QWEN}, tensor_parallel_size: 4}}}}"), there, print)
    text = f"models: {{a: {{{QWEN}, tensor_parallel_size: 2, device: [1, 2]}}}}"
    with pytest.raises(ConfigError, match=r"models\.a\.device: the GPUs 1, 2 of one engine are on n0 and n1"):
        find_plan(parse_fleet(text), there, print)


def test_plan_of_a_cluster_names_the_nodes() -> None:
    there = cluster(1, 2)
    spec = parse_fleet(
        f"models: {{a: {{{QWEN}, replicas: 2}}, t: {{checkpoint: meltcore/sums, device: cpu, memory: 2GiB, "
        f"replicas: 2}}}}"
    )
    gpus = [gpu.total_bytes for gpu in there.machine.gpus]
    plan, _ = plan_fleet(spec, gpus, gpu_nodes=there.gpu_nodes, host_bytes=there.host_bytes)
    assert plan is not None
    assert (plan.nodes("a"), plan.replicas("a")) == (("n0", "n1"), ((0,), (1,)))
    assert sorted(plan.nodes("t")) == ["n0", "n1"]
    page = describe_plan(spec, plan, source="f", fits=True)
    assert [(gpu.node, gpu.number) for gpu in page.gpus] == [("n0", 0), ("n1", 1), ("n1", 2)]
    assert {model.name: model.place for model in page.models} == {"a": "n0 GPU 0; n1 GPU 1", "t": "n0 CPU; n1 CPU"}
    # Together the hosts have room for a third one, none alone.
    more = parse_fleet("models: {t: {checkpoint: meltcore/sums, device: cpu, memory: 2GiB, replicas: 3}}")
    assert plan_fleet(more, [], gpu_nodes=[], host_bytes=there.host_bytes)[0] is None


@pytest.mark.slow
def test_512_engines_on_64_nodes_are_planned_in_seconds() -> None:
    there = cluster(*[8] * 64)
    spec = parse_fleet("models: {" + ", ".join(f"m{at}: {{{QWEN}, replicas: 64}}" for at in range(8)) + "}")
    started_s = time.process_time()
    plan, _ = plan_fleet(spec, [gpu.total_bytes for gpu in there.machine.gpus], gpu_nodes=there.gpu_nodes)
    assert time.process_time() - started_s < 10
    assert plan is not None
    assert all(len(set(plan.nodes(name))) == 64 for name in spec.models)


@pytest.mark.slow
def test_512_engines_that_do_not_fit_get_the_nearest_plan_in_seconds_and_a_short_reason() -> None:
    there = cluster(*[8] * 64)
    large = QWEN.replace("max_model_len: 4096, max_num_seqs: 4", "max_model_len: 8192, max_num_seqs: 44")
    spec = parse_fleet("models: {" + ", ".join(f"m{at}: {{{large}, replicas: 64}}" for at in range(8)) + "}")
    started_s = time.process_time()
    found = find_plan(spec, there, print)
    assert time.process_time() - started_s < 10
    assert found.plan is None
    assert found.nearest is not None
    assert found.nearest.changes == tuple(f"models.m{at}.max_num_seqs: 22 (was 44)" for at in range(8))
    needed = ", ".join(f"m{at} 64 x 40.38 GiB" for at in range(8))
    text = does_not_fit(found, there.machine)
    assert f"on GPUs it needs {needed}, and there are 512 GPUs of 40 GiB. The nearest" in text


def test_reason_names_alike_gpus_together_and_no_more_sizes_than_can_be_read() -> None:
    spec = parse_fleet(
        f"models: {{a: {{{QWEN}, memory: 90GiB}}, b: {{{QWEN}, memory: 9GiB, tensor_parallel_size: 2}}}}"
    )
    sizes = [40, 80, 40, *range(1, 21)]
    cards = tuple(VisibleGpu(at, "NVIDIA Scripted", size * GIB, 0) for at, size in enumerate(sizes))
    machine = Machine(cards, "570.1", 4 * GIB)
    text = does_not_fit(find_plan(spec, OneMachine.of(machine), print), machine)
    assert "it needs a 90 GiB, b 2 x 9 GiB, and there are 2 GPUs of 40 GiB, GPU 1 80 GiB, GPU 3 1 " in text
    assert "GPU 16 14 GiB, 6 more GPUs. " in text
