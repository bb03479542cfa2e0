"""The flags of ``mlx-dp serve`` that are for workers on other machines. See flags.py."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

_remote = partial(typer.Option, rich_help_panel="Workers on other machines")


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteFlags:
    remote_workers: Annotated[
        int,
        _remote(
            help="How many of the --dp-size workers run on other machines, where mlx-dp worker "
            "--rank R offers them a place: the last ones, so that 1 of 3 is rank 2."
        ),
    ] = 0
    hostfile: Annotated[
        Path | None,
        _remote(
            help="All workers run on the hosts of this file, one each, in mlx.launch's format: "
            "what it names ssh is where mlx-dp worker is started through mlx.launch."
        ),
    ] = None
    launch: Annotated[
        bool,
        _remote(
            "--launch/--no-launch",
            help="Start mlx-dp worker on the hosts of --hostfile, or leave that to you.",
        ),
    ] = True
    dist_init_addr: Annotated[
        str | None,
        _remote(
            "--dist-init-addr",
            help="host:port of this machine, where workers on other machines connect.",
        ),
    ] = None
    keys: Annotated[
        Path | None,
        _remote(
            help="Directory of the keys that mlx-dp keys has made. Needed unless --dist-init-addr "
            "is on the loopback address."
        ),
    ] = None
