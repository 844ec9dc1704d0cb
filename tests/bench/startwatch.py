"""In the box: how long programs take, in turns, so that what the machine does beside meets all of them.

Arguments: how often, and {name: argv} as JSON. Prints {name: [seconds, ...]}.
"""

import json
import subprocess
import sys
import time

PROGRAMS: dict[str, list[str]] = json.loads(sys.argv[2])
found: dict[str, list[float]] = {name: [] for name in PROGRAMS}
for turn in range(int(sys.argv[1]) + 1):
    for name, argv in PROGRAMS.items():
        began = time.monotonic()
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, check=False)
        if done.returncode != 0:
            sys.exit(f"{name} ended with {done.returncode}: {done.stderr.decode()[-500:]}")
        # The first turn fills caches.
        if turn:
            found[name].append(time.monotonic() - began)
print(json.dumps(found))
