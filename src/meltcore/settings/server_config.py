"""Defines the settings of a server and its models. `option` makes a field a flag of `serve`."""

from dataclasses import dataclass, field
from typing import Literal

from meltcore.common.options import not_empty, option
from meltcore.settings.config import ENGINE_GROUP, EngineConfig, PriorityClass, SharingSection
from meltcore.settings.fleet_spec import (
    HTTP_GROUP,
    LIMITS_GROUP,
    KeySection,
    LimitsSection,
    ModelSection,
    ResidencySection,
    ServerSection,
    TimeoutsSection,
)
from meltcore.settings.routes_section import LanguagesSection, RoutesSection

_AT_LEAST_ONE = {"minimum": 1}


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Holds the settings of one model of a server: its engines, its names and its queue."""

    engine: EngineConfig
    served_model_name: tuple[str, ...] = option(
        (),
        "Names in the API (default: MODEL). The first stands in metrics and logs.",
        group=HTTP_GROUP,
        nargs="+",
        action="extend",
        type=not_empty,
        metavar="NAME",
    )
    data_parallel_size: int = option(
        1,
        "Replicas, each on GPUs of its own; when one dies, the others continue.",
        group=ENGINE_GROUP,
        short="-dp",
        limits=_AT_LEAST_ONE,
    )
    replica_gpus: tuple[
        tuple[int, ...], ...
    ] = ()  # of each replica, numbered among visible ones; empty: in their order
    replica_nodes: tuple[str, ...] = ()  # of a cluster, of each replica; its GPUs are numbered on its node
    limits: LimitsSection = field(default_factory=LimitsSection)  # with the bounds of its own queue
    generation_config: Literal["auto", "greedy"] = option(
        "greedy", "auto: take sampling defaults from the checkpoint's generation_config.json.", group=HTTP_GROUP
    )
    sleepable: bool = False  # its memory may be given to other models while they have requests
    priority_class: PriorityClass = option(
        "standard", "Class of requests that name none in the header X-Priority-Class.", group=LIMITS_GROUP
    )
    start_timeout_s: float | None = None  # of an engine, from its start to its first answer; None: no limit
    normalizer: Literal["itt", "original"] = option(
        "itt",
        "How texts of a translation model are prepared: as IndicTransToolkit does, or without two of its faults.",
        group=HTTP_GROUP,
    )

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names that requests may use. The first name is used in metrics and logs."""
        return self.served_model_name or (self.engine.model,)


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """The settings of a server: its models, and the sections of fleet.yaml that apply to all models."""

    models: tuple[ModelConfig, ...]
    upstream: dict[str, ModelSection] = field(default_factory=dict)  # after `models` in statistics
    order: tuple[str, ...] = ()  # first names of models, as fleet.yaml has them
    room_bytes: dict[str, int] = field(default_factory=dict)  # for models in turns, by device; empty: of the largest
    server: ServerSection = field(default_factory=ServerSection)
    keys: tuple[KeySection, ...] = ()
    limits: LimitsSection = field(default_factory=LimitsSection)
    timeouts: TimeoutsSection = field(default_factory=TimeoutsSection)
    languages: LanguagesSection = field(default_factory=LanguagesSection)
    routes: RoutesSection = field(default_factory=RoutesSection)
    residency: ResidencySection = field(default_factory=ResidencySection)
    sharing: SharingSection = field(default_factory=lambda: SharingSection(means="none"))  # of its engines
