"""Supervises a server: binds the port, starts and watches processes, passes connections on, and drains.

The supervisor serves no requests: engines and API servers are processes of their own. `meltcore serve` is a fleet of
one model that ends with its engines. In a fleet of `meltcore up`, models fail and come back by themselves.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from meltcore.common.errors import ConfigError, MeltcoreError
from meltcore.common.host_memory import use_one_arena
from meltcore.common.tasks import Task
from meltcore.fleet.admin.admin import AdminServer
from meltcore.fleet.admin.operations import FleetOperations, check_startable
from meltcore.fleet.plan.first_fit import Place
from meltcore.fleet.plan.placement import PlacedFleet
from meltcore.fleet.plan.planned import FleetPlanner, no_planner
from meltcore.fleet.plan.running_fleet import Running
from meltcore.fleet.processes.engine_process import ENGINE_COMMAND
from meltcore.fleet.processes.stuck_watch import StuckWatch, engine_problem
from meltcore.fleet.run.console import (
    LoadingProgress,
    print_examples,
    print_line,
    print_listening,
    print_ready,
    print_substitutes,
)
from meltcore.fleet.run.engines import LaunchSettings, LocalLauncher, MakeLauncher, place_replicas
from meltcore.fleet.run.logs import LOG_LIMIT_BYTES, keep_small, new_log_folder
from meltcore.fleet.run.replica import ReplicaState
from meltcore.fleet.run.restart_policy import NeverRestart, RestartAfterPause, RestartPolicy
from meltcore.fleet.run.served_model import ServedModel, find_on_thread
from meltcore.fleet.run.start_gate import StartGate
from meltcore.fleet.run.supervised_model import ServerContext, wait_while
from meltcore.fleet.run.upstream_model import UpstreamModel
from meltcore.fleet.run.worker_pool import WorkerPool, worker_count
from meltcore.fleet.swap.turns import CPU, Turns, device_bytes
from meltcore.protocol.channel import EndRequests
from meltcore.protocol.shell import ForgetClient
from meltcore.protocol.sockets import SocketFolder
from meltcore.serve.http.http_server import tune_gc
from meltcore.serve.http.listener import Acceptor, bind, raise_file_limit
from meltcore.serve.requests.log import Log
from meltcore.serve.requests.metrics import Metrics
from meltcore.serve.requests.stats import ServerStats
from meltcore.settings.fleet_spec import FleetSpec

ERROR_DELIVERY_S = 1.0  # the death of the last engine is reported to requests and at /health for this long
SAME_SIGNAL_S = 0.25  # `timeout` and process managers signal a process and its group: one intention, two signals
PROGRESS_S = 0.2
CANCEL_LIMIT_S = 2.0  # of loading at a signal
EXIT_FAILED, EXIT_FORCED = 1, 130


@dataclass(frozen=True, kw_only=True)
class FleetOptions:
    """The options in which servers of `meltcore up` and `meltcore serve` differ. The defaults are for `meltcore up`."""

    command: str = "up"  # as which it prints lines
    policy: RestartPolicy = field(default_factory=RestartAfterPause)
    log_folder: Path | None = None  # with a folder of logs per port and a file per engine; None: our standard error
    planner: Callable[[], FleetPlanner] = no_planner  # of the changed fleet.yaml of a reload
    admin_port: int | None = None  # on 127.0.0.1; None: the admin socket alone
    server_log: Path | None = None  # the file that has our output, where we may empty it
    log_limit_bytes: int = LOG_LIMIT_BYTES  # of each of these files; one that has more begins anew
    launcher: MakeLauncher = LocalLauncher  # of its engines


SERVE = FleetOptions(command="serve", policy=NeverRestart())


def serve(
    fleet: PlacedFleet,
    *,
    engine_command: Sequence[str] = ENGINE_COMMAND,
    record: Callable[[FleetSpec, int, Path], None] = lambda _spec, _port, _sockets: None,
    options: FleetOptions = SERVE,
) -> int:
    """Run a server until a signal or a failure. Return the exit status.

    Raises ConfigError if the address is in use, or if a checkpoint or an engine fails that the policy requires.

    Args:
        fleet: the models of the server, with the outcome of a plan.
        engine_command: command line that starts an engine.
        record: stores the models, the port and the folder of the sockets, again after a reload. Raises ConfigError.
        options: what differs between `meltcore up` and `meltcore serve`.
    """
    fleet = msgspec.structs.replace(fleet, spec=check_startable(fleet.spec))
    config = fleet.spec
    for name in config.engines:
        place_replicas(fleet, name)
    use_one_arena()
    listener = bind(config.server.host, config.server.port)
    port = int(listener.getsockname()[1])
    admin = None if options.admin_port is None else bind("127.0.0.1", options.admin_port)
    if options.log_folder is not None:
        options = replace(options, log_folder=new_log_folder(options.log_folder, port))
    raise_file_limit()
    folder = SocketFolder("server")

    def announce() -> None:
        record(config, port, folder.path)
        print_listening(config.server.url(port))
        print_substitutes(config.languages.substitute_lists)

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_supervise(fleet, engine_command, folder, listener, options, admin, announce, record))
    finally:
        folder.remove()


async def _supervise(
    fleet: PlacedFleet,
    engine_command: Sequence[str],
    folder: SocketFolder,
    listener: socket.socket,
    options: FleetOptions,
    admin: socket.socket | None,
    announce: Callable[[], None],
    record: Callable[[FleetSpec, int, Path], None],
) -> int:
    return await Supervisor(fleet, engine_command, folder, options, record).run(listener, admin, announce)


class Supervisor:
    """Runs a server once, from the bound socket to the exit status."""

    def __init__(
        self,
        fleet: PlacedFleet,
        engine_command: Sequence[str],
        folder: SocketFolder,
        options: FleetOptions,
        record: Callable[[FleetSpec, int, Path], None],
    ) -> None:
        """Create the parts of the server. `record` stores the models, the port and the folder of the sockets."""
        config = fleet.spec
        num_processes = 1 + worker_count(config)
        self.fleet = fleet
        self.port = config.server.port
        self.models: dict[int, ServedModel | UpstreamModel] = {}
        self._folder = folder
        self._options, self._record = options, record
        self._stats = stats = ServerStats((), keys=len(config.keys), num_processes=num_processes)
        self._log = Log(config.server.log_format, stats)
        self._pool = WorkerPool(
            config,
            stats,
            folder.path,
            policy=options.policy,
            report=self._report,
            on_lost=self._on_worker_lost,
            on_unreadable=self._on_unreadable,
        )
        settings = LaunchSettings(
            command=engine_command,
            sockets=folder.path,
            client_count=num_processes,
            fleet=lambda: self.fleet,
            cpu_engines=lambda node: sum(place == Place(node, ()) for place in self._places().values()),
            on_moved=lambda: self.turns.update_devices(),
            held_places=lambda: self._places(without=("pending", "failed")),
            sharing=config.sharing,
        )
        self._launcher = options.launcher(settings, self._report)
        self._parts = ServerContext(
            pool=self._pool,
            gate=StartGate(),
            log=self._log,
            report=self._report,
            sockets=folder.path,
            next_engine=itertools.count().__next__,
            launcher=self._launcher,
            policy=options.policy,
            timeouts=config.timeouts,
            log_folder=options.log_folder,
        )
        self._numbers = itertools.count()
        self._watches: dict[int, asyncio.Task[None]] = {}
        self.turns = Turns(config.residency, config.timeouts, fleet.room_bytes)
        self._stop = asyncio.Event()
        self._stopped_s: float | None = None  # when the first signal came

    async def run(
        self, listener: socket.socket, admin_listener: socket.socket | None, announce: Callable[[], None]
    ) -> int:
        """Load the models, serve, and drain. Return the exit status. Raises MeltcoreError if loading fails.

        `announce` is called as soon as commands such as `ps` get answers.
        """
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, self._on_signal)
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup ignores it
            loop.add_signal_handler(signal.SIGHUP, self._on_sighup)
        acceptor = Acceptor(listener, self._pool.assign, self._on_exhausted)
        self.port = int(listener.getsockname()[1])
        rotation = asyncio.create_task(_rotate_logs(self._options))
        metrics = Metrics(self._stats, lambda: {model.name: model.stats for model in self.models.values()})
        operations = FleetOperations(self, self._options.planner)
        try:
            async with AdminServer(operations, metrics, self._folder.path, admin_listener):
                announce()
                return await self._load_and_serve()
        finally:
            await self.turns.stop()
            rotation.cancel()
            for watch in self._watches.values():
                watch.cancel()
            await asyncio.gather(*(model.stop() for model in self.models.values()))
            await self._launcher.stop()
            acceptor.close()
            await self._pool.stop()
            await asyncio.to_thread(self._log.close)

    # --- loading

    async def _load_and_serve(self) -> int:
        if not await self._options.policy.start(self.load_all, self.start_each):
            return 0
        stop = asyncio.create_task(self._stop.wait())
        all_ended = [model.all_ended for model in self.models.values()]
        engines_ended = asyncio.create_task(self._options.policy.wait_ended(all_ended))
        pool_failed = self._pool.failed
        end_futures: set[asyncio.Future[Any]] = {stop, engines_ended, pool_failed}
        await asyncio.wait(end_futures, return_when=asyncio.FIRST_COMPLETED)
        if pool_failed.done():
            self._report(pool_failed.result())
        if not engines_ended.done():
            await self._drain(engines_ended)
        if engines_ended.done():
            await asyncio.sleep(ERROR_DELIVERY_S)
            return EXIT_FAILED
        engines_ended.cancel()
        return EXIT_FAILED if pool_failed.done() else 0

    async def start_each(self) -> bool:
        """Start API servers, engines and servers of commands. Return False if a signal arrives before the first engine.

        Each model becomes ready independently. Raises ConfigError if the cluster cannot be reached.
        """
        starting, stop = asyncio.create_task(self._start_servers()), asyncio.create_task(self._stop.wait())
        await asyncio.wait({starting, stop}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            await asyncio.wait({starting}, timeout=CANCEL_LIMIT_S)
            return False
        starting.result()
        # Engines with a budget first, together: one without takes all that is free of its GPU. Other servers last.
        for name in sorted(self.fleet.spec.models, key=self._start_order):
            await self.add_fleet_model(name)
        self.turns.start()
        return True

    async def _start_servers(self) -> None:
        await self._launcher.connect()
        await self._pool.start()

    def _start_order(self, name: str) -> int:
        model = self.fleet.spec.models[name]
        return 2 if model.kind != "engine" else 1 if model.memory is None else 0

    async def read_running(self, checkpoints: Sequence[str]) -> Running:
        """Return this fleet with the place of each engine, and the nodes of its cluster as they are now.

        Each node lists which of `checkpoints` (paths and hub ids) it cannot load. Raises ConfigError if the cluster
        cannot be read.
        """
        return Running(self.fleet, self._places(), await self._launcher.read_nodes(checkpoints))

    def _places(self, without: Collection[ReplicaState] = ()) -> dict[tuple[str, int], Place]:
        """Return the places of engines with a memory budget, by model and replica.

        A place is the planned place, or a place that the cluster has chosen later. Replicas in the states `without` are
        left out, so that their places are free for other engines.
        """
        places = {(name, at): place for name, of in self.fleet.places.items() for at, place in enumerate(of)}
        for model in self.models.values():
            is_leaving = model.status == "draining"  # its successor is where the plan says
            for replica in model.replicas if isinstance(model, ServedModel) and not is_leaving else ():
                if places.pop(key := (model.name, replica.index), None) and replica.state not in without:
                    places[key] = Place(replica.node, replica.gpus)
        return places

    async def add_fleet_model(self, name: str) -> ServedModel | UpstreamModel:
        """Add a model to the fleet and begin to load it. Return the model.

        Its task `loading` is done when the model is ready or has failed.
        """
        model = self._add_model(name, None)
        self.turns.add(model)
        model.loading = asyncio.create_task(self._load_model(model))
        return model

    def forget_model(self, model: ServedModel | UpstreamModel) -> None:
        """Remove a model whose engines have ended."""
        if (watch := self._watches.pop(model.number, None)) is not None:
            watch.cancel()
        self._pool.remove_model(model.number)
        self._stats.remove_model(model.number)
        del self.models[model.number]

    def change_fleet(self, fleet: PlacedFleet) -> None:
        """Use the models and routes of another fleet. The caller adds and removes models."""
        self.fleet = fleet
        self.turns.change_config(fleet.spec.residency, fleet.room_bytes)
        self._pool.change_routes(fleet.spec)
        try:
            self._record(fleet.spec, self.port, self._folder.path)
        except ConfigError as error:  # of a full disk: the models have changed
            self._report(str(error))

    def broadcast(self, message: EndRequests) -> None:
        """Send a message about a model to all API servers."""
        self._pool.broadcast(message)

    async def _load_model(self, model: ServedModel | UpstreamModel) -> None:
        try:
            await model.prepare()
        except ConfigError as error:
            model.fail(str(error))
            return
        await self._wait_for_budgets(model)
        await model.load_or_fail()
        if isinstance(model, ServedModel):
            print_ready([model], self._stats.api_servers)

    async def _wait_for_budgets(self, model: ServedModel | UpstreamModel) -> None:
        """Let an engine that takes all free memory of its GPUs wait until the models added before it begin to load."""
        gpus = {device for device, size in device_bytes(model).items() if size is None and device != CPU}
        for other in list(self.models.values()):
            if other.number < model.number and not gpus.isdisjoint(device_bytes(other)):
                await other.prepared.wait()

    def _add_model(self, name: str, task: Task | None) -> ServedModel | UpstreamModel:
        """Add a model. `task` is None for upstream servers, and for a model whose task is found later."""
        number, config = next(self._numbers), self.fleet.spec.models[name]
        stats = self._stats.add_model(number, config.replicas)
        if config.kind != "engine":
            upstream = self.models[number] = UpstreamModel(number, name, config, stats, self._parts)
            return upstream
        replicas = place_replicas(self.fleet, name, self._options.log_folder)
        model = self.models[number] = ServedModel(number, name, config, task, replicas, stats, self._parts)
        problem = partial(engine_problem, stats, profiles=self.fleet.spec.server.profiling)
        watch = StuckWatch(lambda: [replica.process for replica in model.replicas], problem)
        self._watches[number] = asyncio.create_task(watch.run())
        return model

    async def load_all(self) -> bool:
        """Load all models and show the progress. Return False if a signal arrives meanwhile.

        Raises MeltcoreError if a model cannot serve.
        """
        progress, stop = LoadingProgress(), asyncio.create_task(self._stop.wait())
        loading = asyncio.create_task(self._load())
        while not loading.done() and not stop.done():
            progress.show(next((model.reason for model in self.models.values()), "loading: starting"))
            await asyncio.wait({loading, stop}, timeout=PROGRESS_S, return_when=asyncio.FIRST_COMPLETED)
        progress.clear()
        if not loading.done():
            for model in self.models.values():
                model.drain("the server is going down")
            loading.cancel()
            await asyncio.wait({loading}, timeout=CANCEL_LIMIT_S)
            return False
        try:
            loading.result()
        except MeltcoreError:
            for model in self.models.values():
                model.set_status("dead", "the model could not be loaded")
            raise
        own = [model for model in self.models.values() if isinstance(model, ServedModel)]
        print_ready(own, self._stats.api_servers)
        print_examples(self.fleet.spec, self.port, own)
        tune_gc()
        return True

    async def _load(self) -> None:
        """Start API servers and engines. Raises MeltcoreError if one of them cannot serve."""
        spec = self.fleet.spec
        tasks = {name: await find_on_thread(model) for name, model in spec.engines.items()}
        await asyncio.gather(self._launcher.connect(), self._pool.start())
        for name in spec.models:
            self._add_model(name, tasks.get(name))
        for model in self.models.values():
            model.may_run.set()  # also one that could take turns with others
        loading = asyncio.gather(*(model.load() for model in self.models.values()))
        try:
            pending_futures: set[asyncio.Future[Any]] = {loading, self._pool.failed}
            await asyncio.wait(pending_futures, return_when=asyncio.FIRST_COMPLETED)
            if self._pool.failed.done():
                raise ConfigError(self._pool.failed.result())
            loading.result()
        except BaseException:
            loading.cancel()
            await asyncio.gather(loading, return_exceptions=True)  # left unread, its error prints a traceback
            raise

    # --- ending

    async def _drain(self, engines_ended: asyncio.Task[None]) -> None:
        """Refuse new requests, wait for open requests within the limit, then end the rest."""
        limit_s = self.fleet.spec.timeouts.drain_s
        for model in self.models.values():
            model.drain("the server is going down and takes no new requests")
        self._log.write("draining", open_requests=self._stats.open_requests(), limit_s=limit_s)
        if not await wait_while(lambda: self._stats.open_requests() and not engines_ended.done(), limit_s):
            key = "--drain-timeout, or timeouts.drain_s of a fleet"
            error = f"the server is going down, and {limit_s:g} s ({key}) were not enough for this answer"
            for number in self.models:
                self._pool.broadcast(EndRequests(number, error, 503, "server_stopping"))
            await wait_while(self._stats.open_requests, ERROR_DELIVERY_S)

    # --- events

    def _report(self, text: str) -> None:
        print_line(f"meltcore {self._options.command}: {text}", sys.stderr)

    def _on_unreadable(self, model: int, replica: int, reason: str) -> None:
        self.models[model].replicas[replica].process.fail(reason)

    def _on_worker_lost(self, worker: int, exit_reason: str, open_requests: int) -> None:
        for model in self.models.values():
            for replica in model.replicas if isinstance(model, ServedModel) else ():
                if replica.process.loaded is not None:
                    replica.process.send(ForgetClient(worker))
        self._stats.add("api_server_deaths")
        self._log.write("api_server_died", api_server=worker, how=exit_reason, open_requests=open_requests)
        self._report(f"API server process {worker} has died: {exit_reason}; {open_requests} open requests failed")

    def _on_exhausted(self, error: OSError) -> None:
        max_open_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._log.write_rate_limited("accept_failed", error=error.strerror, file_limit=max_open_files)

    def _on_sighup(self) -> None:
        """Handle SIGHUP like a first SIGTERM.

        Kernel and shell may each send one, so a second SIGHUP does not force the end.
        """
        if self._stopped_s is None:
            self._on_signal()

    def _on_signal(self) -> None:
        """Start to drain at the first signal.

        At a second signal, if it is not part of the first, end everything immediately.
        """
        now_s = asyncio.get_running_loop().time()
        if self._stopped_s is None:
            self._stopped_s = now_s
            self._stop.set()
        if now_s - self._stopped_s < SAME_SIGNAL_S:
            return
        for model in self.models.values():
            model.kill()
        self._pool.kill()
        self._folder.remove()
        os._exit(EXIT_FORCED)


async def _rotate_logs(options: FleetOptions) -> None:
    def files() -> list[Path]:
        own = [] if options.server_log is None else [options.server_log]
        return own + ([] if options.log_folder is None else list(options.log_folder.glob("*.log")))

    await keep_small(files, options.log_limit_bytes)
