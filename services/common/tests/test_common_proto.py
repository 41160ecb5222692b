"""The committed stubs are those of the committed contracts."""

import os
import subprocess
import sys
from pathlib import Path

PROTO = Path(__file__).parents[3] / "proto"


def check(folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "PYTHON": sys.executable,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    return subprocess.run(
        ["bash", str(folder / "generate"), "--check"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_the_generated_stubs_are_up_to_date() -> None:
    result = check(PROTO)
    assert result.returncode == 0, result.stdout + result.stderr


def test_a_changed_contract_is_noticed(tmp_path: Path) -> None:
    for source in [PROTO / "generate", *PROTO.rglob("*.proto"), *(PROTO / "gen").rglob("*.py*")]:
        if "__pycache__" not in source.parts:
            target = tmp_path / source.relative_to(PROTO)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(source.read_bytes())
    assert check(tmp_path).returncode == 0
    contract = tmp_path / "pipelinerl/v1/sample.proto"
    contract.write_text(contract.read_text().replace("uint32 attempt = 4;", "uint32 attempt = 14;"))
    result = check(tmp_path)
    assert result.returncode == 1
    assert "run proto/generate" in result.stderr
