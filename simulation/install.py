"""The simulation's seams in the product: clocks, chance, threads, disks, sockets, vLLM, and torch's models.

Everything is replaced below or beside the code that is meant to be real, and before that code is imported, since clocks
are default arguments in many places. So a process that simulates does nothing else.
"""

import asyncio
import gc
import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import logging
import os
import secrets
import socket
import sys
import threading
import time
import types
import uuid
import warnings
from functools import lru_cache
from pathlib import Path
from typing import Any

from simulation.world.clock import World, active

_EPOCH = 1_700_000_000.0
_PRODUCT = ("learner", "generator", "env_service", "reward_service", "services.http.client", "services.http.waiting")
_PACKAGES = ("learner", "generator", "env_service", "reward_service", "services", "protocol")
_FOREIGN = ("torch", "torch.distributed", "aiohttp", "fastapi", "uvicorn", "zmq.asyncio", "tokenizers")
"""Packages that make subclasses of what is replaced below when they are imported."""

_HEAVY = ("deepspeed", "matplotlib", "peft", "transformers")
"""Packages that take seconds to import."""

_FIRST_LINES = (
    ("generator.serving", "Serving", "__init__", "serving_made"),
    ("generator.service", "", "_announcement", "announcement_made"),
    ("generator.weight_sync", "WeightSync", "join", "asked_to_join"),
    ("generator.weight_sync", "WeightSync", "prepare", "asked_to_prepare"),
    ("learner.weights.fleet", "FleetMembers", "__init__", "fleet_made"),
    ("learner.weights.fleet", "FleetMembers", "expel", "was_expelled"),
    ("learner.leases.intake", "Intake", "__init__", "intake_made"),
    ("services.run_lock", "RunLock", "__init__", "locked"),
    ("services.run_lock", "RunLock", "release", "unlocked"),
    ("learner.leases.incarnations", "Incarnations", "hear", "heard"),
    ("learner.leases.conversation", "EnvServiceConversation", "_on_message", "message_came"),
    ("learner.journal.checkpoints", "Checkpoints", "begin", "checkpoint_begun"),
    ("learner.journal.checkpoints", "Checkpoints", "_set_old_aside", "checkpoint_written"),
)
"""Module, class, function, and the method of FirstLines that is told of its calls."""

_REAL_MONOTONIC = time.monotonic
_REAL_TIME = time.time
_REAL_LOCALTIME = time.localtime
_REAL_TOKEN, _REAL_UUID = secrets.token_hex, uuid.uuid4
_done = False


def _monotonic() -> float:
    world = World.active
    return _REAL_MONOTONIC() if world is None else 1000.0 + world.now


def _time() -> float:
    world = World.active
    if world is None:
        return _REAL_TIME()
    here = _inside() if world.jumps else None
    return _EPOCH + world.now + (world.jumps.get(here.host, 0.0) if here is not None else 0.0)


def _localtime(seconds: float | None = None) -> time.struct_time:
    """Of files, too: what the real clock has stamped is as old as the world."""
    world = World.active
    return _REAL_LOCALTIME(seconds) if world is None else time.gmtime(_EPOCH + world.now)


def _token_hex(nbytes: int | None = None) -> str:
    return _REAL_TOKEN(nbytes) if World.active is None else World.active.hexadecimal(2 * (nbytes or 32))


def _uuid4() -> uuid.UUID:
    return _REAL_UUID() if World.active is None else uuid.UUID(hex=World.active.hexadecimal(32))


def install() -> None:
    """Takes hold; once in a process. Raises RuntimeError if the product was imported before."""
    global _done
    if _done:
        return
    early = [name for name in _PRODUCT if name in sys.modules]
    if early:
        raise RuntimeError(f"{early[0]} was imported before the simulation took hold of its clock: start it by itself")
    _done = True
    collected = gc.isenabled()
    gc.disable()  # a sixth of the time of so many imports, of which everything stays
    for name in _FOREIGN:
        importlib.import_module(name)
    _take_hold_of_the_runtime()
    _take_hold_of_heavy_packages()
    from simulation.actors import vllm_stub
    from simulation.world import disk

    disk.install()
    _take_hold_of_services()
    vllm_stub.install()
    _take_hold_of_the_product()
    gc.collect()
    gc.freeze()  # what is loaded now stays, and need not be looked through after every run
    if collected:
        gc.enable()


