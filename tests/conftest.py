"""Settings of every test: one thread, Hypothesis profiles, and a fake process group."""

import os

# before torch is imported; worker processes inherit it
os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

torch.set_num_threads(1)

# tracing takes a varying time: no deadlines
_common = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
hypothesis.settings.register_profile("ci", derandomize=True, database=None, **_common)
hypothesis.settings.register_profile("dev", max_examples=30, **_common)
hypothesis.settings.register_profile("nightly", max_examples=2000, **_common)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_collection_modifyitems(items):
    """The longest first, so that no worker is left with them at the end."""
    items.sort(key=lambda item: item.path.name not in ("test_training.py", "test_tutorials.py"))
    if not torch.cuda.is_available():
        reason = "needs a CUDA device: run `pytest -m gpu` where there is one"
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Nothing else is skipped: a test that skips itself on this machine would check nothing unseen."""
    report = yield
    if report.skipped and not hasattr(report, "wasxfail") and not item.get_closest_marker("gpu"):
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} was skipped, and only tests marked gpu may be"
    return report


@pytest.fixture(autouse=True)
def no_process_group_left_behind():
    """What a test leaves of a fake process group is taken down, so that tests do not meet."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def fake_pg():
    """``fake_pg(8)`` starts a fake process group of eight ranks and gives a 1-D mesh over it.

    It takes a shape too: ``fake_pg((2, 4), ("dp", "tp"))``.
    """
    from autop_ac.runtime.launch import fake_mesh

    def start(shape, axis_names=None):
        return fake_mesh((shape,) if isinstance(shape, int) else shape, axis_names)

    return start
