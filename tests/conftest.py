"""Settings of every test run, made before JAX starts a backend."""

import contextlib
import hashlib
import os
import pathlib
import platform
import shutil

# JAX_PLATFORMS=cuda or =tpu runs the same tests on a device.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

ROOT = pathlib.Path(__file__).parents[1]
CACHE = ROOT / ".jax_cache"
CACHE_LIMIT_BYTES = 1 << 30


def _machine_id() -> str:
    """Names this kind of CPU: cached programs hold its instructions and must not run on another."""
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    kind = sorted({line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))})
    text = "\n".join([platform.machine(), platform.processor(), *kind])
    return hashlib.sha256(text.encode()).hexdigest()[:12]


# In the environment, so that scripts started by tests share it. A small function loads in a quarter of the time that it
# compiles in, so that nothing is too small to keep.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(CACHE / _machine_id()))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

import hypothesis  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402

from pallas_kernels.dispatch import IMPLEMENTATIONS, kernels  # noqa: E402

if os.environ["JAX_PLATFORMS"] == "cpu":
    # Eight devices for the sharding tests; measured to cost the others nothing. Not in the environment: a script that a
    # test starts sees the one device that its user would.
    jax.config.update("jax_num_cpu_devices", 8)
    # Kernels in interpret mode call back into Python, which computes on the same device: anything that the test has
    # queued there meanwhile would wait for the kernel, and the kernel for it.
    jax.config.update("jax_cpu_enable_async_dispatch", False)

# Compilation makes the first example slow, so that no deadline is meaningful.
hypothesis.settings.register_profile("default", deadline=None, max_examples=50)
hypothesis.settings.register_profile("ci", deadline=None, max_examples=50, derandomize=True, print_blob=True)
hypothesis.settings.register_profile("thorough", deadline=None, max_examples=1000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "default"))


def pytest_addoption(parser):
    parser.addoption(
        "--kernels",
        default="auto",
        choices=IMPLEMENTATIONS,
        help="implementation of the ops, see pallas_kernels/dispatch.py",
    )


def pytest_configure(config):
    kernels.set_global(config.getoption("--kernels"))


def pytest_sessionstart(session):
    """Starts afresh when the cache has grown past its limit; JAX's own limit needs a lock for every entry."""
    if hasattr(session.config, "workerinput") or not CACHE.is_dir():
        return
    with contextlib.suppress(FileNotFoundError):  # another session may be clearing it
        if sum(f.stat().st_size for f in CACHE.rglob("*")) > CACHE_LIMIT_BYTES:
            shutil.rmtree(CACHE, ignore_errors=True)


@pytest.fixture(autouse=True)
def _kernels(request):
    """A launch script that ran in this process has set the kernels that its own flag says."""
    kernels.set_global(request.config.getoption("--kernels"))


@pytest.fixture
def compilations():
    """The programs compiled, or fetched from the compile cache, while a test runs."""
    seen = []

    def listen(event: str, _duration: float, **_) -> None:
        if event.endswith("backend_compile_duration"):
            seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.fixture(scope="module", autouse=True)
def _free_compiled_programs():
    """Drops a module's programs at its end: one of a whole model takes hundreds of MB. The disk cache keeps them."""
    yield
    jax.clear_caches()
