"""Loads samples of a data set in worker processes, one step before they are needed.

A thread of this process waits for each worker, so a worker that is killed is noticed and replaced at once,
and the sample that it loaded is known.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import select
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import torch

from optimus.engine.batch_plan import SampleSizes
from optimus.errors import OptimusError, UserError
from optimus.models.sample import ItemKeys, Sample
from optimus.protocols import Dataset

MAX_RESTARTS = 2  # of a worker while it loads one sample

Request = tuple[int, ItemKeys | None]  # number of a sample, and its items that are needed; None: all


class PrefetchedDataset:
    """A data set whose samples are loaded by worker processes; implements `protocols.Dataset`.

    `start` says which samples come next. Workers end with this process; modules in `preload` are imported
    once for all of them.
    """

    def __init__(self, dataset: Dataset, *, workers: int, preload: Sequence[str] = ()) -> None:
        self._dataset, self._preload = dataset, (__name__, *preload)
        self._local = threading.local()
        self._workers: list[_Worker] = []
        self._threads = ThreadPoolExecutor(workers, initializer=self._begin_thread)
        self._loading: dict[Request, Future[bytes]] = {}
        self.waited_s = 0.0  # for samples, since the beginning

    @property
    def restarts(self) -> int:
        """How many workers were killed, since the beginning."""
        return sum(worker.restarts for worker in self._workers)

    def sizes(self, number: int) -> SampleSizes:
        return self._dataset.sizes(number)

    def labels(self, number: int) -> int:
        return self._dataset.labels(number)

    def start(self, requests: Iterable[Request]) -> None:
        """Starts to load these samples, and forgets others that were not asked for."""
        wanted = dict.fromkeys(requests)
        for request in [request for request in self._loading if request not in wanted]:
            self._loading.pop(request).cancel()
        for request in wanted:
            self._submit(request)

    def wait(self) -> None:
        """Waits until all samples that were started are loaded."""
        wait(self._loading.values())

    def sample(self, number: int, items: ItemKeys | None = None) -> Sample:
        """Returns a sample, waiting for it if it is not loaded yet."""
        begin, loading = time.perf_counter(), self._submit((number, items))
        del self._loading[number, items]
        content = loading.result()
        self.waited_s += time.perf_counter() - begin
        result = pickle.loads(content)
        if isinstance(result, OptimusError):
            raise result
        assert isinstance(result, Sample)
        return result

    def close(self) -> None:
        """Ends the workers."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            worker.close()

    def _submit(self, request: Request) -> Future[bytes]:
        if request not in self._loading:
            self._loading[request] = self._threads.submit(self._load, request)
        return self._loading[request]

    # ------------------------------------------------------------------------ in a thread

    def _begin_thread(self) -> None:
        self._local.worker = _Worker(self._dataset, self._preload)
        self._workers.append(self._local.worker)

    def _load(self, request: Request) -> bytes:
        worker: _Worker = self._local.worker
        return worker.load(request)


class _Worker:
    """A process that loads samples one after another; it is started again when it was killed."""

    def __init__(self, dataset: Dataset, preload: Sequence[str]) -> None:
        self._dataset, self._preload = dataset, preload
        self._running: tuple[BaseProcess, Connection] | None = None
        self.restarts, self._is_closed = 0, False

    def load(self, request: Request) -> bytes:
        """Returns a sample, or the error that it leads to, pickled."""
        for _ in range(1 + MAX_RESTARTS):
            if self._is_closed:
                break
            _, connection = self._running or self._start()
            try:
                connection.send(request)
                return connection.recv_bytes()
            except (EOFError, OSError):
                self.end()
                self.restarts += 1
        raise UserError(
            field=f"sample {request[0]}",
            problem=f"ended {1 + MAX_RESTARTS} worker processes, which were killed or ran out of memory",
            hint="leave the sample out, give the host more memory, or use fewer data.workers",
        )

    def close(self) -> None:
        """Ends the process for good."""
        self._is_closed = True
        self.end()

    def end(self) -> None:
        if self._running is not None:
            process, connection = self._running
            connection.close()
            process.terminate()
        self._running = None

    def _start(self) -> tuple[BaseProcess, Connection]:
        # Forks of a process that has nothing but imports: tokenizers and torch have threads here.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(self._preload))
        connection, other = context.Pipe()
        process = context.Process(target=_serve, args=(other, self._dataset), daemon=True)
        process.start()
        other.close()
        self._running = process, connection
        return self._running


def _serve(connection: Connection, dataset: Dataset) -> None:
    """Loads samples in a worker until the other side of the connection ends.

    They are sent as bytes: tensors in shared memory would be lost with the worker.
    """
    threading.Thread(target=_end_with_rank, args=(connection,), daemon=True).start()
    torch.set_num_threads(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        while True:
            number, items = connection.recv()
            try:
                result: Sample | OptimusError = dataset.sample(number, items)
            except OptimusError as error:
                result = error
            except Exception as error:
                result = UserError(
                    field=f"sample {number}",
                    problem=f"cannot be loaded: {type(error).__name__}: {error}",
                    hint="look at its line and files; every rank must be able to read them",
                )
            connection.send_bytes(pickle.dumps(result))
    except (EOFError, OSError):
        return


def _end_with_rank(connection: Connection) -> None:
    """Ends this process when the rank closes its side of the connection or dies, also within a sample."""
    hang_up = select.poll()
    hang_up.register(connection.fileno(), 0)  # nothing but its end
    hang_up.poll()
    os._exit(0)
