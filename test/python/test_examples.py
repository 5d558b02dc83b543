# SPDX-License-Identifier: Apache-2.0
"""The examples, started by torchrun and by `heddle run`, and the Python programs in the documents."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
EXAMPLES = ROOT / "examples"
BLOCK = re.compile(r"^```python\n(.*?)^```", re.M | re.S)
LAUNCHERS = {
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "{n}"],
    "heddle": [sys.executable, "-m", "heddle", "run", "-n", "{n}", "--", sys.executable],
}
SAYS = {
    "train_ddp": "equal on all",
    "train_fsdp": "loss",
    "layouts": "all right",
    "numpy_allreduce": "rank 3 of 4: the sum is 10",
    "grow": "all 4 ranks were there",
    "moe_overlap": "rank 1 of 2: 5 steps are right",
}
RANKS = {"train_ddp": 3, "train_fsdp": 2, "layouts": 2, "moe_overlap": 2}


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("name", SAYS)
def test_example(launcher: str, name: str) -> None:
    path = EXAMPLES / f"{name}.py"
    assert len(path.read_text().splitlines()) < 100
    command = [word.format(n=RANKS.get(name, 4)) for word in LAUNCHERS[launcher]] + [str(path)]
    done = subprocess.run(
        command,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == 0 and SAYS[name] in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("document", ["README.md", "doc/guide.md"])
def test_programs_in_documents(document: str, tmp_path: pathlib.Path) -> None:
    programs = [block for block in BLOCK.findall((ROOT / document).read_text()) if "import" in block]
    assert programs
    for number, text in enumerate(programs):
        path = tmp_path / f"program_{number}.py"
        path.write_text(text)
        command = [sys.executable, "-m", "heddle", "run", "-n", "2", "--timeout", "60", "--", sys.executable, str(path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=90)
        assert done.returncode == 0, f"{text}\n{done.stdout}{done.stderr}"
