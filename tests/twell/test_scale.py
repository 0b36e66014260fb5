from dataclasses import replace

import pytest

from twell.errors import UserError
from twell.scale import GB, Model, Options, best, describe_model, main, plan

MODEL = Model(parameters=2_000_000_000, unit=200_000_000, flops_per_token=12_000_000_000, activations=20 * GB)
OPTIONS = Options()


def test_memory_is_what_the_table_says():
    p = MODEL.parameters
    expected = {
        "ddp": 18 * p,
        "zero1": 2 * p + 12 * p / 8 + 4 * p + 4 * p / 8,
        "fsdp": (2 + 12 + 4) * p / 8 + 4 * p + 4 * MODEL.unit,
        "fsdp+": (2 + 12 + 4) * p / 8 + 4 * MODEL.unit,
    }
    for name, size in expected.items():
        assert plan(MODEL, name, 8, OPTIONS).memory == pytest.approx(size + MODEL.activations), name


def test_one_gpu_of_a_copy_adds_up_less_between_nodes_than_within():
    within, across = (plan(MODEL, "ddp", gpus, OPTIONS).communication for gpus in (8, 16))
    assert within == pytest.approx(4 * 2e9 / (300 * GB))
    assert across - within == pytest.approx(2 * 4 * 2e9 / 8 / 2 / (40 * GB))


def test_communication_hides_until_there_is_too_little_to_compute():
    plans = [plan(MODEL, "ddp", gpus, OPTIONS) for gpus in (8, 64, 1024, 8192)]
    efficiencies = [p.efficiency for p in plans]
    assert efficiencies[0] == 1 and efficiencies == sorted(efficiencies, reverse=True) and efficiencies[-1] < 0.5


def test_the_simplest_of_what_fits_and_is_fastest_is_chosen():
    plans = [plan(MODEL, name, 8, OPTIONS) for name in ("ddp", "zero1", "fsdp")]
    assert best(plans, OPTIONS).mode == "ddp"
    assert best(plans, replace(OPTIONS, memory=45.0)).mode == "zero1"
    assert best(plans, replace(OPTIONS, memory=10.0)) is None


def test_presets_are_described_without_building_them(capsys):
    model = describe_model("8b", OPTIONS)
    assert 7e9 < model.parameters < 8.5e9 and model.unit < model.parameters / 32
    main(["model=8b", "gpus=[8,1024]"])
    out = capsys.readouterr().out
    assert "ASSUMED" in out and "1024 zero1" in out


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("speed=0", "speed=0.0: must be above 0"),
        ("micro_tokens=-1", "micro_tokens=-1: must be above 0"),
        ("gpus=[12]", r"gpus=\[12\]: whole nodes of per_node=8"),
    ],
)
def test_mistakes_are_named(argument: str, message: str):
    with pytest.raises(UserError, match=f"^{message}"):
        main([argument])
