"""Ranks as another user read nothing that is hidden, leave nothing behind, and change nothing of whoever called."""

import contextlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

import fsdp_sim
from fsdp_sim.ranks import Limits, OtherUser, RanksError, run
from fsdp_sim.ranks.other_user import LENT_UIDS, AccessError

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, which alone can become another user")


def as_other(fn, *args, ranks=1, hide=(), **more):
    user = OtherUser.unused(*hide)
    return user, run(fn, ranks, *args, limits=Limits(user=user), plain=True, progress=False, **more)


@pytest.fixture
def hidden() -> Iterator[Path]:
    """A folder that every user of this machine may read, among those of the library."""
    folder = Path(fsdp_sim.__file__).parent / "__pycache__" / f"hidden-{os.getpid()}"
    folder.mkdir(mode=0o755, parents=True)
    (folder / "solution").write_text("42")
    yield folder
    shutil.rmtree(folder)


def test_ranks_are_a_user_whom_nobody_else_is_and_communicate_as_ever():
    def who() -> list[object]:
        total = torch.ones(1)
        dist.all_reduce(total)
        return [os.getuid(), os.geteuid(), os.getgid(), os.getgroups(), float(total)]

    user, results = as_other(who, ranks=2)

    assert list(results) == [[user.uid, user.uid, user.uid, [], 2.0]] * 2


def test_the_kernel_counts_the_tasks_of_all_ranks_together() -> None:
    _, results = as_other(lambda: resource.getrlimit(resource.RLIMIT_NPROC), ranks=2)

    assert list(results) == [[2 * Limits().tasks] * 2] * 2


def test_what_is_hidden_cannot_be_read_and_the_caller_still_can(hidden: Path):
    def peek(folder: str) -> list[str]:
        said = []
        for look in (os.listdir, lambda f: Path(f, "solution").read_text()):
            try:
                said.append(str(look(folder)))
            except OSError as error:
                said.append(type(error).__name__)
        return said

    assert list(as_other(peek, str(hidden), hide=[hidden])[1]) == [["PermissionError", "PermissionError"]]
    assert list(as_other(peek, str(hidden))[1]) == [["['solution']", "42"]]
    assert (hidden / "solution").read_text() == "42"


def test_of_files_that_everyone_may_read_it_sees_those_that_python_needs_and_no_others(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        os.chmod(folder, 0o755)
        Path(folder, "shared").write_text("for all")

        def sees(path: str) -> list[object]:
            places = [place for place in ("/tmp", "/var/tmp", "/dev/shm") if os.path.isdir(place)]
            full = []
            for place in (*places, os.environ["HOME"]):
                try:
                    Path(place, "mine").write_bytes(bytes(100_000_000))
                except OSError as error:
                    full.append(error.strerror)
            return [os.path.exists(path), len(full) - len(places), set(full)]

        ((there, home, full),) = as_other(sees, f"{folder}/shared")[1]
    assert (there, home, full) == (False, 1, ["No space left on device"])
    assert not [place for place in ("/tmp", "/var/tmp", "/dev/shm") if Path(place, "mine").exists()]


def test_of_what_its_process_inherits_only_its_own_connection_stays_open() -> None:
    def inherited() -> list[str]:
        links = []
        for number in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                links.append(os.readlink(f"/proc/self/fd/{number}"))
        return [link for link in links if link.startswith("pipe:") and links.count(link) == 1]  # gloo has both ends

    assert list(as_other(inherited)[1]) == [[]]
    assert next(iter(run(inherited, 1, progress=False)))  # else this test would show nothing


LIMITS_IPC = "import ctypes; assert not ctypes.CDLL(None).unshare(1 << 27); open('/proc/sys/kernel/sem', 'w')"


def test_it_has_none_of_the_memory_that_counts_as_no_process_s() -> None:
    if subprocess.run([sys.executable, "-c", LIMITS_IPC], capture_output=True).returncode:
        pytest.skip("needs a machine that lets root limit System V's shared memory")

    def takes() -> list[int]:
        import ctypes

        libc = ctypes.CDLL(None)
        return [libc.shmget(0, 2**28, 0o1600), libc.msgget(0, 0o1600), libc.semget(0, 1000, 0o1600)]

    of_all = [Path("/proc/sys/kernel", name) for name in ("shmall", "msgmni", "sem")]
    before = [path.read_text() for path in of_all]
    assert list(as_other(takes)[1]) == [[-1, -1, -1]]
    assert [path.read_text() for path in of_all] == before


KEYRING = """
    import ctypes, sys
    call = ctypes.CDLL(None).syscall
    numbers = {"x86_64": (248, 250), "aarch64": (217, 219)}
    add_key, keyctl = numbers[__import__("platform").machine()]
    call(keyctl, 1, None)  # a session keyring, as a login makes one
    call(add_key, b"user", b"fsdp_sim_secret", b"42", 2, -3)
    def search():
        import ctypes
        return ctypes.CDLL(None).syscall(keyctl, 10, -3, b"user", b"fsdp_sim_secret", 0)
    assert search() > 0, "needs keyrings"
    from fsdp_sim.ranks import Limits, OtherUser, run
    print(list(run(search, 1, limits=Limits(user=OtherUser.unused()), plain=True, progress=False)))
"""


def test_root_s_session_keyring_stays_with_root() -> None:
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(KEYRING)], capture_output=True, text=True)
    assert done.stdout == "[-1]\n", done.stderr


