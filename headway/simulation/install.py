"""Where the simulation takes hold of the product: clocks, chance, threads, disks, sockets, vLLM, and torch's models.

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
from typing import Any

from headway.simulation.world.clock import World, active

_EPOCH = 1_700_000_000.0
_PRODUCT = ("learner", "generator", "env_service", "reward_service", "services.http.client", "services.http.waiting")
_FOREIGN = ("torch", "torch.distributed", "aiohttp", "fastapi", "uvicorn", "zmq.asyncio", "tokenizers")
"""Packages that make subclasses of what is replaced below when they are imported."""

_HEAVY = ("deepspeed", "matplotlib", "peft", "transformers")
"""Packages that take seconds to import."""

_REAL_MONOTONIC = time.monotonic
_REAL_TIME = time.time
_REAL_LOCALTIME = time.localtime
_REAL_TOKEN, _REAL_UUID = secrets.token_hex, uuid.uuid4
_done = False


def real_seconds() -> float:
    """A clock that the simulation does not move."""
    return _REAL_MONOTONIC()


def _monotonic() -> float:
    world = World.active
    return _REAL_MONOTONIC() if world is None else 1000.0 + world.now


def _time() -> float:
    world = World.active
    return _REAL_TIME() if world is None else _EPOCH + world.now


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
    for name in _FOREIGN:
        importlib.import_module(name)
    _take_hold_of_the_runtime()
    _take_hold_of_heavy_packages()
    from headway.simulation.actors import vllm_stub
    from headway.simulation.world import disk

    disk.install()
    _take_hold_of_services()
    vllm_stub.install()
    _take_hold_of_the_product()
    gc.collect()
    gc.freeze()  # what is loaded now stays, and need not be looked through after every run


def _take_hold_of_the_runtime() -> None:
    time.monotonic = _monotonic
    time.perf_counter = _monotonic
    time.time = _time
    _replace(time, "localtime", _localtime)
    secrets.token_hex = _token_hex
    uuid.uuid4 = _uuid4
    warnings.simplefilter("ignore")
    sys.argv[:] = ["headway"]
    logging.raiseExceptions = False
    sys.unraisablehook = lambda _: None  # coroutines of dead processes protest when they are thrown away
    import queue

    from headway.simulation.world import threads

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
    from headway.simulation.world import http, routes, zeromq

    sockets: Any = importlib.import_module("services.zmq.sockets")
    sockets._open, sockets._close = zeromq.open_socket, zeromq.close_socket
    sockets.ListeningWatch = sockets.ConnectingWatch = sockets.InflowWatch = zeromq.Watch
    server: Any = importlib.import_module("services.http.server")
    server.Listener, server.serve_http = http.FakeListener, http.serve_http
    application: Any = importlib.import_module("services.http.app")
    application.create_app = routes.create_app
    client: Any = importlib.import_module("services.http.client")
    client.aiohttp = _Aiohttp("aiohttp")


class _Aiohttp(types.ModuleType):
    """aiohttp with the simulation's sessions."""

    def __getattr__(self, name: str) -> object:
        import aiohttp

        from headway.simulation.world import http

        own: dict[str, object] = {"ClientSession": http.Session, "TCPConnector": http.Connector}
        return own.get(name) or getattr(aiohttp, name)


def _take_hold_of_the_product() -> None:
    from headway.simulation.actors import cluster, trainer
    from headway.simulation.world import collective

    plane: Any = importlib.import_module("learner.weights.process_group")
    plane.Meeting, plane.BroadcastGroup = collective.FakeMeeting, collective.FakeBroadcastGroup
    calls: Any = importlib.import_module("generator.engine.engine")
    calls.POLL_MOST_S = 0.2
    service: Any = importlib.import_module("learner.service")
    if hasattr(service, "LearnerRanks"):
        ranks: Any = service.LearnerRanks
        ranks.open_trainer = lambda self, **_: _opened(trainer, self._config).trainer
    else:  # as it was before a learner's ranks had a class of their own
        service.open_trainer = lambda config, **_: _opened(trainer, config)
    service.first_probe = lambda model, *, count: tuple(range(2, 2 + min(count, 8)))
    service.draw_curves = lambda *_, **__: None
    service.sys = types.SimpleNamespace(argv=["learner"], stdout=types.SimpleNamespace(write=lambda text: None))
    online: Any = importlib.import_module("learner.online")
    online.sequences_of = _told(online.sequences_of)
    made_with: Any = importlib.import_module("services.config.made_with")
    made_with.here = lambda: {"versions": {}, "host": {"name": socket.gethostname()}}  # alike on every machine
    made_with._git_state = lambda: None
    made_with.to_go_on = lambda: "learner --resume true"
    _take_hold_of_what_is_watched(service)
    catalog: Any = importlib.import_module("env_service.environments.catalog")
    catalog.build = lambda configs, **_: cluster.environments(active().part(cluster.EnvironmentScript))
    importlib.import_module("env_service.app")
    importlib.import_module("generator.service")


def _take_hold_of_what_is_watched(service: Any) -> None:
    """Tells the watcher of a world, if it has one, of moments that no message shows."""
    from headway.simulation.checking.invariants import Watcher

    def told_of(method: str, real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = real(*args, **kwargs)
            world = World.active
            if world is not None and world.has(Watcher):
                getattr(world.part(Watcher), method)(result, args, kwargs)
            return result

        return call

    ledger: Any = importlib.import_module("learner.ledger").Ledger
    fleet: Any = importlib.import_module("learner.weights.fleet").Fleet
    ledger.__init__ = told_of("ledger_made", ledger.__init__)
    fleet.expel = told_of("expelled", fleet.expel)
    fleet.lost = told_of("dropped", fleet.lost)
    service.recover = told_of("recovered", service.recover)
    service.open_run_folder = _asked_first(service.open_run_folder)


def _asked_first(real: Any) -> Any:
    """A learner that has its folder begins with it only if the watcher lets it."""
    from headway.simulation.checking.invariants import Watcher

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
    """Tells the scripted trainer which leases are in the batch that comes next."""

    def told(groups: Any, **kwargs: Any) -> Any:
        from headway.simulation.actors.trainer import Trainers

        world = active()
        assert world.current is not None
        world.part(Trainers).by_process[world.current.name].coming = tuple(group.lease_id for group in groups)
        return sequences_of(groups, **kwargs)

    return told
