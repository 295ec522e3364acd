"""Defines the settings of a load on a whole fleet, and splits connections among the models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast, get_args

from meltcore.common.errors import ConfigError
from meltcore.common.options import option, read_number
from meltcore.measure.documents.schema import Part
from meltcore.measure.load.config import IntRange, Timeouts, parse_range, parse_slo
from meltcore.measure.load.tasks.task import ServedModel, Sizes, tasks

DEFAULT_MIX = {name: task.share for name, task in tasks().items()}
PAIRS = "pairs"
LIMITED_METRICS = ("ttft", "first_audio", "e2e")
_GROUP = "fleet"


def parse_mix(text: str) -> dict[str, float]:
    """Parse shares such as `generation=70,translation=30` into a share by task. Raises ConfigError for another text."""
    shares: dict[str, float] = {}
    for part in text.split(","):
        task, _, value = part.partition("=")
        if task not in tasks() or task in shares:
            task_names = ", ".join(tasks())
            raise ConfigError(f"--mix: {part!r} is not one of {task_names} with its share, each once, as generation=70")
        try:
            shares[task] = read_number(value, float)
        except ValueError as error:
            raise ConfigError(f"--mix: {part!r} has no number behind the =") from error
    return shares


def parse_parts(text: str) -> tuple[Part, ...]:
    """Parse comma-separated names of parts. Raises ConfigError for an unknown name."""
    parts = tuple(dict.fromkeys(text.split(",")))
    unknown = [part for part in parts if part not in get_args(Part)]
    if unknown:
        raise ConfigError(f"--parts: {unknown[0]!r} is not one of {', '.join(get_args(Part))}")
    return cast(tuple[Part, ...], parts)


def _lengths(flag: str) -> Any:
    return lambda text: parse_range(text, flag)


def _names(text: str) -> tuple[str, ...]:
    return tuple(filter(None, text.split(",")))


@dataclass(frozen=True, kw_only=True)
class FleetLoadConfig:
    """Describes a run against all models of one server. Raises ConfigError for values that cannot work."""

    url: str
    parts: tuple[Part, ...] = option(
        get_args(Part),
        "Parts of the run: each model alone, all mixed, and pairs of models beside each other.",
        group=_GROUP,
        type=parse_parts,
        action="store",
        choices=None,
        metavar="PART,...",
    )
    levels: tuple[int, ...] = option(
        (10, 100, 400, 1000, 10_000), "Connections of each level.", group=_GROUP, limits={"minimum": 1}
    )
    mix: dict[str, float] = option(
        DEFAULT_MIX,
        "Shares of a mixed level per task, split evenly among its models "
        f"(default: {','.join(f'{name}={share:g}' for name, share in DEFAULT_MIX.items())}).",
        group=_GROUP,
        type=parse_mix,
        metavar="TASK=SHARE,...",
    )
    models: tuple[str, ...] = option(
        (),
        "Models to load (default: all of /v1/models).",
        group=_GROUP,
        type=_names,
        action="store",
        metavar="NAME,...",
    )
    level_s: float = option(
        20.0,
        "Time for which the connections of a level send, at least one request each.",
        group=_GROUP,
        flag="--level-duration",
        limits={"exclusive_minimum": 0},
    )
    drain_limit_s: float = option(
        300.0,
        "Time after the last request of a level for which answers are awaited; later ones fail, and end a ladder.",
        group=_GROUP,
        flag="--drain-limit",
        limits={"exclusive_minimum": 0},
    )
    input_len: IntRange = option(
        IntRange(128, 1024),
        "Prompt tokens of models on GPUs (default: 128-1024).",
        group=_GROUP,
        type=_lengths("--input-len"),
        metavar="RANGE",
    )
    output_len: IntRange = option(
        IntRange(128, 128),
        "Output tokens of models on GPUs (default: 128).",
        group=_GROUP,
        type=_lengths("--output-len"),
        metavar="RANGE",
    )
    clip_s: IntRange = option(
        IntRange(5, 15),
        "Seconds of a clip for models on GPUs (default: 5-15).",
        group=_GROUP,
        flag="--clip-length",
        type=_lengths("--clip-length"),
        metavar="RANGE",
    )
    interference: str = option(
        PAIRS,
        "pairs: a matrix of all pairs; or a YAML file of an experiment: streams with a load each, and limits.",
        group=_GROUP,
        metavar="pairs|FILE",
    )
    interference_s: float = option(
        20.0,
        "Time for which each stream of an interference run sends.",
        group=_GROUP,
        flag="--interference-duration",
        limits={"exclusive_minimum": 0},
    )
    step_costs: str | None = option(
        None,
        "File of step costs by GPU type, for the simulated bound of an experiment: costs that this run measures of "
        "models alone are added to it.",
        group=_GROUP,
        metavar="FILE",
    )
    pair_connections: int = option(
        8, "Connections of the victim and of the aggressor of a pair.", group=_GROUP, limits={"minimum": 1}
    )
    p95_limits_ms: dict[str, float] = option(
        {},
        "Limits of the p95 in mixed levels, in ms; also first_audio and e2e.",
        group=_GROUP,
        flag="--p95-limits",
        type=parse_slo,
        metavar="ttft:MS,e2e:MS",
    )
    are_bundled: bool = False  # whether all models are bundled ones, whose requests are short on any device
    processes: int = 1
    seed: int = 0
    api_key: str | None = None
    timeouts: Timeouts = Timeouts()  # noqa: RUF009 - a NamedTuple cannot be changed

    def __post_init__(self) -> None:
        if not self.parts or not self.levels:
            raise ConfigError("--parts and --levels must each name at least one")
        if self.processes < 1:
            raise ConfigError(f"processes must be at least 1; got {self.processes}")
        if any(share < 0 for share in self.mix.values()) or not sum(self.mix.values()) > 0:
            raise ConfigError("--mix: shares must be 0 or more, and one of them more than 0")
        unknown = sorted(set(self.p95_limits_ms) - set(LIMITED_METRICS))
        if unknown:
            raise ConfigError(f"--p95-limits: unknown {unknown[0]}; there are {', '.join(LIMITED_METRICS)}")

    def plan(self, num_models: int, experiment_s: float | None) -> str:
        """Return what the run will send, and how long it takes. `experiment_s` is what an experiment sends, if any."""
        num_pairs = num_models * (num_models - 1)
        times_s = {
            "per-model": (num_models * len(self.levels), self.level_s),
            "mixed": (len(self.levels), self.level_s),
            "interference": (num_models + num_pairs, self.interference_s),
        }
        parts = [(part, *times_s[part]) for part in self.parts]
        texts = [f"{part}: {count} levels of {each_s:g} s" for part, count, each_s in parts]
        least_s = sum(count * each_s for _, count, each_s in parts)
        if "interference" in self.parts and experiment_s is not None:
            texts[self.parts.index("interference")] = f"interference: an experiment of {experiment_s:g} s"
            least_s += experiment_s - (num_models + num_pairs) * self.interference_s
        return (
            f"{num_models} models; {'; '.join(texts)}; {least_s:,.0f} s in all, and after each level up to "
            f"{self.drain_limit_s:g} s until its last answer (--drain-limit)"
        )

    @property
    def sizes(self) -> Sizes:
        """Return the sizes of the requests of this run."""
        return Sizes(input_len=self.input_len, output_len=self.output_len, clip_s=self.clip_s)

    @property
    def settings(self) -> dict[str, Any]:
        """Return the settings by name for published results, without the API key and the address."""
        fields = {name: value for name, value in asdict(self).items() if name not in ("api_key", "url", "are_bundled")}
        ranges = {name: list(getattr(self, name)) for name in ("input_len", "output_len", "clip_s")}
        return {**fields, **ranges, "timeouts": self.timeouts._asdict()}


def shares_of(models: Sequence[ServedModel], mix: Mapping[str, float]) -> list[float]:
    """Return the share of each model in a mixed level. The models of a task split the share of the task evenly.

    The shares add up to 1. The share of a task without a model goes to the other tasks. Raises ConfigError if no model
    has a share.
    """
    counts = {task: sum(model.task == task for model in models) for task in mix}
    weights = [mix.get(model.task, 0.0) / counts.get(model.task, 1) for model in models]
    if not sum(weights) > 0:
        raise ConfigError(f"--mix: no model has a share; the tasks are {', '.join({each.task for each in models})}")
    return [share / sum(weights) for share in weights]


def split_connections(total: int, shares: Sequence[float]) -> list[int]:
    """Return the number of connections per share: `total` split with the largest-remainder method.

    Each model gets at least one connection if there are enough connections.
    """
    has_share = [share > 0 for share in shares]
    min_count = 1 if total >= sum(has_share) else 0
    exact_counts = [share * total for share in shares]
    counts = [
        max(int(each), min_count) if is_wanted else 0 for each, is_wanted in zip(exact_counts, has_share, strict=True)
    ]
    while (missing := total - sum(counts)) != 0:
        # Who has lost the most gets the next one; who has gained the most gives one back.
        gaps = [each - count for each, count in zip(exact_counts, counts, strict=True)]
        if missing > 0:
            counts[max(range(len(counts)), key=lambda i: gaps[i] if has_share[i] else -total)] += 1
        else:
            counts[min(range(len(counts)), key=lambda i: gaps[i] if counts[i] > min_count else total)] -= 1
    return counts
