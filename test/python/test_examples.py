# SPDX-License-Identifier: Apache-2.0
"""The examples, started as users start them, and the Python programs in the documents."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
HEDDLE_RUN = [sys.executable, "-m", "heddle", "run", "-n", "4", "--timeout", "100", "--"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4", "--standalone"]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.M | re.S)
EXAMPLES = {
    "numpy_allreduce": "rank 3 of 4: the sum is 10",
    "grow": "4 ranks at the end",
    "moe_overlap": "rank 3 of 4: 5 steps are right",
}


def go(command: list[str]) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("launcher", ["heddle", "torchrun"])
def test_example(name: str, launcher: str) -> None:
    path = ROOT / "examples" / f"{name}.py"
    assert len(path.read_text().splitlines()) < 100
    command = [*HEDDLE_RUN, sys.executable, str(path)] if launcher == "heddle" else [*TORCHRUN, str(path)]
    assert EXAMPLES[name] in go(command)


@pytest.mark.parametrize("document", ["README.md", "doc/guide.md"])
def test_programs_in_documents(document: str, tmp_path: pathlib.Path) -> None:
    programs = [block for block in BLOCK.findall((ROOT / document).read_text()) if "import" in block]
    assert programs
    for number, text in enumerate(programs):
        path = tmp_path / f"program_{number}.py"
        path.write_text(text)
        go([sys.executable, "-m", "heddle", "run", "-n", "2", "--timeout", "60", "--", sys.executable, str(path)])
