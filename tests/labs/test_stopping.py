"""How a wish to stop is heard, also by a process whose main thread is stuck."""

import os
import signal
import subprocess
import sys
import time

from labs.stopping import INTERRUPTED, PREEMPTED, stopping


def wait_for(condition):
    give_up_s = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < give_up_s
        time.sleep(0.01)


def test_sigterm_wins_over_ctrl_c():
    with stopping(launched=False) as wish:
        assert wish.status == 0
        os.kill(os.getpid(), signal.SIGINT)
        wait_for(lambda: wish.status == INTERRUPTED)
        os.kill(os.getpid(), signal.SIGTERM)
        wait_for(lambda: wish.status == PREEMPTED)
        wish.ask(INTERRUPTED, "late")
        assert wish.status == PREEMPTED


def test_the_handlers_of_before_are_back_afterwards():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with stopping(launched=False):
        pass
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


STUCK = """
import ctypes
import labs.stopping
labs.stopping.PATIENCE_S = 0.5
from labs.stopping import stopping
with stopping(launched=False) as wish:
    wish.step_took(0.0)
    print("ready", flush=True)
    while True:
        ctypes.CDLL(None).sleep(60)  # in C; a signal ends one sleep, the next begins before Python's handlers could ask
"""


def test_a_process_stuck_in_c_leaves_by_itself():
    process = subprocess.Popen([sys.executable, "-c", STUCK], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=20)
    assert process.returncode == PREEMPTED
    assert "SIGTERM came, and the step did not end within" in err
