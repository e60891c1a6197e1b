"""The benchmark of collectives, on one rank."""

from benchmarks import links


def test_main_prints_a_row_for_each_collective(capsys, monkeypatch):
    environment = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert links.main(["--device", "cpu", "--megabytes", "1"]) == 0
    output = capsys.readouterr().out
    assert "| collective     |  MB |" in output
    assert "| all-gather     |   1 |" in output
    assert "| reduce-scatter |   1 |" in output
