"""How launch scripts end: statuses, one line on stderr, flags that do not leak from run to run."""

import io
import os
import sys

import jax
import jax.numpy as jnp
import pytest
from absl import flags

from dsv41.config import DSV41Error
from launch.cli import new_flags, run
from pallas_kernels.topk.ops import topk


@pytest.fixture
def script():
    """Flags and a function that runs `main` with some arguments."""
    values = new_flags()
    flags.DEFINE_integer("size", 3, "A size.", flag_values=values)

    def start(main, *arguments):
        return run(lambda: main(values), values, ["some/path/script.py", *arguments])

    return start


def one_line(capsys):
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1 and err.endswith("\n")
    return err.rstrip("\n")


def test_done(script, capsys):
    assert script(lambda values: print(values.size), "--size=5") == 0
    assert capsys.readouterr() == ("5\n", "")


def test_a_second_run_starts_from_the_defaults(script, capsys):
    assert script(lambda values: None, "--size=5") == 0
    assert script(lambda values: print(values.size)) == 0
    assert capsys.readouterr().out == "3\n"


def test_two_scripts_may_use_one_flag_name():
    for default in (1, 2):
        values = new_flags()
        flags.DEFINE_integer("size", default, "A size.", flag_values=values)
        assert run(lambda: None, values, ["x"]) == 0
        assert values.size == default


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="about a backend without kernels")
def test_kernels_that_cannot_run_are_bad_input(script, capsys):
    """As `--kernels=pallas` asks for them."""

    def main(values):
        topk(jnp.ones((1, 4)), 2, implementation="pallas")

    assert script(main) == 2
    assert one_line(capsys) == (
        "script: topk: implementation 'pallas' cannot run: there is no kernel for the cpu backend"
    )


@pytest.mark.parametrize(
    "argument, message",
    [
        ("--colour=red", "script: Unknown command line flag 'colour'"),
        ("--size=big", "script: flag --size=big: "),
        ("--size", "script: Missing value for flag --size"),
        ("more", "script: unexpected argument 'more': everything is given as --flag=value"),
    ],
)
def test_bad_flags(script, capsys, argument, message):
    assert script(lambda values: pytest.fail("main must not run"), argument) == 2
    assert one_line(capsys).startswith(message)


def test_bad_input_is_one_line(script, capsys):
    def main(_):
        raise DSV41Error("a.json: first line\n  second line")

    assert script(main) == 2
    assert one_line(capsys) == "script: a.json: first line second line"


def test_interrupted(script, capsys):
    def main(_):
        raise KeyboardInterrupt

    assert script(main) == 130
    assert one_line(capsys) == "script: interrupted"


def test_faults_of_the_program_are_not_hidden(script):
    def main(_):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        script(main)


def test_help(script, capsys):
    assert script(lambda values: pytest.fail("main must not run"), "--help") == 0
    out, err = capsys.readouterr()
    assert __doc__ in out and "--size: A size." in out and err == ""


def test_reader_that_leaves(script, monkeypatch):
    reading, writing = os.pipe()
    os.close(reading)
    with io.TextIOWrapper(io.FileIO(writing, "w"), write_through=False) as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        assert script(lambda values: print("text")) == 141
