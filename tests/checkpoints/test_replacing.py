"""Tests of ``replacing``: a file is written completely or not at all."""

import os
import stat
import threading

import pytest

from float8lab.checkpoints.replacing import leftovers, replacing
from float8lab.inspect import report
from float8lab.inspect.watch.records import Log


def replace_text(path, text):
    with replacing(path) as partial:
        partial.write_text(text)


def test_the_old_file_stays_until_the_new_one_is_complete(tmp_path):
    path = tmp_path / "out.html"
    replace_text(path, "first")
    path.chmod(0o600)
    with replacing(path) as partial:
        partial.write_text("half")
        assert path.read_text() == "first"
        assert leftovers(path) == [partial]
        partial.write_text("second")
    assert path.read_text() == "second"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(UnicodeEncodeError):  # after the first megabyte was written
        replace_text(path, "third" * 200_000 + "\ud800")
    assert path.read_text() == "second"
    assert os.listdir(tmp_path) == ["out.html"]


def test_a_file_does_not_replace_a_directory(tmp_path):
    (tmp_path / "folder").mkdir()
    replace_text(tmp_path / "folder" / "mine", "text")
    with pytest.raises(IsADirectoryError, match=r"Is a directory: .*folder'"):
        replace_text(tmp_path / "folder", "text")
    with pytest.raises(FileNotFoundError, match=r"missing/out.html'"):
        replace_text(tmp_path / "missing" / "out.html", "text")
    assert os.listdir(tmp_path) == ["folder"]
    assert os.listdir(tmp_path / "folder") == ["mine"]


@pytest.mark.parametrize("dangling", [False, True])
def test_the_target_of_a_link_is_replaced(tmp_path, dangling):
    (tmp_path / "there").mkdir()
    target, link = tmp_path / "there" / "out.html", tmp_path / "link"
    link.symlink_to(target)
    if not dangling:
        replace_text(target, "first")
    replace_text(link, "second")
    assert link.readlink() == target
    assert target.read_text() == "second"
    assert sorted(os.listdir(tmp_path)) == ["link", "there"]
    assert os.listdir(tmp_path / "there") == ["out.html"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes with names")
def test_a_pipe_is_written_to(tmp_path):
    path, received = tmp_path / "pipe", []
    os.mkfifo(path)
    reading_thread = threading.Thread(target=lambda: received.append(path.read_text()))
    reading_thread.start()
    replace_text(path, "text")
    reading_thread.join()
    assert received == ["text"]
    assert path.is_fifo()


def test_reports_and_logs_keep_the_old_file_on_an_error(tmp_path, monkeypatch):
    pytest.importorskip("plotly")

    def fail_for_lack_of_space(*_):
        raise OSError(28, "No space left on device")

    for name, save in (("log.jsonl", Log.to_jsonl), ("report.html", report)):
        path = tmp_path / name
        save(Log(recipe="first"), path)
        before = path.read_bytes()
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fail_for_lack_of_space)
            with pytest.raises(OSError, match="No space left"):
                save(Log(recipe="second"), path)
        assert path.read_bytes() == before
    assert sorted(os.listdir(tmp_path)) == ["log.jsonl", "report.html"]
