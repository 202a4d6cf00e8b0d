"""``python -m dschat.plan``: a request as JSON on stdin, the log's lines on stdout."""

import sys

from dschat.plan import Request
from dschat.plan.run import log_lines

if __name__ == "__main__":
    for line in log_lines(Request.from_json(sys.stdin.read())):
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
