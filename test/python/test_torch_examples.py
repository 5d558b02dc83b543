# SPDX-License-Identifier: Apache-2.0
"""The examples for torch, started by torchrun and by `heddle run`."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

EXAMPLES = pathlib.Path(__file__).resolve().parent.parent.parent / "examples"
LAUNCHERS = {
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "{n}"],
    "heddle": [sys.executable, "-m", "heddle", "run", "-n", "{n}", "--", sys.executable],
}
SAYS = {"train_ddp": "equal on all", "train_fsdp": "loss", "layouts": "all right"}


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize(("name", "ranks"), [("train_ddp", 3), ("train_fsdp", 2), ("layouts", 2)])
def test_example(launcher: str, name: str, ranks: int) -> None:
    path = EXAMPLES / f"{name}.py"
    assert len(path.read_text().splitlines()) < 100
    command = [word.format(n=ranks) for word in LAUNCHERS[launcher]] + [str(path)]
    done = subprocess.run(
        command,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == 0 and SAYS[name] in done.stdout, done.stdout + done.stderr
