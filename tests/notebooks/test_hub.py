"""The configuration of a class on one machine: what a learner runs no other user can read, or prepare."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
from jupyter_client import KernelManager
from jupyter_client.kernelspec import KernelSpec
from traitlets.config import Application, Config

CONFIGURATION = Path(__file__).parents[2] / "notebooks" / "instructor" / "jupyterhub_config.py"


def configured() -> Config:
    """What JupyterHub makes of the file."""
    config = Config()
    exec(compile(CONFIGURATION.read_text(), CONFIGURATION, "exec"), {"get_config": lambda: config})
    return config


def test_a_kernel_is_reached_by_files_of_its_owner_and_not_by_a_port() -> None:
    server = Application()
    server.parse_command_line(configured().Spawner.args)
    manager = KernelManager(config=server.config)
    argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    manager._kernel_spec = KernelSpec(argv=argv, display_name="this Python", language="python")
    manager.start_kernel()
    client = manager.client()
    try:
        client.start_channels()
        client.wait_for_ready(timeout=120)
        assert client.get_connection_info()["transport"] == "ipc"
        listening = psutil.Process(manager.provisioner.pid).net_connections(kind="inet")
        assert len(listening) <= 1  # ipykernel's, into which its children print: it gives nothing, and wants a secret
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def test_compiled_code_is_kept_where_only_the_learner_can_write() -> None:
    folder = configured().Spawner.environment["TORCHINDUCTOR_CACHE_DIR"](
        SimpleNamespace(user=SimpleNamespace(name="root"))
    )
    assert folder == str(Path("~root").expanduser() / ".cache/torchinductor")
