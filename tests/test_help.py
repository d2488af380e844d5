# SPDX-License-Identifier: Apache-2.0
"""Every helper's --help tells its exit codes, on a machine without torch too."""

import subprocess
import sys
from pathlib import Path

import pytest

HELPERS = Path(__file__).parents[1] / "helpers"


@pytest.mark.parametrize("name", sorted(path.name for path in HELPERS.glob("*.py")))
def test_help_names_the_exit_codes_and_needs_no_torch(tmp_path, name):
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')\n")
    done = subprocess.run(
        [sys.executable, str(HELPERS / name), "--help"],
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1", "HOME": str(tmp_path)},
    )
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert "Exit codes" in done.stdout


def test_every_option_of_delete_graphs_has_a_text(capsys):
    import delete_graphs

    with pytest.raises(SystemExit) as stop:
        delete_graphs.main(["--help"])
    out = capsys.readouterr().out
    assert stop.value.code == 0
    assert "75   teardown was still hanging" in out
    options = out.rpartition("options:")[2].split()
    assert " ".join(options).count("--limit SECONDS time from a fault to the end of the process") == 1
