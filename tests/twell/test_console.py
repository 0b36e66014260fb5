from twell.console import console_line, format_seconds, validation_line


def test_console_line_says_na_for_unknown_mfu_and_shows_l0():
    values = {
        "train/loss": 1.5,
        "train/lr": 1e-3,
        "train/grad_norm": 0.5,
        "perf/tokens_per_second": 12345.6,
        "perf/mfu": None,
        "perf/memory_gb": 1.0,
    }
    line = console_line(3, 10, values, 61)
    assert (
        "step 3/10" in line and "12,346 tok/s" in line and "MFU n/a" in line and "ETA 1:01" in line and "L0" not in line
    )
    sparse = {"sparsity/l0_mean": 30.0, "sparsity/density": 0.0053, "sparsity/l0_max": 99.0}
    assert "L0 30.0 (0.53%, max 99)" in console_line(3, 10, values | sparse, 61)
    steered = {"train/l1_coef": 3.88e-3, "train/l1_at_bound": 0.0}
    assert "max 99)  target 15, L1 3.9e-03  lr" in console_line(3, 10, values | sparse | steered, 61, target_l0=15.0)
    steered["train/l1_at_bound"] = 0.5
    assert "L1 3.9e-03 at its bound  lr" in console_line(3, 10, values | sparse | steered, 61, target_l0=15.0)
    assert "MFU 47.1%" in console_line(3, 10, values | {"perf/mfu": 0.471}, 61)


def test_validation_line_shows_what_counting_reaches_where_it_is_known():
    values = {"val/loss": 1.5, "val/perplexity": 4.48, "val/bits_per_byte": 2.0}
    known = {"val/unigram_loss": 3.0, "val/order3_bits_per_byte": 2.5, "val/sample": "a\nb"}
    line = validation_line(7, values | known)
    assert "1.5000 (unigram 3.0000)" in line and "2.0000 (order-3 byte table 2.5000)" in line and r"'a\nb'" in line
    stream = validation_line(7, values | {"val/unigram_loss": None, "val/order3_bits_per_byte": None})
    assert "unigram" not in stream and "table" not in stream


def test_format_seconds():
    assert [format_seconds(s) for s in (5, 65, 3723)] == ["0:05", "1:05", "1:02:03"]