def test_what_could_not_be_covered_is_named_with_what_keeps_the_user_out(hidden: Path):
    with pytest.raises(AccessError, match=rf"{hidden} can be read.*chmod -R go= {hidden}"):
        OtherUser(LENT_UIDS[0], (str(hidden),)).check_access()  # as whoever can read it


def test_it_can_import_what_python_has_wherever_that_lies():
    def imports() -> str:
        import this  # in no other module's imports

        return this.s[:4]

    assert list(as_other(imports)[1]) == ["Gur "]


def test_the_secrets_of_the_caller_stay_with_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("API_TOKEN", "secret")

    def seen() -> list[object]:
        try:
            of_parent = Path(f"/proc/{os.getppid()}/environ").read_bytes().decode()
        except PermissionError:
            of_parent = "denied"
        return [os.environ.get("API_TOKEN"), of_parent]

    assert list(as_other(seen)[1]) == [[None, "denied"]]


def test_the_job_s_files_cannot_be_replaced_by_links_that_root_would_follow(tmp_path: Path):
    secret = tmp_path / "secret"
    secret.write_text("what only root may read")
    secret.chmod(0o600)

    def swap(target: str) -> str:
        folder = Path(os.environ["HOME"]).parent
        said = []
        for name in ("rank0.out", "board"):
            try:
                os.remove(folder / name)
                os.symlink(target, folder / name)
            except OSError as error:
                said.append(type(error).__name__)
        return " ".join(said)

    _, results = as_other(swap, str(secret), show_output=False)

    assert list(results) == ["PermissionError PermissionError"]
    assert "only root" not in str(results.output)


def test_no_process_of_the_user_is_left():
    def leaves_one() -> int:
        child = os.fork()
        if child == 0:
            os.setsid()
            if os.fork():
                os._exit(0)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(600)
        os.waitpid(child, 0)
        return 1

    user, results = as_other(leaves_one)

    assert list(results) == [1]
    assert not [p for p in psutil.process_iter(["uids", "status"]) if _is_alive_of(p, user.uid)]


def test_no_temporary_file_of_the_user_is_left_and_nobody_else_s_is_touched() -> None:
    """Where the kernel did not let the rank have temporary folders of its own."""
    user = OtherUser.unused()
    for place in [Path(place) for place in ("/tmp", "/var/tmp", "/dev/shm") if os.path.isdir(place)]:
        mine, theirs = (place / f"fsdp_sim-{os.getpid()}-{whose}" for whose in ("mine", "theirs"))
        link, alone = theirs.with_suffix(".link"), theirs.with_suffix(".alone")
        try:
            for folder in (mine, theirs):
                folder.mkdir()
                (folder / "inside").touch()
            alone.touch()
            link.symlink_to(mine)
            for path in (theirs, link, alone):
                os.chown(path, user.uid, user.uid, follow_symlinks=False)
            user.end()
            assert sorted(place.glob(f"{mine.name[:-4]}*")) == [mine]
            assert (mine / "inside").exists()
        finally:
            shutil.rmtree(mine)
            shutil.rmtree(theirs, ignore_errors=True)
            link.unlink(missing_ok=True)
            alone.unlink(missing_ok=True)


def _is_alive_of(process: psutil.Process, uid: int) -> bool:
    return (
        process.info["uids"] is not None
        and process.info["uids"].real == uid
        and process.info["status"] != psutil.STATUS_ZOMBIE
    )


def test_it_can_neither_end_who_called_nor_become_root():
    def tries() -> list[str]:
        said = []
        for attempt in (lambda: os.kill(os.getppid(), signal.SIGKILL), lambda: os.setuid(0)):
            try:
                attempt()
            except PermissionError:
                said.append("denied")
        return said

    assert list(as_other(tries)[1]) == [["denied", "denied"]]


def test_a_fork_bomb_is_ended():
    def bomb() -> None:
        while True:
            os.fork()

    with pytest.raises(RanksError):
        as_other(bomb)


def test_without_root_the_error_says_what_to_do():
    with pytest.raises(RanksError, match=r"PermissionError: only root.*put sudo before the command"):
        as_other(OtherUser.unused)
