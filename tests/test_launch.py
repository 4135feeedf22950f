"""`launch` gives back what workers return and raise; `fake_mesh` plans without devices."""

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from autop_ac import ConfigError, UsageError, fake_mesh, launch
from autop_ac.runtime.launch import WorkerError

ROOT = Path(__file__).parent.parent


def rank_and_sum(scale):
    total = torch.full((2,), float(dist.get_rank() + 1)) * scale
    dist.all_reduce(total)
    return dist.get_rank(), total


def fail_on_one():
    if dist.get_rank() == 1:
        raise KeyError("the cause")
    dist.barrier()


def end_on_one():
    if dist.get_rank() == 1:
        os._exit(3)
    dist.barrier()


def sleep_long():
    time.sleep(600)


def give_unpicklable():
    return lambda: None


def run_script(tmp_path, text, *command, **environment):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(text))
    return subprocess.run(
        [sys.executable, *command, str(script)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
    )


def test_results_come_in_order_of_rank_and_tensors_outlive_their_worker():
    results = launch(rank_and_sum, 2, 10.0)
    assert [rank for rank, _ in results] == [0, 1]
    for _, total in results:
        assert total.tolist() == [30.0, 30.0]
    assert not dist.is_initialized()


def test_a_workers_exception_is_raised_with_its_rank_and_traceback():
    start = time.monotonic()
    with pytest.raises(WorkerError, match="rank 1 of 2 failed") as caught:
        launch(fail_on_one, 2)
    assert caught.value.rank == 1
    assert isinstance(caught.value.__cause__, KeyError)
    assert "fail_on_one" in str(caught.value) and "the cause" in str(caught.value)
    assert time.monotonic() - start < 60, "rank 0 waits in a barrier and must be stopped"


def test_a_worker_that_dies_is_named_with_its_exit_code():
    with pytest.raises(WorkerError, match="rank 1 of 2 failed:\nit ended with exit code 3"):
        launch(end_on_one, 2)


def test_a_run_past_its_time_is_stopped():
    start = time.monotonic()
    with pytest.raises(WorkerError, match=r"ranks \[0\] of 1 did not end within timeout_s=8"):
        launch(sleep_long, 1, timeout_s=8)
    assert time.monotonic() - start < 60


def test_a_result_that_does_not_pickle_is_an_error_of_its_rank():
    with pytest.raises(WorkerError, match=r"rank 0 of 1 failed:[\s\S]*give_unpicklable"):
        launch(give_unpicklable, 1)


def test_what_cannot_be_sent_is_refused_before_anything_starts():
    with pytest.raises(UsageError, match="top level of a module"):
        launch(lambda: 1, 2)
    for nproc in (0, -1, True, 1.5):
        with pytest.raises(ConfigError, match="give a positive int"):
            launch(rank_and_sum, nproc)
    with pytest.raises(ConfigError, match="seconds"):
        launch(rank_and_sum, 1, timeout_s=0)


GUARDED = """
    import torch.distributed as dist
    from autop_ac import launch

    def rank(scale):
        return dist.get_rank() * scale, dist.get_world_size()

    if __name__ == "__main__":
        print(launch(rank, 2, 5))
"""


def test_a_function_of_a_script_runs(tmp_path):
    done = run_script(tmp_path, GUARDED)
    assert done.stdout.strip() == "[(0, 2), (5, 2)]", done.stderr


def test_under_torchrun_the_function_runs_in_this_process(tmp_path):
    here = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    done = run_script(tmp_path, GUARDED, **here)
    assert done.stdout.strip() == "[(0, 1)]", done.stderr


def test_a_script_without_a_guard_is_told_so(tmp_path):
    text = GUARDED.replace('if __name__ == "__main__":', "if True:")
    done = run_script(tmp_path, text)
    assert done.returncode != 0
    assert "while a worker imports the script" in done.stderr
    assert "WorkerError" in done.stderr


def test_a_function_of_a_notebook_is_told_to_move():
    text = "from autop_ac import launch\ndef fn(): pass\nlaunch(fn, 2)\n"
    done = subprocess.run(
        [sys.executable, "-"],
        input=text,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert "UsageError" in done.stderr
    assert "write it to a module and import it from there" in done.stderr


def test_fake_meshes_of_any_shape_follow_one_another():
    mesh = fake_mesh((32, 8), ("dp", "tp"))
    assert (tuple(mesh.shape), mesh.mesh_dim_names) == ((32, 8), ("dp", "tp"))
    assert dist.get_world_size() == 256
    assert fake_mesh(4).size() == 4
    assert tuple(fake_mesh((2, 2, 2)).shape) == (2, 2, 2)
    assert fake_mesh((4, 2), device_type="cuda").device_type == "cuda"


@pytest.mark.parametrize("shape", [(), 0, (2, 0), (2.0,), True])
def test_a_fake_mesh_without_a_shape_is_refused(shape):
    with pytest.raises(ConfigError, match="positive int for each axis"):
        fake_mesh(shape)


@pytest.mark.parametrize("names", [("a",), ("a", "a"), ("a", "b", "c")])
def test_a_fake_mesh_needs_a_name_for_each_axis(names):
    with pytest.raises(ConfigError, match="a name of its own"):
        fake_mesh((2, 2), names)


def test_a_fake_mesh_does_not_replace_a_real_process_group(tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    with pytest.raises(UsageError, match="a gloo process group is up"):
        fake_mesh((2,))
    assert dist.get_backend() == "gloo"
