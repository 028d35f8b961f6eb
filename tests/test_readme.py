"""The README's program runs as written and learns something."""

import os
import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


def test_the_program_of_the_readme(tmp_path):
    (program,) = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    run = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    losses = [float(loss) for loss in re.findall(r"^\d+ (\d+\.\d+)$", run.stdout, flags=re.MULTILINE)]
    assert len(losses) == 20 and losses[-1] < losses[0] - 1, losses
    assert all(f"stage{i}" in run.stdout for i in range(4))
