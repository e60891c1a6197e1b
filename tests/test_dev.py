"""dev.py: which environment a command runs in."""

from __future__ import annotations

import pytest

import dev


@pytest.mark.parametrize(
    ("arguments", "release", "rest"),
    [
        ([], "", []),
        (["-k", "quantize"], "", ["-k", "quantize"]),
        (["--torch", "2.15", "-x"], "2.15", ["-x"]),
        (["--torch=2.11.0"], "2.11.0", []),
        (["-k", "--torch"], "", ["-k", "--torch"]),
    ],
    ids=str,
)
def test_the_release_of_torch(arguments, release, rest):
    assert dev.asked_torch(arguments) == (release, rest)


@pytest.mark.parametrize(
    "arguments", [["--torch"], ["--torch", "-x"], ["--torch=../2.15"]], ids=str
)
def test_no_release(arguments):
    with pytest.raises(SystemExit, match=r"--torch must be a release, such as 2\.15; got"):
        dev.asked_torch(arguments)


def test_environments():
    names = [dev.Venv(release).path.name for release in ("", "2.15")]
    assert names == [".venv", ".venv-torch-2.15"]
    asked = [dev.Venv(release).requirements for release in ("", "2.15", "2.15.1")]
    assert asked == [[], ["torch==2.15.*"], ["torch==2.15.1"]]
