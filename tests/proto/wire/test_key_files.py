import stat

import pytest

from mlx_dp.proto.errors import ConfigError
from mlx_dp.proto.wire.key_files import read_controller_keys, read_worker_keys, write_keys


def names(paths) -> list[str]:
    return [path.name for path in paths]


def test_both_sides_find_their_own_half_and_the_others_public_key(tmp_path) -> None:
    written = write_keys(tmp_path, ["worker"])
    assert names(written) == ["controller.key", "controller.pub", "worker.key", "worker.pub"]
    controller, worker = read_controller_keys(tmp_path), read_worker_keys(tmp_path)
    assert worker.controller == controller.own.public
    assert controller.allowed == {worker.own.public}


def test_secrets_are_for_their_owner_alone(tmp_path) -> None:
    write_keys(tmp_path / "keys", ["worker"])
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("*.key")}
    assert modes == {"controller.key": 0o600, "worker.key": 0o600}
    assert stat.S_IMODE((tmp_path / "keys").stat().st_mode) == 0o700


def test_another_worker_leaves_the_keys_that_there_are(tmp_path) -> None:
    write_keys(tmp_path, ["one"])
    before = read_controller_keys(tmp_path)
    assert names(write_keys(tmp_path, ["two"])) == ["two.key", "two.pub"]
    after = read_controller_keys(tmp_path)
    assert after.own == before.own
    assert len(after.allowed) == 2
    assert before.allowed < after.allowed


def test_nothing_is_overwritten(tmp_path) -> None:
    write_keys(tmp_path, ["worker"])
    before = read_worker_keys(tmp_path)
    with pytest.raises(ConfigError, match=r"worker\.key exists"):
        write_keys(tmp_path, ["another", "worker"])
    assert read_worker_keys(tmp_path) == before


@pytest.mark.parametrize("name", ["controller", "", "../x", "a b", "-", "ä"])
def test_a_name_that_is_no_file_name_of_a_worker_is_refused(tmp_path, name) -> None:
    with pytest.raises(ConfigError, match="--name"):
        write_keys(tmp_path, [name])
    assert list(tmp_path.iterdir()) == []


def test_a_secret_that_others_may_read_is_refused(tmp_path) -> None:
    write_keys(tmp_path, ["worker"])
    for name, read in (("controller", read_controller_keys), ("worker", read_worker_keys)):
        path = tmp_path / f"{name}.key"
        path.chmod(0o640)
        with pytest.raises(ConfigError, match=f"mode 0640.*chmod 600 .*{name}.key"):
            read(tmp_path)


def test_a_worker_with_two_keys_is_told_that_it_needs_one(tmp_path) -> None:
    write_keys(tmp_path, ["one", "two"])
    with pytest.raises(ConfigError, match=r"holds one\.key, two\.key"):
        read_worker_keys(tmp_path)


def test_an_empty_directory_says_what_is_missing(tmp_path) -> None:
    with pytest.raises(ConfigError, match="holds none"):
        read_worker_keys(tmp_path)
    with pytest.raises(ConfigError, match="mlx-dp keys --dir"):
        read_controller_keys(tmp_path)


@pytest.mark.parametrize("text", ["", "x" * 39, "\\" * 40, "ä" * 40, "x" * 4096])
def test_a_file_that_holds_no_key_is_named(tmp_path, text) -> None:
    write_keys(tmp_path, ["worker"])
    (tmp_path / "controller.pub").write_text(text)
    with pytest.raises(ConfigError, match=r"controller\.pub"):
        read_worker_keys(tmp_path)
