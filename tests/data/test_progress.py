import pytest

from data import progress
from data.progress import Progress


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(progress, "monotonic", lambda: now[0])
    return now


def test_lines_now_and_then_where_there_is_no_terminal(clock):
    lines = []
    bar = Progress("tokenizing x", 200, lines.append)
    bar.skip(100)  # a continued preparation: half was there
    for done in (110, 120, 150):
        clock[0] += 10
        bar.update(done, text_bytes=done * 1_000_000, tokens=done * 250_000)
    bar.close()
    assert lines == ["tokenizing x  60% 30.0M tokens, 6.0 MB/s, 80 s left"]


def test_a_bar_that_redraws_itself_on_a_terminal(clock, monkeypatch, capsys):
    monkeypatch.setattr(progress.sys.stderr, "isatty", lambda: True, raising=False)
    bar = Progress("tokenizing x", 200, pytest.fail)
    for done in (50, 51, 100):
        clock[0] += 0.15
        bar.update(done, text_bytes=1, tokens=1)
    bar.close()
    drawn = capsys.readouterr().err.split("\r")
    assert "[========" in drawn[1] and " 26%" in drawn[1]
    assert drawn[-1] == "\x1b[K" and len(drawn) == 3  # one redraw, then wiped


def test_unknown_length(clock):
    lines = []
    bar = Progress("tokenizing x", None, lines.append)
    clock[0] += 20
    bar.update(5, text_bytes=20_000_000, tokens=5_000_000)
    assert lines == ["tokenizing x 5.0M tokens, 1.0 MB/s"]
