"""Worker processes from a script, and meshes of devices that are not there.

Workers are forked from a server process that has done nothing but import this package, which takes
seconds (where there is no such server, by `spawn`). Each imports the script (as ``__mp_main__``, so that
what stands under ``if __name__ == "__main__":`` does not run), takes over the environment variables that
its parent has at the time of the call, and talks to the parent through a pipe of its own. What is sent is pickled by value, tensors too, because a tensor in shared memory would
be gone when the worker that made it ends before the parent has looked.
"""

from __future__ import annotations

import logging
import math
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .._torch_launch import FakeStore
from ..errors import AutopACError, ConfigError, UsageError

log = logging.getLogger("autop_ac")

_ADVICE = (
    "put it at the top level of a module or of a script whose call of launch stands under "
    '`if __name__ == "__main__":`'
)


class WorkerError(AutopACError, RuntimeError):
    """A worker process of `launch` failed; raised from the worker's own exception where it pickles.

    Attributes:
        rank: which worker.
    """

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


@dataclass(frozen=True, slots=True)
class _Failure:
    """What a worker says when `fn` raised: when, in words, and the exception if it pickles."""

    time_s: float
    text: str
    error: BaseException | None = None


def launch(fn: Callable[..., Any], nproc: int, *args: Any, timeout_s: float = 600) -> list[Any]:
    """Run ``fn(*args)`` in `nproc` processes that share a gloo process group.

    Under torchrun, where this process already is one of the workers, `fn` runs here, in the process
    group of torchrun's workers, however many these are.

    Args:
        fn: a function at the top level of a module, or of the script itself where the call stands
            under ``if __name__ == "__main__":``. In a notebook, import it from a module.
        nproc: how many processes.
        args: handed to each worker; they are pickled.
        timeout_s: seconds for the whole run, and for each collective.

    Returns:
        What each rank returned, in order of rank; under torchrun this rank's alone, ``[result]``.

    Raises:
        ConfigError: `nproc` or `timeout_s` is not positive.
        UsageError: `fn` or `args` cannot be sent, or the script has no guard.
        WorkerError: a worker failed or ran out of time; the others are stopped.
    """
    if isinstance(nproc, bool) or not isinstance(nproc, int) or nproc < 1:
        raise ConfigError(f"nproc={nproc!r}: give a positive int")
    if not 0 < timeout_s < math.inf:
        raise ConfigError(f"timeout_s={timeout_s!r}: give a positive number of seconds")
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        if int(os.environ["WORLD_SIZE"]) != nproc:
            log.info("torchrun started %s workers, not %d", os.environ["WORLD_SIZE"], nproc)
        return [_under_torchrun(fn, args, timeout_s)]
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise UsageError(
            "launch was called while a worker imports the script: put the call under "
            '`if __name__ == "__main__":`'
        )
    call = _pickled(fn, args)
    context = _context()
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        pipes = [context.Pipe(duplex=False) for _ in range(nproc)]
        workers = [
            context.Process(
                target=_worker,
                args=(call, dict(os.environ), store, rank, nproc, timeout_s, pipes[rank][1]),
                daemon=True,
            )
            for rank in range(nproc)
        ]
        try:
            for worker, (_, sender) in zip(workers, pipes, strict=True):
                worker.start()
                sender.close()  # so that the end of the worker is the end of the pipe
            return _collect(workers, [receiver for receiver, _ in pipes], timeout_s)
        finally:
            _stop([w for w in workers if w.pid is not None])
            for receiver, _ in pipes:
                receiver.close()


def _context() -> Any:
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["autop_ac"])
    return context


