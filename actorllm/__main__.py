"""`python -m actorllm`: the same as the `actorllm` command."""

from __future__ import annotations

import sys

from actorllm.cli import main

if __name__ == "__main__":
    sys.exit(main())
