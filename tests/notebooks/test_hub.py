"""The configuration of a class on one machine: what a learner runs no other user can read, or prepare."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
from jupyter_client import KernelManager
from jupyter_client.kernelspec import KernelSpec
from traitlets.config import Config
from traitlets.config.loader import KVCommandLineConfigLoader

CONFIGURATION = Path(__file__).parents[2] / "notebooks" / "instructor" / "jupyterhub_config.py"


def configured() -> Config:
    """What JupyterHub makes of the file."""
    config = Config()
    exec(compile(CONFIGURATION.read_text(), CONFIGURATION, "exec"), {"get_config": lambda: config})
    return config


def test_a_kernel_is_reached_by_files_of_its_owner_and_not_by_a_port() -> None:
    given = KVCommandLineConfigLoader(argv=list(configured().Spawner.args)).load_config()
    manager = KernelManager(config=given)
    argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    manager._kernel_spec = KernelSpec(argv=argv, display_name="this Python", language="python")
    manager.start_kernel()
    client = manager.client()
    try:
        client.start_channels()
        client.wait_for_ready(timeout=120)
        assert psutil.Process(manager.provisioner.pid).net_connections(kind="inet") == []
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def test_compiled_code_is_kept_where_only_the_learner_can_write() -> None:
    folder = configured().Spawner.environment["TORCHINDUCTOR_CACHE_DIR"](
        SimpleNamespace(user=SimpleNamespace(name="root"))
    )
    assert folder == str(Path("~root").expanduser() / ".cache/torchinductor")
