"""The models of a server: which of them are loaded, and the requests that wait for one.

The first model is loaded at the start, each other one for its first request, on a thread of its own. If weights and
contexts would exceed the memory of all models, the models that were not used for the longest time are unloaded first,
which saves their contexts. A model with requests in progress is not unloaded: further requests for it wait until it is
loaded again, and the load that needs its memory waits for the requests in progress. So every request has its turn.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from kvpage_server.system.durable import remove

from ..generation.templates import Renderer
from ..memory.limits import MemoryLimits, as_gb
from ..model import unusable
from ..startup import CANNOT_OPEN, Engine, Options
from ..tiers.cold import path_of
from .openai.errors import ApiError, shortened
from .openai.prompts import Prompts
from .worker import EngineThread

log = logging.getLogger(__name__)

TOO_LARGE_SECONDS = 60  # after which a client may ask again for a model that does not fit into the memory


class ServedModel:
    """A model of a server, loaded or not. The event loop uses it."""

    def __init__(self, name: str, options: Options, limits: MemoryLimits) -> None:
        """Serve the model of `options` under `name`. Raises UnknownModelError if there is none."""
        self.name = name
        self.options = options
        self.weights = options.weights_on_disk()
        self.contexts = limits.contexts(self.weights, options.memory, options.models)
        self.requests = 0  # in progress
        self.used = 0.0  # time.monotonic() of the last request
        self.leaving = False  # it is unloaded when the requests in progress are answered
        self.waiting: list[tuple[asyncio.Future[None], ExitStack]] = []  # requests until it is loaded
        self.worker: EngineThread | None = None
        self._engine: Engine | None = None
        self._prompts: Prompts | None = None
        self._idle = asyncio.Event()  # set while no request is in progress
        self._idle.set()
        self.closing: asyncio.Task[int] | None = None  # saves its contexts

    @property
    def nbytes(self) -> int:
        """Bytes of its weights, and of all contexts that it may have in memory."""
        return self.weights + self.contexts

    @property
    def loaded(self) -> bool:
        """Whether it takes requests."""
        return self._engine is not None and not self.leaving

    @property
    def failed(self) -> bool:
        """Whether the thread of its engine has ended by itself."""
        return self.loaded and not (self.worker and self.worker.running)

    @property
    def engine(self) -> Engine:
        """The engine, while a request is in progress. Only the worker's thread may use its arrays. Raises ApiError
        (503) if it has failed.
        """
        if not self._engine or not self.worker or not self.worker.running:
            raise ApiError(503, "the engine is out of order", code="not_ready", retry_after=1)
        return self._engine

    @property
    def prompts(self) -> Prompts:
        """The encoder of its prompts, while a request is in progress. Raises as `engine`."""
        assert self.engine
        assert self._prompts
        return self._prompts

    @contextmanager
    def in_use(self, *, counts: bool = True) -> Iterator[None]:
        """Keep the model loaded within a `with` block. If it `counts`, other models are unloaded before this one."""
        self.requests += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.requests -= 1
            if counts:
                self.used = time.monotonic()
            if not self.requests:
                self._idle.set()

    async def load(self, renderer: Renderer, report: Callable[[str], object], *, sanitize: bool) -> None:
        """Load it. Raises the exceptions of Engine.open."""
        self.worker = EngineThread(lambda: Engine.open(self.options, report), self.name)
        self.worker.start()
        try:
            engine = await self.worker.loaded()
            with unusable(f"the tokenizer of {self.options.model} cannot be used"):
                prompts = await asyncio.to_thread(Prompts, engine.tokenizer, engine.spec, renderer, sanitize=sanitize)
                await prompts.prepare()
        except Exception:
            if self.worker.running:
                await self.worker.stop()
            self.worker = None
            raise
        self.weights, self.contexts = engine.weights, engine.pool.total_bytes
        self._engine, self._prompts = engine, prompts

    async def unload(self) -> int:
        """Wait for the requests in progress, save its contexts, and free its memory. Return the number of contexts that
        could not be saved.
        """
        self.leaving = True
        await self._idle.wait()
        return await self.close()

    async def close(self) -> int:
        """End its engine at once, which saves its contexts. Return the number of contexts that could not be saved."""
        if not self._engine:
            return 0
        self.leaving = True
        self.closing = self.closing or asyncio.create_task(self._close())
        return await asyncio.shield(self.closing)

    async def _close(self) -> int:
        worker = self.worker
        assert worker
        await worker.stop()
        self.worker = self._engine = self._prompts = self.closing = None
        self.leaving = False
        return worker.unsaved


class Models:
    """The models of a server, by name. `unsaved` counts contexts that could not be saved when a model was unloaded."""

    def __init__(
        self, options: Mapping[str, Options], limits: MemoryLimits, report: Callable[[str], object], *, sanitize: bool
    ) -> None:
        """Serve models under the names in `options`. Raises UnknownModelError if one of them does not exist. `report`
        is called with a text before each long step of a load.
        """
        self.by_name = {name: ServedModel(name, one, limits) for name, one in options.items()}
        self.unsaved = 0
        self._budget = limits.mlx - limits.cache  # of all models
        self._report = report
        self._sanitize = sanitize
        self._changes = asyncio.Lock()  # one model is loaded or unloaded at a time, in the order of requests
        self._loads: set[asyncio.Task[None]] = set()
        self._renderer: Renderer | None = None
        self._closing = False

    @property
    def first(self) -> ServedModel:
        """The model that is loaded at the start."""
        return next(iter(self.by_name.values()))

    @property
    def loaded(self) -> list[ServedModel]:
        """The loaded models whose engines have not failed."""
        return [model for model in self.by_name.values() if model.loaded and not model.failed]

    @property
    def workers(self) -> list[EngineThread]:
        """The threads of all engines, also while they load their models, or close."""
        return [model.worker for model in self.by_name.values() if model.worker]

    def named(self, name: str) -> ServedModel:
        """Return a model. Raises ApiError (404) for an unknown name."""
        if found := self.by_name.get(name):
            return found
        *others, last = map(repr, self.by_name)
        served = f"{', '.join(others)} and {last} are" if others else f"{last} is"
        raise ApiError(404, f"model: {shortened(name)} is not served here, {served}", "model", "model_not_found")

    async def start(self) -> None:
        """Load the first model. Raises the exceptions of Engine.open, and ApiError if it does not fit."""
        self._renderer = Renderer()  # started first, because its process is ready before the model
        async with self._changes:
            await self._load(self.first)

    async def wait_for(self, model: ServedModel, ends: ExitStack) -> None:
        """Wait until a model is loaded again, and keep it so until `ends` is closed. Raises ApiError (503) if it cannot
        be loaded.
        """
        waiting = asyncio.get_running_loop().create_future(), ends
        model.waiting.append(waiting)
        if len(model.waiting) == 1:
            load = asyncio.create_task(self._serve_waiting(model))
            self._loads.add(load)
            load.add_done_callback(self._loads.discard)
        try:
            await waiting[0]
        finally:
            if waiting in model.waiting:  # the client has disconnected
                model.waiting.remove(waiting)

    def stop_loading(self) -> None:
        """Load no more models. Requests that wait for one fail."""
        self._closing = True
        for model in self.by_name.values():
            _end_waiting(model, _stopped())

    async def close(self) -> None:
        """End all engines, which saves their contexts."""
        self.unsaved += sum(await asyncio.gather(*(model.close() for model in self.by_name.values())))

    def held(self, ends: ExitStack) -> list[ServedModel]:
        """Return the loaded models, and keep them so until `ends` is closed, which is no use of them."""
        for model in (found := self.loaded):
            ends.enter_context(model.in_use(counts=False))
        return found

    async def settled(self, ends: ExitStack) -> list[ServedModel]:
        """Return the loaded models as `held` does, when all contexts of others are saved."""
        await self._saved()
        return self.held(ends)

    def delete_files(self, agent_id: str) -> bool:
        """Delete an agent's files in the directories of models that are not loaded. Return whether there were any.

        Raises OSError if one cannot be deleted.
        """
        directories = [model.options.cold for model in self.by_name.values() if not model.loaded]
        removed = [remove(path_of(directory, agent_id)) for directory in directories if directory]
        return any(removed)

    async def _saved(self) -> None:
        """Wait until all contexts of models that are being unloaded are saved."""
        while saving := [model.closing for model in self.by_name.values() if model.closing]:
            await asyncio.wait(saving)

    async def _serve_waiting(self, model: ServedModel) -> None:
        """Load a model, and let the requests that wait for it continue."""
        async with self._changes:
            try:
                if model.waiting and not model.loaded:
                    await self._load(model)
            except ApiError as error:
                return _end_waiting(model, error)
            except Exception as error:
                expected = isinstance(error, CANNOT_OPEN)
                log.error("the model %s cannot be loaded: %s", model.name, error, exc_info=not expected)
                reason = str(error) if expected else "its log says why"
                message = f"model: {model.name!r} cannot be loaded: {reason}"
                return _end_waiting(model, ApiError(503, message, "model", "model_unavailable"))
            for wait, ends in model.waiting:
                if not wait.done():
                    ends.enter_context(model.in_use())
                    wait.set_result(None)
            return model.waiting.clear()

    async def _load(self, model: ServedModel) -> None:
        """Load a model, after others are unloaded if it needs their memory. Raises ApiError (503) if it never fits, or
        if the server is being stopped, and the exceptions of Engine.open.
        """
        if len(self.by_name) > 1 and model.nbytes > self._budget:
            need = f"{as_gb(model.nbytes)} ({as_gb(model.weights)} of weights, {as_gb(model.contexts)} of contexts)"
            message = f"model: {model.name!r} needs {need}, and all models together have {as_gb(self._budget)}"
            raise ApiError(503, message, "model", "model_too_large", TOO_LARGE_SECONDS)
        await self._unload_others(model)
        if self._closing:
            raise _stopped()
        assert self._renderer
        await model.load(self._renderer, self._report, sanitize=self._sanitize)
        await self._unload_others(model)  # weights can be larger than their files, such as those of FP8

    async def _unload_others(self, model: ServedModel) -> None:
        """Unload other models until there is room for `model`: idle ones first, and the least recently used first."""
        while others := [other for other in self.loaded if other is not model]:
            if model.nbytes + sum(other.nbytes for other in others) <= self._budget:
                return
            other = min(others, key=lambda one: (one.requests > 0, one.used))
            self._report(f"unloading {other.name}, because {model.name} needs its memory")
            self.unsaved += await other.unload()


def _end_waiting(model: ServedModel, error: ApiError) -> None:
    """Fail the requests that wait for a model."""
    for wait, _ in model.waiting:
        if not wait.done():
            wait.set_exception(replace(error))
    model.waiting.clear()


def _stopped() -> ApiError:
    return ApiError(503, "the engine is being stopped", code="not_ready", retry_after=1)
