"""Flags that do nothing beside the others are refused, in one sentence, by every command."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from mlx_dp.orchestrator.config import configuration
from mlx_dp.orchestrator.config.flags import (
    FakeFlags,
    Flags,
    HttpFlags,
    ModelFlags,
    OwnerFlags,
    RemoteFlags,
)
from mlx_dp.orchestrator.config.unused_flags import TABLE
from mlx_dp.proto.errors import ConfigError
from mlx_dp.proto.messages.commands import EngineKind
from mlx_dp.proto.messages.group import DistributedBackend
from tests.support.control.flag_values import flags

FAKE = EngineKind.FAKE
MODEL = ModelFlags()
RING = DistributedBackend.RING
GROUP = OwnerFlags(dp_size=2, enable_dp_attention=True)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            flags(http=HttpFlags(open_metadata=True)),
            "--open-metadata does nothing when no route requires a key: add --api-key or "
            "MLX_DP_API_KEY, or omit it",
        ),
        (
            flags(model=ModelFlags(model="x", engine=FAKE)),
            "--model x does nothing with --engine fake, which has no model: omit one of the two",
        ),
        (flags(model=ModelFlags(revision="r", engine=FAKE)), "--revision r does nothing with"),
        (
            flags(model=ModelFlags(trust_remote_code=True, engine=FAKE)),
            "--trust-remote-code does nothing with --engine fake",
        ),
        (
            flags(model=ModelFlags(chat_template=Path("/t.jinja"), engine=FAKE)),
            "--chat-template /t.jinja does nothing with --engine fake",
        ),
        (
            flags(owners=OwnerFlags(mem_fraction_static=0.5)),
            "--mem-fraction-static 0.5 does nothing with --engine fake",
        ),
        (
            flags(owners=replace(GROUP, distributed_backend=RING)),
            "--distributed-backend ring does nothing with --engine fake",
        ),
        (
            flags(model=MODEL, owners=OwnerFlags(distributed_backend=RING)),
            "--distributed-backend ring does nothing for independent replicas",
        ),
        (
            flags(model=MODEL, owners=OwnerFlags(enable_dp_lm_head=True)),
            "--enable-dp-lm-head does nothing for independent replicas",
        ),
        (
            flags(remote=RemoteFlags(dist_init_addr="127.0.0.1:1")),
            "--dist-init-addr 127.0.0.1:1 does nothing without workers on other machines",
        ),
        (flags(remote=RemoteFlags(keys=Path("k"))), "--keys k does nothing without workers"),
        (
            flags(remote=RemoteFlags(launch=False)),
            "--no-launch does nothing without --hostfile: omit it",
        ),
        (
            flags(model=MODEL, fake=FakeFlags(fake_hybrid=True)),
            "--fake-hybrid does nothing without --engine fake: add --engine fake, or omit it",
        ),
    ],
)
def test_a_flag_that_does_nothing_is_refused(given: Flags, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        configuration.check_flags(given)
    assert str(refused.value).startswith(said)


@pytest.mark.parametrize("name", [field.name for field in fields(FakeFlags)])
def test_every_flag_of_the_fake_engine_needs_it(name: str) -> None:
    default = getattr(FakeFlags(), name)
    value: Any = True if isinstance(default, bool) else default + 7
    fake = replace(FakeFlags(), **{name: value})
    with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')}.*without --engine fake"):
        configuration.check_flags(flags(model=MODEL, fake=fake))
    configuration.check_flags(flags(fake=fake))


def test_a_flag_at_its_default_is_no_mistake() -> None:
    configuration.check_flags(flags(model=MODEL, fake=FakeFlags(fake_decode_rate=0.0)))


def test_with_what_they_need_they_are_taken() -> None:
    configuration.check_flags(flags(http=HttpFlags(open_metadata=True, api_key="k")))
    owners = replace(GROUP, distributed_backend=RING, enable_dp_lm_head=True)
    configuration.check_flags(flags(model=MODEL, owners=owners))
    remote = RemoteFlags(remote_workers=1, dist_init_addr="127.0.0.1:1", keys=Path("k"))
    configuration.check_flags(flags(remote=remote))


def test_the_table_names_flags_that_there_are() -> None:
    whole = flags()
    for row in TABLE:
        assert hasattr(getattr(whole, row.group), row.field), row


def test_an_empty_revision_is_refused() -> None:
    given = flags(model=replace(MODEL, revision=" "))
    with pytest.raises(ConfigError, match="--revision is empty: give a name"):
        configuration.check_flags(given)