def _take_hold_of_the_runtime() -> None:
    time.monotonic = _monotonic
    time.perf_counter = _monotonic
    time.thread_time = _monotonic
    time.time = _time
    _replace(time, "localtime", _localtime)
    secrets.token_hex = _token_hex
    uuid.uuid4 = _uuid4
    warnings.simplefilter("ignore")
    sys.argv[:] = ["headway"]
    logging.raiseExceptions = False
    sys.unraisablehook = lambda _: None  # coroutines of dead processes protest when they are thrown away
    import queue

    from simulation.world import threads

    threading.Thread = threads.Thread  # type: ignore[misc]
    real_queue = queue.SimpleQueue
    _replace(queue, "SimpleQueue", lambda: real_queue() if World.active is None else threads.SimulatedQueue())
    real_event = threading.Event
    _replace(threading, "Event", lambda: real_event() if _inside() is None else threads.SimulatedEvent())
    real_lock = threading.Lock
    _replace(threading, "Lock", lambda: real_lock() if _inside() is None else threads.SimulatedLock())
    real_host, real_pid = socket.gethostname, os.getpid
    socket.gethostname = lambda: real_host() if (here := _inside()) is None else here.host
    os.getpid = lambda: real_pid() if (here := _inside()) is None else here.number
    _replace(asyncio, "run_coroutine_threadsafe", threads.run_coroutine_threadsafe)
    importlib.metadata.version = lru_cache(importlib.metadata.version)
    sys.set_asyncgen_hooks(firstiter=None, finalizer=_finalize)


class SeamGone(RuntimeError):
    """A place that the simulation replaces is not there any more, or is not used from where it is."""


_seams: list[tuple[Any, str, object]] = []
"""The owner and the name of what was replaced in the product, and what it was."""


def _put(owner: Any, name: str, stand_in: object) -> None:
    """Replaces an attribute of a module or class of the product. Raises SeamGone if there is none of this name."""
    if name not in vars(owner):
        raise SeamGone(f"{owner.__name__} has no {name} of its own: the simulation takes hold of something else now")
    _seams.append((owner, name, vars(owner)[name]))
    setattr(owner, name, stand_in)


def _check_seams() -> None:
    """Raises SeamGone if a module of the product still holds what was replaced, under a name of its own: it would
    call the real one.
    """
    product = [module for name, module in sys.modules.items() if name.partition(".")[0] in _PACKAGES]
    for owner, name, former in _seams:
        if not isinstance(owner, types.ModuleType) or not callable(former):
            continue
        for module in product:
            its_own = module in (owner, sys.modules.get(former.__module__))
            if not its_own and any(value is former for value in list(vars(module).values())):
                raise SeamGone(
                    f"{module.__name__} calls {owner.__name__}.{name} by a name of its own, past its stand-in"
                )


def _replace(module: types.ModuleType, name: str, stand_in: object) -> None:
    setattr(module, name, stand_in)


def _inside() -> Any:
    """The simulated process whose code runs."""
    world = World.active
    return world.current if world is not None and hasattr(world.current, "host") else None


def _finalize(agen: Any) -> None:
    world = World.active
    loop = getattr(world.current if world is not None else None, "loop", None)
    if loop is not None:
        loop._asyncgen_finalizer_hook(agen)


def _take_hold_of_heavy_packages() -> None:
    sys.meta_path.insert(0, _Hollow())


