import json
import subprocess
import sys

import pytest

from fulltilt.cli import COMMANDS, build_parser, run_command
from fulltilt.levers import load_catalogue


def test_help_names_every_command(capsys):
    with pytest.raises(SystemExit) as ended:
        run_command(["--help"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert all(name in said for name in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as ended:
        run_command([command, "--help"])
    assert ended.value.code == 0
    assert f"fulltilt {command}" in capsys.readouterr().out


def test_no_command_is_wrong_usage(capsys):
    assert run_command([]) == 2
    assert "COMMAND" in capsys.readouterr().out


def test_an_unknown_flag_is_wrong_usage(capsys):
    with pytest.raises(SystemExit) as ended:
        run_command(["levers", "--colour"])
    assert ended.value.code == 2
    assert "--colour" in capsys.readouterr().err


def test_flags_are_not_guessed_from_their_beginning(capsys):
    with pytest.raises(SystemExit):
        build_parser("tune").parse_args(["tune", "x.yaml", "--batch", "3"])
    assert "--batch" in capsys.readouterr().err


def test_the_catalogue_lists_every_lever_with_its_key(capsys):
    assert run_command(["levers", "--json", "-"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert {lever["name"]: lever["key"] for lever in document["levers"]} == {
        name: lever.key for name, lever in load_catalogue().items()
    }


def test_an_unknown_lever_is_answered_with_the_nearest(capsys):
    assert run_command(["levers", "num_worker"]) == 2
    assert "did you mean num_workers" in capsys.readouterr().err


def test_the_schema_is_json_and_knows_the_levers(capsys):
    assert run_command(["schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    text = json.dumps(schema)
    assert all(lever.key.split(".")[1] in text for lever in load_catalogue().values())


def test_a_missing_configuration_is_wrong_usage(capsys):
    assert run_command(["train"]) == 2
    assert "no configuration was given" in capsys.readouterr().err


def test_a_reader_that_goes_away_is_no_traceback():
    code = "from fulltilt.cli import main; main(['schema'])"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        said = process.stderr.read().decode()
    assert "Traceback" not in said
