"""Writes the API's description: `python -m flipwatch.service.openapi > docs/openapi.json`."""

import json
import sys

from .app import openapi_document


def text() -> str:
    """The document as it is committed."""
    return json.dumps(openapi_document(), indent=2, sort_keys=True) + "\n"


if __name__ == "__main__":
    sys.stdout.write(text())
