"""What a rank sends to others, here to itself."""

from benchmarks import links


def test_a_table_of_both_collectives(capsys, monkeypatch):
    environment = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert links.main(["--device", "cpu", "--megabytes", "1"]) == 0
    out = capsys.readouterr().out
    assert "| collective     |  MB |" in out
    assert "| all-gather     |   1 |" in out
    assert "| reduce-scatter |   1 |" in out
