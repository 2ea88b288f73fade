"""Flags that the command line does not know: what it says of them."""

from __future__ import annotations

import pytest

from gpubridge import cli
from gpubridge.config.settings import read_backend_config


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["serve", "--model-repositry=x"], "--model-repositry; did you mean --model-repository?"),
        (["serve", "--http_port", "1"], "unknown flag --http_port; did you mean --http-port?"),
        (["serve", "--qqqqqqq"], "unknown flag --qqqqqqq; --help lists them all"),
        (["serve", "--model-repository=x", "y"], "expected flags only, got 'y'"),
        (["serve", "--grpc-use-ssl=true"], "--grpc-use-ssl: TLS is not served"),
        (["serve", "--cache-config=local,size=9"], "--cache-config: the response cache is not"),
        (["doctor", "--verbose"], "unknown flag --verbose"),
    ],
)
def test_what_is_said_of_unknown_flags(capsys, arguments, said):
    assert cli.main(arguments) == 2
    assert said in capsys.readouterr().err


def test_flags_that_are_refused_are_no_flags():
    served = cli._parser().parse_args(["serve", "--model-repository=x"]).flags
    assert not set(cli._REFUSED) & set(served)


def test_a_repository_must_be_named(capsys):
    assert cli.main(["serve"]) == 1
    assert "--model-repository expects at least one directory" in capsys.readouterr().err


@pytest.mark.parametrize("entry", ["default-max-batch-size=4", "python,default-max-batch-size=4"])
def test_a_setting_of_every_backend_is_pythons(entry):
    assert read_backend_config([entry]) == {"python": {"default-max-batch-size": "4"}}
