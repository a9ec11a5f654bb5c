"""A container's health check: exit 0 if the process at HEADWAY_HEALTH_PORT answers on /healthz."""

import os
import sys
import urllib.error
import urllib.request

url = f"http://127.0.0.1:{os.environ['HEADWAY_HEALTH_PORT']}/healthz"
try:
    with urllib.request.urlopen(url, timeout=4) as answer:
        sys.exit(0 if answer.status == 200 else f"{url} answers {answer.status}")
except (urllib.error.URLError, OSError) as error:
    sys.exit(f"{url}: {error}")