def _pickled(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """The call as bytes, refused here where a worker could not read it."""
    name = getattr(fn, "__qualname__", repr(fn))
    script = getattr(sys.modules["__main__"], "__file__", None)
    from_script = script is not None and os.path.exists(script)
    if getattr(fn, "__module__", "") == "__main__" and not from_script:
        raise UsageError(
            f"launch cannot send {name}, which is defined in a notebook or typed at a prompt, "
            "to new processes: write it to a module and import it from there"
        )
    try:
        return pickle.dumps((fn, args))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise UsageError(
            f"launch cannot send {name} and its arguments to new processes ({error}): if it is the "
            f"function, {_ADVICE}"
        ) from error


def _collect(
    workers: Sequence[Any], receivers: Sequence[Connection], timeout_s: float
) -> list[Any]:
    """Results by rank; of several failures the first in time is the cause of the others."""
    results: dict[int, Any] = {}
    failures: dict[int, _Failure] = {}
    deadline = time.monotonic() + timeout_s
    ranks = {receiver: rank for rank, receiver in enumerate(receivers)}
    while len(results) < len(workers) and not failures:
        waiting = [r for r in receivers if ranks[r] not in results]
        ready = wait(waiting, max(0.0, deadline - time.monotonic()))
        if not ready:
            missing = min(ranks[r] for r in waiting)
            raise WorkerError(
                f"ranks {sorted(ranks[r] for r in waiting)} of {len(workers)} did not end within "
                f"timeout_s={timeout_s}",
                missing,
            )
        for receiver in waiting:
            if receiver not in ready:
                continue
            rank = ranks[receiver]
            try:
                answer = pickle.loads(receiver.recv_bytes())
            except EOFError:
                workers[rank].join(5)
                code = workers[rank].exitcode
                answer = _Failure(
                    0.0, f"it ended with exit code {code} and no result; if it did not start, {_ADVICE}"
                )  # fmt: skip
            if isinstance(answer, _Failure):
                failures[rank] = answer
            else:
                (results[rank],) = answer
    if failures:
        rank = min(failures, key=lambda r: failures[r].time_s)
        failure = failures[rank]
        raise WorkerError(
            f"rank {rank} of {len(workers)} failed:\n{failure.text}", rank
        ) from failure.error
    return [results[rank] for rank in range(len(workers))]


def _stop(workers: Sequence[Any], grace_s: float = 5.0) -> None:
    """End what still runs: those that answered have `grace_s`, the others are terminated."""
    failing = sys.exc_info()[0] is not None
    for worker in workers:
        worker.join(0 if failing else grace_s)
        if worker.is_alive():
            worker.terminate()
            worker.join(grace_s)
        if worker.is_alive():
            worker.kill()
            worker.join()


def _worker(
    call: bytes,
    environment: dict[str, str],
    store: str,
    rank: int,
    nproc: int,
    timeout_s: float,
    sender: Connection,
) -> None:
    """The main function of a worker process: answers once, and before it leaves the group."""
    os.environ.clear()
    os.environ.update(environment)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // nproc))
    try:
        fn, args = pickle.loads(call)
        files = dist.FileStore(store, nproc)  # type: ignore[attr-defined]
        dist.init_process_group(
            "gloo",
            store=files,
            rank=rank,
            world_size=nproc,
            timeout=timedelta(seconds=timeout_s),
        )
        dist.barrier()  # a rank that is done early must not close on one that is still connecting
        answer = pickle.dumps((fn(*args),))
    except BaseException as error:  # noqa: B036 the parent raises it
        answer = _failed(error)
    sender.send_bytes(answer)
    sender.close()
    if dist.is_initialized():
        dist.destroy_process_group()


def _failed(error: BaseException) -> bytes:
    now, text = time.time(), traceback.format_exc()
    try:
        whole = pickle.dumps(_Failure(now, text, error))
        pickle.loads(whole)  # some exceptions pickle and cannot be made again
        return whole
    except Exception:
        return pickle.dumps(_Failure(now, text))


def _under_torchrun(fn: Callable[..., Any], args: tuple[Any, ...], timeout_s: float) -> Any:
    if dist.is_initialized():
        return fn(*args)
    if torch.cuda.is_available() and dist.is_nccl_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        backend = "cpu:gloo,cuda:nccl"
    else:
        backend = "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
    try:
        return fn(*args)
    finally:
        dist.destroy_process_group()


def fake_mesh(
    shape: int | Sequence[int],
    axis_names: Sequence[str] | None = None,
    device_type: str = "cpu",
) -> DeviceMesh:
    """A mesh of devices that are not there, to plan for a cluster on one machine.

    This process is rank 0 of a fake process group, whose collectives do nothing. A later call replaces
    the group by one for its own shape; meshes of earlier calls can be read, not used.

    Args:
        shape: devices along each axis; an int for one axis.
        axis_names: one name per axis, ``"axis0"``, ``"axis1"``, ... where None.
        device_type: where fake tensors are; "cpu" serves for any device that `configure_device` describes.

    Raises:
        ConfigError: a size is not positive, or there is not one name for each axis.
        UsageError: a real process group is up in this process.
    """
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    if not sizes or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in sizes):
        raise ConfigError(f"shape={shape!r}: give a positive int for each axis")
    names = tuple(axis_names or (f"axis{i}" for i in range(len(sizes))))
    if len(names) != len(sizes) or len(set(names)) != len(names):
        raise ConfigError(f"axis_names={names} for shape {sizes}: give each axis a name of its own")
    if dist.is_initialized():
        if dist.get_backend() != "fake":
            raise UsageError(
                f"a {dist.get_backend()} process group is up: make a mesh of it with "
                "init_device_mesh, or call fake_mesh in a process without one"
            )
        dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=math.prod(sizes))
    return init_device_mesh(device_type, sizes, mesh_dim_names=names)
