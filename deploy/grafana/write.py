"""Write the Grafana boards to helm/flipwatch/files/dashboards, or say whether the files there are up to date.

python deploy/grafana/write.py [--check]
"""

import json
import sys
from pathlib import Path

from fleet import fleet
from server import server

FOLDER = Path(__file__).resolve().parents[2] / "helm" / "flipwatch" / "files" / "dashboards"


def main(check: bool) -> int:
    """0: written, or up to date; 1: not up to date."""
    old = []
    for board in (server(), fleet()):
        path = FOLDER / f"{board['uid']}.json"
        text = json.dumps(board, indent=2) + "\n"
        if check:
            if not path.exists() or path.read_text(encoding="utf-8") != text:
                old.append(path.name)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    if old:
        print(f"{', '.join(old)}: not as deploy/grafana/write.py makes it; run it.", file=sys.stderr)
    return 1 if old else 0


if __name__ == "__main__":
    sys.exit(main(check="--check" in sys.argv[1:]))
