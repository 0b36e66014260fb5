import os
import signal
import time

import pytest

from tests.training import signal_handlers_kept
from twell.faults import SIGNALS, StopRequests, Watchdog


@pytest.fixture
def requests():
    """A StopRequests that notes how it would have ended the process."""
    with signal_handlers_kept():
        ends = []
        stop = StopRequests(timeout=0.2, end=lambda code: ends.append((code, time.monotonic())))
        stop.ends = ends
        yield stop
        stop.close()


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_asks_to_stop(requests, number):
    assert not requests()
    os.kill(os.getpid(), number)
    assert requests()


def test_a_second_interrupt_ends_the_process(requests):
    os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
        signal.pause()


def test_who_does_not_stop_in_time_is_ended(requests, capfd):
    told_at = time.monotonic()
    os.kill(os.getpid(), signal.SIGTERM)
    requests._thread.join()
    ((code, ended_at),) = requests.ends
    assert code == 1 and ended_at - told_at > 0.1
    assert "told to stop 0.2 s ago (stop_timeout)" in capfd.readouterr().err


def test_who_stops_in_time_is_not(requests):
    requests._timeout = 60  # however busy the machine is
    os.kill(os.getpid(), signal.SIGTERM)
    requests.close()
    assert requests.ends == []
    requests.__init__(timeout=0.2)  # for the fixture to close


def test_other_signals_start_no_timer(requests):
    before = signal.signal(signal.SIGUSR2, lambda *_: None)
    os.kill(os.getpid(), signal.SIGUSR2)
    signal.signal(signal.SIGUSR2, before)
    requests._thread.join(0.5)
    assert requests._thread.is_alive() and requests.ends == []


def test_one_process_has_nobody_to_wait_for():
    ends = []
    watchdog = Watchdog(timeout=0.01, end=ends.append)
    time.sleep(0.1)
    watchdog.close()
    assert ends == []