class _HollowMeta(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: None


class _HollowModule(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _HollowMeta(name, (), {})


class _Hollow(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Modules with any class that is asked for, in place of packages that the scripted trainer makes needless."""

    def find_spec(self, name: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
        """See importlib."""
        if name.partition(".")[0] not in _HEAVY:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """See importlib."""
        return _HollowModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing is in it."""


def _take_hold_of_services() -> None:
    from simulation.world import http, routes, zeromq

    sockets: Any = importlib.import_module("services.zmq.sockets")
    _put(sockets, "_open", zeromq.open_socket)
    _put(sockets, "_close", zeromq.close_socket)
    for watch in ("ListeningWatch", "ConnectingWatch", "InflowWatch"):
        _put(sockets, watch, zeromq.Watch)
    run_lock: Any = importlib.import_module("services.run_lock")
    _put(run_lock, "_BOOT_ID", Path("/no host of a simulation has one"))
    server: Any = importlib.import_module("services.http.server")
    _put(server, "Listener", http.FakeListener)
    _put(server, "serve_http", http.serve_http)
    application: Any = importlib.import_module("services.http.app")
    _put(application, "create_app", routes.create_app)
    load: Any = importlib.import_module("services.load")
    # What the real machine gives is another number each time, and a walk through all its processes.
    _put(load, "usage_of", lambda pid: (0.0, 0))
    _put(load, "proportional_memory_of", lambda pid: 0)
    _put(load, "GpuWatch", lambda: types.SimpleNamespace(look=lambda pid: ()))
    for bounded in ("services.cores", "services.memory"):
        _put(importlib.import_module(bounded), "enclosing_groups", lambda controller, process: [])
    client: Any = importlib.import_module("services.http.client")
    _put(client, "aiohttp", _Aiohttp("aiohttp"))


class _Aiohttp(types.ModuleType):
    """aiohttp with the simulation's sessions."""

    def __getattr__(self, name: str) -> object:
        import aiohttp

        from simulation.world import http

        own: dict[str, object] = {"ClientSession": http.StubClientSession, "TCPConnector": http.Connector}
        return own.get(name) or getattr(aiohttp, name)


def _take_hold_of_the_product() -> None:
    from simulation.actors import environment, trainer
    from simulation.world import collective

    plane: Any = importlib.import_module("learner.weights.process_group")
    _put(plane, "Meeting", collective.FakeMeeting)
    _put(plane, "BroadcastGroup", collective.FakeBroadcastGroup)
    calls: Any = importlib.import_module("generator.engine.engine")
    _put(calls, "MAX_POLL_S", 0.2)
    service: Any = importlib.import_module("learner.service")
    _put(service.LearnerRanks, "open_trainer", lambda self, **_: _opened(trainer, self._config).trainer)
    _put(service, "first_probe", lambda model, *, count: tuple(range(2, 2 + min(count, 8))))
    _put(service, "draw_curves", lambda *_, **__: None)
    _put(service, "sys", types.SimpleNamespace(argv=["learner"]))
    shown: Any = importlib.import_module("services.standard_output")
    nobody = types.SimpleNamespace(write=lambda text: None, flush=lambda: None)
    _put(shown, "sys", types.SimpleNamespace(stdout=nobody))
    monitor: Any = importlib.import_module("learner.reports.run_monitor")
    _put(monitor, "machine_cpu_s", lambda: None)
    online: Any = importlib.import_module("learner.online")
    _put(online, "sequences_of", _told(online.sequences_of))
    made_with: Any = importlib.import_module("services.config.made_with")
    host = socket.gethostname
    _put(made_with, "here", lambda: {"versions": {}, "host": {"name": host()}})  # alike on every machine
    _put(made_with, "_git_state", lambda: None)
    _put(made_with, "to_go_on", lambda: "learner --resume true")
    _take_hold_of_what_is_watched(service)
    catalog: Any = importlib.import_module("env_service.environments.catalog")
    _put(catalog, "build", lambda configs, **_: environment.environments(active().part(environment.EnvironmentScript)))
    _take_hold_of_tenants()
    importlib.import_module("env_service.app")
    importlib.import_module("generator.service")
    _check_seams()


def _take_hold_of_tenants() -> None:
    from simulation.actors.tenant_trainer import MarkedTrainer, TenantScript

    tinker: Any = importlib.import_module("learner.tinker")
    _put(tinker, "open_on_all", lambda *_, **__: MarkedTrainer(active().part(TenantScript)))
    log: Any = importlib.import_module("learner.tenants.operations").OperationLog
    opened = log.__init__
    _put(
        log,
        "__init__",
        lambda self, folder: opened(self, folder, segment_bytes=active().part(TenantScript).segment_bytes),
    )


def _take_hold_of_what_is_watched(service: Any) -> None:
    """Tells the watcher of a world, if it has one, of moments that no message shows."""
    from simulation.checking.first_lines import FirstLines
    from simulation.checking.invariants import Watcher

    def told_of(method: str, real: Any, *, who: type = Watcher) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = real(*args, **kwargs)
            world = World.active
            if world is not None and world.has(who):
                getattr(world.part(who), method)(result, args, kwargs)
            return result

        return call

    for module, owner, name, method in _FIRST_LINES:
        found: Any = importlib.import_module(module)
        found = getattr(found, owner) if owner else found
        _put(found, name, told_of(method, vars(found)[name], who=FirstLines))

    ledger: Any = importlib.import_module("learner.ledger").Ledger
    fleet: Any = importlib.import_module("learner.weights.fleet").FleetMembers
    guard: Any = importlib.import_module("learner.training.guard").Guard
    conversation: Any = importlib.import_module("learner.leases.conversation").EnvServiceConversation
    _put(ledger, "__init__", told_of("ledger_made", ledger.__init__))
    _put(guard, "__init__", told_of("guard_made", guard.__init__))
    _put(fleet, "expel", told_of("expelled", fleet.expel))
    _put(fleet, "lost", told_of("dropped", fleet.lost))
    _put(conversation, "_replace", told_of("replaced", conversation._replace))
    _put(ledger, "grant", told_of("granted", ledger.grant))
    granting: Any = importlib.import_module("learner.leases.granting").Granting
    _put(granting, "leases_for", told_of("leased", granting.leases_for))
    journal: Any = importlib.import_module("learner.journal.journal").Journal
    _put(journal, "sync", _told_what_is_durable(journal.sync))
    dead_letters: Any = importlib.import_module("learner.leases.dead_letters").DeadLetters
    _put(dead_letters, "append", _told_before_and_after(dead_letters.append))
    _put(granting, "accepted", _told_before_and_after(granting.accepted))
    _put(service, "recover", told_of("recovered", service.recover))
    _put(service, "open_run_folder", _asked_first(service.open_run_folder))


def _told_what_is_durable(real: Any) -> Any:
    """Tells the watcher which groups a sync has put on the disk: those that were there when it began."""
    from simulation.checking.invariants import Watcher

    def sync(journal: Any) -> None:
        world = World.active
        watcher = world.part(Watcher) if world is not None and world.has(Watcher) else None
        held = frozenset() if watcher is None else watcher.held()
        real(journal)
        if watcher is not None:
            watcher.synced(held)

    return sync


def _told_before_and_after(real: Any) -> Any:
    """Tells the watcher of the lease that a method has in hand; a learner that is struck there is not done with it."""
    from simulation.checking.invariants import Watcher

    def call(own: Any, outcome: Any, **kwargs: Any) -> None:
        world = World.active
        watcher = world.part(Watcher) if world is not None and world.has(Watcher) else None
        if watcher is not None:
            watcher.has_in_hand(outcome.lease_id)
        real(own, outcome, **kwargs)
        if watcher is not None:
            watcher.has_in_hand(None)

    return call


def _asked_first(real: Any) -> Any:
    """A learner that has its folder begins with it only if the watcher lets it."""
    from simulation.checking.invariants import Watcher

    def call(*args: Any, **kwargs: Any) -> Any:
        world = World.active
        if world is not None and world.has(Watcher):
            world.part(Watcher).may_begin(None, args, kwargs)
        return real(*args, **kwargs)

    return call


def _opened(trainer: Any, config: Any) -> Any:
    world = active()
    assert world.current is not None
    opened = trainer.ScriptedTrainer(algorithm=config.algo)
    world.part(trainer.Trainers).by_process[world.current.name] = opened
    return trainer.OpenTrainer(opened)


def _told(sequences_of: Any) -> Any:
    """Tells the scripted trainer which groups are in the batch that comes next."""

    def told(groups: Any, *, max_lag: int, **kwargs: Any) -> Any:
        from simulation.actors.trainer import Trainers
        from simulation.checking.invariants import Watcher

        world = active()
        assert world.current is not None
        groups = tuple(groups)
        bound = world.part(Watcher).bound(world.current) if world.has(Watcher) else max_lag
        before = kwargs["before"].groups if "before" in kwargs else 0
        world.part(Trainers).by_process[world.current.name].take(groups, bound=min(bound, max_lag), before=before)
        return sequences_of(groups, max_lag=max_lag, **kwargs)

    return told
