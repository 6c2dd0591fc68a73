"""The course for a class on one machine, with JupyterHub: a JupyterLab for each learner from one shared environment.

    sudo /path/to/jupyterhub -f notebooks/instructor/jupyterhub_config.py

The Littlest JupyterHub reads it from ``/opt/tljh/config/jupyterhub_config.d/``. See one_machine.md for what to install,
and for why the limits are what they are.
"""

import subprocess
from pathlib import Path

COURSE = Path("/srv/fsdp_sim")  # readable by everyone, writable by nobody but root
HOME_COPY = "fsdp"  # where each learner's own notebooks are, below their home


def copy_notebooks(spawner):
    """Give a learner the notebooks that they do not have yet. As themselves: root writes nothing into a home."""
    name, given = spawner.user.name, COURSE / "notebooks"
    home = Path(f"~{name}").expanduser()
    sources = [*sorted(given.glob("*.ipynb")), given / "glossary.md", given / "pictures"]
    for command in (["mkdir", "-p", HOME_COPY], ["cp", "-r", "--no-clobber", *map(str, sources), HOME_COPY]):
        subprocess.run(
            command, user=name, group=name, extra_groups=[], cwd=home, env={"PATH": "/usr/bin:/bin"}, check=True
        )


def compiled_code(spawner):
    """Where torch.compile keeps a learner's code: below their home, which only they can write."""
    return str(Path(f"~{spawner.user.name}").expanduser() / ".cache" / "torchinductor")


c = get_config()  # noqa: F821 - JupyterHub defines it
c.JupyterHub.bind_url = "http://127.0.0.1:8000"  # put a server with TLS before it; TLJH brings one
c.Spawner.cmd = [f"{COURSE}/.venv/bin/jupyterhub-singleuser"]
c.Spawner.pre_spawn_hook = copy_notebooks
c.Spawner.default_url = f"/lab/tree/{HOME_COPY}/00_start_here.ipynb"
c.Spawner.environment = {
    "OMP_NUM_THREADS": "1",  # 20 kernels with a thread for each core would only wait for each other
    "TORCHINDUCTOR_CACHE_DIR": compiled_code,  # torch's own is in /tmp, where anyone could have put code before
}
c.Spawner.args = [
    "--MappingKernelManager.cull_idle_timeout=1800",
    "--MappingKernelManager.cull_interval=120",
    "--LabApp.custom_css=True",  # figures take the colours of a dark page
    f'--ServerApp.tornado_settings={{"static_custom_path": ["{COURSE}/fsdp_sim/viz/jupyterlab"]}}',
    "--KernelManager.transport=ipc",  # files of the learner's own; every user of a machine can read a TCP port
]
c.Spawner.start_timeout = 120  # everyone begins at the same moment
c.Spawner.http_timeout = 120
c.Spawner.mem_limit = "3G"  # systemd's and Docker's spawners enforce these two; the local one does not
c.Spawner.cpu_limit = 2
