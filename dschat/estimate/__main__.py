"""``python -m dschat.estimate``: a request as JSON on stdin, the log's lines on stdout.

Exit code 2 and one line on standard error where a step could not run at all.
"""

import sys

from dschat.distributed import entrypoint
from dschat.estimate import Request
from dschat.estimate.run import log_lines
from dschat.launch.preflight import check


def main() -> None:
    request = Request.from_json(sys.stdin.read())
    check(request)
    for line in log_lines(request):
        sys.stdout.write(line + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    entrypoint.run(main)
