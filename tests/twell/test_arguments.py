"""key=value command lines."""

from dataclasses import dataclass, field

import pytest
from omegaconf.errors import OmegaConfBaseException

from twell.arguments import parse_arguments, run_command, whole_numbers
from twell.config import ConfigError


@dataclass
class Schema:
    run: str = ""
    n: int | None = None
    tasks: list[str] = field(default_factory=list)


def test_values_are_converted_and_text_is_taken_as_it_stands():
    parsed = parse_arguments(["run=1e5", "n=3", "tasks=[a,b/c.yaml]"], Schema, "")
    assert parsed == Schema("1e5", 3, ["a", "b/c.yaml"])
    assert parse_arguments(["run=no", "n=null"], Schema, "") == Schema("no")
    assert parse_arguments(["run=a=b"], Schema, "").run == "a=b"


@pytest.mark.parametrize("argument", ["rum=x", "--run", "run"])
def test_an_unknown_key_is_named(argument: str):
    with pytest.raises(ConfigError, match=rf"^{argument}: expected KEY=VALUE with KEY one of run, n, tasks"):
        parse_arguments([argument], Schema, "")


@pytest.mark.parametrize("argument", ["n=many", "tasks=one"])
def test_a_value_of_another_type_is_refused(argument: str):
    with pytest.raises(OmegaConfBaseException):
        parse_arguments([argument], Schema, "")


def test_several_numbers_in_one_option():
    assert whole_numbers(Schema(run="8, 1,64"), "run") == [8, 1, 64]
    for text in ("", "x", "2,", "0", "1,-1", "1.5"):
        with pytest.raises(ConfigError, match=rf"^run={text}: must be numbers of at least 1 with commas between them$"):
            whole_numbers(Schema(run=text), "run")


def test_help_shows_the_defaults(capsys):
    with pytest.raises(SystemExit) as end:
        parse_arguments(["--help"], Schema, "What it does.")
    shown = capsys.readouterr().out
    assert end.value.code == 0 and "What it does." in shown and "    tasks=[]\n" in shown


def test_a_mistake_ends_with_one_line_and_code_2(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["command", "n=many"])
    with pytest.raises(SystemExit) as end:
        run_command(lambda arguments: parse_arguments(arguments, Schema, ""))
    error = capsys.readouterr().err
    assert end.value.code == 2 and error.startswith("error: n: ") and error.count("\n") == 1
