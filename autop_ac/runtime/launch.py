"""Worker processes from a script, and meshes of devices that are not there."""

from __future__ import annotations

import os
import tempfile
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .._torch_launch import FakeStore
from ..errors import AutopACError, UsageError


class WorkerError(AutopACError, RuntimeError):
    """A worker process of `launch` failed; the message holds its rank and traceback."""


def launch(fn: Callable[..., Any], nproc: int, *args: Any, timeout_s: float = 600) -> list[Any]:
    """Run ``fn(*args)`` in `nproc` processes that share a gloo process group.

    Under torchrun, where this process already is one of the workers, `fn` runs here.

    Args:
        fn: a function of an importable module or of the script itself, guarded by
            ``if __name__ == "__main__":``.
        nproc: how many processes.
        args: handed to each worker; they must pickle.
        timeout_s: seconds for the process group and for the whole run.

    Returns:
        What each rank returned, in order of rank; under torchrun only this rank's.

    Raises:
        WorkerError: a worker failed; the others are stopped.
    """
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return [_in_group(fn, args, None, 0, 1, timeout_s)]
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        queue = context.SimpleQueue()
        workers = [
            context.Process(
                target=_worker, args=(fn, args, store, rank, nproc, timeout_s, queue), daemon=True
            )
            for rank in range(nproc)
        ]
        for worker in workers:
            worker.start()
        try:
            return _collect(workers, queue, timeout_s)
        finally:
            for worker in workers:
                if worker.is_alive():
                    worker.terminate()
                worker.join()


def _collect(workers: Sequence[Any], queue: Any, timeout_s: float) -> list[Any]:
    import time

    results: dict[int, Any] = {}
    deadline = time.monotonic() + timeout_s
    while len(results) < len(workers):
        if not queue.empty():
            rank, value, failure = queue.get()
            if failure is not None:
                raise WorkerError(f"rank {rank} of {len(workers)} failed:\n{failure}")
            results[rank] = value
            continue
        for rank, worker in enumerate(workers):
            if rank not in results and worker.exitcode not in (None, 0) and queue.empty():
                raise WorkerError(f"rank {rank} ended with exit code {worker.exitcode}")
        if time.monotonic() > deadline:
            raise WorkerError(f"workers did not end within {timeout_s} s; done: {sorted(results)}")
        time.sleep(0.01)
    return [results[rank] for rank in range(len(workers))]


def _worker(
    fn: Callable[..., Any],
    args: Any,
    store: str,
    rank: int,
    nproc: int,
    timeout_s: float,
    queue: Any,
) -> None:
    try:
        torch.set_num_threads(1)
        queue.put((rank, _in_group(fn, args, store, rank, nproc, timeout_s), None))
    except BaseException:
        queue.put((rank, None, traceback.format_exc()))
        raise SystemExit(0) from None


def _in_group(
    fn: Callable[..., Any], args: Any, store: str | None, rank: int, nproc: int, timeout_s: float
) -> Any:
    own = not dist.is_initialized()
    if own:
        timeout = timedelta(seconds=timeout_s)
        if store is None:
            backend = "nccl" if torch.cuda.is_available() else "gloo"
            if backend == "nccl":
                torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
            dist.init_process_group(backend, timeout=timeout)
        else:
            files = dist.FileStore(store, nproc)
            dist.init_process_group(
                "gloo", store=files, rank=rank, world_size=nproc, timeout=timeout
            )
    try:
        return fn(*args)
    finally:
        if own:
            dist.destroy_process_group()


def fake_mesh(
    shape: Sequence[int], axis_names: Sequence[str] | None = None, device_type: str = "cpu"
) -> DeviceMesh:
    """A mesh of devices that are not there, to plan for a cluster on one machine.

    Args:
        shape: devices along each axis.  axis_names: one name per axis.
        device_type: the device planned for.

    Raises:
        UsageError: a real process group is up in this process.
    """
    if dist.is_initialized():
        if dist.get_backend() != "fake":
            raise UsageError(
                f"a {dist.get_backend()} process group is up: make a mesh of it with "
                "init_device_mesh, or call fake_mesh in a process without one"
            )
        dist.destroy_process_group()
    size = 1
    for n in shape:
        size *= n
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    names = tuple(axis_names or (f"axis{i}" for i in range(len(shape))))
    return init_device_mesh(device_type, tuple(shape), mesh_dim_names=names)
