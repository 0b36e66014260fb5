import os
import signal
import time
from dataclasses import dataclass

import pytest

from data import DataError
from data.sources import Documents
from data.tokenizer import ByteTokenizer
from data.workers import WorkerPool


@dataclass
class NumberBlock:
    number: int
    size: int = 1

    def read(self):
        if self.number == -1:
            raise DataError("a bad block")
        if self.number == -2:
            raise KeyError("a mistake in the code")
        if self.number == -3:
            os.kill(os.getpid(), signal.SIGKILL)
        print("something that prints")  # must not disturb the replies
        return Documents([str(self.number) * (1 + self.number % 7)])


@pytest.fixture
def pool(tmp_path):
    ByteTokenizer().save(tmp_path)
    with WorkerPool(2, tmp_path, val_below=0, only_val=False) as pool:
        yield pool


def test_results_come_in_order_and_the_input_is_read_only_a_little_ahead(pool):
    given = []

    def blocks():
        for number in range(40):
            given.append(number)
            yield NumberBlock(number)

    for i, (block, encoded) in enumerate(pool.map(blocks())):
        assert block.number == i and len(given) <= i + 6
        assert bytes(encoded.ids[0][:-1].tolist()).decode() == str(i) * (1 + i % 7)
    assert i == 39 and len(pool._processes) <= 2


@pytest.mark.parametrize(
    "number, error, message",
    [
        (-1, DataError, "a bad block"),
        (-2, RuntimeError, "in a tokenizing process:\n(.|\n)*KeyError"),
        (-3, DataError, "ended with exit code -9; if memory ran out, lower data.workers"),
    ],
)
def test_failures_reach_the_caller(pool, number, error, message):
    with pytest.raises(error, match=message):
        list(pool.map([NumberBlock(1), NumberBlock(number), *map(NumberBlock, range(20))]))


def test_few_blocks_start_few_processes(pool):
    list(pool.map([NumberBlock(1)]))
    assert len(pool._processes) == 1


@pytest.mark.timeout(60)
def test_a_process_that_starts_while_the_pool_ends_is_ended_too(tmp_path):
    ByteTokenizer().save(tmp_path)
    pool = WorkerPool(2, tmp_path, val_below=0, only_val=False)
    start, calls = pool._start, []

    def second_one_is_slow():
        calls.append(None)
        if len(calls) == 2:
            time.sleep(1.5)
        return start()

    pool._start = second_one_is_slow
    with pytest.raises(DataError, match=r"a bad block"), pool:
        list(pool.map([NumberBlock(-1), NumberBlock(1)]))
    assert len(pool._processes) == 2 and all(process.returncode is not None for process in pool._processes)
