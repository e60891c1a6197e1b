"""The benchmark of opening the report page, on a small report."""

import pytest

from benchmarks import browser, report_page


@pytest.mark.skipif(bool(browser.missing()), reason=browser.missing() or "there is a browser")
def test_main_opens_a_report_and_prints_the_times(capsys):
    pytest.importorskip("plotly")
    (opening,) = report_page.main(["--layers", "8", "--steps", "5", "--runs", "1"])
    assert 0 < opening.table < opening.usable < opening.complete
    title, machine, _, columns, _, *rows, _, target = capsys.readouterr().out.splitlines()
    assert title.startswith("8 layers, 3 operands, 5 steps: ")
    assert machine.startswith("Chromium ")
    assert columns == "| run    | table s | usable s | all charts s |"
    assert [row.split()[1] for row in rows] == ["1", "median"]
    assert target.startswith("usable <= 3 s: ")


def test_the_last_line_has_the_medians():
    openings = [report_page.Opening(*times) for times in ((1, 2, 3), (2, 3, 9), (9, 9, 4))]
    assert report_page.lines(openings)[-1] == ["median", "2.00", "3.00", "4.00"]


def test_report_page_needs_a_browser(monkeypatch):
    monkeypatch.setattr(browser, "missing", lambda: "needs a browser")
    with pytest.raises(SystemExit, match="report_page needs a browser"):
        report_page.main([])


def test_layers_must_be_a_multiple_of_4(capsys, monkeypatch):
    monkeypatch.setattr(browser, "missing", lambda: "")
    with pytest.raises(SystemExit):
        report_page.main(["--layers", "7"])
    assert "must be a multiple of 4; got 7" in capsys.readouterr().err
