"""Picks the stages that are shipped with the demo, those that take long to measure, out of a whole artifacts folder.

    tide-precompute assets/demo/tide-8e --base assets/demo/base --out artifacts/whole
    python -m assets.demo_artifacts artifacts/whole

`make artifacts` takes them from assets/demo/artifacts and measures the others.
"""

import json
import shutil
import sys
from pathlib import Path

from precompute import Artifacts
from precompute.store import MANIFEST_FILE

SHIPPED = ("maps", "ablation", "compression", "rare_tokens")
TARGET = Path(__file__).parent / "demo" / "artifacts"


def main(whole: Path) -> None:
    """Copies the stages and a manifest that names them alone.

    Args:
        whole: folder with the artifacts of the demo's TIDE checkpoint, beside `assets`.
    """
    manifest = Artifacts.open(whole).manifest
    for stage in SHIPPED:
        shutil.rmtree(TARGET / stage, ignore_errors=True)
        shutil.copytree(whole / stage, TARGET / stage)
    for entry in (manifest["checkpoint"], manifest["base"]):
        name = Path(entry["path"]).name
        entry["path"] = f"../{name}"  # seen from where they are shipped
    manifest["stages"] = {name: manifest["stages"][name] for name in SHIPPED}
    (TARGET / MANIFEST_FILE).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
