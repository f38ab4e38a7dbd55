"""Settings: where they come from, and that the page about them is true."""

from __future__ import annotations

from pathlib import Path

import pytest

from arrow_tq import errors
from arrow_tq_server.config import ServerConfig, load
from arrow_tq_server.memory import default_memory_dir, sweep
from arrow_tq_server.settings_table import fill

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_flags_over_environment_over_file_over_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "server.toml"
    file.write_text('data_dir = "/file"\nport = 1\ngets_max = 11\nactions_max = 12\nlog_level = "error"\n')
    monkeypatch.setenv("ARROW_TQ_PORT", "2")
    monkeypatch.setenv("ARROW_TQ_GETS_MAX", "22")
    config = load({"port": 3, "host": None}, file)
    assert (config.port, config.gets_max, config.actions_max) == (3, 22, 12)
    assert config.data_dir == Path("/file")
    assert config.host == ServerConfig.model_fields["host"].default
    assert load({"data_dir": "/flag"}).log_level == "info"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("gets_max = 0", "setting gets_max"),
        ("get_max = 1", "setting get_max"),
        ("gets_max = ", "config file"),
    ],
)
def test_a_bad_file_names_what_is_wrong(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "server.toml"
    file.write_text(text)
    with pytest.raises(errors.InvalidInput, match=words):
        load({"data_dir": "/d"}, file)


def test_a_bad_environment_names_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARROW_TQ_SOFT_MARK", "2")
    with pytest.raises(errors.InvalidInput, match="setting soft_mark"):
        load({"data_dir": "/d"})


def test_the_memory_directory_is_named_after_its_data_and_goes_with_it(tmp_path: Path) -> None:
    data, root = tmp_path / "data", tmp_path / "shm"
    root.mkdir()
    data.mkdir()
    chosen = default_memory_dir(data, root)
    assert chosen is not None and chosen == default_memory_dir(data, root)
    assert default_memory_dir(tmp_path / "other", root) != chosen
    (chosen / "extent").write_bytes(b"x")
    (tmp_path / "other").mkdir()
    assert sweep(root) == []
    data.rmdir()
    assert sweep(root) == [chosen]
    assert not chosen.exists() and sweep(root) == []


def test_a_store_keeps_the_memory_directory_it_has(tmp_path: Path) -> None:
    (tmp_path / "store.json").write_text("{}")
    assert default_memory_dir(tmp_path, tmp_path) is None
    assert default_memory_dir(tmp_path / "new", tmp_path / "no such root") is None


def test_every_setting_is_documented() -> None:
    for name, info in ServerConfig.model_fields.items():
        assert info.description, name


def test_the_page_is_what_the_settings_say() -> None:
    page = PAGE.read_text()
    assert fill(page) == page, "run: python -m arrow_tq_server.settings_table docs/configuration.md"
